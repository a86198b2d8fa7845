"""Layers need PyTorch, filelock and platformdirs; what needs a package of the extra ``cli`` says how to get it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import haloconv
from haloconv import __main__, extras
from haloconv.bench.suite import tomllib
from haloconv.report import Report
from haloconv.report.changes import as_text
from tests.cpu.test_budgets import MODULES, PACKAGE

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SENTENCE = r'{} needs {}, which (is|are) not installed: pip install "haloconv\[cli\]"'


def names(requirements: list[str]) -> set[str]:
    return {Requirement(each).name for each in requirements}


def test_the_bare_package_needs_little_and_the_extra_brings_the_rest() -> None:
    assert names(PROJECT["dependencies"]) == {"torch", "filelock", "platformdirs", "tomli"}
    assert names(PROJECT["optional-dependencies"]["cli"]) == set(extras.CLI)
    for extra in ("gpu", "gpu-cu12"):
        assert names(PROJECT["optional-dependencies"][extra]) == {"cuda-core"}


def test_the_command_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROJECT["scripts"] == {"haloconv": "haloconv.__main__:main"}
    for package in extras.CLI:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as raised:
        __main__.main()
    said = capsys.readouterr()
    assert raised.value.code == 2 and not said.out and said.err.count("\n") == 1
    assert re.search(SENTENCE.format("error: the command line", "typer, rich, jinja2, matplotlib"), said.err)


def test_the_command_with_its_packages_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["haloconv", "--help"])
    with pytest.raises(SystemExit) as raised:
        __main__.main()
    assert raised.value.code == 0 and "doctor" in capsys.readouterr().out


def test_an_export_and_a_page_name_what_they_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=SENTENCE.format("haloconv.export", "jinja2")):
        haloconv.export(tmp_path / "model.py")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=SENTENCE.format("a page", "jinja2, matplotlib")):
        Report("x", {"gpu": "none"}).to_html()


def test_a_report_without_other_packages_folds_long_cells() -> None:
    lines = [("a.layer." * 30, "9, " * 60, "set anew: " * 9, "a reason " * 40), ("b", "2", "left", "none")]
    text = as_text("2 of 2", lines)
    assert text.startswith("2 of 2\n\nlayer") and max(map(len, text.splitlines())) <= 160
    assert text.count("reason") == 40 and text.count("a.layer.") >= 25
    assert re.search(r"^b +2 +left +none$", text, re.MULTILINE)
    assert as_text("0 of 0", []) == "0 of 0"


@pytest.mark.parametrize("package", extras.CLI)
def test_only_the_command_line_imports_them_at_the_top(package: str) -> None:
    """Besides, what the command line alone uses: haloconv.bench."""
    pattern = re.compile(rf"^(import|from) {package}\b", re.MULTILINE)
    found = {file.relative_to(PACKAGE).parts[0] for file in MODULES if pattern.search(file.read_text("utf-8"))}
    assert found <= {"cli", "bench"}
