"""``haloconv.conv1d``: a signal is an image of one row, (N, C, L) is (N, C, 1, L), a view; and so is the filter."""

from __future__ import annotations

from typing import Any

import torch

from haloconv import plan as plans
from haloconv.arguments import Settings, are_tensors, as_ints, kept, left_to_torch, of_one_kind, settings_of
from haloconv.autograd import Call
from haloconv.functional import autocasted, convolve
from haloconv.precision import Precision
from haloconv.problem import ConvSpec
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
        padding: samples of zeros: an int, a sequence of one, (left, right), ``"same"`` or ``"valid"``; (left, 0) is
            causal, without a copy on our kernels.
        dilation: samples between neighbours of the filter, an int or a sequence of one.
        groups: number of groups; divides C and K.
        precision: how fp32 products are formed, as in haloconv.conv2d.
        family: ``"auto"``, or the family that runs what it takes.
        strict: raise RuntimeError instead of running PyTorch's own where our kernels do not take the problem.

    Returns:
        (N, K, Q) or (K, Q) with Q = (L + left + right - dilation * (S - 1) - 1) // stride + 1; in memory with
        neighbouring channels, where those of ``input`` are.

    Raises:
        RuntimeError, TypeError: what torch.nn.functional.conv1d raises for arguments that it refuses.
        ValueError: ``precision`` or ``family`` is unknown.
    """
    settings, tensors = settings_of(precision, family, strict), (input, weight, bias)
    arguments = (stride, padding, dilation, groups)
    if are_tensors(tensors):
        taps = weight.shape[-1] if isinstance(padding, str) and weight.dim() else None
        asked = _posed_once(arguments, taps, settings)
        if asked is not None:
            return convolve_row(*tensors, asked)
    return left_to_torch(torch.conv1d, (*tensors, *arguments), settings, _REFUSED)


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
    given: Any = as_ints(padding, 2)
    return given


_posed_once = kept(posed_row)


def convolve_row(x: Tensor, w: Tensor, b: Tensor | None, spec: ConvSpec, notes: list[Call] | None = None) -> Tensor:
    """conv1d of tensors, with everything else in ``spec``, that of images of one row. Raises as PyTorch's function.

    ``notes`` gets the call that does the same for tensors of this form, if it may be kept.
    """
    given = (x, w, b)
    x, w, b = autocasted(x, w, b)
    if not _fits(x, w, b, spec):
        return left_to_torch(torch.conv1d, _for_torch(given, spec), Settings(*spec[4:]), _REFUSED)
    if x.dim() == 2:
        return convolve_row(x.unsqueeze(0), w, b, spec).squeeze(0)
    found: list[Call] = []
    image, filters = x.unsqueeze(2), w.unsqueeze(2)
    y = convolve(image, filters, b, spec, found).squeeze(2)
    if found and notes is not None:
        notes.append(_of_rows(found[0], spec, plans.result_layout(image, filters) == "nchw"))
    return y


def _fits(x: Tensor, w: Tensor, b: Tensor | None, spec: ConvSpec) -> bool:
    """Whether PyTorch takes the tensors."""
    if x.dim() not in (2, 3) or w.dim() != 3 or not of_one_kind(x, w, b, w.shape[0]):
        return False
    (channels, length), (filters, per_group, taps), groups = x.shape[-2:], w.shape, spec.groups
    padded, reach = length + spec.padding[2] + spec.padding[3], spec.dilation[1] * (taps - 1) + 1
    divides = filters % groups == 0 and channels == per_group * groups
    return divides and padded >= reach and min(channels, length, filters, taps) > 0


def _for_torch(tensors: tuple[Tensor, Tensor, Tensor | None], spec: ConvSpec) -> tuple[Any, ...]:
    """The arguments of PyTorch's function; where the ends differ, of a padded input, but for what it calls "same"."""
    (x, w, b), (left, right) = tensors, spec.padding[2:]
    padding: Any = (left,)
    if (
        left != right
        and w.dim() == 3
        and spec.padding[2:] == _sides("same", w.shape[2], spec.stride[1], spec.dilation[1])
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
