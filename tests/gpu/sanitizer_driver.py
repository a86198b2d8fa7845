"""The program that tools/sanitize.py runs under compute-sanitizer: tiny problems, every family and direction.

Inputs are made on the CPU and results are compared there, so that hardly any kernel but ours runs.
"""

from __future__ import annotations

import struct
import sys

import torch

from haloconv.env import device_facts
from haloconv.jit.compile import ArgumentBlock, compile_source, load_kernel
from haloconv.jit.source import KernelSource
from tests import oracle
from tests.cases import Tensors, case_dtypes, make, pick, store
from tests.families import SUBJECTS, Subject

TINY = pick(
    "border_3x3", "four_sides", "padding_beyond_filter", "padding_with_stride", "odd_widths", "one_pixel_image",
    "one_pixel_output", "one_row", "one_channel_in", "one_filter", "one_by_one_everything", "rgb_stem", "no_bias",
    "pointwise_stride", "row_filter", "stride_beyond_filter", "dilated_strided_coprime", "groups_odd",
    "depthwise_multiplier", "depthwise_stride", "channels_last", "channels_last_odd", "channels_last_sliced", "sliced",
    "unaligned", "aligned_rows", "joined_rows",
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.float64)

PLANTED = """
struct Params { float* target; long long element; };
extern "C" __global__ void planted(const Params p) { p.target[p.element] = 1.0f; }
"""


def plant_fault() -> None:
    """Write one element behind the end of a tensor."""
    target = torch.empty(1024, device="cuda")
    source = KernelSource("planted", "planted", (), PLANTED)
    kernel = load_kernel(compile_source(source, device_facts(0).arch), 0, 0)
    block = ArgumentBlock(16)
    struct.pack_into("qq", block.buffer, 0, target.data_ptr(), target.numel())
    kernel.launch(1, 1, 0, torch.cuda.current_stream().cuda_stream, block.pointer_array_address)
    torch.cuda.synchronize()


def on_gpu(t: Tensors, storage: str, w_storage: str) -> Tensors:
    """The same values on the GPU in the same storage; only copies run there."""
    whole = [None if v is None else v.contiguous().cuda() for v in t]
    if storage == "contiguous" and w_storage == "contiguous":
        return Tensors(*whole)
    x, w, b, dy = whole
    return Tensors(store(x, storage), store(w, w_storage), b, store(dy, storage))


def check_family(subject: Subject) -> int:
    """Run and check every tiny problem in one family; the number of calls."""
    calls = 0
    for one, dtype in case_dtypes(TINY):
        if dtype not in DTYPES or dtype not in subject.dtypes:
            continue
        forced = subject.on(one, dtype)
        here = make(forced, dtype)
        there = on_gpu(here, one.storage, one.w_storage)
        for result in subject.results:
            got = oracle.run(result, there, forced)
            oracle.check(result, got.cpu(), here, forced.spec)
            calls += 1
    return calls


def main() -> None:
    calls = 0
    for subject in SUBJECTS:
        if subject.missing():
            print(f"left out: {subject.missing()}")
            continue
        calls += check_family(subject)
    torch.cuda.synchronize()
    print(f"sanitizer driver: {calls} calls checked")


if __name__ == "__main__":
    plant_fault() if "--plant-fault" in sys.argv[1:] else main()
