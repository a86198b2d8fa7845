"""A run of the emulator's tests on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from haloconv import plan
from tests import oracle
from tests.cases import Case
from tests.emulated import Run, forced
from tests.exact import make_exact
from tests.families import Subject
from tests.launches import launched


def on_device(t: torch.Tensor) -> torch.Tensor:
    """The tensor with its whole storage, on the GPU: the same strides and what stands between the elements."""
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).cuda()
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def check_run(subject: Subject, run: Run, record: Callable) -> None:
    """The same case with the same shape forced: right, its operands untouched, nothing written outside."""
    t = run.tensors.each(on_device)
    plan.clear_plans()
    fences = oracle.RedZones("cuda")
    with forced(subject.name, run.shape), oracle.Unchanged(t), fences, launched() as names:
        got = oracle.run(run.result, t, run.forced)
    plan.clear_plans()
    error = oracle.check(run.result, got, t, run.forced.spec)
    fences.check()
    if run.finite:
        record(names, run.result, subject.label(run.dtype), error.norm)
        with forced(subject.name, run.shape):
            check_integers(subject, run.result, run.forced, run.dtype, record)
        plan.clear_plans()


def check_integers(subject: Subject, result: str, forced: Case, dtype: torch.dtype, record: Callable) -> None:
    """A case on small integers, whose family is forced: the reference's bits, and nothing written outside."""
    t, fences = make_exact(forced, dtype, "cuda", result), oracle.RedZones("cuda")
    with oracle.Unchanged(t), fences, launched() as names:
        got = oracle.run(result, t, forced)
    oracle.check_exact(result, got, t, forced.spec)
    fences.check()
    record(names, result, subject.label(dtype), kind="exact")
