"""CONTRIBUTING's five steps, taken for a toy family in a copy of the package: everything there is knows of it then."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "toy_family"
FOLDER = ("__init__.py", "family.py", "pointwise.py", "pointwise.cu")
LIMIT_S = 300


def add_family(checkout: Path) -> None:
    """The steps that write: a folder of twins, and one line of the registry with its import."""
    folder = checkout / "haloconv" / "families" / "toy"
    folder.mkdir()
    for name in FOLDER:
        shutil.copy(TOY / name, folder / name)
    registry = checkout / "haloconv" / "families" / "__init__.py"
    text = registry.read_text("utf-8")
    imported = "from haloconv.families.halo_sm90.family import HaloSm90Family\n"
    last = "    DepthwiseFamily(),\n"
    assert text.count(imported) == text.count(last) == 1
    text = text.replace(imported, f"{imported}from haloconv.families.toy.family import ToyFamily\n")
    registry.write_text(text.replace(last, f"{last}    ToyFamily(),\n"), "utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a process says that runs in a checkout with the family."""
    checkout = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "haloconv", checkout / "haloconv", ignore=shutil.ignore_patterns("__pycache__"))
    add_family(checkout)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)])}
    command = [sys.executable, "-m", "tests.toy_family.visit"]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


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


def test_its_stamp_covers_twins_headers_and_the_launcher(found: dict) -> None:
    assert {"pointwise.cu", "pointwise.py", "numeric.cuh", "launch.py", "common.py"} <= set(found["stamped"])
    assert "direct.py" not in found["stamped"]


def test_its_sources_compile(found: dict) -> None:
    assert found["compiled"] == ["toy_pointwise"] * 2


def test_the_steps_are_five_and_name_what_there_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text[text.index("## Add a kernel in five steps") : text.index("## Releases")]
    assert re.findall(r"^(\d)\. \*\*", section, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "`tests/toy_family`" in section
    for place in re.findall(r"`((?:haloconv|tests|tools|docs|benchmarks)/[\w/.]+)`", section):
        assert "NAME" in place or (ROOT / place).exists(), place
