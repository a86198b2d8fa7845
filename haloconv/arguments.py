"""What the functions beside conv2d share: PyTorch's forms of their arguments, and calls that stay PyTorch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from haloconv.autograd import is_recording
from haloconv.functional import check_names, goes_straight
from haloconv.precision import Precision, convolution_precision, nearest_of_torch, torch_precision
from haloconv.problem import as_int

Tensor = torch.Tensor
Tensors = tuple[Tensor, Tensor, Tensor | None]
"""Input, weight and bias."""

_warned: set[tuple[str, str]] = set()
_is_compiling = torch.compiler.is_compiling
Posed = TypeVar("Posed")


class Settings(NamedTuple):
    """What the functions of haloconv take on top of PyTorch's arguments."""

    precision: Precision | None = None
    family: str = "auto"
    strict: bool = False


def settings_of(precision: Precision | None, family: str, strict: bool) -> Settings:
    """The settings, checked. Raises ValueError for an unknown precision or family."""
    check_names(precision, family)
    return Settings(precision, family, strict)


def as_ints(value: object, dims: int) -> tuple[int, ...] | None:
    """One int for each dimension, where PyTorch takes ``value`` as that: an int, or a sequence of one or ``dims``."""
    try:
        if not isinstance(value, (tuple, list)):
            return (as_int(value, "argument"),) * dims
        items = tuple(as_int(item, "argument") for item in value)
    except TypeError:
        return None
    return items * dims if len(items) == 1 else items if len(items) == dims else None


def kept(pose: Callable[..., Posed]) -> Callable[..., Posed]:
    """``pose``, a function of PyTorch's arguments in a tuple and of more, whose results are kept.

    Those of other arguments than ints, strings and tuples of ints are not: 1.0 is no 1, and a list has no hash.
    """
    known: Callable[..., Posed] = lru_cache(maxsize=4096)(pose)

    def posed(arguments: tuple[Any, ...], *more: Any) -> Posed:
        plain = not _is_compiling() and all(
            type(each) in (int, str) or (type(each) is tuple and all(type(item) is int for item in each))
            for each in arguments
        )
        return (known if plain else pose)(arguments, *more)

    return posed


def are_tensors(tensors: tuple[object, ...]) -> bool:
    """Whether input and weight are tensors, and the bias one or None."""
    x, w, b = tensors
    return isinstance(x, Tensor) and isinstance(w, Tensor) and (b is None or isinstance(b, Tensor))


def of_one_kind(x: Tensor, w: Tensor, b: Tensor | None, filters: int) -> bool:
    """Whether the tensors have one dtype and device, and the bias (filters,) numbers."""
    if x.dtype != w.dtype or x.device != w.device:
        return False
    return b is None or (b.dtype == x.dtype and b.device == x.device and b.dim() == 1 and b.shape[0] == filters)


def left_to_torch(function: Callable[..., Tensor], arguments: tuple[Any, ...], settings: Settings, why: str) -> Tensor:
    """PyTorch's function of these arguments, which raises what it raises for arguments that it refuses.

    Where it takes them, ``why`` says why our kernels do not: raises RuntimeError if ``strict``, and warns once if a
    family was asked for by name.
    """
    y = _at_precision(function, arguments, settings.precision)
    if settings.family == "aten":
        return y
    sentence = f"haloconv: PyTorch's own {function.__name__} runs this: {why}"
    if settings.strict:
        raise RuntimeError(f"{sentence} (strict=True)")
    if settings.family != "auto" and (function.__name__, why) not in _warned:
        _warned.add((function.__name__, why))
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
    return y


def follows_a_setting(x: Tensor, precision: Precision | None) -> bool:
    """Whether PyTorch's setting would have the products of tensors as ``x`` formed in another way than is asked for."""
    if precision is None or x.dtype != torch.float32 or not x.is_cuda:
        return False
    return nearest_of_torch(precision) != torch_precision()


def _at_precision(function: Callable[..., Tensor], arguments: tuple[Any, ...], precision: Precision | None) -> Tensor:
    """PyTorch's function, and its first gradients, at a precision that is asked for, where the call is a plain one."""
    x, w, b, *others = arguments
    plain = are_tensors((x, w, b)) and goes_straight(x, w, b)
    if precision is None or not plain or not follows_a_setting(x, precision):
        return function(*arguments)
    if is_recording(x, w, b):
        recorded: Tensor = _AtPrecision.apply(x, w, b, function, others, precision)
        return recorded
    with convolution_precision(precision):
        return function(*arguments)


class _AtPrecision(torch.autograd.Function):
    """PyTorch's own gradients read its setting when they run: here they are taken anew inside the one asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, *call: Any) -> Tensor:
        ctx.save_for_backward(x, w, b)
        ctx.call = function, others, precision = call
        with convolution_precision(precision):
            y: Tensor = function(x, w, b, *others)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        again, wanted, tensors = torch.is_grad_enabled(), ctx.needs_input_grad[:3], ctx.saved_tensors
        function, others, precision = ctx.call
        if not again:
            tensors = [each if each is None else each.detach() for each in tensors]
        with torch.enable_grad(), convolution_precision(precision):
            leaves = [
                each.requires_grad_() if needed and not each.requires_grad else each
                for each, needed in zip(tensors, wanted, strict=True)
            ]
            y = function(*leaves, *others)
            asked = [each for each, needed in zip(leaves, wanted, strict=True) if needed]
            found = iter(torch.autograd.grad(y, asked, dy, create_graph=again))
        return *(next(found) if needed else None for needed in wanted), None, None, None
