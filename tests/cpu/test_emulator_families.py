"""Every family on the emulator: its real kernels, under several schedules, against float64. No GPU takes part.

Without ``--every-run`` a part: of runs for a kernel without a stamp, those in which each case has each of its
dtypes, each result and each way to be cut, and each way to be cut each dtype with each result; of others, whose kernels
a GPU has seen as they are, each case of the shared list with each result, and of the rest the quarter that the commit's
seed says (tests/parts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from zlib import crc32

import pytest
import torch

from haloconv import emulator
from haloconv.choose.trust import stamped
from haloconv.emulator import build, emulated_device
from haloconv.families import FAMILIES
from haloconv.families.files import kernels_of
from haloconv.problem import dense_request
from tests import emulated_halo_sm90, emulated_halo_sm90_wgrad_ss, oracle
from tests.cases import CASES, Tensors
from tests.covering import covering
from tests.emulated import FAMILY_RUNS, TENSOR_CORES, Run, execute
from tests.emulated_cases import HUGE, LARGE_OUTPUTS, LEFT_OUT, ON_EMULATOR
from tests.exact import make_exact
from tests.fuzz.campaign import commit_seed
from tests.mutations.runner import run_of
from tests.parts import PARTS, draws, faults

MISSING = emulator.available()
RUNS = [run for runs in FAMILY_RUNS.values() for run in runs()]
NEW = {run for run in RUNS if not run.kernels <= set(stamped())}
JUDGES = {run_of(mutation) for mutation in faults(commit_seed())}
"""What a planted fault of this commit is judged by is right without it."""

LONG_FLOPS, LONG_FLOPS_ON_TENSOR_CORES = 2_000_000, 80_000_000  # from there on optimising a kernel pays
"""What tensor cores multiply is the runtime's work, which is always optimised."""

pytestmark = [
    pytest.mark.usefixtures("emulator_cache"),
    pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}"),
]


def features(run: Run, seed: int) -> set:
    """What the run shows that a part must show."""
    if run in NEW:
        return run.pairs
    return {each for each in run.shown if run.is_listed and each == run.of_case or draws(each, seed)}


def part(seed: int | None = None) -> list[Run]:
    """The runs that are enough without being asked for all."""
    seed = commit_seed() if seed is None else seed
    return covering(RUNS, lambda run: features(run, seed), {run_of(mutation) for mutation in faults(seed)})


@cache
def rounded() -> set[Run]:
    """Those of the part that also take random values: each way to be cut with each dtype and result."""
    return set(covering(part(), lambda run: {(run.family, run.cut, run.dtype, run.result)}, JUDGES))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", RUNS if metafunc.config.getoption("--every-run") else part(), ids=str)


def test_run(run: Run, request: pytest.FixtureRequest, replay: Callable, record_property: Callable) -> None:
    """Right under every seed, without a finding; no input changed.

    Small integers take the last seed, where the bits must be the reference's, and random values the others: roundings
    are those of a way to be cut, so one case of each shows them, and the other cases take one of the seeds. Values
    that are not finite have no exact sums: they take every seed, and the bits are the same each time.
    Runs that judge a planted fault are built as the faults are, others as they end soonest.
    """
    seeds = request.config.getoption("--emulator-seeds")
    every = request.config.getoption("--every-run") or len(seeds) == 1
    integers = seeds[-1] if every or run in rounded() else seeds[crc32(str(run).encode()) % len(seeds)]
    results = []
    for seed in seeds if every or not run.finite else seeds[:-1] if run in rounded() else ():
        got = emulated(run, run.tensors, seed, replay)
        with replay(seed):
            oracle.check(run.result, got, run.tensors, run.forced.spec)
            assert oracle.same_bits(got, results[0] if results else got), "another schedule gave other bits"
        results.append(got)
    if not run.finite:
        return
    exact = make_exact(run.forced, run.dtype, result=run.result)
    got = emulated(run, exact, integers, replay)
    with replay(integers):
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
    runs, seed = part(), commit_seed()
    some, every = (set().union(*(features(run, seed) for run in each)) for each in (runs, RUNS))
    assert some == every and JUDGES <= set(runs) < set(RUNS)


def test_kernels_that_stand_apart_are_launched_by_runs_of_their_shapes_alone() -> None:
    """So a new one does not make all runs of its family new."""
    every = set().union(*emulated_halo_sm90.KERNELS_APART.values())
    assert every < set(kernels_of("halo_sm90"))
    apart = emulated_halo_sm90_wgrad_ss.KERNELS
    one = next(run for run in RUNS if run.kernels == apart)
    for shape in ("", one.shape):
        with emulated_device(), emulated_halo_sm90.forced(shape):
            problem = replace(one.case.problem(), direction="wgrad", dtype=one.dtype)
            offered = FAMILIES["halo_sm90"].configs(dense_request(problem, torch.device("cpu")))
        assert {each.kernel in apart for each in offered} == {bool(shape)}


def test_four_seeds_in_a_row_show_everything() -> None:
    """Of new kernels every pair each time; of those that a GPU has seen each tile and each case in one of four."""
    parts = [part(seed) for seed in range(7, 7 + PARTS)]
    shown = set().union(*(run.shown for each in parts for run in each if run not in NEW))
    assert shown == set().union(*(run.shown for run in RUNS if run not in NEW))
    pairs = set().union(*(run.pairs for run in RUNS if run in NEW))
    assert all(set().union(*(run.pairs for run in each if run in NEW)) == pairs for each in parts)


def test_every_direction_of_the_shared_list_has_a_run_of_integers() -> None:
    """In every family that has runs of the case with that result."""
    some, every = (
        {(run.family, run.case.name, run.result) for run in runs if run.finite and run.case in CASES}
        for runs in (part(), RUNS)
    )
    assert some == every and len(every) >= 400


def test_random_values_meet_each_way_to_be_cut() -> None:
    kinds, rounds = ({(run.family, run.cut, run.dtype, run.result) for run in runs} for runs in (part(), rounded()))
    assert kinds == rounds and JUDGES <= rounded() < set(part())


def _outputs(run: Run) -> int:
    problem = run.case.problem()
    shapes = {"dgrad": problem.x_shape, "wgrad": problem.w_shape, "bgrad": (0,)}
    return torch.Size(shapes.get(run.result, problem.y_shape)).numel()
