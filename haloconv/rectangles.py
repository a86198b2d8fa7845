"""Rectangles of a shard's pixels: taken out, given back, and exchanged with other shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Protocol

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


class Exchange(Protocol):
    """How shards get rectangles of each other. What is asked for at once arrives when it is waited for."""

    def start(self, x: Tensor) -> Callable[[], Messages]:
        """Send the rectangles of x that others need, and ask for those that this shard needs."""

    def start_back(self, sent: Messages, like: Tensor) -> Callable[[], list[tuple[Rectangle, Tensor]]]:
        """Send gradients of rectangles to their owners, and ask for those of the rectangles that ``start`` sent."""

    def differentiable(self, x: Tensor) -> Messages:
        """What ``start`` gives, with gradients of any order; perhaps also an empty one of no use to a rim."""

    def start_sum(self, *gradients: Tensor | None) -> Callable[[], tuple[Tensor | None, ...]]:
        """Sum gradients of weights, which all shards have alike, over all shards."""

    def replicated(self, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        """The weights; their gradients, of any order, are those of all shards together."""

    def tied(self, y: Tensor, *others: Tensor | None) -> Tensor:
        """y, whose gradient asks for that of the others, too, so that all shards exchange the same."""

    def telling(self) -> AbstractContextManager[None]:
        """Inside, what fails here is told to the other shards, which may be waiting for this one."""


class Alone:
    """The Exchange of an image that is one shard."""

    def start(self, x: Tensor) -> Callable[[], Messages]:
        return dict

    def start_back(self, sent: Messages, like: Tensor) -> Callable[[], list[tuple[Rectangle, Tensor]]]:
        return list

    def differentiable(self, x: Tensor) -> Messages:
        return {}

    def start_sum(self, *gradients: Tensor | None) -> Callable[[], tuple[Tensor | None, ...]]:
        return lambda: gradients

    def replicated(self, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        return weights

    def tied(self, y: Tensor, *others: Tensor | None) -> Tensor:
        return y

    def telling(self) -> AbstractContextManager[None]:
        return nullcontext()
