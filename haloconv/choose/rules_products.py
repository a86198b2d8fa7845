"""Layers on which ``halo_sm90`` was measured ahead as matrix products, or by what it saves; a part of rules.py."""

from __future__ import annotations

import torch

from haloconv import support
from haloconv.choose.trust import stamped
from haloconv.choose.whole import bare, is_ahead, saved_ms
from haloconv.device import device_facts
from haloconv.families import FAMILIES
from haloconv.families.common import ceil_div
from haloconv.problem import Problem, dense_request
from haloconv.roofline import limit_ms

_LEAST_MAP, _LEAST_OF_TAPS = 196, 4 << 20  # pixels of an image, elements of the result: where a tap is a product
_LEAST_STRIDED = 256  # channels of strided gradients in nhwc: 64 were at 0.68 in TF32 (a draw of 2026-11-28)
_MOST_OF_DGRAD = 1024  # filters of 1x1 gradients in nhwc, 16 bits: from there on 0.92, 0.985 and 0.996 (draws)
_FULL = 0.95  # the least share of chunks of channels, and of blocks of filters, that are no zeros
_CHUNK_BYTES, _BLOCK = 128, 64  # of channels; filters
_LEAST_PRODUCT_BYTES = 8_000_000  # that a 1x1 layer reads of pixels and writes: the least that was measured
_LEAST_OF_CHANNELS = 128  # where a tap is a product
_PIXELS_OF_FEW_CHANNELS = 6272  # of all images
_COLS_OF_TIES, _LEAST_RESULTS = 64, 3 << 19  # of pointwise in 16-bit nchw: a row; elements that it writes
_LEAST_OFF = 3 / 16  # the least dilation that was measured ahead, in extents of the image: 12 of 64

_LARGE_PRODUCT = "halo_sm90 is faster on 1x1 layers of many pixels and channels on Hopper's tensor cores"


def is_a_large_product(problem: Problem, device: torch.device) -> bool:
    """Whether the layer is a 1x1 one that ``halo_sm90`` has a kernel for and was measured ahead on.

    By probes of an NVIDIA H200 (2026-11-24): 66 directions of ResNet-50's layers with 32 images, in TF32 and fp16. Half
    of them (``random.Random(20261124).sample`` of their sorted names) gave the numbers: with stride 1 in ``nhwc``,
    PyTorch keeps 16-bit ``fprop`` of 512 channels and more, and 7x7. Of the other half the rule then names 30 layers,
    at 1.02 of PyTorch's speed or better, all 29 that were 3 % ahead among them; 45 more that an earlier run had are 3 %
    ahead, too. None had fewer pixels, bytes or channels than the rule asks for.

    In 16-bit ``nchw`` ``pointwise`` is left out on rows of 64 pixels and more: there its fastest tile was at 0.99 to
    1.08 of PyTorch's speed, and at 1.00 in the median, in 17 shipped records of layers without a bias, and draws of it
    at 0.87 to 1.31. On 28 and 56 pixels all rows and draws were at 1.02 to 1.25, one record at 0.95.
    """
    if problem.direction == "wgrad" or problem.precision_label not in ("tf32", "fp16", "bf16"):
        return False
    strided, pixels = problem.stride == (2, 2), problem.n * problem.p * problem.q
    if (problem.r, problem.s) != (1, 1) or problem.groups > 1 or not (strided or problem.stride == (1, 1)):
        return False
    if min(problem.c, problem.k) < 64 or problem.c % 32 or problem.k % 32:
        return _is_strided_of_few_channels(problem, device)
    if pixels < 1568 or pixels * (problem.c + problem.k) * problem.dtype.itemsize < _LEAST_PRODUCT_BYTES:
        return False
    if problem.layout == "nhwc" and strided and problem.direction == "dgrad" and problem.c < _LEAST_STRIDED:
        return False
    if problem.layout == "nhwc" and not strided:
        many = problem.c >= 512 if problem.direction == "fprop" else problem.k >= _MOST_OF_DGRAD
        if (many and problem.dtype.itemsize == 2) or pixels < 1 << 12:
            return False
    kernel = _product_kernel(problem, device)
    if kernel == "halo_sm90/pointwise" and problem.layout == "nchw" and problem.dtype.itemsize == 2:
        filters = problem.k if problem.direction == "fprop" else problem.c
        whole = filters <= 64 or filters % 128 == 0
        return whole and problem.q < _COLS_OF_TIES and pixels * filters >= _LEAST_RESULTS
    return kernel is not None


def _is_strided_of_few_channels(problem: Problem, device: torch.device) -> bool:
    """Strided 1x1 layers in ``nchw`` of 32 channels and more, on which ``pointwise_planes`` was far ahead.

    By shipped records of an NVIDIA H200 of RegNetY's layers (32 images): 16-bit ``fprop`` at 1.99 or better in three,
    ``dgrad`` at 1.90 or better in four. Of ``fprop`` in TF32 another kernel was faster.
    """
    halves, forward = problem.dtype.itemsize == 2, problem.direction == "fprop"
    whole = min(problem.c, problem.k) >= 32 and problem.c % 8 == problem.k % 8 == 0
    if problem.layout != "nchw" or problem.stride != (2, 2) or not whole or (forward and not halves):
        return False
    enough = problem.n * problem.p * problem.q >= _PIXELS_OF_FEW_CHANNELS
    return enough and _product_kernel(problem, device) == "halo_sm90/pointwise_planes"


def _product_kernel(problem: Problem, device: torch.device) -> str | None:
    """The kernel of 1x1 layers that takes the problem, if one does: ``halo_sm90/conv`` was mostly behind PyTorch."""
    family = FAMILIES["halo_sm90"]
    if family.why_not(problem, device) is not None:
        return None
    kernel = family.configs(dense_request(problem, device))[0].kernel
    return None if kernel == "halo_sm90/conv" else kernel


def _fills_its_tiles(problem: Problem) -> bool:
    """Whether hardly anything of what ``halo_sm90`` multiplies for the layer's channels and filters is padding."""
    channels, filters = (problem.c, problem.k) if problem.direction == "fprop" else (problem.k, problem.c)
    held = _CHUNK_BYTES // problem.dtype.itemsize
    return all(each >= _FULL * ceil_div(each, unit) * unit for each, unit in ((channels, held), (filters, _BLOCK)))


_PRODUCT_OF_TAPS = "halo_sm90 is faster as one matrix product for each tap on Hopper's tensor cores"


def is_a_product_for_each_tap(problem: Problem, device: torch.device) -> bool:
    """Layers of several taps that ``implicit_gemm`` was measured ahead on, of stride 1 in ``nhwc``.

    By the shipped records of an NVIDIA H200 (2026-11-28), each of the fastest tile. Where many taps lie outside of the
    image, which the kernel skips, it was at 1.15 of PyTorch's speed or better in all 15 records of ``nhwc``, at 2.07 in
    the median; with smaller dilations and no bias at 0.92 to 1.14 in 34, at 1.03 in the median: PyTorch keeps these.
    It keeps ``fprop`` in TF32 in ``nchw``, too, which was at 0.89 to 1.13.

    In ``nchw`` by tuning and rows of that GPU the same day: 27 layers of networks of 128 channels and more, strides and
    7x7 among them, were at 1.06 or better, one whose channels were split at 0.79. Ten of few images that clusters run
    were at 1.09 or better. Of 17 draws that the rule named then the ten whose channels and filters fill their blocks
    were at 1.00 or better, the seven others at 0.67 to 1.09.

    Only where the kernel has a stamp: of a shipped record the result is looked at first, of a rule it is not.
    """
    if problem.direction == "wgrad" or problem.groups > 1:
        return False
    pixels, filters = problem.p * problem.q, problem.k
    if problem.direction == "dgrad":
        pixels, filters = problem.h * problem.w, problem.c
    is_planes, leaves_the_image = problem.layout == "nchw", _leaves_the_image(problem)
    if not is_planes and not (pixels >= _LEAST_MAP and problem.stride == (1, 1) and leaves_the_image):
        return False
    reads_twice = problem.r > problem.stride[0] or problem.s > problem.stride[1]
    if max(problem.stride) > 2 or not reads_twice:
        return False  # nobody measured these
    channels = min(problem.c, problem.k)
    if channels < _LEAST_OF_CHANNELS or not _fills_its_tiles(problem) or support.why_no_tensor_cores(problem):
        return False
    family = FAMILIES["halo_sm90"]
    if family.why_not(problem, device) is not None:
        return False
    first = family.configs(dense_request(problem, device))[0]
    if first.kernel != "halo_sm90/implicit_gemm" or first.kernel not in stamped():
        return False
    if first.derived.in_cluster:
        return is_planes
    if first.derived.splits > 1 or problem.n * pixels * filters < _LEAST_OF_TAPS:
        return False
    return leaves_the_image or problem.dtype.itemsize == 2 or problem.direction == "dgrad"


def _leaves_the_image(problem: Problem) -> bool:
    """Whether the outer taps of a filter lie outside of the image for many of its results."""
    dilated = zip((problem.r, problem.s), problem.dilation, (problem.h, problem.w), strict=True)
    return all(taps >= 3 and dilation >= _LEAST_OFF * extent for taps, dilation, extent in dilated)


_AS_A_WHOLE = "halo_sm90 saves more passes over the result than its convolution is behind PyTorch's"


def wins_as_a_whole(problem: Problem, device: torch.device) -> bool:
    """Whether ``halo_sm90`` saves more by its epilogue than the convolution alone was measured behind PyTorch's.

    By rows of an NVIDIA H200 (2026-11-23 and 2026-11-24) of 64 channels and more with stride 1: it was at 0.89 of
    PyTorch's speed or better on 3x3 layers from 2^14 pixels of all images on, and at 0.87 on 1x1 layers from 6272 on.
    PyTorch's time is taken to be the roofline's over 0.4, about the least that it reached there where it was ahead.
    """
    if problem.direction != "fprop" or problem.precision_label not in ("tf32", "fp16", "bf16"):
        return False
    if problem.groups > 1 or max(problem.stride) > 1 or min(problem.c, problem.k) < 64:
        return False
    taps, pixels = problem.r * problem.s, problem.n * problem.p * problem.q
    if taps not in (1, 9) or problem.c % 8 or problem.k % 8 or pixels < (6272 if taps == 1 else 1 << 14):
        return False
    alone, gpu_name = bare(problem), device_facts(device.index).name
    if taps == 1 and _product_kernel(alone, device) is None:
        return False
    limit, saved = limit_ms(alone, gpu_name), saved_ms(problem, alone, "halo_sm90", gpu_name)
    if not saved or limit is None:
        return False
    aten_ms = limit / 0.4
    return is_ahead(aten_ms / (0.87 if taps == 1 else 0.89), aten_ms + saved, problem.direction)


KINDS = (
    (is_a_large_product, _LARGE_PRODUCT),
    (is_a_product_for_each_tap, _PRODUCT_OF_TAPS),
    (wins_as_a_whole, _AS_A_WHOLE),
)
"""What applies to a problem on a device, and why."""
