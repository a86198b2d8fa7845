"""Differentiable fprop, dgrad and wgrad. Each is linear in both of its tensors, and its gradients are the other two.

    y  = fprop(x, w) + b      dx = dgrad(dy, w)    dw = wgrad(dy, x)    db = bgrad(dy)
    dx = dgrad(dy, w)         d(dy) = fprop(g, w)  dw = wgrad(dy, g)
    dw = wgrad(dy, x)         d(dy) = fprop(x, g)  dx = dgrad(dy, g)

so that gradients of any order run on the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from haloconv import logs, transforms
from haloconv import plan as plans
from haloconv.epilogue import applied
from haloconv.gradients import gradients
from haloconv.layout import Layout
from haloconv.problem import ConvSpec, Direction, Epilogue
from haloconv.profiling import calls_of, current_layer, named_range, profiler

Tensor = torch.Tensor

_functorch_is_active = torch._C._are_functorch_transforms_active
_is_many = torch._C._functorch.is_legacy_batchedtensor


def is_recording(first: Tensor, second: Tensor, third: Tensor | None = None) -> bool:
    """Whether autograd has to see what is computed of these tensors."""
    wanted = first.requires_grad or second.requires_grad or (third is not None and third.requires_grad)
    return wanted and torch.is_grad_enabled()


def is_batched(first: Tensor, second: Tensor) -> bool:
    """Whether one of the tensors may stand for several, as gradients of torch.autograd.grad(is_grads_batched=True)."""
    return _functorch_is_active() or _is_many(first) or _is_many(second)


def _wanted(x: Tensor, w: Tensor) -> tuple[Direction, ...]:
    """The gradients of a convolution that a backward pass would ask our kernels for."""
    return (*(("dgrad",) if x.requires_grad else ()), *(("wgrad",) if w.requires_grad else ()))


class Call(NamedTuple):
    """fprop of tensors of one form is ``function(x, w, b, *arguments)``, with the gradients that are wanted of it.

    With ``native`` that is PyTorch's own convolution, which does the gradients, too.
    """

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    native: bool


def _call_of(plan: plans.Plan, native: bool, recording: bool) -> Call:
    if native:
        (top, _, left, _), spec = plan.spec.padding, plan.spec
        return Call(torch.conv2d, (spec.stride, (top, left), spec.dilation, spec.groups), True)
    return Call(_record, (plan,), False) if recording else Call(plan.run, (), False)


def fprop(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    spec: ConvSpec,
    notes: list[Call] | None = None,
) -> Tensor:
    """y (N, K, P, Q) of x (N, C, H, W), w (K, C/G, R, S) and b (K,) or None. Raises as haloconv.plan.plan_fprop.

    ``notes`` gets the call that does the same for tensors of this form, unless the plan is not kept.
    """
    plan = plans.plan_fprop(x, w, b, spec)
    recording = is_recording(x, w, b)
    native = plan.plain and (not recording or plan.is_native(_wanted(x, w), x.device))
    if notes is not None and plan.kept:
        notes.append(_call_of(plan, native, recording))
    if not recording:
        return plan.traced(x, w, b) if profiler._is_profiler_enabled else plan.run(x, w, b)
    if native:
        top, _, left, _ = spec.padding
        if profiler._is_profiler_enabled:
            with named_range("fprop", "aten"):
                return torch.conv2d(x, w, b, spec.stride, (top, left), spec.dilation, spec.groups)
        return torch.conv2d(x, w, b, spec.stride, (top, left), spec.dilation, spec.groups)
    return _record(x, w, b, plan)


def fprop_with(
    tensors: tuple[Tensor, Tensor, Tensor | None], spec: ConvSpec, epilogue: Epilogue, residual: Tensor | None = None
) -> Tensor:
    """fprop of (x, w, b) behind an epilogue, whose ``residual`` is as y. Raises as haloconv.plan.plan_fprop.

    Where autograd has to see the tensors, the epilogue is one of which gradients are known from y.
    """
    x, w, b = tensors
    plan = plans.plan_fprop(x, w, b, spec, epilogue, residual)
    given = tensors if residual is None else (*tensors, residual)
    if not (is_recording(x, w, b) or (residual is not None and is_recording(residual, residual))):
        return plan.traced(*given) if profiler._is_profiler_enabled else plan.run(*given)
    if plan.plain and plan.is_native(_wanted(x, w), x.device):
        (top, _, left, _), tracing = spec.padding, profiler._is_profiler_enabled
        with named_range("fprop", "aten") if tracing else nullcontext():
            y = torch.conv2d(x, w, b, spec.stride, (top, left), spec.dilation, spec.groups)
            return applied(y, None, epilogue, residual)
    return _record(x, w, b, plan, *given[3:])


def dgrad(dy: Tensor, w: Tensor, x_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Tensor:
    """dx of ``x_shape`` (N, C, H, W), stored as ``layout``, from dy (N, K, P, Q) and w (K, C/G, R, S)."""
    if is_batched(dy, w):
        return transforms.dgrad(dy, w, x_shape, layout, spec)
    if is_recording(dy, w):
        dx: Tensor = _Dgrad.apply(dy, w, x_shape, layout, spec)
        return dx
    return plans.dgrad(dy, w, x_shape, layout, spec)


def wgrad(dy: Tensor, x: Tensor, w_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Tensor:
    """dw of ``w_shape`` (K, C/G, R, S), stored as ``layout``, from dy (N, K, P, Q) and x (N, C, H, W)."""
    if is_batched(dy, x):
        return transforms.wgrad(dy, x, w_shape, layout, spec)
    if is_recording(dy, x):
        dw: Tensor = _Wgrad.apply(dy, x, w_shape, layout, spec)
        return dw
    return plans.wgrad(dy, x, w_shape, layout, spec)


def bgrad(dy: Tensor, spec: ConvSpec) -> Tensor:
    """db (K,) from dy (N, K, P, Q)."""
    return dy.sum((0, 2, 3)) if is_recording(dy, dy) or is_batched(dy, dy) else plans.bgrad(dy, spec)


def fprop_of_gradient(first: Tensor, second: Tensor, spec: ConvSpec) -> Tensor:
    """y (N, K, P, Q) of x (N, C, H, W) and w (K, C/G, R, S), one of which is a gradient."""
    if is_batched(first, second):
        return transforms.fprop(first, second, None, spec)
    return fprop(first, second, None, spec)


def save_needed(ctx: Any, first: Tensor, second: Tensor, *results: Tensor | None) -> None:
    """Keep each of two factors only if the other one's gradient is wanted, and ``results``."""
    first_wanted, second_wanted, *_ = ctx.needs_input_grad
    ctx.save_for_backward(first if second_wanted else None, second if first_wanted else None, *results)


class _Fprop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, plan: plans.Plan, *residual: Tensor) -> Tensor:
        y = plan.traced(x, w, b, *residual) if profiler._is_profiler_enabled else plan.run(x, w, b, *residual)
        if plan.problem.epilogue.activation is None:
            save_needed(ctx, x, w)
        else:
            save_needed(ctx, x, w, y)
        ctx.plan, ctx.layer = plan, current_layer() if profiler._is_profiler_enabled or logs.names_layers else ""
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if ctx.layer:
            return _backward_of_layer(ctx, dy)
        x, w, *activated = ctx.saved_tensors
        for y in activated:
            dy = torch.ops.aten.threshold_backward(dy, y, 0)
        plan, wanted = ctx.plan, ctx.needs_input_grad[:3]
        d_residual = dy if plan.problem.epilogue.residual else None
        if not (torch.is_grad_enabled() or _is_many(dy) or _functorch_is_active()):
            return *gradients(plan, dy, x, w, wanted), None, d_residual
        problem, spec, (dx_wanted, dw_wanted, db_wanted) = plan.problem, plan.spec, wanted
        dx = dgrad(dy, w, problem.x_shape, plan.layout, spec) if dx_wanted else None
        dw = wgrad(dy, x, problem.w_shape, plan.w_layout, spec) if dw_wanted else None
        return dx, dw, bgrad(dy, spec) if db_wanted else None, None, d_residual


_record: Callable[..., Tensor] = super(torch.autograd.Function, _Fprop).apply
"""``_Fprop.apply`` for tensors that no function transform has wrapped: it looks at none of them for that."""


def _backward_of_layer(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """_Fprop.backward, which others learn the layer of."""
    layer, ctx.layer = ctx.layer, ""
    try:
        with calls_of(layer):
            return _Fprop.backward(ctx, dy)
    finally:
        ctx.layer = layer


class _Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dy: Tensor, w: Tensor, x_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Tensor:
        save_needed(ctx, dy, w)
        ctx.w_shape, ctx.w_layout, ctx.spec = tuple(w.shape), plans.layout_of(w), spec
        return plans.dgrad(dy, w, x_shape, layout, spec)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        dy, w = ctx.saved_tensors
        dy_wanted, w_wanted = ctx.needs_input_grad[:2]
        d_dy = fprop_of_gradient(g, w, ctx.spec) if dy_wanted else None
        dw = wgrad(dy, g, ctx.w_shape, ctx.w_layout, ctx.spec) if w_wanted else None
        return d_dy, dw, None, None, None


class _Wgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, w_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Tensor:
        save_needed(ctx, dy, x)
        ctx.x_shape, ctx.x_layout, ctx.spec = tuple(x.shape), plans.layout_of(x), spec
        return plans.wgrad(dy, x, w_shape, layout, spec)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        dy, x = ctx.saved_tensors
        dy_wanted, x_wanted = ctx.needs_input_grad[:2]
        d_dy = fprop_of_gradient(x, g, ctx.spec) if dy_wanted else None
        dx = dgrad(dy, g, ctx.x_shape, ctx.x_layout, ctx.spec) if x_wanted else None
        return d_dy, dx, None, None, None
