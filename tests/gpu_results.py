"""The part of pytest that leaves build/gpu-tests.jsonl behind: a line a GPU test, with the kernels that it launched.

Lines are written as tests end, so that a run that is cut short, or parts of one, add up; tools/gpu_results.py reads
them. Works with workers of pytest-xdist: the process that they report to writes, but for the list of tests.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from haloconv.env import environment_stamp
from tests.launches import launched
from tests.recorder import Recorder, stamped
from tools.gpu_results import GpuResults
from tools.result_lines import append_line, read_lines
from tools.stamps import ROOT, all_hashes, groups_of, kernel_families, kernels

RECORDER = pytest.StashKey[Recorder]()
LEFT = "left for another run: the seconds are over"
GPU_TESTS = "build/gpu-tests.jsonl"


def add_options(parser: pytest.Parser) -> None:
    """The options of GPU tests."""
    parser.addoption(
        "--family", action="append", default=[], choices=kernel_families(),
        help="run only the GPU tests that this family's stamps need; may be repeated",
    )  # fmt: skip
    parser.addoption(
        "--kernel", action="append", default=[], choices=kernels(), metavar="FAMILY/NAME",
        help="run only the GPU tests that this kernel's stamp needs; may be repeated",
    )  # fmt: skip
    parser.addoption(
        "--gpu-results", type=Path, default=ROOT / GPU_TESTS,
        help="the file to which GPU tests add what tools/make_stamps.py reads",
    )  # fmt: skip
    parser.addoption(
        "--resume", action=argparse.BooleanOptionalAction, default=False,
        help="leave out GPU tests that passed, with these sources of all that they launched, by the file of results",
    )  # fmt: skip
    parser.addoption("--seconds", type=float, default=float("inf"), help="begin no GPU test later than this")


def group_of(item: pytest.Item) -> str:
    """The group of a test: that of its parameter ``subject``, else ``direct``, which all other tests run."""
    subject = item.callspec.params.get("subject") if hasattr(item, "callspec") else None
    return "direct" if subject is None else subject.group


@cache
def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class GpuTests:
    """A plugin for one run of the tests in ``folder``; ``writes`` says whether this machine can run them.

    ``where`` gives the environment of the run.
    """

    def __init__(
        self, config: pytest.Config, folder: Path, writes: bool, where: Callable[[], dict] = environment_stamp
    ) -> None:
        self.config, self.folder, self.writes, self.where = config, folder, writes, where
        self.path: Path = config.getoption("--gpu-results")
        self.worker: str = getattr(config, "workerinput", {}).get("workerid", "")
        self.run = f"{time.time():.0f}-{os.getpid()}"
        self.until = time.monotonic() + config.getoption("--seconds")
        self.begin: dict | None = None
        self.groups = sorted({group for kernel in self._asked() for group in groups_of(kernel)})

    def _asked(self) -> list[str]:
        """The kernels whose tests run."""
        families, named = (self.config.getoption(name) for name in ("--family", "--kernel"))
        every = families if families or named else kernel_families()
        return [*named, *(kernel for kernel in kernels() if kernel.split("/")[0] in every)]

    def pytest_sessionstart(self) -> None:
        if self.writes and not self.worker:
            hashes = dict(all_hashes())
            self.begin = {"kind": "run", "run": self.run, "environment": self.where(), "hashes": hashes}

    # the tests that run

    def is_gpu_test(self, item: pytest.Item) -> bool:
        return self.folder in item.path.parents

    def _is_whole(self) -> bool:
        """Whether the command line names no part of the folder."""
        return all(Path(name).resolve() in (self.folder, *self.folder.parents) for name in self.config.args)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        ours = [item for item in items if self.is_gpu_test(item)]
        for item in ours:
            item.user_properties.append(("gpu family", group_of(item)))
        wanted = [item for item in ours if group_of(item) in self.groups]
        if self.writes and self.worker in ("", "gw0") and self._is_whole():
            tests = {group: [item.nodeid for item in wanted if group_of(item) == group] for group in self.groups}
            append_line(self.path, {"kind": "collected", "tests": tests})
        done = self._done(wanted) if config.getoption("--resume") else set()
        out = {item for item in ours if item.nodeid in done} | set(ours).difference(wanted)
        if out:
            config.hook.pytest_deselected(items=[item for item in items if item in out])
            items[:] = [item for item in items if item not in out]

    def _done(self, items: list[pytest.Item]) -> set[str]:
        hashes, gpu = dict(all_hashes()), self.where()["gpu"]
        results = GpuResults(read_lines([self.path]), gpu)
        return {item.nodeid for item in items if results.is_done(item.nodeid, file_hash(item.path), gpu, hashes)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.is_gpu_test(item) and time.monotonic() > self.until:
            pytest.skip(LEFT)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        if not self.is_gpu_test(item):
            return (yield)
        with launched() as names:
            try:
                return (yield)
            finally:
                recorded = item.stash[RECORDER].as_json() if RECORDER in item.stash else {"errors": [], "counts": {}}
                item.user_properties.append(("gpu test", {"kernels": stamped(names), **recorded}))

    # what is written of them

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known: dict[str, Any] = dict(report.user_properties)
        ended = report.when == "call" or report.outcome != "passed"
        if self.begin is None or "gpu family" not in known or not ended or LEFT in str(report.longrepr):
            return
        if self.begin:
            append_line(self.path, self.begin)
            self.begin = {}
        found = known.get("gpu test", {"kernels": [], "errors": [], "counts": {}})
        line = {
            "kind": "test", "run": self.run, "test": report.nodeid, "family": known["gpu family"],
            "module": file_hash(self.config.rootpath / report.nodeid.partition("::")[0]),
            "outcome": report.outcome, "seconds": round(report.duration, 3), **found,
        }  # fmt: skip
        append_line(self.path, line)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.config.getoption("--resume") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # nothing was left

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.writes or not self.path.exists():
            return
        results = GpuResults(read_lines([self.path]))
        for group in (name for name in self.groups if results.collected.get(name)):
            tests = results.collected[group]
            left = sum(test not in results.tests for test in tests)
            failed = sum(results.tests[test]["outcome"] == "failed" for test in tests if test in results.tests)
            terminalreporter.write_line(f"{group}: {left} of {len(tests)} GPU tests left, {failed} failed")
