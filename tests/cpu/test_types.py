"""What `make lint` checks of types: everything but a list of modules, which only shrinks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cpu.test_budgets import MODULE_NAMES

ROOT = Path(__file__).resolve().parents[2]
UNCHECKED_AT_MOST = 14


def test_modules_that_are_not_checked_are_named_and_few() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (listed,) = re.findall(r"module = \[([^\]]*)\]\nignore_errors = true", text)
    names = re.findall(r'"([^"]+)"', listed)
    assert names == sorted(set(names)) and set(names) <= MODULE_NAMES
    assert len(names) <= UNCHECKED_AT_MOST
    assert text.count("ignore_errors") == 1 and "follow_imports" not in text


def test_ignored_errors_have_a_code_each() -> None:
    lines = [line for file in (ROOT / "haloconv").rglob("*.py") for line in file.read_text("utf-8").splitlines()]
    ignores = [line for line in lines if "# type: ignore" in line]
    assert [line for line in ignores if not re.search(r"# type: ignore\[[a-z-]+\]", line)] == []
    assert len(ignores) <= 10


def test_lint_runs_the_checker() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "$(VENV)/bin/mypy\n" in makefile[makefile.index("\nlint:") : makefile.index("\ngpu:")]
