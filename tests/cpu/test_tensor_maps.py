"""Tensor maps in front of a launch's arguments: the block's layout, what is encoded when, the driver's encoder."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from haloconv import emulator
from haloconv.device import Device, DeviceFacts, set_stand_in
from haloconv.emulator.tensor_map import TensorMapError
from haloconv.jit import BoxMap, DataType, DriverError, KernelSource, Pixels, Swizzle, encode_tiled
from haloconv.jit import driver as loader
from haloconv.jit.launch import _KEPT_ENCODINGS, Launch, LaunchShape
from haloconv.jit.source import _inlined

CPU = torch.device("cpu")
ROWS, COLUMNS = 40, 64
IMAGE = BoxMap(DataType.FLOAT32, (COLUMNS, ROWS), (4 * COLUMNS,), (32, 8), Swizzle.B128, pointer=0)
RESULT = BoxMap(DataType.FLOAT32, (COLUMNS, ROWS), (4 * COLUMNS,), (32, 8), Swizzle.B128, pointer=1)

# --- the block, with a stand-in that only notes what it is given


class Recorder:
    """A stand-in whose maps are made of their address and whose launches are only noted."""

    def __init__(self) -> None:
        self.encoded: list[tuple[tuple, dict]] = []
        self.blocks: list[int] = []
        self.launched: list[bytes] = []
        self.size = 0

    def load(self, source: KernelSource, smem_bytes: int) -> Recorder:
        return self

    def encode_tiled(self, *arguments: object, **options: object) -> bytes:
        self.encoded.append((arguments, options))
        return self.map_at(arguments[1])

    def launch(self, grid_x: int, threads: int, smem_bytes: int, stream: int, params_address: int) -> None:
        self.blocks.append(ctypes.c_void_p.from_address(params_address).value)
        self.launched.append(ctypes.string_at(self.blocks[-1], self.size))

    @staticmethod
    def map_at(address: int) -> bytes:
        return struct.pack("=Q", address) * 16


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    device = Recorder()
    facts = DeviceFacts("recorder", "sm_90a", 4, (9, 0), 1 << 30, 227 << 10, "none")
    set_stand_in(Device(facts, device.load, device.encode_tiled))
    yield device
    set_stand_in(None)


def launch_of(maps: tuple[BoxMap | None, ...] = (), scalars: tuple[int, ...] = (7, 8, 9)) -> Launch:
    """A launch of a struct of as many maps, of which None is not read, two pointers and ints."""
    names = [f"map_{i}" for i in range(len(maps))]
    members = [*(f"hc::TensorMap {name};" for name in names), "const float* from;", "float* to;"]
    members += [f"int i{index};" for index in range(len(scalars))]
    code = f"struct Params {{ {' '.join(members)} }};\n"
    code += 'extern "C" __global__ void __launch_bounds__(32) toy(const __grid_constant__ Params p) {}\n'
    fields = {f"i{index}": value for index, value in enumerate(scalars)}
    read = {name: each for name, each in zip(names, maps, strict=True) if each is not None}
    return Launch(KernelSource("toy", "toy", (), code), CPU, LaunchShape(1, 32), fields, read)


def test_maps_stand_before_pointers_and_scalars(recorder: Recorder) -> None:
    recorder.size = 320  # 2 x 128 + 2 x 8 + 3 x 4, up to a multiple of 64
    launch_of((IMAGE, RESULT))(4096, 8192)
    expected = recorder.map_at(4096) + recorder.map_at(8192) + struct.pack("=2Q3i", 4096, 8192, 7, 8, 9)
    assert recorder.launched == [expected.ljust(320, b"\0")]
    assert recorder.blocks[0] % 64 == 0


@pytest.mark.parametrize("maps", [(None, RESULT), (IMAGE, None), (None, None)], ids=["second", "first", "neither"])
def test_a_map_that_is_not_used_keeps_its_place(maps: tuple[BoxMap | None, ...], recorder: Recorder) -> None:
    recorder.size = 320
    launch_of(maps)(4096, 8192)
    encoded = [recorder.map_at(4096 * (1 + i)) if each else bytes(128) for i, each in enumerate(maps)]
    expected = b"".join(encoded) + struct.pack("=2Q3i", 4096, 8192, 7, 8, 9)
    assert recorder.launched == [expected.ljust(320, b"\0")]


@pytest.mark.parametrize(
    "maps, scalars, size",
    [((), 3, 32), ((), 4, 32), ((IMAGE,), 3, 192), ((IMAGE,), 12, 192), ((IMAGE,), 13, 256)],
)
def test_the_block_is_as_long_as_the_struct(maps: tuple, scalars: int, size: int, recorder: Recorder) -> None:
    launch = launch_of(maps, (1,) * scalars)
    assert len(launch._new_block().buffer) == size


def test_without_maps_nothing_stands_before_the_pointers(recorder: Recorder) -> None:
    recorder.size = 28
    launch_of()(4096, 8192)
    assert recorder.launched == [struct.pack("=2Q3i", 4096, 8192, 7, 8, 9)] and not recorder.encoded


def test_the_encoder_gets_the_map_and_the_address_behind_its_offset(recorder: Recorder) -> None:
    launch_of((BoxMap(DataType.FLOAT16, (16, 9, 5), (32, 288), (16, 3, 1), Swizzle.B32, 1, offset=96),))(4096, 8192)
    assert recorder.encoded == [((6, 8288, (16, 9, 5), (32, 288), (16, 3, 1)), {"swizzle": 1})]


def test_the_encoder_gets_the_pixels_of_im2col(recorder: Recorder) -> None:
    pixels = Pixels((-1, -2), (0, -2), (1, 2))
    one = BoxMap(DataType.FLOAT16, (64, 9, 5, 2), (128, 1152, 5760), (64, 128), Swizzle.B128, 0, pixels=pixels)
    launch_of((one,))(4096, 8192)
    tensor = (6, 4096, (64, 9, 5, 2), (128, 1152, 5760), (64, 128))
    assert recorder.encoded == [(tensor, {"swizzle": 3, "pixels": pixels})]


def test_an_address_is_encoded_once_and_another_anew(recorder: Recorder) -> None:
    recorder.size = 320
    launch = launch_of((IMAGE, RESULT))
    for image, result in ((4096, 8192), (4096, 8192), (4096, 12288), (4096, 8192), (8192, 4096)):
        launch(image, result)
        start = recorder.map_at(image) + recorder.map_at(result) + struct.pack("=2Q", image, result)
        assert recorder.launched[-1].startswith(start)
    addresses = [arguments[1] for arguments, _ in recorder.encoded]
    assert addresses == [4096, 8192, 12288, 8192, 4096]  # each map keeps its own


def test_launches_do_not_share_their_maps(recorder: Recorder) -> None:
    for _ in range(2):
        launch_of((IMAGE,))(4096, 0)
    assert len(recorder.encoded) == 2


def test_few_encodings_are_kept(recorder: Recorder) -> None:
    launch = launch_of((IMAGE,))
    addresses = [4096 * (1 + i) for i in range(_KEPT_ENCODINGS + 1)]
    for address in addresses[:-1] * 2:
        launch(address, 0)
    assert len(recorder.encoded) == _KEPT_ENCODINGS
    launch(addresses[-1], 0)  # one too many: all are forgotten
    launch(addresses[-1], 0)
    launch(addresses[0], 0)
    assert len(recorder.encoded) == _KEPT_ENCODINGS + 2


def test_threads_launch_with_their_own_maps(recorder: Recorder) -> None:
    recorder.size = 320
    launch = launch_of((IMAGE, RESULT))

    def calls(thread: int) -> None:
        for i in range(300):
            launch(16 * (i % 100 + thread), 16 * (i % 70))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(calls, range(8)))
    assert len(recorder.launched) == 2400
    for block in recorder.launched:
        image, result = struct.unpack_from("=2Q", block, 256)
        assert block[:256] == recorder.map_at(image) + recorder.map_at(result)


def test_an_error_of_the_encoder_launches_nothing_and_is_not_kept(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = recorder.map_at
    monkeypatch.setattr(recorder, "map_at", lambda address: 1 // 0)
    launch = launch_of((IMAGE,))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            launch(4096, 0)
    assert not recorder.launched
    monkeypatch.setattr(recorder, "map_at", good)
    launch(4096, 0)
    assert len(recorder.launched) == 1


# --- the emulator

COPY = """
using namespace hc::ptx;

struct Params {
    hc::TensorMap from, to;
    const float* in;
    float* out;
    int column, row, added;
};
static_assert(sizeof(Params) == 320, "up to a multiple of 64");

extern "C" __global__ void __launch_bounds__(32) copy(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char dynamic_smem[];
    float* box = reinterpret_cast<float*>(dynamic_smem);
    u64* bar = reinterpret_cast<u64*>(dynamic_smem + 1024);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 1024);
        cp_async_bulk_tensor_2d_shared_global(box, &p.from, bar, p.column, p.row);
    }
    __syncthreads();
    while (!mbarrier_try_wait_parity(bar, 0)) {
    }
    for (int i = threadIdx.x; i < 256; i += 32) box[i] += p.added;
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_2d_global_shared(&p.to, box, 0, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}
"""


def copy_launch(column: int, row: int, offset_rows: int = 0) -> Launch:
    """Copies a box of 8 x 32 at (row, column) of the image, whose first rows the map may leave out; adds 1000."""
    seen: set[str] = set()
    headers = [f"kernels/ptx/{name}.cuh" for name in ("mbarrier", "fence", "bulk", "tensor_map")]
    lines = [line for header in headers if header not in seen for line in _inlined(header, seen)]
    source = KernelSource("copy", "copy", (), "\n".join(lines) + COPY)
    left = (COLUMNS, ROWS - offset_rows)
    image = BoxMap(IMAGE.data_type, left, IMAGE.strides, IMAGE.box, IMAGE.swizzle, 0, 4 * COLUMNS * offset_rows)
    fields, maps = {"column": column, "row": row, "added": 1000}, {"from": image, "to": RESULT}
    return Launch(source, CPU, LaunchShape(1, 32, 2048), fields, maps)


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
@pytest.mark.usefixtures("emulator_cache")
class TestEmulated:
    def test_boxes_are_copied_between_the_tensors_of_each_call(self) -> None:
        images = [torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) + 7.0 * i for i in range(2)]
        with emulator.emulated_device():
            launch = copy_launch(column=8, row=3, offset_rows=2)
            for image in (images[0], images[1], images[0]):
                out = torch.zeros(ROWS, COLUMNS)
                launch(image.data_ptr(), out.data_ptr())
                assert torch.equal(out[:8, :32], image[5:13, 8:40] + 1000)
                assert not out[8:].any() and not out[:, 32:].any()

    def test_what_lies_outside_the_tensor_reads_as_zero(self) -> None:
        image = torch.ones(ROWS, COLUMNS)
        with emulator.emulated_device():
            out = torch.zeros(ROWS, COLUMNS)
            copy_launch(column=48, row=-1)(image.data_ptr(), out.data_ptr())
        expected = torch.full((8, 32), 1000.0)
        expected[1:, :16] += 1
        assert torch.equal(out[:8, :32], expected)

    def test_what_the_emulator_refuses_is_raised_as_it_is(self) -> None:
        image = torch.ones(ROWS, COLUMNS)
        with emulator.emulated_device() as device:
            out = torch.zeros(ROWS, COLUMNS)
            with pytest.raises(TensorMapError, match="not a multiple of 16"):
                copy_launch(0, 0)(image.data_ptr() + 4, out.data_ptr())
        assert not device.launches


# --- the driver's encoder, without a driver


class Driver:
    """The functions of the driver that encode a map: they note their arguments, and fail if they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cuda.bindings import driver

        self.api, self.given, self.contexts, self.status, self.current = driver, [], [], 0, 1
        monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", self.encode)
        monkeypatch.setattr(driver, "cuTensorMapEncodeIm2col", lambda *given: self.encode("im2col", *given))
        monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (driver.CUresult(0), driver.CUcontext(self.current)))
        monkeypatch.setattr(driver, "cuCtxSetCurrent", lambda each: self.contexts.append(each) or (driver.CUresult(0),))
        monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (driver.CUresult(0), b"a sentence"))
        monkeypatch.setattr(loader, "_primary_context", lambda index: f"context {index}")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def encode(self, *arguments: object) -> tuple[object, object]:
        self.given.append(arguments)
        encoded = self.api.CUtensorMap()
        ctypes.memmove(int(encoded.getPtr()), bytes(range(128)), 128)
        return self.api.CUresult(self.status), encoded


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    pytest.importorskip("cuda.bindings.driver")
    return Driver(monkeypatch)


TILED = {"data_type": DataType.FLOAT16, "address": 4096, "extents": (64, 40, 1 << 32), "strides": (128, 5120),
         "box": (64, 8, 2)}  # fmt: skip


def test_the_driver_gets_every_argument_in_its_type(driver: Driver) -> None:
    api = driver.api
    assert encode_tiled(**TILED, swizzle=Swizzle.B128) == bytes(range(128))
    assert encode_tiled(**TILED, element_strides=(1, 2, 1), l2_promotion=0, out_of_bounds=1) == bytes(range(128))
    kind, rank, address, extents, strides, box, steps, *modes = driver.given[0]
    assert (kind, rank, address) == (api.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, 4096)
    assert {type(word) for word in (*extents, *strides)} == {api.cuuint64_t}
    assert {type(word) for word in (*box, *steps)} == {api.cuuint32_t}
    words = [tuple(map(int, each)) for each in (extents, strides, box, steps)]
    assert words == [(64, 40, 1 << 32), (128, 5120), (64, 8, 2), (1, 1, 1)]
    assert modes == [
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ]
    assert tuple(map(int, driver.given[1][6])) == (1, 2, 1)
    assert [int(mode) for mode in driver.given[1][7:]] == [0, 0, 0, 1]
    assert not driver.contexts


PIXELS = {"data_type": DataType.BFLOAT16, "address": 4096, "extents": (64, 40, 30, 1 << 20),
          "strides": (128, 5120, 153600), "box": (64, 128), "pixels": Pixels((-3, 2), (-5, 0), (2, 1))}  # fmt: skip


def test_the_driver_gets_the_pixels_of_im2col_in_their_types(driver: Driver) -> None:
    api = driver.api
    assert encode_tiled(**PIXELS, swizzle=Swizzle.B128) == bytes(range(128))
    name, kind, rank, address, extents, strides, lower, upper, channels, count, steps, *modes = driver.given[0]
    assert (name, rank, address) == ("im2col", 4, 4096)
    assert kind == api.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert {type(word) for word in (*extents, *strides)} == {api.cuuint64_t}
    assert {type(word) for word in steps} == {api.cuuint32_t}
    assert {type(word) for word in (*lower, *upper, channels, count)} == {int}
    assert [tuple(map(int, each)) for each in (extents, strides)] == [PIXELS["extents"], PIXELS["strides"]]
    assert (lower, upper, channels, count) == ([-3, 2], [-5, 0], 64, 128)
    assert tuple(map(int, steps)) == (1, 2, 1, 1)
    assert [int(mode) for mode in modes] == [0, 3, 3, 0]
    assert not driver.contexts


def test_a_refusal_of_im2col_names_its_encoder(driver: Driver) -> None:
    driver.status = 1
    with pytest.raises(DriverError, match=r"\(64, 128\).*cuTensorMapEncodeIm2col failed"):
        encode_tiled(**PIXELS)


def test_a_refusal_of_the_driver_is_an_error_that_shows_the_map(driver: Driver) -> None:
    driver.status = 1
    with pytest.raises(DriverError) as raised:
        encode_tiled(**TILED, swizzle=Swizzle.B64)
    message = str(raised.value)
    for part in ("(64, 8, 2)", "swizzle 2", "(64, 40, 4294967296)", "(128, 5120) bytes", "data type 6", "at 0x1000"):
        assert part in message
    assert "cuTensorMapEncodeTiled failed with CUDA_ERROR_INVALID_VALUE (1: a sentence)" in message


def test_a_thread_without_a_context_gets_that_of_its_device(driver: Driver) -> None:
    driver.current = 0
    encode_tiled(**TILED)
    assert driver.contexts == ["context 3"] and len(driver.given) == 1
