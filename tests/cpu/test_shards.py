"""Shards of one process: their outputs and gradients, put together, are those of the image that they are parts of."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from haloconv.bench.cut_layer import InTurn
from haloconv.problem import PADDING_MODES, ConvSpec
from haloconv.rectangles import give
from haloconv.rims import axis_of, cut_of, even_bounds, output_bounds
from haloconv.strips import Job, convolve_cut
from tests.cpu.test_rims import integers

Tensor = torch.Tensor


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(
    ("stride", "dilation", "mesh"), [(1, 1, (2, 2)), (2, 1, (1, 3)), (3, 2, (2, 2)), (2, 3, (3, 1))]
)
def test_shards_are_parts_of_the_whole(mode: Any, stride: int, dilation: int, mesh: tuple[int, int]) -> None:
    """Outputs, and gradients: the pixels of a shard get theirs from the shard itself, and from those that read them."""
    torch.manual_seed(8)
    x, w = integers(1, 2, 13, 12), integers(2, 2, 3, 4)
    axes = tuple(axis_of(e, t, stride, dilation, (2, 1), mode) for e, t in zip((13, 12), (3, 4), strict=True))
    inputs = tuple(even_bounds(axis.extent, count) for axis, count in zip(axes, mesh, strict=True))
    outputs = tuple(output_bounds(axis, bounds) for axis, bounds in zip(axes, inputs, strict=True))
    places = [*product(*map(range, mesh))]

    def part(tensor: Tensor, bounds: Any, place: tuple[int, int]) -> Tensor:
        rows, columns = (slice(each[at], each[at + 1]) for each, at in zip(bounds, place, strict=True))
        return tensor[:, :, rows, columns]

    leaf = x.clone().requires_grad_()
    image = leaf
    for sides in ((0, 0, 2, 1), (2, 1, 0, 0)):
        image = torch.nn.functional.pad(image, sides, "constant" if mode == "zeros" else mode)
    want = torch.conv2d(image, w.requires_grad_(), None, stride, 0, dilation)
    dy = integers(*want.shape)
    want_dx, want_dw = torch.autograd.grad(want, (leaf, w), dy)
    shards = {place: part(x, inputs, place).contiguous().requires_grad_() for place in places}
    exchanges, dx, dw = [], {}, torch.zeros_like(w)
    spec = ConvSpec((stride, stride), (0,) * 4, (dilation, dilation))
    for place, shard in shards.items():
        cut = cut_of(axes, inputs, outputs, place)
        exchanges.append(InTurn(cut, place, shards))
        y = convolve_cut(shard, w, None, Job(cut, place, spec, exchanges[-1]))
        assert torch.equal(y, part(want, outputs, place))
        dx[place], own_dw = torch.autograd.grad(y, (shard, w), part(dy, outputs, place))
        dw += own_dw
    for owner, block, gradient in [each for exchange in exchanges for each in exchange.owed]:
        give(dx[owner], block, gradient)
    assert torch.equal(dw, want_dw) and all(torch.equal(dx[at], part(want_dx, inputs, at)) for at in places)
