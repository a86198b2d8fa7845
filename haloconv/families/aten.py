"""The ``aten`` family: PyTorch's own convolution, candidate 0 of every choice and the path for what others refuse."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

from haloconv import support
from haloconv.families.base import BoundCall, Config
from haloconv.jit import KernelSource
from haloconv.layout import Layout, is_channels_last, strides_of
from haloconv.precision import convolution_precision
from haloconv.problem import DIRECTIONS, Direction, Problem, Request

_MEMORY_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


class AtenFamily:
    """Takes every problem that PyTorch takes. Padding that differs between opposite sides is a padded copy here."""

    name = "aten"
    directions: tuple[Direction, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = support.KERNEL_DTYPES  # and whatever else PyTorch takes
    tensor_cores = False  # unless PyTorch's setting allows TF32
    has_epilogue = False
    has_padding_modes = False
    depthwise = False
    capability, newer = (7, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        return None

    def configs(self, request: Request) -> list[Config]:
        """The only one: PyTorch chooses among its own."""
        return [Config(self.name)]

    def bind(self, request: Request, config: Config) -> BoundCall:
        problem, result_layout = request.problem, request.result_layout
        run: BoundCall = _fprop
        if problem.direction == "dgrad":
            run = partial(_dgrad, _order_of_like_x(request))
        elif problem.direction == "wgrad":
            run = partial(_wgrad, result_layout)
        follows = _follows_a_setting(problem, request.device)

        def call(*tensors: torch.Tensor | None) -> torch.Tensor:
            if not follows:
                return run(problem, *tensors)
            with convolution_precision(problem.precision):
                return run(problem, *tensors)

        if problem.direction == "fprop":
            return call
        return lambda *tensors: _stored_as(result_layout, call(*tensors))

    def sources(self) -> list[KernelSource]:
        """None: its kernels are PyTorch's."""
        return []


def aten_gradients(
    problem: Problem, layouts: tuple[Layout, Layout], dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dw in ``layouts`` of a problem whose opposite sides are padded alike."""
    top, _, left, _ = problem.padding
    setting = convolution_precision(problem.precision) if _follows_a_setting(problem, dy.device) else nullcontext()
    x = _in_order(layouts[0], x)
    with setting:
        dx, dw, _ = _backward(problem, dy, x, w, [top, left], [True, True, False])
    return _stored_as(layouts[0], dx), _stored_as(layouts[1], dw)


def _follows_a_setting(problem: Problem, device: torch.device) -> bool:
    """Whether PyTorch's setting of TF32 decides how products are formed."""
    return problem.dtype == torch.float32 and device.type == "cuda"


def _in_order(layout: Layout, x: torch.Tensor) -> torch.Tensor:
    """x as PyTorch itself would copy it where y is nhwc and x is not, but before it orders dy as x, and back again."""
    return x.contiguous(memory_format=torch.channels_last) if layout == "nhwc" else x


def _stored_as(layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with exactly the strides of a dense one in the layout.

    To PyTorch, strides of dimensions of size 1 do not matter; DistributedDataParallel compares those of a gradient with
    its parameter's, and copies what differs, with a warning.
    """
    tensor = tensor.contiguous(memory_format=_MEMORY_FORMATS[layout])
    strides = strides_of(tensor.shape, layout)
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def is_symmetric(problem: Problem) -> bool:
    """True if opposite sides are padded alike, as PyTorch pads."""
    top, bottom, left, right = problem.padding
    return top == bottom and left == right


def _padded(problem: Problem, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The input to give to PyTorch, and the symmetric padding that is left to it."""
    top, bottom, left, right = problem.padding
    if is_symmetric(problem):
        return x, [top, left]
    return torch.nn.functional.pad(x, (left, right, top, bottom)), [0, 0]


def _fprop(problem: Problem, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    x, padding = _padded(problem, x)
    return torch.conv2d(x, w, b, problem.stride, padding, problem.dilation, problem.groups)


def _backward(
    problem: Problem, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, padding: list[int], wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward(
        dy, x, w, None, problem.stride, padding, problem.dilation, False, [0, 0], problem.groups, wanted
    )
    return gradients


def _order_of_like_x(request: Request) -> Layout:
    """The order of the tensor that stands in for x. PyTorch takes its shape, and wants dy in its order, too.

    So it is one that dy has, or that w asks for anyway: else dy is copied for it.
    """
    problem, dy, w = request.problem, request.first, request.second
    dy_is_nhwc, w_is_nhwc = is_channels_last(problem.y_shape, dy.strides), is_channels_last(problem.w_shape, w.strides)
    return "nhwc" if request.result_layout == "nhwc" and (dy_is_nhwc or not w_is_nhwc) else "nchw"


def _dgrad(order: Layout, problem: Problem, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    top, bottom, left, right = problem.padding
    n, c, h, width = problem.x_shape
    padding = [top, left] if is_symmetric(problem) else [0, 0]
    extents = (h, width) if is_symmetric(problem) else (h + top + bottom, width + left + right)
    if order == "nhwc":
        like_x = dy.new_empty_strided((n, c, *extents), strides_of((n, c, *extents), "nhwc"))
    else:
        like_x = _only_a_shape(dy, (n, c, *extents))
    dx = _backward(problem, dy, like_x, w, padding, [True, False, False])[0]
    return dx if is_symmetric(problem) else dx[:, :, top : top + h, left : left + width]


def _wgrad(result_layout: Layout, problem: Problem, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x, padding = _padded(problem, _in_order(result_layout, x))
    like_w = _only_a_shape(dy, problem.w_shape)
    return _backward(problem, dy, x, like_w, padding, [False, True, False])[1]


def _only_a_shape(dy: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of which PyTorch reads the shape alone: one element of dy.

    It allocates nothing, so that what PyTorch allocates lies where it does without us.
    """
    one = dy if dy.numel() else dy.new_empty((1,))
    return one.as_strided(shape, (0,) * len(shape))
