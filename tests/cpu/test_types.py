"""What `make lint` checks of types: every module of the package, with few ignored lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OF_OTHERS = {"cuda.*", "timm.*", "torchvision.*", "tomli.*"}  # packages that need not be there


def test_every_module_is_checked() -> None:
    """No module of ours is left out or checked less than the others."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    assert told["files"] == ["haloconv"] and "exclude" not in told
    assert told["check_untyped_defs"] and told["disallow_untyped_defs"]
    assert not {"ignore_errors", "follow_imports", "disable_error_code"} & told.keys()
    (others,) = told["overrides"]
    assert others == {"module": others["module"], "ignore_missing_imports": True}
    assert set(others["module"]) == OF_OTHERS


def test_ignored_errors_have_a_code_each() -> None:
    lines = [line for file in (ROOT / "haloconv").rglob("*.py") for line in file.read_text("utf-8").splitlines()]
    assert [line for line in lines if line.startswith("# mypy:")] == []
    ignores = [line for line in lines if "# type: ignore" in line]
    assert [line for line in ignores if not re.search(r"# type: ignore\[[a-z-]+\]", line)] == []
    assert len(ignores) <= 10


def test_lint_runs_the_checker() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "$(VENV)/bin/mypy\n" in makefile[makefile.index("\nlint:") : makefile.index("\ngpu:")]
