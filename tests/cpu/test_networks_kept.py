"""Rows of networks are kept as they are measured, so that a bench that is cut short goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from haloconv.bench import trial
from haloconv.bench.layer import Layer
from haloconv.bench.networks import network
from haloconv.bench.networks.network import Course, Effort, NetworkCase, Setting, bench_network
from haloconv.report import Row

CPU, QUICK = torch.device("cpu"), Effort(trial.Budget(seconds=0.0, min_runs=1), tune=False)


def test_rows_are_kept_one_by_one_and_go_on_where_they_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What raises in the middle loses nothing; what is left alone is measured then, and nothing behind the deadline."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def Model():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3))\n"
        "def get_inputs():\n    return [torch.randn(2, 3, 9, 9)]\ndef get_init_inputs():\n    return []\n"
    )
    setting = Setting(NetworkCase("net", str(tmp_path / "net.py")), "fp32", "nchw")
    kept: list[Row] = []
    try_step = network.try_step

    def fails_at_the_last_layer(layer: Layer, step: str, budget: trial.Budget) -> Row:
        if layer.name == "net.2":
            raise KeyboardInterrupt
        return try_step(layer, step, budget)

    monkeypatch.setattr(network, "try_step", fails_at_the_last_layer)
    with pytest.raises(KeyboardInterrupt):
        bench_network(setting, QUICK, CPU, Course(keep=kept.append))
    names = [(row.case, row.direction) for row in kept]
    assert names[:2] == [("net (model)", "forward"), ("net (model)", "step")] and len(names) == 5
    assert {row.layout for row in kept} == {"nchw"}

    monkeypatch.setattr(network, "try_step", try_step)
    monkeypatch.setattr(network, "try_model", lambda *_: pytest.fail("no row of the whole is wanted"))
    left = [("net.2", step) for step in ("fprop", "dgrad", "wgrad", "bgrad")]
    outcome = bench_network(setting, QUICK, CPU, Course(wanted=left))
    assert sorted((row.case, row.direction) for row in outcome.rows) == sorted(left) and outcome.left == 0
    late = bench_network(setting, QUICK, CPU, Course(wanted=left, deadline=0.0))
    assert late.rows == [] and late.left == 4
