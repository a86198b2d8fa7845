"""What GPU tests leave behind: a line a test as it ends, from every process; runs add up, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from haloconv.families import FAMILIES
from tests.families import HALO_SM90_MOMENTS, SPECIALS, SUBJECTS
from tests.gpu_results import GpuTests, file_hash
from tools import result_lines, stamps
from tools.gpu_results import GpuResults
from tools.result_lines import append_line, read_lines

DIRECT = "direct/direct"
TAPS = "halo_sm90/implicit_gemm"  # which runs border_3x3
CONFTEST = """
from pathlib import Path

import pytest

from tests import gpu_results
from tests.recorder import Recorder


def pytest_addoption(parser):
    gpu_results.add_options(parser)


def pytest_configure(config):
    folder = Path(__file__).resolve().parent / "gpu"
    plugin = gpu_results.GpuTests(config, folder, True, lambda: {"gpu": "a GPU"})
    config.pluginmanager.register(plugin, "gpu tests")


@pytest.fixture
def record(request):
    found = request.node.stash[gpu_results.RECORDER] = Recorder()
    return found
"""
TESTS = """
import pytest

from tests.cpu.test_launches import DIRECT, H200, HALO_SM90, run
from tests.launches import launched
from tests.sources import noted_sources


@pytest.mark.parametrize("subject", [DIRECT, HALO_SM90], ids=str)
@pytest.mark.parametrize("name", ["one_row", "border_3x3"])
def test_right(subject, name, record):
    with noted_sources(H200), launched() as names:
        run(subject, name, "fprop")
    record(names, "fprop", "fp32", 1e-7 * len(name))
    record(names, "fprop", "fp32", kind="exact")


@pytest.mark.parametrize("subject", [HALO_SM90], ids=str)
def test_wrong(subject):
    with noted_sources(H200):
        run(subject, "border_3x3", "fprop")
    raise AssertionError


def test_astray(nothing_of_this_name):
    pass
"""
ALONE = """
import pytest

from tests import launches
from tests.families import HALO_SM90_MOMENTS


@pytest.mark.parametrize("subject", [HALO_SM90_MOMENTS], ids=str)
def test_alone(subject, record):
    for names in launches._open:
        names.add(subject.group)
    record([subject.group], "fprop", "fp32", 1e-7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tests that can run here and say that they ran on a GPU."""
    (tmp_path / "gpu").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "gpu" / "test_some.py").write_text(TESTS)
    return tmp_path


@pytest.fixture
def run_tests(folder: Path, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Run them in this process; gives what pytest printed."""

    def run(*arguments: str) -> str:
        results = f"--gpu-results={folder / 'found.jsonl'}"
        plain = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={folder}")
        file_hash.cache_clear()
        status = pytest.main([str(folder), *plain, results, *arguments])
        return f"{capsys.readouterr().out}exit code {status:d}"

    return run


def found_in(folder: Path) -> GpuResults:
    return GpuResults(read_lines([folder / "found.jsonl"]))


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_every_process_adds_a_line_a_test_with_the_kernels_that_it_launched(
    folder: Path, run_tests: Callable[..., str], arguments: tuple[str, ...]
) -> None:
    assert "1 of 3 GPU tests left" not in run_tests(*arguments)
    results, digest = found_in(folder), stamps.stamp_hash(DIRECT)
    direct, taps = (results.of_kernel(name, stamps.stamp_hash(name)) for name in (DIRECT, TAPS))
    assert (direct.checks, direct.failed, direct.astray, direct.left) == (2, 0, 1, 0)
    assert (taps.checks, taps.failed, taps.astray, taps.left) == (2, 1, 0, 0)
    assert direct.errors == {"fprop": {"fp32": 1e-7 * len("border_3x3")}} and direct.gpus == {"a GPU"}
    assert direct.counts == {"random": 2, "exact": 2}
    assert results.of_kernel(DIRECT, digest[::-1]).checks == 0


def test_a_run_goes_on_where_the_last_one_ended(folder: Path, run_tests: Callable[..., str]) -> None:
    printed = run_tests("--seconds=-1")
    assert "6 skipped" in printed and "direct: 3 of 3 GPU tests left" in printed
    assert "halo_sm90: 3 of 3 GPU tests left" in printed
    printed = run_tests("-k", "test_right and one_row", "--resume")
    assert "2 passed" in printed and "direct: 2 of 3 GPU tests left, 0 failed" in printed
    found = found_in(folder).of_kernel(DIRECT, stamps.stamp_hash(DIRECT))
    assert (found.checks, found.left) == (1, 2)
    assert "2 passed, 2 deselected, 1 failed, 1 error" not in run_tests("--resume")
    found = found_in(folder).of_kernel(DIRECT, stamps.stamp_hash(DIRECT))
    assert (found.checks, found.left, found.astray) == (2, 0, 1)
    assert "4 deselected" in run_tests("--resume")
    with (folder / "gpu" / "test_some.py").open("a") as file:
        file.write("# other tests\n")
    assert "deselected" not in run_tests("--resume")


def test_a_run_of_which_nothing_is_left_succeeds(folder: Path, run_tests: Callable[..., str]) -> None:
    only = ("-k", "test_right and direct")
    assert "2 passed" in run_tests(*only, "--resume")
    assert "2 passed" in run_tests(*only)
    printed = run_tests(*only, "--resume")
    assert "6 deselected" in printed and printed.endswith("exit code 0")
    assert run_tests("-k", "absent").endswith("exit code 5")


def test_what_carried_sources_gave_counts(
    folder: Path, run_tests: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tests()
    before, now = found_in(folder).of_kernel(DIRECT, stamps.stamp_hash(DIRECT)), "0123"
    carried = [(DIRECT, stamps.stamp_hash(DIRECT), now), (TAPS, "another", now)]
    monkeypatch.setattr(result_lines, "carried_hashes", lambda: carried)
    assert found_in(folder).of_kernel(DIRECT, now) == before and before.checks == 2
    assert found_in(folder).of_kernel(DIRECT, stamps.stamp_hash(DIRECT)).checks == 0
    assert found_in(folder).of_kernel(TAPS, now).checks == 0


def test_a_run_of_one_family_adds_to_that_of_another(folder: Path, run_tests: Callable[..., str]) -> None:
    assert "3 deselected" in run_tests("--family", "halo_sm90")
    first = found_in(folder)
    assert first.of_kernel(TAPS, stamps.stamp_hash(TAPS)).left == 0
    assert first.of_kernel(DIRECT, stamps.stamp_hash(DIRECT)).left is None
    run_tests("--family", "reduce")
    both = found_in(folder)
    assert both.of_kernel(DIRECT, stamps.stamp_hash(DIRECT)).left == 0
    assert both.of_kernel(TAPS, stamps.stamp_hash(TAPS)).checks == 2


def test_a_kernel_that_is_verified_alone_needs_its_own_tests(folder: Path, run_tests: Callable[..., str]) -> None:
    """No test of its family that launches other kernels, and of the others' tests none is its own."""
    (folder / "gpu" / "test_alone.py").write_text(ALONE)
    alone, plain = stamps.MOMENTS, "halo_sm90/pointwise"
    assert "1 passed, 6 deselected" in run_tests("--kernel", alone)
    found = found_in(folder).of_kernel(alone, stamps.stamp_hash(alone))
    assert (found.checks, found.left) == (1, 0)
    assert found_in(folder).of_kernel(plain, stamps.stamp_hash(plain)).left is None
    assert "4 deselected" in run_tests("--kernel", plain)  # the tests of direct, and that of the measuring kernel
    found = found_in(folder).of_kernel(plain, stamps.stamp_hash(plain))
    assert found.left == 0
    assert "3 deselected" in run_tests("--family", "halo_sm90")


# the joined lines, one by one


def begin(run: str, gpu: str = "a GPU", **hashes: str) -> dict:
    return {"kind": "run", "run": run, "environment": {"gpu": gpu}, "hashes": {DIRECT: "abc"} | hashes}


def ended(
    run: str, test: str, outcome: str = "passed", kernels: tuple[str, ...] = (DIRECT,), error: float = 1e-7
) -> dict:
    return {
        "kind": "test", "run": run, "test": test, "family": "direct", "module": "m", "outcome": outcome, "seconds": 1.0,
        "kernels": list(kernels), "errors": [[each, "fprop", "fp32", error] for each in kernels],
        "counts": {"fuzz": dict.fromkeys(kernels, 5)},
    }  # fmt: skip


COLLECTED = {"kind": "collected", "tests": {"direct": ["a", "b"]}}


def test_the_last_line_of_a_test_counts() -> None:
    lines = [COLLECTED, begin("1"), ended("1", "a", error=3e-7), ended("1", "b", "failed"), ended("1", "gone")]
    found = GpuResults(lines).of_kernel(DIRECT, "abc")
    assert (found.checks, found.failed, found.left, found.counts["fuzz"]) == (1, 1, 0, 10)
    found = GpuResults([*lines, begin("2", "another GPU"), ended("2", "b")]).of_kernel(DIRECT, "abc")
    assert (found.checks, found.failed, found.left) == (2, 0, 0) and found.gpus == {"a GPU", "another GPU"}
    assert found.errors == {"fprop": {"fp32": 3e-7}} and found.environment == {"gpu": "another GPU"}


def test_a_run_on_another_model_takes_no_test_away_from_the_model_that_is_asked_for() -> None:
    lines = [COLLECTED, begin("1"), ended("1", "a"), ended("1", "b"), begin("2", "another GPU"), ended("2", "b")]
    found = GpuResults(lines, "a GPU").of_kernel(DIRECT, "abc")
    assert (found.checks, found.left, found.gpus) == (2, 0, {"a GPU"})
    assert GpuResults(lines, "a GPU").is_done("b", "m", "a GPU", {DIRECT: "abc"})
    assert GpuResults(lines, "another GPU").of_kernel(DIRECT, "abc").left == 1


def test_what_other_sources_gave_does_not_count() -> None:
    lines = [COLLECTED, begin("1", **{DIRECT: "old"}), ended("1", "a"), begin("2"), ended("2", "b", kernels=())]
    found = GpuResults(lines).of_kernel(DIRECT, "abc")
    assert (found.checks, found.left) == (0, 1)
    assert GpuResults(lines).of_kernel(DIRECT, "old").checks == 1
    assert GpuResults([begin("2"), ended("2", "a")]).of_kernel(DIRECT, "abc").left is None


@pytest.mark.parametrize(
    ("line", "module", "gpu", "hashes", "done"),
    [
        (ended("1", "a"), "m", "a GPU", {DIRECT: "abc"}, True),
        (ended("1", "a", "failed"), "m", "a GPU", {DIRECT: "abc"}, False),
        (ended("1", "a", "skipped"), "m", "a GPU", {DIRECT: "abc"}, False),
        (ended("1", "a"), "other", "a GPU", {DIRECT: "abc"}, False),
        (ended("1", "a"), "m", "another", {DIRECT: "abc"}, False),
        (ended("1", "a"), "m", "a GPU", {DIRECT: "new"}, False),
        (ended("1", "a"), "m", "a GPU", {DIRECT: "abc", "direct/new": "def"}, False),
        (ended("1", "a", kernels=()), "m", "a GPU", {DIRECT: "abc"}, False),
        (ended("1", "b"), "m", "a GPU", {DIRECT: "abc"}, False),
    ],
)
def test_only_what_passed_and_stayed_the_same_is_left_out(
    line: dict, module: str, gpu: str, hashes: dict[str, str], done: bool
) -> None:
    assert GpuResults([COLLECTED, begin("1"), line]).is_done("a", module, gpu, hashes) is done


def test_the_begin_of_a_line_that_a_dying_process_left_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "build" / "lines.jsonl"
    append_line(path, {"kind": "run"})
    with path.open("a") as file:
        file.write('{"kind": "te')
    assert read_lines([path, tmp_path / "none"]) == [{"kind": "run"}]


def test_every_family_with_kernels_is_tested_by_families_that_tests_ask_for() -> None:
    asked_for = {subject.name for subject in (*SUBJECTS, *SPECIALS)}
    assert asked_for == {name for name in FAMILIES if name in stamps.kernel_families()}
    for family in stamps.kernel_families():
        assert set() < set(stamps.tested_by(family)) <= asked_for
    groups = {group for kernel in stamps.kernels() for group in stamps.groups_of(kernel)}
    assert groups == asked_for | {HALO_SM90_MOMENTS.group}


def test_only_a_run_that_names_no_part_of_the_folder_is_whole(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    plugin = GpuTests(pytestconfig, tmp_path / "gpu", writes=False)

    class Given:
        args: list[str]

    plugin.config = Given()
    for args, whole in (([tmp_path / "gpu"], True), ([tmp_path], True), ([tmp_path / "gpu" / "test_a.py"], False)):
        plugin.config.args = [str(each) for each in args]
        assert plugin._is_whole() is whole
