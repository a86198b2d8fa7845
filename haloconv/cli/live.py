"""What a run shows in the terminal: each row as it comes, and at the end what came of all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from haloconv.bench.emulation.emulated import Emulation
from haloconv.bench.emulation.traffic import conflict_table, traffic_table
from haloconv.bench.layer import Layer
from haloconv.bench.problem_run import Listener
from haloconv.cli.output import tell_error
from haloconv.report import (
    FileOutcome,
    Report,
    Row,
    StreamedTable,
    as_table,
    print_table,
    score_lines,
    summary_table,
)

LINE_WIDTH = 132
INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def make_console() -> Console:
    """The terminal, or lines of a fixed width where the output is none; whatever becomes of ``sys.stdout`` later."""
    console = Console(file=sys.stdout, soft_wrap=False)
    return console if console.is_terminal else Console(file=sys.stdout, width=LINE_WIDTH)


def make_progress(console: Console) -> Progress:
    """A progress bar that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)


class LiveView(Listener):
    """Prints notes and rows as they come, above a progress bar; ``save`` is called whenever a file is done."""

    def __init__(self, console: Console, progress: Progress, save: Callable[[], None]) -> None:
        self._console, self._progress, self._save = console, progress, save
        self._task: TaskID | None = None
        self._table: StreamedTable | None = None

    def begins(self, name: str) -> None:
        self._task = self._progress.add_task(f"{name}: building", total=None)
        self._table = None

    def layers(self, name: str, layers: Sequence[Layer]) -> None:
        timed = any(layer.x.device.type == "cuda" for layer in layers)
        usual = all(layer.count == 1 for layer in layers), all(layer.layout == "nchw" for layer in layers)
        names = [f"{name} (model)", *(layer.name for layer in layers)]
        self._table = StreamedTable(self._console, names, timed=timed, counts=not usual[0], layouts=not usual[1])
        self._update(total=sum(len(layer.steps) for layer in layers) + 2)

    def doing(self, what: str) -> None:
        self._update(description=what)

    def note(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False)

    def row(self, row: Row) -> None:
        self._table = self._table or StreamedTable(self._console, [row.case])
        self._table.print_row(row)
        self._update(advance=1)

    def ended(self, outcome: FileOutcome) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        if outcome.skipped is not None:
            line, style = f"skipped {outcome.name}: {outcome.skipped}", "dim"
            self._console.print(line, style=style, highlight=False, markup=False)
        elif outcome.unusable is not None:
            tell_error(outcome.unusable)
        self._save()

    def _update(self, **changes: Any) -> None:
        if self._task is not None:
            self._progress.update(self._task, **changes)


def followed(
    work: Callable[[Listener], None], report: Report, console: Console, save: Callable[[], None] = lambda: None
) -> bool:
    """Do the work, which adds to the report and tells the listener, and show it; False if Ctrl-C ended it."""
    report.complete = False
    for note in report.notes:
        console.print(note, highlight=False, markup=False)
    try:
        with make_progress(console) as progress:
            work(LiveView(console, progress, save))
    except KeyboardInterrupt:
        return False
    report.complete = True
    return True


def add_emulation(emulation: Emulation, report: Report, console: Console, stats: bool) -> None:
    """What the emulator counted into the report: launches, and tables of bytes and bank conflicts if it counted them.

    ``stats`` also prints the tables and keeps each launch as a record.
    """
    names = dict.fromkeys(name for row in report.rows for name in row.family.split("+") if name not in ("", "aten"))
    told = [f"Kernels that ran: {' and '.join(names) or 'none'}, in {emulation.launches} launches."]
    if emulation.launched:
        found = traffic_table(emulation.launched), conflict_table(emulation.launched)
        report.tables += [table for table in found if table is not None]
        if found[1] is None:
            told.append("No access to shared memory has bank conflicts.")
    for note in told:
        console.print(note, highlight=False, markup=False)
    report.notes += told
    if stats:
        report.launches += [launched.record() for launched in emulation.launched]
        for table in report.tables:
            print_table(table, console)


def show(report: Report, console: Console) -> None:
    """Print a report that was not followed while it was made."""
    for note in report.notes:
        console.print(note, highlight=False, markup=False)
    print_table(as_table(report.rows), console)
    conclude(report, console)


def conclude(report: Report, console: Console) -> None:
    """Print why each family was taken, every complaint, and the verdict."""
    for reason in report.reasons():
        console.print(reason, style="dim", highlight=False, markup=False)
    for complaint in report.complaints():
        console.print(f"FAILED {complaint}", style="bold red", highlight=False, markup=False)
    if not report.rows:
        console.print("Nothing was checked.", style="bold red", highlight=False)
        return
    console.print(report.verdict, style="green" if report.passed else "bold red", highlight=False)
    if len(report.files) > 1:
        print_table(summary_table(report.files), console)
        for line in score_lines(report.files):
            console.print(line, highlight=False)
