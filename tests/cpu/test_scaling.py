"""``haloconv bench --scaling`` on processes that talk through gloo; of tiny images, whose times mean nothing."""

from __future__ import annotations

import io
import json
import runpy
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

from haloconv import strip_autograd
from haloconv.bench.costs import scaling as costs
from haloconv.bench.costs import scaling_rank
from haloconv.bench.costs.scaling import ERROR_LIMIT, Scaling, ScalingError, Workload, scaling
from haloconv.cli.bench.scaling import ScalingOrder, bench_scaling
from haloconv.distributed import group
from tests.passes import CountingBytes
from tests.ranks import fork_ranks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo to talk through"
)
TINY = Workload(rows=8, columns=16, variables=4, channels=8, batch=1, warm_up=1, steps=3, in_a_row=2)
ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_model_is_that_of_the_example() -> None:
    theirs = runpy.run_path(str(ROOT / "examples" / "sharded_unet.py"))["UNet"]
    found = []
    for model_of in (scaling_rank.UNet, theirs):
        torch.manual_seed(0)
        found.append(model_of(4, 8)(torch.randn(1, 4, 8, 16)))
    assert torch.equal(*found)


def test_rows_of_one_and_of_two_ranks(tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), width=200)
    bench_scaling(ScalingOrder(TINY, ["fp32"], ["cpu"] * 3), tmp_path, out)
    (path,) = tmp_path.glob("*-scaling.jsonl")
    one, two = [json.loads(line) for line in path.read_text().splitlines()]
    assert (one["ranks"], one["efficiency"], one["messages"]) == (1, 1.0, 0)
    assert one["error"] == 0.0 or (one["is_sharded"] and one["error"] < ERROR_LIMIT)
    assert two["is_sharded"]
    assert two["ranks"] == 2 and two["efficiency"] == one["ms"] / two["ms"] and two["peak_bytes"] is None
    assert two["in_a_row_efficiency"] == one["in_a_row_ms"] / two["in_a_row_ms"]
    assert 0 < two["error"] < ERROR_LIMIT
    a_row_of_each = 4 * 18 + 8 * 10 + 16 * 6 + 48 * 10 + 24 * 18  # channels by columns, circular padding among them
    assert (two["messages"], two["halo_bytes"]) == (5, 4 * a_row_of_each)
    assert two["torch"] == torch.__version__ and two["case"] == "unet_8_of_1x4x8x16"
    assert "LEFT 4 ranks: not measured, there are 3 GPUs" in out.file.getvalue()


@pytest.mark.parametrize("faster", [False, True])
def test_one_rank_is_the_faster_of_plain_and_sharded_images(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def together(workload: Workload, precision: str, devices: list[str], is_sharded: bool) -> list[dict]:
        asked.append((len(devices), is_sharded))
        ms = 3.0 if len(devices) > 1 else 2.0 if is_sharded is faster else 2.5
        costs_of_rank = dict.fromkeys(("error", "messages", "halo_bytes", "weight_bytes"), 0)
        return [{"ms": [9.0 - ms] * 3, "in_a_row_ms": [ms] * 2, "peak_bytes": None, **costs_of_rank} for _ in devices]

    monkeypatch.setattr(costs, "_together", together)
    one, two = scaling(TINY, "fp32", ["cpu"] * 2, [1, 2])
    assert asked == [(1, False), (1, True), (2, True)]
    assert (one.in_a_row_ms, one.is_sharded, two.in_a_row_efficiency, two.is_sharded) == (2.0, faster, 2 / 3, True)
    assert (one.ms, two.efficiency) == (7.0, 7 / 6)


def test_a_rank_that_fails_ends_all_with_its_sentence(tmp_path: Path) -> None:
    out, began = Console(file=io.StringIO(), width=200), time.monotonic()
    assert not bench_scaling(ScalingOrder(TINY, ["fp32"], ["cpu", "nowhere"]), tmp_path, out)
    assert "FAILED fp32: rank 1 of 2 exited with 1: RuntimeError: " in out.file.getvalue()
    assert "nowhere" in out.file.getvalue()
    (path,) = tmp_path.iterdir()
    assert [json.loads(line)["ranks"] for line in path.read_text().splitlines()] == [1]  # what was done is kept
    assert time.monotonic() - began < 90  # the other one would wait for two minutes


def test_a_rank_that_is_never_done_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "TIME_LIMIT_S", 0)
    with pytest.raises(ScalingError, match="^rank 0 of 1 was not done after 0 s$"):
        list(scaling(TINY, "fp32", ["cpu"], [1]))


@pytest.mark.parametrize("ranks, efficiency, error, within", [
    (1, 1.0, 1e-4, True), (2, 0.93, 1e-4, True), (2, 0.91, 1e-4, False), (4, 0.86, 1e-4, True), (4, 0.84, 1e-4, False),
    (4, 0.99, 2e-2, False),
])  # fmt: skip
def test_bars(ranks: int, efficiency: float, error: float, within: bool) -> None:
    bar = costs.EFFICIENCY_BARS.get(ranks)
    times = (1.0, 0.0, 0.5, 1.0, efficiency, bar)  # the bar is for steps in a row, not for a step alone
    assert Scaling("unet", "tf32", ranks, *times, None, error, 0, 0, 0, True).within_budget is within


def _error_without_halos(folder: str) -> None:
    """On each rank, the error where what arrives of others is taken for zeros."""
    mesh, own = init_device_mesh("cpu", (2,)), strip_autograd.split

    def zeros(message: torch.Tensor, *rest: object) -> list[torch.Tensor]:
        return own(torch.zeros_like(message), *rest)

    with patch.object(strip_autograd, "split", zeros):
        error = scaling_rank.gradient_error(4, CPU, mesh)
    (Path(folder) / str(dist.get_rank())).write_text(str(error))


def test_a_missing_halo_is_far_above_the_limit(tmp_path: Path) -> None:
    fork_ranks(_error_without_halos, (str(tmp_path),), tmp_path / "meet", 60, 2)
    assert min(float((tmp_path / str(rank)).read_text()) for rank in range(2)) > 50 * ERROR_LIMIT


def _bytes_of_a_step(folder: str) -> None:
    """On each rank, of a step on sharded images and one on plain ones: bytes outside of convolutions, agreements."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    order = {**asdict(TINY), "rows": 32, "columns": 32, "rank": dist.get_rank()}
    for where in (mesh, None):
        step = scaling_rank._step_of(order, CPU, where)
        step()
        before = group._counts((0, 1))[0]
        with CountingBytes() as counting:
            step()
        found.append((counting.bytes, group._counts((0, 1))[0] - before))
    (Path(folder) / str(dist.get_rank())).write_text(json.dumps(found))


def test_what_a_step_on_sharded_images_moves_and_how_often_ranks_wait_for_each_other(tmp_path: Path) -> None:
    """Slices whose gradients are of zeros, or a norm of elementwise operators, would make it more by a third."""
    fork_ranks(_bytes_of_a_step, (str(tmp_path),), tmp_path / "meet", 60, 2)
    for rank in range(2):
        (sharded, agreements), (plain, _) = json.loads((tmp_path / str(rank)).read_text())
        assert sharded < 0.85 * plain
        # Each way 5 convolutions, 5 norms and 2 interpolations; the end of the forward pass; weights of the head.
        assert agreements == 2 * (5 + 5 + 2) + 2
