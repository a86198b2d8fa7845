"""Commands that run side by side, each with its own time; one that takes too long is stopped with its children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

OUT_OF_TIME = 124


class Job(NamedTuple):
    """A command, and the seconds that it may take."""

    command: list[str]
    limit_s: float


class Ended(NamedTuple):
    """How a command ended: its exit code (OUT_OF_TIME if it was stopped), what it printed, and the seconds it took."""

    code: int
    output: str
    seconds: float


class Pool:
    """Runs jobs in ``folder``, ``most`` of them side by side; none begins after ``until`` (time.monotonic())."""

    def __init__(self, folder: Path, environment: dict[str, str], most: int = 1, until: float = float("inf")) -> None:
        self.folder, self.environment, self.most, self.until = folder, environment, most, until

    def run(self, jobs: dict[str, Job], logs: Path, then: Callable[[str, Ended], None]) -> list[str]:
        """Run the jobs; ``then`` gets each as it ends, with its output, which ``logs`` keeps. Gives those that did not
        begin. What a stopped job printed is kept.
        """
        waiting, running = dict(jobs), dict[str, tuple[subprocess.Popen, float]]()
        try:
            while running or (waiting and time.monotonic() < self.until):
                free = self.most - len(running) if time.monotonic() < self.until else 0
                for name in list(waiting)[:free]:
                    running[name] = self._start(waiting.pop(name), logs / f"{name}.log")
                for name, (process, start) in list(running.items()):
                    seconds = time.monotonic() - start
                    late = process.poll() is None
                    if late and seconds < jobs[name].limit_s:
                        continue
                    code = OUT_OF_TIME if late else process.returncode
                    _stop(running.pop(name)[0])
                    output = (logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                    then(name, Ended(code, output + (f"\nstopped after {seconds:.0f} s" if late else ""), seconds))
                time.sleep(0.05)
        finally:
            for process, _ in running.values():
                _stop(process)
        return list(waiting)

    def _start(self, job: Job, log: Path) -> tuple[subprocess.Popen, float]:
        with log.open("wb") as out:
            process = subprocess.Popen(
                job.command, env=self.environment, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        return process, time.monotonic()


def _stop(process: subprocess.Popen) -> None:
    """End the process and what it started: the sanitizer runs its program as a child of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
