"""``haloconv.conv1d``: a signal is an image of one row, (N, C, L) is (N, C, 1, L), a view; and so is the filter."""

from __future__ import annotations

from typing import Any

import torch

from haloconv import plan as plans
from haloconv.arguments import Settings, Tensors, are_tensors, as_ints, kept, left_to_torch, of_one_kind, settings_of
from haloconv.autograd import Call
from haloconv.functional import autocasted, convolve, convolve_padded
from haloconv.precision import Precision
from haloconv.problem import PADDING_MODES, ConvSpec, PaddingMode
from haloconv.transposed import in_rows

Tensor = torch.Tensor

_REFUSED = "these arguments are none of a 1-D convolution"


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int] = 1,
    groups: int = 1,
    *,
    padding_mode: PaddingMode = "zeros",
    precision: Precision | None = None,
    family: str = "auto",
    strict: bool = False,
) -> Tensor:
    """1-D convolution, a drop-in for torch.nn.functional.conv1d, differentiable to any order, in both modes.

    Args:
        input: (N, C, L), or (C, L) for one signal; any strides.
        weight: (K, C / groups, S).
        bias: (K,) or None.
        stride: samples between neighbours of the output, an int or a sequence of one.
        padding: samples at the ends: an int, a sequence of one, (left, right), ``"same"`` or ``"valid"``; (left, 0) is
            causal, without a copy on our kernels.
        dilation: samples between neighbours of the filter, an int or a sequence of one.
        groups: number of groups; divides C and K.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        precision: how fp32 products are formed, as in haloconv.conv2d.
        family: ``"auto"``, or the family that runs what it takes.
        strict: raise RuntimeError instead of running PyTorch's own where our kernels do not take the problem.

    Returns:
        (N, K, Q) or (K, Q) with Q = (L + left + right - dilation * (S - 1) - 1) // stride + 1; in memory with
        neighbouring channels, where those of ``input`` are.

    Raises:
        RuntimeError, TypeError: what torch.nn.functional.conv1d raises for arguments that it refuses, and
            torch.nn.functional.pad for more padding than its mode has samples for.
        ValueError: ``padding_mode``, ``precision`` or ``family`` is unknown.
    """
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"padding_mode must be one of {PADDING_MODES}, not {padding_mode!r}")
    settings, tensors = settings_of(precision, family, strict), (input, weight, bias)
    arguments = (stride, padding, dilation, groups)
    if are_tensors(tensors):
        taps = weight.shape[-1] if isinstance(padding, str) and weight.dim() else None
        asked = _posed_once(arguments, taps, settings)
        if asked is not None:
            return convolve_row((input, weight, bias), asked, None, padding_mode)
    y = left_to_torch(torch.conv1d, (*tensors, *arguments), settings, _REFUSED)
    if padding_mode == "zeros":
        return y
    raise TypeError(f"conv1d(): {_REFUSED} with padding_mode={padding_mode!r}")


def posed_row(arguments: tuple[Any, ...], taps: int | None, settings: Settings) -> ConvSpec | None:
    """Stride, padding, dilation and groups for images of one row; None for what PyTorch refuses.

    ``taps`` of a filter are needed where the padding is ``"same"``.
    """
    stride, padding, dilation, groups = arguments
    step, spread, (count, *_) = as_ints(stride, 1), as_ints(dilation, 1), as_ints(groups, 1) or (0,)
    if step is None or spread is None or min(*step, *spread, count) <= 0:
        return None
    sides = _sides(padding, taps, step[0], spread[0])
    if sides is None or min(sides) < 0:
        return None
    return ConvSpec((1, step[0]), (0, 0, *sides), (1, spread[0]), count, *settings)


def _sides(padding: Any, taps: int | None, stride: int, dilation: int) -> tuple[int, int] | None:
    """Samples of zeros at the left and at the right."""
    if padding == "same" and stride == 1 and taps is not None:
        total = dilation * (taps - 1)
        return total // 2, total - total // 2
    if isinstance(padding, str):
        return (0, 0) if padding == "valid" else None
    given = as_ints(padding, 2)
    return None if given is None else (given[0], given[1])


_posed_once = kept(posed_row)


def convolve_row(
    tensors: Tensors, spec: ConvSpec, notes: list[Call] | None = None, mode: PaddingMode = "zeros"
) -> Tensor:
    """conv1d of tensors, with everything else in ``spec``, that of images of one row, and ``mode``, its padding's.

    Raises as PyTorch's function. ``notes`` gets the call that does the same for tensors of this form, if there is one.
    """
    x, w, b = autocasted(*tensors)
    if not _fits(x, w, b, spec, mode):
        return left_to_torch(torch.conv1d, _for_torch(tensors, spec, mode), Settings(*spec[4:]), _REFUSED)
    if x.dim() == 2:
        return convolve_row((x.unsqueeze(0), w, b), spec, None, mode).squeeze(0)
    found: list[Call] = []
    image, filters = x.unsqueeze(2), w.unsqueeze(2)
    if mode == "zeros":
        y = convolve(image, filters, b, spec, found).squeeze(2)
    else:
        y = convolve_padded((image, filters, b), spec, ("zeros", mode), found).squeeze(2)
    if found and notes is not None:
        notes.append(_of_rows(found[0], spec, plans.result_layout(image, filters) == "nchw"))
    return y


def _fits(x: Tensor, w: Tensor, b: Tensor | None, spec: ConvSpec, mode: PaddingMode) -> bool:
    """Whether PyTorch takes the tensors."""
    if x.dim() not in (2, 3) or w.dim() != 3 or not of_one_kind(x, w, b, w.shape[0]):
        return False
    (channels, length), (filters, per_group, taps), groups = x.shape[-2:], w.shape, spec.groups
    padded, reach = length + spec.padding[2] + spec.padding[3], spec.dilation[1] * (taps - 1) + 1
    divides = filters % groups == 0 and channels == per_group * groups
    most = {"circular": length, "reflect": length - 1}.get(mode, padded)
    return divides and padded >= reach and max(spec.padding) <= most and min(channels, length, filters, taps) > 0


def _for_torch(tensors: Tensors, spec: ConvSpec, mode: PaddingMode) -> tuple[Any, ...]:
    """The arguments of PyTorch's function; where the ends differ, but for what it calls "same", or are no zeros, of a
    padded input.
    """
    (x, w, b), (left, right) = tensors, spec.padding[2:]
    padding: Any = (left,)
    if mode != "zeros":
        x, padding = torch.nn.functional.pad(x, (left, right), mode), 0
    elif (
        left != right and w.dim() == 3 and (left, right) == _sides("same", w.shape[2], spec.stride[1], spec.dilation[1])
    ):
        padding = "same"
    elif left != right:
        x, padding = torch.nn.functional.pad(x, (left, right)), 0
    return x, w, b, spec.stride[1:], padding, spec.dilation[1:], spec.groups


def _of_rows(call: Call, spec: ConvSpec, contiguous: bool) -> Call:
    """``call``, which takes images of one row, for signals; PyTorch's own function where it gives the same layout."""
    if call.native and contiguous:
        return Call(torch.conv1d, (spec.stride[1:], spec.padding[2:3], spec.dilation[1:], spec.groups), True)
    return Call(in_rows(call.function), call.arguments, call.native)
