"""Commands side by side: no more than asked for, none begun too late, late ones stopped with their children."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tools.jobs import OUT_OF_TIME, Ended, Job, Pool

LATE, QUICK = "late", "quick"


def run(pool: Pool, jobs: dict[str, Job]) -> dict[str, Ended]:
    ended: dict[str, Ended] = {}
    assert pool.run(jobs, pool.folder, ended.setdefault) == []
    return ended


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    jobs = {name: Job([sys.executable, "-c", "import time; time.sleep(1)"], 30.0) for name in (LATE, QUICK)}
    ended: dict[str, Ended] = {}
    pool = Pool(tmp_path, dict(os.environ), 1, time.monotonic() + 0.5)
    assert pool.run(jobs, tmp_path, ended.setdefault) == [QUICK]
    assert ended[LATE].code == 0 and ended.keys() == {LATE}
    assert Pool(tmp_path, {}, 1, time.monotonic()).run(jobs, tmp_path, ended.setdefault) == [LATE, QUICK]


def test_no_more_jobs_than_asked_for_run_side_by_side(tmp_path: Path) -> None:
    note = "import sys, time; print(time.monotonic()); time.sleep(0.3); print(time.monotonic())"
    jobs = {name: Job([sys.executable, "-c", note], 30.0) for name in (LATE, QUICK)}
    ended = run(Pool(tmp_path, dict(os.environ)), jobs)
    assert float(ended[LATE].output.split()[1]) < float(ended[QUICK].output.split()[0])


def test_a_late_job_is_stopped_with_its_children_and_its_output_kept(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    late = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    jobs = {
        LATE: Job([sys.executable, "-c", late], 1.5),
        QUICK: Job([sys.executable, "-c", "print('done'); raise SystemExit(3)"], 30.0),
    }
    start = time.monotonic()
    ended = run(Pool(tmp_path, dict(os.environ), 2), jobs)
    assert time.monotonic() - start < 20
    assert ended[QUICK].code == 3 and ended[QUICK].output == "done\n" and list(ended) == [QUICK, LATE]
    code, printed, seconds = ended[LATE]
    assert code == OUT_OF_TIME and printed.endswith("stopped after 2 s") and 1.5 <= seconds < 10
    assert not is_running(int(printed.split()[0]))


def is_running(pid: int) -> bool:
    """Whether the process is there, and no zombie that nobody has waited for."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True
