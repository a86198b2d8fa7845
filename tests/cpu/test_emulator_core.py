"""The emulator's core: each rule has a kernel of a few lines that breaks it, and one beside it that does not."""

from __future__ import annotations

import ctypes
import struct
import time

import pytest
import torch

from haloconv import conv2d, emulator
from haloconv.emulator import Module, Region
from haloconv.jit import CompileError, KernelSource
from haloconv.jit.launch import LaunchShape
from tests.toy_kernels import OUT, only, run

MISSING = emulator.available()
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("emulator_cache", "optimised"),
]


# --- what is allowed passes


@pytest.mark.parametrize("seed", range(4))
def test_a_correct_kernel_has_no_finding(seed: int) -> None:
    body = "smem[t] = p.in[t]; __syncthreads(); p.out[16 * blockIdx.x + 15 - t] = smem[15 - t] + smem[t];"
    result = run(body, seed=seed, threads=16, grid=4)
    assert result.error is None
    assert torch.equal(result.out, torch.full((OUT,), 15, dtype=torch.int32))


def test_blocks_see_their_index_and_fresh_shared_memory() -> None:
    result = run("smem[0] = 5; if (t == 0) p.out[blockIdx.x] = blockIdx.x * 100 + gridDim.x;", threads=1, grid=3)
    assert result.out[:3].tolist() == [3, 103, 203]
    stale = run("if (blockIdx.x == 0) smem[t] = 1; else p.out[t] = smem[t];", grid=2)
    only(stale, "unwritten")


def test_halves_of_a_word_belong_to_different_threads() -> None:
    write = "volatile short* half = (short*)smem; half[t] = t; half[t] = half[t] + 1;"
    body = write + "__syncthreads(); p.out[t] = half[t ^ 1];"
    result = run(body)
    assert result.error is None and result.out.tolist() == [(i ^ 1) + 1 for i in range(OUT)]
    only(run(body.replace("half[t] = t", "half[t] = t; half[t ^ 1] = t")), "race")


# --- races, barriers


@pytest.mark.parametrize("seed", range(3))
def test_a_missing_barrier_is_a_race(seed: int) -> None:
    result = run("smem[t] = t;\nint other = 0;\nif (t != 5)\nother = smem[5];\np.out[t] = other;", seed=seed)
    assert "race" in result.kinds or "unwritten" in result.kinds
    places = {finding.place for finding in result.findings}
    assert places <= {"toy.cu:11", "toy.cu:14"}, result.error


def test_a_refill_without_a_barrier_races_with_the_readers() -> None:
    body = "smem[t] = t; __syncthreads(); const int seen = smem[t ^ 32]; {barrier} smem[t] = seen; p.out[t] = seen;"
    assert run(body.format(barrier="__syncthreads();")).error is None
    result = run(body.format(barrier=""))
    assert only(result, "race").text.startswith("this read") and len(result.findings) == 2
    assert result.findings[1].text.startswith("this write") and "after the read by thread" in result.findings[1].text


def test_a_warp_barrier_orders_its_warp_only() -> None:
    body = "smem[t] = t; __syncwarp(); p.out[t] = smem[t ^ {distance}];"
    assert run(body.format(distance=1)).error is None
    assert run(body.format(distance=32)).kinds & {"race", "unwritten"}


@pytest.mark.parametrize("collective", ["__shfl_sync(~0u, t, 1)", "__all_sync(~0u, t < 99)", "__ballot_sync(~0u, 1)"])
def test_shuffles_and_votes_order_no_memory(collective: str) -> None:
    written = f"smem[t] = t; int seen = {collective}; {{barrier}} seen += smem[t ^ 1]; p.out[t] = seen;"
    read = f"smem[t] = t; __syncwarp(); int seen = smem[t ^ 1] + {collective}; {{barrier}} smem[t] = seen;"
    for body in (written, read):
        assert run(body.format(barrier="__syncwarp();")).error is None
        only(run(body.format(barrier="")), "race")


@pytest.mark.parametrize("seed", range(3))
def test_a_divergent_barrier_ends_with_the_state_of_each_warp(seed: int) -> None:
    started = time.perf_counter()
    body = (
        "if (t < 32) __syncthreads();\nelse if (t != 40) __syncwarp();\nelse p.out[t] = __shfl_sync(0xffffffffu, t, 1);"
    )
    result = run(body, seed=seed)
    finding = only(result, "deadlock")
    assert "warp 0, lanes 0-31: waits at __syncthreads toy.cu:11 (32 of" in finding.text
    assert "lanes 0-7,9-31: waits at __syncwarp toy.cu:12 (mask 0xffffffff, arrived 0xfffffeff)" in finding.text
    assert "lanes 8: waits at a shuffle toy.cu:13" in finding.text
    assert time.perf_counter() - started < 5


def test_a_barrier_must_be_reached_by_every_thread_at_one_place() -> None:
    left = only(run("if (t >= 40) return;\n__syncthreads(); p.out[t] = t;"), "divergent barrier")
    assert left.text.startswith("24 of 64 threads have left") and left.place == "toy.cu:12"
    two = run("if (t < 32) p.out[t] = 1, __syncthreads();\nelse p.out[t] = 2, __syncthreads();")
    apart = only(two, "divergent barrier")
    assert "wait at toy.cu:11 and at toy.cu:12" in apart.text
    copied = "#pragma GCC unroll 4\nfor (int i = 0; i < 4; ++i) { smem[t] = i; __syncthreads(); }"
    assert run(copied).error is None
    recursive = "__device__ __forceinline__ int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }"
    result = run("if (t >= 0) { p.out[t] = gcd(t, 6); __syncthreads(); }", before=recursive)
    assert result.error is None and result.out[:7].tolist() == [6, 1, 2, 3, 2, 1, 6]


def test_a_collective_must_name_its_lane_and_living_ones() -> None:
    assert "does not name it" in only(run("__syncwarp(1u);"), "collective").text
    left = run("if (t == 3) return; for (int i = 0; i < 9; ++i) __syncwarp(0xfffffff7u); __syncwarp();", threads=32)
    assert "lane 3" in only(left, "collective").text


# --- memory


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("p.out[t + 1] = t;", "0 bytes behind the end of tensor 1"),
        ("p.out[t] = p.in[t - 1];", "4 bytes before the start of tensor 0"),
        ("smem[256] = t;", "0 bytes behind the end of the block's 1024 bytes of dynamic shared memory"),
        ("p.out[t] = *(const int*)(dynamic_smem - 4);", "outside every tensor"),
        ("int* none = nullptr; none[t] = 1;", "nothing known is near"),
    ],
)
def test_accesses_out_of_bounds(body: str, sentence: str) -> None:
    finding = only(run(body), "out of bounds")
    assert sentence in finding.text and finding.place == "toy.cu:11"


def test_an_array_inside_shared_memory_has_its_bounds() -> None:
    before = "struct Smem { int first[8]; int second[56]; };"
    body = "Smem& s = *reinterpret_cast<Smem*>(dynamic_smem); s.first[t] = t;"
    assert run(body, threads=8, before=before).error is None
    assert "int [8]" in only(run(body, threads=9, before=before), "out of bounds").text


def test_static_shared_memory_is_checked_like_dynamic() -> None:
    body = "__shared__ int own[OUT]; {write} {barrier} p.out[t] = own[OUT - 1 - t];"
    define = f"#define OUT {OUT}"
    good = run(body.format(write="own[t] = t;", barrier="__syncthreads();"), before=define)
    assert good.error is None and good.out[0] == OUT - 1
    only(run(body.format(write="", barrier=""), before=define), "unwritten")
    assert run(body.format(write="own[t] = t;", barrier=""), before=define).kinds & {"race", "unwritten"}
    beyond = run(body.format(write="int* q = own + t; q[1] = t;", barrier="__syncthreads();"), before=define)
    assert "next to the block's static shared memory" in beyond.findings[-1].text


def test_a_misaligned_vector_access() -> None:
    body = "smem[t] = t; __syncthreads(); Quad q = *reinterpret_cast<Quad*>(smem + {at}); p.out[t] = q.lane[0];"
    assert run(body.format(at=4)).error is None
    assert "multiple of 16" in only(run(body.format(at=2)), "misaligned").text
    only(run("*(int*)(dynamic_smem + 2) = t;"), "misaligned")
    only(run("Quad q = *reinterpret_cast<const Quad*>(p.in + t); p.out[t] = q.lane[0];", threads=2), "misaligned")


def test_a_read_of_unwritten_shared_memory() -> None:
    finding = only(run("if (t < 63) smem[t] = t; __syncthreads(); p.out[t] = smem[t];"), "unwritten")
    assert "dynamic shared memory + 252" in finding.text and (finding.thread, finding.times) == (63, 1)


def test_a_store_to_an_input() -> None:
    finding = only(run("const_cast<int*>(p.in)[t] = t;"), "read-only")
    assert "tensor 0" in finding.text


def test_a_pointer_to_local_memory_of_another_thread() -> None:
    body = "int own = t; if (t == 0) *(int* volatile*)smem = &own; __syncthreads(); p.out[t] = **(int**)smem;"
    assert "local memory of thread 0" in only(run(body), "out of bounds").text


def test_blocks_that_write_the_same_byte_are_found() -> None:
    before = "typedef unsigned char byte;"
    apart = run("((byte*)p.out)[4 * t + blockIdx.x] = 1; p.out[32] = p.out[t] + 1;", threads=8, before=before)
    assert apart.error is None  # one block may write as often as it likes
    bytes_of_a_word = run("((byte*)p.out)[4 * t + blockIdx.x] = 7;", grid=4, before=before)
    assert bytes_of_a_word.error is None and bytes_of_a_word.out.tolist() == [0x07070707] * OUT
    result = run("if (blockIdx.x == 2)\np.out[5] = 5;\nif (blockIdx.x == 0 && t >= 4)\np.out[t] = 5;", grid=3)
    found = only(result, "overlapping writes")
    assert (found.place, found.block, found.times) == ("toy.cu:12", 2, 1)
    assert "of 4 bytes goes to tensor 1 of the launch + 20 bytes, which block 0 has written too" in found.text
    only(run("if (t == 0) ((byte*)p.out)[blockIdx.x == 1 ? 3 : 0] = 1, p.out[blockIdx.x] = 1;", grid=2, before=before),
         "overlapping writes")  # fmt: skip
    atomics = run("atomicAdd(p.out + t, 1);", grid=3)
    assert atomics.error is None and atomics.out.tolist() == [2] * OUT
    counted = run("p.out[0] = t;", grid=2, statistics=True)
    only(counted, "overlapping writes")


# --- collectives


@pytest.mark.parametrize("seed", range(3))
def test_shuffles_and_votes_give_what_a_warp_gives(seed: int) -> None:
    def values(expression: str) -> list[int]:
        result = run(f"const unsigned all = 0xffffffffu; p.out[t] = {expression};", seed=seed)
        assert result.error is None
        return result.out.tolist()

    lanes = range(OUT)
    assert values("__shfl_sync(all, t, 5)") == [i // 32 * 32 + 5 for i in lanes]
    assert values("__shfl_sync(all, t, 3, 8)") == [i // 8 * 8 + 3 for i in lanes]
    assert values("__shfl_up_sync(all, t, 2)") == [i - 2 if i % 32 >= 2 else i for i in lanes]
    assert values("__shfl_down_sync(all, t, 3, 16)") == [i + 3 if i % 16 < 13 else i for i in lanes]
    assert values("__shfl_xor_sync(all, t, 6)") == [i ^ 6 for i in lanes]
    assert values("(int)__shfl_xor_sync(all, 1.5 * t, 1)") == [int(1.5 * (i ^ 1)) for i in lanes]
    assert values("__any_sync(all, t == 40)") == [0] * 32 + [1] * 32
    assert values("__all_sync(all, t >= 32)") == [0] * 32 + [1] * 32
    assert values("(int)__ballot_sync(all, t % 32 < 3)") == [7] * OUT
    assert values("__syncthreads_count(t < 40)") == [40] * OUT


# --- schedules


def test_a_seed_replays_its_schedule() -> None:
    body = "p.out[t] = atomicAdd(p.out + 63, 1);"

    def order(seed: int) -> list[int]:
        return run(body, threads=63, seed=seed).out[:63].tolist()

    assert order(0) == [i - 1 for i in range(63)]
    assert order(7) == order(7) != order(8)


def test_blocks_run_in_an_order_of_the_seed() -> None:
    def order(seed: int, grid: int = 63) -> list[int]:
        return (
            run("p.out[blockIdx.x] = atomicAdd(p.out + 63, 1) + 1;", threads=1, grid=grid, seed=seed).out[:63].tolist()
        )

    assert order(0) == list(range(63))
    assert order(1) == order(7) == list(range(62, -1, -1))
    assert sorted(order(2)) == sorted(order(3)) == list(range(63))
    assert len({tuple(order(seed)) for seed in (0, 1, 2, 3, 5)}) == 5
    assert all(order(seed, grid=1)[0] == 0 for seed in range(4))


@pytest.mark.parametrize(
    "body", ["while (true) __syncthreads();", "volatile int* flag = smem; smem[t] = 0; while (flag[t] == 0) ;"]
)
def test_a_launch_that_does_not_end_is_ended(body: str) -> None:
    started = time.perf_counter()
    finding = only(run(body, limit_s=0.3), "time limit")
    assert "more than 0.3 s" in finding.text and "warp 1" in finding.text
    assert time.perf_counter() - started < 10


def test_the_emulator_works_on_after_a_fault() -> None:
    assert run("p.out[OUT + t] = 1;", before=f"#define OUT {OUT}").error is not None
    assert run("p.out[t] = t;").error is None


def test_parameters_of_several_structs_and_constant_tables() -> None:
    code = """//@ begin toy.cu
struct Out { int* out; };
struct alignas(64) Big { char pad[64]; int values[16]; };
extern "C" __global__ void toy(const Out p, const __grid_constant__ Big big, int shift) {
    static const int table[4] = {7, 5, 3, 1};
    p.out[threadIdx.x] = (big.values[threadIdx.x] << shift) + table[threadIdx.x % 4];
}
//@ end toy.cu
"""
    out = torch.zeros(16, dtype=torch.int32)
    arguments = (struct.pack("Q", out.data_ptr()), bytes(64) + struct.pack("16i", *range(16)), struct.pack("i", 4))
    blocks = [ctypes.create_string_buffer(each, len(each)) for each in arguments]
    pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, blocks))
    region = Region(out.data_ptr(), out.data_ptr() + 64, True)
    Module(KernelSource("toy", "toy", (), code)).run(LaunchShape(1, 16), ctypes.addressof(pointers), [region])
    assert out.tolist() == [16 * i + (7, 5, 3, 1)[i % 4] for i in range(16)]


def test_an_error_tells_how_to_replay_it() -> None:
    text = str(run("p.out[t - 1] = 1;", seed=5).error)
    assert "1 fault in toy" in text and "emulated_device(seed=5)" in text and "toy.cu:11" in text


def test_a_text_that_does_not_compile_names_the_line() -> None:
    with pytest.raises(CompileError, match="toy.cu:12"):
        run("int ok = 1;\nint bad = nothing;")


# --- statistics


@pytest.mark.parametrize(("stride", "degree"), [(1, 1), (2, 2), (8, 8), (33, 1)])
def test_bank_conflicts_of_a_known_stride(stride: int, degree: int) -> None:
    result = run(f"smem[t * {stride}] = t; p.out[t] = t;", smem_bytes=16384, statistics=True)
    (site,) = result.statistics.sites
    assert (site.write, site.degree, site.worst_degree, site.warp_accesses) == (True, degree, degree, 2)
    counters = result.statistics.counters
    assert (counters["shared_write_bytes"], counters["global_write_bytes"]) == (4 * OUT, 4 * OUT)


def test_broadcasts_and_vectors_do_not_conflict() -> None:
    body = "Quad q = {}; reinterpret_cast<Quad*>(smem)[t] = q; __syncthreads(); p.out[t] = smem[0];"
    result = run(body, smem_bytes=16 * OUT, statistics=True)
    assert [site.worst_degree for site in result.statistics.sites] == [1, 1]


# --- the device


def test_a_convolution_runs_its_kernels_and_checks_its_inputs() -> None:
    x, w = torch.randn(1, 3, 6, 7, requires_grad=True), torch.randn(5, 3, 3, 3, requires_grad=True)
    expected = torch.conv2d(x, w, padding=1)
    wanted = torch.autograd.grad(expected, (x, w), torch.ones_like(expected))
    with emulator.emulated_device(seed=2) as device:
        y = conv2d(x, w, padding=1, family="direct", strict=True)
        found = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        assert device.launches == 4  # fprop, dgrad, wgrad and its sum
        assert all(not region.writable for region in device.regions() if region.begin == x.data_ptr())
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="the tensors are on cpu"):
        conv2d(x, w, padding=1, family="direct", strict=True)


def test_outputs_start_as_nan_and_integers_as_their_largest() -> None:
    with emulator.emulated_device() as device:
        assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(2).isnan().all()
        assert torch.empty(1, dtype=torch.int16).item() == 32767
        kept = torch.empty(4)
        assert Region(kept.data_ptr(), kept.data_ptr() + 16, True) in device.regions()
        address = kept.data_ptr()
        del kept
        assert address not in {region.begin for region in device.regions()}


def test_one_device_at_a_time() -> None:
    with emulator.emulated_device(), pytest.raises(RuntimeError, match="in force already"):  # noqa: SIM117
        with emulator.emulated_device():
            pass
    with pytest.raises(RuntimeError, match="no emulated device"):
        emulator.current_device()
