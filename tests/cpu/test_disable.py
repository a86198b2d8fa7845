"""HALOCONV_DISABLE=1: PyTorch's own convolution runs everything, whatever was asked for, and it is said so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import haloconv
from haloconv import accelerate, env, plan
from haloconv.choose.choice import DISABLED, choose
from haloconv.cli import app
from tests.cpu.test_paths import h200
from tests.tuned import fake_gpu

same = torch.testing.assert_close


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HALOCONV_DISABLE", "1")
    monkeypatch.setattr(import_module("haloconv.changes"), "_told_disabled", set())
    env.disabled.cache_clear()
    plan.clear_plans()
    yield
    monkeypatch.undo()
    env.disabled.cache_clear()
    plan.clear_plans()


@pytest.mark.parametrize("value, off", [("1", True), ("yes", True), ("0", False), ("", False), (" Off ", False)])
def test_values_of_the_switch(monkeypatch: pytest.MonkeyPatch, disabled: None, value: str, off: bool) -> None:
    monkeypatch.setenv("HALOCONV_DISABLE", value)
    env.disabled.cache_clear()
    assert env.disabled() is off


@pytest.mark.parametrize("strict", [False, True])
def test_accelerate_changes_nothing_and_says_so_once(disabled: None, strict: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3), haloconv.Conv2d(4, 4, 3))
    with pytest.warns(RuntimeWarning, match="changes nothing: HALOCONV_DISABLE is set"):
        done = accelerate(model, strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerate(model)
    assert type(model[0]) is nn.Conv2d and len(done) == 0 and len(done.already) == 1
    assert done.summary.startswith("0 of 2 convolutions swapped") and DISABLED in str(done)
    with pytest.raises(ValueError, match="unknown family|family must be"):
        accelerate(model, family="none")


@pytest.mark.parametrize("padding", [1, (2, 0, 1, 3)])
def test_a_layer_runs_pytorchs_convolution_though_kernels_could_run(disabled: None, padding: object) -> None:
    layer = haloconv.Conv2d(16, 16, 3, padding=padding, family="direct", strict=True)
    x = torch.randn(2, 16, 12, 12, requires_grad=True)
    top, bottom, left, right = padding if isinstance(padding, tuple) else (padding,) * 4
    with h200() as kernel:
        y = layer(x)
        y.sum().backward()
    expected = nn.functional.conv2d(nn.functional.pad(x, (left, right, top, bottom)), layer.weight, layer.bias)
    same(y, expected)
    same(layer.bias.grad, torch.full((16,), y[:, 0].numel(), dtype=torch.float32))
    assert kernel.stacks == [], "a kernel was launched"
    assert DISABLED in repr(layer)


def test_the_function_runs_pytorchs_convolution(disabled: None) -> None:
    x, w = torch.randn(1, 4, 9, 9), torch.randn(8, 4, 3, 3)
    with h200() as kernel:
        y = haloconv.conv2d(x, w, family="direct", activation="relu")
    same(y, nn.functional.conv2d(x, w).relu())
    assert kernel.stacks == []


def test_nothing_is_measured_at_first_use(disabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "tunes_at_first_use", lambda: True)
    problem = plan.problem_of("fprop", (1, 4, 9, 9), (8, 4, 3, 3), plan.ConvSpec(), torch.float32, "nchw")
    with h200():
        choice = choose(problem, torch.device("cpu"))
        assert choice.reason == DISABLED and not plan.may_be_measured(choice, "auto")


def test_tune_measures_nothing_and_says_so(disabled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(tmp_path):
        report = haloconv.tune(nn.Conv2d(8, 8, 3), torch.randn(1, 8, 12, 12), directions=("fprop",))
        assert "HALOCONV_DISABLE is set: nothing was measured." in report.notes
        assert [row.family for row in report.rows] in ([], ["aten"]) and not (tmp_path / "records").exists()


def test_export_refuses(disabled: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="HALOCONV_DISABLE is set.*unset it to export kernels"):
        haloconv.export(tmp_path / "layer.py", arch="sm_80")


def test_run_checks_nothing_and_says_why(disabled: None, tmp_path: Path) -> None:
    file = tmp_path / "layer.py"
    file.write_text(
        "import torch\nModel = lambda: torch.nn.Conv2d(3, 4, 3)\n"
        "get_inputs = lambda: [torch.ones(1, 3, 9, 9)]\nget_init_inputs = lambda: []\n"
    )
    with pytest.warns(RuntimeWarning, match="accelerate changes nothing"):
        run = CliRunner().invoke(app, ["run", str(file), "--device", "cpu"])
    assert run.exit_code == 2 and "HALOCONV_DISABLE is set" in run.output
