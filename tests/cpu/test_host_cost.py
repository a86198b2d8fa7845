"""``haloconv bench --host-cost``: calls and training steps of both sides; without a GPU, what can be told of ours."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from haloconv.bench.costs import host_cost
from haloconv.cli import app
from haloconv.cli.bench import costs as bench_costs
from haloconv.families import OWN

CPU = torch.device("cpu")


def test_host_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "ROUNDS", 1)
    out = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(bench_costs, "host_costs", lambda device: host_cost.host_costs(device, repeats=5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # PyTorch runs the layers, for want of a GPU
        bench_costs.bench_host_cost(CPU, tmp_path, out)
    (path,) = tmp_path.glob("*-host-cost.jsonl")
    no_grad, with_grad, inference, step = [json.loads(line) for line in path.read_text().splitlines()]
    assert (inference["what"], step["what"]) == ("direct, inference", "direct, training step")
    assert inference["budget_us"] is step["budget_us"] is None and step["aten_us"] > inference["aten_us"]
    assert (no_grad["what"], no_grad["budget_us"]) == ("F.conv2d, no grad", 12.0)
    assert (with_grad["what"], with_grad["budget_us"]) == ("nn.Conv2d, with grad", 25.0)
    assert min(no_grad["aten_us"], no_grad["haloconv_us"], with_grad["aten_us"], with_grad["haloconv_us"]) > 1
    assert no_grad["torch"] == torch.__version__ and "F.conv2d, no grad" in out.file.getvalue()


def test_host_costs_without_a_gpu_are_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "ROUNDS", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_costs, "own_host_costs", lambda: host_cost.own_host_costs(repeats=3))
    result = CliRunner().invoke(app, ["bench", "--host-cost", "--results", str(tmp_path)])
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "Not measured: the driver's part of a launch, and PyTorch's side" in said
    families = {each.family for each in host_cost.SAMPLES}
    assert all(f"{each}, {call}" in said for each in families for call in ("inference", "training step"))
    assert families <= set(OWN) and not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("aten, ours, within", [(10, 11, False), (14, 13, True), (14, 15, False), (8, 12.5, False)])
def test_host_bar_is_pytorch_in_the_same_run(aten: float, ours: float, within: bool) -> None:
    assert host_cost.HostCost("call", aten, ours, 12.0).within_budget is within
