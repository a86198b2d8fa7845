"""Layers on which ``halo_sm90`` was measured ahead: many taps, weight gradients, signals, strides; a part of rules.py.

Signals and strides by rows of the suite ``fronts`` on an NVIDIA H100 (2026-11-26), in ``nchw``: half of them, as
``tools/judge_rules.py`` halves them, gave the numbers, the other half judged them, but for ``upsamples_by_two``.
"""

from __future__ import annotations

from haloconv import support
from haloconv.problem import Problem

_ON_TENSOR_CORES = ("tf32", "fp16", "bf16")
_LEAST_PIXELS = 1376  # of all signals: the least that was measured
_LEAST_CHANNELS = 32
_PIXELS_OF_24 = 1568  # of weight gradients of groups of 24 channels
_PIXELS_OF_FEW_IMAGES = 6272  # the most in the suite few_images
_NARROW = 48  # pixels of a row: in 16-bit nchw layers of many taps were behind on shorter ones (draws of 2026-11-27)
_MOST_COPIED = 1 << 25  # elements of x and dy, 64 MB
GROUPED_CHANNELS = 16  # of a group: of so many, or fewer, other families were measured ahead


def has_many_taps(problem: Problem) -> bool:
    """Layers of many taps, channels and pixels, that ``halo_sm90`` was measured ahead on."""
    if support.why_no_tensor_cores(problem) is not None or problem.stride != (1, 1):
        return False
    taps, pixels = problem.r * problem.s, problem.n * problem.p * problem.q
    if min(problem.c_per_group, problem.k_per_group) < _LEAST_CHANNELS:
        return False
    if problem.layout == "nchw" and problem.dtype.itemsize == 2 and problem.q < _NARROW:
        return False
    if taps >= 15 and pixels >= 1 << 17:
        return True
    return taps >= 9 and pixels >= _enough_pixels(problem)


def _enough_pixels(problem: Problem) -> int:
    """Pixels of all images of the output from which on 3x3 layers were measured ahead; cuDNN is fastest in ``nhwc``."""
    tf32, nchw = problem.precision_label == "tf32", problem.layout == "nchw"
    if problem.direction == "dgrad" and tf32:
        return 1 << 15
    if nchw:
        return 1 << 16
    if tf32:
        dilated = max(problem.dilation) > 1 and problem.c % 64 == 0 and problem.k % 64 == 0
        return 1 << 15 if dilated else 1 << 17  # dilated with 152 and 216 filters: 0.87 and 0.89 (draws)
    return 1 << 20


def has_few_pixels(problem: Problem) -> bool:
    """Layers of few small images and many channels, on which ``halo_sm90`` was measured ahead with split-K.

    ``weights`` are those of one tap, ``pixels`` those of all images of the output. By rows of the suite few_images: in
    ``nchw`` all gradients in TF32 were at 1.09 or better, and all layers of 128 channels in 16 bits at 1.19 or better.
    """
    if support.why_no_tensor_cores(problem) is not None or max(*problem.stride, *problem.dilation) > 1:
        return False
    weights, pixels = problem.c * problem.k, problem.n * problem.p * problem.q
    if problem.groups > 1 or (problem.r, problem.s) != (3, 3) or problem.c % 128 or problem.k % 128:
        return False
    tf32, nchw = problem.precision_label == "tf32", problem.layout == "nchw"
    if not nchw:
        return tf32 and problem.direction == "dgrad" and pixels <= 1 << 11 and problem.n == 1 and weights <= 1 << 16
    if tf32:
        if problem.direction == "dgrad":
            return pixels <= _PIXELS_OF_FEW_IMAGES
        return pixels <= 400 and (weights <= 1 << 18 or problem.q <= 7)
    return pixels <= (_PIXELS_OF_FEW_IMAGES if weights <= 1 << 14 else 400 if weights >= 1 << 18 else 0)


def has_a_wide_filter_gradient(problem: Problem) -> bool:
    """Weight gradients of stride 1 and at least nine taps: dense ones, and groups of more than 16 channels.

    By rows of the suite on an NVIDIA H100 (2026-11-27: C, ASPP, 1x15, U-Net's, a VAE's, ResNet's and RegNet's layers)
    beside probes of an NVIDIA H200 (2026-11-23 to 26). Behind, or no more than 4 % ahead, and left out: TF32 in
    ``nhwc`` on rows of 7.
    """
    if problem.direction != "wgrad" or problem.precision_label not in _ON_TENSOR_CORES:
        return False
    if max(problem.stride) > 1 or problem.r * problem.s < 9:
        return False
    pixels, piece = problem.n * problem.p * problem.q, 16 // problem.dtype.itemsize
    if problem.layout == "nhwc" and (problem.c % piece or problem.k % piece):
        return False
    if problem.groups > 1:
        return _has_a_grouped_filter_gradient(problem, pixels)
    if min(problem.c, problem.k) < _LEAST_CHANNELS:
        return False
    aligned = problem.layout == "nhwc" or problem.w % piece == problem.q % piece == 0
    if not aligned and 48 <= problem.q < 496:
        return False  # a row of 238 was at 0.65 (a draw of 2026-11-29)
    if pixels < 1 << 15 or problem.q < 28:
        return _has_a_small_map(problem, pixels)
    if problem.layout == "nchw":
        is_wide = problem.q >= 496 or (aligned and (piece == 4 or problem.q >= 48))
    elif piece == 8 and _has_many_products(problem, pixels):
        return False
    else:
        is_wide = piece == 4 or problem.q >= 48 or problem.r * problem.s >= 15 or max(problem.dilation) > 1
    return is_wide or (piece == 8 and problem.q < 48 and _has_a_small_map(problem, pixels))


def is_of_groups_of_24(problem: Problem) -> bool:
    """3x3 layers of groups of 24 channels, of strides of 1 or 2, on tensor cores."""
    square = problem.r == problem.s == 3 and max(problem.dilation) == 1 and problem.stride in ((1, 1), (2, 2))
    grouped = problem.groups > 1 and problem.c_per_group == problem.k_per_group == 24
    return grouped and square and support.why_no_tensor_cores(problem) is None


def has_gradients_of_groups_of_24(problem: Problem) -> bool:
    """``dgrad`` in TF32 in ``nhwc``: 1.35 or better in all eight shipped records of an NVIDIA H200 (32 images)."""
    if problem.direction != "dgrad" or problem.layout != "nhwc" or problem.precision_label != "tf32":
        return False
    return is_of_groups_of_24(problem) and problem.n * problem.c * problem.h * problem.w >= 1 << 20


def _has_many_products(problem: Problem, pixels: int) -> bool:
    """Large 3x3 layers of many filters and channels, on which PyTorch was 8 to 31 % ahead, in 16-bit ``nhwc``.

    By rows of a U-Net and a VAE's decoder on an NVIDIA H200 (2026-11-27): behind were 256 filters of 768 channels at
    2.3e11 operations, 256 and 512 of as many at 3.5e11; 128 of 384 at 2.3e11, and 256 of 512 at 1.7e11, were ahead.
    """
    few, operations = min(problem.c, problem.k), 2 * problem.c * problem.k * problem.r * problem.s * pixels
    return problem.r * problem.s == 9 and few >= 256 and operations >= 2e11


def _has_a_grouped_filter_gradient(problem: Problem, pixels: int) -> bool:
    """Groups of 24 channels were measured: in ``nhwc``, and in TF32, at 2.02 or better from rows of 7 on (32 images).

    Of 64 channels rows of 14 were at 0.84 in 16-bit ``nhwc``, those of 28 at 1.28 with 32 (probes of 2026-11-29).
    """
    if problem.c_per_group == problem.k_per_group == 24 and (problem.dtype.itemsize == 4 or problem.layout == "nhwc"):
        return problem.q >= 7 and pixels >= _PIXELS_OF_24
    least = 28 if min(problem.c_per_group, problem.k_per_group) > 32 and problem.dtype.itemsize == 2 else 14
    enough = min(problem.c_per_group, problem.k_per_group) > GROUPED_CHANNELS and problem.q >= least
    return enough and pixels >= 12544 and (problem.dtype.itemsize == 4 or problem.layout == "nhwc")


def _has_a_small_map(problem: Problem, pixels: int) -> bool:
    """TF32 of 256 channels and more on rows of 14, and in ``nchw`` of 7; 32 images are the fewest measured.

    In 16 bits 128 channels on rows of 28, 256 on rows of 14 and 512 on rows of 7, by rows on an NVIDIA H200
    (2026-11-27; 1.08 and more); on rows of 7 64 images are the fewest measured. More channels are left out in ``nhwc``:
    512 with a dilation were behind, and so were 664 and 408 in ``nchw``, which leave tiles of 64 in part empty.
    """
    if problem.dtype.itemsize == 2:
        few, many = min(problem.c, problem.k), max(problem.c, problem.k)
        wide = few >= (128 if problem.q >= 28 else 256 if problem.q >= 14 else 512) and max(problem.dilation) == 1
        if problem.layout == "nchw":
            wide = wide and problem.c % 64 == problem.k % 64 == 0 and _may_be_copied(problem, pixels)
        else:
            wide = wide and many <= (256 if problem.q >= 14 else 512)
        return wide and problem.q >= 7 and pixels >= (6272 if problem.q >= 14 else 3136)
    if min(problem.c, problem.k) < 256:
        return False
    return problem.q >= (7 if problem.layout == "nchw" else 14) and pixels >= (1568 if problem.q < 14 else 6272)


def _may_be_copied(problem: Problem, pixels: int) -> bool:
    """Whether x and dy of ``nchw`` in 16 bits can be copied to be multiplied by descriptor."""
    return problem.c % 8 == problem.k % 8 == 0 and (problem.c + problem.k) * pixels <= _MOST_COPIED


def has_a_filter_gradient_of_products(problem: Problem) -> bool:
    """``wgrad`` of 1x1 layers of stride 1 in 16-bit ``nchw``, whose short rows PyTorch copies, too.

    By six rows on an NVIDIA H200 (2026-11-27; 1.19 to 1.24 times PyTorch's speed on rows of 14, 32 images), so that
    none judged it. Left out: rows of 7 (1.02 to 1.08), and longer ones, whose copies cost more than they save (0.83 to
    0.90).
    """
    if problem.direction != "wgrad" or problem.dtype.itemsize != 2 or problem.layout != "nchw" or problem.groups > 1:
        return False
    plain = problem.r == problem.s == 1 and problem.stride == (1, 1) and not any(problem.padding)
    pixels = problem.n * problem.p * problem.q
    enough = 14 <= problem.q < 28 and pixels >= 6272 and min(problem.c, problem.k) >= 256
    return plain and enough and _may_be_copied(problem, pixels)


def _is_of_signals(problem: Problem) -> bool:
    """Dense layers of stride 1 over images of one row, of as many channels and pixels as were measured."""
    if problem.precision_label not in _ON_TENSOR_CORES or problem.layout != "nchw" or problem.groups > 1:
        return False
    one_row = problem.h == problem.p == problem.r == 1 and problem.stride == (1, 1) and problem.s >= 3
    enough = problem.n * problem.q >= _LEAST_PIXELS and min(problem.c, problem.k) >= _LEAST_CHANNELS
    return one_row and enough


def _is_long_or_wide(problem: Problem) -> bool:
    """256 channels on lines of 256 pixels were behind PyTorch's, 512 on lines of 128 ahead."""
    return problem.q >= 1024 or min(problem.c, problem.k) >= 512


def convolves_signals(problem: Problem) -> bool:
    """Signals whose ``fprop`` and ``dgrad`` were ahead: all in 16 bits, in TF32 long ones or of many channels."""
    if problem.direction == "wgrad" or not _is_of_signals(problem):
        return False
    return problem.dtype.itemsize == 2 or _is_long_or_wide(problem)


def has_a_filter_gradient_of_signals(problem: Problem) -> bool:
    """Signals whose ``wgrad`` was ahead: all in TF32, in 16 bits long ones or of many channels."""
    if problem.direction != "wgrad" or not _is_of_signals(problem):
        return False
    return problem.dtype.itemsize == 4 or _is_long_or_wide(problem)


def has_a_strided_filter_gradient(problem: Problem) -> bool:
    """``wgrad`` of stride 2. TF32 in ``nchw``: ahead with 4 to 16 taps from rows of 32 results on; behind on rows of 8.

    Rows of 129 and 126, which TMA cannot bring, were at 0.64 and 1.04 (a probe and a draw of an NVIDIA H200).

    1x1 layers in 16 bits: ahead in both layouts with 256 channels and more on rows of 14 and 28 results, by eight rows
    on an NVIDIA H200 (2026-11-27; 1.10 to 1.67 times PyTorch's speed), so that none judged it; not on rows of 7.
    """
    if problem.direction != "wgrad" or problem.groups > 1 or max(problem.dilation) > 1:
        return False
    few, pixels, taps = min(problem.c, problem.k), problem.n * problem.p * problem.q, problem.r * problem.s
    if problem.precision_label == "tf32":
        strided = problem.stride[1] == 2 and problem.stride[0] in (1, 2) and 4 <= taps <= 16 and problem.w % 4 == 0
        enough = problem.q >= 32 and pixels >= 1 << 12 and few >= 16 and max(problem.c, problem.k) >= 64
        return problem.layout == "nchw" and strided and enough
    strided = taps == 1 and problem.stride == (2, 2) and not any(problem.padding)
    whole = problem.c % 8 == problem.k % 8 == 0 and few >= 256
    return problem.dtype.itemsize == 2 and strided and whole and problem.q >= 14 and pixels >= 6272


def upsamples_by_two(problem: Problem) -> bool:
    """``dgrad`` of stride 2, the forward pass of transposed layers, to at most 64 channels and 2^17 pixels or more.

    Only where taps are a multiple of the stride, so that none is multiplied for nothing. Drawn from a probe and all of
    the rows (2026-11-26), so that none judged it: it names five rows, of 1.18 to 1.68 times PyTorch's speed. In 16 bits
    signals alone: of an image 64 filters were behind PyTorch's (2026-11-27).
    """
    if problem.direction != "dgrad" or problem.layout != "nchw" or problem.precision_label not in _ON_TENSOR_CORES:
        return False
    if problem.groups > 1 or max(problem.dilation) > 1 or problem.stride not in ((2, 2), (1, 2)):
        return False
    if problem.dtype.itemsize == 2 and problem.h > 1:
        return False
    even = problem.r % problem.stride[0] == 0 and problem.s % problem.stride[1] == 0
    enough = problem.n * problem.h * problem.w >= 1 << 17 and problem.k >= _LEAST_CHANNELS
    return even and enough and _LEAST_CHANNELS <= problem.c <= 64


KINDS = (
    (has_gradients_of_groups_of_24, "halo_sm90 is faster on TF32 input gradients of groups of 24 channels in nhwc"),
    (convolves_signals, "halo_sm90 is faster on signals of many channels on Hopper's tensor cores"),
    (has_a_filter_gradient_of_signals, "halo_sm90 is faster on weight gradients of signals on Hopper's tensor cores"),
    (upsamples_by_two, "halo_sm90 is faster on input gradients of stride 2 to few channels on Hopper's tensor cores"),
    (
        has_a_filter_gradient_of_products,
        "halo_sm90 is faster on weight gradients of 1x1 layers of short rows on Hopper",
    ),
    (has_a_strided_filter_gradient, "halo_sm90 is faster on weight gradients of stride 2 on Hopper's tensor cores"),
)
"""Each kind, and the reason that is told."""
