"""CONTRIBUTING's five steps, taken for a toy family in a copy of the package: everything there is knows of it then."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from haloconv.families import OWN

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "toy_family"
FOLDER = ("__init__.py", "family.py", "pointwise.py", "pointwise.cu")
LIMIT_S = 300
LAYER = """
import torch

Model = torch.nn.Conv2d


def get_init_inputs():
    return [5, 6, 1]


def get_inputs():
    return [torch.randn(2, 5, 4, 7)]
"""


def add_family(checkout: Path) -> None:
    """The steps that write: a folder of twins, and one line of the registry."""
    folder = checkout / "haloconv" / "families" / "toy"
    folder.mkdir()
    for name in FOLDER:
        shutil.copy(TOY / name, folder / name)
    registry = checkout / "haloconv" / "families" / "__init__.py"
    text = registry.read_text("utf-8")
    last = '    "depthwise": "DepthwiseFamily",\n'
    assert text.count(last) == 1
    registry.write_text(text.replace(last, f'{last}    "toy": "ToyFamily",\n'), "utf-8")


def run_in(checkout: Path, *command: str) -> str:
    """What a module of the checkout prints, run as a program there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the family."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "haloconv", folder / "haloconv", ignore=shutil.ignore_patterns("__pycache__"))
    add_family(folder)
    return folder


@pytest.fixture(scope="module")
def found(checkout: Path) -> dict:
    """What a process says that runs in the checkout."""
    return json.loads(run_in(checkout, "tests.toy_family.visit"))


def test_the_registry_is_all_that_has_to_know_of_it(found: dict) -> None:
    assert found["registered"] and found["kernels"] == ["toy/pointwise"]


def test_it_is_chosen_where_it_takes_the_problem(found: dict) -> None:
    assert found["chosen"] == "toy" and found["other"] not in ("toy", "aten")
    assert found["refused"] == "toy takes filters of one pixel, stride 1, no padding, no groups"
    assert "toy" in found["repr"]


def test_rows_and_the_fuzzer_run_its_kernel(found: dict) -> None:
    """Every config, on exact integers and random values, in several storages, against the reference."""
    assert found["fuzzed"] == ["toy/pointwise"] * 3
    passed, *named, has_source = found["row"]
    assert passed and has_source and named[:2] == ["toy", "toy/pointwise"] and named[2].startswith("threads")


def test_a_record_names_it_and_auto_follows(found: dict) -> None:
    *kept, reason = found["recorded"]
    assert kept == ["toy", "toy/pointwise", True, True, "toy", "toy/pointwise", True]
    assert reason.startswith("tuned: 2.00x PyTorch")


def test_the_command_line_runs_it_by_name(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(LAYER)
    options = ("--device", "emulator", "--family", "toy", "--json", str(tmp_path / "rows.json"))
    run_in(checkout, "haloconv", "run", *options, str(tmp_path / "layer.py"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    (ours,) = (row for row in rows if row["direction"] == "fprop")
    assert (ours["family"], ours["kernel"], ours["complaint"]) == ("toy", "toy/pointwise", None)


def test_its_stamp_covers_twins_headers_and_the_launcher(found: dict) -> None:
    assert {"pointwise.cu", "pointwise.py", "numeric.cuh", "launch.py", "common.py"} <= set(found["stamped"])
    assert "direct.py" not in found["stamped"]


def test_its_sources_compile(found: dict) -> None:
    assert found["compiled"] == ["toy_pointwise"] * 2


def steps() -> str:
    """The section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    return text[text.index("## Add a kernel in five steps") : text.index("## Releases")]


def families_named(file: Path) -> set[str]:
    """The families that strings of a file name, or kernels of which they name."""
    strings = (node.value for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Constant))
    return {each.partition("/")[0] for each in strings if isinstance(each, str)} & set(OWN)


def test_the_steps_name_every_file_that_lists_the_families() -> None:
    """A file with all of them, or all but one, is one that a new family goes into; but those of older formats."""
    files = [file for folder in ("haloconv", "tests", "tools") for file in (ROOT / folder).rglob("*.py")]
    listing = {each.relative_to(ROOT).as_posix() for each in files if len(families_named(each)) >= len(OWN) - 1}
    assert {"tests/families.py", "haloconv/choose/rules.py"} <= listing
    older = {"haloconv/choose/formats.py", "tests/cpu/test_record_formats.py"}
    assert older < listing and [each for each in sorted(listing - older) if f"`{each}`" not in steps()] == []


def test_the_modules_that_are_found_by_name_are_there() -> None:
    assert "`tests/emulated_NAME.py`" in steps() and "`tests/mutations`" in steps()
    faults = [file.stem for file in (ROOT / "tests" / "mutations").glob("*.py")]
    assert [name for name in OWN if not any(stem.startswith(name) for stem in faults)] == []


def test_the_steps_are_five_and_name_what_there_is() -> None:
    section = steps()
    assert re.findall(r"^(\d)\. \*\*", section, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "`tests/toy_family`" in section
    for place in re.findall(r"`((?:haloconv|tests|tools|docs|benchmarks)/[\w/.]+)`", section):
        assert "NAME" in place or (ROOT / place).exists(), place
