"""halo_sm90/implicit_gemm on the emulator: random problems, whose results are the reference's bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from haloconv import emulator
from haloconv.device import watched
from haloconv.emulator import emulated_device
from haloconv.families.base import Config
from haloconv.families.halo_sm90.pointwise import implicit_gemm
from haloconv.plan import form_of
from haloconv.problem import Problem, Request, output_extent

MISSING = emulator.available()
CPU = torch.device("cpu")
DIRECTIONS = ("fprop", "dgrad")
MEMORY = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
formats = st.sampled_from(tuple(MEMORY.values()))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Layers that the kernel may take: most of them have ends of rows and images within tiles."""
    dtype = draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
    direction = draw(st.sampled_from(DIRECTIONS))
    channels, layout = st.sampled_from((8, 16, 40, 72, 136)), draw(st.sampled_from(tuple(MEMORY)))
    r, s = draw(st.sampled_from(((3, 3), (1, 3), (3, 1), (2, 2), (5, 3))))
    dil = draw(st.tuples(st.sampled_from((1, 2, 3, 7)), st.sampled_from((1, 2, 5))))
    sides = [st.sampled_from((0, 1, 4, (taps - 1) * d // 2)) for taps, d in ((r, dil[0]), (s, dil[1])) for _ in (0, 1)]
    padding = draw(st.tuples(*sides))
    stride = draw(st.sampled_from(((1, 1), (2, 2), (1, 3)))) if direction == "fprop" else (1, 1)
    n, h, w = draw(st.integers(1, 3)), draw(st.sampled_from((1, 4, 7, 12))), draw(st.sampled_from((3, 7, 13, 16, 70)))
    p = output_extent(h, sum(padding[:2]), r, stride[0], dil[0])
    q = output_extent(w, sum(padding[2:]), s, stride[1], dil[1])
    assume(min(p, q) > 0)
    return Problem(
        direction, n, draw(channels), h, w, draw(channels), r, s, stride, padding, dil, dtype=dtype, layout=layout,
        bias=direction == "fprop" and draw(st.booleans()), precision="tf32" if dtype == torch.float32 else "ieee",
    )  # fmt: skip


def _exact(one: Problem, operands: tuple[torch.Tensor, torch.Tensor], b: torch.Tensor | None) -> torch.Tensor:
    (top, bottom, left, right), (first, w) = one.padding, (each.double() for each in operands)
    x = first if one.direction == "fprop" else torch.zeros(one.x_shape, dtype=torch.double, requires_grad=True)
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    y = torch.nn.functional.conv2d(padded, w, None if b is None else b.double(), one.stride, 0, one.dilation)
    return (y if one.direction == "fprop" else torch.autograd.grad(y, x, first)[0]).to(one.dtype)


@pytest.mark.of_kernel("halo_sm90/implicit_gemm")
@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
@settings(deadline=None, max_examples=60)
@given(st.data(), problems(), formats, formats, st.sampled_from((2, 5, 132)), st.booleans())
def test_random_problems_have_the_reference_s_bits(
    data: st.DataObject, one: Problem, x_memory: torch.memory_format, w_memory: torch.memory_format, sm_count: int,
    in_cluster: bool,
) -> None:  # fmt: skip
    """Small integers in any layouts, with any tile, in clusters or not, on few multiprocessors or all."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 16)))

    def integers(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(one.dtype)

    first = integers(one.x_shape if one.direction == "fprop" else one.y_shape)
    first = first.contiguous(memory_format=x_memory)
    w = integers(one.w_shape).contiguous(memory_format=w_memory)
    b = integers((one.k,)) if one.bias else None
    with emulated_device(sm_count=sm_count):
        request = Request(one, form_of(first), form_of(w), one.layout, CPU)
        assume(implicit_gemm.why_not(request) is None)
        every = implicit_gemm.all_tiles(request)
        tile = data.draw(st.sampled_from([each for each in every if each.in_cluster == in_cluster] or every))
        call = watched(implicit_gemm.bind(request, Config(implicit_gemm.KERNEL, "drawn", tile)), CPU)
        got = call(first, w, b) if one.direction == "fprop" else call(first, w)
    assert got.is_contiguous(memory_format=MEMORY[one.layout])
    assert torch.equal(got, _exact(one, (first, w), b))
