"""Threads that need the same layer at once, and a process that forks after it was used."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import haloconv
from haloconv import jit, plan
from haloconv.device import Device, set_stand_in
from haloconv.env import child_environment
from haloconv.jit import TENSOR_MAP_BYTES, Cubin, KernelSource, cache
from tests.cpu.test_paths import H200, Noting
from tests.toy_kernel import fake_compile

THREADS = 4


def test_threads_that_plan_a_layer_at_once_compile_once(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All meet the first compilation, and no kernel is compiled twice; each thread's call launches."""
    compiled: list[str] = []
    kernel, together = Noting(), threading.Barrier(THREADS, timeout=60)

    def compile_slowly(source: KernelSource, arch: str) -> Cubin:
        compiled.append(source.digest)
        time.sleep(0.05)
        return fake_compile(source, arch)

    def load(source: KernelSource, smem_bytes: int) -> Noting:
        jit.get_kernel(source, H200.arch)
        return kernel

    monkeypatch.setattr(cache, "compile_source", compile_slowly)
    monkeypatch.setattr(cache, "_in_memory", {})
    layer, x = haloconv.Conv2d(16, 16, 3, family="direct", strict=True), torch.randn(1, 16, 12, 12)

    def step(_: int) -> tuple[torch.Size, torch.Size]:
        own = x.clone().requires_grad_()
        together.wait()
        y = layer(own)
        (dx,) = torch.autograd.grad(y.sum(), own)
        return y.shape, dx.shape

    plan.clear_plans()
    set_stand_in(Device(H200, load, lambda *_, **__: bytes(TENSOR_MAP_BYTES)))
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            shapes = list(pool.map(step, range(THREADS)))
        kept = len(plan._plans)
    finally:
        set_stand_in(None)
        plan.clear_plans()
    assert shapes == [((1, 16, 10, 10), (1, 16, 12, 12))] * THREADS
    assert len(compiled) == len(set(compiled)) >= 2 and kept == 3
    assert len(kernel.stacks) >= 2 * THREADS


FORKED = """
import os, torch, haloconv
from haloconv import jit
from haloconv.jit import cache
from tests.toy_kernel import ARCH, fake_compile, toy_source
torch.set_num_threads(1)
cache.compile_source = fake_compile
layer, x = haloconv.Conv2d(4, 4, 3), torch.ones(1, 4, 8, 8)
before, kernel = layer(x), jit.get_kernel(toy_source(), ARCH)
child = os.fork()
if child == 0:
    good = torch.equal(layer(x), before) and jit.get_kernel(toy_source(), ARCH) == kernel
    good = good and jit.get_kernel(toy_source(4), ARCH) == fake_compile(toy_source(4), ARCH)
    haloconv.Conv2d(4, 4, 5)(x).sum().backward()
    os._exit(0 if good else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert jit.get_kernel(toy_source(4), ARCH) and jit.statistics().disk_hits == 1, "the child kept its kernel for others"
"""


@pytest.mark.skipif(sys.platform == "win32", reason="permissions as POSIX knows them, and fork")
def test_a_process_may_fork_after_layers_and_kernels_were_used(cache_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        env=child_environment(HALOCONV_CACHE_DIR=str(cache_dir), OMP_NUM_THREADS="1"),
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
