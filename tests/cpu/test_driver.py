"""Launches that begin while the kernel before them ends, and those with clusters, without a driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from haloconv.jit import DriverError, KernelSource
from haloconv.jit import driver as kernels
from haloconv.jit.driver import LoadedKernel
from haloconv.jit.launch import Launch, LaunchShape


class Launches:
    """cuLaunchKernelEx, which notes what it is given, and fails with the statuses it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cuda.bindings import driver

        self.api, self.given, self.plain, self.statuses, self.version = driver, [], [], [], 12_030
        monkeypatch.setattr(driver, "cuLaunchKernelEx", self.launch)
        monkeypatch.setattr(kernels, "driver_cuda_version", lambda: self.version)
        monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (driver.CUresult(0), b"a sentence"))
        self.clusters = []
        self.kernel = object.__new__(LoadedKernel)
        cubin = SimpleNamespace(entry="toy", arch="sm_90a", static_smem_bytes=0, registers=32)
        self.kernel.cubin, self.kernel.device_index, self.kernel.handle = cubin, 0, driver.CUkernel(77)
        self.kernel._context, self.kernel._submit = "context", self.submit

    def launch(self, config: object, function: object, parameters: int, extra: int) -> tuple[object]:
        attribute = config.attrs[0]
        shape = (config.gridDimX, config.gridDimY, config.blockDimX, config.sharedMemBytes, int(config.hStream))
        overlap = attribute.value.programmaticStreamSerializationAllowed
        self.given.append((*shape, config.numAttrs, attribute.id.name, overlap, int(function), parameters, extra))
        extent = attribute.value.clusterDim
        self.clusters.append((extent.x, extent.y, extent.z))
        return (self.api.CUresult(self.statuses.pop(0) if self.statuses else 0),)

    def submit(self, *arguments: object) -> tuple[object]:
        self.plain.append(arguments)
        return (self.api.CUresult(0),)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    pytest.importorskip("cuda.bindings.driver")
    return Launches(monkeypatch)


def test_a_launch_with_pdl_says_so(launches: Launches) -> None:
    launch = launches.kernel.pdl_launch(132, 512, 200_000)
    for stream in (5, 6):
        launch(stream, 4096)
    allowed = (1, "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1)
    assert launches.given == [(132, 1, 512, 200_000, stream, *allowed, 77, 4096, 0) for stream in (5, 6)]


def test_drivers_that_cannot_capture_it_launch_as_ever(launches: Launches) -> None:
    launches.version = 12_020
    launches.kernel.pdl_launch(132, 512, 200_000)(5, 4096)
    shape = (132, 1, 1, 512, 1, 1, 200_000)
    assert launches.given == [] and launches.plain == [(launches.kernel.handle, *shape, 5, 4096, 0)]


def test_each_launcher_is_one_threads_own(launches: Launches) -> None:
    first, second = (launches.kernel.pdl_launch(grid, 128, 0) for grid in (1, 2))
    first(5, 0)
    second(6, 0)
    first(5, 0)
    assert [(given[0], given[4]) for given in launches.given] == [(1, 5), (2, 6), (1, 5)]


def test_without_a_context_it_is_launched_once_more(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = []
    monkeypatch.setattr(launches.api, "cuCtxSetCurrent", lambda each: contexts.append(each) or (0,))
    launches.statuses = [launches.api.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    launches.kernel.pdl_launch(3, 128, 0)(5, 4096)
    assert contexts == ["context"] and len(launches.plain) == 1 and launches.plain[0][1] == 3


def test_a_refusal_is_an_error(launches: Launches) -> None:
    launches.statuses = [launches.api.CUresult.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(DriverError, match=r"launch of toy .* failed with CUDA_ERROR_INVALID_VALUE"):
        launches.kernel.pdl_launch(3, 128, 0)(5, 4096)


def test_a_launch_submits_each_block_of_arguments_its_own_way(launches: Launches) -> None:
    launch = object.__new__(Launch)
    launch._arguments, launch._fill, launch._free, launch._submits = bytes(64), lambda *_: None, [], {}
    launch._shape, launch._pdl = LaunchShape(7, 128, 1024), True
    launch._index, launch._several_devices, launch._kernel = 0, False, launches.kernel
    launch._stream = lambda index: 5
    launch()
    (first,) = launch._free
    launch._free.clear()  # another thread has it
    launch()
    (second,) = launch._free
    addresses = [first.pointer_array_address, second.pointer_array_address]
    assert [given[-2] for given in launches.given] == addresses and len(set(addresses)) == 2
    assert not launches.plain and launches.given[0][:5] == (7, 1, 128, 1024, 5)


def test_a_launch_with_clusters_says_so(launches: Launches) -> None:
    launches.kernel.cluster_launch(128, 512, 200_000, 8)(5, 4096)
    (given,) = launches.given
    assert given[:7] == (128, 1, 512, 200_000, 5, 1, "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION")
    assert given[-3:] == (77, 4096, 0) and launches.clusters == [(8, 1, 1)]


def test_clusters_are_never_left_out(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a context, and from a driver that refuses them."""
    contexts = []
    monkeypatch.setattr(launches.api, "cuCtxSetCurrent", lambda each: contexts.append(each) or (0,))
    status = launches.api.CUresult
    launches.statuses = [status.CUDA_ERROR_INVALID_CONTEXT]
    launches.kernel.cluster_launch(16, 128, 0, 2)(5, 4096)
    assert contexts == ["context"] and launches.clusters == [(2, 1, 1)] * 2
    launches.statuses = [status.CUDA_ERROR_INVALID_CLUSTER_SIZE]
    with pytest.raises(DriverError, match=r"launch of toy .* failed with CUDA_ERROR_INVALID_CLUSTER_SIZE"):
        launches.kernel.cluster_launch(16, 128, 0, 2)(5, 4096)
    assert launches.plain == []


def test_a_bound_launch_has_its_clusters(launches: Launches) -> None:
    launch = object.__new__(Launch)
    launch._arguments, launch._fill, launch._free, launch._submits = bytes(64), lambda *_: None, [], {}
    launch._shape, launch._pdl = LaunchShape(8, 128, 1024, cluster=4), False
    launch._index, launch._several_devices, launch._kernel = 0, False, launches.kernel
    launch._stream = lambda index: 5
    launch()
    assert launches.clusters == [(4, 1, 1)] and not launches.plain


@pytest.mark.parametrize(
    ("shape", "pdl"), [((7, 32, 0, 2), False), ((32, 32, 0, 16), False), ((8, 32, 0, 2), True)], ids=str
)
def test_clusters_that_cannot_be(shape: tuple[int, ...], pdl: bool) -> None:
    code = 'struct Params { float* to; };\nextern "C" __global__ void toy(const __grid_constant__ Params p) {}\n'
    source = KernelSource("toy", "toy", (), code)
    with pytest.raises(ValueError, match="no clusters of"):
        Launch(source, torch.device("cpu"), LaunchShape(*shape), {}, pdl=pdl)
