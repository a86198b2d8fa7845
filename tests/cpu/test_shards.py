"""Shards of one process: their outputs and gradients, put together, are those of the image that they are parts of."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from haloconv.bench.cut_layer import InTurn
from haloconv.emulator import emulated_device
from haloconv.families.halo_sm90.conv import conv_edges
from haloconv.problem import PADDING_MODES, ConvSpec
from haloconv.rectangles import give
from haloconv.rims import axis_of, cut_of, even_bounds, output_bounds
from haloconv.strips import Job, convolve_cut
from tests.cpu.test_rims import integers
from tests.launches import launched

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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("modes", [("zeros", "zeros"), ("circular", "circular"), ("reflect", "replicate")])
def test_bands_of_rows_are_convolved_with_their_halo_in_one_launch(
    modes: Any, memory_format: torch.memory_format, emulator_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first band begins with rows of zeros, or with rows of its own; the last one is lower than the others."""
    torch.manual_seed(9)
    monkeypatch.setattr(conv_edges, "MOST_COST", math.inf)  # however slow
    extents, taps, dilation = (19, 24), (3, 5), (2, 1)
    x, w = integers(2, 16, *extents), integers(24, 16, *taps)
    axes = tuple(
        axis_of(e, t, 1, d, (2, 2), mode) for e, t, d, mode in zip(extents, taps, dilation, modes, strict=True)
    )
    inputs = even_bounds(extents[0], 3), (0, extents[1])
    outputs = tuple(map(output_bounds, axes, inputs))
    image = x
    for mode, sides in zip(modes, ((0, 0, 2, 2), (2, 2, 0, 0)), strict=True):
        image = torch.nn.functional.pad(image, sides, "constant" if mode == "zeros" else mode)
    want = torch.conv2d(image, w, None, 1, 0, dilation)
    half = x.half().contiguous(memory_format=memory_format)
    bands = [half[:, :, begin:end].contiguous(memory_format=memory_format) for begin, end in pairwise(inputs[0])]
    shards = {(index, 0): band for index, band in enumerate(bands)}
    spec = ConvSpec(dilation=dilation, family="halo_sm90", strict=True)
    with emulated_device(), launched() as names:
        for place, shard in shards.items():
            cut: Any = cut_of(axes, inputs, outputs, place)
            job = Job(cut, place, spec, InTurn(cut, place, shards), ("zeros", modes[1]))
            y = convolve_cut(shard, w.half(), None, job)
            assert torch.equal(y.double(), want[:, :, outputs[0][place[0]] : outputs[0][place[0] + 1]])
    assert names == {"halo_sm90/pack", "halo_sm90/conv_edges"}
