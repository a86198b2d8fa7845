"""``haloconv bench``: time the suite, the host side of a call, or compiling, against PyTorch; keep the rows."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from haloconv.bench.costs import Cost, compile_times, host_costs, text_times
from haloconv.bench.layer import LAYOUTS, Layer
from haloconv.bench.network import Effort, NetworkCase, load_networks
from haloconv.bench.results import MAIN_SUITE, ResultRow, append_rows, gpu_folder, latest_name, refresh_latest
from haloconv.bench.sample import LEAST_RATIO, Drawn, compile_ahead, slower
from haloconv.bench.sample import sample as draw
from haloconv.bench.suite import PRECISIONS, Case, SuiteError, load_suite, select
from haloconv.bench.trial import Budget, try_step, try_training_step
from haloconv.cli.bench_models import NetworkOrder, bench_models
from haloconv.cli.run import Family, make_console, make_progress, show
from haloconv.env import device_facts, environment_stamp
from haloconv.families.sources import SHIPPED
from haloconv.problem import DIRECTIONS
from haloconv.report import Report, Row

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SEED_CASES = ("A", "B", "C")


def bench(
    suite: Annotated[
        Path | None, typer.Option(help="The cases; by default benchmarks/suite.toml, or models.toml for --models.")
    ] = None,
    case: Annotated[str, typer.Option(help="Names of cases, separated by commas; all by default.")] = "",
    tag: Annotated[str, typer.Option(help="Only cases with one of these tags.")] = "",
    direction: Annotated[str, typer.Option(help="Of fprop,dgrad,wgrad,step.")] = ",".join(DIRECTIONS),
    precision: Annotated[
        str | None, typer.Option(help="Of fp32,tf32,fp16,bf16; by default fp32, and tf32,bf16 for networks.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Of nchw,nhwc; by default nchw, and both for networks.")] = None,
    family: Annotated[Family, typer.Option(help="The family of kernels; auto lets haloconv choose.")] = Family.auto,
    budget: Annotated[float, typer.Option(help="Seconds of timing per row.")] = 0.5,
    other_layout: Annotated[bool, typer.Option(help="Also time PyTorch in the other memory order.")] = True,
    results: Annotated[Path | None, typer.Option(help="Where rows go; beside the suite by default.")] = None,
    sample: Annotated[int, typer.Option(help="Instead of the suite, so many random layers of few channels.")] = 0,
    seed: Annotated[int, typer.Option(help="Which random layers.")] = 0,
    models: Annotated[bool, typer.Option("--models", help="Time whole networks instead (--case names them).")] = False,
    tune: Annotated[bool, typer.Option(help="Networks: tune each first.")] = True,
    layers: Annotated[bool, typer.Option(help="Networks: time each distinct layer, too.")] = True,
    gpus: Annotated[str, typer.Option(help="Networks: share them among these GPUs, as 0,1; one by default.")] = "",
    limit: Annotated[float | None, typer.Option(help="Networks: seconds after which none is begun.")] = None,
    host_cost: Annotated[bool, typer.Option("--host-cost", help="Time the host side of one call instead.")] = False,
    compile_time: Annotated[bool, typer.Option("--compile-time", help="Time compiling A, B, C or --family.")] = False,
) -> None:
    """Time the suite's layers against PyTorch at equal precision, checking every output before and after.

    With --models whole networks (resnet50, convnext_tiny, ...): inference, a training step, every layer, memory.

    Exit code 0: every check passed, every budget and bar was met. 1: not. 2: no GPU, or an option cannot be used.
    """
    console = make_console()
    if not torch.cuda.is_available():
        console.print("[bold red]error:[/] bench needs an NVIDIA GPU; `haloconv doctor` says why there is none")
        raise typer.Exit(2)
    suite = suite or BENCHMARKS / ("models.toml" if models else f"{MAIN_SUITE}.toml")
    timing = Budget(budget, other_layout=other_layout)
    try:
        if models:
            effort = Effort(Budget(budget), tune=tune, layers=layers)  # the bars are PyTorch in the same layout
            order, devices = _networks(load_networks(suite), case, precision, layout, effort, limit), _gpus(gpus)
        else:
            order = _order(suite, case, tag, direction, precision, layout, family, timing)
        seeds = select(load_suite(suite), SEED_CASES) if compile_time else []
    except (SuiteError, typer.BadParameter) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    device = torch.device("cuda", torch.cuda.current_device())
    folder = gpu_folder(results or suite.resolve().parent / "results", torch.cuda.get_device_name(device))
    if models:
        passed = bench_models(order, devices or [device], folder, console)
    elif host_cost:
        passed = bench_host_cost(device, folder, console)
    elif sample:
        passed = bench_sample(draw(sample, seed), timing, device, folder, console)
    elif compile_time:
        passed = bench_compiling(seeds, family, device, folder, console)
    else:
        passed = bench_suite(order, device, folder, console)
    raise typer.Exit(0 if passed else 1)


@dataclass(frozen=True)
class Order:
    """What to time: every combination of the lists. ``suite`` is the name of the suite's file, and of the rows'."""

    cases: list[Case]
    directions: list[str]
    precisions: list[str]
    layouts: list[str]
    family: str
    budget: Budget
    suite: str = MAIN_SUITE

    @property
    def latest(self) -> str:
        """The file that keeps the newest row of each combination."""
        return latest_name(self.suite)


def _order(
    suite: Path,
    case: str,
    tag: str,
    direction: str,
    precision: str | None,
    layout: str | None,
    family: Family,
    budget: Budget,
) -> Order:
    return Order(
        cases=select(load_suite(suite), listed(case), listed(tag)),
        directions=choices("--direction", direction, (*DIRECTIONS, "step")),
        precisions=choices("--precision", "fp32" if precision is None else precision, PRECISIONS),
        layouts=choices("--layout", "nchw" if layout is None else layout, LAYOUTS),
        family=family.value,
        budget=budget,
        suite=suite.stem,
    )


def _networks(
    cases: list[NetworkCase],
    case: str,
    precision: str | None,
    layout: str | None,
    effort: Effort,
    limit: float | None,
) -> NetworkOrder:
    names = listed(case)
    unknown = [name for name in names if name not in {each.name for each in cases}]
    if unknown:
        raise SuiteError(f"there is no network {', '.join(unknown)}; there are {', '.join(e.name for e in cases)}")
    return NetworkOrder(
        cases=[each for each in cases if not names or each.name in names],
        precisions=choices("--precision", "tf32,bf16" if precision is None else precision, PRECISIONS),
        layouts=choices("--layout", "nchw,nhwc" if layout is None else layout, LAYOUTS),
        effort=effort,
        limit_s=limit,
    )


def _gpus(text: str) -> list[torch.device]:
    """The devices that ``--gpus`` names, each once. Raises typer.BadParameter."""
    here = [str(index) for index in range(torch.cuda.device_count())]
    return [torch.device("cuda", int(index)) for index in dict.fromkeys(choices("--gpus", text, here) if text else [])]


def listed(text: str) -> list[str]:
    """The words of an option that takes several, separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def choices(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """The words, all of them allowed. Raises typer.BadParameter."""
    chosen = listed(text)
    unknown = [name for name in chosen if name not in allowed]
    if unknown or not chosen:
        raise typer.BadParameter(f"{option} takes some of {','.join(allowed)}, not {text!r}")
    return chosen


def bench_suite(order: Order, device: torch.device, folder: Path, console: Console) -> bool:
    """Time every combination, record each row as soon as it stands, print the table; True if all passed.

    What a family asked for by name does not take is said in a note, neither timed nor recorded.
    """
    environment = environment_stamp()
    report = Report(f"haloconv bench on {environment['gpu']}", environment)
    combinations = list(itertools.product(order.cases, order.precisions, order.layouts))
    path: Path | None = None
    with make_progress(console) as progress:
        task = progress.add_task("bench", total=len(combinations) * len(order.directions))
        for case, precision, layout in combinations:
            layer = case.layer(precision, layout, order.family, device)
            for direction in order.directions:
                what = f"{case.name} {direction} {precision} {layout}"
                progress.update(task, description=what)
                refusal = _refusal(layer, direction)
                if refusal is None:
                    report.rows.append(_try(layer, direction, order.budget))
                    path = _keep(report.rows[-1], environment, folder, order)
                else:
                    report.notes.append(f"{what}: {order.family} does not take it: {refusal}")
                progress.advance(task)
            del layer
            if device.type == "cuda":
                torch.cuda.empty_cache()
    show(report, console)
    if path is not None:
        console.print(f"wrote {path} and {folder / order.latest}", highlight=False, markup=False)
    return report.passed


def _refusal(layer: Layer, direction: str) -> str | None:
    """Why the family asked for by name does not take a single direction, or None."""
    if layer.spec.family in ("auto", "aten") or direction == "step":
        return None
    choice = layer.choice(direction)
    return choice.reason if choice.refused else None


def _try(layer: Layer, direction: str, budget: Budget) -> Row:
    return try_training_step(layer, budget) if direction == "step" else try_step(layer, direction, budget)


def bench_sample(drawn: list[Drawn], budget: Budget, device: torch.device, folder: Path, console: Console) -> bool:
    """Time random problems with the choice of auto; True if all passed and none is far slower than PyTorch."""
    environment = environment_stamp()
    report = Report(f"haloconv bench --sample on {environment['gpu']}", environment)
    budget = replace(budget, other_layout=False)
    with make_progress(console) as progress:
        task = progress.add_task("compiling", total=len(drawn))
        if device.type == "cuda":
            compile_ahead(drawn, device)
        for each in drawn:
            progress.update(task, description=each.case.name)
            layer = each.case.layer(each.precision, each.layout, "auto", device)
            report.rows.append(try_step(layer, each.direction, budget))
            progress.advance(task)
    path = append_rows(folder, "sample", [row.record(environment) for row in report.rows])
    show(report, console)
    slow = slower(report.rows)
    own = sum(row.family != "aten" for row in report.rows)
    console.print(
        f"{len(slow)} of {len(report.rows)} problems below {LEAST_RATIO} times PyTorch's speed; {own} ran on our "
        f"kernels; wrote {path}",
        highlight=False,
    )
    for row in slow:
        console.print(f"SLOWER {row.case} {row.direction} {row.precision} {row.layout}: {row.ratio:.2f}", style="red")
    return report.passed and not slow


def _keep(row: Row, environment: dict[str, str], folder: Path, order: Order) -> Path:
    """Write one row to the day's file; passed or failed, it is the latest."""
    path = append_rows(folder, order.suite, [row.record(environment)])
    refresh_latest(folder, order.suite)
    return path


def bench_host_cost(device: torch.device, folder: Path, console: Console) -> bool:
    """What one call costs the host, without and with gradients; True if neither costs more than PyTorch's."""
    costs = host_costs(device)
    table = _table("host cost per call, us", "call", "PyTorch", "haloconv", "verdict", "budget", "under it")
    for cost in costs:
        verdict = "within" if cost.within_budget else "OVER"
        under = "yes" if cost.haloconv_us <= cost.budget_us else "no"
        times = f"{cost.aten_us:.1f}", f"{cost.haloconv_us:.1f}"
        table.add_row(cost.what, *times, verdict, f"{cost.budget_us:g}", under)
    console.print(table)
    _keep_costs("host-cost", costs, folder, console)
    return all(cost.within_budget for cost in costs)


def bench_compile_time(cases: list[Case], folder: Path, console: Console) -> bool:
    """How long kernels take to compile, and to load from the cache on disk; True if all are within their budgets."""
    times = compile_times(cases)
    table = _table("compile times, ms", "kernel", "compiled", "budget", "from disk", "budget", "verdict")
    for time in times:
        verdict = "no budget" if not time.budgeted else "within" if time.within_budget else "OVER"
        budgets = (f"{time.compile_budget_ms:g}", f"{time.disk_budget_ms:g}") if time.budgeted else ("–", "–")
        table.add_row(time.what, f"{time.compile_ms:.0f}", budgets[0], f"{time.disk_ms:.1f}", budgets[1], verdict)
    console.print(table)
    _keep_costs("compile-time", times, folder, console)
    return all(time.within_budget for time in times)


def bench_compiling(seeds: list[Case], family: Family, device: torch.device, folder: Path, console: Console) -> bool:
    """Time the cases' kernels as a user's first call compiles them, or every text of the family named."""
    if family is Family.auto:
        return bench_compile_time(seeds, folder, console)
    if family.value not in SHIPPED:
        raise typer.BadParameter(f"{family.value} has no kernels to compile", param_hint="--family")
    return bench_texts(family.value, device_facts(device.index).arch, folder, console)


def bench_texts(family: str, arch: str, folder: Path, console: Console) -> bool:
    """How long each text of a family compiles; True if the slowest is within the budget."""
    times = text_times(family, arch)
    verdict = "within" if times.within_budget else "OVER"
    console.print(
        f"{times.what}: {times.texts} texts, {times.jobs} at a time: median {times.median_ms:.0f} ms, "
        f"slowest {times.worst_ms:.0f} ms of {times.budget_ms:g} ({verdict}): {times.worst}"
    )
    _keep_costs("compile-time", [times], folder, console)
    return times.within_budget


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column(first)
    for head in others:
        table.add_column(head, justify="right")
    return table


def _keep_costs(what: str, costs: Sequence[Cost], folder: Path, console: Console) -> None:
    environment = environment_stamp()
    rows: list[ResultRow] = [{**cost.record(), **environment} for cost in costs]
    console.print(f"wrote {append_rows(folder, what, rows)}", highlight=False, markup=False)
