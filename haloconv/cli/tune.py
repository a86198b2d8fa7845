"""``haloconv tune``: measure the convolutions of models, problem files or the suite once, and keep the choices."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from haloconv.backend import backend
from haloconv.bench.layer import LAYOUTS
from haloconv.bench.networks.swapped import in_memory_format
from haloconv.bench.suite import PRECISIONS, SuiteError, find_suite, load_suite, select
from haloconv.bench.targets import TargetError, load_target
from haloconv.choose.records import records_path, shelf_of, shipped_path, stale_problems, write_records
from haloconv.cli.bench.command import choices, listed
from haloconv.cli.live import INTERRUPTED, make_console, show
from haloconv.cli.output import Force, check_inputs, check_outputs, positive, refusal, write_output
from haloconv.device import device_facts
from haloconv.fusion.fuse import fuse
from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel, convolution_precision
from haloconv.precompile import Inputs, evaluating
from haloconv.problem import DIRECTIONS, Direction
from haloconv.problem_file import ProblemFileError, map_tensors
from haloconv.report import Report
from haloconv.tune.ahead import Options, tune_problems
from haloconv.tune.measure import BUDGET_S
from haloconv.tune.problems import Posed, problems_of, wholes_of
from haloconv.tune.saved import save
from haloconv.tune.submission import SubmissionError, read_rows

_EVERY = ",".join(DIRECTIONS)
Submit = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write every candidate's times to FILE, to contribute them.")
]
Ship = Annotated[bool, typer.Option("--ship", help="Also write the records into the package, to be shipped.")]
Stale = Annotated[bool, typer.Option("--stale", help="Also what has a record for kernels that have changed since.")]
Fused = Annotated[
    bool, typer.Option("--fused", help="Models: also with what follows, for haloconv.fuse and the compiler's backend.")
]
SaveKernels = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Also write kernels and records to DIR, for a container.")
]


def tune(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Problem files, or models of torchvision or timm: resnet50, timm:NAME.")
    ] = None,
    suite: Annotated[Path | None, typer.Option(help="Tune the layers of this suite, too: a file or a name.")] = None,
    case: Annotated[str, typer.Option(help="Suite: names of cases, separated by commas; all by default.")] = "",
    tag: Annotated[str, typer.Option(help="Suite: only cases with one of these tags.")] = "",
    direction: Annotated[str, typer.Option(help="Of fprop,dgrad,wgrad; fprop is enough for inference.")] = _EVERY,
    precision: Annotated[
        str, typer.Option(help="Of fp32,tf32x3 (models: TF32 off),tf32,fp16,bf16 (autocast); auto: as PyTorch is set.")
    ] = "auto",
    layout: Annotated[str, typer.Option(help="Of nchw,nhwc (channels_last).")] = "nchw",
    batch: Annotated[int, typer.Option(help="Models: images of a batch.", min=1)] = 32,
    pixels: Annotated[int, typer.Option(help="Models: height and width of an image.", min=1)] = 224,
    budget: Annotated[float, typer.Option(help="Seconds of timing per problem.", callback=positive)] = BUDGET_S,
    limit: Annotated[float | None, typer.Option(help="Seconds after which nothing begins.", callback=positive)] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what has a current record, too.")] = False,
    stale: Stale = False,
    fused: Fused = False,
    ship: Ship = False,
    save_kernels: SaveKernels = None,
    submit: Submit = None,
    json: Annotated[Path | None, typer.Option(help="Write rows and environment to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    force: Force = False,
) -> None:
    """Measure the layers of models once, verified against float64, so that each runs on what is fastest here.

    The choices are kept for this GPU model in a file of yours; what has a record is not measured again: a run that was
    cut short goes on where it stopped. Layers that were never tuned follow fixed rules.

    Exit code 0: done. 1: a check failed. 2: no GPU, or a target or an option cannot be used. 130: interrupted.
    """
    console = make_console()
    try:
        check_outputs({"--json": json, "--html": html}, _inputs(targets or [], suite), force)
        device = current_device()
        order = Order(
            targets=targets or [],
            suite=suite,
            cases=listed(case),
            tags=listed(tag),
            directions=choices("--direction", direction, DIRECTIONS),
            precisions=choices("--precision", precision, ("auto", *PRECISIONS)),
            layouts=choices("--layout", layout, LAYOUTS),
            batch=batch,
            pixels=pixels,
            stale=stale,
            fused=fused,
        )
        read_rows(submit or Path(os.devnull))  # a file of another kind is refused before anything is measured
        posed = [*_of_suite(order, device), *_of_targets(order, device), *_of_stale_records(order, device)]
        if not posed and not stale:
            raise typer.BadParameter("name a problem file or a model, or give --suite; nothing here has a convolution")
    except (ProblemFileError, TargetError, SuiteError, SubmissionError, typer.BadParameter) as error:
        raise refusal(error) from None
    report = _measured(f"haloconv tune: {order.title}", posed, Options(budget, limit, again, submit=submit))
    _tell(report, posed if ship else [], device, {json: report.to_json, html: report.to_html}, console)
    _save(posed, save_kernels if report.complete else None, console)
    raise typer.Exit(_exit_code(report))


def _measured(title: str, posed: list[Posed], options: Options) -> Report:
    """Measure the problems; after Ctrl-C the report of those that have records, which is not complete."""
    try:
        return tune_problems(title, posed, options)
    except KeyboardInterrupt:
        report = tune_problems(title, posed, replace(options, limit_s=0.0, again=False, submit=None))
        report.complete = False
        report.notes.insert(0, "Interrupted: what was measured is kept, and the same command goes on from there.")
        return report


def _exit_code(report: Report) -> int:
    if not report.complete:
        return INTERRUPTED
    return 0 if all(row.passed for row in report.rows) else 1


def _inputs(targets: list[str], suite: Path | None) -> list[Path]:
    """The files to read. Raises BadParameter or SuiteError for one that is not there."""
    files = [Path(text) for text in targets if text.endswith(".py") or Path(text).is_file()]
    check_inputs(*files)
    return [*files, *([find_suite(suite)] if suite else [])]


@dataclass(frozen=True)
class Order:
    """What to tune: targets, cases of a suite, and every combination of the other lists."""

    targets: list[str]
    suite: Path | None
    cases: list[str]
    tags: list[str]
    directions: list[Direction]
    precisions: list[PrecisionLabel | Literal["auto"]]
    layouts: list[Layout]
    batch: int
    pixels: int
    stale: bool
    fused: bool

    @property
    def title(self) -> str:
        """What is tuned, in words."""
        return ", ".join([*self.targets, *([self.suite.stem] if self.suite else []), *["stale records"] * self.stale])


def current_device() -> torch.device:
    """The GPU to measure on. Raises typer.BadParameter without one."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("tune needs an NVIDIA GPU; `haloconv doctor` says why there is none")
    return torch.device("cuda", torch.cuda.current_device())


def _of_suite(order: Order, device: torch.device) -> Iterator[Posed]:
    """The problems of the suite's cases; "auto" is TF32, PyTorch's default. No tensor is made."""
    if order.suite is None:
        return
    cases = select(load_suite(find_suite(order.suite)), order.cases, order.tags)
    labels: list[PrecisionLabel] = ["tf32" if each == "auto" else each for each in order.precisions]
    for case, label, layout, direction in itertools.product(cases, labels, order.layouts, order.directions):
        yield Posed(case.name, case.problem(direction, label, layout), device)


def _of_stale_records(order: Order, device: torch.device) -> Iterator[Posed]:
    """The problems of records, the user's and shipped ones, that hold no longer on this GPU model."""
    if order.stale:
        yield from (Posed("a record", problem, device) for problem in stale_problems(device_facts(device.index)))


def _of_targets(order: Order, device: torch.device) -> Iterator[Posed]:
    """The problems of models and problem files. A layer that says a precision keeps it.

    One that says none is posed as with PyTorch's TF32 on or off, which fp32 and tf32x3 do not tell apart.
    """
    for text in order.targets:
        torch.manual_seed(0)
        target = load_target(text, order.batch, order.pixels)
        model = target.model.to(device)
        for layout, label in itertools.product(order.layouts, order.precisions):
            memory_format = LAYOUTS[layout]
            inputs = map_tensors(partial(_stored, device, memory_format), target.inputs)
            with ExitStack() as stack:
                dtype, products = (torch.float32, None) if label == "auto" else PRECISIONS[label]
                if dtype != torch.float32:
                    stack.enter_context(torch.autocast(device.type, dtype))
                elif products is not None:
                    stack.enter_context(convolution_precision(products))
                asked_of = in_memory_format(model, memory_format)
                wholes = _wholes(asked_of, inputs) if order.fused else []
                yield from (*problems_of(asked_of, inputs, order.directions), *wholes)
        del model, inputs


def _wholes(model: torch.nn.Module, inputs: Inputs) -> list[Posed]:
    """Forward passes in inference with what follows them: as one call in eager modules, and in compiled graphs."""
    with evaluating(model):
        fused = copy.deepcopy(model)
        fuse(fused)
        compiled: Any = torch.compile(model, backend=backend)
        return [*wholes_of(fused, inputs), *wholes_of(compiled, inputs)]


def _stored(device: torch.device, memory_format: torch.memory_format, x: torch.Tensor) -> torch.Tensor:
    x = x.to(device)
    return x.contiguous(memory_format=memory_format) if x.dim() == 4 else x


def _tell(
    report: Report,
    shipped: list[Posed],
    device: torch.device,
    files: dict[Path | None, Callable[[], str]],
    console: Console,
) -> None:
    """Print the report, say where records are, write the files that were asked for."""
    show(report, console)
    gpu = device_facts(device.index).name
    console.print(f"records are in {records_path(gpu)}", highlight=False, markup=False)
    if shipped and report.complete:
        console.print(f"wrote {_ship(shipped, device)} of them to {shipped_path(gpu)}", highlight=False, markup=False)
    for path, text in files.items():
        if path is not None:
            write_output(path, text(), console)


def _save(posed: list[Posed], folder: Path | None, console: Console) -> None:
    """Write what a container needs to the folder, if there is one, or exit with 2 and the reason."""
    if folder is None:
        return
    try:
        saved = save(posed, folder)
    except (OSError, RuntimeError) as error:
        raise refusal(f"cannot save kernels to {folder}: {error}") from None
    console.print(
        f"wrote {saved.kernels} kernels and {saved.records} records to {folder}", highlight=False, markup=False
    )


def _ship(posed: list[Posed], device: torch.device) -> int:
    """Write the records of these problems into the package; how many there are."""
    facts = device_facts(device.index)
    found = (shelf_of(facts).exact(each.problem) for each in posed)
    records = [record for record in dict.fromkeys(found) if record is not None]
    write_records(shipped_path(facts.name), records, facts, drop_stale=True)
    return len(records)
