"""A run of the emulator's tests on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from haloconv import jit, plan
from haloconv.problem import Request
from tests import oracle
from tests.cases import Case, Tensors, make
from tests.emulated import BY_NAME, Run, forced
from tests.exact import make_exact
from tests.families import Subject
from tests.launches import launched
from tests.tilings import nth_tiling, sources_of


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


def check_every_tiling(
    subject: Subject, one: Case, dtype: torch.dtype, result: str, in_threads: Callable, record: Callable
) -> int:
    """All tilings that fit the problem, not only the one that the cost model puts first; how many there are."""
    forced, t = subject.on(one, dtype), make(one, dtype, "cuda")
    sources = {source.digest: source for source in sources_of(result, t, forced)}
    in_threads(partial(jit.get_kernel, source, "sm_90a") for source in sources.values())
    want, index, most = oracle.expected(result, t, forced.spec), 0, 1
    while index < most:
        with nth_tiling(index) as seen, oracle.RedZones("cuda") as zones, launched() as names:
            got = oracle.run(result, t, forced)
        most, error = seen["most"], oracle.check(result, got, t, forced.spec, want=want)
        zones.check()
        record(names, result, subject.label(dtype), error.norm)
        with nth_tiling(index):
            check_integers(subject, result, forced, dtype, record)
        index += 1
    return index


def runs_of(family: str, *modules: ModuleType) -> tuple[Run, ...]:
    """The emulator's runs that modules of tests/ list for a family."""
    return tuple(
        Run(family, BY_NAME[name], dtype, result, shape, finite)
        for module in modules
        for name, dtype, result, shape, finite in module.runs()
    )


def check_every_config(
    kernel: Any, request: Request, one: Case, t: Tensors, subject: Subject, record: Callable
) -> None:
    """Right, the same bits twice, and the reference's bits on small integers, in every config of a kernel."""
    result, dtype = request.problem.direction, request.problem.dtype
    exact, spec = make_exact(one, dtype, "cuda"), subject.on(one, dtype).spec
    want, configs = oracle.expected(result, t, spec), kernel.configs(request)
    assert configs, kernel.why_not(request)
    for config in configs:
        with oracle.Unchanged(t), oracle.RedZones("cuda") as zones, launched() as names:
            run = kernel.bind(request, config)
            got, again = run(*_operands(result, t)), run(*_operands(result, t))
        error = oracle.check(result, got, t, spec, want=want)
        assert oracle.same_bits(got, again)
        zones.check()
        record(names, result, subject.label(dtype), error.norm)
        with launched() as names:
            got = kernel.bind(request, config)(*_operands(result, exact))
        oracle.check_exact(result, got, exact, spec)
        record(names, result, subject.label(dtype), kind="exact")


def _operands(result: str, t: Tensors) -> tuple[torch.Tensor | None, ...]:
    return {"fprop": (t.x, t.w, t.b), "dgrad": (t.dy, t.w), "wgrad": (t.dy, t.x)}[result]
