"""``haloconv.conv2d``: the signature of torch.nn.functional.conv2d on our kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from haloconv import autograd, transforms
from haloconv.decompositions import fprop_in_aten
from haloconv.epilogue import applied, bias_and_scale
from haloconv.families import check_family
from haloconv.library import autocast_dtype, autocast_to, cast_for_autocast, is_cast
from haloconv.padding import as_modes, job_of, modes_in_use, padded_copy
from haloconv.precision import Precision
from haloconv.problem import (
    ACTIVATIONS,
    PRECISIONS,
    ZEROS,
    Activation,
    ConvSpec,
    Epilogue,
    Modes,
    PaddingMode,
    Pair,
    as_four_sides,
    as_int,
    as_pair,
    check_ranks,
    check_residual,
)
from haloconv.strips import convolve_cut

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_TENSOR_OR_NONE = (type(None), torch.Tensor)
_is_compiling = torch.compiler.is_compiling
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
    padding_mode: PaddingMode | Modes = "zeros",
    precision: Precision | None = None,
    family: str = "auto",
    strict: bool = False,
    scale: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """2-D convolution, a drop-in for torch.nn.functional.conv2d, differentiable to any order, in both modes.

    Args:
        input: (N, C, H, W), or (C, H, W) for one image; any strides.
        weight: (K, C / groups, R, S).
        bias: (K,) or None.
        stride: pixels between neighbours of the output, an int or (vertical, horizontal).
        padding: pixels around x: an int, (vertical, horizontal), (top, bottom, left, right), ``"same"``, ``"valid"``.
        dilation: pixels between neighbours of the filter, an int or (vertical, horizontal).
        groups: divides C and K.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"``, ``"circular"``, or a pair (vertical, horizontal).
        precision: of fp32 products: ``"ieee"``, ``"tf32"``, ``"tf32x3"`` (accurate as fp32); None: PyTorch's setting.
        family: ``"auto"`` by measurements and rules, ``"aten"`` for PyTorch's own convolution, or ours: ``"direct"``,
            ``"halo_sm80"``, ``"halo_sm80_wgrad"``, ``"halo_sm80_f64"``, ``"halo_sm90"``, ``"grouped_sm90"``,
            ``"depthwise"``, ``"depthwise_toeplitz"``, ``"depthwise_window"``. With a warning PyTorch runs all else.
        strict: raise RuntimeError instead of running PyTorch's convolution where our kernels do not take the problem.
        scale: (K,) or None: what sums are multiplied by before the bias is added, in fp32.
        activation: None, ``"relu"``, ``"leaky_relu"`` (0.01), ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"``,
            ``"sigmoid"`` or ``"tanh"``, of scale * sums + bias + residual. Autograd records all but ReLU as operations.
        residual: None, or what is added before the activation: of the result's shape and dtype (under autocast of any);
            a copy where its memory order is another.

    Returns:
        (N, K, P, Q) or (K, P, Q), channels_last if ``input`` or ``weight`` is, with Q as
        P = (H + top + bottom - dilation * (R - 1) - 1) // stride + 1.

    Raises:
        RuntimeError, TypeError: what torch.nn.functional's conv2d and pad raise; for a wrong scale or residual as well.
        ValueError: ``padding_mode``, ``precision``, ``family`` or ``activation`` is not one of the names above.
    """
    if not (isinstance(input, torch.Tensor) and isinstance(weight, torch.Tensor) and isinstance(bias, _TENSOR_OR_NONE)):
        raise TypeError(_not_tensors(input, weight, bias))
    if weight.dim() != 4:
        check_ranks(input, weight)
    extent = weight.shape[2:] if isinstance(padding, str) else None
    arguments = (stride, padding, dilation, groups, extent, precision, family, strict)
    try:
        spec = (make_spec if _is_compiling() else cached_spec)(*arguments)
    except TypeError:  # a list has no hash
        spec = make_spec(*arguments)
    if scale is None and activation is None and residual is None and padding_mode == "zeros":
        return convolve(input, weight, bias, spec)
    return _with_epilogue((input, weight, bias), spec, as_modes(padding_mode), scale, activation, residual)


def _not_tensors(*arguments: object) -> str:
    names = ", ".join(type(argument).__name__ for argument in arguments)
    return f"conv2d(): input, weight and bias must be Tensors (bias may be None), not {names}"


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


cached_spec = lru_cache(maxsize=4096, typed=True)(make_spec)


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    spec: ConvSpec,
    notes: list[autograd.Call] | None = None,
) -> torch.Tensor:
    """conv2d of tensors, with everything else in ``spec``.

    Plain eager tensors go straight to our autograd; whatever traces goes through the operator, whatever transforms
    through functions that PyTorch can transform. ``notes`` gets what autograd.fprop has to say.
    """
    if x.dim() == 3:
        return convolve(x.unsqueeze(0), w, b, spec).squeeze(0)
    if _any_autocast():
        x, w, b = autocasted(x, w, b)
    if not goes_straight(x, w, b):
        return _traced_or_transformed(x, w, b, spec)
    return autograd.fprop(x, w, b, spec, notes)


def _with_epilogue(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    spec: ConvSpec,
    modes: Modes,
    scale: torch.Tensor | None,
    activation: Activation | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """conv2d and what follows it, if anything: in the kernel where only kernels have to see it, else as operations."""
    x, w, b = tensors
    _check_epilogue(tensors, scale, activation, residual)
    epilogue = Epilogue(scale is not None, activation, residual is not None)
    pairs = None if scale is None else bias_and_scale(b, scale, x.dtype)
    third = b if pairs is None else pairs
    if modes_in_use(modes, spec.padding) == ZEROS and _is_for_kernels(tensors, scale, residual, pairs, epilogue):
        images, given = x, residual
        if x.dim() == 3:
            images, given = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
        if _any_autocast():
            images, w, third = autocasted(images, w, b) if pairs is None else (*autocasted(images, w, None)[:2], pairs)
        y = autograd.fprop_with((images, w, third), spec, epilogue, given)
        return y if images.dim() == x.dim() else y.squeeze(0)
    y = convolve_padded((x, w, b if pairs is None else None), spec, modes)
    if residual is not None:
        check_residual(residual, y.shape, residual.dtype if _any_autocast() else y.dtype, y.device)
    return applied(y, pairs, epilogue, residual)


def _is_for_kernels(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    pairs: torch.Tensor | None,
    epilogue: Epilogue,
) -> bool:
    """Whether the epilogue of a plain eager call can be a kernel's: its dtypes are, and so are its gradients if wanted.

    ``pairs`` is what the scale and the bias came to.
    """
    x = tensors[0]
    plain = all(each is None or type(each) in _PLAIN_TYPES for each in (scale, residual))
    if not plain or not goes_straight(*tensors):
        return False
    if epilogue.scale and x.dtype == torch.float64:
        return False
    if residual is not None and _any_autocast() and residual.dtype != autocast_dtype(x):
        return False
    seen = [each for each in (*tensors, pairs, residual) if each is not None]
    return epilogue.is_known_from_y or not any(autograd.is_recording(each, each) for each in seen)


def _check_epilogue(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], scale: Any, activation: object, residual: Any
) -> None:
    """Refuse what is no epilogue of these tensors, but for the residual's shape. Raises as conv2d."""
    x, weight, bias = tensors
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {ACTIVATIONS}, not {activation!r}")
    for name, given in (("scale", scale), ("residual", residual)):
        if not (given is None or isinstance(given, torch.Tensor)):
            raise TypeError(f"conv2d(): {name} must be a Tensor or None, not {type(given).__name__}")
    if isinstance(residual, torch.Tensor) and residual.dim() != x.dim():
        raise RuntimeError(
            f"Given input of size {list(x.shape)}, expected residual to have as many dimensions as the result, but got "
            f"{list(residual.shape)}"
        )
    if scale is None:
        return
    for name, each in (("scale", scale), ("bias", bias)):
        if each is not None and (
            each.shape != weight.shape[:1] or not each.is_floating_point() or each.device != weight.device
        ):
            raise RuntimeError(
                f"Given weight of size {list(weight.shape)} on {weight.device}, expected {name} to be "
                f"{weight.shape[0]} floating-point numbers there, but got {list(each.shape)} of {each.dtype} on "
                f"{each.device}"
            )


def convolve_padded(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    spec: ConvSpec,
    modes: Modes,
    notes: list[autograd.Call] | None = None,
) -> torch.Tensor:
    """conv2d of input, weight and bias, with padding of these modes, vertical and horizontal. Notes as in ``convolve``.

    Plain eager tensors are convolved as they are where kernels of ours take them, and rims of the result apart; in all
    other cases a padded copy of the input is convolved.
    """
    modes = modes_in_use(modes, spec.padding)
    if modes == ZEROS:
        return convolve(*tensors, spec, notes)
    x, w, b = autocasted(*tensors) if _any_autocast() else tensors
    images = x.unsqueeze(0) if x.dim() == 3 else x
    job = job_of(images, w, b, spec, modes) if goes_straight(x, w, b) else None
    if job is None:
        copy, left = padded_copy(tensors[0], spec, modes)
        return convolve(copy, *tensors[1:], left)
    if notes is not None and images is x:
        notes.append(autograd.Call(convolve_cut, (job,), False))
    y = convolve_cut(images, w, b, job)
    return y if images is x else y.squeeze(0)


def autocasted(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> tuple[Any, Any, Any]:
    """The tensors of a convolution as the autocast in force has them."""
    device_type = x.device.type
    dtype = autocast_to(device_type)
    if dtype is None:
        return x, w, b
    image, weight, bias = cast_for_autocast(device_type, dtype, x, w, b)
    return image, weight, bias


def goes_straight(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether a convolution of these tensors is a plain eager call, for our autograd."""
    return (
        not _is_compiling()
        and type(x) in _PLAIN_TYPES
        and type(w) in _PLAIN_TYPES
        and (b is None or type(b) in _PLAIN_TYPES)
        and is_plain_call()
    )


def _traced_or_transformed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec) -> torch.Tensor:
    if not _is_compiling() and (_functorch_is_active() or forward_ad._current_level >= 0):
        return transforms.fprop(x, w, b, spec)
    if (_is_compiling() or _tracing_state() is not None) and torch.onnx.is_in_onnx_export():
        return fprop_in_aten(x, w, b, *spec)
    y: torch.Tensor = torch.ops.haloconv.fprop(x, w, b, *spec)
    return y


def behind_casts(call: autograd.Call, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> autograd.Call:
    """``call``, which took these tensors as autocast casts them, for such tensors before that."""
    device_type = x.device.type
    dtype = autocast_to(device_type)
    if call.native or dtype is None:
        return call
    x_cast, w_cast, b_cast = (each is not None and is_cast(each, device_type) for each in (x, w, b))
    function, arguments, _ = call

    def cast_and_run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(
            x.to(dtype) if x_cast else x, w.to(dtype) if w_cast else w, b.to(dtype) if b_cast else b, *arguments
        )

    return call._replace(function=cast_and_run, arguments=())


def is_plain_call() -> bool:
    """Whether plain tensors go straight to our autograd: nothing traces, transforms or intercepts calls."""
    return not (
        _functorch_is_active() or forward_ad._current_level >= 0 or _dispatch_modes() or _tracing_state() is not None
    )


SERVED: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {torch.conv2d: conv2d}
"""PyTorch's functions that are ours inside functional_mode; haloconv.fronts adds those beside conv2d."""


class functional_mode(TorchFunctionMode):
    """Inside ``with haloconv.functional_mode():`` calls of torch.nn.functional.conv2d are calls of haloconv.conv2d.

    So are those of conv1d, conv3d, conv_transpose1d and conv_transpose2d. It reaches the code that no class of a layer
    tells of: functions, and layers with a forward of their own. The arguments mean what they mean for haloconv.conv2d,
    and which convolution runs is chosen as there. Layers of haloconv keep their own settings. Tensors of a class that
    has its own ``__torch_function__`` are left to that class; with ``strict`` this raises RuntimeError. It holds for
    the calling thread, and the innermost of several holds.

    Raises ValueError for an unknown precision or family; inside, conv2d raises what it raises outside.
    """

    def __init__(self, *, precision: Precision | None = None, family: str = "auto", strict: bool = False) -> None:
        check_names(precision, family)
        super().__init__()
        self.precision, self.family, self.strict = precision, family, strict

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        ours = SERVED.get(func)
        if ours is None or not self._is_served(func, types, args, kwargs):
            return func(*args, **kwargs)
        settings = {"precision": self.precision, "family": self.family, "strict": self.strict}
        if _is_compiling():
            return ours(*args, **kwargs, **settings)
        try:
            return ours(*args, **kwargs, **settings)
        except (RuntimeError, TypeError):
            func(*args, **kwargs)  # what PyTorch refuses, it refuses in its own words
            raise

    def _is_served(
        self, func: Callable[..., Any], types: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        padding = args[4] if len(args) > 4 else kwargs.get("padding")
        if isinstance(padding, (tuple, list)) and len(padding) > int(func.__name__[-2]):
            return False  # sides that differ are ours alone
        if _is_compiling():
            return True
        if sys._getframe(2).f_globals.get("__name__", "").startswith("haloconv."):
            return False  # a convolution that this package gives to PyTorch, by the settings of its own caller
        other = next((each for each in types if not _takes_any_function(each)), None)
        if other is not None and self.strict:
            raise RuntimeError(
                f"haloconv.functional_mode(strict=True): {other.__name__} has a __torch_function__ of its own, which "
                f"decides how {func.__name__} of it runs"
            )
        return other is None


def _takes_any_function(cls: Any) -> bool:
    """Whether torch's functions treat a subclass of torch.Tensor as they treat torch.Tensor itself."""
    own, usual = (getattr(each, "__func__", each) for each in (cls.__torch_function__, torch.Tensor.__torch_function__))
    return own in (usual, torch._C._disabled_torch_function_impl)


def check_names(precision: Precision | None, family: str) -> None:
    """Raise ValueError for an unknown precision or family."""
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision must be None or one of {PRECISIONS}, not {precision!r}")
    check_family(family)
