"""A copy of what is gathered with channels as neighbours (families/halo_sm90/wgrad/arrange.cu makes it).

It is launched before the pack, which begins when the copy is complete, and so before the convolution, which may begin
before the pack ends.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.conv.form import Form
from haloconv.families.halo_sm90.wgrad.arrange import source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.layout import strides_of
from haloconv.problem import Problem, Request

_THREADS, _PIXELS, _CHANNEL_BYTES = 256, 64, 128
MOST_BYTES = 64 << 20  # of a copy
_LAUNCH_CYCLES, _BYTES_OF_CYCLE = 3500, 2900  # as in wgrad/arrange.py; read or written by all, mostly of the L2


def elems_of(form: Form) -> int:
    """Elements of dy."""
    return form.n * form.groups * form.channels * form.vertical.in_extent * form.horizontal.in_extent


def why_no_copy(form: Form, elem_bytes: int) -> str | None:
    """None if dy may be copied, else a sentence that says why not."""
    if not form.interleaves:
        return "the rows of M are not those of residue classes"
    if form.channels * elem_bytes % 16:
        return "TMA takes whole groups of 16 bytes"
    return None if elems_of(form) * elem_bytes <= MOST_BYTES else f"a copy has at most {MOST_BYTES} bytes"


def cycles(form: Form, elem_bytes: int) -> float:
    """Cycles that the copy takes, by the cost model. The rate is of a probe on an H200, of copies of 4 to 17 MB."""
    return cycles_of(elems_of(form) * elem_bytes)


def cycles_of(copy_bytes: int) -> float:
    """Cycles for a copy of so many bytes."""
    return _LAUNCH_CYCLES + 2 * copy_bytes / _BYTES_OF_CYCLE


def strides(problem: Problem) -> tuple[int, ...]:
    """Strides of the copy, in elements, of (n, k, p, q)."""
    return strides_of(problem.y_shape, "nhwc")


class Copy(NamedTuple):
    """``launch(dy, dy, copy, copy)``, and elements of the copy."""

    launch: Launch
    elems: int

    def __call__(self, dy: torch.Tensor) -> torch.Tensor:
        """The copy, as memory."""
        copy = dy.new_empty(self.elems)
        self.launch(dy.data_ptr(), dy.data_ptr(), copy.data_ptr(), copy.data_ptr())
        return copy


def bind(request: Request) -> Copy:
    """What copies dy of a request."""
    return copy_of(request, request.problem.y_shape)


def copy_of(request: Request, shape: tuple[int, int, int, int]) -> Copy:
    """What copies the first tensor of a request: to the kernel the first of two, of which the second has no blocks."""
    problem = request.problem
    images, channels, rows, cols = shape
    to_group, to_c, _, to_pixel = strides_of(shape, "nhwc")
    channel_blocks = ceil_div(channels * problem.dtype.itemsize, _CHANNEL_BYTES)
    pixel_blocks = ceil_div(rows * cols, _PIXELS)
    tensor: dict[str, Value] = {
        **dict(zip("nchw", request.first.strides, strict=True)),
        **{"to_group": to_group, "to_c": to_c, "to_pixel": to_pixel},
        **{"channels": channels, "rows": rows, "cols": cols, "shift": 0},
        **{"channel_blocks": channel_blocks, "pixel_blocks": pixel_blocks},
    }
    blocks = images * channel_blocks * pixel_blocks
    fields: dict[str, Value] = {
        "tensors": [tensor, tensor],
        **{"images": images, "side_by_side": 1, "cell": cols, "x_blocks": blocks},
    }
    launch = Launch(source(problem), request.device, LaunchShape(blocks, _THREADS), fields)
    return Copy(launch, prod(shape))
