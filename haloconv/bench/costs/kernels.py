"""What kernels cost before they run: the first use of a new layer, and how long a family's kernels compile."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

from haloconv import env
from haloconv.bench.costs.first_use import FirstUse
from haloconv.bench.suite import Case
from haloconv.families import FAMILIES
from haloconv.jit import KernelSource, compile_source

COMPILE_BUDGET_MS = 1000.0
SOURCE_BUDGET_MS = 1500.0
DISK_BUDGET_MS = 20.0
SMALL_IMAGE = (64, 64)
STARTER = KernelSource("starter", "starter", (), 'extern "C" __global__ void starter() {}')  # loads NVRTC
CHILD_TIMEOUT_S = 300


class Cost:
    """A measured cost, a dataclass, that may be within its budget."""

    @property
    def within_budget(self) -> bool:
        raise NotImplementedError

    def record(self) -> dict[str, object]:
        """The fields of a row."""
        return {**asdict(self), "within_budget": self.within_budget}  # type: ignore[call-overload]


@dataclass(frozen=True)
class CompileTime(Cost):
    """Wall ms per kernel of a layer's first call in a process: compiled anew, and loaded from the cache on disk.

    ``budgeted`` is False for the first kernel of a process, whose time is that of loading the compiler.
    """

    what: str
    kernels: int
    compile_ms: float
    disk_ms: float
    compile_budget_ms: float = COMPILE_BUDGET_MS
    disk_budget_ms: float = DISK_BUDGET_MS
    budgeted: bool = True

    @property
    def within_budget(self) -> bool:
        within = self.compile_ms <= self.compile_budget_ms and self.disk_ms <= self.disk_budget_ms
        return within or not self.budgeted


@dataclass(frozen=True)
class SourceTimes(Cost):
    """Wall ms to compile each of so many ``sources`` that stand for a family, ``jobs`` at a time, without a cache."""

    what: str
    sources: int
    median_ms: float
    worst_ms: float
    worst: str
    jobs: int
    budget_ms: float = SOURCE_BUDGET_MS

    @property
    def within_budget(self) -> bool:
        """Whether the slowest is."""
        return self.worst_ms <= self.budget_ms


def compile_times(cases: Sequence[Case], family: str = "direct") -> list[CompileTime]:
    """First uses of every direction of the cases, in one new process with an empty cache and in one with a full one.

    The images are small, because the kernels do not depend on their extents.

    Raises RuntimeError if a process fails, or if the second one compiles anything.
    """
    small = [replace(case, input=(1, case.input[1], *SMALL_IMAGE)) for case in cases]
    order = json.dumps({"family": family, "cases": [asdict(case) for case in small]})
    with tempfile.TemporaryDirectory(prefix="haloconv-") as folder:
        cold, warm = (_in_new_process(order, folder) for _ in range(2))
    late = [use.what for use in warm if use.compiles]
    if late:
        raise RuntimeError(f"the cache on disk did not serve {', '.join(late)}")
    return [
        CompileTime(new.what, new.kernels, new.ms / new.kernels, old.ms / new.kernels, budgeted=i > 0)
        for i, (new, old) in enumerate(zip(cold, warm, strict=True))
    ]


def _in_new_process(order: str, cache_folder: str) -> list[FirstUse]:
    surroundings = env.child_environment(**{env.CACHE_DIR: cache_folder, env.CACHE: "1"})
    command = [sys.executable, "-m", "haloconv.bench.costs.first_use"]
    done = subprocess.run(
        command, input=order, capture_output=True, text=True, env=surroundings, timeout=CHILD_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"measuring compile times failed:\n{done.stderr.strip()}")
    return [FirstUse(**use) for use in json.loads(done.stdout)]


def source_times(family: str, arch: str, jobs: int | None = None) -> SourceTimes:
    """Compile every source that stands for ``family`` once, for ``arch`` (such as ``"sm_90a"``).

    A process for each four processors by default, as compiling is slower beside many others.
    """
    jobs, sources = jobs or max(1, (os.cpu_count() or 1) // 4), FAMILIES[family].sources()
    spawn = multiprocessing.get_context("spawn")  # a fork of a process that has used CUDA cannot
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_compile_ms, initargs=(STARTER, arch)) as pool:
        times = list(pool.map(_compile_ms, sources, [arch] * len(sources)))
    worst = max(range(len(sources)), key=times.__getitem__)
    constants = " ".join(f"{name}={value}" for name, value in sources[worst].constants)
    name = f"{sources[worst].entry} {constants}"
    return SourceTimes(family, len(sources), statistics.median(times), times[worst], name, jobs)


def _compile_ms(source: KernelSource, arch: str) -> float:
    return compile_source(source, arch).compile_ms
