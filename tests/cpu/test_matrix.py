"""``make matrix``: what each cell runs, and what its table says of what failed and of what could not be tried."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tools import matrix

WHEEL = Path("/dist/haloconv-1.2.3-py3-none-any.whl")
SAID = {"use": "2.9.1+cpu\n", "command": "haloconv 1.2.3\n"}


def steps(failing: str, said: dict[str, str], commands: list[str]) -> matrix.Run:
    """Commands that run nothing; the one named fails: uv exits with 2 where the index of PyTorch cannot be reached."""
    failing, code = ("wheel of PyTorch", 2) if failing == "index of PyTorch" else (failing, 1)

    def run(*words: object, **_: str) -> subprocess.CompletedProcess[str]:
        command = " ".join(map(str, words))
        commands.append(command)
        name = next(
            name
            for name, sign in (
                ("environment", " venv "), ("wheel of PyTorch", "--dry-run"), ("install cli", "haloconv[cli]"),
                ("install", str(WHEEL)), ("install PyTorch", " install "), ("use", "matrix_cell.py"),
                ("command", "haloconv --version"), ("help", "haloconv run --help"),
            ) if sign in command
        )  # fmt: skip
        return subprocess.CompletedProcess(command, code if name == failing else 0, said.get(name, ""), f"{name} broke")

    return run


@pytest.mark.parametrize(
    ("failing", "said", "outcome"),
    [
        ("", SAID, ("ok 2.9.1+cpu", "")),
        ("environment", SAID, ("FAILED: no environment", "environment broke")),
        ("wheel of PyTorch", SAID, (matrix.NO_WHEEL, "")),
        ("index of PyTorch", SAID, ("FAILED: find PyTorch", "wheel of PyTorch broke")),
        ("install PyTorch", SAID, ("FAILED: install PyTorch", "install PyTorch broke")),
        ("install", SAID, ("FAILED: install", "install broke")),
        ("use", SAID, ("FAILED: use", "2.9.1+cpu\nuse broke")),
        ("install cli", SAID, ("FAILED: install cli", "install cli broke")),
        ("command", SAID, ("FAILED: command", "haloconv 1.2.3\ncommand broke")),
        ("help", SAID, ("FAILED: help", "help broke")),
        ("", {**SAID, "command": "haloconv 1.2.2\n"}, ("FAILED: command", "haloconv 1.2.2\ncommand broke")),
    ],
)
def test_a_cell_says_which_step_failed(failing: str, said: dict[str, str], outcome: tuple[str, str]) -> None:
    commands: list[str] = []
    assert matrix.cell("/bin/python3.10", "2.9", WHEEL, (), steps(failing, said, commands)) == outcome
    if outcome[0].startswith("ok"):
        assert "torch==2.9.*" in commands[2] and commands[3].endswith(str(WHEEL)) and "[cli]" not in commands[3]


def test_pytorch_is_of_a_minor_version_the_newest_or_the_lowest_that_is_allowed() -> None:
    assert matrix.wanted(matrix.NEWEST)[-1] == "torch" and matrix.wanted("2.4")[-1] == "torch==2.4.*"
    lowest = matrix.wanted(matrix.LOWEST)
    assert lowest[:2] == ("--resolution", "lowest-direct") and matrix.ROOT / "pyproject.toml" in lowest


def test_what_could_not_be_tried_is_said_and_a_failure_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"2.4": ("ok 2.4.1", ""), "newest": ("FAILED: use", "a traceback")}
    monkeypatch.setattr(matrix, "UV", Path(sys.executable))
    monkeypatch.setattr(matrix, "build_wheel", lambda folder: WHEEL)
    monkeypatch.setattr(matrix, "interpreter", lambda version: None if version == "3.13" else f"/python{version}")
    monkeypatch.setattr(matrix, "cell", lambda python, torch, *_: outcomes[torch])
    assert matrix.main(["--python", "3.10", "3.13", "--torch", "2.4", "newest"]) == 1
    said = capsys.readouterr().out
    assert "a traceback" in said and "FAILED: use" in said and said.count("ok 2.4.1") == 1
    assert matrix.main(["--python", "3.10", "3.13", "--torch", "2.4"]) == 0
    assert matrix.NO_INTERPRETER in " ".join(capsys.readouterr().out.split())
    outcomes["2.4"] = (matrix.NO_WHEEL, "")
    assert matrix.main(["--python", "3.10", "3.13", "--torch", "2.4"]) == 1
    assert "Nothing was tried." in capsys.readouterr().out


def test_a_table_has_a_cell_for_each_pair() -> None:
    results = {("3.10", "2.4"): "ok 2.4.1", ("3.11", "2.4"): matrix.NO_WHEEL}
    written = io.StringIO()
    Console(file=written, width=60).print(matrix.table_of(results, ("3.10", "3.11"), ("2.4",)))
    assert "Python 3.10 │ ok 2.4.1" in written.getvalue() and "PyTorch 2.4" in written.getvalue()
