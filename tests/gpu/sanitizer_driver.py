"""The program that tools/sanitize.py runs under compute-sanitizer: tiny problems, every family and direction.

Inputs are made on the CPU and results are compared there, so that hardly any kernel but ours runs. ``--compile FILE``
compiles what the calls need, and nothing else, into the disk cache, and writes down the kernels that each launches; it
belongs before, without the sanitizer.
"""

from __future__ import annotations

import argparse
import json
import struct
import time
from collections.abc import Collection, Container, Iterable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from haloconv import plan
from haloconv.device import DeviceFacts, device_facts
from haloconv.families import FAMILIES
from haloconv.jit import ArgumentBlock, KernelSource, get_kernel, load_kernel, statistics
from tests import (
    emulated_depthwise,
    emulated_halo_sm90_edges,
    emulated_halo_sm90_implicit_gemm,
    emulated_halo_sm90_moments,
    emulated_halo_sm90_planes,
    emulated_halo_sm90_pointwise,
    emulated_halo_sm90_wgrad,
    emulated_halo_sm90_wgrad_edges,
    emulated_halo_sm90_wgrad_ss,
    oracle,
)
from tests.cases import DTYPE_NAMES, Case, Tensors, make, pick, store
from tests.conformance import on_gpu
from tests.conformance import suite as conformance
from tests.emulated import BY_NAME, MODULES, forced, with_every_not_finite
from tests.families import DEPTHWISE, FACTS, HALO_SM90, SPECIALS, SUBJECTS, Subject
from tests.launches import launched
from tests.measured import on_cpu
from tests.recorder import stamped
from tests.sources import compile_all, noted_sources

TINY = pick(
    "border_3x3", "four_sides", "padding_beyond_filter", "padding_with_stride", "odd_widths", "one_pixel_image",
    "one_pixel_output", "one_row", "one_channel_in", "one_filter", "one_by_one_everything", "rgb_stem", "no_bias",
    "pointwise_stride", "row_filter", "stride_beyond_filter", "dilated_strided_coprime", "groups_odd",
    "depthwise_multiplier", "depthwise_stride", "channels_last", "channels_last_odd", "channels_last_sliced", "sliced",
    "unaligned", "aligned_rows", "joined_rows", "few_tiles",
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.float64)

REPORT_EACH = 10  # calls: what a run that is stopped has done stands in its output
NOT_FINITE = (BY_NAME["large_3x3"], BY_NAME["wide_bottom_right"])  # with NaN and infinities, for the fix-up
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
    """One result of one case in one dtype; the case forces its family.

    ``shape`` forces a way to cut the problem, as ``tests.emulated.Run`` has it. ``finite`` False: some inputs are not.
    ``alternates``: warps write the same bytes alternately, which racecheck takes for a race: it is kept from the call.
    """

    one: Case
    dtype: torch.dtype
    result: str
    shape: str = ""
    finite: bool = True
    alternates: bool = False

    @property
    def name(self) -> str:
        """What it is in files of results; the first word is the family."""
        words = (self.one.spec.family, self.one.name, DTYPE_NAMES[self.dtype], self.result, self.shape)
        return " ".join(filter(None, (*words, "" if self.finite else "not finite")))


class Tiny(NamedTuple):
    """A tiny problem, the results that are computed of it, and what its calls have besides."""

    one: Case
    results: tuple[str, ...]
    shape: str = ""
    finite: bool = True
    alternates: bool = False


def problems_of(subject: Subject) -> list[Tiny]:
    """The tiny problems of a family: those that all families take, or a special family's own."""
    if subject not in SPECIALS:
        followed = (oracle.SCALE_RELU, oracle.RESIDUAL_RELU) if FAMILIES[subject.name].has_epilogue else ()
        whole = [Tiny(one, (*subject.results, *followed)) for one in TINY]
        if subject != HALO_SM90:
            return whole
        not_finite = [Tiny(one, subject.results, "packed rows", False) for one in NOT_FINITE]
        of_1x1 = (emulated_halo_sm90_pointwise, emulated_halo_sm90_planes)
        of_taps = (emulated_halo_sm90_implicit_gemm, emulated_halo_sm90_moments)
        parts = (*of_1x1, *of_taps, emulated_halo_sm90_wgrad_ss)
        forced_ones = (each for part in parts for each in part.SANITIZED)
        special = [Tiny(BY_NAME[name], results, shape) for name, results, shape in forced_ones]
        # Rows of edges_joined begin at other places of 16 bytes each, so that units of two warps meet at other pixels.
        edges = [
            Tiny(one, emulated_halo_sm90_edges.results_of(one.name), alternates=one.name == "edges_joined")
            for one in emulated_halo_sm90_edges.CASES
        ]
        edges.append(Tiny(BY_NAME["edges_joined"], ("fprop", "dgrad"), "rows in passing", alternates=True))
        of_weights = [Tiny(one, ("wgrad",)) for one in emulated_halo_sm90_wgrad.CASES]
        edges += [Tiny(one, emulated_halo_sm90_wgrad_edges.RESULTS[:2]) for one in emulated_halo_sm90_wgrad_edges.CASES]
        return [*whole, *not_finite, *special, *edges, *of_weights]
    module = MODULES[subject.name]
    shape_of = emulated_depthwise.shape_of if subject == DEPTHWISE else lambda one: ""
    own = [Tiny(one, module.results_of(one), shape_of(one)) for one in module.CASES]
    runs = emulated_depthwise.EPILOGUES if subject == DEPTHWISE else ()
    return [*own, *dict.fromkeys(Tiny(BY_NAME[name], (result,), shape) for name, _, result, shape in runs)]


def calls_of(subject: Subject, every: int = 1) -> list[Call]:
    """Every tiny problem in one family; or one call in ``every``, but at least one for each problem.

    That part goes diagonally through cases, dtypes and results.
    """
    calls = []
    for i, tiny in enumerate(problems_of(subject)):
        dtypes = [dtype for dtype in DTYPES if dtype in subject.dtypes and dtype in tiny.one.dtypes]
        step = min(every, len(dtypes) + len(tiny.results) - 1)
        kinds = product(enumerate(dtypes), enumerate(tiny.results))
        chosen = [(dtype, result) for (j, dtype), (k, result) in kinds if (i + j + k) % step == 0]
        calls += [Call(subject.on(tiny.one, dtype), dtype, result, *tiny[2:]) for dtype, result in chosen]
    return calls


def result_of(call: Call, t: Tensors) -> torch.Tensor:
    """What the call gives, cut as it says; without a word, layers of several taps are conv's."""
    family = call.one.spec.family
    if not call.shape:
        with emulated_halo_sm90_implicit_gemm.left_out():
            return oracle.run(call.result, t, call.one)
    plan.clear_plans()
    with forced(family, call.shape):
        got = oracle.run(call.result, t, call.one)
    plan.clear_plans()
    return got


def calls_here(families: Container[str], every: int = 1) -> list[Call]:
    """The calls of those of the families that the current device runs."""
    here = [one for one in (*SUBJECTS, *SPECIALS) if not one.missing() and one.name in families]
    return [call for subject in here for call in calls_of(subject, every)]


def operands(call: Call) -> Tensors:
    """The operands on the CPU."""
    t = make(call.one, call.dtype)
    return t if call.finite else t._replace(x=with_every_not_finite(t.x), dy=with_every_not_finite(t.dy))


def placed(call: Call, device: str) -> tuple[Tensors, Tensors]:
    """The operands on the CPU, and the same values in the same storage on the device; only copies run there."""
    one, here = call.one, operands(call)
    whole = here.each(lambda v: v.contiguous().to(device))
    if one.storage == "contiguous" and one.w_storage == "contiguous":
        return here, whole
    x, w, b, dy = whole
    return here, Tensors(store(x, one.storage), store(w, one.w_storage), b, store(dy, one.storage))


class Noted(NamedTuple):
    """The sources that calls load, each once, and the kernels with stamps that each call launches, by its name."""

    sources: list[KernelSource]
    kernels: dict[str, list[str]]


def note(calls: Iterable[Call], facts: DeviceFacts, only: Collection[str] = ()) -> Noted:
    """What the calls load and launch on a GPU of these facts; ``only``: sources of calls that launch one of these."""
    loaded: dict[str, KernelSource] = {}
    kernels = {}
    for call in calls:
        with noted_sources(facts) as sources, launched() as names:
            result_of(call, placed(call, "cpu")[1])
        kernels[call.name] = stamped(names)
        if not only or not {*kernels[call.name]}.isdisjoint(only):
            loaded |= sources
    return Noted(list(loaded.values()), kernels)


def compile_calls(calls: list[Call], path: Path, only: Collection[str] = ()) -> None:
    """Compile what the calls load, and the planted fault; write down, as JSON, the kernels of each call.

    ``only``: what the calls load that launch one of these kernels.
    """
    facts, start = device_facts(0), time.perf_counter()
    noted = note(calls, facts, only)
    sources, between = [*noted.sources, PLANTED, conformance.BY_NAME["alternating"].source()], time.perf_counter()
    compile_all(sources, facts.arch)
    took = time.perf_counter() - between
    print(
        f"sanitizer driver: {len(calls)} calls noted in {between - start:.1f} s, {len(sources)} sources in {took:.1f} s"
    )
    path.write_text(json.dumps(noted.kernels), encoding="utf-8")


def plant_fault() -> None:
    """Write one element behind the end of a tensor."""
    target = torch.empty(1024, device="cuda")
    kernel = load_kernel(get_kernel(PLANTED, device_facts(0).arch), 0, 0)
    block = ArgumentBlock(16)
    struct.pack_into("qq", block.buffer, 0, target.data_ptr(), target.numel())
    kernel.launch(1, 1, 0, torch.cuda.current_stream().cuda_stream, block.pointer_array_address)
    torch.cuda.synchronize()


def run_alternating() -> None:
    """Run the program that is right and that racecheck takes for a race."""
    case = conformance.BY_NAME["alternating"]
    setup = case.setup()
    (got,), (expected,) = on_gpu.run(case, setup), setup.expected
    assert (got == expected).all()


def check_all(calls: list[Call], fill: bool = False) -> None:
    """Make and check every call. The lines that it prints are those that tools/sanitize.py looks for.

    ``fill``: memory that families with ``tma_stores`` allocate is filled with NaN first.
    """
    print(f"sanitizer driver: {len(calls)} calls asked for", flush=True)
    for done, call in enumerate(calls, 1):
        here, there = placed(call, "cuda")
        torch.use_deterministic_algorithms(fill and FACTS[call.one.spec.family].tma_stores, warn_only=True)
        got = result_of(call, there)
        oracle.check(call.result, on_cpu(got), here, call.one.spec)
        if done % REPORT_EACH == 0:
            print(f"sanitizer driver: {done} calls so far", flush=True)
    torch.cuda.synchronize()
    print(f"sanitizer driver: {len(calls)} calls checked, {statistics().compiles} kernels compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", default=[], help="this family's calls; may be repeated")
    parser.add_argument("--only", metavar="I,J,...", help="only those of the calls that have these numbers, from 0")
    parser.add_argument(
        "--launching",
        action="append",
        default=[],
        metavar="KERNEL",
        help="with --compile: only what the calls load that launch this kernel; may be repeated",
    )
    # initcheck does not see what TMA writes. Where it wrote nothing, the result is wrong: it stays NaN.
    parser.add_argument("--fill", action="store_true", help="initialise what TMA may write")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--compile", type=Path, metavar="FILE", help="only fill the disk cache, and note the calls' kernels"
    )
    mode.add_argument("--plant-fault", action="store_true", help="only write behind the end of a tensor")
    mode.add_argument("--alternating", action="store_true", help="only run what racecheck takes for a race")
    options = parser.parse_args()
    torch.set_num_threads(CPU_THREADS)
    if options.plant_fault or options.alternating:
        plant_fault() if options.plant_fault else run_alternating()
        return
    for missing in filter(None, (subject.missing() for subject in (*SUBJECTS, *SPECIALS))):
        print(f"left out: {missing}")
    calls = calls_here(options.family)
    if options.compile:
        compile_calls(calls, options.compile, options.launching)
        return
    check_all([calls[int(i)] for i in options.only.split(",")] if options.only else calls, options.fill)


if __name__ == "__main__":
    main()
