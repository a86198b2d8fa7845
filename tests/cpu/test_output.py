"""Files that verbs write: no input and nothing that exists is lost. Wrong input ends with 2 and is told on stderr."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from haloconv import atomic
from haloconv.bench.suite import SUITES
from tests.verbs import invoke

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = ROOT / "tests" / "problems" / "depthwise_7x7.py"
ROWS = ROOT / "benchmarks" / "results" / "nvidia-h200" / "latest.jsonl"

pytestmark = pytest.mark.usefixtures("without_gpu")


def copies(folder: Path) -> tuple[Path, Path, Path]:
    """A problem file, stored rows and a suite that may be destroyed."""
    sources = (PROBLEM, ROWS, SUITES / "suite.toml")
    return tuple(Path(shutil.copy(source, folder)) for source in sources)


# --- outputs that are inputs, or exist


COMMANDS = {
    "export": "export {problem} --arch sm_80 -o {problem}",
    "report": "report --results {rows} --html {rows}",
    "report's json": "report --results {rows} --html {folder}/new.html --json {rows}",
    "report's suite": "report --results {rows} --suite {suite} --html {suite}",
    "report's model": "report {problem} --html {problem}",
    "run": "run {problem} --json {problem}",
    "run's page": "run {problem} --html {problem}",
    "run of a folder": "run {folder} --html {problem}",
    "tune": "tune {problem} --json {problem}",
    "tune's suite": "tune --suite {suite} --html {suite}",
}


@pytest.mark.parametrize("force", ["", "--force"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_an_output_that_is_an_input_is_refused(command: str, force: str, tmp_path: Path) -> None:
    problem, rows, suite = copies(tmp_path)
    before = [path.read_bytes() for path in (problem, rows, suite)]
    result = invoke(*command.format(problem=problem, rows=rows, suite=suite, folder=tmp_path).split(), *force.split())
    assert result.exit_code == 2 and "which this command reads" in result.stderr, result.output
    assert [path.read_bytes() for path in (problem, rows, suite)] == before
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_an_input_is_known_by_its_other_names(link: str, tmp_path: Path) -> None:
    problem, _, _ = copies(tmp_path)
    other = tmp_path / "other.py"
    getattr(other, link)(problem)
    result = invoke("export", problem, "--arch", "sm_80", "-o", other, "--force")
    assert result.exit_code == 2 and "which this command reads" in result.stderr
    assert problem.read_bytes() == PROBLEM.read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        "export {problem} -o {old}",
        "report --results {rows} --html {old}",
        "report --results {rows} --html {folder}/new.html --json {old}",
        "run {problem} --json {old}",
        "run {problem} --html {old}",
        "tune {problem} --json {old}",
        "doctor --json {old}",
    ],
)
def test_a_file_that_exists_needs_force(command: str, tmp_path: Path) -> None:
    problem, rows, _ = copies(tmp_path)
    old = tmp_path / "old.txt"
    old.write_text("precious")
    result = invoke(*command.format(problem=problem, rows=rows, old=old, folder=tmp_path).split())
    assert result.exit_code == 2 and f"{old} exists; add --force" in result.stderr, result.output
    assert old.read_text() == "precious" and not (tmp_path / "new.html").exists()


def test_force_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haloconv.cli.export.export", lambda *arguments, **options: "class ModelNew: ...")
    old = tmp_path / "new.py"
    old.write_text("stale")
    result = invoke("export", PROBLEM, "--arch", "sm_80", "-o", old, "--force")
    assert result.exit_code == 0 and "class ModelNew" in old.read_text(), result.output
    assert os.listdir(tmp_path) == ["new.py"]


def test_the_file_that_export_names_itself_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "depthwise_7x7_new.py").write_text("mine")
    result = invoke("export", PROBLEM, "--arch", "sm_80")
    assert result.exit_code == 2 and (tmp_path / "depthwise_7x7_new.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("json", "html", "says"),
    [("a", "a", "name the same file"), ("a", "deep/../a", "name the same file"), (".", "a", "is a folder"),
     ("taken/rows.json", None, "cannot write")],
)  # fmt: skip
def test_outputs_that_cannot_be_are_refused_before_anything_runs(
    json: str, html: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haloconv.cli.run.run_files", lambda *arguments: pytest.fail("it ran"))
    (tmp_path / "taken").write_text("")
    (tmp_path / "deep").mkdir()
    result = invoke("run", PROBLEM, "--json", tmp_path / json, *(["--html", tmp_path / html] if html else []))
    assert result.exit_code == 2 and says in result.stderr, result.output


def test_errors_of_single_files_go_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('no model')")
    result = invoke("run", tmp_path / "bad.py")
    assert result.exit_code == 2 and "no model" in result.stderr and "no model" not in result.stdout


# --- writing


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["rows.json"]


def test_permissions_are_those_of_the_old_file_or_of_any_new_one(tmp_path: Path) -> None:
    old, new, usual = (tmp_path / name for name in ("old", "new", "usual"))
    old.write_text("")
    old.chmod(0o640)
    usual.write_text("")
    for path in (old, new):
        atomic.write_text(path, "text")
    assert old.stat().st_mode & 0o777 == 0o640 and new.stat().st_mode == usual.stat().st_mode


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("")
    link.symlink_to(real)
    atomic.write_text(link, "text")
    assert link.is_symlink() and real.read_text() == "text"


def test_devices_are_written_to_and_not_replaced() -> None:
    atomic.write_text(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file() and invoke("doctor", "--json", os.devnull).exit_code == 0


def test_names_without_a_place_in_utf8_are_escaped(tmp_path: Path) -> None:
    atomic.write_text(tmp_path / "page", "Größe \udcff")
    assert (tmp_path / "page").read_text("utf-8") == "Größe \\udcff"


# --- wrong input


ROW = ROWS.read_text("utf-8").splitlines()[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", "no row of results in it"),
        (b"[1]\n\n", "no row of results in it"),
        (b'{\n  "rows": []\n}\n', "`haloconv bench` writes such files"),  # what --json of run and report writes
        (json.dumps({**json.loads(ROW), "aten_ms": "fast"}).encode(), "aten_ms is 'fast'"),
        (json.dumps({**json.loads(ROW), "tflops": "many"}).encode(), "a row is no result"),
        (json.dumps({**json.loads(ROW), "family": None}).encode(), "family is None"),
        (json.dumps({key: value for key, value in json.loads(ROW).items() if key != "aten_ms"}).encode(), "'aten_ms'"),
        (None, "cannot read"),
    ],
)
def test_stored_rows_that_are_none_are_named(content: bytes | None, says: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.mkdir() if content is None else rows.write_bytes(content)
    result = invoke("report", "--results", rows, "--html", tmp_path / "page.html")
    assert result.exit_code == 2 and "rows.jsonl" in result.stderr and says in result.stderr, result.output


@pytest.mark.parametrize(
    "command",
    ["export {none}", "run {none}", "report {none} --html {new}", "report --results {none} --html {new}",
     "report --results {rows} --suite {none} --html {new}", "tune {none}", "tune --suite {none}"],
)  # fmt: skip
def test_a_file_that_is_missing_is_named(command: str, tmp_path: Path) -> None:
    none = tmp_path / "none.py"
    result = invoke(*command.format(none=none, rows=ROWS, new=tmp_path / "new").split())
    assert result.exit_code == 2 and f"error: {none}: there is no such file" in result.stderr, result.output


@pytest.mark.parametrize(
    "options",
    [
        ("run", PROBLEM, "--budget", "0"),
        ("run", PROBLEM, "--budget", "-1"),
        ("run", PROBLEM, "--budget", "nan"),
        ("run", PROBLEM, "--budget", "inf"),
        ("report", PROBLEM, "--html", "x", "--budget", "-1"),
        ("report", "resnet50", "--html", "x", "--batch", "0"),
        ("report", "resnet50", "--html", "x", "--pixels", "-224"),
        ("run", PROBLEM, "--seed", "9223372036854775808"),
        ("report", PROBLEM, "--html", "x", "--seed", "-1"),
        ("tune", PROBLEM, "--budget", "0"),
        ("tune", PROBLEM, "--limit", "-5"),
        ("tune", "resnet50", "--batch", "0"),
        ("bench", "--budget", "0"),
        ("bench", "--limit", "0"),
        ("bench", "--sample", "-1"),
    ],
    ids=lambda options: " ".join(map(str, options)).replace(str(PROBLEM), "FILE"),
)
def test_numbers_that_mean_nothing_are_refused(options: tuple) -> None:
    result = invoke(*options)
    assert result.exit_code == 2 and f"Invalid value for '{options[-2]}'" in result.stderr, result.output
