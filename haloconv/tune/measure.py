"""One problem measured: every family's best few configs and PyTorch, right first and then fast. It gives a record.

A candidate is timed only if its result is right. Of our families the fastest is chosen if it is 3 % faster than
PyTorch, and by the time that a layer of ours costs the host; otherwise, and in a tie, PyTorch is. What cuDNN's search
finds differs from process to process (0.055 and 0.085 ms for one layer): it searches twice, and the better one counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from haloconv import reference
from haloconv.choose.records import Record, make_record
from haloconv.choose.whole import is_ahead
from haloconv.device import watched
from haloconv.epilogue import bias_and_scale, followed, in_one_pass
from haloconv.families import FAMILIES
from haloconv.families.base import MOST_CONFIGS, BoundCall, Config
from haloconv.layout import strides_of
from haloconv.library import AUTOCAST_DEVICES
from haloconv.precision import convolution_precision
from haloconv.problem import Problem, Request, dense_request
from haloconv.tune.baseline import searched_again
from haloconv.tune.judge import Judge, Verdict, on_poisoned_memory
from haloconv.tune.timing import Timing, compare

BUDGET_S = 0.3
_FINALISTS, _CLOSE = 3, 1.25  # of the screening: how many, and how near to the fastest
_SCREENING_RUNS, _RUNS = 3, 10
_THREADS = 16

Operands = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Candidate:
    """A family with one of its configs."""

    family: str
    config: Config

    def __str__(self) -> str:
        return f"{self.family} ({self.config.key})" if self.config.key else self.family


ATEN = Candidate("aten", Config("aten"))
ATEN_AGAIN = Candidate("aten after another search", Config("aten"))  # of the timing alone: records call it aten


@dataclass
class Prepared:
    """A request, its candidates, and what binding them gave; ``rejected`` has a sentence per candidate that is out."""

    request: Request
    candidates: list[Candidate]
    bound: dict[Candidate, BoundCall] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)


class Measured(NamedTuple):
    """What a candidate took: the median of ``runs`` runs in ms, and their spread.

    ``final`` if it was timed to the end, against PyTorch; else it was too slow in the first few runs.
    """

    family: str
    kernel: str
    config: str
    ms: float
    spread: float
    runs: int
    final: bool


class Outcome(NamedTuple):
    """What measuring a problem gave; ``rejected`` has a sentence per candidate that was not timed."""

    problem: Problem
    record: Record
    rejected: tuple[str, ...] = ()
    candidates: tuple[Measured, ...] = ()


def operands_of(problem: Problem, device: torch.device, seed: int = 0) -> Operands:
    """Dense standard normal operands in the problem's layout; weights are scaled so that sums are about so, too."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        strides = strides_of(shape, problem.layout) if len(shape) == 4 else (1,)
        tensor = torch.empty_strided(shape, strides, dtype=problem.dtype, device=device)
        return tensor.normal_(generator=generator).mul_(scale)

    if problem.direction == "wgrad":
        return normal(problem.y_shape), normal(problem.x_shape)
    w_scale = (problem.c_per_group * problem.r * problem.s) ** -0.5
    if problem.direction == "dgrad":
        return normal(problem.y_shape), normal(problem.w_shape, w_scale)
    b = normal((problem.k,)) if problem.bias or problem.epilogue.scale else None
    third = bias_and_scale(b, normal((problem.k,)), problem.dtype) if problem.epilogue.scale else b
    residual = [normal(problem.y_shape)] if problem.epilogue.residual else []
    return normal(problem.x_shape), normal(problem.w_shape, w_scale), third, *residual


def candidates(request: Request) -> list[Candidate]:
    """PyTorch, then every family that takes the problem with its best few configs.

    Of one channel in a group, a tensor core would multiply seven zeros of eight: families that are not for such layers
    are left out.
    """
    problem, found = request.problem, [ATEN]
    one_channel = problem.groups > 1 and problem.c_per_group == 1
    for name, family in FAMILIES.items():
        wasteful = one_channel and family.tensor_cores and not family.depthwise
        if name != "aten" and not wasteful and family.why_not(problem, request.device) is None:
            found += [Candidate(name, config) for config in family.configs(request)[:MOST_CONFIGS]]
    return found


def bind(request: Request, candidate: Candidate) -> BoundCall:
    """The candidate bound to the request's operands. Raises what compiling and loading raise."""
    run = _bind_alone(request, candidate)
    return run if applies_epilogue(request, candidate) else followed(run, request.problem.epilogue)


def applies_epilogue(request: Request, candidate: Candidate) -> bool:
    """Whether the candidate's kernels do all that is asked; else passes of PyTorch's over its result do the rest."""
    return FAMILIES[candidate.family].has_epilogue or not any(request.problem.epilogue)


def _bind_alone(request: Request, candidate: Candidate) -> BoundCall:
    device, family = request.device, FAMILIES[candidate.family]
    config = family.configs(request)[0] if candidate is ATEN else candidate.config
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        run = family.bind(request, config)
    return watched(run, device)


def as_timed(request: Request, candidate: Candidate, run: BoundCall) -> BoundCall:
    """What is timed of a bound candidate: ``run``, or what would run in its place in a compiled graph.

    There one kernel does what follows a convolution, for PyTorch's also the bias.
    """
    if not request.problem.epilogue.compiled or applies_epilogue(request, candidate):
        return run
    alone = _bind_alone(request, candidate)
    if candidate is not ATEN:
        return in_one_pass(alone, request.problem.epilogue)
    return in_one_pass(lambda x, w, b: alone(x, w, None), request.problem.epilogue)


def prepared(problems: Iterable[Problem], device: torch.device) -> list[Prepared]:
    """The problems with all their candidates bound; on a GPU, kernels are compiled side by side."""
    requests = [dense_request(problem, device) for problem in problems]
    entries = [Prepared(request, candidates(request)) for request in requests]
    pairs = [(entry, candidate) for entry in entries for candidate in entry.candidates]
    threads = min(_THREADS, os.cpu_count() or 1) if device.type == "cuda" else 1

    def attempt(pair: tuple[Prepared, Candidate]) -> BoundCall | str:
        entry, candidate = pair
        try:
            return bind(entry.request, candidate)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a family raises: it is out, and the report says why
            return f"{candidate} cannot be used: {type(error).__name__}: {error}"

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(attempt, pairs)) if threads > 1 else [attempt(pair) for pair in pairs]
    for (entry, candidate), result in zip(pairs, results, strict=True):
        if isinstance(result, str):
            entry.rejected.append(result)
        else:
            entry.bound[candidate] = result
    return entries


@contextmanager
def plain_surroundings(problem: Problem) -> Iterator[None]:
    """No graph, no autocast, the problem's precision: inside, PyTorch computes what it is asked for."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(convolution_precision(problem.precision))
        for device_type in AUTOCAST_DEVICES:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def measure(entry: Prepared, budget_s: float = BUDGET_S, seed: int = 0) -> Outcome:
    """Verify every candidate, time those that are right, choose. ``budget_s`` are the seconds of timing, about.

    Raises RuntimeError if PyTorch's own convolution fails, torch.cuda.OutOfMemoryError if memory is short.
    """
    problem, device = entry.request.problem, entry.request.device
    with plain_surroundings(problem), reference.cudnn_search(True):
        operands = operands_of(problem, device, seed)
        calls = {candidate: _closed(run, operands) for candidate, run in entry.bound.items()}
        judge = Judge(problem, operands, calls[ATEN]())
        right = _verified(entry, calls, judge)
        timed = {each: as_timed(entry.request, each, entry.bound[each]) for each in (ATEN, *right)}
        again = searched_again(timed[ATEN], operands) if device.type == "cuda" else None
        screened: dict[Candidate, Timing] = {}
        contest = {candidate: _closed(run, operands) for candidate, run in timed.items()}
        timings = _timed(contest, again, device, budget_s, screened)
        own = min((each for each in timings if each is not ATEN), key=lambda each: timings[each].ms, default=None)
        if own is not None:
            whole = applies_epilogue(entry.request, own)
            if judge.verdict(on_poisoned_memory(calls[own], judge.theirs), whole).complaint is not None:
                entry.rejected.append(f"{own} gave another, wrong result after timing")
                own = None
    direction = entry.request.problem.direction
    chosen = own if own is not None and is_ahead(timings[own].ms, timings[ATEN].ms, direction) else ATEN
    verdict = right[chosen] if chosen in right else Verdict(judge.aten_error.norm, 0.0, None)
    return _outcome(entry, _Contest(own, chosen, timings, screened), verdict, judge)


class _Contest(NamedTuple):
    """The fastest of ours, None if none is right; who was chosen; and what everybody took, at last and at first."""

    own: Candidate | None
    chosen: Candidate
    timings: dict[Candidate, Timing]
    screened: dict[Candidate, Timing]

    def times(self) -> tuple[Measured, ...]:
        """The last that each candidate took."""
        return tuple(
            Measured(
                each.family, each.config.kernel, each.config.key, float(f"{timing.ms:.5g}"),
                float(f"{timing.spread:.5g}"), timing.runs, each in self.timings,
            )
            for each, timing in {**self.screened, **self.timings}.items()
        )  # fmt: skip


def _outcome(entry: Prepared, contest: _Contest, verdict: Verdict, judge: Judge) -> Outcome:
    problem, (own, chosen, timings, _) = entry.request.problem, contest
    record = make_record(
        entry.request,
        chosen.family,
        chosen.config,
        None if own is None else own.config,
        own_ms=None if own is None else timings[own].ms,
        ms=timings[chosen].ms,
        aten_ms=timings[ATEN].ms,
        error=verdict.error,
        aten_error=judge.aten_error.norm,
        error_limit=judge.limits.norm,
        difference=verdict.difference,
        spread=max(timings[chosen].spread, timings[ATEN].spread),
        runs=timings[chosen].runs,
    )
    return Outcome(problem, record, tuple(entry.rejected), contest.times())


def _closed(run: BoundCall, operands: Operands) -> Callable[[], torch.Tensor]:
    return lambda: run(*operands)


def _verified(
    entry: Prepared, calls: dict[Candidate, Callable[[], torch.Tensor]], judge: Judge
) -> dict[Candidate, Verdict]:
    """Our candidates whose results are right; the others are rejected with the reason."""
    right = {}
    for candidate, call in calls.items():
        if candidate is ATEN:
            continue
        try:
            verdict = judge.verdict(on_poisoned_memory(call, judge.theirs), applies_epilogue(entry.request, candidate))
        except torch.cuda.OutOfMemoryError:
            raise  # says nothing about the candidate
        except Exception as error:  # whatever it raises: it is out; what harms PyTorch, too, is raised by its own calls
            entry.rejected.append(f"{candidate} cannot be run: {type(error).__name__}: {error}")
            continue
        if verdict.complaint is None:
            right[candidate] = verdict
        else:
            entry.rejected.append(f"{candidate} is not right: {verdict.complaint}")
    return right


def _timed(
    calls: dict[Candidate, Callable[[], torch.Tensor]],
    again: Callable[[], torch.Tensor] | None,
    device: torch.device,
    budget_s: float,
    screened: dict[Candidate, Timing] | None = None,
) -> dict[Candidate, Timing]:
    """A few runs of all, which ``screened`` hears of; then PyTorch and those near the fastest of ours.

    Both by one protocol, against each other.

    Where one of ours might win, PyTorch takes part twice, ``again`` after another search, and the faster one counts.
    """
    twice = again is not None and len(calls) > 1
    if len(calls) > 2:
        first = _compare(calls, device, 0.0, _SCREENING_RUNS)
        if screened is not None:
            screened.update(first)
        own = sorted((each for each in calls if each is not ATEN), key=lambda each: first[each].ms)
        near = [each for each in own if first[each].ms <= _CLOSE * first[own[0]].ms]
        calls = {each: calls[each] for each in (ATEN, *near[:_FINALISTS])}
        twice = twice and first[own[0]].ms <= _CLOSE * first[ATEN].ms
    timings = _compare({**calls, ATEN_AGAIN: again} if twice and again is not None else calls, device, budget_s, _RUNS)
    if twice:
        timings[ATEN] = min(timings[ATEN], timings.pop(ATEN_AGAIN), key=lambda timing: timing.ms)
    return timings


def _compare(
    calls: dict[Candidate, Callable[[], torch.Tensor]], device: torch.device, budget_s: float, min_runs: int
) -> dict[Candidate, Timing]:
    names: Sequence[str] = [str(candidate) for candidate in calls]
    variants = dict(zip(names, calls.values(), strict=True))
    timings = compare(variants, device=device, budget_s=budget_s, min_runs=min_runs)
    return {candidate: timings[name] for candidate, name in zip(calls, names, strict=True)}
