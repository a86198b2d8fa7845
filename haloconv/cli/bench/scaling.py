"""``haloconv bench --scaling``: a training step on images divided over GPUs, more rows with each, and its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from haloconv.bench.costs.scaling import RANKS, Scaling, ScalingError, Workload, scaling
from haloconv.bench.results import append_rows
from haloconv.env import environment_stamp
from haloconv.precision import PrecisionLabel

SUITE = "scaling"
MODEL = "what convolutions send a rank in a forward pass, by the model of docs/distributed.md"


@dataclass(frozen=True)
class ScalingOrder:
    """A workload in every precision, on as many ranks of RANKS as there are ``devices``."""

    workload: Workload
    precisions: list[PrecisionLabel]
    devices: list[str]

    @property
    def ranks(self) -> list[int]:
        """How many at once."""
        return [count for count in RANKS if count <= len(self.devices)]

    @property
    def left(self) -> list[int]:
        """What there are too few devices for."""
        return [count for count in RANKS if count not in self.ranks]


def bench_scaling(order: ScalingOrder, folder: Path, console: Console) -> bool:
    """Time, print and record what can be; True if all that was timed met its bar, and no rank failed."""
    passed = True
    for precision in order.precisions:
        found: list[Scaling] = []
        try:
            for each in scaling(order.workload, precision, order.devices, order.ranks):
                found.append(each)
                path = append_rows(folder, SUITE, [{**each.record(), **environment_stamp()}])  # a cut keeps it
                console.print(f"{each.ranks} ranks in {precision} are in {path}", highlight=False, markup=False)
        except ScalingError as error:
            console.print(f"FAILED {precision}: {error}", style="red", highlight=False, markup=False)
            passed = False
        if found:
            console.print(_table(found))
            console.print(f"halos: {MODEL}", highlight=False, markup=False)
        passed = passed and all(each.within_budget for each in found)
    for count in order.left:
        said = f"LEFT {count} ranks: not measured, there are {len(order.devices)} GPUs"
        console.print(said, style="yellow", highlight=False)
    return passed


def _table(found: Sequence[Scaling]) -> Table:
    table = Table(title=f"training step of {found[0].case} a rank, {found[0].precision}", box=box.SIMPLE_HEAD)
    heads = "ranks, images, ms alone, spread, efficiency, in a row, efficiency, bar, GB a rank, halos, error, verdict"
    for head in heads.split(", "):
        table.add_column(head, justify="right")
    for each in found:
        images = "sharded" if each.is_sharded else "plain"
        bar = "–" if each.efficiency_bar is None else f"{each.efficiency_bar:.0%}"
        memory = "–" if each.peak_bytes is None else f"{each.peak_bytes / 1e9:.2f}"
        verdict = "within" if each.within_budget else "MISSED"
        halos = f"{each.messages} of {each.halo_bytes / 1e6:.2f} MB in all" if each.messages else "–"
        alone = (f"{each.ms:.2f}", f"{each.spread:.1%}", f"{each.efficiency:.1%}")
        times = (*alone, f"{each.in_a_row_ms:.2f}", f"{each.in_a_row_efficiency:.1%}")
        table.add_row(str(each.ranks), images, *times, bar, memory, halos, f"{each.error:.1e}", verdict)
    return table
