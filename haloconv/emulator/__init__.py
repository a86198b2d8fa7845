"""The emulator: our CUDA kernels on a CPU, one fiber per CUDA thread, with every memory access checked.

``with emulated_device(seed=0):`` CPU tensors are treated as living on a GPU, and ``haloconv.conv2d`` runs the source
that NVRTC would compile, with the same constants, geometry and arguments. docs/emulator.md has the model and its
guarantees.
"""

from __future__ import annotations

from haloconv.emulator.build import available
from haloconv.emulator.device import EmulatedDevice, EmulatedKernel, current_device, emulated_device
from haloconv.emulator.runtime import EmulatorError, Finding, LaunchStatistics, Module, Region, SiteStatistics

__all__ = [
    "EmulatedDevice",
    "EmulatedKernel",
    "EmulatorError",
    "Finding",
    "LaunchStatistics",
    "Module",
    "Region",
    "SiteStatistics",
    "available",
    "current_device",
    "emulated_device",
]
