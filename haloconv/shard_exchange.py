"""What a convolution of one shard of an image asks of code that knows the other shards, if there are any."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from haloconv.rectangles import Messages, Rectangle

Tensor = torch.Tensor
Gradients = tuple[list[tuple[Rectangle, Tensor]], tuple[Tensor | None, ...]]
"""Gradients of rectangles of a shard, which others have computed; and those of weights, summed over all shards."""


class Exchange(Protocol):
    """How shards get rectangles of each other. What is asked for at once arrives when it is waited for."""

    def start(self, x: Tensor) -> Callable[[], Messages]:
        """Send the rectangles of x that others need, and ask for those that this shard needs."""

    def start_back(self, sent: Messages | None, like: Tensor, *of_weights: Tensor | None) -> Callable[[], Gradients]:
        """Send gradients of rectangles to their owners, and ask for those of the rectangles that ``start`` sent.

        With None no shard sends any. Gradients of weights, which all shards have alike, are summed over all shards.
        """

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

    def start_back(self, sent: Messages | None, like: Tensor, *of_weights: Tensor | None) -> Callable[[], Gradients]:
        return lambda: ([], of_weights)

    def replicated(self, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        return weights

    def tied(self, y: Tensor, *others: Tensor | None) -> Tensor:
        return y

    def telling(self) -> AbstractContextManager[None]:
        return nullcontext()
