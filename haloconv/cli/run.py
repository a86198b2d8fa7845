"""``haloconv run``: take problem files, swap their convolutions, check everything, time everything, print one table."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from haloconv import atomic, emulator
from haloconv.bench.emulation.emulated import Emulation
from haloconv.bench.networks.swapped import Options
from haloconv.bench.problem_run import run_files
from haloconv.bench.trial import UNTIMED, Budget
from haloconv.cli.live import INTERRUPTED, add_emulation, conclude, followed, make_console
from haloconv.cli.output import MAX_SEED, Force, check_inputs, check_outputs, positive, refusal, write_output
from haloconv.env import environment_stamp
from haloconv.families import FAMILIES
from haloconv.precision import Precision as PrecisionName
from haloconv.problem import PRECISIONS
from haloconv.problem_file import Candidate, candidates
from haloconv.report import Report, plots

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
    tf32x3 = "tf32x3"


Family = Enum("Family", {name: name for name in ("auto", *FAMILIES)}, type=str)  # type: ignore[misc]  # its members are the registry
AUTO = Family("auto")


def run(
    problems: Annotated[list[Path], typer.Argument(help="Problem files, or folders of them.")],
    device: Annotated[
        Device, typer.Option(help="auto: the GPU if there is one. emulator: our kernels, on the CPU.")
    ] = Device.auto,
    precision: Annotated[Precision, typer.Option(help="How fp32 products are formed, on both sides.")] = Precision.auto,
    family: Annotated[Family, typer.Option(help="The family of kernels; auto lets haloconv choose.")] = AUTO,
    seed: Annotated[
        int, typer.Option(help="For weights, inputs, output gradients, the emulator.", min=0, max=MAX_SEED)
    ] = 0,
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
    used (the other files run all the same), or there was nothing to check. 130: interrupted; rows are written all the
    same, and --json as each file is done.
    """
    console = make_console()
    try:
        options = make_options(Asked(device, precision.value, family, seed, budget, stats))
        _check_page(html)
        files = _candidates(problems)
        check_outputs({"--json": json, "--html": html}, problems, force)
    except typer.BadParameter as error:
        raise refusal(error) from None
    if options.emulation is not None and html is not None:
        options.emulation.statistics = True
    report = Report(f"haloconv run: {_titled(files)}", environment_stamp(), notes=where_it_ran(options))
    work = partial(run_files, files, options, report)
    finished = followed(work, report, console, partial(_save, json, report))
    if options.emulation is not None:
        add_emulation(options.emulation, report, console, stats)
    if not finished:
        report.notes.append(how_far(report, len(files)))
    conclude(report, console)
    if json is not None and _worth_writing(report):
        write_output(json, report.to_json(), console)
    if html is not None and report.rows:
        write_output(html, report.to_html(), console)
    if not finished:
        console.print(report.notes[-1], style="bold red", highlight=False, markup=False)
    raise typer.Exit(exit_code(report) if finished else INTERRUPTED)


def how_far(report: Report, files: int) -> str:
    """The sentence about a run that was interrupted, given how many files there were."""
    cut = sum(file.interrupted for file in report.files)
    done, left = len(report.files) - cut, files - len(report.files)
    return f"Interrupted: {done} of {files} files done, {cut} cut short, {left} not begun; {len(report.rows)} rows."


def _worth_writing(report: Report) -> bool:
    return bool(report.rows) or any(file.unusable is not None for file in report.files)


def _save(json: Path | None, report: Report) -> None:
    """Keep what there is so far, should the run be killed; what hinders that is told at the end."""
    if json is not None and _worth_writing(report) and (json.is_file() or not json.exists()):
        with suppress(OSError):
            atomic.write_text(json, report.to_json())


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


class Asked(NamedTuple):
    """What the command line asks of a run; ``budget`` in seconds. Under ``autocast`` the precision is not looked at."""

    device: Device
    precision: str
    family: Family
    seed: int
    budget: float
    stats: bool = False
    autocast: torch.dtype | None = None


def make_options(asked: Asked) -> Options:
    """The options of a run. Raises BadParameter for what does not go together or is not there."""
    device, precision, family, seed, budget, stats, autocast = asked
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
    if precision in ("tf32", "tf32x3"):
        raise typer.BadParameter(f"--precision {precision}: PyTorch has no TF32 on a CPU; add --device emulator")


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
