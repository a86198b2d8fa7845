"""``haloconv.conv_transpose2d`` and ``conv_transpose1d``: dgrad of the mirrored convolution, posed as a forward pass.

The mirrored convolution has the transposed one's output as its input, and the same weight. So the gradients are those
of haloconv.autograd's table with the operands exchanged:

    y  = dgrad(x, w) + b      dx = fprop(dy, w)    dw = wgrad(x, dy)    db = bgrad(dy)

One dimension is an image of one row: (N, C, L) is (N, C, 1, L), a view.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from haloconv import autograd, logs, transforms
from haloconv import plan as plans
from haloconv.arguments import Settings, Tensors, are_tensors, as_ints, kept, left_to_torch, of_one_kind, settings_of
from haloconv.autograd import Call
from haloconv.functional import autocasted, goes_straight
from haloconv.library import SPEC_SCHEMA
from haloconv.precision import Precision
from haloconv.problem import ConvSpec, Direction, Pair
from haloconv.profiling import calls_of, current_layer, profiler

Tensor = torch.Tensor

_TORCHS: dict[int, Callable[..., Tensor]] = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d}
_NOT_POSED = "output_padding is not below the stride, so that no convolution has this as its gradient"
_is_compiling = torch.compiler.is_compiling


class Transposed(NamedTuple):
    """Everything about a call that is not a tensor: the mirrored convolution, and rows and columns added at the end."""

    spec: ConvSpec
    output_padding: Pair
    dims: int

    @property
    def settings(self) -> Settings:
        return Settings(*self.spec[4:])

    @property
    def torchs(self) -> tuple[Any, ...]:
        """The arguments of PyTorch's function after the tensors."""
        (top, _, left, _), n = self.spec.padding, self.dims
        stride, dilation, groups = self.spec.stride[-n:], self.spec.dilation[-n:], self.spec.groups
        return stride, (top, left)[-n:], self.output_padding[-n:], groups, dilation

    def y_shape(self, x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """(N, C, P, Q) of x (N, K, H, W) and w (K, C / groups, R, S), by torch.nn.ConvTranspose2d's formula."""
        spec, (n, _, *image), (_, c_per_group, *taps) = self.spec, x_shape, w_shape
        around = (spec.padding[0] + spec.padding[1], spec.padding[2] + spec.padding[3])
        p, q = (
            (extent - 1) * stride - both + dilation * (tap - 1) + more + 1
            for extent, stride, both, dilation, tap, more in zip(
                image, spec.stride, around, spec.dilation, taps, self.output_padding, strict=True
            )
        )
        return n, c_per_group * spec.groups, p, q


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int] = 1,
    padding: int | tuple[int] = 0,
    output_padding: int | tuple[int] = 0,
    groups: int = 1,
    dilation: int | tuple[int] = 1,
    *,
    precision: Precision | None = None,
    family: str = "auto",
    strict: bool = False,
) -> Tensor:
    """1-D transposed convolution, a drop-in for torch.nn.functional.conv_transpose1d, differentiable to any order.

    Args:
        input: (N, C, L), or (C, L) for one signal.
        weight: (C, K / groups, S).
        bias: (K,) or None.
        stride: samples between what neighbours of the input add to, an int or a sequence of one.
        padding: samples that are cut off at both ends of the output.
        output_padding: samples added at its end; below the stride, else PyTorch's own function runs.
        groups: number of groups; divides C and K.
        dilation: samples between neighbours of the filter.
        precision: how fp32 products are formed, as in haloconv.conv2d.
        family: ``"auto"``, or the family that runs what it takes.
        strict: raise RuntimeError instead of running PyTorch's own where our kernels do not take the problem.

    Returns:
        (N, K, Q) or (K, Q) with Q = (L - 1) * stride - 2 * padding + dilation * (S - 1) + output_padding + 1; in memory
        with neighbouring channels, where those of ``input`` are.

    Raises:
        RuntimeError, TypeError: what torch.nn.functional.conv_transpose1d raises for arguments that it refuses.
        ValueError: ``precision`` or ``family`` is unknown.
    """
    arguments = (stride, padding, output_padding, groups, dilation)
    return _called(1, (input, weight, bias), arguments, settings_of(precision, family, strict))


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    output_padding: int | Pair = 0,
    groups: int = 1,
    dilation: int | Pair = 1,
    *,
    precision: Precision | None = None,
    family: str = "auto",
    strict: bool = False,
) -> Tensor:
    """2-D transposed convolution, a drop-in for torch.nn.functional.conv_transpose2d, differentiable to any order.

    Args:
        input: (N, C, H, W), or (C, H, W) for one image.
        weight: (C, K / groups, R, S).
        bias: (K,) or None.
        stride: pixels between what neighbours of the input add to, an int or (vertical, horizontal).
        padding: pixels that are cut off at opposite sides of the output, an int or (vertical, horizontal).
        output_padding: rows and columns added at its end; below the stride, else PyTorch's own function runs.
        groups: number of groups; divides C and K.
        dilation: pixels between neighbours of the filter, an int or (vertical, horizontal).
        precision: how fp32 products are formed, as in haloconv.conv2d.
        family: ``"auto"``, or the family that runs what it takes.
        strict: raise RuntimeError instead of running PyTorch's own where our kernels do not take the problem.

    Returns:
        (N, K, P, Q) or (K, P, Q) with P = (H - 1) * stride - 2 * padding + dilation * (R - 1) + output_padding + 1, and
        Q likewise; channels_last if ``input`` or ``weight`` is.

    Raises:
        RuntimeError, TypeError: what torch.nn.functional.conv_transpose2d raises for arguments that it refuses.
        ValueError: ``precision`` or ``family`` is unknown.
    """
    arguments = (stride, padding, output_padding, groups, dilation)
    return _called(2, (input, weight, bias), arguments, settings_of(precision, family, strict))


def _called(dims: int, tensors: Tensors, arguments: tuple[Any, ...], settings: Settings) -> Tensor:
    asked = _posed_once(arguments, dims, settings)
    if asked is None or not are_tensors(tensors):
        return left_to_torch(_TORCHS[dims], (*tensors, *arguments), settings, _NOT_POSED)
    return transpose(*tensors, asked)


def posed_transposed(arguments: tuple[Any, ...], dims: int, settings: Settings) -> Transposed | None:
    """The call of PyTorch's arguments behind the tensors; None if no mirrored convolution of ours has them."""
    found: list[Any] = [as_ints(each, dims) for each in (*arguments[:3], arguments[4])]
    groups: Any = as_ints(arguments[3], 1)
    if None in found or groups is None or groups[0] <= 0:
        return None
    fill = 2 - dims
    stride, padding, added, dilation = ((other,) * fill + one for one, other in zip(found, (1, 0, 0, 1), strict=True))
    if min(*stride, *dilation) <= 0 or min(*padding, *added) < 0:
        return None
    if any(more >= step for more, step in zip(added, stride, strict=True)):
        return None
    (rows, columns) = padding
    spec = ConvSpec(stride, (rows, rows, columns, columns), dilation, groups[0], *settings)
    return Transposed(spec, added, dims)


_posed_once = kept(posed_transposed)


def transpose(x: Tensor, w: Tensor, b: Tensor | None, asked: Transposed, notes: list[Call] | None = None) -> Tensor:
    """The transposed convolution of tensors, with everything else in ``asked``. Raises as PyTorch's function.

    ``notes`` gets the call that does the same for tensors of this form, if it may be kept.
    """
    given = (x, w, b)
    x, w, b = autocasted(x, w, b)
    batched = x.dim() == asked.dims + 2
    x4 = x if batched else x.unsqueeze(0)
    w4 = w
    if asked.dims == 1 and x4.dim() == w.dim() == 3:
        x4, w4 = x4.unsqueeze(2), w.unsqueeze(2)
    if not _fits(x4, w4, b, asked):
        return left_to_torch(_TORCHS[asked.dims], (*given, *asked.torchs), asked.settings, _NOT_POSED)
    if not goes_straight(x, w, b):
        y = _traced_or_transformed(x4, w4, b, asked)
    else:
        y = _eager(x4, w4, b, asked, notes if batched else None)
    y = y.squeeze(2) if asked.dims == 1 else y
    return y if batched else y.squeeze(0)


def _fits(x: Tensor, w: Tensor, b: Tensor | None, asked: Transposed) -> bool:
    """Whether the tensors, with two dimensions of an image, are what PyTorch takes."""
    if x.dim() != 4 or w.dim() != 4:
        return False
    groups = asked.spec.groups
    if x.shape[1] != w.shape[0] or x.shape[1] % groups or not of_one_kind(x, w, b, w.shape[1] * groups):
        return False
    return all(n > 0 for n in (*x.shape[1:], *w.shape, *asked.y_shape(x.shape, w.shape)[2:]))


def _traced_or_transformed(x: Tensor, w: Tensor, b: Tensor | None, asked: Transposed) -> Tensor:
    spec, y_shape, layout = asked.spec, asked.y_shape(x.shape, w.shape), plans.result_layout(x, w)
    if not _is_compiling() and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        y = transforms.dgrad(x, w, y_shape, layout, spec)
    elif (_is_compiling() or torch._C._get_tracing_state() is not None) and torch.onnx.is_in_onnx_export():
        return torch.conv_transpose2d(x, w, b, *asked._replace(dims=2).torchs)
    elif not _is_compiling() and torch._C._get_tracing_state() is not None:
        y = torch.ops.haloconv.conv_transpose(x, w, asked.output_padding, *spec)
    else:
        y = torch.ops.haloconv.dgrad(x, w, y_shape, layout, *spec)
    return y if b is None else y + b.reshape(-1, 1, 1)


def _conv_transpose(x: Tensor, w: Tensor, output_padding: list[int], *values: Any) -> Tensor:
    rows, columns = output_padding
    stride, sides, dilation, *others = values
    spec = ConvSpec(tuple(stride), tuple(sides), tuple(dilation), *others)
    y_shape = Transposed(spec, (rows, columns), 2).y_shape(x.shape, w.shape)
    y: Tensor = torch.ops.haloconv.dgrad(x, w, y_shape, plans.result_layout(x, w), *spec)
    return y


# What torch.jit.trace writes down: the extents of y follow from those of x where the program runs, and it cannot write
# the call of an operator that takes them.
_library = torch.library.Library("haloconv", "FRAGMENT")
_library.define(f"conv_transpose(Tensor x, Tensor w, int[2] output_padding, {SPEC_SCHEMA}) -> Tensor")
_library.impl("conv_transpose", _conv_transpose, "CompositeImplicitAutograd")


def _eager(x: Tensor, w: Tensor, b: Tensor | None, asked: Transposed, notes: list[Call] | None) -> Tensor:
    plan = plans.plan_dgrad(x, w, asked.y_shape(x.shape, w.shape), plans.result_layout(x, w), asked.spec, b)
    recording = autograd.is_recording(x, w, b)
    if plan.plain and (not recording or plan.is_native(_wanted(x, w), x.device)):
        of_images = asked._replace(dims=2).torchs
        if notes is not None and asked.dims == 1 and plan.layout == "nhwc":  # which PyTorch's function does not keep
            notes.append(Call(in_rows(torch.conv_transpose2d), of_images, True))
        elif notes is not None:
            notes.append(Call(_TORCHS[asked.dims], asked.torchs, True))
        return torch.conv_transpose2d(x, w, b, *of_images)
    function = _record if recording else _run
    if notes is not None:
        notes.append(Call(function if asked.dims == 2 else _IN_ROWS[function], (plan,), False))
    return function(x, w, b, plan)


def _wanted(x: Tensor, w: Tensor) -> tuple[Direction, ...]:
    """What a backward pass would ask our kernels for."""
    return (*(("fprop",) if x.requires_grad else ()), *(("wgrad",) if w.requires_grad else ()))


def _run(x: Tensor, w: Tensor, b: Tensor | None, plan: plans.Plan) -> Tensor:
    given = (x, w) if b is None else (x, w, b)
    return plan.traced(*given) if profiler._is_profiler_enabled else plan.run(*given)


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, plan: plans.Plan) -> Tensor:
        autograd.save_needed(ctx, x, w)
        ctx.plan, ctx.layer = plan, current_layer() if profiler._is_profiler_enabled or logs.names_layers else ""
        return _run(x, w, b, plan)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        plan, (dx_wanted, dw_wanted, db_wanted, _) = ctx.plan, ctx.needs_input_grad
        spec, w_shape = plan.spec, plan.problem.w_shape
        if plan.layout == "nhwc" and not autograd.is_batched(dy, dy):
            dy = dy.contiguous(memory_format=torch.channels_last)  # as PyTorch does, so that dx is stored as x
        with calls_of(ctx.layer) if ctx.layer else nullcontext():
            dx = autograd.fprop_of_gradient(dy, w, spec) if dx_wanted else None
            dw = autograd.wgrad(x, dy, w_shape, plan.w_layout, spec) if dw_wanted else None
            db = autograd.bgrad(dy, spec) if db_wanted else None
        return dx, dw, db, None


_record = super(torch.autograd.Function, _Transposed).apply
"""``_Transposed.apply`` for tensors that no function transform has wrapped: it looks at none of them for that."""


def in_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` of images for signals (N, C, L) and filters (K, C, S): images and filters of one row, views."""

    def run(x: Tensor, w: Tensor, b: Tensor | None, *arguments: Any) -> Tensor:
        return function(x.unsqueeze(2), w.unsqueeze(2), b, *arguments).squeeze(2)

    return run


_IN_ROWS = {function: in_rows(function) for function in (_run, _record)}
