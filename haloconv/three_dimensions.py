"""``haloconv.conv3d``: the 3-D convolutions that are a matrix product or a 2-D convolution in disguise.

- The stride is the filter, without padding: patches that do not overlap, so that it is one product. Where a patch is
  the whole image, as in vision-language models, on a view; else on one copy.
- 1 x R x S on images that lie in memory one after another: the frames are a batch of images, a view.
- T x 1 x 1: an image has T rows and H * W columns, a view.

Everything else is PyTorch's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from haloconv import env
from haloconv.arguments import (
    Settings,
    are_tensors,
    as_ints,
    follows_a_setting,
    kept,
    left_to_torch,
    of_one_kind,
    settings_of,
)
from haloconv.autograd import Call
from haloconv.choose.choice import DISABLED
from haloconv.functional import autocasted, convolve, goes_straight
from haloconv.layout import is_channels_last
from haloconv.precision import Precision, torch_precision
from haloconv.problem import ConvSpec
from haloconv.support import why_not_elements

Tensor = torch.Tensor
Triple = tuple[int, int, int]

_REFUSED = "these arguments are none of a 3-D convolution"
_EMPTY = "the batch is empty, so there is nothing to multiply"
_SPANS = "a filter spans more than frames or time, and its patches overlap or are padded"
_FRAMES_APART = "frames do not lie in memory one after another; channels_last_3d would"
_ROWS_APART = "rows do not lie in memory one after another"
_PRODUCTS_IN_TF32 = "fp32 products are asked for in full, and PyTorch's setting of matrix products allows TF32"
_get_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


class Volume(NamedTuple):
    """Everything about a call that is not a tensor. ``before`` and ``after`` are the sides of the padding."""

    stride: Triple
    before: Triple
    after: Triple
    dilation: Triple
    groups: int
    settings: Settings
    given: object  # the padding as PyTorch takes it

    @property
    def torchs(self) -> tuple[Any, ...]:
        """The arguments of PyTorch's function after the tensors."""
        return self.stride, self.given, self.dilation, self.groups

    def of_images(self, rows: int, columns: int | None) -> ConvSpec:
        """The 2-D convolution along two of the three dimensions; ``columns`` None where nothing is done along them."""
        two = [rows] if columns is None else [rows, columns]
        stride, dilation = ([each[i] for i in two] + [1] * (2 - len(two)) for each in (self.stride, self.dilation))
        sides = [each[i] for i in two for each in (self.before, self.after)] + [0] * (4 - 2 * len(two))
        spec: Any = (tuple(stride), tuple(sides), tuple(dilation), self.groups, *self.settings)
        return ConvSpec(*spec)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Triple = 1,
    padding: int | Triple | str = 0,
    dilation: int | Triple = 1,
    groups: int = 1,
    *,
    precision: Precision | None = None,
    family: str = "auto",
    strict: bool = False,
) -> Tensor:
    """3-D convolution, a drop-in for torch.nn.functional.conv3d, differentiable to any order.

    A filter that is as large as the stride, without padding, is one matrix product; filters of one frame (1 x R x S)
    and along time alone (T x 1 x 1) are 2-D convolutions where that needs no copy. All else PyTorch runs.

    Args:
        input: (N, C, D, H, W), or (C, D, H, W) for one volume.
        weight: (K, C / groups, T, R, S).
        bias: (K,) or None.
        stride: an int or one for each of D, H and W.
        padding: zeros at both ends of D, H and W: an int or three, ``"same"`` or ``"valid"``.
        dilation: an int or one for each of D, H and W.
        groups: number of groups; divides C and K.
        precision: how fp32 products are formed, as in haloconv.conv2d.
        family: ``"auto"``, or the family that runs the 2-D convolutions that it takes.
        strict: raise RuntimeError instead of running PyTorch's own where it is no product and no 2-D convolution.

    Returns:
        (N, K, E, P, Q) or (K, E, P, Q) with E = (D + 2 * padding - dilation * (T - 1) - 1) // stride + 1, and P and Q
        likewise; channels_last_3d if ``input`` or ``weight`` is.

    Raises:
        RuntimeError, TypeError: what torch.nn.functional.conv3d raises for arguments that it refuses.
        ValueError: ``precision`` or ``family`` is unknown.
    """
    settings, tensors = settings_of(precision, family, strict), (input, weight, bias)
    arguments = (stride, padding, dilation, groups)
    if are_tensors(tensors) and weight.dim() == 5:
        taps: Any = tuple(weight.shape[2:]) if isinstance(padding, str) else None
        asked = _posed_once(arguments, taps, settings)
        if asked is not None:
            return convolve_volume(*tensors, asked)
    return left_to_torch(torch.conv3d, (*tensors, *arguments), settings, _REFUSED)


def posed_volume(arguments: tuple[Any, ...], taps: Triple | None, settings: Settings) -> Volume | None:
    """Stride, padding, dilation and groups in one form; None for what PyTorch refuses.

    ``taps`` of a filter are needed where the padding is ``"same"``.
    """
    stride, padding, dilation, groups = arguments
    step: Any = as_ints(stride, 3)
    spread: Any = as_ints(dilation, 3)
    count, *_ = as_ints(groups, 1) or (0,)
    if step is None or spread is None or min(*step, *spread, count) <= 0:
        return None
    before: Any = (0, 0, 0)
    after: Any = before
    if padding == "same" and taps is not None and step == (1, 1, 1):
        total = [each * (tap - 1) for each, tap in zip(spread, taps, strict=True)]
        before, after = tuple(each // 2 for each in total), tuple(each - each // 2 for each in total)
    elif isinstance(padding, str):
        if padding != "valid":
            return None
    else:
        before = after = as_ints(padding, 3)
        if before is None or min(before) < 0:
            return None
    return Volume(step, before, after, spread, count, settings, padding if isinstance(padding, str) else before)


_posed_once = kept(posed_volume)


def convolve_volume(x: Tensor, w: Tensor, b: Tensor | None, asked: Volume, notes: list[Call] | None = None) -> Tensor:
    """conv3d of tensors, with everything else in ``asked``. Raises as PyTorch's function.

    ``notes`` gets the call that does the same for tensors of this form where it is PyTorch's.
    """
    given = (x, w, b)
    x, w, b = autocasted(x, w, b)
    if not _fits(x, w, b, asked):
        return left_to_torch(torch.conv3d, (*given, *asked.torchs), asked.settings, _REFUSED)
    if x.dim() == 4:
        return convolve_volume(x.unsqueeze(0), w, b, asked).squeeze(0)
    route = route_of(tuple(x.shape), x.stride(), x.dtype, x.device, w, asked)
    run = _ROUTES.get(route)
    if run is not None:
        return run(x, w, b, asked)
    y = left_to_torch(torch.conv3d, (*given, *asked.torchs), asked.settings, route)
    plain = asked.settings.family in ("auto", "aten") and goes_straight(x, w, b)
    if notes is not None and plain and not follows_a_setting(x, asked.settings.precision):
        notes.append(Call(torch.conv3d, asked.torchs, True))
    return y


def _fits(x: Tensor, w: Tensor, b: Tensor | None, asked: Volume) -> bool:
    """Whether PyTorch takes the tensors."""
    if x.dim() not in (4, 5) or w.dim() != 5 or not of_one_kind(x, w, b, w.shape[0]):
        return False
    (channels, *image), (filters, per_group, *taps), groups = x.shape[-4:], w.shape, asked.groups
    if filters % groups or channels != per_group * groups or min(channels, filters, *image, *taps) <= 0:
        return False
    along = zip(image, asked.before, asked.after, asked.dilation, taps, strict=True)
    return all(extent + one + other >= spread * (tap - 1) + 1 for extent, one, other, spread, tap in along)


def route_of(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    w: Tensor,
    asked: Volume,
) -> str:
    """How a batch of volumes of this form is convolved: ``"product"``, ``"frames"``, ``"time"``; or why by PyTorch."""
    taps: Any = tuple(w.shape[2:])
    if asked.settings.family == "aten":
        return "asked for"
    left, in_full = _why_not_here(dtype, device, asked.settings.precision)
    reason = left or why_left(taps, asked)
    if reason is not None or shape[0] == 0:
        return reason or _EMPTY
    products = _why_no_product(taps, asked) or in_full
    if products is None and tuple(shape[2:]) == taps:
        return "product"
    reasons = {"time": _why_not_time(taps, asked), "frames": _why_not_frames(taps, asked)}
    for route, views in (
        ("time", _rows_are_one(shape, strides)),
        ("frames", _frames_are_images(shape, strides, asked)),
    ):
        if reasons[route] is None:
            reasons[route] = views
            if views is None:
                return route
    if products is None:
        return "product"
    return next((each for each in reasons.values() if each not in (None, _SPANS)), None) or products


def why_left(taps: Triple, asked: Volume) -> str | None:
    """None if filters of this kind may be a product or a 2-D convolution, else a sentence: why not."""
    kinds = (_why_no_product, _why_not_time, _why_not_frames)
    return _SPANS if all(kind(taps, asked) is not None for kind in kinds) else None


def _why_no_product(taps: Triple, asked: Volume) -> str | None:
    apart = asked.stride == taps and not any(asked.before + asked.after) and asked.groups == 1
    dense = all(spread == 1 or tap == 1 for spread, tap in zip(asked.dilation, taps, strict=True))
    return None if apart and dense else _SPANS


def _why_not_time(taps: Triple, asked: Volume) -> str | None:
    still = (asked.stride[1:], asked.before[1:], asked.after[1:]) == ((1, 1), (0, 0), (0, 0))
    return None if taps[1:] == (1, 1) and still else _SPANS


def _why_not_frames(taps: Triple, asked: Volume) -> str | None:
    return None if taps[0] == 1 and asked.before[0] == asked.after[0] == 0 else _SPANS


def _why_not_here(dtype: torch.dtype, device: torch.device, precision: Precision | None) -> tuple[str | None, ...]:
    """Why tensors of the dtype on the device stay PyTorch's, and why they may be no product; None each if they may."""
    left = DISABLED if env.disabled() else why_not_elements(dtype, device)
    if dtype != torch.float32 or device.type != "cuda" or (precision or torch_precision()) == "tf32":
        return left, None
    if _get_fp32_precision is not None:
        in_full = _get_fp32_precision("cuda", "matmul") in ("ieee", "none")
    else:
        in_full = not torch.backends.cuda.matmul.allow_tf32
    return left, None if in_full else _PRODUCTS_IN_TF32


# What torch.compiler.assume_constant_result does, but for its import of Dynamo, which takes a second.
_why_not_here._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _rows_are_one(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    return None if shape[3] == 1 or strides[3] == shape[4] * strides[4] else _ROWS_APART


def _frames_are_images(shape: tuple[int, ...], strides: tuple[int, ...], asked: Volume) -> str | None:
    """None if the frames that are read are a batch of images, whose results lie in memory as PyTorch's would."""
    n, c, depth, h, w = shape
    step = asked.stride[0]
    frames, apart = (depth - 1) // step + 1, step * strides[2]
    if frames == 1:
        return None
    batch = n == 1 or strides[0] == frames * apart
    images = is_channels_last((n * frames, c, h, w), (apart, strides[1], *strides[3:]))
    return None if batch and images else _FRAMES_APART


def of_images(route: str, x: Tensor, w: Tensor, asked: Volume) -> tuple[Tensor, Tensor, ConvSpec]:
    """The 2-D convolution that ``route`` names: images, filters, and what is not a tensor. Views."""
    if route == "time":
        return x.flatten(3), w.flatten(3), asked.of_images(0, None)
    x = x[:, :, :: asked.stride[0]]
    images = x.squeeze(2) if _is_one(x.shape[2]) else x.transpose(1, 2).flatten(0, 1)
    return images, w.squeeze(2), asked.of_images(1, 2)


def _by_time(x: Tensor, w: Tensor, b: Tensor | None, asked: Volume) -> Tensor:
    images, filters, spec = of_images("time", x, w, asked)
    return torch.unflatten(convolve(images, filters, b, spec), 3, tuple(x.shape[3:]))


def _by_frames(x: Tensor, w: Tensor, b: Tensor | None, asked: Volume) -> Tensor:
    images, filters, spec = of_images("frames", x, w, asked)
    y, n = convolve(images, filters, b, spec), x.shape[0]
    frames = (x.shape[2] - 1) // asked.stride[0] + 1
    return y.unsqueeze(2) if _is_one(frames) else torch.unflatten(y, 0, (n, frames)).transpose(1, 2)


def _by_product(x: Tensor, w: Tensor, b: Tensor | None, asked: Volume) -> Tensor:
    """y[n, k, patch] = sum of w[k, :] times the patch, in the order of memory that PyTorch's result has."""
    (n, _, *image), (k, _, *taps) = x.shape, w.shape
    extents = [extent // tap for extent, tap in zip(image, taps, strict=True)]
    if _is_one(*extents):
        patches = x[:, :, : taps[0], : taps[1], : taps[2]].reshape(n, -1)
        return torch.nn.functional.linear(patches, w.reshape(k, -1), b).reshape(n, k, 1, 1, 1)
    for dim, (extent, tap) in enumerate(zip(extents, taps, strict=True)):
        x = torch.unflatten(x.narrow(2 + 2 * dim, 0, extent * tap), 2 + 2 * dim, (extent, tap))
    if _is_channels_last_3d(x.shape, x.stride()) or _is_channels_last_3d(w.shape, w.stride()):
        patches = x.permute(0, 2, 4, 6, 3, 5, 7, 1).reshape(n, *extents, -1)
        filters = w.permute(0, 2, 3, 4, 1).reshape(k, -1)
        return torch.nn.functional.linear(patches, filters, b).permute(0, 4, 1, 2, 3)
    filters = w.reshape(1, k, -1).expand(n, -1, -1)
    patches = x.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(n, filters.shape[2], extents[0] * extents[1] * extents[2])
    if b is None:
        return torch.unflatten(torch.bmm(filters, patches), 2, extents)
    return torch.unflatten(torch.baddbmm(b.reshape(1, -1, 1), filters, patches), 2, extents)


def _is_one(*extents: int) -> bool:
    """Whether all are 1 and stay so: what torch.jit.trace writes down is run with other extents, too."""
    return all(extent == 1 for extent in extents) and torch._C._get_tracing_state() is None


def _is_channels_last_3d(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether neighbours in memory are channels, of more than one."""
    return shape[1] > 1 and strides[1] == 1 and all(step > 1 for step in strides[2:])


_ROUTES = {"product": _by_product, "frames": _by_frames, "time": _by_time}
