"""From a kernel's name and constants to a launchable kernel: join the source, compile it or find it, load it."""

from __future__ import annotations

from haloconv.jit.cache import CacheStatistics, cache_root, cache_size, clear_cache, get_kernel, statistics
from haloconv.jit.compile import CompileError, Cubin, ToolchainError, UnsupportedArchError, compile_source, nvrtc_info
from haloconv.jit.driver import LOADING, TENSOR_MAP_BYTES, ArgumentBlock, DriverError, LoadedKernel, load_kernel
from haloconv.jit.source import KernelSource, SourceError, family_sources, kernel_source
from haloconv.jit.tensor_map import BoxMap, DataType, OutOfBounds, Pixels, Swizzle, encode_tiled

__all__ = [
    "LOADING",
    "TENSOR_MAP_BYTES",
    "ArgumentBlock",
    "BoxMap",
    "CacheStatistics",
    "CompileError",
    "Cubin",
    "DataType",
    "DriverError",
    "KernelSource",
    "LoadedKernel",
    "OutOfBounds",
    "Pixels",
    "SourceError",
    "Swizzle",
    "ToolchainError",
    "UnsupportedArchError",
    "cache_root",
    "cache_size",
    "clear_cache",
    "compile_source",
    "encode_tiled",
    "family_sources",
    "get_kernel",
    "kernel_source",
    "load_kernel",
    "nvrtc_info",
    "statistics",
]
