"""What emulated launches moved and multiplied, beside what their problems ask for: as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.table import Table

from haloconv.bench.emulation.model import Modelled
from haloconv.emulator import LaunchStatistics, SiteStatistics
from haloconv.problem import Problem

UNKNOWN = "–"
CONFLICTS_SHOWN = 3
CONFLICT_FREE = 1.005


@dataclass(frozen=True)
class Launched:
    """One launch for one direction of a layer. ``problem`` is None for the bias gradient, which is a sum.

    ``modelled`` is what the family's cost model says of all launches of the direction; None where it has no model.
    """

    case: str
    step: str
    problem: Problem | None
    statistics: LaunchStatistics
    modelled: Modelled | None = None

    @property
    def global_bytes(self) -> int:
        """Bytes that crossed between global memory and the block, by plain accesses and by asynchronous copies."""
        counters = self.statistics.counters
        names = ("global_read_bytes", "global_write_bytes", "async_read_bytes", "async_write_bytes")
        return sum(counters[name] for name in names)

    @property
    def multiplies(self) -> int:
        """Multiplies of tensor-core instructions; those of plain arithmetic are not counted."""
        return self.statistics.counters["multiplies"]

    def conflicts(self) -> list[SiteStatistics]:
        """The lines whose shared-memory accesses take more passes than the fewest possible, worst first."""
        found = [site for site in self.statistics.sites if site.degree > CONFLICT_FREE]
        return sorted(found, key=lambda site: -site.degree)

    def record(self) -> dict[str, object]:
        """The launch as JSON can hold it. ``problem_...`` is what the definition of the direction asks for,
        ``modelled_...`` what the cost model expects of all its launches."""
        seen, problem = self.statistics, self.problem
        return {
            "case": self.case,
            "direction": self.step,
            "kernel": seen.entry,
            "blocks": seen.blocks,
            "threads": seen.threads,
            **seen.counters,
            "problem_bytes": None if problem is None else problem.bytes,
            "problem_multiplies": None if problem is None else problem.flops // 2,
            "modelled_multiplies": None if self.modelled is None else self.modelled.multiplies,
            "modelled_copied_bytes": None if self.modelled is None else self.modelled.copied_bytes,
            "sites": [site._asdict() for site in seen.sites],
        }


def traffic_table(launches: Iterable[Launched]) -> Table:
    """Bytes by class and tensor-core multiplies of each launch.

    The last launch of a direction has the ratio of all its launches to what the definition asks for (each tensor read
    or written once, and the products) and to the multiplies that the cost model expects.
    """
    heads: tuple[str, ...] = (
        "layer",
        "direction",
        "kernel",
        "blocks",
        "global read",
        "global written",
        "async read",
        "async written",
    )
    heads += ("of the tensors", "multiplies", "of the definition", "of the model", "shared read", "shared written")
    table = _table("Emulated launches: bytes moved, and multiplies on tensor cores", heads, left=3)
    for _, group in groupby(launches, key=lambda launch: (launch.case, launch.step)):
        together = list(group)
        for launch in together:
            seen = launch.statistics
            sizes = [_size(seen.counters[f"{name}_bytes"]) for name in _CLASSES]
            bytes_ratio, multiplies_ratio, model_ratio = _ratios(together) if launch is together[-1] else ("",) * 3
            multiplies = _count(launch.multiplies) if launch.multiplies else UNKNOWN
            own = (*sizes[:4], bytes_ratio, multiplies, multiplies_ratio, model_ratio, *sizes[4:])
            table.add_row(launch.case, launch.step, seen.entry, str(seen.blocks), *own)
    return table


def _ratios(launches: list[Launched]) -> tuple[str, str, str]:
    problem, model = launches[0].problem, launches[0].modelled
    if problem is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    moved = sum(launch.global_bytes for launch in launches)
    multiplied = sum(launch.multiplies for launch in launches)
    multiplies = f"{2 * multiplied / problem.flops:.2f}x" if multiplied else UNKNOWN
    expected = f"{multiplied / model.multiplies:.2f}x" if multiplied and model else UNKNOWN
    return f"{moved / problem.bytes:.2f}x", multiplies, expected


def conflict_table(launches: Iterable[Launched]) -> Table | None:
    """The worst lines of each launch by bank conflicts; None if no access has any."""
    heads: tuple[str, ...] = ("layer", "direction", "kernel", "line", "access", "by warps", "passes", "worst")
    table = _table("Bank conflicts: passes of a warp's access to shared memory, 1 at best", heads, left=5)
    for launch in launches:
        for site in launch.conflicts()[:CONFLICTS_SHOWN]:
            access = "write" if site.write else "read"
            passes = (_count(site.warp_accesses), f"{site.degree:.2f}", f"{site.worst_degree:.2f}")
            table.add_row(launch.case, launch.step, launch.statistics.entry, site.place or UNKNOWN, access, *passes)
    return table if table.row_count else None


_CLASSES = ("global_read", "global_write", "async_read", "async_write", "shared_read", "shared_write")


def _table(title: str, heads: tuple[str, ...], left: int) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head.replace(" ", "\n"), justify="left" if i < left else "right", no_wrap=True)
    return table


def _size(count: int) -> str:
    return UNKNOWN if not count else f"{_count(count)}B"


def _count(count: int) -> str:
    for unit, step in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count} "
