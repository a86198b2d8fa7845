"""The kernels of ``halo_sm90`` that CI compiles: every tile shape in every type and layout, aligned and not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.pointwise import implicit_gemm, moments, pointwise, pointwise_planes
from haloconv.families.halo_sm90.wgrad import wgrad
from haloconv.families.halo_sm90.wgrad_ss import wgrad_ss
from haloconv.jit import KernelSource
from haloconv.layout import Layout, strides_of
from haloconv.precision import Precision
from haloconv.problem import Direction, EdgeModes, Epilogue, Problem, Request, TensorForm, dense_request

_LAYOUTS: tuple[Layout, ...] = ("nchw", "nhwc")
_Layer = tuple[torch.dtype, Layout, int, int]  # channels, filters

_NO_DEVICE = torch.device("cpu")  # no source depends on one
_WHOLE = (64, 128)  # channels and filters of a layer that meets every tile shape, in chunks of 128 bytes
_NO_GROUPS = (63, 127)  # such a layer whose channels come in no groups of 16 bytes
_LAYERS: tuple[_Layer, ...] = (
    (torch.float32, "nchw", *_WHOLE),
    (torch.float32, "nhwc", *_WHOLE),
    (torch.float32, "nhwc", *_NO_GROUPS),
    (torch.float16, "nchw", *_WHOLE),
    (torch.float16, "nhwc", *_WHOLE),
    (torch.float16, "nhwc", *_NO_GROUPS),
)
_UNALIGNED = (  # heights and widths of images whose rows TMA takes by 1, 2, 4 and 8 planes of channels
    (torch.float32, 64, 66),
    (torch.float32, 63, 65),
    (torch.float16, 62, 66),
    (torch.float16, 63, 65),
)
_PACK_LAYERS: tuple[_Layer, ...] = (  # chunks of 64 and 32 bytes, and packs of outputs
    (torch.float32, "nchw", 16, 24),
    (torch.float16, "nhwc", 16, 24),
)
_SPLIT_LAYERS: tuple[_Layer, ...] = (  # split-K of two
    (torch.float32, "nchw", *_WHOLE),
    (torch.float16, "nhwc", 128, 128),
)


_STRIDED_LAYERS: tuple[tuple[_Layer, int, int], ...] = (  # gradients: filter and stride, a square's
    ((torch.float32, "nchw", *_WHOLE), 4, 2),
    ((torch.float16, "nchw", 16, 24), 8, 4),
    ((torch.float16, "nhwc", *_WHOLE), 3, 2),
    ((torch.float32, "nhwc", 20, 16), 3, 3),
)


_EDGES: tuple[EdgeModes, ...] = (("reflect", "circular"), ("halo", "circular"))
_EDGES_OF_GRADIENTS: tuple[EdgeModes, ...] = (("circular", "circular"), ("reflect", "zeros"), ("zeros", "replicate"))
_RELU = Epilogue(activation="relu")
_SILU = Epilogue(scale=True, activation="silu")
_RESIDUAL = Epilogue(activation="relu", residual=True)


def sources() -> list[KernelSource]:
    """Every source of the representative layers, none twice."""
    found: dict[str, KernelSource] = {}
    for problem in _representative_problems():
        found |= {source.digest: source for source in conv.sources(dense_request(problem, _NO_DEVICE))}
    for layer in _SPLIT_LAYERS:
        request = dense_request(_problem("fprop", *layer, bias=True), _NO_DEVICE)
        found |= {source.digest: source for source in conv.split_sources(request)}
    for layer, modes in product((*_LAYERS, *_PACK_LAYERS), _EDGES):
        request = replace(dense_request(_problem("fprop", *layer), _NO_DEVICE), modes=modes)
        found |= {source.digest: source for source in conv.sources(request)}
    for problem in _weight_gradients():
        found |= {source.digest: source for source in wgrad.sources(dense_request(problem, _NO_DEVICE))}
    for problem, modes in product(_padded_gradients(), _EDGES_OF_GRADIENTS):
        request = replace(dense_request(problem, _NO_DEVICE), modes=modes)
        found |= {source.digest: source for source in wgrad.sources(request)}
    for problem in _by_descriptor():
        found |= {source.digest: source for source in wgrad_ss.sources(dense_request(problem, _NO_DEVICE))}
    for request in _pointwise_requests():
        found |= {source.digest: source for source in pointwise.sources(request)}
    for request in _taps_requests():
        found |= {source.digest: source for source in implicit_gemm.sources(request)}
    for request in _measured_requests():
        found |= {source.digest: source for source in moments.sources(request)}
    for request in _planes_requests():
        found |= {source.digest: source for source in pointwise_planes.sources(request)}
    return list(found.values())


def _pointwise_requests() -> Iterator[Request]:
    """1x1 layers in every direction, type and layout of x and of the result; with gaps; the few tiles are split."""
    for dtype, layout, result in product((torch.float32, torch.float16), _LAYOUTS, _LAYOUTS):
        one = replace(_problem("fprop", dtype, layout, 160, 192, bias=True), h=16, r=1, s=1, epilogue=_RELU)
        for problem in (one, one.toward("dgrad"), *_epilogued(one)):
            yield replace(dense_request(problem, _NO_DEVICE), result_layout=result)
    for dtype in (torch.float32, torch.float16):
        one = replace(_problem("dgrad", dtype, "nhwc", 160, 192), h=16, r=1, s=1, stride=(2, 2))
        yield dense_request(one, _NO_DEVICE)  # with gaps in its result


def _taps_requests() -> Iterator[Request]:
    """3x3 layers in nhwc in both directions and every type, with filters as they lie and packed."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        one = replace(_problem("fprop", dtype, "nhwc", 160, 192, bias=True), padding=(1, 1, 1, 1), epilogue=_RELU)
        for problem in (one, one.toward("dgrad"), *_epilogued(one)):
            yield dense_request(problem, _NO_DEVICE)
        packed = TensorForm(strides_of(one.w_shape, "nchw"), True)
        yield replace(dense_request(one, _NO_DEVICE), second=packed)


def _measured_requests() -> Iterator[Request]:
    """1x1 and 3x3 layers in nhwc and every type, without a bias; of several taps with filters packed, too."""
    for dtype, taps in product((torch.float32, torch.float16, torch.bfloat16), (1, 3)):
        one = replace(_problem("fprop", dtype, "nhwc", 160, 192), h=16, r=taps, s=taps, padding=(taps // 2,) * 4)
        yield dense_request(one, _NO_DEVICE)
        yield replace(dense_request(one, _NO_DEVICE), second=TensorForm(strides_of(one.w_shape, "nchw"), True))


def _planes_requests() -> Iterator[Request]:
    """1x1 layers of planes in every direction and type: with pixels in pairs and not, with a stride, in bands."""
    for dtype, (width, stride) in product((torch.float32, torch.float16), ((7, 1), (14, 1), (14, 2), (56, 2))):
        one = replace(_problem("fprop", dtype, "nchw", 160, 192, bias=True), h=width, w=width, stride=(stride, stride))
        one = replace(one, r=1, s=1, epilogue=_RELU)
        yield from (dense_request(problem, _NO_DEVICE) for problem in (one, one.toward("dgrad"), *_epilogued(one)))


def _epilogued(one: Problem) -> Iterator[Problem]:
    """The layer with a scale and SiLU, which takes many registers, and the layer with a residual."""
    yield replace(one, bias=False, epilogue=_SILU)
    yield replace(one, bias=True, epilogue=_RESIDUAL)


def _weight_gradients() -> Iterator[Problem]:
    """Wide, thin and grouped layers in every type, layout and alignment; pointwise ones; rows and many rows of taps."""
    for dtype, layout, channels, filters in _LAYERS:
        yield _problem("wgrad", dtype, layout, channels, filters)
    for dtype, height, width in _UNALIGNED:
        yield replace(_problem("wgrad", dtype, "nchw", 64, 72), h=height, w=width, padding=(1, 1, 1, 1))
    for dtype, layout in product((torch.float32, torch.float16), _LAYOUTS):
        one = _problem("wgrad", dtype, layout, 32, 64)
        yield replace(one, r=5, s=9, padding=(2, 2, 4, 4))
        yield replace(one, c=64, r=1, s=15, padding=(0, 0, 7, 7))
        yield replace(one, c=256, r=1, s=1)
        yield replace(one, c=96, k=96, groups=4, padding=(1, 1, 1, 1))
    for layout in _LAYOUTS:
        yield replace(_problem("wgrad", torch.float32, layout, 32, 64), precision="tf32x3")  # in terms
    for dtype, width in product((torch.float32, torch.float16, torch.bfloat16), (7, 14)):  # images side by side
        one = _problem("wgrad", dtype, "nchw", 512, 512)
        yield replace(one, n=32, h=width, w=width, padding=(1, 1, 1, 1))


def _padded_gradients() -> Iterator[Problem]:
    """3x3 layers in every type, layout and alignment, 5x9 and strided ones, large and small images."""
    padding = (1, 1, 1, 1)
    for layer in _LAYERS:
        yield replace(_problem("wgrad", *layer), padding=padding)
    for dtype, height, width in _UNALIGNED:
        yield replace(_problem("wgrad", dtype, "nchw", 64, 72), h=height, w=width, padding=padding)
    for dtype, layout in product((torch.float32, torch.bfloat16), _LAYOUTS):
        one = _problem("wgrad", dtype, layout, *_WHOLE)
        yield replace(one, c=32, k=64, h=512, w=512, r=5, s=9, padding=(4, 4, 12, 12), dilation=(2, 3))
        yield replace(one, h=256, w=256, padding=padding)
        yield replace(one, w=16, padding=padding)
        yield replace(one, stride=(2, 2), padding=padding)


def _by_descriptor() -> Iterator[Problem]:
    """Weight gradients in 16 bits with both operands by descriptor: 3x3, 5x9 and 1x1 layers, and planes."""
    for dtype in (torch.float16, torch.bfloat16):
        one = replace(_problem("wgrad", dtype, "nhwc", 256, 256), n=32, padding=(1, 1, 1, 1))
        yield from (replace(one, h=width, w=width) for width in (7, 14, 56))
        yield replace(one, c=32, k=64, r=5, s=9, padding=(2, 2, 4, 4))
        yield replace(one, h=14, w=14, r=1, s=1, padding=(0, 0, 0, 0))
        yield replace(one, h=14, w=14, layout="nchw")


def _representative_problems() -> Iterator[Problem]:
    """Wide layers in every type, layout and alignment, where all tile shapes meet; thin ones for the short chunks."""
    for layer in _LAYERS:
        yield _problem("fprop", *layer, bias=True)
    yield from _epilogued(_problem("fprop", torch.float32, "nchw", *_WHOLE))
    yield from _epilogued(_problem("fprop", torch.float16, "nhwc", *_WHOLE))
    for dtype, height, width in _UNALIGNED:
        yield replace(_problem("fprop", dtype, "nchw", 64, 72), h=height, w=width, padding=(1, 1, 1, 1))
    for dtype, layout, gathered, results in _PACK_LAYERS:
        yield _problem("dgrad", dtype, layout, results, gathered)
    for layer, taps, stride in _STRIDED_LAYERS:
        yield replace(_problem("dgrad", *layer, bias=True), r=taps, s=taps, stride=(stride, stride))
    packed = _problem("fprop", torch.float16, "nhwc", 16, 24, bias=True)
    yield replace(packed, epilogue=_RESIDUAL)  # with its nonfinite fix-up
    yield replace(_problem("fprop", torch.float32, "nchw", 32, 72), w=66, precision="tf32x3")  # in terms


def _problem(
    direction: Direction, dtype: torch.dtype, layout: Layout, channels: int, filters: int, bias: bool = False
) -> Problem:
    precision: Precision = "tf32" if dtype == torch.float32 else "ieee"
    return Problem(
        direction, 2, channels, 64, 64, filters, 3, 3, bias=bias, dtype=dtype, layout=layout, precision=precision
    )
