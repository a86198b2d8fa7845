"""Options, the loud skip of GPU tests, the isolated kernel cache, and the results file that stamps are made from."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torch reads it: a test forks, and OpenMP's threads stay behind

import torch

from haloconv import plan
from tests.cases import EMULATOR_SEEDS
from tests.recorder import Recorder
from tools.stamps import all_hashes, kernel_families

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = Path(__file__).resolve().parent / "gpu"
NO_CUDA = "no CUDA device: torch.cuda.is_available() is False"
ONE_GPU = "needs two GPUs, this machine has one"
WORST = pytest.StashKey[dict[tuple[str, str, str], float]]()
COUNTS = pytest.StashKey[Counter]()
CHECKS = pytest.StashKey[Counter]()
FAILURES = pytest.StashKey[Counter]()
HASHES = pytest.StashKey[dict[str, str]]()
RECORDER = pytest.StashKey[Recorder]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-examples", type=int, default=300, help="random problems that the GPU fuzzer draws")
    parser.addoption("--every-arch", action="store_true", help="compile all for every architecture, not for one")
    parser.addoption("--every-run", action="store_true", help="the emulator runs every case in every way, not a part")
    parser.addoption(
        "--emulator-seeds", type=lambda text: tuple(map(int, text.split(","))), default=EMULATOR_SEEDS,
        help="the emulator's schedules, such as 0,1,2",
    )  # fmt: skip
    parser.addoption(
        "--family", action="append", default=[], choices=kernel_families(),
        help="run only the GPU tests of this family, which is then the only one to get a stamp; may be repeated",
    )  # fmt: skip
    parser.addoption(
        "--gpu-results", type=Path, default=ROOT / "build" / "gpu-tests.json",
        help="where a run of tests/gpu on a CUDA device leaves the counts and errors that tools/make_stamps.py reads",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.stash[WORST] = {}
    config.stash[COUNTS] = Counter()
    config.stash[CHECKS] = Counter()
    config.stash[FAILURES] = Counter()


def _needs_gpu(item: pytest.Item) -> bool:
    return GPU_TESTS in item.path.parents


def _family_of(item: pytest.Item) -> str:
    """The family that a test is about: its parameter ``subject``, else ``direct``, which all other tests run."""
    subject = item.callspec.params.get("subject") if hasattr(item, "callspec") else None
    return "direct" if subject is None else subject.name


def _families(config: pytest.Config) -> list[str]:
    """The families that the run is to vouch for."""
    return config.getoption("--family") or kernel_families()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = _families(config)
    others = [item for item in items if _needs_gpu(item) and _family_of(item) not in wanted]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    for item in items:
        if _needs_gpu(item):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=NO_CUDA))


def pytest_deselected(items: list[pytest.Item]) -> None:
    wanted = _families(items[0].config) if items else []
    for item in items:
        if _needs_gpu(item) and _family_of(item) in wanted:
            item.config.stash[COUNTS]["deselected"] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if _needs_gpu(item) and (report.when == "call" or report.outcome != "passed"):
        item.config.stash[COUNTS][report.outcome] += 1
        verdicts = {"passed": CHECKS, "failed": FAILURES}
        if report.outcome in verdicts:
            item.config.stash[verdicts[report.outcome]][_family_of(item)] += 1
    return report


def pytest_sessionstart(session: pytest.Session) -> None:
    if torch.cuda.is_available():
        session.config.stash[HASHES] = all_hashes()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Take over what a worker of pytest-xdist found."""
    found = getattr(node, "workeroutput", {}).get("gpu tests")
    if found is None:
        return
    config = node.config
    config.stash[COUNTS].update(found["counts"])
    config.stash[CHECKS].update(found["checks"])
    config.stash[FAILURES].update(found["failures"])
    worst = config.stash[WORST]
    for *key, value in found["worst"]:
        worst[tuple(key)] = max(worst.get(tuple(key), 0.0), value)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what the GPU tests found, with the hashes of the sources as they were when the session began."""
    counts, target = session.config.stash[COUNTS], session.config.getoption("--gpu-results")
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gpu tests"] = {
            "counts": dict(counts),
            "checks": dict(session.config.stash[CHECKS]),
            "failures": dict(session.config.stash[FAILURES]),
            "worst": [(*key, error) for key, error in session.config.stash[WORST].items()],
        }
        return
    if not torch.cuda.is_available() or not counts["passed"] + counts["failed"]:
        return
    worst = session.config.stash[WORST]
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for (family, direction, dtype), error in sorted(worst.items()):
        errors.setdefault(family, {}).setdefault(direction, {})[dtype] = error
    record = {
        "families": _families(session.config),
        "counts": {name: counts[name] for name in ("passed", "failed", "skipped", "deselected")},
        "checks": dict(session.config.stash[CHECKS]),
        "failures": dict(session.config.stash[FAILURES]),
        "hashes": session.config.stash[HASHES],
        "worst_errors": errors,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=2) + "\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, lacking in ((NO_CUDA, "on a GPU"), (ONE_GPU, "on two GPUs")):
        count = sum(reason in str(report.longrepr) for report in skipped)
        if count:
            terminalreporter.write_sep(
                "!", f"{count} GPU tests were SKIPPED, nothing was verified {lacking}: {reason}", red=True
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
    monkeypatch.setattr(plan, "_all_native", lambda *_: False)
    plan.clear_plans()
    yield
    plan.clear_plans()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Recorder:
    """``record(names, result, precision, error, kind=...)``: what a check found about launched kernels."""
    found = request.node.stash[RECORDER] = Recorder()
    return found
