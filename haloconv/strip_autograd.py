"""Strips put together of the pixels of shards, as autograd sees them: a linear function and its transpose.

Each is the gradient of the other, so there are gradients of any order. Every pixel is copied once each way. Slices of
PyTorch would each have a gradient as large as the shard, of zeros but for the slice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from haloconv.layout import Layout, strides_of
from haloconv.plan import layout_of
from haloconv.rectangles import Messages, Rectangle, give, needed, owner_of, split, take
from haloconv.rims import Cut, Piece, Place
from haloconv.shard_exchange import Exchange

Tensor = torch.Tensor


def recorded_strips(x: Tensor, cut: Cut, place: Place, exchange: Exchange) -> tuple[tuple[Tensor, ...], Tensor]:
    """The input (N, C, h, w) of each rim of a shard x (N, C, H, W), and an empty tensor.

    What depends on that takes part in the exchange of gradients, also on a shard that has no rims. A strip that is a
    part of the shard is a view of it.
    """
    *strips, empty = _Gather.apply(x, cut, place, exchange)
    return tuple(strips), empty


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, place: Place, exchange: Exchange) -> tuple[Tensor, ...]:
        ctx.asked, ctx.shape, ctx.layout = (cut, place, exchange), tuple(x.shape), layout_of(x)
        missing: list[tuple[Tensor, Place]] = []
        arrive = exchange.start(x)
        strips = [_begun(x, piece, place, ctx.layout, missing) for piece in cut.rims]
        received = received_pixels(arrive(), cut, place, x)
        for view, owner in missing:
            view.copy_(next(received[owner]))
        return *strips, x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _Scatter.apply(*ctx.asked, ctx.shape, ctx.layout, *gradients), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cut: Cut, place: Place, exchange: Exchange, shape: tuple[int, ...], layout: Layout, *gradients: Tensor
    ) -> Tensor:
        ctx.asked = cut, place, exchange
        own: list[tuple[Rectangle, Tensor]] = []
        sent: defaultdict[Place, list[Tensor]] = defaultdict(list)
        for piece, gradient in zip(cut.rims, gradients[:-1], strict=True):
            for view, rectangle in views(gradient, piece):
                owner = owner_of(rectangle)
                if owner == place:
                    own.append((rectangle, view))
                elif owner is not None:
                    sent[owner].append(view.reshape(-1))
        like = gradients[-1].new_empty(()).expand(shape)
        arrive = exchange.start_back({owner: torch.cat(parts) for owner, parts in sent.items()}, like)
        return _added(own, arrive()[0], _empty(shape, layout, like))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, None, None, *_Gather.apply(gradient, *ctx.asked)


def _begun(x: Tensor, piece: Piece, place: Place, layout: Layout, missing: list[tuple[Tensor, Place]]) -> Tensor:
    """The strip of a piece but for what other shards have; ``missing`` gets the views of that, and the owners."""
    part = _part_of_shard(piece, place)
    if part is not None:
        return take(x, part)
    strip = _empty((*x.shape[:2], piece.rows.length, piece.columns.length), layout, x)
    for view, rectangle in views(strip, piece):
        owner = owner_of(rectangle)
        if owner is None:
            view.zero_()
        elif owner == place:
            view.copy_(take(x, rectangle))
        else:
            missing.append((view, owner))
    return strip


def received_pixels(messages: Messages, cut: Cut, place: Place, like: Tensor) -> dict[Place, Iterator[Tensor]]:
    """The rectangles that the rims of a shard need of each other one, in order; N and C are those of ``like``."""
    rectangles = needed(cut, place) if messages else {}
    return {owner: iter(split(message, rectangles.get(owner, []), like)) for owner, message in messages.items()}


def _added(own: list[tuple[Rectangle, Tensor]], arrived: list[tuple[Rectangle, Tensor]], dx: Tensor) -> Tensor:
    """The gradient of a shard: of rectangles of its own, and of those that others have taken. ``dx`` is memory for it.

    The largest rectangle is written, others are added; if there is one and it is all of the shard, that is it.
    """
    own = sorted(own, key=lambda each: each[1].numel(), reverse=True)
    if own and all(run.step == 1 for run in own[0][0]):
        (rectangle, gradient), *own = own
        if gradient.shape == dx.shape and not own and not arrived:
            return gradient
        take(dx, rectangle).copy_(gradient)
        down, across = rectangle
        for around in (dx[:, :, : down.start], dx[:, :, down.start + down.length :]):
            around.zero_()
        for around in (dx[..., : across.start], dx[..., across.start + across.length :]):
            around.zero_()
    else:
        dx.zero_()
    for rectangle, gradient in (*own, *arrived):
        give(dx, rectangle, gradient)
    return dx


def _part_of_shard(piece: Piece, place: Place) -> Rectangle | None:
    """The rectangle of the shard at a place that a piece reads, if it reads that alone and in order."""
    rectangles = [(down, across) for *_, down, across in piece.rectangles()]
    if len(rectangles) == 1 and owner_of(rectangles[0]) == place and all(run.step == 1 for run in rectangles[0]):
        return rectangles[0]
    return None


def views(strip: Tensor, piece: Piece) -> Iterator[tuple[Tensor, Rectangle]]:
    """Each rectangle that a piece reads, and where it is in the strip."""
    for top, left, down, across in piece.rectangles():
        yield strip[:, :, top : top + down.length, left : left + across.length], (down, across)


def _empty(shape: tuple[int, ...], layout: Layout, like: Tensor) -> Tensor:
    return like.new_empty_strided(shape, strides_of(shape, layout))
