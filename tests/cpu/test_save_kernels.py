"""haloconv tune --save-kernels: what a container takes along, and that it needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import haloconv
from haloconv import env, jit, plan
from haloconv.choose import records
from haloconv.cli import app
from haloconv.cli import tune as tune_verb
from haloconv.device import Device, set_stand_in
from haloconv.jit import TENSOR_MAP_BYTES, KernelSource, cache
from haloconv.report import Report
from haloconv.tune.problems import problems_of
from haloconv.tune.saved import save
from tests.cpu.test_paths import H200, Noting
from tests.toy_kernel import fake_compile
from tests.tuned import forget, record

MODEL = """
import torch
Model = lambda: torch.nn.Conv2d(16, 16, 3, padding=1)
get_inputs = lambda: [torch.ones(1, 16, 12, 12)]
get_init_inputs = lambda: []
"""


@pytest.fixture
def idle_gpu(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose kernels are compiled by the toy compiler and do nothing; nothing is in a cache."""

    def load(source: KernelSource, smem_bytes: int) -> Noting:
        jit.get_kernel(source, H200.arch)
        return Noting()

    monkeypatch.setattr(cache, "compile_source", fake_compile)
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv(env.RECORDS_DIR, str(tmp_path / "records"))
    cache._versions_in.cache_clear()
    set_stand_in(Device(H200, load, lambda *_, **__: bytes(TENSOR_MAP_BYTES)))
    forget()
    yield
    set_stand_in(None)
    forget()
    cache._versions_in.cache_clear()


def no_compiler(*_: object) -> None:
    raise AssertionError("a kernel is compiled")


def test_what_was_saved_runs_without_a_compiler(
    idle_gpu: None, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1, groups=16))
    x = torch.ones(1, 16, 12, 12, requires_grad=True)
    posed = problems_of(model, x)
    chosen = [record(each.problem, "direct", facts=H200) for each in posed]
    records.write_records(records.records_path(H200.name), chosen, H200)
    image = tmp_path / "image"
    saved = save(posed, image)
    assert saved.kernels == len(list((image / "kernels").iterdir())) >= 4 and saved.records == len(set(chosen))

    jit.clear_cache()
    forget()
    for name, value in ((env.CACHE_DIR, f"{cache_dir}{os.pathsep}{image}"), (env.RECORDS_DIR, str(image / "records"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(env.FROZEN, "1")
    monkeypatch.setattr(cache, "compile_source", no_compiler)
    haloconv.accelerate(model)
    model(x).sum().backward()
    families = {each.choice.family for each in plan._plans.values()}
    assert families == {"direct"} and len(plan._plans) == len(posed)


@pytest.fixture
def tuned(idle_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A problem file whose tuning measures nothing."""
    monkeypatch.setattr(tune_verb, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(tune_verb, "tune_problems", lambda title, posed, options: Report(title, {}))
    file = tmp_path / "layer.py"
    file.write_text(MODEL)
    return file


def test_the_command_writes_kernels_and_records(tuned: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["tune", str(tuned), "--save-kernels", str(tmp_path / "image")])
    assert run.exit_code == 0, run.output
    kernels = len(list((tmp_path / "image" / "kernels").iterdir()))
    assert kernels >= 2 and f"wrote {kernels} kernels and 0 records to" in run.output


def test_a_folder_that_cannot_be_written_is_said_so(tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "image").write_text("a file where the folder should be")
    run = CliRunner().invoke(app, ["tune", str(tuned), "--save-kernels", str(tmp_path / "image")])
    assert run.exit_code == 2 and "cannot save kernels to" in run.output
