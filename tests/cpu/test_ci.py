"""Under CI=true nothing that matters is left out in silence: without g++ the emulator's tests fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.conftest import MAY_BE_SKIPPED
from tests.fuzz.campaign import SEED, commit_seed
from tests.parts import faults

ROOT = Path(__file__).resolve().parents[2]
ON_THE_EMULATOR = (
    "test_emulator_families.py::test_the_list_reaches_everything",
    "test_emulator_conformance.py::test_vectors_are_of_cases_that_exist",
    f"test_emulator_mutations.py::test_planted_fault_is_caught[{faults(commit_seed())[0].name}]",
)


@pytest.mark.parametrize(("ci", "code", "ended"), [("true", 1, "3 errors"), ("", 0, "3 skipped")])
def test_without_a_compiler_the_emulators_tests_fail_in_ci(ci: str, code: int, ended: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *(f"tests/cpu/{name}" for name in ON_THE_EMULATOR)]
    environment = {**os.environ, "CI": ci, "PATH": str(tmp_path), SEED: str(commit_seed())}  # git is not there either
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code and ended in done.stdout, done.stdout + done.stderr
    assert ("left out, which CI does not allow: " in done.stdout) == bool(ci)
    assert "g++, which is not installed" in done.stdout


def test_no_reason_of_the_emulator_may_be_one_for_leaving_a_test_out() -> None:
    assert not "the emulator builds kernels with g++, which is not installed".startswith(MAY_BE_SKIPPED)
    assert not "no emulator: ".startswith(MAY_BE_SKIPPED) and all(MAY_BE_SKIPPED)
