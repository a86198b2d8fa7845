"""Rows of networks are kept as they are measured, so that a bench that is cut short goes on where it was."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from haloconv.bench import trial
from haloconv.bench.layer import Layer
from haloconv.bench.networks import network
from haloconv.bench.networks.network import Effort, NetworkCase, RunControl, Setting, bench_network
from haloconv.bench.results import read_rows
from haloconv.cli.bench import models
from haloconv.report import Row

CPU, QUICK = torch.device("cpu"), Effort(trial.Budget(seconds=0.0, min_runs=1), tune=False)


@pytest.fixture
def net(tmp_path: Path) -> NetworkCase:
    """Two layers; the first has no gradient of the image, the second one of its bias, too."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def Model():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3))\n"
        "def get_inputs():\n    return [torch.randn(2, 3, 9, 9)]\ndef get_init_inputs():\n    return []\n"
    )
    return NetworkCase("net", str(tmp_path / "net.py"))


def is_stopped_at_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    try_step = network.try_step

    def stopped(layer: Layer, step: str, budget: trial.Budget) -> Row:
        if layer.name == "net.2":
            raise KeyboardInterrupt
        return try_step(layer, step, budget)

    monkeypatch.setattr(network, "try_step", stopped)


LEFT = [("net.2", step) for step in ("fprop", "dgrad", "wgrad", "bgrad")]


def test_rows_are_kept_one_by_one(net: NetworkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    is_stopped_at_the_last_layer(monkeypatch)
    kept: list[Row] = []
    with pytest.raises(KeyboardInterrupt):
        bench_network(Setting(net, "fp32", "nchw"), QUICK, CPU, RunControl(keep=kept.append))
    names = [(row.case, row.direction) for row in kept]
    assert names[:2] == [("net (model)", "forward"), ("net (model)", "step")] and len(names) == 5
    assert {row.layout for row in kept} == {"nchw"}


def test_what_is_wanted_alone_is_measured_before_the_deadline(
    net: NetworkCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(net, "fp32", "nchw")
    monkeypatch.setattr(network, "try_model", lambda *_: pytest.fail("no row of the whole is wanted"))
    outcome = bench_network(setting, QUICK, CPU, RunControl(wanted=LEFT))
    assert sorted((row.case, row.direction) for row in outcome.rows) == sorted(LEFT) and outcome.left == 0
    late = bench_network(setting, QUICK, CPU, RunControl(wanted=LEFT, deadline=0.0))
    assert late.rows == [] and late.left == 4


def test_a_bench_that_was_stopped_goes_on(net: NetworkCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, console = tmp_path / "rows", Console(file=io.StringIO(), width=132)
    order = models.NetworkOrder([net], ["fp32"], ["nchw"], QUICK)
    with monkeypatch.context() as patch:
        is_stopped_at_the_last_layer(patch)
        with pytest.raises(KeyboardInterrupt):
            models.bench_models(order, [CPU], folder, console)
    assert len(read_rows(folder / "latest-models.jsonl")) == 5
    models.bench_models(replace(order, only={("net", "fp32", "nchw"): LEFT}), [CPU], folder, console)
    rows = read_rows(folder / "latest-models.jsonl")
    assert len(rows) == 9 and {(row["case"], row["direction"]) for row in rows} > set(LEFT)
