"""Options, the loud skip of GPU tests, the isolated kernel cache, and the recorder of what GPU tests find."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torch reads it: a test forks, and OpenMP's threads stay behind

import torch

from haloconv import plan
from tests import gpu_results, parts
from tests.browser import NO_BROWSER
from tests.cases import EMULATOR_SEEDS
from tests.fuzz.campaign import commit_seed
from tests.gpu_results import RECORDER, GpuTests
from tests.recorder import Recorder

GPU_TESTS = Path(__file__).resolve().parent / "gpu"
NO_CUDA = "no CUDA device: torch.cuda.is_available() is False"
ONE_GPU = "needs two GPUs, this machine has one"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, default=0.0, help="ends each piece of the GPU fuzzer, done or not; 0: when done"
    )
    parser.addoption("--every-arch", action="store_true", help="compile all for every architecture, not for one")
    parser.addoption("--every-run", action="store_true", help="the emulator runs every case in every way, not a part")
    parser.addoption(
        "--emulator-seeds", type=lambda text: tuple(map(int, text.split(","))), default=EMULATOR_SEEDS,
        help="the emulator's schedules, such as 0,1,2",
    )  # fmt: skip
    gpu_results.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GpuTests(config, GPU_TESTS, torch.cuda.is_available()), "gpu tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts.leave_out(config, items, commit_seed())
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=NO_CUDA))


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the garbage collector need not look at it again and again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, what, lacking in (
        (NO_CUDA, "GPU tests", "on a GPU"),
        (ONE_GPU, "GPU tests", "on two GPUs"),
        (NO_BROWSER, "tests of pages", "in a browser"),
    ):
        count = sum(reason in str(report.longrepr) for report in skipped)
        if count:
            terminalreporter.write_sep(
                "!", f"{count} {what} were SKIPPED, nothing was verified {lacking}: {reason}", red=True
            )


@pytest.fixture(autouse=True, scope="session")
def _no_records_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Choices of the person who runs the tests take no part in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALOCONV_RECORDS_DIR", str(tmp_path_factory.mktemp("records")))
        yield


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache of the test's own."""
    folder = tmp_path / "haloconv-cache"
    monkeypatch.setenv("HALOCONV_CACHE_DIR", str(folder))
    monkeypatch.delenv("HALOCONV_CACHE", raising=False)
    return folder


@pytest.fixture
def own_autograd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every layer goes through our autograd functions, also where PyTorch's own would take the whole layer."""
    monkeypatch.setattr(plan, "_is_plain", lambda *_: False)
    plan.clear_plans()
    yield
    plan.clear_plans()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Recorder:
    """``record(names, result, precision, error, kind=...)``: what a check found about launched kernels."""
    found = request.node.stash[RECORDER] = Recorder()
    return found
