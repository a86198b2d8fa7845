"""The program that tools/sanitize.py runs under compute-sanitizer: tiny problems, every family and direction.

Inputs are made on the CPU and results are compared there, so that hardly any kernel but ours runs. ``--compile-only``
compiles what the calls need, and nothing else, into the disk cache; it belongs before, without the sanitizer.
"""

from __future__ import annotations

import argparse
import struct
import time
from collections.abc import Container, Iterable
from itertools import product
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.jit import ArgumentBlock, KernelSource, get_kernel, load_kernel, statistics
from tests import oracle
from tests.cases import Case, Tensors, make, pick, store
from tests.emulated import MODULES
from tests.families import SPECIALS, SUBJECTS, Subject
from tests.texts import compile_all, noted_texts

TINY = pick(
    "border_3x3", "four_sides", "padding_beyond_filter", "padding_with_stride", "odd_widths", "one_pixel_image",
    "one_pixel_output", "one_row", "one_channel_in", "one_filter", "one_by_one_everything", "rgb_stem", "no_bias",
    "pointwise_stride", "row_filter", "stride_beyond_filter", "dilated_strided_coprime", "groups_odd",
    "depthwise_multiplier", "depthwise_stride", "channels_last", "channels_last_odd", "channels_last_sliced", "sliced",
    "unaligned", "aligned_rows", "joined_rows", "few_tiles",
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.float64)

REPORT_EACH = 10  # calls: what a run that is stopped has done stands in its output
COPY_ENGINE = ("halo_sm90", "grouped_sm90", "depthwise")  # families with kernels whose results leave by the copy engine
CPU_THREADS = 2  # of each process: references are tiny, and the tools run side by side

PLANTED = KernelSource(
    "planted",
    "planted",
    (),
    """
struct Params { float* target; long long element; };
extern "C" __global__ void planted(const Params p) { p.target[p.element] = 1.0f; }
""",
)


class Call(NamedTuple):
    """One result of one case in one dtype; the case forces its family."""

    one: Case
    dtype: torch.dtype
    result: str


def results_of(subject: Subject) -> list[tuple[Case, tuple[str, ...]]]:
    """The tiny problems of a family and their results: those that all take, or a special family's own."""
    if subject not in SPECIALS:
        return [(one, subject.results) for one in TINY]
    module = MODULES[subject.name]
    return [(one, module.results_of(one)) for one in module.CASES]


def calls_of(subject: Subject, every: int = 1) -> list[Call]:
    """Every tiny problem in one family; or one call in ``every``, but at least one for each problem.

    That part goes diagonally through cases, dtypes and results.
    """
    calls = []
    for i, (one, results) in enumerate(results_of(subject)):
        dtypes = [dtype for dtype in DTYPES if dtype in subject.dtypes and dtype in one.dtypes]
        step = min(every, len(dtypes) + len(results) - 1)
        kinds = product(enumerate(dtypes), enumerate(results))
        chosen = [(dtype, result) for (j, dtype), (k, result) in kinds if (i + j + k) % step == 0]
        calls += [Call(subject.on(one, dtype), dtype, result) for dtype, result in chosen]
    return calls


def calls_here(every: int = 1, families: Container[str] = ()) -> list[Call]:
    """The calls of every family that the current device runs, or of those named."""
    here = [one for one in (*SUBJECTS, *SPECIALS) if not one.missing() and (not families or one.name in families)]
    return [call for subject in here for call in calls_of(subject, every)]


def placed(call: Call, device: str) -> tuple[Tensors, Tensors]:
    """The operands on the CPU, and the same values in the same storage on the device; only copies run there."""
    one = call.one
    here = make(one, call.dtype)
    whole = [None if v is None else v.contiguous().to(device) for v in here]
    if one.storage == "contiguous" and one.w_storage == "contiguous":
        return here, Tensors(*whole)
    x, w, b, dy = whole
    return here, Tensors(store(x, one.storage), store(w, one.w_storage), b, store(dy, one.storage))


def texts_of(calls: Iterable[Call], facts: DeviceFacts) -> list[KernelSource]:
    """The kernel texts that the calls load on a GPU of these facts, each once."""
    with noted_texts(facts) as texts:
        for call in calls:
            oracle.run(call.result, placed(call, "cpu")[1], call.one)
    return list(texts.values())


def compile_only(calls: list[Call]) -> None:
    """Compile what the calls load, and the planted fault."""
    facts, start = device_facts(0), time.perf_counter()
    texts = [*texts_of(calls, facts), PLANTED]
    noted = time.perf_counter()
    compile_all(texts, facts.arch)
    took = time.perf_counter() - noted
    print(f"sanitizer driver: {len(calls)} calls noted in {noted - start:.1f} s, {len(texts)} texts in {took:.1f} s")


def plant_fault() -> None:
    """Write one element behind the end of a tensor."""
    target = torch.empty(1024, device="cuda")
    kernel = load_kernel(get_kernel(PLANTED, device_facts(0).arch), 0, 0)
    block = ArgumentBlock(16)
    struct.pack_into("qq", block.buffer, 0, target.data_ptr(), target.numel())
    kernel.launch(1, 1, 0, torch.cuda.current_stream().cuda_stream, block.pointer_array_address)
    torch.cuda.synchronize()


def check_all(calls: list[Call], total: int, fill: bool = False) -> None:
    """Make and check every call. The lines that it prints are those that tools/sanitize.py looks for.

    ``fill``: memory that families of ``COPY_ENGINE`` allocate is filled with NaN first.
    """
    print(f"sanitizer driver: {len(calls)} of {total} calls", flush=True)
    for done, call in enumerate(calls, 1):
        here, there = placed(call, "cuda")
        torch.use_deterministic_algorithms(fill and call.one.spec.family in COPY_ENGINE, warn_only=True)
        got = oracle.run(call.result, there, call.one)
        oracle.check(call.result, got.cpu(), here, call.one.spec)
        if done % REPORT_EACH == 0:
            print(f"sanitizer driver: {done} calls so far", flush=True)
    torch.cuda.synchronize()
    print(f"sanitizer driver: {len(calls)} calls checked, {statistics().compiles} kernels compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="make only one call in so many")
    parser.add_argument("--family", action="append", default=[], help="only this family's calls; may be repeated")
    # initcheck does not see what the copy engine writes. Where it wrote nothing, the result is wrong: it stays NaN.
    parser.add_argument("--fill", action="store_true", help="initialise what the copy engine may write")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--compile-only", action="store_true", help="only fill the disk cache with what the calls need")
    mode.add_argument("--plant-fault", action="store_true", help="only write behind the end of a tensor")
    options = parser.parse_args()
    torch.set_num_threads(CPU_THREADS)
    if options.plant_fault:
        plant_fault()
        return
    for missing in filter(None, (subject.missing() for subject in (*SUBJECTS, *SPECIALS))):
        print(f"left out: {missing}")
    calls = calls_here(options.every, options.family)
    if options.compile_only:
        compile_only(calls)
    else:
        check_all(calls, len(calls_here(families=options.family)), options.fill)


if __name__ == "__main__":
    main()
