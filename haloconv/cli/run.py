"""``haloconv run``: take problem files, swap their convolutions, check everything, time everything, print one table."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from haloconv import emulator
from haloconv.bench.emulated import Emulation
from haloconv.bench.problem_run import run_files
from haloconv.bench.swapped import Options
from haloconv.bench.traffic import conflict_table, traffic_table
from haloconv.bench.trial import UNTIMED, Budget
from haloconv.cli.live import LiveView
from haloconv.cli.output import Force, check_inputs, check_outputs, positive, refusal, write_output
from haloconv.env import environment_stamp
from haloconv.families import FAMILIES
from haloconv.precision import Precision as PrecisionName
from haloconv.problem import PRECISIONS
from haloconv.problem_file import Candidate, candidates
from haloconv.report import Report, as_table, plots, print_table, score_lines, summary_table

LINE_WIDTH = 132
MOST_NAMES = 4  # of files in a title
ON_A_GPU = "Nothing was timed: on a GPU every row is also timed against PyTorch, at full size."


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"
    emulator = "emulator"


class Precision(str, Enum):
    auto = "auto"
    ieee = "ieee"
    tf32 = "tf32"


Family = Enum("Family", {name: name for name in ("auto", *FAMILIES)}, type=str)  # type: ignore[misc]  # its members are the registry
AUTO = Family("auto")


def run(
    problems: Annotated[list[Path], typer.Argument(help="Problem files, or folders of them.")],
    device: Annotated[
        Device, typer.Option(help="auto: the GPU if there is one. emulator: our kernels, on the CPU.")
    ] = Device.auto,
    precision: Annotated[Precision, typer.Option(help="How fp32 products are formed, on both sides.")] = Precision.auto,
    family: Annotated[Family, typer.Option(help="The family of kernels; auto lets haloconv choose.")] = AUTO,
    seed: Annotated[int, typer.Option(help="For weights, inputs, output gradients and the emulator's schedule.")] = 0,
    stats: Annotated[
        bool, typer.Option("--stats", help="Emulator: count bytes, bank conflicts and multiplies.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Seconds of timing per row on a GPU.", callback=positive)] = 1.0,
    json: Annotated[Path | None, typer.Option(help="Write rows and environment to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    force: Force = False,
) -> None:
    """Check and time the convolutions of problem files against float64 and against PyTorch.

    A problem file is what KernelBench calls one: it defines Model, get_inputs and get_init_inputs. Its torch.nn.Conv2d
    layers are swapped for ours. Every layer is checked in every direction, then the whole model; on a GPU all is timed.

    Of a folder every Python file is taken. Files in it that define no problem, and problems without a torch.nn.Conv2d
    (transposed, 1-D and 3-D convolutions, other operations), are named with the reason and skipped.

    Exit code 0: every check passed; skipped files do not count. 1: a check failed. 2: an option or a file cannot be
    used (the other files run all the same), or there was nothing to check.
    """
    console = make_console()
    try:
        options = make_options(device, precision.value, family, seed, budget, stats=stats)
        _check_page(html)
        files = _candidates(problems)
        check_outputs({"--json": json, "--html": html}, problems, force)
    except typer.BadParameter as error:
        raise refusal(error) from None
    report = Report(f"haloconv run: {_titled(files)}", environment_stamp(), notes=where_it_ran(options))
    with make_progress(console) as progress:
        run_files(files, options, report, LiveView(progress))
    if options.emulation is not None:
        _add_emulation(options.emulation, report)
    show_left_out(report, console)
    if report.rows:
        show(report, console)
        if options.emulation is not None:
            show_traffic(options.emulation, console)
        for path, text in ((json, report.to_json), (html, report.to_html)):
            if path is not None:
                write_output(path, text(), console)
    raise typer.Exit(exit_code(report))


def exit_code(report: Report) -> int:
    """0: all is well. 1: a check failed. 2: a file could not be used, or there was nothing to check."""
    if any(not row.passed for row in report.rows):
        return 1
    return 0 if report.passed else 2


def _candidates(problems: list[Path]) -> list[Candidate]:
    check_inputs(*problems)
    found = candidates(problems)
    if not found:
        raise typer.BadParameter(f"{', '.join(map(str, problems))}: no Python file in there")
    return found


def _titled(files: list[Candidate]) -> str:
    return ", ".join(file.path.stem for file in files) if len(files) <= MOST_NAMES else f"{len(files)} files"


def make_console() -> Console:
    """The terminal, or lines of a fixed width where the output is none."""
    console = Console(soft_wrap=False)
    return console if console.is_terminal else Console(width=LINE_WIDTH)


def make_progress(console: Console) -> Progress:
    """A progress bar that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)


def make_options(
    device: Device,
    precision: str,
    family: Family,
    seed: int,
    budget: float,
    *,
    stats: bool = False,
    autocast: torch.dtype | None = None,
) -> Options:
    """The options of a run. Raises BadParameter for what does not go together or is not there."""
    has_gpu = torch.cuda.is_available()
    if stats and device is not Device.emulator:
        raise typer.BadParameter("--stats counts what the emulator executes: add --device emulator")
    if device is Device.cuda and not has_gpu:
        raise typer.BadParameter(
            "--device cuda: PyTorch sees no GPU; take --device auto or cpu, or ask `haloconv doctor`"
        )
    if autocast is not None and device is Device.emulator:
        raise typer.BadParameter("the emulator runs no whole model under torch.autocast: take another --precision")
    missing = emulator.available() if device is Device.emulator else None
    if missing is not None:
        raise typer.BadParameter(f"--device emulator: {missing}")
    emulated = device is Device.emulator
    on_gpu = has_gpu and device in (Device.auto, Device.cuda)
    if not on_gpu and not emulated:
        _check_cpu(precision, family)
    return Options(
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        precision=_asked_precision("auto" if autocast else precision, on_gpu or emulated),
        family=family.value,
        seed=seed,
        budget=Budget(seconds=budget) if on_gpu else UNTIMED,
        emulation=Emulation(seed, stats) if emulated else None,
        autocast=autocast,
    )


def _check_cpu(precision: str, family: Family) -> None:
    """Raise BadParameter for what PyTorch's own convolution on a CPU cannot show."""
    if family.value not in ("auto", "aten"):
        raise typer.BadParameter(f"--family {family.value} runs on a GPU or on the emulator: add --device emulator")
    if precision == "tf32":
        raise typer.BadParameter("--precision tf32: PyTorch has no TF32 on a CPU; add --device emulator")


def _asked_precision(precision: str, own_kernels: bool) -> PrecisionName | None:
    """None follows PyTorch's TF32 setting, which means nothing to its own convolution on a CPU: there fp32 is fp32."""
    if precision == "auto":
        return None if own_kernels else "ieee"
    return next(each for each in PRECISIONS if each == precision)


def _check_page(html: Path | None) -> None:
    reason = None if html is None else plots.missing()
    if reason is not None:
        raise typer.BadParameter(f"--html: {reason}")


def where_it_ran(options: Options) -> list[str]:
    """The notes on what ran where."""
    if options.device.type == "cuda":
        return [f"Ran at full size on {torch.cuda.get_device_name(options.device)}."]
    if options.emulation is not None:
        return [
            f"Ran at reduced size on the CPU: haloconv's CUDA kernels on the emulator, under the schedule of seed "
            f"{options.seed}, against PyTorch's convolution and float64. {ON_A_GPU}"
        ]
    return [
        "Ran at reduced size on the CPU, with PyTorch's own convolution on both sides (family aten): "
        f"no kernel of haloconv ran; --device emulator runs them. {ON_A_GPU}"
    ]


def _add_emulation(emulation: Emulation, report: Report) -> None:
    """The launches into the report: how many there were, and the records of those that were counted."""
    names = dict.fromkeys(name for row in report.rows for name in row.family.split("+") if name not in ("", "aten"))
    report.notes.append(f"Kernels that ran: {' and '.join(names) or 'none'}, in {emulation.launches} launches.")
    report.launches += [launched.record() for launched in emulation.launched]


def show_traffic(emulation: Emulation, console: Console) -> None:
    """Print what the counted launches moved, and where warps wait for shared memory."""
    if not emulation.launched:
        return
    conflicts = conflict_table(emulation.launched)
    print_table(traffic_table(emulation.launched), console)
    if conflicts is None:
        console.print("No access to shared memory has bank conflicts.", highlight=False)
    else:
        print_table(conflicts, console)


def show_left_out(report: Report, console: Console) -> None:
    """Name the files that did not run, each with its reason."""
    for file in report.files:
        if file.skipped is not None:
            console.print(f"skipped {file.name}: {file.skipped}", style="dim", highlight=False, markup=False)
        elif file.unusable is not None:
            console.print(f"error: {file.unusable}", style="bold red", highlight=False, markup=False)
    if not report.rows:
        console.print("Nothing was checked.", style="bold red", highlight=False)


def show(report: Report, console: Console) -> None:
    """Print the notes, the table, why each family was taken, and the verdict with every complaint."""
    for note in report.notes:
        console.print(note, highlight=False, markup=False)
    print_table(as_table(report.rows), console)
    for reason in report.reasons():
        console.print(reason, style="dim", highlight=False, markup=False)
    for complaint in report.complaints():
        console.print(f"FAILED {complaint}", style="bold red", highlight=False, markup=False)
    passed = sum(row.passed for row in report.rows)
    own = any(name not in ("", "aten") for row in report.rows for name in row.family.split("+"))
    verdict = f"{passed} of {len(report.rows)} rows passed every check{'' if own else '; no kernel of haloconv ran'}."
    console.print(verdict, style="green" if report.passed else "bold red", highlight=False)
    if len(report.files) > 1:
        print_table(summary_table(report.files), console)
        for line in score_lines(report.files):
            console.print(line, highlight=False)
