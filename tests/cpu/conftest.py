"""What the emulator's tests share: a cold cache for their builds, the seeds, the replay line, the closing figures."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from haloconv import three_dimensions
from haloconv.emulator import build
from haloconv.fusion.call import FusedCall
from haloconv.jit import nvrtc_info
from tests.fusable import chosen

PENDING_ON_A_GPU = "PENDING on a GPU"
SLOWEST_FILES = 12
MAY_BE_SKIPPED = (
    PENDING_ON_A_GPU,
    "no Chromium on this machine",
    "NOT CHECKED: there is no nvcc",
    "could not import 'torchvision'",
    "could not import 'onnx",
    "could not import 'timm'",
    "could not import 'diffusers'",
    "this PyTorch has no gloo",
    "the page shows the report of a machine without a GPU",
    "permissions as POSIX",
    f"NVRTC {nvrtc_info()[0]} still compiles for sm_70",
)
"""How the reasons begin for which CI may leave a test out: what is only ever an addition, and what waits for a GPU."""


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Under ``CI=true`` a test that is left out has failed: without g++ the emulator would prove nothing in silence."""
    report = yield
    if report.skipped and in_ci() and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(MAY_BE_SKIPPED):
            report.outcome, report.longrepr = "failed", f"left out, which CI does not allow: {reason}"
    return report


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that torch.compile keeps from one test is there in another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """conv3d chooses among its routes for tensors of a CPU, too."""
    monkeypatch.setattr(three_dimensions, "why_not_elements", lambda *_: None)


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has a word for each padded copy that torch.nn.functional.pad made."""
    found: list[str] = []
    real = torch.nn.functional.pad
    monkeypatch.setattr(torch.nn.functional, "pad", lambda *args, **kw: found.append("copy") or real(*args, **kw))
    return found


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sees no GPU, on a machine that has one, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True, scope="session")
def _built_quickly() -> Iterator[None]:
    """Most kernels run once or twice here; what runs for long is built with optimisation, as without tests."""
    with build.optimisation(build.UNOPTIMISED):
        yield


@pytest.fixture
def optimised() -> Iterator[None]:
    """Kernels are built as they are outside of tests."""
    with build.optimisation(build.OPTIMISED):
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes of this test run: pytest-xdist gives each one of its own."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-gw") else base


@contextmanager
def _builds_shared(shared: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALOCONV_CACHE_DIR", str(shared / "emulator"))
        patch.delenv("HALOCONV_CACHE", raising=False)
        yield


@pytest.fixture(scope="module")
def emulator_cache(shared_folder: Path) -> Iterator[None]:
    """Builds go to a folder that starts empty and that all processes of this test run share."""
    with _builds_shared(shared_folder):
        yield


@pytest.fixture
def emulator_loaded(shared_folder: Path) -> None:
    """The emulator's runtime, which takes ten seconds to build, from that folder; the test's own cache is another."""
    with _builds_shared(shared_folder):
        build.runtime_library()


@pytest.fixture
def emulator_seeds(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """The schedules that each problem runs under."""
    return request.config.getoption("--emulator-seeds")


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> Callable:
    """``with replay(seed):`` a failure inside prints the command that runs the test again under that seed alone."""

    @contextmanager
    def report(seed: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            more = " --every-run" if request.config.getoption("--every-run") else ""
            print(f"seed {seed} failed; replay: python -m pytest '{request.node.nodeid}' --emulator-seeds {seed}{more}")
            raise

    return report


def _properties(reporter: pytest.TerminalReporter, name: str) -> Iterator[tuple]:
    for reports in reporter.stats.values():
        for report in reports:
            for key, value in getattr(report, "user_properties", ()):
                if key == name and report.when == "call":
                    yield value


def _slowest_files(reporter: pytest.TerminalReporter) -> str:
    """Where the time of the tests went: seconds of all processes by file, and of all files."""
    seconds: dict[str, float] = defaultdict(float)
    for report in (each for reports in reporter.stats.values() for each in reports if hasattr(each, "duration")):
        seconds[report.nodeid.partition("::")[0].rpartition("/")[2]] += report.duration
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:SLOWEST_FILES]
    listed = ", ".join(f"{file} {seconds[file]:.0f}" for file in slowest)
    return f"seconds by file: {listed}, all {len(seconds)} files {sum(seconds.values()):.0f}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went, and the planted faults with the catch rate."""
    terminalreporter.write_line(_slowest_files(terminalreporter))
    verdicts = list(_properties(terminalreporter, "mutation"))
    if verdicts:
        terminalreporter.write_sep("-", "planted faults")
        for _, text in sorted(verdicts):
            terminalreporter.write_line(text)
        terminalreporter.write_line(f"{sum(caught for caught, _ in verdicts)} of {len(verdicts)} planted faults caught")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What of haloconv.fuse ran as one call, with a family that has epilogues. No gradients are recorded."""
    names: list[str] = []
    run = FusedCall._at_once

    def noting(call: FusedCall, *tensors: torch.Tensor) -> torch.Tensor | None:
        y = run(call, *tensors)
        names.extend([] if y is None else [str(call)])
        return y

    monkeypatch.setattr(FusedCall, "_at_once", noting)
    chosen(monkeypatch, "halo_sm90")
    with torch.no_grad():
        yield names
