"""Work that processes share, one or several to a GPU: one at a time runs there, and others may compile meanwhile.

Nothing else runs on a GPU while something is timed there, or searched by timing. What is left to run side by side is
the host's work, which compiling a network mostly is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Queue, get_context
from multiprocessing.synchronize import Lock
from typing import Any, TypeVar

import torch

from haloconv.env import share_cores
from haloconv.tune.timing import synchronize

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass
class GpuLock:
    """A GPU that several processes use: inside, no other runs there. Without a lock there is no other.

    ``waited_s`` counts the seconds until others gave back what was lent to them.
    """

    lock: Lock | None = None
    waited_s: float = 0.0

    def __enter__(self) -> GpuLock:
        if self.lock is not None:
            self.lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            self.lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, another process may run there: this one, which has the GPU, does not use it."""
        if self.lock is None:
            yield
            return
        synchronize(None)
        self.lock.release()
        try:
            yield
        finally:
            began = time.perf_counter()
            self.lock.acquire()
            self.waited_s += time.perf_counter() - began


@dataclass(frozen=True)
class Place:
    """Where a process works: its device, the lock of it, and how many processes work ``beside`` it on the machine."""

    device: torch.device
    gpu: GpuLock
    beside: int = 0


_place: Place  # of a worker


def shared(
    attempt: Callable[[Item, Place], Found], items: Sequence[Item], devices: Sequence[torch.device], jobs: int = 1
) -> Iterator[tuple[Item, Found]]:
    """Each item with what the attempt came to, as it ends: in this process, or in ``jobs`` spawned ones per device.

    There each process takes the next item when it is done with one.
    """
    count = len(devices) * jobs
    if count == 1:
        place = Place(devices[0], GpuLock())
        yield from ((item, attempt(item, place)) for item in items)
        return
    context = get_context("spawn")
    free: Queue[Any] = context.Queue()
    for device in [*devices] * jobs:
        free.put(str(device))
    locks = {str(device): context.Lock() for device in devices} if jobs > 1 else {}
    with ProcessPoolExecutor(count, context, _take, (free, locks, count)) as pool:
        futures = {pool.submit(_in_worker, attempt, item): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _take(free: Queue[Any], locks: Mapping[str, Lock], count: int) -> None:
    """A worker's first deed: a device, and its part of the cores."""
    global _place
    name = free.get()
    _place = Place(torch.device(name), GpuLock(locks.get(name)), count - 1)
    share_cores(count)


def _in_worker(attempt: Callable[[Item, Place], Found], item: Item) -> Found:
    return attempt(item, _place)
