"""What lines of the sanitizer come to, kernel by kernel: the calls that each tool made, and what was found in them.

tools/sanitize.py writes four kinds of lines. ``plan``: the hash of every kernel's sources as a run begins, and the
calls with the kernels that each launches and the tools that are to meet it. ``planted``: whether memcheck saw a planted
fault in that run. ``alternating``: whether racecheck took warps that write alternately for a race. ``job``: how one
tool ended over some of the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.stamps import tested_by

TOOLS: dict[str, tuple[str, ...]] = {
    # cuda-bindings asks the driver for every symbol that it knows; our own calls check their status themselves.
    "memcheck": ("--leak-check", "no", "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": ("--num-cuda-barriers", "65536"),  # of all blocks: halo_sm90 has some forty in each
}
"""The tools, with their options."""


@dataclass(frozen=True)
class ToolVerdict:
    """One tool on one kernel: calls made without a finding, those that it was to make, and all calls of the kernel.

    ``findings``: what was found, or why the calls were not made, in a few words each.
    """

    made: int
    asked: int
    calls: int
    findings: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """It made every call that it was to make, and nothing was found."""
        return 0 < self.made == self.asked and not self.findings

    def __str__(self) -> str:
        if self.findings:
            return "; ".join(self.findings)
        if self.made < self.asked:
            return f"{self.asked - self.made} of {self.asked} calls left"
        of_all = "" if self.made == self.calls else f" of {self.calls}"
        return f"0 findings in {self.made}{of_all} calls"


class SanitizerResults:
    """The lines of one or several runs, in the order in which they were written."""

    def __init__(self, lines: Iterable[dict]) -> None:
        self.plans: dict[str, dict] = {}
        self.seen_faults: set[str] = set()
        self.jobs: list[dict] = []
        self.sees_no_race = False  # by the last line: racecheck was kept from calls without a reason
        for line in lines:
            if line["kind"] == "plan":
                self.plans[line["plan"]] = line
            elif line["kind"] == "planted" and line["found"]:
                self.seen_faults.add(line["plan"])
            elif line["kind"] == "alternating":
                self.sees_no_race = not line["taken_for_a_race"]
            elif line["kind"] == "job":
                self.jobs.append(line)

    def of_kernel(self, kernel: str, digest: str) -> dict[str, ToolVerdict]:
        """Each tool's verdict on the kernel's sources of this hash; empty if it did not run on them.

        Of several verdicts on a call the last counts. A run that did not see its planted fault proves nothing.
        """
        plans = {name: plan for name, plan in self.plans.items() if plan["hashes"].get(kernel) == digest}
        newest: dict[str, dict] = {}
        for plan in plans.values():
            newest |= dict.fromkeys(plan["families"], plan)
        calls = {
            call: about["tools"]
            for family, plan in newest.items()
            for call, about in plan["calls"].items()
            if call.split()[0] == family and kernel in about["kernels"]
        }
        if not calls or not newest.keys() >= set(tested_by(kernel.split("/")[0])):
            return {}
        return {tool: self._of_tool(tool, plans, calls) for tool in TOOLS}

    def _of_tool(self, tool: str, plans: dict[str, dict], calls: dict[str, list[str]]) -> ToolVerdict:
        last: dict[str, dict] = {}
        for job in self._that_count(tool):
            if job["plan"] in plans:
                last |= dict.fromkeys(job["calls"], job)
        asked = [call for call, tools in calls.items() if tool in tools]
        bad = [last[call]["verdict"] for call in asked if call in last and not last[call]["clean"]]
        made = sum(call in last and last[call]["clean"] for call in asked)
        return ToolVerdict(made, len(asked), len(calls), tuple(dict.fromkeys(bad)))

    def _that_count(self, tool: str) -> Iterator[dict]:
        """The tool's jobs of runs that saw their planted fault."""
        return (job for job in self.jobs if job["tool"] == tool and job["plan"] in self.seen_faults & self.plans.keys())

    def done(self, tool: str, calls: dict[str, list[str]], hashes: dict[str, str], gpu: str) -> set[str]:
        """The calls in which the tool was clean on this GPU model, with these sources of the kernels that they launch.

        ``calls``: the kernels of each.
        """
        good: set[str] = set()
        for job in self._that_count(tool):
            plan = self.plans[job["plan"]]
            for call in job["calls"]:
                launched = plan["calls"][call]["kernels"]
                same = launched == calls.get(call) and plan["environment"]["gpu"] == gpu
                same = same and all(plan["hashes"][each] == hashes[each] for each in launched)
                (good.add if job["clean"] and same else good.discard)(call)
        return good


def total_calls(verdicts: dict[str, ToolVerdict]) -> int:
    """The calls that all tools made together."""
    return sum(verdict.made for verdict in verdicts.values())


def in_words(verdicts: dict[str, ToolVerdict]) -> str:
    """The tools' verdicts on a kernel in one phrase."""
    return ", ".join(f"{tool}: {verdict}" for tool, verdict in sorted(verdicts.items())) or "not run"


def is_clean(verdicts: dict[str, ToolVerdict]) -> bool:
    """Whether every tool ran and found nothing."""
    return verdicts.keys() == TOOLS.keys() and all(verdict.clean for verdict in verdicts.values())
