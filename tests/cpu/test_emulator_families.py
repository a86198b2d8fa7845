"""Every family on the emulator: its real kernels, under several schedules, against float64. No GPU takes part.

Without ``--every-run`` a case that the list has in several dtypes and with several results runs with each of them, but
not with each pair of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from haloconv import emulator
from haloconv.emulator import build
from haloconv.families import FAMILIES
from tests import oracle
from tests.cases import CASES, Tensors
from tests.covering import covering
from tests.emulated import FAMILY_RUNS, HUGE, LARGE_OUTPUTS, LEFT_OUT, ON_EMULATOR, TENSOR_CORES, Run, execute
from tests.exact import make_exact
from tests.mutations import MUTATIONS
from tests.mutations.runner import run_of

MISSING = emulator.available()
RUNS = [run for runs in FAMILY_RUNS.values() for run in runs()]
JUDGES = {run_of(mutation) for mutation in MUTATIONS}  # what a planted fault is judged by is right without it

LONG_FLOPS, LONG_FLOPS_ON_TENSOR_CORES = 2_000_000, 80_000_000  # from there on optimising a kernel pays
"""What tensor cores multiply is the runtime's work, which is always optimised."""

pytestmark = [
    pytest.mark.usefixtures("emulator_cache"),
    pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}"),
]


def part() -> list[Run]:
    """The runs that are enough without being asked for all."""
    return covering(RUNS, lambda run: run.pairs, JUDGES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", RUNS if metafunc.config.getoption("--every-run") else part(), ids=str)


def test_run(run: Run, emulator_seeds: tuple[int, ...], replay: Callable, record_property: Callable) -> None:
    """Right under every seed, without a finding; no input changed.

    Small integers take the last seed, where the bits must be the reference's. Random values take the others, and the
    last one too in runs that judge a planted fault or have no exact sums: there the bits are the same each time.
    Runs that judge a planted fault are built as the faults are, others as they end soonest.
    """
    several = run.finite and run not in JUDGES and len(emulator_seeds) > 1
    results = []
    for seed in emulator_seeds[:-1] if several else emulator_seeds:
        got = emulated(run, run.tensors, seed, replay)
        with replay(seed):
            oracle.check(run.result, got, run.tensors, run.forced.spec)
            assert oracle.same_bits(got, results[0] if results else got), "another schedule gave other bits"
        results.append(got)
    if not run.finite:
        return
    exact, seed, start = make_exact(run.forced, run.dtype), emulator_seeds[-1], time.perf_counter()
    got = emulated(run, exact, seed, replay)
    record_property("emulated", (run.family, got.numel(), time.perf_counter() - start))  # the first run also compiles
    with replay(seed):
        oracle.check_exact(run.result, got, exact, run.forced.spec)


def emulated(run: Run, tensors: Tensors, seed: int, replay: Callable) -> torch.Tensor:
    """The result under one schedule; no byte of the operands may change."""
    level = build.OPTIMISED if runs_long(run) and run not in JUDGES else build.UNOPTIMISED
    with replay(seed), oracle.Unchanged(tensors), build.optimisation(level):
        return execute(run, tensors, seed)


def runs_long(run: Run) -> bool:
    """Whether time lost in running a kernel that is not optimised is more than the time won in building it."""
    long = LONG_FLOPS_ON_TENSOR_CORES if run.family in TENSOR_CORES else LONG_FLOPS
    return run.case.name in HUGE or run.case.problem().flops >= long


def test_the_list_reaches_everything() -> None:
    """Every case of the shared list runs or is left out with a reason; every direction and dtype has large runs."""
    assert {one.name for one in CASES} == {one.name for one in ON_EMULATOR if one in CASES} | set(LEFT_OUT)
    assert set(FAMILY_RUNS) == set(FAMILIES) - {"aten"}
    for family, runs in FAMILY_RUNS.items():
        large = [run for run in runs() if _outputs(run) >= LARGE_OUTPUTS]
        assert {run.result for run in large} == {run.result for run in runs()} - {"bgrad"}, family
        assert {run.dtype for run in large} == {run.dtype for run in runs()}, family


def test_the_part_has_every_pair_and_every_judge() -> None:
    runs = part()
    assert set().union(*(run.pairs for run in runs)) == set().union(*(run.pairs for run in RUNS))
    assert JUDGES <= set(runs) < set(RUNS)


def _outputs(run: Run) -> int:
    problem = run.case.problem()
    shapes = {"dgrad": problem.x_shape, "wgrad": problem.w_shape, "bgrad": (0,)}
    return torch.Size(shapes.get(run.result, problem.y_shape)).numel()
