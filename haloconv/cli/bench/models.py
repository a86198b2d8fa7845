"""``haloconv bench --models``: whole networks against PyTorch; each row is recorded as soon as it is measured."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from haloconv.bench.networks.network import Effort, NetworkCase, RunControl, Setting
from haloconv.bench.networks.settings import Result, outcomes
from haloconv.bench.results import append_rows, latest_name, refresh_latest
from haloconv.bench.trial import above_the_ceiling
from haloconv.cli.live import make_progress
from haloconv.env import environment_stamp
from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel
from haloconv.report import Report, Row, network_table, networks_of, print_table
from haloconv.report.rows import WHOLE_DIRECTIONS, WholeDirection

SUITE = "models"


@dataclass(frozen=True)
class NetworkOrder:
    """Every network in every precision and layout; after ``limit_s`` seconds no further row is begun.

    ``only`` may have those that are wanted: network, precision and layout, with the cases and directions of rows.
    ``directions`` are those of compiled ones, of which each device has ``jobs`` at once.
    """

    cases: list[NetworkCase]
    precisions: list[PrecisionLabel]
    layouts: list[Layout]
    effort: Effort
    limit_s: float | None = None
    only: Mapping[tuple[str, str, str], Collection[tuple[str, str]]] | None = None
    directions: Sequence[WholeDirection] = WHOLE_DIRECTIONS
    jobs: int = 1

    @property
    def settings(self) -> list[Setting]:
        """Precision by precision and layout by layout, so that a cut leaves every network something."""
        combinations = itertools.product(self.precisions, self.layouts, self.cases)
        settings = [Setting(case, precision, layout) for precision, layout, case in combinations]
        if self.only is None:
            return settings
        return [each for each in settings if _key(each) in self.only]

    @property
    def wanted(self) -> dict[Setting, Collection[tuple[str, str]]] | None:
        """Cases and directions of the rows of each setting; None: all."""
        return None if self.only is None else {each: self.only[_key(each)] for each in self.settings}


def _key(setting: Setting) -> tuple[str, str, str]:
    return setting.case.name, setting.precision, setting.layout


def bench_models(order: NetworkOrder, devices: Sequence[torch.device], folder: Path, console: Console) -> bool:
    """True if every check passed, every bar was met, and nothing was cut or could not be used."""
    if not order.settings:
        console.print("every row is of today's sources: there is nothing to time again")
        return True
    environment = environment_stamp()
    report = Report(f"haloconv bench --models on {environment['gpu']}", environment)
    left: list[str] = []
    with make_progress(console) as progress:
        task = progress.add_task("models", total=len(order.settings))

        def announce(what: str) -> None:
            progress.update(task, description=what)

        deadline = math.inf if order.limit_s is None else time.time() + order.limit_s
        control = RunControl(announce, partial(_keep, environment, folder), deadline=deadline)
        ran = outcomes(order.settings, order.effort, devices, control, order.wanted)
        for setting, outcome in _refreshing(ran, folder):
            progress.advance(task)
            if isinstance(outcome, str):
                left.append(f"{setting}: {outcome}")
                continue
            if outcome.left:
                left.append(f"{setting}: {outcome.left} rows cut, --limit was used up")
            report.rows += outcome.rows
            report.notes += [*outcome.notes, *(note for note in map(above_the_ceiling, outcome.rows) if note)]
    return _tell(report, left, folder, console)


def _refreshing(ran: Iterator[Result], folder: Path) -> Iterator[Result]:
    """The same; the file of the latest rows is made at the end, also where that is an exception."""
    try:
        yield from ran
    finally:
        if any(folder.glob(f"????-??-??-{SUITE}.jsonl")):
            refresh_latest(folder, SUITE)


def _keep(environment: dict[str, str], folder: Path, row: Row) -> None:
    """Write the row to the day's file at once, so that what is cut short later keeps it, passed or failed."""
    append_rows(folder, SUITE, [row.record(environment)])


def _tell(report: Report, left: list[str], folder: Path, console: Console) -> bool:
    for note in report.notes:
        console.print(note, highlight=False, markup=False)
    networks = networks_of(report.rows)
    print_table(network_table(networks), console)
    missed = [sentence for network in networks for sentence in network.missed()]
    for style, word, sentences in (
        ("bold red", "FAILED", report.complaints()),
        ("red", "MISSED", missed),
        ("yellow", "LEFT", left),
    ):
        for sentence in sentences:
            console.print(f"{word} {sentence}", style=style, highlight=False, markup=False)
    layers = [row for network in networks for row in network.layers]
    console.print(
        f"{len(networks)} networks, {len(layers)} rows of layers; {len(report.complaints())} checks failed, "
        f"{len(missed)} bars missed, {len(left)} settings left out; rows are in {folder / latest_name(SUITE)}",
        highlight=False,
        markup=False,
    )
    return report.passed and not missed and not left
