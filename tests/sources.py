"""The kernel sources that calls need, learnt without a GPU: a stand-in for it notes what it is asked to load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from haloconv import plan
from haloconv.device import Device, DeviceFacts, set_stand_in, stand_in
from haloconv.families.base import Kernel
from haloconv.jit import TENSOR_MAP_BYTES, KernelSource, get_kernel, nvrtc_info
from haloconv.problem import Request


class _Nothing:
    """A kernel whose launches do nothing."""

    def launch(self, *arguments: int) -> None:
        pass

    def cluster_launch(self, *shape: int) -> Callable[[int, int], None]:
        return self.launch


@contextmanager
def noted_sources(facts: DeviceFacts) -> Iterator[dict[str, KernelSource]]:
    """While active, calls on CPU tensors choose, bind and launch as on a GPU of these facts, but nothing is compiled.

    Gives the sources that the calls load, by their digest; what the calls return means nothing. Plans that were made
    before are forgotten, and so are those made here. Raises RuntimeError inside another stand-in.
    """
    if stand_in() is not None:
        raise RuntimeError("a stand-in for a GPU is in force already")
    sources: dict[str, KernelSource] = {}

    def load(source: KernelSource, smem_bytes: int) -> _Nothing:
        sources[source.digest] = source
        return _Nothing()

    def encode(*arguments: object, **options: object) -> bytes:
        return bytes(TENSOR_MAP_BYTES)

    plan.clear_plans()
    set_stand_in(Device(facts, load, encode))
    try:
        yield sources
    finally:
        set_stand_in(None)
        plan.clear_plans()


def compile_all(sources: Iterable[KernelSource], arch: str) -> None:
    """Compile sources side by side, a thread for each core: NVRTC works without Python's lock. They stay in the cache.

    Raises what get_kernel raises for one of them.
    """
    nvrtc_info()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        longest_first = sorted(sources, key=lambda each: -len(each.code))
        running = [pool.submit(get_kernel, each, arch) for each in longest_first]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def why_refused(kernel: Kernel, request: Request, facts: DeviceFacts) -> str | None:
    """Why the kernel does not take the request on such a device; it offers a config exactly if there is no reason."""
    with noted_sources(facts):
        reason = kernel.why_not(request)
        assert len(kernel.configs(request)) == (reason is None)
    return reason
