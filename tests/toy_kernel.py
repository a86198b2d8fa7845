"""A kernel of a few lines for the tests of the run-time compiler, and a stand-in compiler that takes no time."""

from __future__ import annotations

import hashlib

from haloconv.jit import Cubin, KernelSource

ARCH = "sm_80"
STATIC_SMEM_BYTES = 128


def toy_source(factor: int = 3) -> KernelSource:
    """A source that NVRTC compiles; every ``factor`` gives another."""
    code = f"""// toy
#define FACTOR {factor}
//@ begin toy.cu
struct Params {{
    int* out;
    int n;
}};
extern "C" __global__ void __launch_bounds__(32) toy(const Params params) {{
    __shared__ int shared[32];
    shared[threadIdx.x] = FACTOR * params.n;
    __syncthreads();
    params.out[threadIdx.x] = shared[31 - threadIdx.x];
}}
//@ end toy.cu
"""
    return KernelSource("toy", "toy", (("FACTOR", factor),), code)


def fake_compile(source: KernelSource, arch: str) -> Cubin:
    """A cubin that tells which source and architecture it was made from."""
    image = b"\x7fELF" + hashlib.sha256(f"{source.digest}{arch}".encode()).digest() * 8
    return Cubin(image, source.entry, arch, 24, 0, 0, STATIC_SMEM_BYTES, nvrtc="13.0", compile_ms=1.5)
