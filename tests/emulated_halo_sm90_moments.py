"""The runs of halo_sm90/moments on the emulator: tiles of pointwise and of implicit_gemm, on cases that these have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests import emulated_halo_sm90_implicit_gemm as of_taps
from tests import emulated_halo_sm90_pointwise as of_pointwise
from tests.measured import MOMENTS, MOMENTS_IMAGES, MOMENTS_RESIDUAL

CASES = ()
SHAPES = {f"measured {shape}": None for shape in (*of_pointwise.SHAPES, *of_taps.SHAPES)}
KERNELS = {"halo_sm90/moments", "halo_sm90/moments_sum"}
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_EVERY, _BOTH = (FP32, FP16, BF16), (FP32, FP16)
# shape, cases, dtypes
_RUNS: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...]], ...] = (
    ("pointwise", ("sm90_pointwise_nhwc",), _EVERY),
    ("pointwise", ("sm90_pointwise_stride", "sm90_pointwise_stride_joined", "sm90_pointwise_stride_long"), _BOTH),
    ("pointwise", ("sm90_pointwise_pixel", "sm90_pointwise_stride_deep"), _BOTH),
    ("pointwise", ("sm90_pointwise_spaced",), (FP32,)),
    ("pointwise kept", ("sm90_pointwise_many_nhwc",), _BOTH),
    ("pointwise streamed", ("sm90_pointwise_many_nhwc", "sm90_pointwise_deep_nhwc"), _BOTH),
    ("pointwise two blocks", ("sm90_pointwise_nhwc",), _BOTH),
    ("pointwise columns shared", ("sm90_pointwise_nhwc",), _BOTH),
    ("pointwise 256 columns", ("sm90_pointwise_nhwc",), _BOTH),
    ("taps", ("sm90_taps",), _EVERY),
    ("taps", ("sm90_taps_packed", "sm90_taps_images", "sm90_taps_stride", "sm90_taps_wide", "sm90_taps_far"), _BOTH),
    ("taps", ("sm90_taps_beyond", "sm90_taps_beyond_far", "sm90_taps_valid", "sm90_taps_pixels"), _BOTH),
    ("taps, two blocks", ("sm90_taps", "sm90_taps_rows_apart"), _BOTH),
    ("taps, columns shared", ("sm90_taps",), _BOTH),
    ("taps, 128 pixels", ("sm90_taps_many",), _BOTH),
    ("taps, few columns", ("sm90_taps_rows_apart",), (FP32,)),
    ("taps, in cluster", ("sm90_taps_cluster",), _BOTH),
    ("taps, in cluster, columns shared", ("sm90_taps_cluster",), (FP16,)),
)
_ADDED: tuple[tuple[str, str, tuple[str, ...], tuple[torch.dtype, ...]], ...] = (  # the same, of a result before it
    (MOMENTS_RESIDUAL, "pointwise", ("sm90_pointwise_nhwc", "sm90_pointwise_stride_joined"), _EVERY),
    (MOMENTS_RESIDUAL, "pointwise kept", ("sm90_pointwise_many_nhwc",), _BOTH),
    (MOMENTS_RESIDUAL, "pointwise two blocks", ("sm90_pointwise_nhwc",), _BOTH),
    (MOMENTS_RESIDUAL, "pointwise 256 columns", ("sm90_pointwise_nhwc",), _BOTH),
    (MOMENTS_RESIDUAL, "taps", ("sm90_taps", "sm90_taps_packed"), _BOTH),
    (MOMENTS_IMAGES, "pointwise", ("sm90_pointwise_many_nhwc", "sm90_pointwise_stride"), _EVERY),
    (MOMENTS_IMAGES, "pointwise", ("sm90_pointwise_pixel",), _BOTH),
    (MOMENTS_IMAGES, "pointwise two blocks", ("sm90_pointwise_many_nhwc",), _BOTH),
    (MOMENTS_IMAGES, "taps", ("sm90_taps_cluster_tiles",), _EVERY),
    (MOMENTS_IMAGES, "taps, two blocks", ("sm90_taps_cluster_tiles",), _BOTH),
)
_NOT_FINITE = (("sm90_pointwise_nhwc", "measured pointwise"), ("sm90_taps", "measured taps"))
SANITIZED = (  # case, results, shape: what compute-sanitizer is to see
    ("sm90_pointwise_nhwc", (MOMENTS,), "measured pointwise two blocks"),
    ("sm90_pointwise_stride", (MOMENTS,), "measured pointwise"),
    ("sm90_pointwise_many_nhwc", (MOMENTS,), "measured pointwise kept"),
    ("sm90_taps", (MOMENTS,), "measured taps"),
    ("sm90_taps_packed", (MOMENTS,), "measured taps, columns shared"),
    ("sm90_taps_beyond", (MOMENTS,), "measured taps"),
    ("sm90_taps_cluster", (MOMENTS,), "measured taps, in cluster"),
    ("sm90_pointwise_many_nhwc", (MOMENTS_IMAGES,), "measured pointwise two blocks"),
    ("sm90_pointwise_stride", (MOMENTS_RESIDUAL, MOMENTS_IMAGES), "measured pointwise"),
    ("sm90_taps_cluster_tiles", (MOMENTS_RESIDUAL, MOMENTS_IMAGES), "measured taps"),
)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for shape, names, dtypes in _RUNS:
        yield from ((name, dtype, MOMENTS, f"measured {shape}", True) for name in names for dtype in dtypes)
    for result, shape, names, dtypes in _ADDED:
        yield from ((name, dtype, result, f"measured {shape}", True) for name in names for dtype in dtypes)
    for name, shape in _NOT_FINITE:
        yield from ((name, dtype, MOMENTS, shape, False) for dtype in _BOTH)


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, the convolution has the tile that it has where it is not measured."""
    plain = shape.removeprefix("measured ")
    with (of_pointwise if plain in of_pointwise.SHAPES else of_taps).forced(plain):
        yield
