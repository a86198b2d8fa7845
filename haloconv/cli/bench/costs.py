"""``haloconv bench --host-cost`` and ``--compile-time``: what calls and kernels cost, printed and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from haloconv.bench.costs.host_cost import NOT_MEASURED, host_costs, own_host_costs
from haloconv.bench.costs.kernels import Cost, compile_times, source_times
from haloconv.bench.results import ResultRow, append_rows
from haloconv.bench.suite import Case
from haloconv.device import device_facts
from haloconv.env import environment_stamp
from haloconv.families import OWN


def bench_host_cost(device: torch.device, folder: Path, console: Console) -> bool:
    """What one call of small layers costs the host; True if none costs more than PyTorch's in the same run."""
    costs = host_costs(device)
    table = _table("host time per call, us", "call", "PyTorch", "haloconv", "verdict", "budget", "under it")
    for cost in costs:
        verdict = "within" if cost.within_budget else "OVER"
        limit = cost.budget_us
        budget = () if limit is None else (f"{limit:g}", "yes" if cost.haloconv_us <= limit else "no")
        table.add_row(cost.what, f"{cost.aten_us:.1f}", f"{cost.haloconv_us:.1f}", verdict, *budget)
    console.print(table)
    _keep_costs("host-cost", costs, folder, console)
    return all(cost.within_budget for cost in costs)


def show_own_host_cost(console: Console) -> None:
    """Our side of the host's time where there is no GPU, and what was not measured."""
    table = _table("host time per call, us", "call", "haloconv")
    for cost in own_host_costs():
        table.add_row(cost.what, f"{cost.haloconv_us:.1f}")
    console.print(table)
    console.print(NOT_MEASURED, highlight=False, markup=False)


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


def bench_compiling(seeds: list[Case], family: str, device: torch.device, folder: Path, console: Console) -> bool:
    """Time the cases' kernels as a user's first call compiles them, or every source of the family named."""
    if family == "auto":
        return bench_compile_time(seeds, folder, console)
    if family not in OWN:
        what = "is one kernel, and whole families are compiled" if "/" in family else "has no kernels to compile"
        raise typer.BadParameter(f"{family} {what}", param_hint="--family")
    return bench_sources(family, device_facts(device.index).arch, folder, console)


def bench_sources(family: str, arch: str, folder: Path, console: Console) -> bool:
    """How long each source of a family compiles; True if the slowest is within the budget."""
    times = source_times(family, arch)
    verdict = "within" if times.within_budget else "OVER"
    console.print(
        f"{times.what}: {times.sources} sources, {times.jobs} at a time: median {times.median_ms:.0f} ms, "
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
