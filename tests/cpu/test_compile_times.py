"""``haloconv bench --compile-time --family``: the sources that stand for a family, each compiled once."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from haloconv.bench.costs import kernels as costs
from haloconv.cli import app
from haloconv.cli.bench import costs as bench_costs
from haloconv.families import FAMILIES
from haloconv.jit import CompileError, KernelSource

CODE = 'extern "C" __global__ void {name}(float* y) {{ y[threadIdx.x] = {value}; }}'
SMALL, OTHER = (
    KernelSource("planted", name, (("VALUE", value),), CODE.format(name=name, value=value))
    for name, value in (("small", 1), ("other", 2))
)


def test_each_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES["direct"], "sources", lambda: [SMALL, OTHER])
    times = costs.source_times("direct", "sm_90a", jobs=1)
    assert (times.what, times.sources, times.jobs, times.budget_ms) == ("direct", 2, 1, 1500.0)
    assert 0 < times.median_ms <= times.worst_ms and times.worst in ("small VALUE=1", "other VALUE=2")


def test_a_source_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = KernelSource("planted", "wrong", (), "no kernel")
    monkeypatch.setattr(FAMILIES["direct"], "sources", lambda: [SMALL, wrong])
    with pytest.raises(CompileError, match="wrong"):
        costs.source_times("direct", "sm_90a", jobs=1)


@pytest.mark.parametrize(("worst_ms", "within"), [(1500.0, True), (1500.1, False)])
def test_the_slowest_decides(worst_ms: float, within: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = costs.SourceTimes("halo_sm90", 300, 800.0, worst_ms, "halo_sm90 RUN=128", 4)
    monkeypatch.setattr(bench_costs, "source_times", lambda family, arch: times)
    out = Console(file=io.StringIO(), width=200)
    assert bench_costs.bench_sources("halo_sm90", "sm_90a", tmp_path, out) is within
    said = out.file.getvalue()
    assert "300 sources, 4 at a time: median 800 ms" in said and ("within" if within else "OVER") in said
    (path,) = tmp_path.glob("*-compile-time.jsonl")
    row = json.loads(path.read_text())
    assert (row["what"], row["worst_ms"], row["within_budget"]) == ("halo_sm90", worst_ms, within) and row["commit"]


def test_the_verb_times_a_family_or_the_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(bench_costs, "device_facts", lambda index: SimpleNamespace(arch="sm_90a"))
    monkeypatch.setattr(bench_costs, "bench_sources", lambda family, arch, *rest: asked.append((family, arch)))
    monkeypatch.setattr(
        bench_costs, "bench_compile_time", lambda cases, *rest: asked.append([one.name for one in cases])
    )
    for options in ([], ["--family", "halo_sm90"]):
        CliRunner().invoke(app, ["bench", "--compile-time", *options, "--results", str(tmp_path)])
    assert asked == [["A", "B", "C"], ("halo_sm90", "sm_90a")]
    refused = CliRunner().invoke(app, ["bench", "--compile-time", "--family", "aten", "--results", str(tmp_path)])
    assert refused.exit_code == 2 and "aten has no kernels to compile" in refused.output
