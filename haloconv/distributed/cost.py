"""A model of what a sharded convolution exchanges: messages and bytes, from the arithmetic of its rims alone."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from haloconv.distributed.exchange import Traffic, convolution_traffic
from haloconv.functional import make_spec
from haloconv.problem import PaddingMode, Pair
from haloconv.rims import Axis, axis_of, even_bounds


class ExchangeCost(NamedTuple):
    """What a convolution of a sharded image exchanges, by a model; ``print`` shows it. Nothing of it was measured.

    Attributes:
        ranks: the number of shards.
        messages: the most that a shard receives in a forward pass, one from each shard that it needs pixels of; in
            the backward pass it sends as many.
        halo_bytes: the most that a shard receives in a forward pass, in bytes; in the backward pass it sends as many.
        weight_bytes: the gradients of weight and bias, which are summed over all shards once, in bytes.
        interior: the least fraction of its outputs that a shard computes before anything has arrived, from 0 to 1.
    """

    ranks: int
    messages: int
    halo_bytes: int
    weight_bytes: int
    interior: float

    def forward_us(self, latency_us: float, gigabytes_per_s: float) -> float:
        """Microseconds from the first message to the last over links of this latency and rate, in one direction."""
        return latency_us + self.halo_bytes / gigabytes_per_s / 1e3 if self.messages else 0.0

    def backward_us(self, latency_us: float, gigabytes_per_s: float) -> float:
        """Microseconds of the halos' way back and of the sum of gradients, as a ring sums, one after the other."""
        if self.ranks < 2:
            return 0.0
        ring = 2 * (self.ranks - 1) * (latency_us + self.weight_bytes / self.ranks / gigabytes_per_s / 1e3)
        return self.forward_us(latency_us, gigabytes_per_s) + ring

    def __str__(self) -> str:
        return (
            f"{self.ranks} shards; the most that one of them has to do:\n"
            f"  halos, forward:  {self.messages} messages, {self.halo_bytes:,} bytes; as many back in backward\n"
            f"  gradients of weights:  {self.weight_bytes:,} bytes, summed over {self.ranks} ranks once\n"
            f"  outputs that wait for nobody:  {100 * self.interior:.1f} %"
        )


def exchange_cost(
    layer: torch.nn.Conv2d,
    shape: tuple[int, int, int, int],
    shards: Pair,
    padding_mode: PaddingMode | tuple[PaddingMode, PaddingMode] | None = None,
) -> ExchangeCost:
    """What a layer exchanges of images that are sharded.

    Args:
        layer: its filter, stride, padding, dilation and dtype count.
        shape: (N, C, H, W) of all shards together.
        shards: along rows and along columns.
        padding_mode: as for haloconv.distributed.conv2d; None for the layer's own.

    Raises:
        RuntimeError: the layer's padding or filter does not fit the image.
        ValueError: ``padding_mode`` is none of the known ones.
    """
    traffics = _traffics(layer, shape, shards, padding_mode)
    pixels = shape[0] * shape[1] * layer.weight.element_size()
    received = [
        sum(down.length * across.length for rectangles in each.asked.values() for down, across in rectangles)
        for each in traffics
    ]
    inside = [_interior(each) for each in traffics if 0 not in each.cut.outputs]
    weights = [each for each in (layer.weight, layer.bias) if each is not None]
    return ExchangeCost(
        len(traffics),
        max(len(each.asked) for each in traffics),
        pixels * max(received),
        sum(each.numel() * torch.promote_types(each.dtype, torch.float32).itemsize for each in weights),
        min(inside, default=0.0),
    )


def _traffics(
    layer: torch.nn.Conv2d,
    shape: tuple[int, int, int, int],
    shards: Pair,
    padding_mode: PaddingMode | tuple[PaddingMode, PaddingMode] | None,
) -> list[Traffic]:
    """What each shard of the layer asks of others and sends, for images of this ``shape`` (N, C, H, W)."""
    modes: Any = layer.padding_mode if padding_mode is None else padding_mode
    first, second = modes if isinstance(modes, tuple) else (modes, modes)
    kernel = tuple(layer.kernel_size)
    spec = make_spec(layer.stride, layer.padding, layer.dilation, layer.groups, kernel, None, "auto", False)
    top, bottom, left, right = spec.padding
    axes: tuple[Axis, Axis] = (
        axis_of(shape[2], kernel[0], spec.stride[0], spec.dilation[0], (top, bottom), first),
        axis_of(shape[3], kernel[1], spec.stride[1], spec.dilation[1], (left, right), second),
    )
    if min(axis.outputs for axis in axes) < 1:
        raise RuntimeError(f"the filter {list(kernel)} does not fit an image of {list(shape[2:])}")
    inputs = (even_bounds(axes[0].extent, shards[0]), even_bounds(axes[1].extent, shards[1]))
    outputs = (even_bounds(axes[0].outputs, shards[0]), even_bounds(axes[1].outputs, shards[1]))
    places = [(row, column) for row in range(shards[0]) for column in range(shards[1])]
    return [convolution_traffic(axes, inputs, outputs, place) for place in places]


def _interior(traffic: Traffic) -> float:
    piece = traffic.cut.interior
    if piece is None:
        return 0.0
    return (piece.rows.end - piece.rows.begin) * (piece.columns.end - piece.columns.begin) / prod(traffic.cut.outputs)
