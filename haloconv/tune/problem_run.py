"""Problem files, one after the other: convolutions swapped, every layer and the model checked, on a GPU timed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from rich.progress import Progress

from haloconv.problem_file import (
    SMALLEST_OUTPUT,
    Candidate,
    ProblemFile,
    ProblemFileError,
    load_problem_file,
    scaled_inputs,
)
from haloconv.report import FileOutcome, Report
from haloconv.tune.swapped import ModelError, Options, layers_of, swapped, try_layers, try_whole, why_nothing_is_ours

SMALLEST_EMULATED = 32  # pixels of an output's side: several tiles, and seconds for each problem file


def run_files(files: Sequence[Candidate], options: Options, report: Report, progress: Progress) -> None:
    """Add the outcome, the rows and the notes of every file to the report; what breaks one leaves the others alone."""
    for file in files:
        if file.reason is not None:
            outcome = FileOutcome(file.path.name, skipped=file.reason)
        else:
            outcome = _outcome(file, options, report, progress)
        report.files.append(outcome)
        report.rows += outcome.rows
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def _outcome(file: Candidate, options: Options, report: Report, progress: Progress) -> FileOutcome:
    name = file.path.stem
    task = progress.add_task(f"{name}: building", total=None)
    try:
        return _run(load_problem_file(file.path), options, report, progress, task)
    except ProblemFileError as error:
        return FileOutcome(name, unusable=str(error))
    except ModelError as error:
        return FileOutcome(name, unusable=f"{file.path}: {error}")
    except torch.cuda.OutOfMemoryError:
        free = "judging needs several copies in float64"
        return FileOutcome(name, unusable=f"{file.path}: the GPU's memory does not hold this problem ({free})")
    finally:
        progress.remove_task(task)


def _run(file: ProblemFile, options: Options, report: Report, progress: Progress, task: int) -> FileOutcome:
    torch.manual_seed(options.seed)
    theirs = file.model()
    reason = why_nothing_is_ours(theirs)
    if reason is not None:
        return FileOutcome(file.name, skipped=reason)
    inputs = _inputs(file, theirs, options, report)
    theirs = theirs.to(options.device)
    ours = copy.deepcopy(theirs)
    layers = layers_of(file.name, ours, inputs, swapped(ours, options), options)
    if not layers:
        return FileOutcome(file.name, skipped="no torch.nn.Conv2d of it ran")
    progress.update(task, total=sum(len(layer.steps) for layer in layers) + 1)
    done = itertools.count()

    def announce(what: str) -> None:
        progress.update(task, description=what, completed=next(done))

    rows = try_layers(layers, options, announce)
    layers.clear()
    announce(f"{file.name}: whole model")
    model_rows, notes = try_whole(file.name, ours, theirs, inputs, rows, options)
    report.notes += [f"{file.name}: {note}" for note in notes]
    return FileOutcome(file.name, rows=[*rows, *model_rows])


def _inputs(file: ProblemFile, model: torch.nn.Module, options: Options, report: Report) -> tuple[torch.Tensor, ...]:
    """The file's inputs on the device; cut down, with a note, where there is no GPU."""
    inputs = file.inputs()
    if options.device.type == "cpu":
        smallest = SMALLEST_OUTPUT if options.emulation is None else SMALLEST_EMULATED
        reduced = scaled_inputs(model, inputs, smallest_output=smallest)
        inputs = reduced.inputs
        if reduced.note:
            report.notes.append(f"{file.name}: {reduced.note}.")
    return tuple(x.to(options.device) for x in inputs)
