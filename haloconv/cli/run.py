"""``haloconv run``: take problem files, swap their convolutions, check everything, time everything, print one table."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from haloconv import emulator
from haloconv.accelerate import Acceleration, accelerate
from haloconv.emulator import EmulatorError
from haloconv.env import environment_stamp
from haloconv.module import Conv2d
from haloconv.plan import Choice, layout_of
from haloconv.problem import FAMILIES, ConvSpec, as_four_sides, output_extent
from haloconv.problem_file import SMALLEST_OUTPUT, ProblemFile, ProblemFileError, load_problem_file, scaled_inputs
from haloconv.report import Report, Row, as_table, print_table
from haloconv.tune.emulated import UNTIMED, EmulatedLayer, Emulation, failed_row, try_emulated_step
from haloconv.tune.layer import Layer
from haloconv.tune.traffic import conflict_table, traffic_table
from haloconv.tune.trial import Budget, try_step
from haloconv.tune.whole import Contest, try_model

LINE_WIDTH = 132
SMALLEST_EMULATED = 32  # pixels of an output's side: several tiles, and seconds for each problem file
CPU_BUDGET = Budget(seconds=0.05, min_runs=5)


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"
    emulator = "emulator"


class Precision(str, Enum):
    auto = "auto"
    ieee = "ieee"
    tf32 = "tf32"


Family = Enum("Family", {name: name for name in FAMILIES}, type=str)


@dataclass(frozen=True)
class Options:
    """What the command line asked for. ``precision`` None follows PyTorch's TF32 setting.

    ``emulation`` is set if our side runs on the emulator.
    """

    device: torch.device
    precision: str | None
    family: str
    seed: int
    budget: Budget
    emulation: Emulation | None = None

    @property
    def model_precision(self) -> str | None:
        """How whole models form fp32 products: beside the emulator stands no PyTorch with TF32 to judge a model by."""
        return "ieee" if self.emulation is not None and self.precision is None else self.precision


def run(
    problems: Annotated[list[Path], typer.Argument(help="Files that define Model, get_inputs, get_init_inputs.")],
    device: Annotated[
        Device, typer.Option(help="auto: the GPU if there is one. emulator: our kernels, on the CPU.")
    ] = Device.auto,
    precision: Annotated[Precision, typer.Option(help="How fp32 products are formed, on both sides.")] = Precision.auto,
    family: Annotated[Family, typer.Option(help="The family of kernels; auto lets haloconv choose.")] = Family.auto,
    seed: Annotated[int, typer.Option(help="For weights, inputs, output gradients and the emulator's schedule.")] = 0,
    stats: Annotated[
        bool, typer.Option("--stats", help="Emulator: count bytes, bank conflicts and multiplies.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Seconds of timing per row on a GPU.")] = 1.0,
    json: Annotated[Path | None, typer.Option(help="Write rows and environment to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
) -> None:
    """Check and time the convolutions of problem files against float64 and against PyTorch.

    Exit code 0: every check passed. 1: a check failed. 2: a file or an option cannot be used.
    """
    console = make_console()
    try:
        options = _options(device, precision, family, seed, budget, stats)
        files = [load_problem_file(path) for path in problems]
        report = Report("haloconv run: " + ", ".join(file.name for file in files), environment_stamp())
        report.notes += _where(options, device)
        with make_progress(console) as progress:
            for file in files:
                run_problem(file, options, report, progress)
        if options.emulation is not None:
            _add_emulation(options.emulation, report)
    except (ProblemFileError, typer.BadParameter) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
        raise typer.Exit(2) from None
    show(report, console)
    if options.emulation is not None:
        show_traffic(options.emulation, console)
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


def _options(device: Device, precision: Precision, family: Family, seed: int, budget: float, stats: bool) -> Options:
    has_gpu = torch.cuda.is_available()
    if stats and device is not Device.emulator:
        raise typer.BadParameter("--stats counts what the emulator executes: add --device emulator")
    if device is Device.cuda and not has_gpu:
        raise typer.BadParameter(
            "--device cuda: PyTorch sees no GPU; take --device auto or cpu, or ask `haloconv doctor`"
        )
    on_gpu = has_gpu and device in (Device.auto, Device.cuda)
    emulated = device is Device.emulator and emulator.available() is None
    return Options(
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        precision=_asked_precision(precision, on_gpu or emulated),
        family=family.value,
        seed=seed,
        budget=Budget(seconds=budget) if on_gpu else UNTIMED if emulated else CPU_BUDGET,
        emulation=Emulation(seed, stats) if emulated else None,
    )


def _asked_precision(precision: Precision, own_kernels: bool) -> str | None:
    """None follows PyTorch's TF32 setting, which means nothing to its own convolution on a CPU: there fp32 is fp32."""
    if precision is Precision.auto:
        return None if own_kernels else "ieee"
    return precision.value


def _where(options: Options, asked: Device) -> list[str]:
    if options.device.type == "cuda":
        return [f"Ran at full size on {torch.cuda.get_device_name(options.device)}."]
    if options.emulation is not None:
        return [
            f"Ran at reduced size on the CPU: haloconv's CUDA kernels on the emulator, under the schedule of seed "
            f"{options.seed}, against PyTorch's convolution and float64. Nothing was timed."
        ]
    reason = emulator.available() if asked is Device.emulator else None
    return [
        *([f"Nothing was emulated: {reason}."] if reason else []),
        "Ran at reduced size on the CPU, with PyTorch's own convolution on both sides (family aten): "
        "no kernel of haloconv ran, so the times say nothing about haloconv.",
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


def run_problem(file: ProblemFile, options: Options, report: Report, progress: Progress) -> None:
    """Add the rows and notes of one problem file to the report.

    Raises ProblemFileError if the file's functions or its model fail.
    """
    task = progress.add_task(f"{file.name}: building", total=None)
    torch.manual_seed(options.seed)
    theirs = file.model()
    inputs = file.inputs()
    if options.device.type == "cpu":
        smallest = SMALLEST_OUTPUT if options.emulation is None else SMALLEST_EMULATED
        reduced = scaled_inputs(theirs, inputs, smallest_output=smallest)
        inputs = reduced.inputs
        if reduced.note:
            report.notes.append(f"{file.name}: {reduced.note}.")
    theirs = theirs.to(options.device)
    inputs = tuple(x.to(options.device) for x in inputs)
    ours = copy.deepcopy(theirs)
    swaps = accelerate(ours, family=options.family, precision=options.model_precision)
    report.notes += [
        f"{file.name}: {left.name} stays PyTorch's: {left.reason}." for left in swaps.left if left.convolution
    ]
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
            rows.append(
                try_emulated_step(EmulatedLayer.of(layer, options.emulation), step)
                if options.emulation is not None
                else try_step(layer, step, options.budget)
            )
            progress.advance(task)
    return rows


def _layers(
    file: ProblemFile, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], swaps: Acceleration, options: Options
) -> list[Layer]:
    """Every swapped convolution that runs, with the input of its first call."""
    seen: dict[Conv2d, torch.Tensor] = {}

    def note(module: Conv2d, args: tuple, kwargs: dict) -> None:
        seen.setdefault(module, (args[0] if args else kwargs["input"]).detach())

    hooks = [swap.module.register_forward_pre_hook(note, with_kwargs=True) for swap in swaps]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            if options.emulation is not None:  # no kernel of ours is meant to run in this pass
                warnings.filterwarnings("ignore", "haloconv: PyTorch's own convolution", RuntimeWarning)
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
    alike = [row for row in rows if row.precision != "tf32" or options.model_precision != "ieee"]
    labels = {row.precision for row in alike}
    layer_names = {row.case for row in alike}
    contest = Contest(
        ours,
        theirs,
        inputs,
        precision="tf32" if "tf32" in labels else "ieee",
        family="+".join(dict.fromkeys(row.family for row in alike)),
        label=labels.pop() if len(labels) == 1 else "mixed" if labels else "fp32",
        norm_limit=len(layer_names) * max((row.error_limit for row in alike), default=0.0),
        seed=options.seed,
        surroundings=options.emulation.device if options.emulation is not None else nullcontext,
    )
    try:
        model_rows, notes = try_model(contest, file.name, options.budget)
    except EmulatorError as error:
        choice = Choice(contest.family, "")
        failure = failed_row(f"{file.name} (model)", "step", contest.label, rows[0].layout, choice, error)
        model_rows, notes = [failure], []
    if len(alike) < len(rows):
        notes = [*notes, "The whole model ran in full fp32 precision: PyTorch on a CPU has no TF32 to judge it by."]
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
