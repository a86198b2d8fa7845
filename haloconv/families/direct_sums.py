"""Host half of kernels/direct_sums.cu: the sum over partial results, and the bias gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from haloconv.env import device_facts
from haloconv.families.base import TensorForm
from haloconv.families.launch import Launch
from haloconv.jit import KernelSource, kernel_source

ELEMENTS = {torch.float32: "float", torch.float64: "double", torch.float16: "hc::fp16", torch.bfloat16: "hc::bf16"}
SUM_THREADS = 256

_CHUNK_PIXELS = 8192
_BLOCKS_PER_MULTIPROCESSOR = 8  # 2048 threads


def source(entry: str, dtype: torch.dtype, channel_lanes: int) -> KernelSource:
    """The specialised text; it depends on dtype and on which index runs along the lanes only."""
    constants = {
        "ELEM": ELEMENTS[dtype],
        "THREADS": SUM_THREADS,
        "CHANNEL_LANES": channel_lanes,
        "CHUNK_PIXELS": _CHUNK_PIXELS,
    }
    return kernel_source("direct_sums", entry, constants)


def bind_sum(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    parts: int,
    device: torch.device,
) -> Callable[[int, int], None]:
    """``run(out_pointer, partials_pointer)``: out[i] = sum over parts, in order, of partials[part][i].

    ``shape`` and ``strides`` (elements) are those of the 4-D result; partials are dense in the result's logical order.
    """
    k, c, r, s = shape
    elems = k * c * r * s
    grid = -(-elems // SUM_THREADS)
    return Launch(
        source("sum_partials", dtype, 1), device, grid, SUM_THREADS, 0, "2Q5q4i", (*strides, elems, c, r, s, parts)
    )


def bind_bgrad(
    dtype: torch.dtype, shape: tuple[int, int, int, int], dy: TensorForm, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``bgrad(dy) -> db``: sum of dy (N, K, P, Q) over images and pixels, (K,), in a fixed order."""
    n, k, p, q = shape
    y_n, y_k, y_p, y_q = dy.strides
    if y_p == q * y_q:  # rows follow one another: one long row
        p, q, y_p = 1, p * q, 0
    channel_lanes = 32 if y_k == 1 and y_q != 1 else 1
    chunks = -(-q // _CHUNK_PIXELS)
    groups = -(-k // channel_lanes)
    resident = _BLOCKS_PER_MULTIPROCESSOR * device_facts(device.index).sm_count
    parts = max(1, min(n * p * chunks, -(-resident // groups)))
    launch = Launch(
        source("direct_bgrad", dtype, channel_lanes),
        device,
        groups * parts,
        SUM_THREADS,
        0,
        "2Q8q2i",
        (y_n, y_k, y_p, y_q, n, p, q, chunks, k, parts),
    )
    sum_parts = bind_sum(dtype, (k, 1, 1, 1), (1, 1, 1, 1), parts, device)
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def bgrad(dy: torch.Tensor) -> torch.Tensor:
        partials = dy.new_empty(parts * k, dtype=acc_dtype)
        launch(dy.data_ptr(), partials.data_ptr())
        db = dy.new_empty(k)
        sum_parts(db.data_ptr(), partials.data_ptr())
        return db

    return bgrad


def shipped_sources() -> list[KernelSource]:
    """One source per entry, dtype and lane order."""
    sums = [source("sum_partials", dtype, 1) for dtype in ELEMENTS]
    return sums + [source("direct_bgrad", dtype, lanes) for dtype in ELEMENTS for lanes in (1, 32)]
