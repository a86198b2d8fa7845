"""``haloconv report``: a model, a problem file or stored results as one page for a person to read."""

from __future__ import annotations

from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from haloconv.bench.networks.swapped import Options
from haloconv.bench.problem_run import Source, advice, run_source
from haloconv.bench.results import MAIN_SUITE, read_rows
from haloconv.bench.suite import SuiteError, find_suite, load_suite, with_bytes
from haloconv.bench.targets import TargetError, find_source
from haloconv.cli.live import INTERRUPTED, add_emulation, conclude, followed, make_console
from haloconv.cli.output import MAX_SEED, Force, check_inputs, check_outputs, positive, refusal, write_output
from haloconv.cli.run import (
    AUTO,
    Asked,
    Device,
    Family,
    exit_code,
    how_far,
    make_options,
    where_it_ran,
)
from haloconv.env import environment_stamp
from haloconv.problem_file import ProblemFileError
from haloconv.report import Report, Row, plots


class Layout(str, Enum):
    nchw = "nchw"
    nhwc = "nhwc"


class Precision(str, Enum):
    auto = "auto"
    ieee = "ieee"
    tf32 = "tf32"
    tf32x3 = "tf32x3"
    fp16 = "fp16"
    bf16 = "bf16"


AUTOCAST = {Precision.fp16: torch.float16, Precision.bf16: torch.bfloat16}


def report(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL_OR_PROBLEM", help="A problem file, or a model of torchvision or timm: resnet50, timm:NAME."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="The page to write.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Show stored rows instead: a .jsonl of benchmarks/results. Needs no GPU.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Models by name: images of a batch.", min=1)] = 8,
    pixels: Annotated[int, typer.Option(help="Models by name: height and width of an image.", min=1)] = 224,
    device: Annotated[Device, typer.Option(help="As in `haloconv run`.")] = Device.auto,
    precision: Annotated[
        Precision, typer.Option(help="auto: PyTorch's TF32 setting. fp16, bf16: under torch.autocast.")
    ] = Precision.auto,
    layout: Annotated[Layout | None, typer.Option(help="nhwc: the model in channels_last.")] = None,
    family: Annotated[Family, typer.Option(help="The family of kernels; auto lets haloconv choose.")] = AUTO,
    seed: Annotated[int, typer.Option(help="For weights, inputs and output gradients.", min=0, max=MAX_SEED)] = 0,
    budget: Annotated[float, typer.Option(help="Seconds of timing per row on a GPU.", callback=positive)] = 0.5,
    json: Annotated[Path | None, typer.Option(help="Also write rows and environment to this file.")] = None,
    suite: Annotated[
        Path,
        typer.Option(help="The cases of the stored rows, for bytes that older rows do not tell: a file or a name."),
    ] = Path(MAIN_SUITE),
    force: Force = False,
) -> None:
    """Write one page about every layer: family, reason, times, TFLOP/s, GB/s, roofline fraction, error, ratio; plots.

    Exit code 0: every check passed. 1: a check failed. 2: something cannot be used, or there was nothing to check.
    130: interrupted; the page has the rows that were done.
    """
    console = make_console()
    try:
        if (subject is None) == (results is None) or html is None:
            raise typer.BadParameter("give a model or a problem file, or --results FILE; and --html FILE")
        check_inputs(results)
        inputs = [Path(subject)] if subject else [each for each in (results, suite) if each is not None]
        check_outputs({"--html": html, "--json": json}, inputs, force)
        if reason := plots.missing():
            raise typer.BadParameter(reason)
        if results is not None:
            made = stored_report(results, suite)
        else:
            options = make_options(Asked(device, precision.value, family, seed, budget, False, AUTOCAST.get(precision)))
            options = options if layout is None else options.in_layout(layout.value)
            source = find_source(subject or "", batch, pixels)
    except (typer.BadParameter, ProblemFileError, TargetError) as error:
        raise refusal(error) from None
    finished = True
    if results is not None:
        console.print(f"{len(made.rows)} rows, {sum(row.passed for row in made.rows)} passed", highlight=False)
    else:
        made, finished = _fresh_report(f"haloconv report: {subject}", source, options, console)
    if made.rows:
        for path, text in ((html, made.to_html), (json, made.to_json)):
            if path is not None:
                write_output(path, text(), console)
    raise typer.Exit(exit_code(made) if finished else INTERRUPTED)


def _fresh_report(title: str, source: Source, options: Options, console: Console) -> tuple[Report, bool]:
    """The report of a model that is run now, shown while it is made; False if that was interrupted."""
    made = Report(title, environment_stamp(), notes=where_it_ran(options))
    if options.emulation is not None:
        options.emulation.statistics = True
    finished = followed(partial(run_source, source.name, lambda: source, options, made), made, console)
    if options.emulation is not None:
        add_emulation(options.emulation, made, console, stats=False)
    if not finished:
        made.notes.append(how_far(made, 1))
    conclude(made, console)
    if not finished:
        console.print(made.notes[-1], style="bold red", highlight=False, markup=False)
    for sentence in advice(source, options) if finished and made.passed else []:
        made.notes.append(sentence)
        console.print(sentence, highlight=False, markup=False)
    return made, finished


def stored_report(path: Path, suite: Path) -> Report:
    """The rows of a result file as a report. Raises BadParameter if there is none in it."""
    try:
        records = read_rows(path)
        rows = [Row.of_record(record) for record in records]
        rows = with_bytes(rows, load_suite(find_suite(suite)))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        raise typer.BadParameter(f"{path}: a row lacks {error}") from error
    except TypeError as error:
        raise typer.BadParameter(f"{path}: a row is no result: {error}") from error
    except SuiteError as error:
        raise typer.BadParameter(str(error)) from error
    if not rows:
        raise typer.BadParameter(f"{path}: there is no row of results in it; `haloconv bench` writes such files")
    environment = {key: _span(records, key) for key in ("gpu", "torch", "cudnn", "cuda", "commit")}
    days = sorted({str(record["date"])[:10] for record in records})
    environment |= {"date": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}", "rows": path.name}
    return Report(f"haloconv on {environment['gpu']}", environment, rows)


def _span(records: list[dict[str, object]], key: str) -> str:
    return ", ".join(sorted({str(record.get(key, "none")) for record in records}))
