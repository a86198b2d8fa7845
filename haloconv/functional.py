"""``haloconv.conv2d``: the signature of torch.nn.functional.conv2d on our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.autograd import forward_ad

from haloconv import autograd, transforms
from haloconv.library import AUTOCAST_DEVICES, cast_for_autocast, fprop_in_aten
from haloconv.precision import Precision
from haloconv.problem import ACTIVATIONS, Activation, ConvSpec, Pair, as_four_sides, as_int, as_pair, check_ranks

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_is_compiling = torch.compiler.is_compiling
_is_autocast_enabled = torch.is_autocast_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_functorch_is_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    *,
    precision: Precision | None = None,
    family: str = "auto",
    strict: bool = False,
    activation: Activation | None = None,
) -> torch.Tensor:
    """2-D convolution, a drop-in for torch.nn.functional.conv2d, differentiable to any order, in both modes.

    Args:
        input: (N, C, H, W), or (C, H, W) for one image; any strides.
        weight: (K, C / groups, R, S).
        bias: (K,) or None.
        stride, dilation: pixels, an int or (vertical, horizontal).
        padding: pixels of zeros: an int, (vertical, horizontal), (top, bottom, left, right), ``"same"`` or ``"valid"``.
        groups: number of groups; divides C and K.
        precision: how fp32 products are formed: ``"ieee"``, ``"tf32"``, or None to follow PyTorch's setting.
        family: ``"auto"`` or the family that must run: ``"direct"``, ``"aten"``.
        strict: raise RuntimeError instead of running PyTorch's convolution where our kernels do not take the problem.
        activation: ``"relu"`` for max(0, y) in place of y, which needs no memory of its own; None for y.

    Returns:
        (N, K, P, Q) or (K, P, Q) with P = (H + top + bottom - dilation * (R - 1) - 1) // stride + 1 and Q likewise;
        channels_last if ``input`` or ``weight`` is.

    Raises:
        RuntimeError, TypeError: what torch.nn.functional.conv2d raises for arguments that it refuses.
        ValueError: ``precision``, ``family`` or ``activation`` is not one of the names above.
    """
    if not (isinstance(input, torch.Tensor) and isinstance(weight, torch.Tensor)) or (
        bias is not None and not isinstance(bias, torch.Tensor)
    ):
        names = ", ".join(type(argument).__name__ for argument in (input, weight, bias))
        raise TypeError(f"conv2d(): input, weight and bias must be Tensors (bias may be None), not {names}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {ACTIVATIONS}, not {activation!r}")
    if weight.dim() != 4:
        check_ranks(input, weight)
    filter_extent = weight.shape[2:] if isinstance(padding, str) else None
    new_spec = make_spec if _is_compiling() else _cached_spec
    try:
        spec = new_spec(stride, padding, dilation, groups, filter_extent, precision, family, strict)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        spec = make_spec(stride, padding, dilation, groups, filter_extent, precision, family, strict)
    return convolve(input, weight, bias, spec, activation=activation)


def make_spec(
    stride: object,
    padding: object,
    dilation: object,
    groups: int,
    filter_extent: Sequence[int] | None,
    precision: Precision | None,
    family: str,
    strict: bool,
) -> ConvSpec:
    """The arguments of conv2d that are no tensors, checked and in one form. Raises as conv2d."""
    stride, dilation = as_pair(stride, "stride"), as_pair(dilation, "dilation")
    sides = as_four_sides(padding, filter_extent=filter_extent, stride=stride, dilation=dilation)
    return ConvSpec(stride, sides, dilation, as_int(groups, "groups"), precision, family, strict)


_cached_spec = lru_cache(maxsize=4096, typed=True)(make_spec)


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    spec: ConvSpec,
    notes: dict | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """conv2d of tensors, with everything else in ``spec`` and ``activation``.

    Plain eager tensors go straight to our autograd; whatever traces goes through the operator, whatever transforms
    through functions that PyTorch can transform. ``notes`` gets what autograd.fprop has to say.
    """
    if x.dim() == 3:
        return convolve(x.unsqueeze(0), w, b, spec, None, activation).squeeze(0)
    if _any_autocast():
        device_type = x.device.type
        if device_type in AUTOCAST_DEVICES and _is_autocast_enabled(device_type):
            x, w, b = cast_for_autocast(device_type, x, w, b)
    if not _is_compiling() and (_functorch_is_active() or forward_ad._current_level >= 0):
        return autograd.activated(transforms.fprop(x, w, b, spec), activation)
    if (
        _is_compiling()
        or type(x) not in _PLAIN_TYPES
        or type(w) not in _PLAIN_TYPES
        or (b is not None and type(b) not in _PLAIN_TYPES)
        or _dispatch_modes()
        or _tracing_state() is not None
    ):
        traced_for_onnx = not _is_compiling() and _tracing_state() is not None and torch.onnx.is_in_onnx_export()
        fprop = fprop_in_aten if traced_for_onnx else torch.ops.haloconv.fprop
        return autograd.activated(fprop(x, w, b, *spec), activation)
    return autograd.fprop(x, w, b, spec, notes, activation)
