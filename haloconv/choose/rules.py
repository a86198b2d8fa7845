"""Which family takes a problem until choices are measured per problem: rules read off results on an NVIDIA H200.

A family is named only for kinds of layers on which it was measured ahead of PyTorch at the same precision and in the
same layout; everything else stays with ``aten``. The results are those of ``benchmarks/results``. A number in a rule is
where the measurements change sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from haloconv import support
from haloconv.choose import rules_products, rules_sm90
from haloconv.choose.rules_sm90 import GROUPED_CHANNELS
from haloconv.device import device_facts
from haloconv.families import FAMILIES
from haloconv.problem import Problem

_HOPPER = (9, 0)
_BANDS_OF_TERMS = 31 * 31  # taps
_CHANNELS_IN_TERMS, _NARROW_IN_TERMS, _PIXELS_IN_TERMS = 24, 128, 3136  # of a group, of weight gradients, of all images
_MARCHED_TAPS = 49  # of one depthwise filter: what marches and small bands take
_LEAST_OUTPUTS = 1 << 20  # elements: the smallest output that was measured of few channels per group
_DENSE_CHANNELS = 32  # per group, in and out, at least: what halo_sm90 was measured on
_CHANNELS_IN_FP64, _PIXELS_IN_FP64 = 64, 3136  # the least that were measured, of all images
_STEM_CHANNELS, _FOLDED_CHANNELS = 4, 3  # of stems, at most; in 16-bit nhwc
_STRIDED_FILTERS, _LEAST_COLS = 48, 22  # of outputs by CUDA cores
_STEM_TAPS = 11  # in a row or column, at most: patches of 16x16 were behind
_COLS_OF_SIXTEEN = 64  # of groups of 16 channels in nhwc, in 16 bits or less than 64: 14 to 31 were at 0.75 to 0.90
_SHORT_ROW = 48  # pixels: of filter gradients of few depthwise taps
_NHWC_COLS = 48  # of 3x3 filters of fp32 planes in nhwc: rows of 14 to 32 were at 0.81 to 1.06
_MARCHED_COLS = 14  # of 16-bit nchw planes: a march of 128 images of 7x7 was at 0.63 (a draw of 2026-11-27)


class Rule(NamedTuple):
    """``family`` takes the problems of which ``applies`` is true, because of ``reason``.

    ``hopper``: only on compute capability 9.0, because elsewhere the family has other kernels for them.
    """

    family: str
    applies: Callable[[Problem], bool]
    reason: str
    hopper: bool = False


class Ruling(NamedTuple):
    """The family that a rule names and why; ``rule`` is the rule's name, empty where it says ``aten``."""

    family: str
    reason: str
    rule: str = ""


def by_rule(problem: Problem, device: torch.device) -> Ruling:
    """The family that runs ``problem`` on ``device``, and why, as if the GPU model was one that was measured.

    Where no rule names a family for tf32x3 it gets what full fp32 gets, which is no less accurate.
    """
    if problem.precision == "tf32x3":
        return _in_terms(problem, device) or by_rule(replace(problem, precision="ieee"), device)
    for rule in RULES:
        if not rule.applies(problem) or FAMILIES[rule.family].why_not(problem, device) is not None:
            continue
        if not rule.hopper or device_facts(device.index).capability == _HOPPER:
            return Ruling(rule.family, f"by rule: {rule.reason}", f"{rule.family} {rule.applies.__name__.strip('_')}")
    for applies, why in rules_products.KINDS:
        if applies(problem, device) and FAMILIES["halo_sm90"].why_not(problem, device) is None:
            return Ruling("halo_sm90", f"by rule: {why}", f"halo_sm90 {applies.__name__}")
    family, reason = _by_cuda_cores(problem)
    return Ruling(family, reason, "" if family == "aten" else f"{family} by_cuda_cores")


def bgrad_by_rule(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[str, str]:
    """What sums dy of ``shape`` (N, K, P, Q) over images and pixels, ``reduce`` or ``aten``, and why."""
    if strides[1] == 1 and shape[1] in (2, 3) and strides[3] == shape[1]:
        return "aten", "by rule: PyTorch is faster where two or three channels lie side by side"
    return "reduce", "a sum over images and pixels"


def _is_depthwise(problem: Problem) -> bool:
    return problem.c_per_group == 1 and problem.groups > 1 and _outputs(problem) >= _LEAST_OUTPUTS


def _outputs(problem: Problem) -> int:
    return problem.n * problem.k * problem.p * problem.q


def _results(problem: Problem) -> int:
    """Elements that ``fprop`` or ``dgrad`` writes."""
    if problem.direction == "dgrad":
        return problem.n * problem.c * problem.h * problem.w
    return _outputs(problem)


def _has_few_taps(problem: Problem) -> bool:
    """Depthwise layers that ``depthwise`` was measured ahead on."""
    if not _is_depthwise(problem):
        return False
    taps, halves, strided = problem.r * problem.s, problem.dtype.itemsize == 2, max(problem.stride) == 2
    if max(problem.dilation) > 1 or max(problem.stride) > 2:
        baseline_ahead = halves and problem.layout == "nhwc" and taps <= 9 and max(problem.dilation) == 2
        return not (problem.direction == "wgrad" and baseline_ahead)
    if _has_small_planes(problem):
        return True
    if problem.direction == "wgrad":
        if problem.q < _SHORT_ROW:
            return _has_many_taps_on_short_rows(problem)
        if problem.layout == "nchw":
            return True
        return taps > 25 if problem.dtype == torch.float16 else strided or taps > 9
    if problem.layout == "nchw":
        return not halves or problem.q >= (_MARCHED_COLS if taps > 9 else 28)
    if not halves and taps == 9 and problem.r == problem.s and problem.q < _NHWC_COLS:
        return False
    return halves or not strided or problem.direction == "dgrad"


def _has_many_taps_on_short_rows(problem: Problem) -> bool:
    """fp32 ``wgrad`` in ``nhwc`` of 5x5 taps and more: 1.63 to 30.8 in nine shipped records (H200, 32 images)."""
    is_square = problem.r == problem.s >= 5 and problem.dtype == torch.float32
    return is_square and problem.layout == "nhwc" and problem.q >= 7 and problem.k_per_group == 1


def _has_small_planes(problem: Problem) -> bool:
    """Planes of 7x7 to 14x14 in ``nchw``, which are copied whole: all 72 rows of six layers were ahead, by 1.7 or more.

    On an NVIDIA H200 (2026-11-27), 64 images, 3x3 to 7x7 taps, strides of 1 and 2, all directions and precisions.
    """
    extents = (problem.h, problem.w, problem.p, problem.q)
    measured = problem.k_per_group == 1 and problem.r * problem.s >= 9 and min(extents) >= 7 and max(extents) <= 14
    return measured and problem.layout == "nchw"


def _has_neighbouring_channels(problem: Problem) -> bool:
    """Filter gradients in nhwc on which kernels of Hopper were measured ahead: pairs of channels in 16 bits, lanes."""
    if problem.direction != "wgrad" or problem.layout != "nhwc" or not _is_depthwise(problem):
        return False
    taps, most = problem.r * problem.s, max(problem.r, problem.s)
    if max(*problem.stride, *problem.dilation, problem.k_per_group) > 1 or taps < 9:
        return False
    if problem.dtype.itemsize == 2:
        return most <= 7 and problem.k % 8 == 0 and problem.k >= 32
    many = taps > 9 or problem.k >= 128  # channels, each a lane's
    return many and taps <= _MARCHED_TAPS and problem.k % 4 == 0 and problem.q >= 48


def _bands_are_ahead(problem: Problem) -> bool:
    """Filters of few taps in 16 bits on which bands were measured ahead of marches: 31x1, and 7x7 on narrow maps.

    A march's ring has a row for each row of the filter, and its rows must be aligned to be staged.
    """
    if problem.dtype.itemsize != 2 or problem.layout != "nchw":
        return False
    narrow = problem.q <= 28 and problem.r * problem.s >= _MARCHED_TAPS and problem.direction != "wgrad"
    return (narrow and not _has_small_planes(problem)) or (problem.s == 1 and problem.r >= 31)


def _has_bands(problem: Problem) -> bool:
    """Depthwise layers that ``depthwise_toeplitz`` was measured ahead on."""
    if not _is_depthwise(problem) or max(*problem.stride, *problem.dilation) > 1:
        return False
    return problem.r * problem.s > _MARCHED_TAPS or _bands_are_ahead(problem)


def _has_a_large_filter(problem: Problem) -> bool:
    """Depthwise layers that ``depthwise_window`` was measured ahead on."""
    plain = max(problem.dilation) == max(problem.stride) == 1
    return _is_depthwise(problem) and plain and problem.r * problem.s >= (81 if problem.direction == "wgrad" else 21)


def _has_few_channels(problem: Problem) -> bool:
    """Stems and grouped layers that ``halo_sm80`` was measured ahead on."""
    if support.why_no_tensor_cores(problem) is not None or _outputs(problem) < _LEAST_OUTPUTS:
        return False
    if problem.groups == 1:
        folded = problem.c <= _FOLDED_CHANNELS and problem.k % 4 == 0 and problem.stride[1] % 2 == 0
        measured = problem.layout == "nchw" or problem.dtype == torch.float32 or folded
        measured = measured and max(problem.r, problem.s) <= _STEM_TAPS
        return problem.direction == "fprop" and problem.c <= _STEM_CHANNELS and measured
    few = min(problem.c_per_group, problem.k_per_group) >= 4
    few = few and max(problem.c_per_group, problem.k_per_group) <= GROUPED_CHANNELS
    if problem.layout == "nhwc":
        eight = problem.c_per_group == problem.k_per_group == 8
        dilated = max(problem.stride) == 1 < max(problem.dilation) and problem.r * problem.s > 1
        half_a_tile = problem.dtype != torch.float32 or problem.c < 2 * _DENSE_CHANNELS
        narrow = problem.c_per_group == 16 and problem.q < _COLS_OF_SIXTEEN and half_a_tile
        return (_marches(problem) and not narrow) or (eight and dilated and problem.q <= 28)
    return few and (problem.direction == "fprop" or max(problem.stride) == 1)


def _has_groups_of_24(problem: Problem) -> bool:
    """3x3 outputs and input gradients of groups of 24 channels, as RegNetY has them.

    By shipped records of an NVIDIA H200 (32 images of 7x7 to 112x112; each of its fastest config): in ``nchw`` all 32,
    of strides of 1 and 2, were at 1.30 of PyTorch's speed or better, in ``nhwc`` all 13 that are named at 1.34 or
    better. There strided outputs were at 1.11, and on rows of 56 pixels ``halo_sm90`` was faster.
    """
    if problem.direction == "wgrad" or not rules_sm90.is_of_groups_of_24(problem):
        return False
    if _outputs(problem) < _LEAST_OUTPUTS:
        return False
    if problem.layout == "nchw":
        return True
    if problem.stride == (1, 1):
        return problem.q < 56 and (problem.direction == "fprop" or problem.dtype.itemsize == 2)
    return problem.direction == "dgrad" and problem.dtype.itemsize == 2


def _marches(problem: Problem) -> bool:
    """Grouped layers in nhwc whose kernels march, and were measured ahead."""
    plain = max(problem.stride) == max(problem.dilation) == 1 and problem.q >= 14
    return plain and problem.c_per_group == problem.k_per_group and problem.c_per_group in (8, 16)


def _has_a_small_filter_gradient(problem: Problem) -> bool:
    """Stems and grouped layers whose weight gradient ``halo_sm80_wgrad`` was measured ahead on."""
    if problem.direction != "wgrad" or problem.precision_label not in ("tf32", "fp16", "bf16"):
        return False
    if _outputs(problem) < _LEAST_OUTPUTS:
        return False
    halves_nhwc = problem.layout == "nhwc" and problem.dtype != torch.float32
    if problem.groups == 1:
        baseline_ahead = halves_nhwc and problem.dtype == torch.float16 and problem.r * problem.s <= 49
        few = problem.c <= (_FOLDED_CHANNELS if halves_nhwc else _STEM_CHANNELS)
        return few and problem.k <= 128 and not baseline_ahead
    if halves_nhwc:
        return _marches(problem)
    if problem.dtype != torch.float32 and (problem.w % 2 or problem.q % 2):
        return False  # rows that begin at odd pixels: a layer was at 0.67 (a draw of 2026-11-27)
    return 4 <= problem.c_per_group <= GROUPED_CHANNELS and 4 <= problem.k_per_group <= GROUPED_CHANNELS


def _has_a_small_filter_gradient_elsewhere(problem: Problem) -> bool:
    """All of these on which ``halo_sm80_wgrad`` stays ahead: groups in 16-bit ``nhwc`` are ``grouped_sm90``'s.

    One that it does not take, of 5x5 taps and 16 channels, was at 0.30 (a draw of 2026-11-28).
    """
    halves_nhwc = problem.layout == "nhwc" and problem.dtype != torch.float32
    return _has_a_small_filter_gradient(problem) and not (halves_nhwc and problem.groups > 1)


def _is_dense_in_fp64(problem: Problem) -> bool:
    """3x3 layers of stride 1 of as many channels and pixels as in rows of an NVIDIA H100 (2026-11-26).

    There all 26, of both layouts, were ahead, ``fprop`` and ``dgrad`` by more than two; all gave the numbers, and none
    was kept to judge them. A dilation of 12 was measured in ``wgrad`` alone: no block of the others holds its halo.
    """
    if problem.dtype != torch.float64 or problem.groups > 1 or problem.stride != (1, 1):
        return False
    enough = min(problem.c, problem.k) >= _CHANNELS_IN_FP64 and problem.n * problem.p * problem.q >= _PIXELS_IN_FP64
    return enough and (problem.r, problem.s) == (3, 3)


def _in_terms(problem: Problem, device: torch.device) -> Ruling | None:
    """What was measured ahead of full fp32 in three TF32 products, ``halo_sm90`` for dense layers, else None.

    By rows of an NVIDIA H200 (2026-11-27). Of ``fprop`` and ``dgrad`` all of 24 channels a group and more, 9 taps and
    more, and 3136 pixels and more were ahead (1.03 and more); of groups of 8 in ``nchw`` ``direct`` is faster. Weight
    gradients of wide 3x3 layers stay with PyTorch, whose cuDNN has algorithms of fewer multiplications for them: with
    256 channels it is ahead, with up to 128 behind (1.10 and more), and with more taps or a dilation far behind (2.7
    and more). Of stems a 7x7 of stride 2 was ahead of both. Of depthwise layers that of 31x31 taps in ``nchw``, where
    our own full fp32 took 1.56 to 1.81 times as long.
    """
    bands = _has_bands(problem) and problem.r * problem.s >= _BANDS_OF_TERMS and problem.layout == "nchw"
    if bands and FAMILIES["depthwise_toeplitz"].why_not(problem, device) is None:
        reason = "by rule: depthwise_toeplitz is faster in three TF32 products than full fp32 on the largest filters"
        return Ruling("depthwise_toeplitz", reason, "depthwise_toeplitz in_terms")
    taps, pixels = problem.r * problem.s, problem.n * problem.p * problem.q
    channels = min(problem.c_per_group, problem.k_per_group)
    few = problem.layout == "nhwc" or problem.direction == "wgrad"
    many = taps >= 9 and channels >= (8 if few else _CHANNELS_IN_TERMS) and pixels >= _PIXELS_IN_TERMS
    many = many and problem.stride == (1, 1)
    if problem.direction == "wgrad":
        narrow = max(problem.c_per_group, problem.k_per_group) <= _NARROW_IN_TERMS and pixels >= 4 * _PIXELS_IN_TERMS
        many = many and (narrow or (pixels >= 1 << 15 and (taps >= 15 or max(problem.dilation) > 1)))
    stem = problem.direction == "fprop" and problem.groups == 1 and problem.stride == (2, 2) and problem.k >= 64
    stem = stem and problem.c <= _STEM_CHANNELS and taps >= 49 and pixels >= 1 << 19
    if (many or stem) and FAMILIES["halo_sm90"].why_not(problem, device) is None:
        reason = "by rule: halo_sm90 is faster in three TF32 products than full fp32 on layers of many taps"
        return Ruling("halo_sm90", reason, "halo_sm90 in_terms")
    return None


RULES = (
    Rule("depthwise_toeplitz", _has_bands, "depthwise_toeplitz is faster on depthwise layers of large filters"),
    Rule("depthwise", _has_few_taps, "depthwise is faster on layers of one channel per group and few taps"),
    Rule(
        "depthwise",
        _has_neighbouring_channels,
        "depthwise is faster on filter gradients in nhwc of one channel per group",
        hopper=True,
    ),
    Rule("depthwise_window", _has_a_large_filter, "depthwise_window is faster on depthwise layers of many taps"),
    Rule("grouped_sm90", _has_few_channels, "grouped_sm90 is faster on groups of 8 and 16 channels in nhwc on Hopper"),
    Rule("halo_sm80", _has_few_channels, "halo_sm80 is faster on layers of few channels per group on tensor cores"),
    Rule("halo_sm80", _has_groups_of_24, "halo_sm80 is faster on 3x3 layers of groups of 24 channels", hopper=True),
    Rule(
        "grouped_sm90",
        _has_a_small_filter_gradient,
        "grouped_sm90 is faster on weight gradients of groups of 8 and 16 channels in nhwc on Hopper",
    ),
    Rule(
        "halo_sm80_wgrad",
        _has_a_small_filter_gradient_elsewhere,
        "halo_sm80_wgrad is faster on weight gradients of few channels per group on tensor cores",
    ),
    Rule(
        "halo_sm90",
        rules_sm90.has_a_wide_filter_gradient,
        "halo_sm90 is faster on weight gradients of wide layers on Hopper's tensor cores",
    ),
    Rule("halo_sm90", rules_sm90.has_many_taps, "halo_sm90 is faster on layers of many taps on Hopper's tensor cores"),
    Rule(
        "halo_sm90",
        rules_sm90.has_few_pixels,
        "halo_sm90 is faster on few small images of many channels on Hopper's tensor cores",
    ),
    Rule("halo_sm80_f64", _is_dense_in_fp64, "halo_sm80_f64 is faster on dense fp64 layers on tensor cores"),
    *(Rule("halo_sm90", applies, reason) for applies, reason in rules_sm90.KINDS),
)


def _by_cuda_cores(problem: Problem) -> tuple[str, str]:
    """``direct`` where the committed results show it ahead on fp32 layers of the kind, else ``aten``."""
    if problem.precision_label != "fp32":
        return "aten", f"by rule: {problem.precision_label} belongs on tensor cores, which direct does not use"
    if problem.c_per_group == 1:
        return "aten", "by rule: direct is slower on layers of one channel per group"
    if problem.groups > 1 and problem.c_per_group <= GROUPED_CHANNELS:
        return _of_groups_by_cuda_cores(problem)
    if problem.r * problem.s < (45 if problem.c > 8 else 17):
        return "aten", "by rule: direct is no faster on dense fp32 layers of up to 16 taps, or of 44 and many channels"
    if problem.stride[0] >= problem.r and problem.stride[1] >= problem.s:
        return "aten", "by rule: direct is slower where no pixel is read twice"  # a 16x16 stem at 0.53 (a draw)
    slower = {"fprop": _is_slow_output, "dgrad": _is_slow_input_gradient, "wgrad": _is_slow_filter_gradient}
    if slower[problem.direction](problem):
        return "aten", f"by rule: direct is slower on dense fp32 {problem.direction} of the kind"
    return "direct", "by rule: direct is faster on dense fp32 layers of many taps"


def _of_groups_by_cuda_cores(problem: Problem) -> tuple[str, str]:
    """Behind were weight gradients of 4 channels a group (to 9 taps: 0.53 to 1.24), and of 1x1 in nchw (from 0.81)."""
    pointwise = problem.r * problem.s == 1 and problem.layout == "nchw"
    few = problem.c_per_group < 8 and problem.r * problem.s <= 9
    if problem.direction == "wgrad" and (few or pointwise):
        return "aten", "by rule: direct is no faster on weight gradients of few products in a group"
    return "direct", "by rule: direct is faster on fp32 layers of few channels per group"


def _is_slow_output(problem: Problem) -> bool:
    """Strided outputs of few filters were at 0.84 to 1.18, planes of 8x8 at 0.44 (draws and probes)."""
    few = max(problem.stride) > 1 and problem.k < _STRIDED_FILTERS
    return few or problem.q < _LEAST_COLS or _results(problem) < _LEAST_OUTPUTS


def _is_slow_input_gradient(problem: Problem) -> bool:
    """Few results, 15,488 of them at 0.02 (a draw), and those without a dilation."""
    return max(problem.dilation) == 1 or _results(problem) < _LEAST_OUTPUTS


def _is_slow_filter_gradient(problem: Problem) -> bool:
    """Very few channels, few pixels, and dilations with fewer channels than A's 32 (0.86 and 0.91 with 16 and 8)."""
    few = problem.c_per_group < 4 or problem.n * problem.p * problem.q < 1 << 16
    return few or (max(problem.dilation) > 1 and problem.c < _DENSE_CHANNELS)
