"""What a terminal shows of a run while it goes on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import Progress, TaskID

from haloconv.bench.layer import Layer
from haloconv.bench.problem_run import Listener
from haloconv.report import FileOutcome, Row


class LiveView(Listener):
    """Moves a progress bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begins(self, name: str) -> None:
        self._task = self._progress.add_task(f"{name}: building", total=None)

    def layers(self, layers: Sequence[Layer]) -> None:
        self._update(total=sum(len(layer.steps) for layer in layers) + 2)

    def doing(self, what: str) -> None:
        self._update(description=what)

    def row(self, row: Row) -> None:
        self._update(advance=1)

    def ended(self, outcome: FileOutcome) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def _update(self, **changes: object) -> None:
        if self._task is not None:
            self._progress.update(self._task, **changes)  # type: ignore[arg-type]
