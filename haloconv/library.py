"""``torch.ops.haloconv``: the operations as PyTorch sees them (schema, shape rule, gradients, autocast).

torch.compile, torch.export, tensor subclasses and function transforms meet the package here; plain eager tensors go
straight to haloconv.autograd.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from haloconv import moments
from haloconv import plan as plans
from haloconv.autograd import save_needed
from haloconv.epilogue import activation_backward, scaled
from haloconv.families import check_family
from haloconv.layout import Layout, strides_of
from haloconv.problem import ConvSpec, Epilogue, check_residual, check_tensors
from haloconv.profiling import profiler

Tensor = torch.Tensor

SPEC_SCHEMA = "int[2] stride, int[4] padding, int[2] dilation, int groups, str? precision, str family, bool strict"
_library = torch.library.Library("haloconv", "DEF")
for _schema in (
    f"fprop(Tensor x, Tensor w, Tensor? b, {SPEC_SCHEMA}) -> Tensor",
    "fprop_epilogue(Tensor x, Tensor w, Tensor? b, Tensor? residual, bool has_scale, str? activation, "
    f"{SPEC_SCHEMA}) -> Tensor",
    "fprop_moments(Tensor x, Tensor w, Tensor? b, Tensor? residual, bool per_image, "
    f"{SPEC_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    f"dgrad(Tensor dy, Tensor w, SymInt[4] x_shape, str layout, {SPEC_SCHEMA}) -> Tensor",
    f"wgrad(Tensor dy, Tensor x, SymInt[4] w_shape, str layout, {SPEC_SCHEMA}) -> Tensor",
    "bgrad(Tensor dy, str family) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _spec(*values: Any) -> ConvSpec:
    stride, padding, dilation, *others = values
    return ConvSpec(tuple(stride), tuple(padding), tuple(dilation), *others)


# --- what runs


def _fprop(x: Tensor, w: Tensor, b: Tensor | None, *values: Any) -> Tensor:
    return _fprop_epilogue(x, w, b, None, False, None, *values)


def _fprop_epilogue(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, has_scale: bool, activation: Any, *values: Any
) -> Tensor:
    epilogue, more = Epilogue(has_scale, activation, residual is not None), () if residual is None else (residual,)
    epilogue = epilogue._replace(compiled=any(epilogue))  # compilers alone make this call
    plan = plans.plan_fprop(x, w, b, _spec(*values), epilogue, residual)
    y = plan.traced(x, w, b, *more) if profiler._is_profiler_enabled else plan.run(x, w, b, *more)
    return _as_told(y, plan.layout)


def _fprop_moments(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, per_image: bool, *values: Any
) -> moments.Measured:
    y, variance, mean = moments.fprop(x, w, b, residual, _spec(*values), per_image)
    return _as_told(y, plans.result_layout(x, w)), variance, mean


def _as_told(result: Tensor, layout: Layout) -> Tensor:
    """The result with the strides that it has without data, also where an extent is 1 and they mean nothing.

    The next operation decides by them in which order its own result lies.
    """
    result, strides = _in_order(result, layout), strides_of(tuple(result.shape), layout)
    return result if result.stride() == strides else result.as_strided(result.shape, strides)


def _in_order(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format)


def _dgrad(dy: Tensor, w: Tensor, x_shape: list[int], layout: Layout, *values: Any) -> Tensor:
    return _as_told(plans.dgrad(dy, w, tuple(x_shape), layout, _spec(*values)), layout)


def _wgrad(dy: Tensor, x: Tensor, w_shape: list[int], layout: Layout, *values: Any) -> Tensor:
    return _as_told(plans.wgrad(dy, x, tuple(w_shape), layout, _spec(*values)), layout)


def _bgrad(dy: Tensor, family: str) -> Tensor:
    return plans.bgrad(dy, ConvSpec(family=family))


for _name, _body in (
    ("fprop", _fprop),
    ("fprop_epilogue", _fprop_epilogue),
    ("fprop_moments", _fprop_moments),
    ("dgrad", _dgrad),
    ("wgrad", _wgrad),
    ("bgrad", _bgrad),
):
    _library.impl(_name, _body, "CompositeExplicitAutograd")


# --- shapes and strides without data


@torch.library.register_fake("haloconv::fprop", lib=_library)
def _fake_fprop(x: Tensor, w: Tensor, b: Tensor | None, *values: Any) -> Tensor:
    y: Tensor = _fake_fprop_epilogue(x, w, b, None, False, None, *values)
    return y


@torch.library.register_fake("haloconv::fprop_epilogue", lib=_library)
def _fake_fprop_epilogue(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, has_scale: bool, activation: Any, *values: Any
) -> Tensor:
    spec = _spec(*values)
    check_tensors(x, w, b, spec, has_scale=has_scale)
    check_family(spec.family)
    layout = plans.result_layout(x, w)
    shape = plans.problem_of("fprop", x.shape, w.shape, spec, x.dtype, layout).y_shape
    if residual is not None:
        check_residual(residual, shape, x.dtype, x.device)
    return x.new_empty_strided(shape, strides_of(shape, layout))


@torch.library.register_fake("haloconv::fprop_moments", lib=_library)
def _fake_fprop_moments(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, per_image: bool, *values: Any
) -> moments.Measured:
    y: Tensor = _fake_fprop_epilogue(x, w, b, residual, False, None, *values)
    images = y.shape[0] if per_image else 1
    variance, mean = (x.new_empty((images, y.shape[1], 1, 1), dtype=torch.float32) for _ in range(2))
    return y, variance, mean


@torch.library.register_fake("haloconv::dgrad", lib=_library)
def _fake_dgrad(dy: Tensor, w: Tensor, x_shape: list[int], layout: Layout, *values: Any) -> Tensor:
    return dy.new_empty_strided(x_shape, strides_of(tuple(x_shape), layout))


@torch.library.register_fake("haloconv::wgrad", lib=_library)
def _fake_wgrad(dy: Tensor, x: Tensor, w_shape: list[int], layout: Layout, *values: Any) -> Tensor:
    return dy.new_empty_strided(w_shape, strides_of(tuple(w_shape), layout))


@torch.library.register_fake("haloconv::bgrad", lib=_library)
def _fake_bgrad(dy: Tensor, family: str) -> Tensor:
    return dy.new_empty(dy.shape[1])


OPERATORS = torch.ops.haloconv
"""``fprop``, ``fprop_epilogue``, ``fprop_moments``, ``dgrad``, ``wgrad`` and ``bgrad``."""


# --- gradients: the table at the head of haloconv.autograd


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, _, *_ = inputs
    save_needed(ctx, first, second)
    ctx.shapes = (first.shape, second.shape)
    ctx.layouts = (plans.layout_of(first), plans.layout_of(second))
    ctx.values = inputs[3:] if len(inputs) == 10 else inputs[4:]


def _fprop_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    dx_wanted, dw_wanted, db_wanted = ctx.needs_input_grad[:3]
    ops = torch.ops.haloconv
    layout: Layout = "nhwc" if "nhwc" in ctx.layouts else "nchw"
    dy = _in_order(dy, layout)  # as PyTorch brings it; a compiler sees the copy, and may do it where dy is computed
    dx = ops.dgrad(dy, w, ctx.shapes[0], layout, *ctx.values) if dx_wanted else None
    dw = ops.wgrad(dy, x, ctx.shapes[1], ctx.layouts[1], *ctx.values) if dw_wanted else None
    db = ops.bgrad(dy, _spec(*ctx.values).family) if db_wanted else None
    return dx, dw, db, *([None] * 7)


def _keep_for_epilogue(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, b, residual, has_scale, activation, *values = inputs
    ctx.epilogue, ctx.values = Epilogue(has_scale, activation, residual is not None), values
    ctx.shapes, ctx.layouts = (x.shape, w.shape), (plans.layout_of(x), plans.layout_of(w))
    if ctx.epilogue.is_known_from_y:
        save_needed(ctx, x, w, output if activation else None)
    else:
        ctx.save_for_backward(x, w, b, residual if activation else None)


def _fprop_epilogue_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Gradients of fprop_epilogue: ReLU's by the result; other activations' by sums computed again, as none is kept."""
    x, w, third, *more = ctx.saved_tensors
    (has_scale, activation, has_residual, _), (wants_x, wants_w, wants_b) = ctx.epilogue, ctx.needs_input_grad[:3]
    ops, db = torch.ops.haloconv, None
    if ctx.epilogue.is_known_from_y:
        dz = d_residual = activation_backward(dy, third, activation)
    elif has_scale:
        sums = ops.fprop(x, w, None, *ctx.values)
        exact = sums.to(third.dtype)
        z = scaled(exact, third) if more[0] is None else scaled(exact, third) + more[0]
        dz = activation_backward(dy.to(third.dtype), z, activation)
        d_residual = dz.to(dy.dtype)
        db = torch.stack((dz.sum((0, 2, 3)), (dz * exact).sum((0, 2, 3))), 1) if wants_b else None
        dz = (dz * third[:, 1].reshape(-1, 1, 1)).to(sums.dtype)
    else:
        z = ops.fprop(x, w, third, *ctx.values)
        dz = d_residual = activation_backward(dy, z if more[0] is None else z + more[0], activation)
    if wants_b and not has_scale:
        db = ops.bgrad(dz, _spec(*ctx.values).family)
    layout: Layout = "nhwc" if "nhwc" in ctx.layouts else "nchw"
    dz = _in_order(dz, layout)
    dx = ops.dgrad(dz, w, ctx.shapes[0], layout, *ctx.values) if wants_x else None
    dw = ops.wgrad(dz, x, ctx.shapes[1], ctx.layouts[1], *ctx.values) if wants_w else None
    return dx, dw, db, d_residual if has_residual else None, *([None] * 9)


def _dgrad_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    dy, w = ctx.saved_tensors
    dy_wanted, w_wanted = ctx.needs_input_grad[:2]
    d_dy = torch.ops.haloconv.fprop(g, w, None, *ctx.values) if dy_wanted else None
    dw = torch.ops.haloconv.wgrad(dy, g, ctx.shapes[1], ctx.layouts[1], *ctx.values) if w_wanted else None
    return d_dy, dw, *([None] * 9)


def _wgrad_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    dy, x = ctx.saved_tensors
    dy_wanted, x_wanted = ctx.needs_input_grad[:2]
    d_dy = torch.ops.haloconv.fprop(x, g, None, *ctx.values) if dy_wanted else None
    dx = torch.ops.haloconv.dgrad(dy, g, ctx.shapes[1], ctx.layouts[1], *ctx.values) if x_wanted else None
    return d_dy, dx, *([None] * 9)


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _bgrad_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return g.reshape(1, -1, 1, 1).expand(ctx.shape), None


torch.library.register_autograd("haloconv::fprop", _fprop_backward, setup_context=_keep_factors, lib=_library)
torch.library.register_autograd(
    "haloconv::fprop_epilogue", _fprop_epilogue_backward, setup_context=_keep_for_epilogue, lib=_library
)
torch.library.register_autograd("haloconv::dgrad", _dgrad_backward, setup_context=_keep_factors, lib=_library)
torch.library.register_autograd("haloconv::wgrad", _wgrad_backward, setup_context=_keep_factors, lib=_library)
torch.library.register_autograd("haloconv::bgrad", _bgrad_backward, setup_context=_keep_shape, lib=_library)


# --- autocast: PyTorch's rule for conv2d


def cast_for_autocast(device_type: str, dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Floating-point tensors of the device, fp64 excepted, in autocast's ``dtype``; everything else unchanged."""
    return tuple(
        [
            each if each is None or each.dtype is dtype or not is_cast(each, device_type) else each.to(dtype)
            for each in tensors
        ]
    )


def autocast_to(device_type: str) -> torch.dtype | None:
    """The dtype of the autocast that is in force for devices of the type; None without one."""
    if device_type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that conv2d has the tensor in under the autocast in force."""
    device_type = tensor.device.type
    dtype = autocast_to(device_type)
    return tensor.dtype if dtype is None or not is_cast(tensor, device_type) else dtype


def is_cast(tensor: Tensor, device_type: str) -> bool:
    """Whether conv2d takes the tensor in autocast's dtype under autocast for devices of the type."""
    return tensor.device.type == device_type and tensor.is_floating_point() and tensor.dtype != torch.float64


def _autocast_fprop(device_type: str, x: Tensor, w: Tensor, b: Tensor | None, *values: Any) -> Tensor:
    tensors = cast_for_autocast(device_type, torch.get_autocast_dtype(device_type), x, w, b)
    with torch.autocast(device_type, enabled=False):
        y: Tensor = torch.ops.haloconv.fprop(*tensors, *values)
        return y


def _autocast_fprop_epilogue(
    device_type: str, x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, has_scale: bool, *values: Any
) -> Tensor:
    """The residual stays as it is, as an addition leaves it, and so do bias and scale in fp32."""
    dtype = torch.get_autocast_dtype(device_type)
    *factors, bias = cast_for_autocast(device_type, dtype, x, w, None if has_scale else b)
    with torch.autocast(device_type, enabled=False):
        y: Tensor = torch.ops.haloconv.fprop_epilogue(*factors, b if has_scale else bias, residual, has_scale, *values)
        return y


AUTOCAST_DEVICES = ("cuda", "cpu")

for _device, _key in zip(AUTOCAST_DEVICES, ("AutocastCUDA", "AutocastCPU"), strict=True):
    _library.impl("fprop", partial(_autocast_fprop, _device), _key)
    _library.impl("fprop_epilogue", partial(_autocast_fprop_epilogue, _device), _key)
