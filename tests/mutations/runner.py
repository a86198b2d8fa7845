"""Runs planted faults under several seeds and says how each was noticed."""

from __future__ import annotations

from dataclasses import dataclass

from haloconv.emulator import EmulatorError, build, runtime
from tests import oracle
from tests.cases import EMULATOR_SEEDS
from tests.emulated import BY_NAME, Run, execute
from tests.mutations.mutation import Mutation, StaleMutation, planted

LENGTH = 150


@dataclass(frozen=True)
class Verdict:
    """How a fault showed: ``how`` is the emulator's finding or the oracle's sentence, under ``seed``.

    Not ``caught``: every seed gave a right result without a finding.
    """

    mutation: Mutation
    caught: bool
    how: str
    seed: int | None

    def __str__(self) -> str:
        mutation = self.mutation
        mark = "caught" if self.caught else "NOT CAUGHT"
        place = f"{mutation.kernel}, {mutation.result} of {mutation.case}"
        return f"{mark:<10} {mutation.name} ({place}): {self.how}"


def run_of(mutation: Mutation) -> Run:
    """The run that must expose the fault."""
    one = BY_NAME[mutation.case]
    return Run(mutation.family, one, mutation.dtype, mutation.result, mutation.shape, mutation.finite)


def judge(mutation: Mutation, seeds: tuple[int, ...] = EMULATOR_SEEDS) -> Verdict:
    """Plant the fault and run its case under one seed after the other until one exposes it.

    A fault whose edit does not fit the kernel any more counts as not caught.
    """
    run = run_of(mutation)
    for seed in seeds:
        try:
            how = _exposed(mutation, run, seed)
        except StaleMutation as error:
            return Verdict(mutation, False, str(error), None)
        if how is not None:
            return Verdict(mutation, True, how, seed)
    return Verdict(mutation, False, f"clean under seeds {seeds}", None)


def _exposed(mutation: Mutation, run: Run, seed: int) -> str | None:
    """How the fault shows under the seed, in one line, or None."""
    tensors = run.tensors
    with planted(mutation), build.optimisation(build.UNOPTIMISED), runtime.one_finding():
        try:
            got = execute(run, tensors, seed)
        except EmulatorError as error:
            return f"finding: {_shortened(error.findings[0])}"
        except AssertionError as error:
            return f"wrong launch: {_shortened(error)}"
    try:
        oracle.check(run.result, got, tensors, run.forced.spec)
    except AssertionError as error:
        return f"wrong result: {_shortened(error)}"
    return None


def _shortened(what: object) -> str:
    """The first line, and of that what fits a list."""
    return str(what).strip().split("\n")[0][:LENGTH]
