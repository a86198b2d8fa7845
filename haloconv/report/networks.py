"""Whole networks as rows: what each network came to in each precision and layout, held against the bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from haloconv.layout import Layout
from haloconv.report.rows import Row, RowPrecision
from haloconv.report.table import UNKNOWN, ms_text, ratio_style, ratio_text

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

LAYER_BAR, NETWORK_BAR, MEMORY_BAR = 0.97, 1.0, 1.05
"""The least speed of a layer and of a network, PyTorch's being 1, and the most memory. Two decimals count."""

WHOLE = " (model)"


@dataclass
class Network:
    """One network in one precision and layout: rows of its distinct layers, ``forward`` and ``step``, None if cut."""

    name: str
    precision: RowPrecision
    layout: Layout
    layers: list[Row] = field(default_factory=list)
    forward: Row | None = None
    step: Row | None = None

    @property
    def whole(self) -> list[Row]:
        return [row for row in (self.forward, self.step) if row is not None]

    @property
    def slowest(self) -> Row | None:
        """The layer row with the smallest ratio; None if no layer was timed."""
        return min((row for row in self.layers if row.ratio is not None), key=lambda row: row.known_ratio, default=None)

    def missed(self) -> list[str]:
        """One sentence for each bar that is missed."""
        what = f"{self.name} {self.precision} {self.layout}"
        slow = [row for row in self.layers if row.ratio is not None and round(row.ratio, 2) < LAYER_BAR]
        sentences = [f"{what}: {row.case} {row.direction} at {ratio_text(row.ratio)}" for row in slow]
        for row in self.whole:
            if row.ratio is not None and round(row.ratio, 2) < NETWORK_BAR:
                sentences.append(f"{what}: {row.direction} of the network at {ratio_text(row.ratio)}")
            if row.memory_ratio is not None and round(row.memory_ratio, 2) > MEMORY_BAR:
                sentences.append(f"{what}: {row.direction} takes {ratio_text(row.memory_ratio)} PyTorch's memory")
        return sentences


def network_name(case: str) -> str:
    """The network that a row's case is of: ``net (model)`` is the whole of it, ``net.module`` a layer."""
    return case.removesuffix(WHOLE) if case.endswith(WHOLE) else case.partition(".")[0]


def networks_of(rows: Iterable[Row]) -> list[Network]:
    """The rows of networks, put together."""
    found: dict[tuple[str, str, str], Network] = {}
    for row in rows:
        is_whole, name = row.case.endswith(WHOLE), network_name(row.case)
        network = found.setdefault((name, row.precision, row.layout), Network(name, row.precision, row.layout))
        if not is_whole:
            network.layers.append(row)
        elif row.direction == "forward":
            network.forward = row
        else:
            network.step = row
    return list(found.values())


def with_faster_layout(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with PyTorch's time in its faster layout where rows of both layouts tell it."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if row.aten_ms is not None:
            times.setdefault((row.case, row.direction, row.precision), {})[row.layout] = row.aten_ms
    found = []
    for row in rows:
        known = times.get((row.case, row.direction, row.precision), {})
        best = min([*known.values(), *([] if row.aten_best_ms is None else [row.aten_best_ms])], default=None)
        told = len(known) > 1 or row.aten_best_ms is not None
        found.append(replace(row, aten_best_ms=best) if told and row.aten_ms is not None else row)
    return found


def network_table(networks: Sequence[Network]) -> Table:
    """One line per network: speed and memory of inference and training step, and its slowest layer."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("network", "precision", "layout"):
        table.add_column(head, no_wrap=True)
    for head in ("forward\nPyTorch ms", "ratio", "memory", "step\nPyTorch ms", "ratio", "memory", "layers", "slowest"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("which", overflow="fold")
    for network in networks:
        cells = [Text(network.name), Text(network.precision), Text(network.layout)]
        for row in (network.forward, network.step):
            cells += _whole_cells(row)
        slowest = network.slowest
        cells.append(Text(str(len({row.case for row in network.layers}))))
        cells.append(_ratio(None if slowest is None else slowest.ratio))
        where = "" if slowest is None else f"{slowest.case.partition('.')[2] or slowest.case} {slowest.direction}"
        table.add_row(*cells, Text(where))
    return table


def _whole_cells(row: Row | None) -> list[Text]:
    from rich.text import Text

    if row is None:
        return [Text(UNKNOWN)] * 3
    return [Text(ms_text(row.aten_ms)), _ratio(row.ratio), Text(ratio_text(row.memory_ratio))]


def _ratio(value: float | None) -> Text:
    from rich.text import Text

    return Text(ratio_text(value), style=ratio_style(value))
