"""Fixtures of the GPU tests: their own kernel cache, compiling in threads, and counting compilations."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from haloconv.jit import cache
from tests import oracle
from tests.cases import DTYPE_NAMES, Case, make
from tests.families import SUBJECTS, Subject

COMPILED_AHEAD = ("test_cases", "test_redzones")
ONE_SETUP = ("test_emulator_conformance", "test_export", "test_torch_samples", "test_compile_counts", "test_large")
DTYPES = set(DTYPE_NAMES.values())
KINDS = {subject.name for subject in SUBJECTS} | DTYPES


def pytest_configure() -> None:
    """Workers of pytest-xdist spread over the GPUs: each sees all of them and has another one first."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker.startswith("gw") and count > 1 and not torch.cuda.is_initialized():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[(int(worker[2:]) + i) % count] for i in range(count))


@pytest.fixture(autouse=True, scope="session")
def _own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALOCONV_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.delenv("HALOCONV_CACHE", raising=False)
        patch.setenv("HALOCONV_TUNE", "off")  # whatever a test does to cudnn.benchmark
        yield


@pytest.fixture(autouse=True, scope="module")
def _free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="session")
def _few_cpu_threads() -> Iterator[None]:
    """Small references are computed on the CPU: many threads would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def in_threads() -> Callable[[Iterable[Callable[[], object]]], None]:
    """Run calls in a thread pool, so that the kernels they need are compiled side by side.

    A call that fails is left to the test that makes it again.
    """

    def run(calls: Iterable[Callable[[], object]]) -> None:
        with ThreadPoolExecutor(16) as pool:
            for future in [pool.submit(call) for call in calls]:
                future.exception()
        torch.cuda.synchronize()

    return run


def unit_of(nodeid: str) -> str:
    """The tests that one worker gets in one piece: those which share kernels compiled ahead, or a setup.

    These are a module's tests of one family and dtype, or a module's. All other tests go to whoever is free, because
    most of their time is their own kernel's compilation.
    """
    module, _, test = nodeid.partition("::")
    if Path(module).stem in ONE_SETUP:
        return module
    if Path(module).stem in COMPILED_AHEAD:
        kinds = [word for word in re.split(r"[][-]", test) if word in KINDS]
        return " ".join([module, *sorted(kinds), *(() if set(kinds) & DTYPES else ("fp32",))])
    return nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """`--dist loadgroup` deals by `unit_of`. (xdist's own marks do nothing in 3.8 with pytest 9.1.)"""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LoadUnits(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return LoadUnits(config, log)


@pytest.fixture(scope="session")
def warm_up(in_threads: Callable) -> Callable[[str, Subject, Iterable[tuple[Case, torch.dtype]]], None]:
    """Compile the kernels that every direction of a family needs for the given cases and dtypes.

    Once in a process for each name and family. What the family has no kernels for here, by its dtypes or the device, is
    passed over.
    """
    done: set[tuple[str, str]] = set()

    def once(subject: Subject, one: Case, dtype: torch.dtype) -> None:
        t = make(one, dtype, "cuda")
        for result in subject.results:
            oracle.run(result, t, subject.on(one, dtype))

    def all_of(name: str, subject: Subject, wanted: Iterable[tuple[Case, torch.dtype]]) -> None:
        if (name, subject.name) not in done and not subject.missing():
            in_threads(partial(once, subject, *each) for each in wanted if each[1] in subject.dtypes)
        done.add((name, subject.name))

    return all_of


@pytest.fixture
def compiles() -> Callable[[], int]:
    """How many kernels this process has compiled so far."""
    return lambda: cache.statistics().compiles
