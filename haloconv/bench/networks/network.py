"""Whole networks against PyTorch: every distinct layer, inference, a training step, and the memory that they take."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from haloconv.accelerate import accelerate
from haloconv.bench.layer import Layer, Step
from haloconv.bench.networks.swapped import Autocast, Options, layers_of, placed, what_ran, why_nothing_is_ours
from haloconv.bench.networks.whole import Contest, try_model
from haloconv.bench.suite import PRECISIONS, SuiteError
from haloconv.bench.targets import find_source
from haloconv.bench.trial import Budget, try_step
from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel
from haloconv.problem_file import Inputs
from haloconv.report import Row
from haloconv.report.networks import LAYER_BAR, NETWORK_BAR, WHOLE
from haloconv.report.rows import WHOLE_DIRECTIONS, WholeDirection
from haloconv.tune.ahead import tune

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CLOSER = 4
"""Times the budget: a row that misses its bar is timed once more with it, and the longer measurement counts."""

_COMPILE_THREADS = 8


@dataclass(frozen=True)
class NetworkCase:
    """A network as data. ``target`` is what ``tune.targets`` finds; models by name get images of these extents."""

    name: str
    target: str
    batch: int = 1
    pixels: int = 224


@dataclass(frozen=True)
class Setting:
    """One network in one precision and layout. ``precision`` is fp32, tf32, fp16 or bf16, halves under autocast."""

    case: NetworkCase
    precision: PrecisionLabel
    layout: Layout

    def __str__(self) -> str:
        return f"{self.case.name} {self.precision} {self.layout}"


@dataclass(frozen=True)
class Effort:
    """How much to do: the time of a row, whether to tune first and for how many seconds, whether to time layers.

    ``search``: whether compiled networks are compiled by ``max-autotune``, too.
    """

    budget: Budget
    tune: bool = True
    tune_budget_s: float = 0.1
    tune_limit_s: float | None = None
    layers: bool = True
    search: bool = True


def ignore(what: object) -> None:
    """What is called where nobody listens."""


@dataclass(frozen=True)
class RunControl:
    """What is told and kept while a setting runs, and which rows it is to have.

    ``keep`` is given each row as it is measured. ``wanted`` has cases and directions of rows; None: all. Behind
    ``deadline``, which is a ``time.time()``, no row is begun.
    """

    announce: Callable[[str], None] = ignore
    keep: Callable[[Row], None] = ignore
    wanted: Collection[tuple[str, str]] | None = None
    deadline: float = math.inf

    def wants(self, case: str, direction: str) -> bool:
        """Whether the setting is to have this row."""
        return self.wanted is None or (case, direction) in self.wanted


@dataclass
class Outcome:
    """The rows of one setting, what a reader must know, and how many rows ``RunControl.deadline`` left out."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left: int = 0


_ALL = RunControl()


def load_networks(path: Path) -> list[NetworkCase]:
    """The networks of a file; targets that are files are found beside it.

    Raises SuiteError if the file cannot be read, is no TOML, or has a missing, unknown or doubled entry.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("model", [])
        cases = [NetworkCase(**entry) for entry in entries]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, TypeError) as error:
        raise SuiteError(f"{path}: {error}") from error
    names = [case.name for case in cases]
    if not cases or len(set(names)) < len(names):
        raise SuiteError(f"{path}: there is no model, or one stands twice")
    return [
        replace(case, target=str(path.parent / case.target)) if case.target.endswith(".py") else case for case in cases
    ]


def bench_network(setting: Setting, effort: Effort, device: torch.device, control: RunControl = _ALL) -> Outcome:
    """Tune, then check and time inference (evaluation mode), a training step, and each distinct layer.

    Raises ModelError, TargetError or ProblemFileError if the model cannot be had, OutOfMemoryError if it is too large.
    """
    dtype, products = PRECISIONS[setting.precision]
    autocast = None if dtype == torch.float32 else dtype
    options = Options(device, products, "auto", 0, effort.budget, None, autocast, setting.layout)
    torch.manual_seed(options.seed)
    control.announce(f"{setting}: building")
    source = find_source(setting.case.target, setting.case.batch, setting.case.pixels)
    theirs, inputs = placed(source.model(), source.inputs(), options)
    ours = copy.deepcopy(theirs)
    acceleration = accelerate(ours, precision=products)
    reason = why_nothing_is_ours(acceleration)
    if reason is not None:
        return Outcome(notes=[f"{setting}: nothing in it is ours: {reason}"])
    outcome = Outcome()
    if effort.tune:
        control.announce(f"{setting}: tuning")
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            told = tune(ours, inputs, budget_s=effort.tune_budget_s, limit_s=effort.tune_limit_s, progress=False)
        outcome.notes += [f"{setting}: {note}" for note in told.notes]
    layers = layers_of(setting.case.name, ours, inputs, [*acceleration.swaps, *acceleration.already], options)
    contest = _contest(setting, ours, theirs, inputs, layers, options)
    wholes = [each for each in WHOLE_DIRECTIONS if control.wants(f"{setting.case.name}{WHOLE}", each)]
    steps = [each for each in _steps(layers) if effort.layers and control.wants(each[0].name, each[1])]
    _compile(_steps(layers) if wholes else steps)
    measured = [
        *(
            (direction, partial(_settled_whole, contest, setting.case.name, direction, effort.budget))
            for direction in wholes
        ),
        *((f"{layer.name} {step}", partial(_settled_layer, layer, step, effort.budget)) for layer, step in steps),
    ]
    for i, (what, measure) in enumerate(measured):
        if time.time() > control.deadline:
            outcome.left = len(measured) - i
            break
        control.announce(f"{setting}: {what}")
        rows, notes = measure()
        # one layout for all rows: a layer's own would be unclear where an image is one pixel
        rows = [replace(row, layout=setting.layout) for row in rows]
        for row in rows:
            control.keep(row)
        outcome.rows += rows
        outcome.notes += [f"{setting}: {note}" for note in notes]
    return outcome


def _contest(
    setting: Setting,
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    inputs: Inputs,
    layers: list[Layer],
    options: Options,
) -> Contest:
    """Both models, under autocast if the setting wants it; together the layers may err as much as each may."""
    if options.autocast is not None:
        ours, theirs = Autocast(ours, options.autocast), Autocast(theirs, options.autocast)
    wanted = _steps(layers)
    return Contest(
        ours,
        theirs,
        inputs,
        precision="tf32" if setting.precision == "tf32" else "ieee",
        label=setting.precision,
        norm_limit=len(layers) * max(layer.limits(step, None).norm for layer, step in wanted),
        ran={"forward": what_ran(each for each in wanted if each[1] == "fprop"), "step": what_ran(wanted)},
        seed=options.seed,
    )


def _wanted(layer: Layer) -> list[Step]:
    """The directions that training runs."""
    return [step for step in layer.steps if not (layer.fed and step == "dgrad")]


def _steps(layers: list[Layer]) -> list[tuple[Layer, Step]]:
    return [(layer, step) for layer in layers for step in _wanted(layer)]


def _compile(steps: list[tuple[Layer, Step]]) -> None:
    """Run each kernel of ours once, side by side: compiling them one after another takes minutes."""
    wanted = [(layer, step) for layer, step in steps if layer.choice(step).family != "aten"]
    with torch.no_grad(), ThreadPoolExecutor(_COMPILE_THREADS) as pool:
        list(pool.map(lambda each: each[0].ours(each[1])(), wanted))


def _settled_whole(
    contest: Contest, name: str, direction: WholeDirection, budget: Budget
) -> tuple[list[Row], list[str]]:
    """The row of the whole network, if there is one; timed again, and longer, if it seems to miss its bar."""
    for model in (contest.ours, contest.theirs):
        model.train(direction == "step")
    rows, notes = try_model(contest, name, budget, (direction,))
    if any(row.passed and row.ratio is not None and round(row.ratio, 2) < NETWORK_BAR for row in rows):
        return try_model(contest, name, replace(budget, seconds=CLOSER * budget.seconds), (direction,))
    return rows, notes


def _settled_layer(layer: Layer, step: Step, budget: Budget) -> tuple[list[Row], list[str]]:
    row = try_step(layer, step, budget)
    if row.passed and row.ratio is not None and round(row.ratio, 2) < LAYER_BAR:
        row = try_step(layer, step, replace(budget, seconds=CLOSER * budget.seconds))
    return [row], []
