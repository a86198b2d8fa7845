"""Problem files, one after the other: convolutions swapped, every layer and the model checked, on a GPU timed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from rich.progress import Progress, TaskID

from haloconv.accelerate import accelerate
from haloconv.bench.swapped import ModelError, Options, layers_of, placed, try_layers, try_whole, why_nothing_is_ours
from haloconv.bench.targets import TargetError
from haloconv.problem_file import SMALLEST_OUTPUT, Candidate, ProblemFileError, load_problem_file, scaled_inputs
from haloconv.report import FileOutcome, Report

SMALLEST_EMULATED = 32  # pixels of an output's side: several tiles, and seconds for each problem file


class Source(Protocol):
    """Something that makes a model and its inputs, like a problem file."""

    @property
    def name(self) -> str: ...

    def model(self) -> torch.nn.Module: ...

    def inputs(self) -> tuple[torch.Tensor, ...]: ...


def run_files(files: Sequence[Candidate], options: Options, report: Report, progress: Progress) -> None:
    """Add the outcome, the rows and the notes of every file to the report; what breaks one leaves the others alone."""
    for file in files:
        if file.reason is not None:
            report.files.append(FileOutcome(file.path.name, skipped=file.reason))
        else:
            run_source(file.path.stem, partial(load_problem_file, file.path), options, report, progress)


def run_source(name: str, load: Callable[[], Source], options: Options, report: Report, progress: Progress) -> None:
    """Add the outcome, the rows and the notes of one source to the report. What ``load`` raises is its outcome."""
    task = progress.add_task(f"{name}: building", total=None)
    try:
        outcome = _run(load(), options, report, progress, task)
    except (ProblemFileError, TargetError) as error:
        outcome = FileOutcome(name, unusable=str(error))
    except ModelError as error:
        outcome = FileOutcome(name, unusable=f"{name}: {error}")
    except torch.cuda.OutOfMemoryError:
        why = "the GPU's memory does not hold it, for judging takes several copies in float64"
        outcome = FileOutcome(name, unusable=f"{name}: {why}")
    finally:
        progress.remove_task(task)
    report.files.append(outcome)
    report.rows += outcome.rows
    if options.device.type == "cuda":
        torch.cuda.empty_cache()


def _run(source: Source, options: Options, report: Report, progress: Progress, task: TaskID) -> FileOutcome:
    name = source.name
    torch.manual_seed(options.seed)
    theirs = source.model()
    ours = copy.deepcopy(theirs)
    acceleration = accelerate(ours, family=options.family, precision=options.model_precision)
    reason = why_nothing_is_ours(acceleration)
    if reason is not None:
        return FileOutcome(name, skipped=reason)
    lefts = [left for left in acceleration.left if left.convolution]
    report.notes += [f"{name}: {left.name} stays PyTorch's: {left.reason}." for left in lefts]
    theirs, inputs = placed(theirs, _inputs(source, theirs, options, report), options)
    ours, _ = placed(ours, (), options)
    layers = layers_of(name, ours, inputs, [*acceleration.swaps, *acceleration.already], options)
    if not layers:
        return FileOutcome(name, skipped="no torch.nn.Conv2d of it ran")
    progress.update(task, total=sum(len(layer.steps) for layer in layers) + 1)
    done = itertools.count()

    def announce(what: str) -> None:
        progress.update(task, description=what, completed=next(done))

    rows = try_layers(layers, options, announce)
    layers.clear()
    announce(f"{name}: whole model")
    model_rows, notes = try_whole(name, ours, theirs, inputs, rows, options)
    report.notes += [f"{name}: {note}" for note in notes]
    return FileOutcome(name, rows=[*rows, *model_rows])


def _inputs(source: Source, model: torch.nn.Module, options: Options, report: Report) -> tuple[torch.Tensor, ...]:
    """The source's inputs; cut down, with a note, where there is no GPU."""
    inputs = source.inputs()
    if options.device.type != "cpu":
        return inputs
    smallest = SMALLEST_OUTPUT if options.emulation is None else SMALLEST_EMULATED
    reduced = scaled_inputs(model, inputs, smallest_output=smallest)
    if reduced.note:
        report.notes.append(f"{source.name}: {reduced.note}.")
    return reduced.inputs
