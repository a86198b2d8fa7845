"""One direction of one layer: haloconv against PyTorch, right first and then fast. The outcome is a Row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from haloconv.bench.layer import LAYOUTS, Layer, Step, baseline_flags
from haloconv.families.closure import JOIN, source_of
from haloconv.precision import label_of
from haloconv.problem import DIRECTIONS, Problem
from haloconv.problem_file import how_it_ended
from haloconv.reference import Error, Limits, Oracle, measure_error, raised
from haloconv.report import Row
from haloconv.roofline import least_memory_ms, least_ms, least_traffic_ms, limit_ms
from haloconv.tune.judge import UNLIMITED, complaint_about, on_poisoned_memory, relative_difference
from haloconv.tune.timing import Timing, compare

OURS, BASELINE, BASELINE_OTHER_LAYOUT = "haloconv", "aten", "aten in the other layout"
_AGAIN = ", searched again"
SETTLE_S = 1.0
"""Seconds for which a GPU is loaded, at least, before rows are timed: its clock falls under load."""

AS_LARGE = 1.05  # times an error is still about the same


@dataclass(frozen=True)
class Budget:
    """How long one comparison may take: ``seconds`` of timing, but at least ``min_runs`` runs of every variant.

    With ``min_runs`` 0 nothing is timed: results are checked once. Before, a GPU is loaded for ``settle_s`` seconds and
    until its clock has settled. ``other_layout`` also times PyTorch in the other memory order. cuDNN's searches are not
    part of the seconds; without TF32 one takes up to a minute for fp32.
    """

    seconds: float = 1.0
    min_runs: int = 10
    other_layout: bool = False
    settle_s: float = 0.0

    @property
    def timed(self) -> bool:
        return self.min_runs > 0


UNTIMED = Budget(seconds=0.0, min_runs=0)
"""Check once: on a CPU a time says nothing about the kernels."""


def tried_step(layer: Layer, step: Step, budget: Budget) -> Row:
    """The row of ``try_step``; what either side raises, or the emulator finds, is its complaint.

    Raises OutOfMemoryError alone.
    """
    try:
        return try_step(layer, step, budget)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        return Row(
            **_asked(layer, step),
            error=math.inf,
            aten_error=math.nan,
            error_limit=math.nan,
            difference=math.inf,
            **measured({}),
            complaint=how_it_ended(error),
        )


def _asked(layer: Layer, step: Step) -> dict[str, Any]:
    """The fields of a Row that are known before anything runs."""
    problem, choice = layer.problem(step), layer.choice(step)
    return {
        "case": layer.name,
        "direction": step,
        "precision": label_of(problem.precision_label),
        "layout": layer.layout,
        "family": choice.family,
        "reason": choice.reason,
        "count": layer.count,
    }


def try_step(layer: Layer, step: Step, budget: Budget) -> Row:
    """Check one direction of the layer against the oracle; if the budget has time, time it and check it again.

    The outputs land in memory that held NaN. Raises what either side raises.
    """
    device = layer.x.device
    problem, asked = layer.problem(step), _asked(layer, step)
    with torch.no_grad(), baseline_flags(problem.precision):
        oracle, border = layer.oracle(step), layer.border(step)
        ours, baseline = layer.ours(step), layer.baseline(step)
        theirs = baseline()
        aten_error = measure_error(theirs, oracle, UNLIMITED, border)
        limits = _limits(layer, step, aten_error)
        result = on_poisoned_memory(ours, theirs)
        before = measure_error(result, oracle, limits, border)
        difference = relative_difference(result, theirs)
        del result, theirs
        error, timings = before, {}
        if budget.timed:
            timings = _timings(layer, step, budget)
            after = measure_error(on_poisoned_memory(ours, baseline()), oracle, limits, border)
            error = before if not before.passed or after.passed else after
    own_limit = None if step == "bgrad" else _limit_ms(problem, device)
    ran = layer.ran(step)
    row = Row(
        **asked,
        error=error.norm,
        aten_error=aten_error.norm,
        error_limit=limits.norm,
        difference=difference,
        **measured(timings),
        flops=None if step == "bgrad" else problem.flops,
        limit_ms=own_limit,
        bytes=layer.dy.nbytes if step == "bgrad" else problem.bytes,
        config=ran.key,
        kernel=ran.kernel,
        source=source_of(ran.kernel) if ran.kernel else None,
    )
    complaint = complaint_about(error, limits) or unjudgeable(oracle) or too_fast(row, [problem], gpu_name(device))
    return replace(row, complaint=complaint)


def unjudgeable(oracle: Oracle) -> str | None:
    """Why comparing a result with this reference would show nothing, or None: some element of it must be finite."""
    if oracle.value.isfinite().any():
        return None
    what = "is finite" if oracle.value.numel() else "is there"
    return f"nothing was compared, for no element of the float64 reference {what}"


def _limits(layer: Layer, step: Step, aten_error: Error) -> Limits:
    """What passes. Where PyTorch's own convolution is the choice, nothing of ours is judged, and it may err as it does.

    cuDNN's weight gradient in TF32 errs by more than 5e-4 on inputs that are all positive. The limits are those of
    random inputs: on a model's activations, which may be anything, our kernels may err as much as PyTorch's.
    """
    limits = layer.limits(step, aten_error)
    if layer.choice(step).family == "aten":
        return raised(limits, aten_error)
    return raised(limits, aten_error, AS_LARGE) if layer.activation else limits


def measured(timings: dict[str, Timing]) -> dict[str, Any]:
    """The fields of a Row that come from timing, for the variants that were timed: of each side its better search."""
    ours, baseline, other = (_better(timings, name) for name in (OURS, BASELINE, BASELINE_OTHER_LAYOUT))
    if ours is None or baseline is None:
        return {"aten_ms": None, "haloconv_ms": None, "spread": 0.0, "runs": 0}
    return {
        "aten_ms": baseline.ms,
        "haloconv_ms": ours.ms,
        "spread": max(ours.spread, baseline.spread),
        "runs": ours.runs,
        "aten_best_ms": min(baseline.ms, other.ms) if other else None,
    }


def _better(timings: dict[str, Timing], name: str) -> Timing | None:
    """The faster one of a variant and of the same after another search; None if it was not timed."""
    found = [timings[each] for each in (name, name + _AGAIN) if each in timings]
    return min(found, key=lambda timing: timing.ms, default=None)


def _timings(layer: Layer, step: Step, budget: Budget) -> dict[str, Timing]:
    """Both sides, and PyTorch in the other layout too if the budget has it, so that the best of both is known.

    On a GPU PyTorch takes part twice in each layout, for what cuDNN's search finds differs; and so does our side where
    it calls PyTorch's convolution, which then runs on the plans of these same searches. A kernel has no search.
    """
    device = layer.x.device
    baselines = {BASELINE: layer}
    if budget.other_layout and step != "bgrad":
        other = next(layout for layout in LAYOUTS if layout != layer.layout)
        baselines[BASELINE_OTHER_LAYOUT] = layer.with_layout(other)
    variants = {name: each.baseline(step) for name, each in baselines.items()} | {OURS: layer.timed(step)}
    if _searches(device) and step != "bgrad":
        copies = {name: each.elsewhere() for name, each in baselines.items()}
        variants |= {name + _AGAIN: each.baseline(step) for name, each in copies.items()}
        if layer.searches(step):
            variants[OURS + _AGAIN] = copies[BASELINE].timed(step)
    return compared(variants, device, budget)


def _searches(device: torch.device) -> bool:
    """Whether PyTorch's convolution runs on what a search found."""
    return device.type == "cuda"


def compared(variants: Mapping[str, Callable[[], object]], device: torch.device, budget: Budget) -> dict[str, Timing]:
    """The one protocol within the budget."""
    return compare(variants, device=device, budget_s=budget.seconds, min_runs=budget.min_runs, settle_s=budget.settle_s)


def gpu_name(device: torch.device) -> str | None:
    """The name of a GPU as rows have it; None of a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _limit_ms(problem: Problem, device: torch.device) -> float | None:
    gpu = gpu_name(device)
    return None if gpu is None else limit_ms(problem, gpu)


def too_fast(row: Row, problems: Sequence[Problem], gpu: str | None) -> str | None:
    """The complaint about a time below what the GPU's data sheet allows, or None. ``gpu`` is its name, None for a CPU.

    PyTorch's own family may beat the arithmetic, because it has algorithms with fewer multiplications; nothing beats
    the memory. A bias gradient has no problem of its own: it reads dy, which are the row's bytes.
    """
    if gpu is None or row.haloconv_ms is None:
        return None
    if row.direction == "bgrad":
        least = least_traffic_ms(row.bytes or 0, gpu)
    else:
        limit = least_memory_ms if row.family == "aten" else least_ms
        least = _sum([limit(problem, gpu) for problem in problems])
    if least is None or row.haloconv_ms >= least:
        return None
    return f"{row.haloconv_ms:.4f} ms is below the {least:.4f} of the data sheet: the measurement is wrong"


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum; None if a value is missing."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def above_the_ceiling(row: Row) -> str | None:
    """The sentence about a time of ours between the measured ceiling and the data sheet, or None."""
    if row.roofline_fraction is None or row.roofline_fraction <= 1 or row.family == "aten":
        return None
    what = f"{row.case} {row.direction} {row.precision} {row.layout}"
    return f"{what} is at {row.roofline_fraction:.1%} of the roofline: measure the ceilings again, for all rows"


def try_training_step(layer: Layer, budget: Budget) -> Row:
    """Check and time forward and backward together, through autograd, with gradients for input and weight.

    Raises what either side raises.
    """
    device = layer.x.device
    problems = [layer.problem(direction) for direction in DIRECTIONS]
    with baseline_flags(problems[0].precision):
        ours, theirs = _with_grad(layer.convolve, layer), _with_grad(layer.convolve_by_torch, layer)
        worst, complaint = _judge_gradients(layer, ours(), theirs())
        calls = {BASELINE: theirs, OURS: ours}
        timings = compared(calls, device, budget)
    limits_ms = [_limit_ms(problem, device) for problem in problems]
    choices = [layer.choice(direction) for direction in DIRECTIONS]
    ran = [layer.ran(direction) for direction in DIRECTIONS]
    kernel = JOIN.join(each.kernel for each in ran)
    row = Row(
        case=layer.name,
        direction="step",
        precision=label_of(problems[0].precision_label),
        layout=layer.layout,
        family="+".join(dict.fromkeys(choice.family for choice in choices)),
        reason="; ".join(dict.fromkeys(choice.reason for choice in choices)),
        error=worst[0],
        aten_error=worst[1],
        error_limit=worst[2],
        difference=worst[3],
        **measured(timings),
        flops=sum(problem.flops for problem in problems),
        bytes=sum(problem.bytes for problem in problems),
        limit_ms=_sum(limits_ms),
        config=JOIN.join(each.key for each in ran),
        kernel=kernel,
        source=source_of(kernel) if all(each.kernel for each in ran) else None,
    )
    return replace(row, complaint=complaint or too_fast(row, problems, gpu_name(device)))


def _with_grad(
    convolve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], layer: Layer
) -> Callable[[], tuple[torch.Tensor, ...]]:
    given, dy = layer.trained
    x, w = given.detach().requires_grad_(), layer.w.detach().requires_grad_()

    def call() -> tuple[torch.Tensor, ...]:
        y = convolve(x, w)
        return (y.detach(), *torch.autograd.grad(y, (x, w), dy))

    return call


def _judge_gradients(
    layer: Layer, ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]
) -> tuple[tuple[float, float, float, float], str | None]:
    """The worst (error, PyTorch's error, limit, difference) over output and gradients, and the first complaint."""
    worst, complaint = (0.0, 0.0, 0.0, 0.0), None
    for direction, result, their_result in zip(layer.directions, ours, theirs, strict=True):
        oracle, border = layer.oracle(direction), layer.border(direction)
        aten_error = measure_error(their_result, oracle, UNLIMITED, border)
        limits = _limits(layer, direction, aten_error)
        error = measure_error(result, oracle, limits, border)
        if not error.passed and complaint is None:
            complaint = f"{direction}: {complaint_about(error, limits)}"
        worst = max(worst, (error.norm, aten_error.norm, limits.norm, relative_difference(result, their_result)))
    return worst, complaint
