"""What `make lint` checks of types: the package, the tools and the tests that CI cannot run, with few ignored lines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
STRICT = ("check_untyped_defs", "disallow_untyped_defs", "disallow_any_generics", "warn_return_any", "strict_equality")
# Packages that need not be there, or have no types, and the family that stands in a copy of the package alone.
OF_OTHERS = {
    "cuda.*", "timm.*", "torchvision.*", "tomli.*", "xdist.*", "diffusers.*", "segmentation_models_pytorch.*",
    "haloconv.families.toy.*",
}  # fmt: skip
# Of tests and tools: what may be left out of the check, for the reasons in pyproject.toml.
RELAXED = {"disallow_any_generics": False, "warn_return_any": False, "disable_error_code": ["union-attr"]}
AS_OTHERS_WRITE = {"disallow_untyped_defs": False, "disable_error_code": ["call-overload"]}


def test_every_module_is_checked() -> None:
    """No module of the package is left out or checked less than the others; of the tests those that CI runs are."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    assert told["files"] == ["haloconv", "tests", "tools"] and told["exclude"] == ["^tests/cpu/"]
    assert all(told[name] for name in STRICT)
    assert not {"ignore_errors", "follow_imports", "disable_error_code"} & told.keys()
    others, ours, foreign = told["overrides"]
    assert others == {"module": others["module"], "ignore_missing_imports": True}
    assert set(others["module"]) == OF_OTHERS
    assert ours == {"module": ["tests.*", "tools.*"], **RELAXED}
    assert foreign == {"module": ["tests.problems.*", "tests.timm_layers"], **AS_OTHERS_WRITE}


def test_ignored_errors_have_a_code_each() -> None:
    """Ten in the package, and two in the rest that is checked."""
    for folders, most in ((("haloconv",), 10), (("tests", "tools"), 2)):
        files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file.parent.name != "cpu"]
        lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
        assert [line for line in lines if line.startswith("# mypy:")] == []
        ignores = [line for line in lines if "# type: ignore" in line]
        assert [line for line in ignores if not re.search(r"# type: ignore\[[a-z-]+\]", line)] == []
        assert len(ignores) <= most, folders


def test_lint_runs_the_checker() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "$(VENV)/bin/mypy\n" in makefile[makefile.index("\nlint:") : makefile.index("\ngpu:")]


def test_a_call_in_a_gpu_test_is_checked(tmp_path: Path) -> None:
    """An argument that is missing where only a GPU would notice it."""
    file, given = "tests/gpu/runs.py", "forced(subject.name, run.shape):"
    text = (ROOT / file).read_text("utf-8")
    assert given in text
    wrong = tmp_path / "runs.py"
    wrong.write_text(text.replace(given, "forced(run.shape):"), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--shadow-file", file, str(wrong), file]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert re.search(r"runs\.py:\d+: error: Missing positional argument .*\[call-arg\]", ended.stdout), ended.stdout


WELL_TYPED = """
import torch

import haloconv

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
report = haloconv.accelerate(model, precision="tf32", family="auto")
weight: torch.Tensor = report[0].module.weight
names: list[str] = [swap.name for swap in report[:1]] + [left.reason for left in report.left]
fused = haloconv.fuse(model)
told: str = fused[0].expected
chains: list[torch.nn.Module] = [chain.module for chain in fused]
y: torch.Tensor = haloconv.conv2d(torch.randn(1, 3, 8, 8), weight, activation="relu", precision="ieee")
"""
WRONGLY_TYPED = """
import torch

import haloconv

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
haloconv.accelerate(model)[0].weight  # error: [attr-defined]
haloconv.accelerate(model)[:1].module  # error: [attr-defined]
haloconv.fuse(model)[0].chain  # error: [attr-defined]
haloconv.accelerate(model, precision="fp32")  # error: [arg-type]
"""


def test_what_users_write_is_checked(tmp_path: Path) -> None:
    """mypy passes what is right and refuses each line that is not."""
    (tmp_path / "well_typed.py").write_text(WELL_TYPED)
    (tmp_path / "wrongly_typed.py").write_text(WRONGLY_TYPED)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *map(str, tmp_path.glob("*.py"))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    found = [re.fullmatch(r".*?(\w+\.py):(\d+): error: .*\[([a-z-]+)\]", line) for line in ended.stdout.splitlines()]
    expected = [
        ("wrongly_typed.py", str(number), line.partition("# error: [")[2].rstrip("]"))
        for number, line in enumerate(WRONGLY_TYPED.splitlines(), 1)
        if "# error" in line
    ]
    assert sorted(each.groups() for each in found if each) == sorted(expected), ended.stdout + ended.stderr
