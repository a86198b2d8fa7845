"""What came of each problem file, as one line per file, and over all of them as KernelBench scores it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from haloconv.report.rows import Row, WholeDirection
from haloconv.report.table import NAME_WIDTH, UNKNOWN, error_text, ms_text, ratio_style, ratio_text

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

THRESHOLDS = (1, 2)
"""The speed-ups p of fast_p: the part of the files that is correct and more than p times as fast as PyTorch."""

PASSED, FAILED, SKIPPED, UNUSABLE, INTERRUPTED = "passed", "FAILED", "skipped", "unusable", "interrupted"


@dataclass(frozen=True)
class FileOutcome:
    """What came of one problem file: ``rows`` if it ran, otherwise why nothing in it is ours, or what broke it."""

    name: str
    rows: Sequence[Row] = ()
    skipped: str | None = None
    unusable: str | None = None
    interrupted: bool = False

    @property
    def verdict(self) -> str:
        """``passed``, ``FAILED``, ``skipped``, ``unusable`` or ``interrupted``."""
        if self.interrupted:
            return INTERRUPTED
        if self.unusable is not None:
            return UNUSABLE
        if self.skipped is not None:
            return SKIPPED
        return PASSED if self.rows and all(row.passed for row in self.rows) else FAILED

    @property
    def ran(self) -> bool:
        return self.verdict in (PASSED, FAILED)

    @property
    def reason(self) -> str | None:
        return self.skipped or self.unusable

    def model_row(self, direction: WholeDirection) -> Row | None:
        """The row of the whole model, ``forward`` or ``step``."""
        return next((row for row in self.rows if row.direction == direction), None)

    def record(self) -> dict[str, object]:
        """The outcome as JSON holds it; ratios of the whole model are None where nothing was timed."""
        ratios = {d: row.ratio if (row := self.model_row(d)) else None for d in ("forward", "step")}
        rounded = {f"{d}_ratio": None if ratio is None else float(f"{ratio:.6g}") for d, ratio in ratios.items()}
        return {"name": self.name, "verdict": self.verdict, "reason": self.reason, **rounded}


def fast_p(outcomes: Sequence[FileOutcome], direction: WholeDirection, threshold: float) -> tuple[int, int]:
    """How many files are correct and more than ``threshold`` times as fast as PyTorch, and of how many that ran.

    The metric is KernelBench's (https://github.com/ScalingIntelligence/KernelBench).
    """
    ran = [outcome for outcome in outcomes if outcome.ran]
    ratios = [_ratio(outcome, direction) for outcome in ran if outcome.verdict == PASSED]
    return sum(ratio is not None and ratio > threshold for ratio in ratios), len(ran)


def geometric_mean(outcomes: Sequence[FileOutcome], direction: WholeDirection) -> float | None:
    """The geometric mean of the ratios of the files that passed; None if none was timed."""
    ratios = [_ratio(outcome, direction) for outcome in outcomes if outcome.verdict == PASSED]
    known = [ratio for ratio in ratios if ratio]
    return statistics.geometric_mean(known) if known else None


def _ratio(outcome: FileOutcome, direction: WholeDirection) -> float | None:
    row = outcome.model_row(direction)
    return None if row is None or row.ratio is None or math.isnan(row.ratio) else row.ratio


def scores(outcomes: Sequence[FileOutcome]) -> dict[str, dict[str, object]]:
    """fast_p and the geometric mean of ``forward`` and ``step``, for JSON; None where nothing was timed."""
    found: dict[str, dict[str, object]] = {}
    for direction in ("forward", "step"):
        mean = geometric_mean(outcomes, direction)
        counts = {p: fast_p(outcomes, direction, p) for p in THRESHOLDS}
        found[direction] = {
            **{f"fast_{p}": None if mean is None else hits / ran for p, (hits, ran) in counts.items()},
            "geometric_mean": None if mean is None else float(f"{mean:.6g}"),
        }
    return found


def score_lines(outcomes: Sequence[FileOutcome]) -> list[str]:
    """The sentences under the table: how many files are correct, and how many of them are fast."""
    verdicts = [outcome.verdict for outcome in outcomes]
    count = {verdict: verdicts.count(verdict) for verdict in (PASSED, FAILED, SKIPPED, UNUSABLE, INTERRUPTED)}
    ran = count[PASSED] + count[FAILED]
    left = [f"{count[verdict]} {verdict}" for verdict in (SKIPPED, UNUSABLE, INTERRUPTED) if count[verdict]]
    lines = [f"{count[PASSED]} of {ran} files correct{''.join(f', {text}' for text in left)}."]
    for direction in ("forward", "step"):
        mean = geometric_mean(outcomes, direction)
        if mean is not None:
            hits = [f"fast_{p} {fast_p(outcomes, direction, p)[0]}/{ran}" for p in THRESHOLDS]
            lines.append(f"{direction}: {', '.join(hits)}, geometric mean {mean:.2f}x of PyTorch's speed")
    return lines


def summary_table(outcomes: Sequence[FileOutcome]) -> Table:
    """One line per file that was not skipped: the whole model's forward pass and its training step, timed or not."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    timed = any(_ratio(outcome, "forward") for outcome in outcomes)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("file", max_width=NAME_WIDTH, overflow="fold")
    table.add_column("check")
    for direction in ("forward", "step"):
        heads = ("error", "PyTorch ms", "haloconv ms", "ratio") if timed else ("error",)
        for head in heads:
            table.add_column(f"{direction}\n{head}", justify="right", no_wrap=True)
    for outcome in (each for each in outcomes if each.verdict != SKIPPED):
        style = "green" if outcome.verdict == PASSED else "bold red"
        figures = [text for d in ("forward", "step") for text in _figures(outcome.model_row(d), timed)]
        table.add_row(Text(outcome.name), Text(outcome.verdict, style=style), *figures)
    return table


def _figures(row: Row | None, timed: bool) -> list[Text]:
    from rich.text import Text

    if row is None:
        return [Text(UNKNOWN)] * (4 if timed else 1)
    texts = [Text(error_text(row.error))]
    if timed:
        texts += [Text(ms_text(row.aten_ms)), Text(ms_text(row.haloconv_ms))]
        texts.append(Text(ratio_text(row.ratio), style=ratio_style(row.ratio)))
    return texts


def as_json(outcomes: Sequence[FileOutcome]) -> Mapping[str, object]:
    """The keys ``files`` and ``scores`` of a report's JSON."""
    return {"files": [outcome.record() for outcome in outcomes], "scores": scores(outcomes)}
