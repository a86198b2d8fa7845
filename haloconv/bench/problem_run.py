"""Problem files, one after the other: convolutions swapped, every layer and the model checked, on a GPU timed."""

from __future__ import annotations

import copy
import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from haloconv.accelerate import accelerate
from haloconv.bench.layer import Layer
from haloconv.bench.networks.swapped import (
    Options,
    contest_of,
    layers_of,
    on_device,
    placed,
    try_layers,
    why_nothing_is_ours,
)
from haloconv.bench.networks.whole import try_model
from haloconv.bench.targets import TargetError
from haloconv.bench.trial import measured
from haloconv.bench.values import ModelError, check_model, image_layout
from haloconv.precision import convolution_precision, torch_precision
from haloconv.problem import DIRECTIONS
from haloconv.problem_file import (
    SMALLEST_OUTPUT,
    Candidate,
    Inputs,
    ProblemFileError,
    how_it_ended,
    load_problem_file,
    no_silent_end,
    scaled_inputs,
)
from haloconv.report import FileOutcome, Report, Row
from haloconv.tune.advice import NEEDS_A_GPU, advise

SMALLEST_EMULATED = 32  # pixels of an output's side: several tiles, and seconds for each problem file


class Source(Protocol):
    """Something that makes a model and its inputs, like a problem file."""

    @property
    def name(self) -> str: ...

    def model(self) -> torch.nn.Module: ...

    def inputs(self) -> Inputs: ...


class Listener:
    """Is told of a run while it goes on; this one does nothing with it."""

    def begins(self, name: str) -> None:
        """A file is loaded."""

    def layers(self, name: str, layers: Sequence[Layer]) -> None:
        """These layers of the file, and then its whole model, will be checked."""

    def doing(self, what: str) -> None:
        """The next row is being made."""

    def note(self, sentence: str) -> None:
        """Something a reader must know."""

    def row(self, row: Row) -> None:
        """A row is done."""

    def ended(self, outcome: FileOutcome) -> None:
        """A file is done; its outcome stands in the report."""


def run_files(files: Sequence[Candidate], options: Options, report: Report, listener: Listener) -> None:
    """Add the outcome, the rows and the notes of every file to the report; what breaks one leaves the others alone."""
    for file in files:
        if file.reason is not None:
            report.files.append(FileOutcome(file.path.name, skipped=file.reason))
            listener.ended(report.files[-1])
        else:
            run_source(file.path.stem, partial(load_problem_file, file.path), options, report, listener)


def run_source(name: str, load: Callable[[], Source], options: Options, report: Report, listener: Listener) -> None:
    """Add the rows and the notes of one source to the report as they come, then its outcome.

    What ``load`` or the source's code raises is the outcome. An interrupt is, too, and goes on.
    """
    listener.begins(name)
    run = _Run(name, options, report, listener)
    skipped = unusable = None
    interrupted = False
    try:
        with _settings_kept():
            skipped = run.whole_source(load)
    except (ProblemFileError, TargetError) as error:
        unusable = str(error)
    except ModelError as error:
        unusable = f"{name}: {error}"
    except torch.cuda.OutOfMemoryError:
        unusable = f"{name}: the GPU's memory does not hold it, for judging takes several copies in float64"
    except KeyboardInterrupt:
        interrupted = True
        raise
    except BaseException as error:
        unusable = f"{name}: {how_it_ended(error)} ({_place_of(error)})"
    finally:
        outcome = FileOutcome(name, run.rows, skipped, unusable, interrupted)
        report.files.append(outcome)
        listener.ended(outcome)
    if options.device.type == "cuda":
        torch.cuda.empty_cache()


def advice(source: Source, options: Options) -> list[str]:
    """What would make the source's convolutions faster where it runs, one sentence each."""
    if options.device.type != "cuda":
        return [NEEDS_A_GPU]
    model, inputs = placed(source.model(), source.inputs(), options)
    casting = torch.autocast("cuda", options.autocast) if options.autocast else nullcontext()
    with casting, convolution_precision(options.model_precision or torch_precision()):
        return advise(model, inputs).sentences


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Take back what a file's code sets for the whole process, and so for the files behind it."""
    dtype, device, folder = torch.get_default_dtype(), torch.get_default_device(), Path.cwd()
    grad, deterministic = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with no_silent_end():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        os.chdir(folder)


def _place_of(error: BaseException) -> str:
    """Where it was raised, for a report of what nobody expected."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"


@dataclass
class _Run:
    """One source's run, with the rows that it has so far."""

    name: str
    options: Options
    report: Report
    listener: Listener
    rows: list[Row] = field(default_factory=list)

    def whole_source(self, load: Callable[[], Source]) -> str | None:
        """Run everything; why the source is skipped, or None. Raises what ends the source."""
        options, name = self.options, self.name
        source = load()
        torch.manual_seed(options.seed)
        theirs = source.model()
        ours = copy.deepcopy(theirs)
        acceleration = accelerate(ours, family=options.family, precision=options.model_precision)
        reason = why_nothing_is_ours(acceleration)
        if reason is not None:
            return reason
        for left in acceleration.left:
            if left.convolution:
                self._note(f"{left.name} stays PyTorch's: {left.reason}.")
        theirs, inputs = placed(theirs, self._inputs(source, theirs), options)
        ours, _ = placed(ours, (), options)
        check_model(theirs, inputs)
        try:
            layers = layers_of(name, ours, inputs, [*acceleration.swaps, *acceleration.already], options)
        except ModelError as error:
            self._add(_without_result(name, inputs, f"with haloconv's convolutions {error}"))
            return None
        if not layers:
            return "no torch.nn.Conv2d of it ran on an input that has elements"
        self._check_ours(layers)
        self.listener.layers(name, layers)
        for row in try_layers(layers, options, self.listener.doing):
            self._add(row)
        contest = contest_of(ours, theirs, inputs, layers, self.rows, options)
        layers.clear()
        told: list[str] = []
        for direction in ("forward", "step"):
            self.listener.doing(f"{name}: whole model, {direction}")
            rows, notes = try_model(contest, name, options.budget, (direction,))
            for row in rows:
                self._add(row)
            for note in (each for each in notes if each not in told):
                told.append(note)
                self._note(note)
        if options.model_precision == "ieee" and any(row.precision == "tf32" for row in self.rows):
            self._note("The whole model ran in full fp32 precision: PyTorch on a CPU has no TF32 to judge it by.")
        return None

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.report.rows.append(row)
        self.listener.row(row)

    def _note(self, sentence: str) -> None:
        self.report.notes.append(f"{self.name}: {sentence}")
        self.listener.note(self.report.notes[-1])

    def _inputs(self, source: Source, model: torch.nn.Module) -> Inputs:
        """The source's inputs; cut down, with a note, where there is no GPU."""
        inputs = source.inputs()
        if self.options.device.type != "cpu":
            return inputs
        smallest = SMALLEST_OUTPUT if self.options.emulation is None else SMALLEST_EMULATED
        reduced = scaled_inputs(model, inputs, smallest_output=smallest)
        if reduced.note:
            self._note(f"{reduced.note}.")
        return reduced.inputs

    def _check_ours(self, layers: Sequence[Layer]) -> None:
        """Raise ModelError if a family or the emulator was asked for, and no direction of any layer can run there."""
        options = self.options
        asked = options.family not in ("auto", "aten")
        if not asked and (options.emulation is None or options.family == "aten"):
            return
        choices = [on_device(layer, options).choice(step) for layer in layers for step in DIRECTIONS]
        if all(choice.family == "aten" for choice in choices):
            what = f"--family {options.family}" if asked else "haloconv"
            raise ModelError(f"{what} takes none of its layers: {choices[0].reason}")


def _without_result(name: str, inputs: Inputs, complaint: str) -> Row:
    """The row of a model that did not run with haloconv's layers."""
    return Row(
        case=f"{name} (model)",
        direction="forward",
        precision="unknown",
        layout=image_layout(inputs),
        family="",
        reason="",
        error=math.inf,
        aten_error=math.nan,
        error_limit=math.nan,
        difference=math.inf,
        **measured({}),
        complaint=complaint,
    )
