"""What the emulator reports about misused primitives: each kernel is right as it stands, and wrong after one change."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import numpy as np
import pytest

from haloconv import emulator
from haloconv.emulator import EmulatorError, Module, Region
from haloconv.emulator.tensor_map import DataType, Swizzle
from haloconv.jit import ArgumentBlock, KernelSource
from haloconv.jit.launch import LaunchShape
from tests.conformance.arguments import PARAMS_BYTES, packed
from tests.conformance.case import Case, MapSpec, Setup
from tests.conformance.on_emulator import aligned, encode

pytestmark = [
    pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available())),
    pytest.mark.usefixtures("emulator_cache", "optimised"),
]

WORDS = 8192
SMEM_BYTES = 32 * 1024

BULK = """
    u64* bar = reinterpret_cast<u64*>(dynamic_smem);
    u32* buffer = reinterpret_cast<u32*>(dynamic_smem + 1024);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, 256);
        cp_async_bulk_shared_global(buffer, p.in[0], 256, bar);
    }
    while (!mbarrier_try_wait_parity(bar, 0)) {
    }
    p.out[0][threadIdx.x] = buffer[threadIdx.x % 64];
    __syncthreads();
    buffer[threadIdx.x] = 1;
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_global_shared(p.out[0] + 128, buffer, 256);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
"""

RING = """
    u64 *full = reinterpret_cast<u64*>(dynamic_smem), *empty = full + 1;
    u32* buffer = reinterpret_cast<u32*>(dynamic_smem + 1024);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 64);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= 64) {
        for (int i = 0; i < 4 && threadIdx.x == 64; ++i) {
            while (!mbarrier_try_wait_parity(empty, i & 1 ^ 1)) {
            }
            mbarrier_arrive_expect_tx(full, 256);
            cp_async_bulk_shared_global(buffer, p.in[0] + 64 * i, 256, full);
        }
    } else {
        for (int i = 0; i < 4; ++i) {
            while (!mbarrier_try_wait_parity(full, i & 1)) {
            }
            p.out[0][64 * i + threadIdx.x] = buffer[threadIdx.x];
            mbarrier_arrive(empty);
        }
    }
"""

TENSOR = """
    u64* bar = reinterpret_cast<u64*>(dynamic_smem);
    u32* buffer = reinterpret_cast<u32*>(dynamic_smem + 1024);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 1024);
        cp_async_bulk_tensor_2d_shared_global(buffer, &p.maps[0], bar, 0, 0);
    }
    __syncthreads();
    while (!mbarrier_try_wait_parity(bar, 0)) {
    }
    p.out[0][threadIdx.x] = buffer[threadIdx.x];
"""

TENSOR_STORE = """
    u32* buffer = reinterpret_cast<u32*>(dynamic_smem + 1024);
    for (int i = threadIdx.x; i < 256; i += 128) buffer[i] = i;
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_2d_global_shared(&p.maps[1], buffer, 0, 60);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
"""

WGMMA = """
    u32* a = reinterpret_cast<u32*>(dynamic_smem);
    for (int i = threadIdx.x; i < 4096; i += 128) a[i] = p.in[0][i];
    fence_proxy_async_shared();
    __syncthreads();
    u64 desc = smem_descriptor(shared_address(a), 0, 1024, 128);
    float d[4] = {};
    wgmma_fence();
    wgmma_ss<hc::tf32, 8>(d, desc, desc, true);
    wgmma_ss<hc::tf32, 8>(d, desc + 2, desc + 2, true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    for (int i = 0; i < 4; ++i) p.out[0][4 * threadIdx.x + i] = __float_as_uint(d[i]);
    wgmma_fence();
    wgmma_ss<hc::tf32, 8>(d, desc, desc, false);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    __syncthreads();
    a[threadIdx.x] = 0;
"""

CP_ASYNC = """
    u32* buffer = reinterpret_cast<u32*>(dynamic_smem);
    cp_async_16(buffer + 4 * threadIdx.x, p.in[0] + 4 * threadIdx.x, 16);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    p.out[0][threadIdx.x] = buffer[4 * (127 - threadIdx.x)];
"""

NAMED = """
    u32* buffer = reinterpret_cast<u32*>(dynamic_smem);
    setmaxnreg_dec<40>();
    if (threadIdx.x < 64) {
        buffer[threadIdx.x] = threadIdx.x;
        bar_arrive(1, 128);
    } else {
        bar_sync(1, 128);
        p.out[0][threadIdx.x] = buffer[threadIdx.x - 64];
    }
"""

# 384 threads own 168 registers each: two warpgroups can have 208 if the third keeps 88, and never if it keeps 96.
POOL = """
    if (threadIdx.x < 256)
        setmaxnreg_inc<208>();
    else
        setmaxnreg_dec<88>();
    p.out[0][threadIdx.x] = threadIdx.x;
"""

MATRICES = """
    u32* buffer = reinterpret_cast<u32*>(dynamic_smem) + threadIdx.x / 32 * 128;
    u32 r[4] = {1, 2, 3, 4};
    stmatrix_x4(buffer + threadIdx.x % 32 * 4, r);
    __syncwarp();
    ldmatrix_x4(r, buffer + (31 - threadIdx.x % 32) * 4);
    p.out[0][threadIdx.x] = r[0];
"""


@dataclass(frozen=True)
class Fault:
    """Replacing ``old`` by ``new`` in ``body`` must be reported in words that match ``report``."""

    name: str
    body: str
    old: str
    new: str
    report: str


FAULTS = (
    Fault("barrier_not_initialised", BULK, "mbarrier_init(bar, 1);", "", "no barrier was initialised"),
    Fault("barrier_initialised_twice", BULK, "mbarrier_init(bar, 1);", "mbarrier_init(bar, 1), mbarrier_init(bar, 1);",
          "initialised again"),
    Fault("init_not_fenced", BULK, "fence_mbarrier_init();", "", "missing fence.*fence.mbarrier_init"),
    Fault("init_not_ordered", BULK, "    __syncthreads();\n    if (threadIdx.x == 0) {\n        mbarrier_arrive_expect",
          "    if (threadIdx.x == 0) {\n        mbarrier_arrive_expect",
          "no barrier was initialised|not ordered before"),
    Fault("too_few_bytes_expected", BULK, "expect_tx(bar, 256)", "expect_tx(bar, 240)", "more came"),
    Fault("too_many_bytes_expected", BULK, "expect_tx(bar, 256)", "expect_tx(bar, 272)", "deadlock"),
    Fault("two_arrivals", BULK, "cp_async_bulk_shared_global(buffer,",
          "mbarrier_arrive(bar), cp_async_bulk_shared_global(buffer,", "one arrival more"),
    Fault("wrong_parity", BULK, "parity(bar, 0)", "parity(bar, 1)", "race|in flight"),
    Fault("bytes_not_a_multiple", BULK, "256, bar)", "252, bar)", "multiple of 16"),
    Fault("misaligned_source", BULK, "p.in[0], 256", "p.in[0] + 1, 256", "16"),
    Fault("misaligned_destination", BULK, "shared_global(buffer,", "shared_global(buffer + 1,", "align"),
    Fault("source_out_of_bounds", BULK, "p.in[0], 256", f"p.in[0] + {WORDS - 32}, 256", "not inside one tensor"),
    Fault("destination_out_of_bounds", BULK, "p.out[0] + 128, buffer", f"p.out[0] + {WORDS - 32}, buffer",
          "not inside one tensor"),
    Fault("store_into_input", BULK, "cp_async_bulk_global_shared(p.out[0] + 128",
          "cp_async_bulk_global_shared(const_cast<u32*>(p.in[0])", "read-only|read only|not writable|input"),
    Fault("no_proxy_fence", BULK, "fence_proxy_async_shared();", "", "fence"),
    Fault("store_not_waited_for", BULK, "cp_async_bulk_wait_group<0>();", "", "wait_group.read is missing"),
    Fault("store_not_committed", BULK, "cp_async_bulk_commit_group();", "", "wait_group.read is missing"),
    Fault("load_not_waited_for", BULK, "    while (!mbarrier_try_wait_parity(bar, 0)) {\n    }\n", "",
          "race|in flight|under way"),
    Fault("ring_no_empty_wait", RING, "!mbarrier_try_wait_parity(empty, i & 1 ^ 1)", "false",
          "race|one arrival more|in flight|under way"),
    Fault("ring_early_release", RING, "            p.out[0][64 * i + threadIdx.x] = buffer[threadIdx.x];\n"
          "            mbarrier_arrive(empty);\n",
          "            mbarrier_arrive(empty);\n            p.out[0][64 * i + threadIdx.x] = buffer[threadIdx.x];\n",
          "race|in flight|under way"),
    Fault("ring_missing_release", RING, "            mbarrier_arrive(empty);\n", "", "deadlock"),
    Fault("ring_wrong_phase", RING, "parity(full, i & 1)", "parity(full, 0)", "race|deadlock|in flight|under way"),
    Fault("ring_one_release_per_warp", RING, "mbarrier_init(empty, 64);", "mbarrier_init(empty, 32);",
          "race|one arrival more"),
    Fault("tensor_bytes", TENSOR, "expect_tx(bar, 1024)", "expect_tx(bar, 512)", "more came"),
    Fault("tensor_misaligned_box", TENSOR, "2d_shared_global(buffer,", "2d_shared_global(buffer + 16,",
          "128-byte aligned"),
    Fault("tensor_rank", TENSOR, "tensor_2d_shared_global(buffer, &p.maps[0], bar, 0, 0)",
          "tensor_3d_shared_global(buffer, &p.maps[0], bar, 0, 0, 0)", "2 dimensions used by a 3d copy"),
    Fault("tensor_no_map", TENSOR, "&p.maps[0]", "reinterpret_cast<const hc::TensorMap*>(p.in[0])",
          "no encoded tensor map"),
    Fault("tensor_unaligned_corner", TENSOR, "bar, 0, 0", "bar, 2, 0", "coordinate 2 is byte 8 of a row: not a mult"),
    Fault("tensor_unaligned_store", TENSOR_STORE, "buffer, 0, 60", "buffer, 2, 60", "coordinate 2 is byte 8 of a row"),
    Fault("tensor_store_before_row", TENSOR_STORE, "buffer, 0, 60", "buffer, -4, 60", "coordinate 0 of a store is neg"),
    Fault("tensor_store_before_map", TENSOR_STORE, "buffer, 0, 60", "buffer, 0, -1", "coordinate 1 of a store is neg"),
    Fault("wgmma_no_wait", WGMMA, "    wgmma_wait_group<0>();\n    for", "    for", "NaN in the result"),
    Fault("wgmma_no_commit", WGMMA, "    wgmma_commit_group();\n    wgmma_wait_group<0>();\n    __sync",
          "    wgmma_wait_group<0>();\n    __sync", "never waited for"),
    Fault("wgmma_no_fence", WGMMA, "float d[4] = {};\n    wgmma_fence();", "float d[4] = {};", "no wgmma.fence"),
    Fault("wgmma_no_second_fence", WGMMA, "(d[i]);\n    wgmma_fence();", "(d[i]);", "no wgmma.fence"),
    Fault("wgmma_no_proxy_fence", WGMMA, "fence_proxy_async_shared();", "", "fence"),
    Fault("wgmma_no_barrier", WGMMA, "fence_proxy_async_shared();\n    __syncthreads();", "fence_proxy_async_shared();",
          "race"),
    Fault("wgmma_early_release", WGMMA, "    wgmma_wait_group<0>();\n    __syncthreads();\n    a[threadIdx.x] = 0;\n",
          "    __syncthreads();\n    a[threadIdx.x] = 0;\n    wgmma_wait_group<0>();\n", "in flight|under way|race"),
    Fault("wgmma_outside", WGMMA, "smem_descriptor(shared_address(a)", "smem_descriptor(shared_address(a) + 32000",
          "outside|shared"),
    Fault("wgmma_base_offset", WGMMA, "1024, 128);", "1024, 128) | 1ull << 49;", "base offset"),
    Fault("wgmma_other_descriptor", WGMMA, "(d, desc, desc, true)", "(d, desc, desc + 2 * (threadIdx.x / 32), true)",
          "another wgmma"),
    Fault("cp_async_no_wait", CP_ASYNC, "cp_async_wait_group<0>();", "", "race|in flight|under way|not waited"),
    Fault("cp_async_no_commit", CP_ASYNC, "cp_async_commit_group();", "", "in flight|under way|not waited"),
    Fault("cp_async_no_barrier", CP_ASYNC, "__syncthreads();", "", "race|in flight|under way"),
    Fault("cp_async_misaligned", CP_ASYNC, "p.in[0] + 4", "p.in[0] + 1 + 4", "misaligned"),
    Fault("named_barrier_count", NAMED, "bar_arrive(1, 128)", "bar_arrive(1, 96)", "while others meet"),
    Fault("named_barrier_id", NAMED, "bar_sync(1, 128)", "bar_sync(2, 128)", "deadlock"),
    Fault("named_barrier_too_many", NAMED, "(1, 128)", "(1, 160)", "up to the block's"),
    Fault("named_barrier_no_arrive", NAMED, "bar_arrive(1, 128);", "", "deadlock"),
    Fault("setmaxnreg_count", NAMED, "setmaxnreg_dec<40>", "setmaxnreg_dec<44>", "multiple of 8"),
    Fault("setmaxnreg_too_many", NAMED, "setmaxnreg_dec<40>", "setmaxnreg_inc<264>", "from 24 to 256"),
    Fault("ldmatrix_misaligned", MATRICES, "31 - threadIdx.x % 32) * 4", "31 - threadIdx.x % 32) * 2 + 1", "align"),
    Fault("stmatrix_no_syncwarp", MATRICES, "    __syncwarp();\n", "", "race"),
    Fault("collectives_mixed", MATRICES, "    ldmatrix_x4(r,", "    if (threadIdx.x % 32 < 7) stmatrix_x4(buffer, r);\n"
          "    else ldmatrix_x4(r,",
          "divergence|deadlock|race"),
)  # fmt: skip


def run(body: str, seed: int, threads: int = 128) -> np.ndarray:
    """out[0] after the kernel around ``body``; maps of 8 x 32 words of in[0] and of out[0]."""
    prelude = Case("", "cvt", 128, lambda: None).source().code.split("//@ begin cvt.cu")[0]
    kernel = f'extern "C" __global__ void conformance(const __grid_constant__ Params p) {{{body}}}\n'
    module = Module(KernelSource("primitives", "conformance", (), prelude + kernel))
    data, out, gave_up = (aligned(np.ones(WORDS, np.uint32)) for _ in range(3))
    arguments = {"data_type": int(DataType.FLOAT32), "extents": (32, 64), "strides": (128,), "box": (32, 8),
                 "swizzle": int(Swizzle.B128)}  # fmt: skip
    setup = Setup((data,), (out,), maps=(MapSpec("in0", arguments), MapSpec("out0", arguments)))
    block = ArgumentBlock(PARAMS_BYTES)
    block.buffer[:] = packed(setup, [data.ctypes.data], [out.ctypes.data], gave_up.ctypes.data, encode)
    regions = [Region(data.ctypes.data, data.ctypes.data + data.nbytes, False)]
    regions += [Region(each.ctypes.data, each.ctypes.data + each.nbytes, True) for each in (out, gave_up)]
    module.run(LaunchShape(1, threads, SMEM_BYTES), block.pointer_array_address, regions, seed, limit_s=20.0)
    return out


@pytest.mark.parametrize("body", sorted({fault.body for fault in FAULTS}), ids=lambda body: body.split()[1][:12])
def test_the_kernels_are_right_as_they_stand(body: str, emulator_seeds: tuple[int, ...]) -> None:
    for seed in emulator_seeds:
        assert not np.isnan(run(body, seed).view(np.float32)).any()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_reported(fault: Fault, emulator_seeds: tuple[int, ...]) -> None:
    """Under at least one of the schedules that every test runs; a wrong result counts where it is NaN."""
    assert fault.body.count(fault.old) >= 1
    body, reports = fault.body.replace(fault.old, fault.new), []
    for seed in emulator_seeds:
        try:
            out = run(body, seed)
        except EmulatorError as error:
            reports.append(str(error))
        else:
            reports.append("NaN in the result" if np.isnan(out.view(np.float32)).any() else "")
    assert any(reports), "nothing was found"
    assert any(re.search(fault.report, report, re.DOTALL) for report in reports if report), "\n".join(reports)


def test_the_pool_has_registers_once_they_are_given_back(emulator_seeds: tuple[int, ...]) -> None:
    for seed in emulator_seeds:
        assert (run(POOL, seed, threads=384)[:384] == np.arange(384)).all()


@pytest.mark.parametrize("change", [("dec<88>", "dec<96>"), ("inc<208>", "inc<216>")], ids=lambda change: change[1])
def test_a_wait_for_registers_that_do_not_exist_is_a_deadlock(
    change: tuple[str, str], emulator_seeds: tuple[int, ...]
) -> None:
    for seed in emulator_seeds:
        with pytest.raises(EmulatorError, match=r"(?s)deadlock.*setmaxnreg\.inc.*the pool has"):
            run(POOL.replace(*change), seed, threads=384)


# Polls of a barrier --------------------------------------------------------------------------------------------------

BARRIERS = """
    u64* bars = reinterpret_cast<u64*>(dynamic_smem);
    if (threadIdx.x < 2) mbarrier_init(bars + threadIdx.x, 1);
    __syncthreads();
"""

# The second warp polls for the first one's arrival, under way all the while or past.
VOTES = """
    if (threadIdx.x == 0) LATE mbarrier_arrive(bars);
    __syncthreads();
    for (int i = 0; i < 256; ++i) {
        const u32 votes = __ballot_sync(~0u, mbarrier_try_wait_parity(bars, 0));
        if (threadIdx.x % 32 == 0) p.out[0][256 * (threadIdx.x / 32) + i] = votes;
    }
"""

# The first warp arrives only once the second, which polls for it, has given up.
GIVES_UP = """
    if (threadIdx.x < 32) {
        while (!__all_sync(~0u, mbarrier_try_wait_parity(bars, 0))) {
        }
        if (threadIdx.x == 0) mbarrier_arrive(bars + 1);
    } else if (!__all_sync(~0u, mbarrier_try_wait_parity(bars + 1, 0))) {
        if (threadIdx.x == 32) mbarrier_arrive(bars);
        while (!mbarrier_try_wait_parity(bars + 1, 0)) {
        }
    }
    p.out[0][threadIdx.x] = 5;
"""


@pytest.mark.parametrize("seed", range(6))
def test_a_phase_that_has_ended_is_seen_by_all_lanes(seed: int) -> None:
    votes = run(BARRIERS + VOTES.replace("LATE", ""), seed, threads=128)[:1024]
    assert set(votes.tolist()) <= {0, 0xFFFFFFFF}
    assert np.count_nonzero(votes) >= (1024 if seed == 0 else 850)
    assert seed == 0 or np.count_nonzero(votes) < 1024


@pytest.mark.parametrize("seed", range(6))
def test_lanes_agree_about_a_phase_that_ends_meanwhile(seed: int) -> None:
    body = VOTES.replace("LATE", "").replace("    __syncthreads();\n", "")
    votes = run(BARRIERS + body, seed, threads=128)[:1024]
    assert set(votes.tolist()) <= {0, 0xFFFFFFFF} and np.count_nonzero(votes) >= 850


@pytest.mark.parametrize("seed", range(6))
def test_a_poll_gives_up_where_only_that_lets_others_go_on(seed: int) -> None:
    assert (run(BARRIERS + GIVES_UP, seed, threads=64)[:64] == 5).all()


@pytest.mark.parametrize("seed", range(6))
def test_polls_may_be_counted(seed: int) -> None:
    body = "int polls = 0;\nwhile (polls < 20 && !mbarrier_try_wait_parity(bars, 0)) ++polls;\n"
    assert (run(BARRIERS + body + "p.out[0][threadIdx.x] = polls;", seed, threads=64)[:64] == 20).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("condition", ["!{}", "!__all_sync(~0u, {})"], ids=["alone", "together"])
def test_polls_without_end_are_a_deadlock(condition: str, seed: int) -> None:
    poll = condition.format("mbarrier_try_wait_parity(bars + threadIdx.x / 32 % 2, 0)")
    started = time.perf_counter()
    with pytest.raises(EmulatorError) as caught:
        run(BARRIERS + f"if (threadIdx.x < 96) while ({poll}) {{\n}}\nelse __syncthreads();", seed)
    (found,) = caught.value.findings
    assert found.kind == "deadlock" and time.perf_counter() - started < 8
    for warp in range(3):
        where = f"warp {warp}, lanes 0-31: waits at the end of a phase of parity 0 "
        assert where in found.text, found.text
    assert found.text.count("1 of 1 arrivals and 0 bytes to come") >= 3
    assert "warp 3, lanes 0-31: waits at __syncthreads" in found.text
