"""One launch on the emulator: the argument block in, findings and statistics out."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from haloconv.emulator.build import kernel_flags, kernel_module, places, runtime_library
from haloconv.jit import KernelSource
from haloconv.jit.launch import LaunchShape

COUNTERS = (
    "global_read_bytes",
    "global_write_bytes",
    "shared_read_bytes",
    "shared_write_bytes",
    "async_read_bytes",
    "async_write_bytes",
    "multiplies",
)
"""The runtime's counters, in the order of enum Counter in include/runtime.h."""

MAX_THREADS = 1024
_MARK = re.compile(r"<<([0-9a-f]+)>>")  # a place in the kernel, inside a sentence of the runtime
_DIVERGENT = b"divergent barrier"
_one_at_a_time = threading.RLock()  # the runtime holds the state of one launch
_one_finding = False


class Region(NamedTuple):
    """Memory that a launch may touch: host addresses ``[begin, end)``."""

    begin: int
    end: int
    writable: bool


class Finding(NamedTuple):
    """One fault. ``place`` is ``file:line`` in the kernel folder, empty if it has none; ``times`` how often it showed.

    ``thread`` and ``block`` are those of the first time, as linear numbers.
    """

    kind: str
    place: str
    thread: int
    block: int
    times: int
    text: str

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        who = f", thread {self.thread} of block {self.block}" if self.place else ""
        often = f" [{self.times} times]" if self.times > 1 else ""
        return f"{self.kind}{where}{who}: {self.text}{often}"


class EmulatorError(RuntimeError):
    """A launch broke a rule of the programming model: ``findings`` has each fault, ``seed`` is the schedule."""

    def __init__(self, entry: str, launch: str, seed: int, findings: Sequence[Finding]) -> None:
        self.entry, self.seed, self.findings = entry, seed, tuple(findings)
        count = f"{len(findings)} fault" + ("s" if len(findings) != 1 else "")
        lines = [f"the emulator found {count} in {entry} ({launch}); replay: emulated_device(seed={seed})"]
        super().__init__("\n  ".join([*lines, *map(str, findings)]))


class SiteStatistics(NamedTuple):
    """Shared-memory accesses of one line. ``degree`` is the mean number of passes of a warp's access over the best."""

    place: str
    write: bool
    accesses: int
    bytes: int
    warp_accesses: int
    degree: float
    worst_degree: float


@dataclass(frozen=True)
class LaunchStatistics:
    """What one launch moved. ``counters`` maps the names in COUNTERS to sums over all blocks."""

    entry: str
    blocks: int
    threads: int
    counters: dict[str, int] = field(default_factory=dict)
    sites: tuple[SiteStatistics, ...] = ()


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("begin", "end", "writable")]


class _Request(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("limit_s", ctypes.c_double),
        *((name, ctypes.c_uint64) for name in ("grid", "threads", "dynamic_bytes", "cluster")),
        *((name, ctypes.c_uint64) for name in ("want_statistics", "one_finding")),
    ]


class _Finding(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("kind", "text")),
        *((name, ctypes.c_uint64) for name in ("offset", "thread", "block", "count")),
    ]


class _Site(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("offset", "write", "accesses", "bytes", "warp_accesses", "passes", "best_passes", "worst_milli")
    ]


@contextmanager
def one_finding() -> Iterator[None]:
    """Inside, a launch ends at its first fault: for what only asks whether there is one."""
    global _one_finding
    before, _one_finding = _one_finding, True
    try:
        yield
    finally:
        _one_finding = before


class Module:
    """A kernel built for the emulator and loaded."""

    def __init__(self, source: KernelSource) -> None:
        self.source = source
        self._known_places: dict[int, str] = {}
        self._runtime = runtime_library()
        self._flags = kernel_flags()
        self._library = ctypes.CDLL(str(kernel_module(source, self._flags)))
        self._entry = ctypes.cast(self._library.hc_emu_entry, ctypes.c_void_p).value
        self._runtime.hc_emu_static_smem_bytes.restype = ctypes.c_uint64
        self.static_smem_bytes = self._runtime.hc_emu_static_smem_bytes(ctypes.c_void_p(self._entry))

    def run(
        self,
        shape: LaunchShape,
        params_address: int,
        regions: Sequence[Region],
        seed: int = 0,
        limit_s: float = 60.0,
        statistics: bool = False,
    ) -> LaunchStatistics | None:
        """Run the blocks to the end, inside ``one_finding`` to the first fault; the statistics if they are asked for.

        ``params_address`` is that of an array with the address of each by-value parameter. Raises EmulatorError for
        what was found, ValueError for a geometry that no device takes.
        """
        grid, threads, smem_bytes, cluster = shape
        if not 0 < threads <= MAX_THREADS or grid < 1 or cluster < 1 or grid % cluster:
            raise ValueError(
                f"{self.source.entry}: {grid} blocks of {threads} threads, {cluster} in a cluster, cannot be launched"
            )
        array = (_Region * len(regions))(*(_Region(*each) for each in regions))
        request = _Request(
            self._entry, params_address, ctypes.addressof(array), len(regions), seed, limit_s, grid, threads,
            smem_bytes, cluster, statistics, _one_finding,
        )  # fmt: skip
        with _one_at_a_time:
            self._runtime.hc_emu_run.restype = ctypes.c_uint64
            count = self._runtime.hc_emu_run(ctypes.byref(request))
            findings = self._findings(count) if count else []
            result = self._statistics(grid, threads) if statistics else None
        if findings:
            launch = f"{grid} blocks of {threads} threads, seed {seed}"
            raise EmulatorError(self.source.entry, launch, seed, findings)
        return result

    def _findings(self, count: int) -> list[Finding]:
        raw = [_Finding() for _ in range(count)]
        for index, view in enumerate(raw):
            self._runtime.hc_emu_finding(ctypes.c_uint64(index), ctypes.byref(view))
        marks = [[int(mark, 16) for mark in _MARK.findall(view.text.decode())] for view in raw]
        known = self._places({view.offset for view in raw if view.offset}.union(*marks))

        def named(found: re.Match[str]) -> str:
            return known.get(int(found[1], 16)) or "an unknown line"

        return [
            Finding(
                view.kind.decode(), known.get(view.offset, ""), view.thread, view.block, view.count,
                _MARK.sub(named, view.text.decode()),
            )
            for view, marked in zip(raw, marks, strict=True)
            if view.kind != _DIVERGENT or len(marked) < 2 or len({known[each] for each in marked}) > 1
        ]  # fmt: skip

    def _places(self, offsets: set[int]) -> dict[int, str]:
        """``file:line`` of each offset; the compiler may have copied one line to several."""
        new = sorted(offsets - self._known_places.keys())
        if new:
            path = kernel_module(self.source, self._flags)  # built anew if the cache was cleared since
            self._known_places |= places(self.source, path, new)
        return {offset: self._known_places[offset] for offset in offsets}

    def _statistics(self, grid: int, threads: int) -> LaunchStatistics:
        runtime = self._runtime
        runtime.hc_emu_counter.restype = runtime.hc_emu_site_count.restype = ctypes.c_uint64
        counters = {name: runtime.hc_emu_counter(ctypes.c_uint64(i)) for i, name in enumerate(COUNTERS)}
        views = (_Site * runtime.hc_emu_site_count())()
        runtime.hc_emu_sites(views)
        known = self._places({view.offset for view in views})
        sites = tuple(
            SiteStatistics(
                known[view.offset], bool(view.write), view.accesses, view.bytes, view.warp_accesses,
                view.passes / max(view.best_passes, 1), view.worst_milli / 1000,
            )
            for view in views
        )  # fmt: skip
        return LaunchStatistics(self.source.entry, grid, threads, counters, sites)
