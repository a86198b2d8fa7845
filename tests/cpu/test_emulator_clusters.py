"""Clusters on the emulator: reads of a peer's shared memory between two cluster barriers, and what breaks the rules."""

from __future__ import annotations

import pytest
import torch

from haloconv import emulator
from haloconv.jit.launch import LaunchShape
from tests.toy_kernels import OUT, Result, only, toy

pytestmark = [
    pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available())),
    pytest.mark.usefixtures("emulator_cache", "optimised"),
]

_USES = "using namespace hc::ptx;"
_THREADS, _BLOCKS, _CLUSTER = 32, 4, 2
_WRITE = "smem[t] = 100 * blockIdx.x + t;"
_PEER = "*peer_shared(smem + t, cluster_rank() ^ 1);"
_READ = f"p.out[32 * (blockIdx.x % 2) + t] = {_PEER}"


def run(body: str, seed: int = 0, blocks: int = _CLUSTER, **options: object) -> Result:
    return Result(toy(body, _USES), LaunchShape(blocks, _THREADS, 1024, _CLUSTER), seed=seed, **options)


@pytest.mark.parametrize("seed", range(4))
def test_a_peers_memory_is_read_between_two_barriers(seed: int) -> None:
    result = run(f"{_WRITE} cluster_sync(); {_READ} cluster_sync();", seed)
    assert result.error is None
    assert result.out.tolist() == [100 + i for i in range(32)] + list(range(32))


def test_each_cluster_has_blocks_of_its_own() -> None:
    body = f"{_WRITE} cluster_sync(); if (t < 16) p.out[16 * blockIdx.x + t] = {_PEER} cluster_sync();"
    result = run(body, blocks=_BLOCKS)
    assert result.error is None
    assert torch.equal(result.out.view(4, 16)[:, 0], torch.tensor([100, 0, 300, 200], dtype=torch.int32))


def test_a_block_is_its_own_peer_and_a_launch_without_clusters_has_one() -> None:
    body = "smem[t] = t; cluster_sync(); p.out[t] = *peer_shared(smem + t, cluster_rank()); cluster_sync();"
    assert run(body).out[:32].tolist() == list(range(32))
    alone = Result(toy(body, _USES), LaunchShape(1, _THREADS, 1024))
    assert alone.error is None and alone.out[:32].tolist() == list(range(32))


def test_threads_that_left_are_not_waited_for() -> None:
    result = run(f"{_WRITE} __syncwarp(); if (t >= 16) return; cluster_sync(); {_READ} cluster_sync();")
    assert result.error is None and result.out[:16].tolist() == [100 + i for i in range(16)]


def test_what_comes_before_the_barrier_is_no_read_of_a_peer() -> None:
    assert "before a cluster barrier" in only(run(f"{_WRITE} {_READ} cluster_sync(); cluster_sync();"), "race").text


def test_what_no_thread_of_a_peer_has_written_cannot_be_read() -> None:
    only(run(f"if (t < 31) {_WRITE} cluster_sync(); {_READ} cluster_sync();"), "unwritten")


def test_a_peer_may_have_left_behind_its_only_barrier() -> None:
    assert "may have left" in only(run(f"{_WRITE} cluster_sync(); {_READ}"), "barrier").text
    after = run(f"{_WRITE} cluster_sync(); cluster_sync(); {_READ}")
    assert "after the last cluster barrier" in only(after, "race").text


def test_memory_that_peers_read_must_stay() -> None:
    result = run(f"{_WRITE} cluster_sync(); {_READ} smem[t] = 1; cluster_sync();")
    assert "written behind the cluster barrier" in only(result, "race").text
    assert run(f"{_WRITE} cluster_sync(); {_READ} cluster_sync(); smem[t] = 1;").error is None
    assert run(f"{_WRITE} cluster_sync(); {_READ} smem[32 + t] = 1; cluster_sync();").error is None


def test_writes_of_threads_that_met_no_barrier_are_in_no_order() -> None:
    beyond = _READ.replace("smem + t", "smem + t + 16")
    result = only(run(f"{_WRITE} if (t >= 16) return; cluster_sync(); {beyond} cluster_sync();"), "race")
    assert "not ordered after the write" in result.text


def test_reads_beyond_a_peers_memory() -> None:
    read = "const int* peer = peer_shared(smem + 255, cluster_rank() ^ 1); p.out[t] = peer[t];"
    only(run(f"smem[224 + t] = t; cluster_sync(); {read} cluster_sync();"), "out of bounds")


@pytest.mark.parametrize(
    "body",
    [
        "cluster_sync(); *const_cast<int*>(peer_shared(smem + t, cluster_rank() ^ 1)) = 1; cluster_sync();",
        "cluster_sync(); cluster_sync(); cluster_sync();",
        "atomicAdd(p.out, 1); cluster_sync();",
        "peer_shared(smem, 2);",
    ],
)
def test_what_the_emulator_does_not_take_is_said(body: str) -> None:
    only(run(_WRITE + body), "cluster")


def test_a_thread_that_waits_elsewhere_is_a_deadlock() -> None:
    text = only(run("if (t < 16) cluster_sync(); else bar_sync(1, 32);"), "deadlock").text
    assert "barrier.cluster" in text and "bar.sync" in text


def test_a_cluster_counts_its_bytes_once() -> None:
    body = f"{_WRITE} cluster_sync(); {_READ} cluster_sync();"
    result = run(body, statistics=True)
    assert result.statistics.counters["shared_write_bytes"] == _CLUSTER * _THREADS * 4
    assert result.statistics.counters["global_write_bytes"] == 4 * OUT


def test_a_grid_of_no_whole_clusters_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be launched"):
        run(_WRITE, blocks=3)
