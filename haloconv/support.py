"""Which problems our kernels do not take, and why: the only source of "unsupported" sentences."""

from __future__ import annotations

from collections.abc import Collection

import torch

from haloconv.device import runs_kernels
from haloconv.problem import Problem

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_EXTENT_LIMIT = 1 << 30  # positions inside the padded image are 32-bit sums of two terms
_FILTER_LIMIT = 1 << 31  # an index over one filter's taps and channels is a 32-bit integer
_PLANE_LIMIT = 1 << 31  # where rows are not aligned, tensor maps number the pixels of a plane by 32-bit integers


def why_not(problem: Problem, device: torch.device) -> str | None:
    """None if kernels on CUDA cores can run the problem on the device, else a sentence that says why not."""
    reason = why_not_elements(problem.dtype, device)
    if reason is not None:
        return reason
    if problem.is_empty:
        return "a tensor has no elements, so there is nothing to multiply"
    height = problem.h + problem.padding[0] + problem.padding[1]
    width = problem.w + problem.padding[2] + problem.padding[3]
    if max(height, width) >= _EXTENT_LIMIT:
        return f"the padded image of {height} x {width} pixels has a side of 2^30 or more"
    filter_elems = max(problem.c_per_group, problem.k_per_group) * problem.r * problem.s
    if filter_elems >= _FILTER_LIMIT:
        return f"one filter has {filter_elems} elements; our kernels index at most 2^31 - 1"
    return None


def why_not_elements(dtype: torch.dtype, device: torch.device) -> str | None:
    """None if kernels of ours take elements of the dtype on the device, else a sentence that says why not."""
    if not runs_kernels(device):
        return f"the tensors are on {device.type}; our kernels run on CUDA devices"
    if dtype not in KERNEL_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in KERNEL_DTYPES)
        return f"the dtype is {dtype}; our kernels take {names}"
    return None


def why_not_capability(found: tuple[int, int], needed: tuple[int, int], newer: bool) -> str | None:
    """None if a device of compute capability ``found`` runs what ``needed`` does, else a sentence that says why not.

    With ``newer`` so do devices that came after it. A family's own ``capability`` and ``newer`` are what is needed.
    """
    if found == needed or (newer and found > needed):
        return None
    major, minor = needed
    which = f"{major}.{minor} or newer" if newer else f"{major}.{minor}"
    return f"the kernels need compute capability {which}; the device has {found[0]}.{found[1]}"


def why_no_tensor_core_products(problem: Problem, takes: Collection[str] = ("tf32",)) -> str | None:
    """None if tensor cores may form the problem's products, else a sentence that says why not.

    ``takes`` are the precisions of fp32 products that a kernel has.
    """
    if problem.dtype == torch.float64:
        return "the tensor-core kernels do not take torch.float64"
    if problem.dtype != torch.float32 or problem.precision in takes:
        return None
    if problem.precision == "tf32x3":
        return "of the families on tensor cores halo_sm90 and depthwise_toeplitz alone have precision='tf32x3'"
    return "fp32 products in full precision do not run on the tensor cores; allow TF32 or ask for precision='tf32'"


def why_no_tensor_cores(problem: Problem, takes: Collection[str] = ("tf32",)) -> str | None:
    """None if the tensor-core kernels run the problem's direction and precision, else a sentence that says why not."""
    if problem.direction == "wgrad":
        return "the tensor-core kernels of fprop and dgrad have no weight gradient"
    reason = why_no_tensor_core_products(problem, takes)
    if reason is not None:
        return reason
    height, width = (problem.h, problem.w) if problem.direction == "fprop" else (problem.p, problem.q)
    if problem.layout == "nchw" and height * width >= _PLANE_LIMIT and width * problem.dtype.itemsize % 16:
        return f"an image of {height} x {width} pixels has 2^31 or more, in rows of no multiple of 16 bytes"
    return None
