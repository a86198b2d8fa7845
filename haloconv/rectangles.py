"""Rectangles of a shard's pixels: taken out, given back, and sent to other shards."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import torch

from haloconv.rims import NOBODY, Cut, Place, Run

Tensor = torch.Tensor
Rectangle = tuple[Run, Run]
"""Pixels of one shard: a run of rows and a run of columns."""
Messages = dict[Place, Tensor]
"""For each other shard, its rectangles one after the other as one flat tensor."""


def take(x: Tensor, rectangle: Rectangle) -> Tensor:
    """The pixels of a rectangle: a view, unless it is mirrored."""
    for dim, run in zip((2, 3), rectangle, strict=True):
        if run.step == 1:
            x = x.narrow(dim, run.start, run.length)
        elif run.step == -1:
            x = x.narrow(dim, run.start - run.length + 1, run.length).flip(dim)
        else:
            x = x.narrow(dim, run.start, 1).expand(*x.shape[:dim], run.length, *x.shape[dim + 1 :])
    return x


def give(dx: Tensor, rectangle: Rectangle, gradient: Tensor) -> None:
    """Add the gradient of a rectangle to that of the pixels that ``take`` took."""
    for dim, run in zip((2, 3), rectangle, strict=True):
        length = run.length if run.step else 1
        dx = dx.narrow(dim, run.start - (length - 1 if run.step == -1 else 0), length)
        if run.step == -1:
            gradient = gradient.flip(dim)
        elif run.step == 0:
            gradient = gradient.sum(dim, keepdim=True)
    dx.add_(gradient)


@torch.no_grad()
def packed(x: Tensor, rectangles: list[Rectangle]) -> Tensor:
    """The message of rectangles of x, to be ``split``: each is written once, where it goes."""
    areas = sum(down.length * across.length for down, across in rectangles)
    message = x.new_empty(x.shape[0] * x.shape[1] * areas)
    for part, rectangle in zip(split(message, rectangles, x), rectangles, strict=True):
        part.copy_(take(x, rectangle))
    return message


def owner_of(rectangle: Rectangle) -> Place | None:
    """The shard that has the pixels; None for zeros."""
    down, across = rectangle
    return None if NOBODY in (down.owner, across.owner) else (down.owner, across.owner)


@lru_cache(maxsize=4096)
def needed(cut: Cut, place: Place) -> dict[Place, list[Rectangle]]:
    """For each other shard, the rectangles of it that the rims of a shard need, in order; not to be changed."""
    found: dict[Place, list[Rectangle]] = defaultdict(list)
    for piece in cut.rims:
        for *_, down, across in piece.rectangles():
            owner = owner_of((down, across))
            if owner is not None and owner != place:
                found[owner].append((down, across))
    return dict(found)


def split(message: Tensor, rectangles: list[Rectangle], like: Tensor) -> list[Tensor]:
    """The rectangles of a flat message, each (N, C, rows, columns) with the N and C of ``like``."""
    shapes = [(*like.shape[:2], down.length, across.length) for down, across in rectangles]
    parts = message.split([torch.Size(shape).numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
