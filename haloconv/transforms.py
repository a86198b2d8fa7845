"""fprop, dgrad and wgrad under torch.func and forward-mode differentiation: gradients, tangents and batching rules.

The functions of haloconv.autograd are for plain eager tensors, where every microsecond of a call counts; these take
their place where PyTorch has to see how a function is made up. Each is linear in both of its tensors (the table at the
head of haloconv.autograd), so that a tangent is the sum of two calls. A batch of inputs alone joins the images; a batch
of filters becomes groups: B convolutions of G groups are one of B * G.
"""

from __future__ import annotations

from typing import Any

import torch

from haloconv import plan as plans
from haloconv.layout import Layout
from haloconv.problem import ConvSpec

Tensor = torch.Tensor


def fprop(x: Tensor, w: Tensor, b: Tensor | None, spec: ConvSpec) -> Tensor:
    """y (N, K, P, Q) of x (N, C, H, W), w (K, C/G, R, S) and b (K,) or None. Raises as haloconv.plan.plan_fprop."""
    y: Tensor = _Fprop.apply(x, w, spec)
    return y if b is None else y + b.reshape(-1, 1, 1)


def dgrad(dy: Tensor, w: Tensor, x_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Tensor:
    """dx of ``x_shape`` (N, C, H, W), stored as ``layout``, from dy (N, K, P, Q) and w (K, C/G, R, S)."""
    dx: Tensor = _Dgrad.apply(dy, w, x_shape, layout, spec)
    return dx


def wgrad(dy: Tensor, x: Tensor, w_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Tensor:
    """dw of ``w_shape`` (K, C/G, R, S), stored as ``layout``, from dy (N, K, P, Q) and x (N, C, H, W)."""
    dw: Tensor = _Wgrad.apply(dy, x, w_shape, layout, spec)
    return dw


def _to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its batch dimension in front; repeated ``size`` times, without a copy, where it has none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _as_images(tensor: Tensor, dim: int) -> Tensor:
    """(B * N, C, H, W) of (N, C, H, W) with a batch dimension of B at ``dim``."""
    return tensor.movedim(dim, 0).flatten(0, 1)


def _as_groups(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """(N, B * C, H, W) of (N, C, H, W) with a batch dimension of B at ``dim``."""
    return _to_front(tensor, dim, size).transpose(0, 1).flatten(1, 2)


def _as_filters(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """(B * K, C/G, R, S) of (K, C/G, R, S) with a batch dimension of B at ``dim``."""
    return _to_front(tensor, dim, size).flatten(0, 1)


def _total(*terms: Tensor | None) -> Tensor | None:
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None


class _Bilinear(torch.autograd.Function):
    """What the three have in common: both factors are kept, for gradients and for tangents."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        first, second, *ctx.others = inputs
        ctx.save_for_backward(first, second)
        ctx.save_for_forward(first, second)
        ctx.set_materialize_grads(False)


class _Fprop(_Bilinear):
    @staticmethod
    def forward(x: Tensor, w: Tensor, spec: ConvSpec) -> Tensor:
        y: Tensor = torch.ops.haloconv.fprop(x, w, None, *spec)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        (spec,) = ctx.others
        if dy is None:
            return None, None, None
        dx = _Dgrad.apply(dy, w, tuple(x.shape), plans.layout_of(x), spec) if ctx.needs_input_grad[0] else None
        dw = _Wgrad.apply(dy, x, tuple(w.shape), plans.layout_of(w), spec) if ctx.needs_input_grad[1] else None
        return dx, dw, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, w_tangent: Tensor | None, _: None) -> Tensor | None:
        x, w = ctx.saved_tensors
        (spec,) = ctx.others
        return _total(
            None if x_tangent is None else _Fprop.apply(x_tangent, w, spec),
            None if w_tangent is None else _Fprop.apply(x, w_tangent, spec),
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, w: Tensor, spec: ConvSpec) -> tuple[Tensor, int]:
        size, (x_dim, w_dim, _) = info.batch_size, in_dims
        if w_dim is None:
            return _Fprop.apply(_as_images(x, x_dim), w, spec).unflatten(0, (size, -1)), 0
        grouped = spec._replace(groups=size * spec.groups)
        y = _Fprop.apply(_as_groups(x, x_dim, size), _as_filters(w, w_dim, size), grouped)
        return y.unflatten(1, (size, -1)), 1


class _Dgrad(_Bilinear):
    @staticmethod
    def forward(dy: Tensor, w: Tensor, x_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Tensor:
        dx: Tensor = torch.ops.haloconv.dgrad(dy, w, x_shape, layout, *spec)
        return dx

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        dy, w = ctx.saved_tensors
        _, _, spec = ctx.others
        if g is None:
            return (None,) * 5
        d_dy = _Fprop.apply(g, w, spec) if ctx.needs_input_grad[0] else None
        dw = _Wgrad.apply(dy, g, tuple(w.shape), plans.layout_of(w), spec) if ctx.needs_input_grad[1] else None
        return d_dy, dw, None, None, None

    @staticmethod
    def jvp(ctx: Any, dy_tangent: Tensor | None, w_tangent: Tensor | None, *_: None) -> Tensor | None:
        dy, w = ctx.saved_tensors
        return _total(
            None if dy_tangent is None else _Dgrad.apply(dy_tangent, w, *ctx.others),
            None if w_tangent is None else _Dgrad.apply(dy, w_tangent, *ctx.others),
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        dy: Tensor,
        w: Tensor,
        x_shape: tuple[int, ...],
        layout: Layout,
        spec: ConvSpec,
    ) -> tuple[Tensor, int]:
        size, (dy_dim, w_dim, *_) = info.batch_size, in_dims
        n, c, *extents = x_shape
        if w_dim is None:
            dx = _Dgrad.apply(_as_images(dy, dy_dim), w, (size * n, c, *extents), layout, spec)
            return dx.unflatten(0, (size, n)), 0
        grouped = spec._replace(groups=size * spec.groups)
        operands = _as_groups(dy, dy_dim, size), _as_filters(w, w_dim, size)
        return _Dgrad.apply(*operands, (n, size * c, *extents), layout, grouped).unflatten(1, (size, c)), 1


class _Wgrad(_Bilinear):
    @staticmethod
    def forward(dy: Tensor, x: Tensor, w_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Tensor:
        dw: Tensor = torch.ops.haloconv.wgrad(dy, x, w_shape, layout, *spec)
        return dw

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        dy, x = ctx.saved_tensors
        _, _, spec = ctx.others
        if g is None:
            return (None,) * 5
        d_dy = _Fprop.apply(x, g, spec) if ctx.needs_input_grad[0] else None
        dx = _Dgrad.apply(dy, g, tuple(x.shape), plans.layout_of(x), spec) if ctx.needs_input_grad[1] else None
        return d_dy, dx, None, None, None

    @staticmethod
    def jvp(ctx: Any, dy_tangent: Tensor | None, x_tangent: Tensor | None, *_: None) -> Tensor | None:
        dy, x = ctx.saved_tensors
        return _total(
            None if dy_tangent is None else _Wgrad.apply(dy_tangent, x, *ctx.others),
            None if x_tangent is None else _Wgrad.apply(dy, x_tangent, *ctx.others),
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        dy: Tensor,
        x: Tensor,
        w_shape: tuple[int, ...],
        layout: Layout,
        spec: ConvSpec,
    ) -> tuple[Tensor, int]:
        size, (dy_dim, x_dim, *_) = info.batch_size, in_dims
        k, *others = w_shape
        grouped = spec._replace(groups=size * spec.groups)
        operands = _as_groups(dy, dy_dim, size), _as_groups(x, x_dim, size)
        return _Wgrad.apply(*operands, (size * k, *others), layout, grouped).unflatten(0, (size, k)), 0
