"""Loading and launching, which are never tried without a GPU. Imports cuda-bindings, and only when needed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from haloconv.device import driver_cuda_version
from haloconv.jit.compile import Cubin, install_command, nvrtc_info

TENSOR_MAP_BYTES = 128
"""Size of a tensor map (CUtensorMap). Its place must be a multiple of 64 bytes."""

_DEFAULT_SMEM_BYTES = 48 * 1024
_INVALID_CONTEXT = 201
_PDL_IN_GRAPHS = 12_030  # release notes of CUDA 12.3: from there on graphs can hold a programmatic dependency


class DriverError(RuntimeError):
    """A call of the CUDA driver failed. The message has the driver's name and text of the error, and what was tried."""


class LoadedKernel:
    """A kernel on one device, ready to launch. It stays loaded as long as the process lives."""

    __slots__ = ("_context", "_library", "_submit", "cubin", "device_index", "dynamic_smem_bytes", "handle")

    def __init__(self, cubin: Cubin, device_index: int) -> None:
        from cuda.bindings import driver

        self.cubin = cubin
        self.device_index = device_index
        self.dynamic_smem_bytes = _DEFAULT_SMEM_BYTES - cubin.static_smem_bytes
        self._submit = driver.cuLaunchKernel
        self._context = _primary_context(device_index)
        self._library = _driver_call("cuLibraryLoadData", cubin.image, [], [], 0, [], [], 0)
        self.handle = _driver_call("cuLibraryGetKernel", self._library, cubin.entry.encode())
        self._load_now()

    def _load_now(self) -> None:
        """Bring the code onto the device: the first launch would do it, and could not while a graph is captured."""
        from cuda.bindings import driver

        asks_for_code = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        _driver_call("cuCtxPushCurrent", self._context)
        try:
            _driver_call("cuFuncGetAttribute", asks_for_code, _driver_call("cuKernelGetFunction", self.handle))
        finally:
            _driver_call("cuCtxPopCurrent")

    def allow_dynamic_smem(self, dynamic_smem_bytes: int) -> None:
        """Let a launch ask for up to ``dynamic_smem_bytes`` of dynamic shared memory per block.

        Raises DriverError if the device has less.
        """
        if dynamic_smem_bytes <= self.dynamic_smem_bytes:
            return
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = _driver_call("cuDeviceGet", self.device_index)
        try:
            _driver_call("cuKernelSetAttribute", attribute, dynamic_smem_bytes, self.handle, device)
        except DriverError as error:
            wanted = f"{self.cubin.entry} wants {dynamic_smem_bytes} bytes of dynamic shared memory per block"
            raise DriverError(f"{wanted} on cuda:{self.device_index}: {error}") from error
        self.dynamic_smem_bytes = dynamic_smem_bytes

    def launch(self, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params_address: int) -> None:
        """Queue ``grid_x`` blocks of ``block_threads`` threads on ``stream`` (a raw CUstream of this kernel's device).

        ``smem_bytes`` is dynamic shared memory per block; ``params_address`` is ArgumentBlock.pointer_array_address.

        Raises DriverError if the driver refuses the launch. An error inside the kernel shows at a later call.
        """
        error = self._submit(self.handle, grid_x, 1, 1, block_threads, 1, 1, smem_bytes, stream, params_address, 0)[0]
        if error:
            self._recover(error, grid_x, block_threads, smem_bytes, stream, params_address)

    def pdl_launch(self, grid_x: int, block_threads: int, smem_bytes: int) -> Callable[[int, int], None]:
        """``launch`` with PDL, as a function of the stream and the parameters' address, for one thread at a time.

        The grid may begin as soon as every block of the kernel before it on the stream has said so
        (griddepcontrol.launch_dependents) or ended. So it must wait (griddepcontrol.wait) before it reads what that
        kernel writes. Drivers before CUDA 12.3, whose graphs cannot hold such a dependency, end that kernel first.
        """
        from cuda.bindings import driver

        if driver_cuda_version() < _PDL_IN_GRAPHS:
            return lambda stream, params: self.launch(grid_x, block_threads, smem_bytes, stream, params)
        serial = driver.CUlaunchAttribute()
        serial.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        serial.value.programmaticStreamSerializationAllowed = 1
        submit = self._submitter(serial, grid_x, block_threads, smem_bytes)

        def launch(stream: int, params_address: int) -> None:
            error = submit(stream, params_address)
            if error:
                self._recover(error, grid_x, block_threads, smem_bytes, stream, params_address)

        return launch

    def cluster_launch(
        self, grid_x: int, block_threads: int, smem_bytes: int, cluster: int
    ) -> Callable[[int, int], None]:
        """``launch`` with ``cluster`` neighbouring blocks as a cluster, at most 8, which divide ``grid_x``.

        A function of the stream and the parameters' address, for one thread at a time. It never falls back to a launch
        without clusters, whose blocks would have no neighbours.
        """
        from cuda.bindings import driver

        dimension = driver.CUlaunchAttribute()
        dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        extent = dimension.value.clusterDim
        extent.x, extent.y, extent.z = cluster, 1, 1
        submit = self._submitter(dimension, grid_x, block_threads, smem_bytes)

        def launch(stream: int, params_address: int) -> None:
            error = submit(stream, params_address)
            if error == _INVALID_CONTEXT:
                _driver_call("cuCtxSetCurrent", self._context)
                error = submit(stream, params_address)
            if error:
                raise self._refusal(error, grid_x, block_threads, smem_bytes)

        return launch

    def _submitter(
        self, attribute: object, grid_x: int, block_threads: int, smem_bytes: int
    ) -> Callable[[int, int], int]:
        """cuLaunchKernelEx with one attribute, as a function of the stream and the parameters' address; its status."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block_threads, 1, 1
        config.sharedMemBytes, config.attrs, config.numAttrs = smem_bytes, [attribute], 1
        submit, handle = driver.cuLaunchKernelEx, driver.CUfunction(int(self.handle))

        def launch(stream: int, params_address: int) -> int:
            config.hStream = stream
            error: int = submit(config, handle, params_address, 0)[0]
            return error

        return launch

    def _recover(self, error: int, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params: int) -> None:
        """Launch once more on a thread that has no context yet; raise any other error."""
        if error == _INVALID_CONTEXT:
            _driver_call("cuCtxSetCurrent", self._context)
            error = self._submit(self.handle, grid_x, 1, 1, block_threads, 1, 1, smem_bytes, stream, params, 0)[0]
        if error:
            raise self._refusal(error, grid_x, block_threads, smem_bytes)

    def _refusal(self, error: int, grid_x: int, block_threads: int, smem_bytes: int) -> DriverError:
        """What is raised for a launch that failed with ``error``."""
        return DriverError(
            f"launch of {self.cubin.entry} ({self.cubin.arch}) on cuda:{self.device_index} failed with "
            f"{_error_text(error)}; {grid_x} blocks of {block_threads} threads, {smem_bytes} bytes of dynamic "
            f"shared memory, {self.cubin.static_smem_bytes} static, {self.cubin.registers} registers per thread"
        )


class ArgumentBlock:
    """The single by-value struct argument of a kernel, in host memory that does not move.

    ``buffer`` has ``size_bytes`` bytes, starts at a multiple of ``alignment`` and suits ``struct.pack_into``.
    ``pointer_array_address`` is what cuLaunchKernel wants as ``kernelParams``. The driver copies the struct during the
    launch, so a block may be filled again right after it, but not by another thread before.
    """

    __slots__ = ("_pointers", "buffer", "pointer_array_address")

    def __init__(self, size_bytes: int, alignment: int = 64) -> None:
        storage = (ctypes.c_ubyte * (size_bytes + alignment))()
        offset = -ctypes.addressof(storage) % alignment
        self.buffer = (ctypes.c_ubyte * size_bytes).from_buffer(storage, offset)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.pointer_array_address = ctypes.addressof(self._pointers)


def encode_tensor_map(data_type: int, address: int, shape: tuple[Sequence[int], ...], modes: tuple[int, ...]) -> bytes:
    """What cuTensorMapEncodeTiled makes of ``shape`` (extents, strides, box, steps) and ``modes`` (interleave, swizzle,
    L2 promotion, fill). Raises DriverError.
    """
    extents, strides, box, steps = shape
    tensor, arguments = _words(extents, strides), (_uint32(box), _uint32(steps))
    return _encoded("cuTensorMapEncodeTiled", data_type, address, (*tensor, *arguments), modes)


def encode_im2col_map(
    data_type: int,
    address: int,
    shape: tuple[Sequence[int], ...],
    pixels: tuple[Sequence[int], ...],
    modes: tuple[int, ...],
) -> bytes:
    """What cuTensorMapEncodeIm2col makes of ``shape`` (extents, strides, channels and pixels of a box), ``pixels``
    (lower and upper corner, steps, each (w, h)), and ``modes`` as above. Raises DriverError.
    """
    (extents, strides, (channels, count)), (lower, upper, steps) = shape, pixels
    tensor, arguments = _words(extents, strides), (list(lower), list(upper), channels, count, _uint32((1, *steps, 1)))
    return _encoded("cuTensorMapEncodeIm2col", data_type, address, (*tensor, *arguments), modes)


def _words(extents: Sequence[int], strides: Sequence[int]) -> tuple[list[object], list[object]]:
    from cuda.bindings import driver

    return [driver.cuuint64_t(each) for each in extents], [driver.cuuint64_t(each) for each in strides]


def _uint32(values: Sequence[int]) -> list[object]:
    from cuda.bindings import driver

    return [driver.cuuint32_t(each) for each in values]


def _encoded(name: str, data_type: int, address: int, arguments: tuple[Any, ...], modes: tuple[int, ...]) -> bytes:
    from cuda.bindings import driver

    if not int(_driver_call("cuCtxGetCurrent")):  # on a thread that has launched nothing yet
        _driver_call("cuCtxSetCurrent", _primary_context(torch.cuda.current_device()))
    names = ("Interleave", "Swizzle", "L2promotion", "FloatOOBfill")
    enums = [getattr(driver, f"CUtensorMap{each}")(mode) for each, mode in zip(names, modes, strict=True)]
    kind, rank = driver.CUtensorMapDataType(data_type), len(arguments[0])
    encoded = _driver_call(name, kind, rank, address, *arguments, *enums)
    return ctypes.string_at(int(encoded.getPtr()), TENSOR_MAP_BYTES)


_loaded: dict[tuple[bytes, str, int], LoadedKernel] = {}
LOADING = threading.Lock()
"""Held while a kernel is loaded: the driver may keep the device from other work meanwhile."""


def load_kernel(cubin: Cubin, device_index: int, dynamic_smem_bytes: int) -> LoadedKernel:
    """``cubin`` on the CUDA device ``device_index``, allowed to use ``dynamic_smem_bytes`` per block. Loaded only once.

    Raises DriverError if there is no GPU, or if the driver does not take the image or the shared memory.
    """
    if not torch.cuda.is_available():
        raise DriverError(f"{cubin.entry} cannot be loaded: PyTorch sees no GPU")
    key = (cubin.image, cubin.entry, device_index)
    with LOADING:
        kernel = _loaded.get(key)
        if kernel is None:
            kernel = _loaded[key] = LoadedKernel(cubin, device_index)
        kernel.allow_dynamic_smem(dynamic_smem_bytes)
    return kernel


@cache
def _primary_context(device_index: int) -> object:
    """The context that PyTorch uses on the device; retained for the life of the process."""
    _driver_call("cuInit", 0)
    return _driver_call("cuDevicePrimaryCtxRetain", _driver_call("cuDeviceGet", device_index))


def _driver_call(name: str, *arguments: object) -> Any:
    """Call the driver's function ``name``; its result without the status. Raises DriverError if it fails."""
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*arguments)
    if status:
        raise DriverError(f"{name} failed with {_error_text(status)}")
    return results[0] if results else None


def _error_text(error: int) -> str:
    """``CUDA_ERROR_NAME (number: the driver's sentence)``, and the remedy where it is known."""
    from cuda.bindings import driver

    status = driver.CUresult(error)
    _, sentence = driver.cuGetErrorString(status)
    text = f"{status.name} ({int(error)}: {sentence.decode() if sentence else 'no description'})"
    unloadable = ("CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
    if status.name in unloadable:
        text += f"; NVRTC {nvrtc_info()[0]} may be newer than the driver: update the driver or {install_command()}"
    return text
