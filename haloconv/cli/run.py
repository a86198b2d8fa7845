"""``haloconv run``: take problem files, swap their convolutions, check everything, time everything, print one table."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from haloconv.accelerate import Swap, accelerate
from haloconv.env import environment_stamp
from haloconv.module import Conv2d
from haloconv.plan import layout_of
from haloconv.problem import ConvSpec, as_four_sides, output_extent
from haloconv.problem_file import ProblemFile, ProblemFileError, load_problem_file, scaled_inputs
from haloconv.report import Report, Row, as_table, print_table
from haloconv.tune.layer import Layer
from haloconv.tune.trial import Budget, try_step
from haloconv.tune.whole import Contest, try_model

LINE_WIDTH = 132
CPU_BUDGET = Budget(seconds=0.05, min_runs=5)


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Precision(str, Enum):
    auto = "auto"
    ieee = "ieee"
    tf32 = "tf32"


class Family(str, Enum):
    auto = "auto"
    direct = "direct"
    aten = "aten"


@dataclass(frozen=True)
class Options:
    """What the command line asked for. ``precision`` None follows PyTorch's TF32 setting."""

    device: torch.device
    precision: str | None
    family: str
    seed: int
    budget: Budget


def run(
    problems: Annotated[list[Path], typer.Argument(help="Files that define Model, get_inputs, get_init_inputs.")],
    device: Annotated[Device, typer.Option(help="auto takes the GPU if there is one.")] = Device.auto,
    precision: Annotated[Precision, typer.Option(help="How fp32 products are formed, on both sides.")] = Precision.auto,
    family: Annotated[Family, typer.Option(help="The family of kernels; auto lets haloconv choose.")] = Family.auto,
    seed: Annotated[int, typer.Option(help="For weights, inputs and output gradients.")] = 0,
    budget: Annotated[float, typer.Option(help="Seconds of timing per row on a GPU.")] = 1.0,
    json: Annotated[Path | None, typer.Option(help="Write rows and environment to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
) -> None:
    """Check and time the convolutions of problem files against float64 and against PyTorch.

    Exit code 0: every check passed. 1: a check failed. 2: a file or an option cannot be used.
    """
    console = make_console()
    try:
        options = _options(device, precision, family, seed, budget)
        files = [load_problem_file(path) for path in problems]
        report = Report("haloconv run: " + ", ".join(file.name for file in files), environment_stamp())
        report.notes.append(_where(options.device))
        with make_progress(console) as progress:
            for file in files:
                run_problem(file, options, report, progress)
    except (ProblemFileError, typer.BadParameter) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
        raise typer.Exit(2) from None
    show(report, console)
    for path, text in ((json, report.to_json), (html, report.to_html)):
        if path is not None:
            _write(path, text(), console)
    raise typer.Exit(0 if report.passed else 1)


def _write(path: Path, text: str, console: Console) -> None:
    """Write the text, or exit with 2 and the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        console.print(f"error: cannot write {path}: {error.strerror}", style="bold red", highlight=False, markup=False)
        raise typer.Exit(2) from None
    console.print(f"wrote {path}", highlight=False, markup=False)


def make_console() -> Console:
    """The terminal, or lines of a fixed width where the output is none."""
    console = Console(soft_wrap=False)
    return console if console.is_terminal else Console(width=LINE_WIDTH)


def make_progress(console: Console) -> Progress:
    """A progress bar that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)


def _options(device: Device, precision: Precision, family: Family, seed: int, budget: float) -> Options:
    has_gpu = torch.cuda.is_available()
    if device is Device.cuda and not has_gpu:
        raise typer.BadParameter(
            "--device cuda: PyTorch sees no GPU; take --device auto or cpu, or ask `haloconv doctor`"
        )
    on_gpu = has_gpu and device is not Device.cpu
    return Options(
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        precision=_asked_precision(precision, on_gpu),
        family=family.value,
        seed=seed,
        budget=Budget(seconds=budget) if on_gpu else CPU_BUDGET,
    )


def _asked_precision(precision: Precision, on_gpu: bool) -> str | None:
    """None follows PyTorch's TF32 setting, which means nothing on a CPU: there fp32 is fp32."""
    if precision is Precision.auto:
        return None if on_gpu else "ieee"
    return precision.value


def _where(device: torch.device) -> str:
    if device.type == "cuda":
        return f"Ran at full size on {torch.cuda.get_device_name(device)}."
    return (
        "Ran at reduced size on the CPU, with PyTorch's own convolution on both sides (family aten): "
        "no kernel of haloconv ran, so the times say nothing about haloconv."
    )


def run_problem(file: ProblemFile, options: Options, report: Report, progress: Progress) -> None:
    """Add the rows and notes of one problem file to the report.

    Raises ProblemFileError if the file's functions or its model fail.
    """
    task = progress.add_task(f"{file.name}: building", total=None)
    torch.manual_seed(options.seed)
    theirs = file.model()
    inputs = file.inputs()
    if options.device.type == "cpu":
        reduced = scaled_inputs(theirs, inputs)
        inputs = reduced.inputs
        if reduced.note:
            report.notes.append(f"{file.name}: {reduced.note}.")
    theirs = theirs.to(options.device)
    inputs = tuple(x.to(options.device) for x in inputs)
    ours = copy.deepcopy(theirs)
    swaps = _swapped(file, ours, options)
    layers = _layers(file, ours, inputs, swaps, options)
    if not layers:
        report.notes.append(f"{file.name}: no torch.nn.Conv2d ran in this model, so that nothing of haloconv is in it.")
    progress.update(task, total=sum(len(layer.steps) for layer in layers) + 1)
    rows = _try_layers(layers, options, progress, task)
    layers.clear()
    progress.update(task, description=f"{file.name}: whole model")
    _whole_model(file, ours, theirs, inputs, rows, options, report)
    progress.advance(task)


def _try_layers(layers: list[Layer], options: Options, progress: Progress, task: TaskID) -> list[Row]:
    rows = []
    for layer in layers:
        for step in layer.steps:
            progress.update(task, description=f"{layer.name} {step}")
            rows.append(try_step(layer, step, options.budget))
            progress.advance(task)
    return rows


def _swapped(file: ProblemFile, model: torch.nn.Module, options: Options) -> list[Swap]:
    try:
        return accelerate(model, family=options.family, precision=options.precision)
    except ValueError as error:
        raise ProblemFileError(f"{file.path}: {error}") from error


def _layers(
    file: ProblemFile, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], swaps: list[Swap], options: Options
) -> list[Layer]:
    """Every swapped convolution that runs, with the input of its first call."""
    seen: dict[Conv2d, torch.Tensor] = {}

    def note(module: Conv2d, args: tuple, kwargs: dict) -> None:
        seen.setdefault(module, (args[0] if args else kwargs["input"]).detach())

    hooks = [swap.module.register_forward_pre_hook(note, with_kwargs=True) for swap in swaps]
    try:
        with torch.no_grad():
            model(*inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ProblemFileError(f"{file.path}: Model's forward raised {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    many = len(swaps) > 1
    return [
        layer_of(f"{file.name}.{swap.name}" if many else file.name, swap.module, seen[swap.module], options)
        for swap in swaps
        if swap.module in seen
    ]


def layer_of(name: str, module: Conv2d, x: torch.Tensor, options: Options) -> Layer:
    """The module's convolution of ``x`` as a Layer, with standard normal output gradients."""
    stride, dilation = tuple(module.stride), tuple(module.dilation)
    x = x if x.dim() == 4 else x.unsqueeze(0)
    if module.padding_mode == "zeros":
        padding = as_four_sides(module.padding, filter_extent=module.kernel_size, stride=stride, dilation=dilation)
    else:
        x = torch.nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = (0, 0, 0, 0)
    spec = ConvSpec(stride, padding, dilation, module.groups, options.precision, options.family)
    rows = output_extent(x.shape[2], padding[0] + padding[1], module.kernel_size[0], stride[0], dilation[0])
    cols = output_extent(x.shape[3], padding[2] + padding[3], module.kernel_size[1], stride[1], dilation[1])
    generator = torch.Generator(x.device).manual_seed(options.seed)
    dy = torch.randn(x.shape[0], module.out_channels, rows, cols, generator=generator, device=x.device).to(x.dtype)
    bias = None if module.bias is None else module.bias.detach()
    return Layer(name, x, module.weight.detach(), bias, dy, spec).with_layout(layout_of(x))


def _whole_model(
    file: ProblemFile,
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    rows: list[Row],
    options: Options,
    report: Report,
) -> None:
    labels = {row.precision for row in rows}
    layer_names = {row.case for row in rows}
    contest = Contest(
        ours,
        theirs,
        inputs,
        precision="tf32" if "tf32" in labels else "ieee",
        family="+".join(dict.fromkeys(row.family for row in rows)),
        label=labels.pop() if len(labels) == 1 else "mixed" if labels else "fp32",
        norm_limit=len(layer_names) * max((row.error_limit for row in rows), default=0.0),
        seed=options.seed,
    )
    model_rows, notes = try_model(contest, file.name, options.budget)
    report.rows += [*rows, *model_rows]
    report.notes += [f"{file.name}: {note}" for note in notes]


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
    verdict = f"{passed} of {len(report.rows)} rows passed every check."
    console.print(verdict, style="green" if report.passed else "bold red", highlight=False)
