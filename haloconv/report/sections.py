"""What a page is made of: tables with bars, and sections of networks and of layers that belong to none."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from haloconv.report.networks import Network, network_name
from haloconv.report.rows import Row, WholeDirection
from haloconv.report.table import (
    ATEN_MS,
    CASE,
    CHECK,
    COLUMNS,
    COUNT,
    DIRECTION,
    FAMILY,
    LAYOUT,
    MEMORY,
    PRECISION,
    RATIO,
    UNKNOWN,
    cells,
    ms_text,
    ratio_style,
    ratio_text,
    reason_of,
    telling_columns,
)

MOST_LOSSES = 20
"""Rows in the table of what is slower than PyTorch; all are in the tables of their sections."""

FULL_FP32_MARK = " †"
"""Behind PyTorch's time where TF32 was allowed and PyTorch computed full fp32, which its error tells."""

NO_REASONS: Mapping[str, int] = {}
_LOOKS = {"green": "good", "red": "bad", "": ""}
_FIRST = tuple(
    [head for head, _ in COLUMNS].index(name)
    for name in ("layer", "direction", "ratio", "haloconv ms", "PyTorch ms", "better layout ms", "of the roofline")
)
_ORDER = ("forward", "step", "fprop", "dgrad", "wgrad", "bgrad")


class Scale(NamedTuple):
    """The logarithmic scale of a page's bars: speeds between two powers of two, which 1 is between."""

    low: float
    high: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Scale:
        """The scale that all ratios fit on; at least from 0.5 to 2."""
        logs = [math.log2(ratio) for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
        return cls(2.0 ** math.floor(min([-1.0, *logs])), 2.0 ** math.ceil(max([1.0, *logs])))

    @property
    def ends(self) -> tuple[str, str]:
        """The ends as texts, the lower one as a fraction; empty where 1 stands too near for both to be read."""
        one = self.at(1.0)
        return (f"1/{1 / self.low:g}x" if one >= 35 else "", f"{self.high:g}x" if one <= 65 else "")

    def at(self, ratio: float) -> float:
        """The place of a ratio in per cent of the scale's length."""
        return round(100 * math.log2(ratio / self.low) / math.log2(self.high / self.low), 1)

    def bar(self, ratio: float | None) -> float | None:
        """Where the bar of a ratio ends, which begins at the place of 1; None without a ratio and within 2 %."""
        return self.at(ratio) if ratio and look_of(ratio) and math.isfinite(ratio) else None


class Cell(NamedTuple):
    """A cell's text, whether it is ``good`` or ``bad`` (or empty), and the end of its bar in per cent."""

    text: str
    look: str = ""
    bar: float | None = None


class Head(NamedTuple):
    """The head of a column, the side that its cells are aligned to, and the scale if its cells have bars."""

    text: str
    side: str = "right"
    scale: Scale | None = None


class Line(NamedTuple):
    """A line of a table: its name stands before ``span`` lines, 0 where it stands above already."""

    name: str
    span: int
    cells: list[Cell]
    passed: bool = True


class Table(NamedTuple):
    """A table: what it shows, its heads (of the names first), its lines."""

    label: str
    heads: list[Head]
    lines: list[Line]
    scale: Scale

    @property
    def looks(self) -> str:
        """Classes of columns, so that cells need none: ``l1`` is to the left, ``b2`` has bars; names are column 0."""
        left = [f"l{i}" for i, head in enumerate(self.heads) if i and head.side == "left"]
        return " ".join([*left, *(f"b{i}" for i, head in enumerate(self.heads) if head.scale)])


class Tally(NamedTuple):
    """How many ratios are more than 2 % above 1, within 2 % of it and more than 2 % below, and how far they reach."""

    faster: int
    within: int
    slower: int
    low: float
    median: float
    high: float

    @property
    def total(self) -> int:
        return self.faster + self.within + self.slower

    @property
    def span(self) -> list[Cell]:
        """The least and the largest ratio as cells, one if both read the same."""
        ends = [Cell(ratio_text(ratio), look_of(ratio)) for ratio in (self.low, self.high)]
        return ends[:1] if ends[0].text == ends[1].text else ends


def look_of(ratio: float | None) -> str:
    """``good`` or ``bad``, empty within 2 %."""
    return _LOOKS[ratio_style(ratio)]


def tally_of(ratios: Iterable[float | None]) -> Tally | None:
    """The tally of the ratios that are known; None if none is."""
    known = [ratio for ratio in ratios if ratio]
    if not known:
        return None
    looks = [look_of(ratio) for ratio in known]
    counts = (looks.count("good"), looks.count(""), looks.count("bad"))
    return Tally(*counts, min(known), statistics.median(known), max(known))


class Setting(NamedTuple):
    """The rows of a section in one precision and layout."""

    heading: str
    tally: Tally | None
    table: Table


class Section(NamedTuple):
    """A network, or all layers of no network: its rows, its settings with their tables, why its families were taken.

    The reasons are numbered from 1; the tables name the number behind the family of each row.
    """

    name: str
    anchor: str
    rows: list[Row]
    settings: list[Setting]
    reasons: list[str]

    @property
    def tally(self) -> Tally | None:
        """The tally of its layers, without whole forward passes and steps."""
        return tally_of(row.ratio for row in self.rows if row.direction not in ("forward", "step"))


class Sections:
    """Makes the sections of a page: one scale for all bars, and the same columns in all tables."""

    def __init__(self, rows: Sequence[Row], networks: Sequence[Network], gpu: str = "none") -> None:
        self.rows, self.gpu = rows, gpu
        self.networks = [network for network in networks if network.whole]
        self.names = list(dict.fromkeys(network.name for network in self.networks))
        self.scale = Scale.of(row.ratio for row in rows if row.ratio)
        told = {CASE, COUNT, PRECISION, LAYOUT, *((MEMORY,) if self.names else ())}
        telling = [i for i in telling_columns(rows) if i not in told]
        self.columns = sorted(telling, key=lambda i: _FIRST.index(i) if i in _FIRST else len(_FIRST) + i)
        self._anchors: dict[str, int] = {}

    def made(self) -> list[Section]:
        """A section for each network, and one named ``Layers`` for the rest."""
        places: dict[str, list[Row]] = {name: [] for name in self.names}
        for row in self.rows:
            name = network_name(row.case)
            places.setdefault(name if name in self.names else "", []).append(row)
        return [self._section(name, rows) for name, rows in places.items()]

    def _section(self, name: str, rows: list[Row]) -> Section:
        settings: dict[tuple[str, str], list[Row]] = {}
        told = dict.fromkeys(reason_of(row) for row in rows if row.reason)
        reasons = {reason: i for i, reason in enumerate(told, 1)}
        for row in rows:
            settings.setdefault((row.precision, row.layout), []).append(row)
        made = []
        for (precision, layout), found in settings.items():
            heading = f"{precision}, {layout}"
            tally = tally_of(row.ratio for row in found if row.direction not in ("forward", "step"))
            made.append(Setting(heading, tally, self._layers(name, f"{name or 'Layers'}, {heading}", found, reasons)))
        sentences = [reason.replace(f", {self.gpu}", "") for reason in reasons]  # which is that of the page
        return Section(name or "Layers", self._anchor(name or "layers"), rows, made, sentences)

    def _anchor(self, name: str) -> str:
        word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "section"
        self._anchors[word] = self._anchors.get(word, 0) + 1
        return f"of-{word}" + (f"-{self._anchors[word]}" if self._anchors[word] > 1 else "")

    def _layers(self, name: str, label: str, rows: list[Row], reasons: Mapping[str, int]) -> Table:
        """The table of layers, whole networks first, with every column that tells something."""
        cases = sorted(dict.fromkeys(row.case for row in rows), key=lambda case: not case.endswith(" (model)"))
        lines = []
        for case in cases:
            found = sorted((row for row in rows if row.case == case), key=lambda row: _ORDER.index(row.direction))
            for i, row in enumerate(found):
                line = self._cells(row, self.columns, reasons)
                lines.append(Line(_named(row, name), 0 if i else len(found), line, row.passed))
        return Table(label, self._heads(self.columns), lines, self.scale)

    def _heads(self, columns: Sequence[int]) -> list[Head]:
        heads = [Head(*COLUMNS[CASE])]
        for i in columns:
            heads.append(Head(*COLUMNS[i], scale=self.scale if i == RATIO else None))
        return heads

    def _cells(self, row: Row, columns: Sequence[int], reasons: Mapping[str, int] = NO_REASONS) -> list[Cell]:
        texts, found = cells(row), []
        texts[FAMILY] = row.family.replace("+", " + ")
        if reason_of(row) in reasons:
            texts[FAMILY] += f"\N{NO-BREAK SPACE}#{reasons[reason_of(row)]}"
        if row.aten_precision != row.precision:
            texts[ATEN_MS] += FULL_FP32_MARK
        for i in columns:
            look = look_of(row.ratio) if i == RATIO else "bad" if i == CHECK and not row.passed else ""
            found.append(Cell(texts[i], look, self.scale.bar(row.ratio) if i == RATIO else None))
        return found

    def losses(self) -> Table | None:
        """The layers and networks that are more than 2 % slower than PyTorch in the same layout, slowest first."""
        lost = sorted((row for row in self.rows if look_of(row.ratio) == "bad"), key=lambda row: row.known_ratio)
        if not lost:
            return None
        times = [i for i in self.columns if COLUMNS[i][0].endswith(" ms")]
        columns = [DIRECTION, RATIO, PRECISION, LAYOUT, *times, FAMILY]
        lines = [Line(row.case, 1, self._cells(row, columns), row.passed) for row in lost[:MOST_LOSSES]]
        return _telling(Table("Slower than PyTorch", self._heads(columns), lines, self.scale))

    def whole(self, direction: WholeDirection) -> Table | None:
        """Inference (``forward``) or training (``step``) of every network in every setting; None if not timed."""
        rows = [row for each in self.networks for row in each.whole if row.direction == direction]
        timed = [row for row in rows if row.ratio is not None]
        scale, lines = Scale.of(row.known_ratio for row in timed), []
        for name in self.names:
            found = [row for row in timed if network_name(row.case) == name]
            lines += [Line(name, 0 if i else len(found), _whole(row, scale)) for i, row in enumerate(found)]
        heads = [Head(text, "left") for text in ("network", "precision", "layout")]
        heads += [Head("ratio", scale=scale), Head("against faster layout"), Head("PyTorch ms")]
        heads += [Head("better layout ms"), Head("haloconv ms"), Head("peak memory")]
        label = {"forward": "Inference", "step": "Training step"}[direction]
        return _telling(Table(label, heads, lines, scale)) if lines else None


def _telling(table: Table) -> Table:
    """The table without columns in which nothing is known."""
    known = [i for i in range(len(table.heads) - 1) if any(line.cells[i].text != UNKNOWN for line in table.lines)]
    lines = [line._replace(cells=[line.cells[i] for i in known]) for line in table.lines]
    return table._replace(heads=[table.heads[0], *(table.heads[i + 1] for i in known)], lines=lines)


def _named(row: Row, network: str) -> str:
    """The layer's name within its network, and how many layers are like it."""
    name = row.case.removeprefix(f"{network}.") if network else row.case
    return name if row.count == 1 else f"{name} ({row.count} alike)"


def _whole(row: Row, scale: Scale) -> list[Cell]:
    return [
        Cell(row.precision), Cell(row.layout), Cell(ratio_text(row.ratio), look_of(row.ratio), scale.bar(row.ratio)),
        Cell(ratio_text(row.ratio_best), look_of(row.ratio_best)),
        Cell(ms_text(row.aten_ms)), Cell(ms_text(row.aten_best_ms)), Cell(ms_text(row.haloconv_ms)),
        Cell(ratio_text(row.memory_ratio)),
    ]  # fmt: skip
