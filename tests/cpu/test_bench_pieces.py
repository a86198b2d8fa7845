"""``haloconv bench`` run in pieces for one family: what it refuses, how pieces add up, who the baseline is."""

from __future__ import annotations

import pytest
import torch

from haloconv import plan
from haloconv.bench import trial
from haloconv.cli.bench import suite as bench_suite
from haloconv.precision import torch_precision
from tests.cpu.test_bench import CPU, QUICK, SMALL, console, lines_of, order


def test_refused_rows_are_said_and_not_timed(tmp_path):
    out = console()
    mixed = order(directions=["fprop", "step"], family="halo_sm90", precisions=["fp16"])
    with pytest.warns(RuntimeWarning, match="our kernels run on CUDA devices"):
        assert bench_suite.bench_suite(mixed, CPU, tmp_path, out)
    assert [row["direction"] for row in lines_of(tmp_path / "latest.jsonl")] == ["step"]
    text = " ".join(out.file.getvalue().split())
    assert "small fprop fp16 nchw: halo_sm90 does not take it: the tensors are on cpu" in text
    assert "1 of 1 rows passed" in text


def test_a_run_without_a_row_is_no_success(tmp_path):
    out = console()
    assert not bench_suite.bench_suite(order(directions=["fprop"], family="direct"), CPU, tmp_path / "results", out)
    assert "Nothing was checked." in out.file.getvalue() and not (tmp_path / "results").exists()


def test_runs_in_pieces_add_up_to_one_latest(tmp_path):
    for precision, layout in (("tf32", "nchw"), ("fp16", "nhwc"), ("tf32", "nchw")):
        piece = order(directions=["fprop", "dgrad"], precisions=[precision], layouts=[layout])
        assert bench_suite.bench_suite(piece, CPU, tmp_path, console())
    latest = [(row["precision"], row["layout"], row["direction"]) for row in lines_of(tmp_path / "latest.jsonl")]
    kinds = (("fp16", "nhwc"), ("tf32", "nchw"))
    assert sorted(latest) == [(*kind, direction) for kind in kinds for direction in ("dgrad", "fprop")]


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_baseline_has_our_precision_and_layout(precision, layout, monkeypatch):
    """While PyTorch runs, TF32 is on exactly for tf32, its operands have the dtype and the layout asked for."""
    seen = []
    theirs = torch.conv2d

    def watched(x, w, *rest):
        seen.append((torch_precision(), x.dtype, *(plan.layout_of(tensor) for tensor in (x, w))))
        return theirs(x, w, *rest)

    monkeypatch.setattr(torch, "conv2d", watched)
    layer = SMALL.layer(precision, layout, "aten", CPU)
    row = trial.try_step(layer, "fprop", QUICK)
    dtype = {"tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert set(seen) == {("tf32" if precision == "tf32" else "ieee", dtype, layout, layout)}
    assert (row.precision, row.layout) == (precision, layout)
