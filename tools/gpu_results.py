"""What lines of GPU tests come to, kernel by kernel: checks, failures, worst errors, counts, and tests that are left.

tests/gpu_results.py writes three kinds of lines. ``run``: the environment and the hash of every kernel's sources as a
run begins. ``collected``: the tests of each group, a family's mostly (``stamps.groups_of``). ``test``: how one ended,
the kernels that it launched and what it recorded of them. Of several lines of a test the last counts; runs of different
groups, or parts of one, add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.stamps import groups_of


@dataclass
class KernelResults:
    """What the tests found out about one kernel on the sources of a hash.

    ``errors``: result -> precision -> worst relative norm error. ``counts``: results checked, by kind. ``left``: tests
    of the groups that verify it which did not run on these sources; None if their number is not known. ``astray``:
    those of them that failed before any kernel was launched.
    """

    checks: int = 0
    failed: int = 0
    skipped: int = 0
    astray: int = 0
    left: int | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    environment: dict[str, str] = field(default_factory=dict)
    gpus: set[str] = field(default_factory=set)

    def add(self, line: dict, kernel: str) -> None:
        """Take in a test that launched the kernel."""
        self.checks += line["outcome"] == "passed"
        self.failed += line["outcome"] == "failed"
        for name, result, precision, error in line["errors"]:
            if name == kernel:
                of_result = self.errors.setdefault(result, {})
                of_result[precision] = max(error, of_result.get(precision, 0.0))
        self.counts.update({kind: found[kernel] for kind, found in line["counts"].items() if kernel in found})


class GpuResults:
    """The lines of one or several runs, in the order in which they were written.

    ``gpu``: only of runs on this GPU model, so that a run on another one takes no test away.
    """

    def __init__(self, lines: Iterable[dict], gpu: str | None = None) -> None:
        self.runs: dict[str, dict] = {}
        self.collected: dict[str, list[str]] = {}
        self.tests: dict[str, dict] = {}
        for line in lines:
            if line["kind"] == "run":
                if gpu in (None, line["environment"]["gpu"]):
                    self.runs[line["run"]] = line
            elif line["kind"] == "collected":
                self.collected |= line["tests"]
            elif line["run"] in self.runs:
                self.tests.pop(line["test"], None)
                self.tests[line["test"]] = line

    def hash_then(self, line: dict, kernel: str) -> str | None:
        """The hash of the kernel's sources when a test ran."""
        return self.runs[line["run"]]["hashes"].get(kernel)

    def of_kernel(self, kernel: str, digest: str) -> KernelResults:
        """What is known of the kernel on sources of this hash."""
        found, groups = KernelResults(), groups_of(kernel)
        whole = [test for tests in self.collected.values() for test in tests]
        lines = [self.tests[test] for test in whole if test in self.tests]
        lines = [line for line in lines if self.hash_then(line, kernel) == digest]
        for line in lines:
            if kernel in line["kernels"]:
                found.add(line, kernel)
            elif line["family"] in groups and line["outcome"] == "failed" and not line["kernels"]:
                found.astray += 1
            found.skipped += line["family"] in groups and line["outcome"] == "skipped"
            if kernel in line["kernels"] or line["family"] in groups:
                run = self.runs[line["run"]]
                found.environment = run["environment"]
                found.gpus.add(run["environment"]["gpu"])
        if all(group in self.collected for group in groups):
            wanted = {test for group in groups for test in self.collected[group]}
            found.left = sum(not self.is_known(test, kernel, digest) for test in wanted)
        return found

    def is_known(self, test: str, kernel: str, digest: str) -> bool:
        """Whether the last run of a test says something of the kernel's present sources.

        A test that launches other kernels alone says the same of every source of this one: nothing.
        """
        line = self.tests.get(test)
        if line is None:
            return False
        return self.hash_then(line, kernel) == digest or bool(line["kernels"]) and kernel not in line["kernels"]

    def is_done(self, test: str, module: str, gpu: str, hashes: dict[str, str]) -> bool:
        """Whether a test need not run again: it passed on this GPU model, and it and all that it launched is the same.

        ``module``: the hash of its file. A test that launched nothing, and any test if there is a new kernel, runs.
        """
        line = self.tests.get(test)
        if line is None or line["outcome"] != "passed" or line["module"] != module:
            return False
        run = self.runs[line["run"]]
        same_place = run["environment"]["gpu"] == gpu and run["hashes"].keys() >= hashes.keys()
        launched = line["kernels"]
        return same_place and bool(launched) and all(run["hashes"][each] == hashes.get(each) for each in launched)
