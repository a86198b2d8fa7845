"""haloconv's operators in PyTorch's own, for what knows no others, and their operations as PyTorch counts them.

``torch.export.default_decompositions()`` has none of any library, so that `decompositions` adds them. PyTorch's global
table has none of ours: Inductor then asks why an operator that it calls is not decomposed, and raises where the
variable CI is set. They follow PyTorch's setting of TF32, as its convolution does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import conv_backward_flop, conv_flop, register_flop_formula

from haloconv import moments
from haloconv import plan as plans
from haloconv.epilogue import applied
from haloconv.layout import Layout
from haloconv.library import OPERATORS
from haloconv.problem import Epilogue

Tensor = torch.Tensor

_MEMORY_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for ``torch.export.ExportedProgram.run_decompositions``: PyTorch's own and haloconv's operators.

    The program then has PyTorch's operators alone, so that it is saved, loaded, and compiled by AOTInductor, where
    there is no haloconv. A layer's ``precision`` is not in it: fp32 products follow PyTorch's setting.
    """
    table = torch.export.default_decompositions()
    for operator, body in _BODIES.items():
        table[operator] = body
    return table


def fprop_in_aten(x: Tensor, w: Tensor, b: Tensor | None, *values: Any) -> Tensor:
    """y (N, K, P, Q) of x (N, C, H, W), w (K, C/G, R, S) and b (K,) or None, as torch.convolution of padded images."""
    stride, _, dilation, groups, *_ = values
    x, padding = _padded(x, values[1])
    return torch.convolution(x, w, b, stride, padding, dilation, False, [0, 0], groups)


def _fprop(x: Tensor, w: Tensor, b: Tensor | None, *values: Any) -> Tensor:
    return _stored_as(plans.result_layout(x, w), fprop_in_aten(x, w, b, *values))


def _fprop_epilogue(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, has_scale: bool, activation: Any, *values: Any
) -> Tensor:
    y = _fprop(x, w, None if has_scale else b, *values)
    return applied(y, b, Epilogue(has_scale, activation), residual)


def _fprop_moments(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, per_image: bool, *values: Any
) -> moments.Measured:
    return moments.with_var_mean(_fprop_epilogue(x, w, b, residual, False, None, *values), per_image)


def _dgrad(dy: Tensor, w: Tensor, x_shape: Sequence[int], layout: Layout, *values: Any) -> Tensor:
    top, bottom, left, right = values[1]
    *outer, height, width = x_shape
    padding = _symmetric(values[1])
    extents = (height, width) if padding else (height + top + bottom, width + left + right)
    like_x = dy.new_empty([1]).expand(*outer, *extents)  # only its shape is read
    dx = _backward(dy, like_x, w, padding or [0, 0], [True, False, False], values)[0]
    return _stored_as(layout, dx if padding else dx[:, :, top : top + height, left : left + width])


def _wgrad(dy: Tensor, x: Tensor, w_shape: Sequence[int], layout: Layout, *values: Any) -> Tensor:
    x, padding = _padded(x, values[1])
    like_w = dy.new_empty([1]).expand(*w_shape)  # only its shape is read
    return _stored_as(layout, _backward(dy, x, like_w, padding, [False, True, False], values)[1])


def _bgrad(dy: Tensor, family: str) -> Tensor:
    return dy.sum((0, 2, 3))


def _backward(
    dy: Tensor, x: Tensor, w: Tensor, padding: list[int], wanted: list[bool], values: tuple[Any, ...]
) -> tuple[Any, ...]:
    stride, _, dilation, groups, *_ = values
    gradients: tuple[Any, ...] = torch.ops.aten.convolution_backward(
        dy, x, w, None, stride, padding, dilation, False, [0, 0], groups, wanted
    )  # fmt: skip
    return gradients


def _symmetric(sides: Sequence[int]) -> list[int] | None:
    """PyTorch's padding (vertical, horizontal), or None if opposite sides of (top, bottom, left, right) differ."""
    top, bottom, left, right = sides
    return [top, left] if (top, left) == (bottom, right) else None


def _padded(x: Tensor, sides: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The images to give to PyTorch, and the padding that is left to it."""
    padding = _symmetric(sides)
    if padding is not None:
        return x, padding
    top, bottom, left, right = sides
    return torch.constant_pad_nd(x, [left, right, top, bottom]), [0, 0]


def _stored_as(layout: Layout, tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=_MEMORY_FORMATS[layout])


def _fprop_flop(x_shape: Sequence[int], w_shape: Sequence[int], *values: Any, out_shape: Any, **kwargs: Any) -> int:
    return _counted(conv_flop, [x_shape, w_shape, None], [], out_shape)


def _dgrad_flop(dy_shape: Sequence[int], w_shape: Sequence[int], x_shape: Any, *values: Any, **kwargs: Any) -> int:
    shapes = [dy_shape, x_shape, w_shape, None]
    return _counted(conv_backward_flop, shapes, [[0, 0], 1, [True, False, False]], (x_shape, None, None))


def _wgrad_flop(dy_shape: Sequence[int], x_shape: Sequence[int], w_shape: Any, *values: Any, **kwargs: Any) -> int:
    shapes = [dy_shape, x_shape, w_shape, None]
    return _counted(conv_backward_flop, shapes, [[0, 0], 1, [False, True, False]], (None, w_shape, None))


def _counted(formula: Callable[..., int], shapes: list[Any], others: list[Any], out_shape: Any) -> int:
    """PyTorch's count. No formula of its reads stride, padding and dilation, which stand between."""
    return formula(*shapes, [1, 1], [0, 0], [1, 1], False, *others, out_val=out_shape)


def _fprop_moments_flop(x_shape: Sequence[int], w_shape: Sequence[int], *values: Any, out_shape: Any, **_: Any) -> int:
    return _counted(conv_flop, [x_shape, w_shape, None], [], out_shape[0])


_BODIES: dict[Any, Callable[..., Any]] = {
    OPERATORS.fprop.default: _fprop,
    OPERATORS.fprop_epilogue.default: _fprop_epilogue,
    OPERATORS.fprop_moments.default: _fprop_moments,
    OPERATORS.dgrad.default: _dgrad,
    OPERATORS.wgrad.default: _wgrad,
    OPERATORS.bgrad.default: _bgrad,
}
_FORMULAS: dict[Any, Callable[..., int]] = {
    OPERATORS.fprop: _fprop_flop,
    OPERATORS.fprop_epilogue: _fprop_flop,
    OPERATORS.fprop_moments: _fprop_moments_flop,
    OPERATORS.dgrad: _dgrad_flop,
    OPERATORS.wgrad: _wgrad_flop,
}
for _packet, _formula in _FORMULAS.items():
    register_flop_formula(_packet)(_formula)
