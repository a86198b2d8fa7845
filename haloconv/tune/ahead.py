"""Tuning ahead of time: each problem of a model measured once, the records kept, and a report of what was chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from haloconv import env, extras, plan
from haloconv.choose.buckets import layer_key, size_of
from haloconv.choose.choice import choose
from haloconv.choose.records import Place, Record, shelf_of
from haloconv.device import device_facts, stand_in
from haloconv.families import UNIVERSAL
from haloconv.precision import label_of
from haloconv.precompile import Inputs
from haloconv.problem import DIRECTIONS, Direction, Problem
from haloconv.report import Report, Row
from haloconv.roofline import limit_ms
from haloconv.tune.measure import BUDGET_S, measure, prepared
from haloconv.tune.problems import Posed, problems_of, wholes_of
from haloconv.tune.ranks import on_every_rank, own_rank
from haloconv.tune.submission import append_row, read_rows, submission_of

_AT_ONCE = 8  # problems whose kernels are compiled side by side, and whose records are written together
_NAMES_SHOWN = 2
Work = tuple[Problem, torch.device]
Advance = Callable[[str, int], None]


@dataclass(frozen=True)
class Options:
    """How to tune: ``budget_s`` seconds of timing per problem, ``limit_s`` seconds in all (None: no limit).

    ``again`` measures problems that have a current record, too. ``progress`` shows a bar on a terminal if
    rich is installed, which the extra ``cli`` brings.
    ``submit`` is a file to contribute: what has no row there is measured, with or without a record, and gets its row.
    """

    budget_s: float = BUDGET_S
    limit_s: float | None = None
    again: bool = False
    progress: bool = True
    submit: Path | None = None


@dataclass
class Tally:
    """What one run of tuning came to: the records made, and those that now hold for the problems asked for.

    ``known`` problems had a record, ``left`` ones were not measured.
    """

    measured: list[Record] = field(default_factory=list)
    in_force: list[Record] = field(default_factory=list)
    known: int = 0
    left: int = 0
    notes: list[str] = field(default_factory=list)


def tune(
    model: torch.nn.Module,
    example_inputs: Inputs,
    *,
    directions: Collection[Direction] = DIRECTIONS,
    budget_s: float = BUDGET_S,
    limit_s: float | None = None,
    again: bool = False,
    progress: bool = True,
) -> Report:
    """Measure the convolutions of a model ahead of time, so that its layers run on what is fastest here.

    Of every convolution that a forward pass meets, each direction is one problem; so is each forward pass together with
    what follows it, of a model that ``haloconv.fuse`` changed or ``torch.compile(model, backend="haloconv")`` gave.
    Each family's best few configs and PyTorch are verified against float64 and timed against each other; one of ours is
    chosen if it is 3 % faster than PyTorch. The choices are kept in a file of the user and hold for later processes,
    too. What has a record already is not measured again. The model is not changed: ``haloconv.accelerate`` swaps its
    layers, before or after.

    Under torch.distributed every rank must call this; rank 0 measures the problems of all, which need not be the same,
    and its choices hold on all. If one rank fails, all raise the same RuntimeError.

    Args:
        model: any module, on the device where it will run.
        example_inputs: what it is called with: a tensor, a sequence of arguments, or a mapping of keyword arguments.
            The batch size and the image sizes should be those of later use.
        directions: ``"fprop"`` alone is enough for inference.
        budget_s: seconds of timing per problem.
        limit_s: seconds after which no further problem is begun.
        again: measure what has a current record, too.
        progress: show a progress bar, on a terminal.

    Returns:
        A Report with a row per problem: family, config, times, errors and the reason. Its notes say what was left out.

    Raises:
        ValueError: a direction is none. Whatever the model raises for its inputs.
        RuntimeError: under torch.distributed, if any rank failed, ended, or did not call this within the time limit of
            the process group.
    """
    title, options = f"haloconv tune: {type(model).__name__}", Options(budget_s, limit_s, again, progress)

    def pose() -> list[Posed]:
        wholes = wholes_of(model, example_inputs) if "fprop" in directions else []
        return [*problems_of(model, example_inputs, directions), *wholes]

    return _tuned(title, pose, options)


def tune_problems(title: str, posed: Sequence[Posed], options: Options = Options()) -> Report:
    """Measure problems as ``tune`` does those of a model. Plans are forgotten, so that layers choose anew."""
    return _tuned(title, lambda: posed, options)


def _tuned(title: str, pose: Callable[[], Sequence[Posed]], options: Options) -> Report:
    """The report for the problems that ``pose()`` gives, which may fail on one rank of several."""
    start = time.perf_counter()
    posed, takes, tally = _on_rank_0(pose, options)
    for device in {each.device for each in takes}:
        shelf_of(device_facts(device.index)).add(tally.in_force)
    plan.clear_plans()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    report = Report(title, env.environment_stamp())
    report.rows += [row for group in _grouped(posed) for row in _rows(group)]
    report.notes += [*_summary(tally, time.perf_counter() - start), *_refusals(posed), *tally.notes]
    return report


# --- measuring


def _on_rank_0(pose: Callable[[], Sequence[Posed]], options: Options) -> tuple[Sequence[Posed], list[Posed], Tally]:
    """The problems of this rank, those that our kernels take, and the tally of rank 0 for the problems of all ranks."""
    posed: list[Posed] = []
    own: list[Posed] = []

    def asking() -> tuple[list[Problem], set[str]]:
        posed.extend(pose())
        own.extend(each for each in posed if not choose(each.problem, each.device, UNIVERSAL).refused)
        return [each.problem for each in own], {device_facts(each.device.index).name for each in own}

    asked = on_every_rank(asking)
    others = [problem for problems, _ in asked[1:] for problem in problems]
    gpus = {name for _, names in asked for name in names}

    def measured() -> Tally | None:
        if own_rank() != 0:
            return None
        where = own[0].device if own else _any_device() if others else None
        return _tune([*own, *(Posed("another rank's", each, where) for each in others if where is not None)], options)

    tally = on_every_rank(measured)[0]
    assert tally is not None  # rank 0 measured
    if len(gpus) > 1:
        tally.notes.append(f"Ranks run on different GPU models ({', '.join(sorted(gpus))}): choices hold on rank 0's.")
    return posed, own, tally


def _any_device() -> torch.device:
    """Where rank 0 measures if it has no problem of its own. Raises RuntimeError if it has no GPU."""
    if stand_in() is not None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("rank 0 measures for all ranks, and it has no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def _tune(posed: Sequence[Posed], options: Options) -> Tally:
    """Measure what has no record, a few problems at a time; each few are written when they are done."""
    start = time.perf_counter()
    names: dict[Work, str] = {(each.problem, each.device): each.layer or "the model" for each in reversed(posed)}
    everything = list(dict.fromkeys((each.problem, each.device) for each in posed))
    there = {row.place for row in read_rows(options.submit)} if options.submit else None
    work = [each for each in everything if options.again or not _is_known(*each, there)]
    tally = Tally(known=len(everything) - len(work))
    switch = env.FROZEN if env.frozen() else env.DISABLE if env.disabled() else None
    if switch is not None:
        tally.left = len(work)
        tally.notes += [f"{switch} is set: nothing was measured."] if work else []
        work = []
    with _bar(len(work), options.progress) as advance:
        for few in (work[first : first + _AT_ONCE] for first in range(0, len(work), _AT_ONCE)):
            if options.limit_s is not None and time.perf_counter() - start >= options.limit_s:
                tally.left += len(few)
            else:
                _tune_few(few, names, options, tally, advance)
    found = [shelf_of(device_facts(device.index)).find(problem) for problem, device in everything]
    tally.in_force = [each[0] for each in found if each is not None and not each[1]]
    return tally


def _is_known(problem: Problem, device: torch.device, there: set[Place] | None) -> bool:
    """Whether exactly this problem has a current record, and a row in the file to contribute, if there is one."""
    submitted = there is None or Place(layer_key(problem), size_of(problem)) in there
    return submitted and shelf_of(device_facts(device.index)).exact(problem) is not None


def _tune_few(few: list[Work], names: dict[Work, str], options: Options, tally: Tally, advance: Advance) -> None:
    """Measure a few problems; records are kept even if a later problem fails."""
    for device in {device for _, device in few}:
        advance(f"compiling for {names[few[0]]}", 0)
        done: list[Record] = []
        try:
            for entry in prepared([problem for problem, where in few if where == device], device):
                name = names[entry.request.problem, device]
                advance(f"{name} {entry.request.problem.direction}", 0)
                try:
                    outcome = measure(entry, options.budget_s)
                except torch.cuda.OutOfMemoryError:
                    tally.notes.append(f"{name}: there was no memory to measure {entry.request.problem}.")
                else:
                    done.append(outcome.record)
                    if options.submit:
                        append_row(options.submit, submission_of(outcome, device_facts(device.index)))
                    tally.notes += [f"{outcome.problem}: {sentence}." for sentence in outcome.rejected]
                entry.bound.clear()
                advance("", 1)
        finally:
            if done:
                shelf_of(device_facts(device.index)).keep(done)
            tally.measured += done


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Advance]:
    """``advance(text, steps)`` moves a progress bar, which is there on a terminal only and leaves nothing behind.

    It is drawn by rich, of the extra ``cli``; without it there is none.
    """
    if not wanted or extras.missing("a progress bar", "rich"):
        yield _no_bar
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    hidden = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("tune", total=total)

        def advance(text: str, steps: int) -> None:
            progress.update(task, advance=steps, description=text or None)

        yield advance


def _no_bar(text: str, steps: int) -> None:
    """Advance nothing."""


# --- reporting


def _grouped(posed: Sequence[Posed]) -> list[list[Posed]]:
    """Layers that pose the same problem, together."""
    groups: dict[tuple[object, ...], list[Posed]] = {}
    for each in posed:
        groups.setdefault((each.problem, each.device), []).append(each)
    return list(groups.values())


def _rows(group: list[Posed]) -> list[Row]:
    """The row of a problem, if there is a record for it."""
    problem, device = group[0].problem, group[0].device
    choice = choose(problem, device)
    if not choice.measured:
        return []
    facts = device_facts(device.index)
    found = shelf_of(facts).find(problem)
    if found is None:
        return []
    record = found[0]
    row = Row(
        case=_names([each.layer for each in group]) + (f" with {problem.epilogue}" if any(problem.epilogue) else ""),
        direction=problem.direction,
        precision=label_of(problem.precision_label),
        layout=problem.layout,
        family=record.family,
        reason=choice.reason,
        error=record.error,
        aten_error=record.aten_error,
        error_limit=record.error_limit,
        difference=record.difference,
        aten_ms=record.aten_ms,
        haloconv_ms=record.ms,
        spread=record.spread,
        runs=int(record.runs),
        flops=problem.flops,
        limit_ms=limit_ms(problem, facts.name),
        bytes=problem.bytes,
        count=len(group),
        kernel=record.kernel,
        config=record.config,
    )
    return [row]


def _names(layers: list[str]) -> str:
    """Layers as a table has room for them: ``layer1.0.conv2, layer1.1.conv2 and 3 more``."""
    layers = [layer or "the model" for layer in layers]
    more = len(layers) - _NAMES_SHOWN
    return ", ".join(layers[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _summary(tally: Tally, seconds: float) -> list[str]:
    own = sum(record.family != "aten" for record in tally.measured)
    text = f"{len(tally.measured)} problems were measured in {seconds:.0f} s, and {own} go to kernels of ours"
    text += f"; {tally.known} had records" if tally.known else ""
    return [f"{text}." if not tally.left else f"{text}; {tally.left} were left to the rules."]


def _refusals(posed: Sequence[Posed]) -> list[str]:
    """Why PyTorch runs what our kernels do not take, a sentence per reason."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for each in posed:
        choice = choose(each.problem, each.device)
        if choice.refused:
            name = f"layer {each.layer}" if each.layer else "the model"
            reasons.setdefault(choice.reason, {}).setdefault(name, []).append(each.problem.direction)
    sentences = []
    for reason, layers in reasons.items():
        places = [f"{name} ({', '.join(directions)})" for name, directions in layers.items()]
        sentences.append(f"PyTorch's own convolution runs {_names(places)}: {reason}.")
    return sentences
