"""What the host halves of several families share: element names, sizes, and the calls that bound kernels become."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import torch

from haloconv.families.base import MOST_CONFIGS, BoundCall
from haloconv.problem import NO_EPILOGUE, Direction, Epilogue, Problem, Request

ELEMENTS = {torch.float32: "float", torch.float64: "double", torch.float16: "hc::fp16", torch.bfloat16: "hc::bf16"}
"""The device code's name of a dtype."""

Item = TypeVar("Item")


def few_apart(ordered: Iterable[Item], kind: Callable[[Item], Hashable], most: int = MOST_CONFIGS) -> list[Item]:
    """The first of each kind, in their order, ``most`` at most: neighbours in a model's order are often the same."""
    found: dict[Hashable, Item] = {}
    for item in ordered:
        if found.setdefault(kind(item), item) is item and len(found) == most:
            break
    return list(found.values())


def epilogue_constants(bias: bool, epilogue: Epilogue = NO_EPILOGUE) -> dict[str, str]:
    """The constants that say what becomes of a sum on its way out, as kernels/activation.cuh names them."""
    affine = "SCALE_AND_BIAS" if epilogue.scale else "BIAS" if bias else "NONE"
    activation = (epilogue.activation or "none").upper()
    name = "AFFINE_AND_RESIDUAL" if epilogue.residual else "AFFINE"
    return {name: f"hc::Affine::{affine}", "ACTIVATION": f"hc::Activation::{activation}"}


def in_order(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor, or a copy of it, with these strides in elements, wherever it has more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if tensor.stride() == strides or all(extent == 1 or own == step for extent, own, step in pairs):
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def as_the_result(residual: torch.Tensor, strides: tuple[int, ...], align_bytes: int = 1) -> torch.Tensor:
    """A residual with the result's strides, at a multiple of so many bytes: itself, or a copy.

    It must live until all is launched: PyTorch gives a copy's memory to what is made next.
    """
    one = in_order(residual, strides)
    return one.new_empty_strided(one.shape, one.stride()).copy_(one) if one.data_ptr() % align_bytes else one


def why_not_direction(problem: Problem, *directions: Direction) -> str | None:
    """None if a kernel for these directions is one for the problem's, else a sentence that says what it is for."""
    return None if problem.direction in directions else f"this is for {' and '.join(directions)}"


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def divisor(value: int) -> dict[str, int]:
    """The fields of a ``Divisor`` (kernels/divisor.cuh). Exact for dividends below 2^31."""
    bits = 31 + (value - 1).bit_length()
    magic, shift = (0, 0) if value == 1 else (ceil_div(1 << bits, value), bits - 32)
    return {"value": value, "magic": magic, "shift": shift}


def extents_fields(request: Request) -> dict[str, int]:
    """The fields of ``Extents`` (kernels/geometry.cuh) of fprop or dgrad."""
    problem, (rows, cols) = request.problem, request.result_shape[2:]
    return {
        **{"taps_r": problem.r, "taps_s": problem.s, "stride_h": problem.stride[0], "stride_w": problem.stride[1]},
        **{"dil_h": problem.dilation[0], "dil_w": problem.dilation[1]},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2], "rows": rows, "cols": cols},
    }


def named(tensor: str, axes: str, strides: Iterable[int]) -> dict[str, int]:
    """Strides by the names that they have in kernels' structs: ``x_n x_c x_h x_w`` of x with axes nchw.

    A dot in ``axes`` stands for a stride that is left out.
    """
    return {f"{tensor}_{axis}": stride for axis, stride in zip(axes, strides, strict=True) if axis != "."}


def dense_call(
    launch: Callable[..., None], problem: Problem, out_shape: tuple[int, ...], out_strides: tuple[int, ...]
) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx of a kernel that takes (input, w, bias, output)."""

    def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty_strided(out_shape, out_strides)
        if b is not None and not b.is_contiguous():
            b = b.contiguous()
        launch(x.data_ptr(), w.data_ptr(), 0 if b is None else b.data_ptr(), y.data_ptr())
        return y

    def dgrad(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = dy.new_empty_strided(out_shape, out_strides)
        launch(dy.data_ptr(), w.data_ptr(), 0, dx.data_ptr())
        return dx

    return dgrad if problem.direction == "dgrad" else fprop
