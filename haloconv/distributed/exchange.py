"""How the shards of an image get pixels of each other: haloconv.shard_exchange.Exchange on torch.distributed.

Halos go by batch_isend_irecv, one message from each shard to each that needs something of it: on CUDA devices on a
stream of its own. Gradients take the way back. Those of weights are summed over all ranks by one all_reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from haloconv.distributed.group import Group, RankError, agree, numbered, others_there, ranks_along
from haloconv.distributed.image import Image
from haloconv.rectangles import Messages, Rectangle, needed, packed, split
from haloconv.rims import Axis, Bounds, Cut, Piece, Place, Window, cut_of, window_of
from haloconv.shard_exchange import Gradients

Tensor = torch.Tensor
Pending = Callable[[], Messages]
Interval = tuple[int, int]


class Traffic(NamedTuple):
    """What a shard computes, the rectangles that it asks others for, and those that they ask it for.

    ``is_any`` if any shard asks another.
    """

    cut: Cut
    asked: dict[Place, list[Rectangle]]
    sent: dict[Place, list[Rectangle]]
    is_any: bool


def _traffic(cuts: dict[Place, Cut], place: Place) -> Traffic:
    wanted = {other: needed(cut, other) for other, cut in cuts.items()}
    asked = {owner: wanted[place][owner] for owner in sorted(wanted[place])}
    sent = {other: rectangles[place] for other, rectangles in sorted(wanted.items()) if place in rectangles}
    return Traffic(cuts[place], asked, sent, any(wanted.values()))


def _places(inputs: tuple[Bounds, Bounds]) -> list[Place]:
    rows, columns = (range(len(bounds) - 1) for bounds in inputs)
    return [(row, column) for row in rows for column in columns]


@lru_cache(maxsize=4096)
def convolution_traffic(
    axes: tuple[Axis, Axis], inputs: tuple[Bounds, Bounds], outputs: tuple[Bounds, Bounds], place: Place
) -> Traffic:
    """The traffic of a convolution whose interior and rims are apart."""
    return _traffic({each: cut_of(axes, inputs, outputs, each) for each in _places(inputs)}, place)


@lru_cache(maxsize=4096)
def window_traffic(
    axes: tuple[Axis, Axis],
    inputs: tuple[Bounds, Bounds],
    intervals: tuple[tuple[Interval, ...], tuple[Interval, ...]],
    place: Place,
) -> Traffic:
    """The traffic where each shard needs all that its own interval of outputs reads, as one image.

    The one rim of its cut is that image.
    """
    windows: list[list[Window]] = [
        [window_of(axis, bounds, index, each) for index, each in enumerate(asked)]
        for axis, bounds, asked in zip(axes, inputs, intervals, strict=True)
    ]
    cuts = {}
    for row, column in _places(inputs):
        piece = Piece(windows[0][row], windows[1][column])
        extents = (piece.rows.end, piece.columns.end)
        batches = () if 0 in extents else ((piece,),)
        cuts[row, column] = Cut(extents, None, None, batches, batches)
    return _traffic(cuts, place)


class MeshExchange:
    """The Exchange of one call on one shard. ``call`` says in words what all ranks do."""

    def __init__(self, image: Image, traffic: Traffic, call: str) -> None:
        self.traffic, self.place, self.everyone = traffic, image.place, image.all_ranks()
        self.call = numbered(call, self.everyone)
        self.image = image

    def start(self, x: Tensor) -> Pending:
        if not self.traffic.is_any:
            return dict
        assert self.everyone is not None
        agree(self.everyone, self.call)
        rectangles, pixels = self.traffic.sent, x.shape[0] * x.shape[1]
        expected = {owner: pixels * _area(each) for owner, each in self.traffic.asked.items()}

        def pack() -> Messages:
            return {other: packed(x, rectangles[other]) for other in rectangles}

        return self._exchanged(pack, expected, x)

    def start_back(self, sent: Messages | None, like: Tensor, *of_weights: Tensor | None) -> Callable[[], Gradients]:
        sends, given = sent is not None and self.traffic.is_any, [each for each in of_weights if each is not None]
        if self.everyone is None or not (sends or given):
            return lambda: ([], of_weights)
        agree(self.everyone, f"gradients of {'x and ' if sends else ''}{len(given)} weights in {self.call}")
        rectangles, pixels = self.traffic.sent, like.shape[0] * like.shape[1]
        expected = {other: pixels * _area(each) for other, each in rectangles.items()} if sends else {}
        arrive = self._exchanged(lambda: sent or {}, expected, like) if sends else dict
        sums = start_sum(given, self.everyone) if given else list

        def gradients() -> Gradients:
            summed = iter(sums())
            found = arrive()
            of_rectangles = [
                pair
                for other in (rectangles if sends else ())
                for pair in zip(rectangles[other], split(found[other], rectangles[other], like), strict=True)
            ]
            return of_rectangles, tuple(None if each is None else next(summed) for each in of_weights)

        return gradients

    def replicated(self, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        found = iter(replicated([each for each in weights if each is not None], self.everyone, self.call))
        return tuple(None if each is None else next(found) for each in weights)

    def tied(self, y: Tensor, *others: Tensor | None) -> Tensor:
        return tied(y, *others)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Raises RankError, as all ranks do, in place of an error that is this rank's alone."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if self.everyone is not None:
                agree(self.everyone, "", error)
            raise

    def _exchanged(self, pack: Callable[[], Messages], expected: dict[Place, int], like: Tensor) -> Pending:
        """Send what ``pack()`` gives, and receive as many elements as ``expected`` from each shard."""
        neighbours, ranks = self.image.spatial_ranks(), self.image.ranks()
        assert neighbours is not None
        data = neighbours.data
        with _beside(like) as join:
            sent = {to: message.contiguous() for to, message in pack().items() if message.numel()}
            found = {owner: like.new_empty(elems) for owner, elems in expected.items()}
            transfers = [dist.P2POp(dist.isend, sent[to], ranks[to], data) for to in sorted(sent)]
            transfers += [
                dist.P2POp(dist.irecv, message, ranks[owner], data)
                for owner, message in sorted(found.items())
                if message.numel()
            ]
            works = []
            if transfers:
                with others_there():
                    works = dist.batch_isend_irecv(transfers)

        def arrive() -> Messages:
            with others_there():
                join([work.wait for work in works], [*sent.values(), *found.values()])
            return found

        return arrive


def _area(rectangles: list[Rectangle]) -> int:
    return sum(down.length * across.length for down, across in rectangles)


@lru_cache(maxsize=16)
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of halos on a device."""
    return torch.cuda.Stream(device)


@contextmanager
def _beside(like: Tensor) -> Iterator[Callable[[Sequence[Callable[..., Any]], Sequence[Tensor]], None]]:
    """On CUDA devices, on another stream behind what was launched so far; the value waits there, and then here."""
    if like.device.type != "cuda":

        def wait_here(waits: Sequence[Callable[..., Any]], buffers: Sequence[Tensor]) -> None:
            for wait in waits:
                wait()

        yield wait_here
        return
    stream, here = stream_of(like.device), torch.cuda.current_stream(like.device)
    stream.wait_stream(here)

    def join(waits: Sequence[Callable[..., Any]], buffers: Sequence[Tensor]) -> None:
        now = torch.cuda.current_stream(like.device)
        with torch.cuda.stream(stream):
            for wait in waits:
                wait()
        now.wait_stream(stream)
        for buffer in buffers:
            buffer.record_stream(now)

    like.record_stream(stream)
    with torch.cuda.stream(stream):
        yield join


def all_gathered(part: Tensor, group: Group) -> Tensor:
    """The parts of all ranks of a group, stacked. The ranks have agreed on it."""
    parts = [torch.empty_like(part) for _ in ranks_along(group.mesh, group.dims)]
    with others_there():
        dist.all_gather(parts, part, group=group.data)
    return torch.stack(parts)


def start_sum(tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
    """Sum tensors over a group, all in one message; 16-bit floats in fp32. The ranks have agreed on it."""
    flat = torch.cat([each.reshape(-1) for each in tensors])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    with others_there():
        work = dist.all_reduce(flat, group=group.data, async_op=True)

    def arrive() -> list[Tensor]:
        assert work is not None
        with others_there():
            work.wait()
        parts = flat.split([each.numel() for each in tensors])
        return [torch.empty_like(each).copy_(part.view(each.shape)) for each, part in zip(tensors, parts, strict=True)]

    return arrive


# --- the same for autograd to see, each function the transpose of another


def replicated(weights: Sequence[Tensor], group: Group | None, call: str) -> list[Tensor]:
    """Tensors that all ranks have alike, whose gradients are the sums of theirs: of all of them in one message."""
    return list(weights if group is None or not weights else _Replicated.apply(group, call, *weights))


def summed(x: Tensor, group: Group | None, call: str) -> Tensor:
    """The sum of a tensor over a group, which all ranks have alike."""
    if group is None:
        return x
    total: Tensor = _Summed.apply(group, call, x)[0]
    return total


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, call: str, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.call = group, call
        return tuple(each.view_as(each) for each in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_Summed.apply(ctx.group, ctx.call, *gradients)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, call: str, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.call = group, call
        agree(group, f"sum of {len(parts)} parts in {call}")  # which have other shapes where images are uneven
        return tuple(start_sum(parts, group)())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_Replicated.apply(ctx.group, ctx.call, *gradients)


def tied(y: Tensor, *others: Tensor | None) -> Tensor:
    """y, whose gradient of any order asks for that of the others, too."""
    recorded = [each for each in others if each is not None and each.requires_grad]
    return _Tied.apply(y, *(_Zeros.apply(torch.Size([0]), each) for each in recorded)) if recorded else y


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *ends: Tensor) -> Tensor:
        ctx.save_for_backward(*ends)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        ends = ctx.saved_tensors
        return dy, *(_Zeros.apply(end.shape, dy, *ends) for end in ends)


class _Zeros(torch.autograd.Function):
    """Zeros that depend on tensors: their gradients are zeros that depend on the gradient."""

    @staticmethod
    def forward(ctx: Any, shape: torch.Size, *on: Tensor) -> Tensor:
        ctx.shapes = [each.shape for each in on]
        return on[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *(_Zeros.apply(shape, gradient) for shape in ctx.shapes)
