"""Host half of families/reduce/bgrad.cu: the bias gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch

from haloconv.device import device_facts
from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.reduce import partials
from haloconv.families.reduce.partials import Axis, Partials
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import TensorForm

KERNEL = "reduce/bgrad"
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8  # 2048 threads
_LANE_LOADS = 16  # of a lane in one launch, at most: they take about as long as a second launch
_CHANNEL_LANES = (4, 8, 16, 32)  # the fewer, the fewer pixels a lane has; 32 read whole lines of memory
_ONE_LAUNCH_LANES = _CHANNEL_LANES[:2]
_ONE_LAUNCH_THREADS = (256, 1024)  # 1024 where lanes of 256 threads would have more than _LANE_LOADS


def source(entry: str, dtype: torch.dtype, channel_lanes: int, threads: int) -> KernelSource:
    """The specialised source; it depends on dtype, the threads of a block and which index runs along the lanes only."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[dtype],
        "THREADS": threads,
        "CHANNEL_LANES": channel_lanes,
    }
    return kernel_source(KERNEL, entry, constants)


def bind_bgrad(
    dtype: torch.dtype, shape: tuple[int, int, int, int], dy: TensorForm, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``bgrad(dy) -> db``: sum of dy (N, K, P, Q) over images and pixels, (K,), in a fixed order."""
    n, k, p, q = shape
    axes = tuple(zip(shape, dy.strides, strict=True))
    pixels, acc_dtype = n * p * q, torch.float64 if dtype == torch.float64 else torch.float32
    lanes, parts_lanes = _lane_counts(shape, dy)
    threads = _threads_for(pixels, lanes)
    if pixels <= _LANE_LOADS * (threads // lanes):
        in_one = _channel_sums("bgrad", dtype, (lanes, threads), axes, 1, device)

        def bgrad(dy: torch.Tensor) -> torch.Tensor:
            db = dy.new_empty(k)
            in_one(dy.data_ptr(), db.data_ptr())
            return db

        return bgrad

    resident = _BLOCKS_PER_MULTIPROCESSOR * device_facts(device.index).sm_count
    wanted = ceil_div(pixels, _LANE_LOADS * (_THREADS // parts_lanes))
    parts = min(wanted, ceil_div(resident, ceil_div(k, parts_lanes)))
    sum_pixels = _channel_sums("bgrad_parts", dtype, (parts_lanes, _THREADS), axes, parts, device)
    sum_parts = partials.bind_sum(Partials(dtype, (Axis(k, 1),), parts), device)

    def bgrad_of_parts(dy: torch.Tensor) -> torch.Tensor:
        sums = dy.new_empty(parts * k, dtype=acc_dtype)
        sum_pixels(dy.data_ptr(), sums.data_ptr())
        db = dy.new_empty(k)
        sum_parts(db.data_ptr(), sums.data_ptr(), 0)
        return db

    return bgrad_of_parts


def _lane_counts(shape: tuple[int, int, int, int], dy: TensorForm) -> tuple[int, int]:
    """Channels that neighbouring lanes read in one launch, and in parts: 1 where pixels are neighbours in memory."""
    _, k, p, q = shape
    _, y_k, _, y_q = dy.strides
    if y_k != 1 or (y_q == 1 and p * q > 1):
        return 1, 1
    narrow, wide = _ONE_LAUNCH_LANES
    return narrow if k <= narrow else wide, next((each for each in _CHANNEL_LANES if k <= each), _CHANNEL_LANES[-1])


def _threads_for(pixels: int, lanes: int) -> int:
    """Threads of a block that sums all pixels of its channels."""
    fewer, more = _ONE_LAUNCH_THREADS
    return fewer if pixels <= _LANE_LOADS * (fewer // lanes) else more


def _channel_sums(
    entry: str,
    dtype: torch.dtype,
    block: tuple[int, int],
    axes: Sequence[tuple[int, int]],
    parts: int,
    device: torch.device,
) -> Launch:
    """``run(dy_pointer, to_pointer)``: the sums (parts, K) of a (N, K, P, Q) tensor over images and pixels.

    ``block`` is how many channels its lanes read, and its threads. ``axes`` are the tensor's extents, with strides.
    """
    (n, n_stride), (k, k_stride), (p, p_stride), (q, q_stride) = axes
    lanes, threads = block
    if p_stride == q * q_stride:  # rows follow one another: one long row
        p, q, p_stride = 1, p * q, 0
    rows, step_cols = divmod(threads // lanes, q)
    images, step_rows = divmod(rows, p)
    fields = {
        **{"n_stride": n_stride, "k_stride": k_stride, "p_stride": p_stride, "q_stride": q_stride},
        **{"n": n, "p": p, "q": q},
        **{"step_rows": step_rows, "step_cols": step_cols},
        "step_elems": images * n_stride + step_rows * p_stride + step_cols * q_stride,
        **{"next_row": p_stride - q * q_stride, "next_image": n_stride - p * p_stride},
        **{"k": k, "parts": parts},
    }
    shape_of_launch = LaunchShape(ceil_div(k, lanes) * parts, threads)
    return Launch(source(entry, dtype, lanes, threads), device, shape_of_launch, fields)


def sources() -> list[KernelSource]:
    """One source per entry, dtype, lane order and threads of a block."""
    blocks = {
        "bgrad": list(product((1, *_ONE_LAUNCH_LANES), _ONE_LAUNCH_THREADS)),
        "bgrad_parts": list(product((1, *_CHANNEL_LANES), [_THREADS])),
    }
    return [source(entry, dtype, *block) for entry, each in blocks.items() for block in each for dtype in ELEMENTS]
