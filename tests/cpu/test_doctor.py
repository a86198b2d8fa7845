"""``haloconv doctor`` with and without what it looks for, never with a traceback; where imports fail, in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from haloconv import jit
from haloconv.doctor.checks import UPDATE_DRIVER
from haloconv.emulator.build import compiler_version
from haloconv.jit import cache
from haloconv.jit.compile import install_command
from tests.toy_kernel import ARCH, fake_compile, toy_source
from tests.verbs import invoke

pytestmark = pytest.mark.usefixtures("without_gpu")

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RUN = "from haloconv.cli import app\napp()\n"
BLOCK_CUDA = "import sys\nsys.modules['cuda'] = None\n"
GPU_THAT_FAILS = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
"""


def _doctor(*arguments: str, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor on a machine whose GPUs are hidden; ``before`` is code that breaks something first."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "COLUMNS": "200", **variables}
    command = [sys.executable, "-c", before + RUN, "doctor", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in run.stdout + run.stderr
    return run


def _doctor_here(*arguments: object) -> Result:
    """The same in this process."""
    run = invoke("doctor", *arguments, env={"COLUMNS": "200"})
    assert run.exception is None or isinstance(run.exception, SystemExit)
    return run


def _findings(path: Path) -> tuple[dict[str, dict[str, str]], dict[str, dict]]:
    findings = json.loads(path.read_text())
    return findings["facts"], {check["name"]: check for check in findings["checks"]}


def test_a_machine_without_a_gpu_is_healthy(cache_dir: Path, tmp_path: Path) -> None:
    run = _doctor("--json", str(tmp_path / "findings.json"))
    assert run.returncode == 0, run.stdout
    facts, checks = _findings(tmp_path / "findings.json")
    assert [name for name, check in checks.items() if not check["ok"]] == []
    assert facts["versions"]["NVRTC"].startswith(f"{jit.nvrtc_info()[0]} from ")
    assert facts["cache"]["place"] == str(cache_dir / "kernels")
    assert facts["precision flags of PyTorch"]["torch.backends.cudnn.allow_tf32"] in ("True", "False")
    assert facts["environment variables"]["HALOCONV_CACHE_DIR"] == str(cache_dir)
    for section, values in facts.items():
        assert section in run.stdout
        for name in values:
            assert name in run.stdout
    assert "sm_90a" in checks["compile a kernel"]["detail"]


def test_without_cuda_core_it_tells_the_remedy(cache_dir: Path, tmp_path: Path) -> None:
    run = _doctor("--json", str(tmp_path / "findings.json"), before=BLOCK_CUDA)
    assert run.returncode == 0, run.stdout
    _, checks = _findings(tmp_path / "findings.json")
    compiling = checks["compile a kernel"]
    assert not compiling["ok"] and not compiling["needed"]
    assert compiling["remedy"] == install_command() and install_command() in README.read_text()
    assert run.stdout.count("pip install") == 1, "one remedy, once"
    assert "not ok, not needed here" in run.stdout


@pytest.mark.parametrize("before", [GPU_THAT_FAILS, GPU_THAT_FAILS + BLOCK_CUDA], ids=["no driver", "no cuda-core"])
def test_a_gpu_that_cannot_be_used_is_not_healthy(cache_dir: Path, tmp_path: Path, before: str) -> None:
    run = _doctor("--json", str(tmp_path / "findings.json"), before=before)
    assert run.returncode == 1, run.stdout
    _, checks = _findings(tmp_path / "findings.json")
    launch = checks["launch on cuda:0"]
    assert not launch["ok"] and launch["needed"] and launch["remedy"] and launch["remedy"] in run.stdout
    assert launch["remedy"] == UPDATE_DRIVER


def test_a_cache_that_cannot_be_written_is_found(cache_dir: Path, tmp_path: Path) -> None:
    cache_dir.write_text("a file where the folder should be")
    run = _doctor_here("--json", tmp_path / "findings.json")
    assert run.exit_code == 0, run.stdout
    _, checks = _findings(tmp_path / "findings.json")
    assert not checks["keep kernels on disk"]["ok"] and "HALOCONV_CACHE_DIR" in checks["keep kernels on disk"]["remedy"]


def test_a_cache_that_is_turned_off_is_said_so(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCONV_CACHE", "0")
    run = _doctor_here()
    assert run.exit_code == 0 and "turned off by HALOCONV_CACHE" in run.stdout
    assert not cache_dir.exists()


def test_clear_cache_removes_the_kernels(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(cache, "compile_source", fake_compile)
    jit.get_kernel(toy_source(), ARCH)
    assert jit.cache_size()[0] == 1
    run = _doctor_here("--clear-cache")
    assert run.exit_code == 0 and "removed 1 entries" in run.stdout
    assert jit.cache_size() == (0, 0)


@pytest.fixture
def unknown_compiler() -> Iterator[None]:
    """Which g++ there is is asked anew, and again after the test."""
    compiler_version.cache_clear()
    yield
    compiler_version.cache_clear()


@pytest.mark.usefixtures("unknown_compiler")
@pytest.mark.parametrize(
    "compiler, sentence",
    [
        (None, "does not run here: the emulator builds kernels with g++, which is not installed"),
        ("9.4.0\n", "does not run here: the emulator needs g++ 11 or newer; this is 9.4.0 9.4.0"),
        ("12.2.0\n", "runs here, with g++ 12.2.0 12.2.0"),
    ],
)
def test_it_tells_whether_the_emulator_runs(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, sentence: str
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    if compiler is not None:
        program = folder / "g++"
        program.write_text(f"#!/bin/sh\necho {compiler}")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    run = _doctor_here("--json", tmp_path / "findings.json")
    assert run.exit_code == 0, run.stdout
    facts, checks = _findings(tmp_path / "findings.json")
    assert facts["versions"]["emulator"] == sentence and sentence in run.stdout
    building = checks["g++ for the emulator"]
    assert building["ok"] is sentence.startswith("runs here") and not building["needed"]
    assert building["ok"] or building["remedy"].startswith(("sudo ", "conda install "))


def test_a_file_that_cannot_be_written_is_an_error_in_words(cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = _doctor_here("--json", tmp_path / "file" / "findings.json")
    assert run.exit_code == 2 and "cannot write" in run.stderr
