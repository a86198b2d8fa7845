"""The emulated device: a stand-in under which CPU tensors are treated as living on a GPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from haloconv import plan
from haloconv.device import Device, DeviceFacts, max_smem_bytes_of, set_stand_in
from haloconv.emulator.runtime import LaunchStatistics, Module, Region
from haloconv.emulator.tensor_map import encode_tiled
from haloconv.families.base import BoundCall
from haloconv.jit import DriverError, KernelSource
from haloconv.jit.launch import LaunchShape

_UNWRITTEN = {
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
}
_CREATORS = {
    *_UNWRITTEN,
    torch.Tensor.new_full,
    torch.Tensor.new_zeros,
    torch.full,
    torch.zeros,
    torch.zeros_like,
}
_modules: dict[str, Module] = {}
_guard = threading.Lock()


class _Known:
    """A tensor that kernels may see as long as it lives, and has the memory that it had when it became known."""

    def __init__(self, tensor: torch.Tensor, writable: bool) -> None:
        self._tensor = weakref.ref(tensor)
        self._span = _span(tensor)
        self.region = Region(*self._span, writable)

    def alive(self) -> bool:
        """FSDP2 gives the memory of gathered weights back while it keeps the tensors."""
        tensor = self._tensor()
        return tensor is not None and _span(tensor) == self._span


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of the tensor's elements, and the one behind its last."""
    begin = torch._C.TensorBase.data_ptr(tensor)
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


class EmulatedDevice(TorchFunctionMode):
    """What ``emulated_device`` gives: the tensors that launches may touch, and what launches reported.

    A tensor is writable if it was made inside by an ``empty``, ``zeros`` or ``full`` function, or exposed so. The
    operands of a plan, and every other tensor whose ``data_ptr()`` is taken inside, are inputs: a kernel's write to
    them is a finding. ``launches`` counts launches, ``statistics`` has a record of each if they were asked for.
    """

    def __init__(self, seed: int, facts: DeviceFacts, limit_s: float, statistics: bool) -> None:
        super().__init__()
        self.seed, self.facts, self.limit_s = seed, facts, limit_s
        self.launches = 0
        self.wants_statistics = statistics
        self.statistics: list[LaunchStatistics] = []
        self._known: dict[tuple[int, int], _Known] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.data_ptr:
            self._expose(args[0], writable=False)
        elif func in _CREATORS:
            if func in _UNWRITTEN:
                _poison(result)
            self._expose(result, writable=True)
        return result

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> int:
        """Let kernels read ``tensor``, and write it if ``writable``; its address."""
        self._known.pop(_span(tensor), None)
        self._expose(tensor, writable)
        return _span(tensor)[0]

    def watch(self, run: BoundCall) -> BoundCall:
        """``run`` with its tensors as inputs, and all that it makes known, also where autograd hides the context."""

        def watched(*tensors: torch.Tensor | None) -> torch.Tensor:
            for tensor in tensors:
                if tensor is not None:
                    self.expose(tensor)
            if _get_current_function_mode() is self:
                return run(*tensors)
            with self:
                return run(*tensors)

        return watched

    def regions(self) -> list[Region]:
        """What kernels may touch now."""
        with torch._C.DisableTorchFunction():  # to look at a tensor is not to show it to a kernel
            self._known = {span: known for span, known in self._known.items() if known.alive()}
        return [known.region for known in self._known.values()]

    def _expose(self, tensor: torch.Tensor, writable: bool) -> None:
        span = _span(tensor)
        known = self._known.get(span)
        if known is None or not known.alive():
            self._known[span] = _Known(tensor, writable)


def _poison(tensor: torch.Tensor) -> None:
    """Fill memory that nothing has written: NaN, or the largest integer."""
    if tensor.numel() == 0:
        return
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype not in (torch.bool, torch.complex64, torch.complex128):
            tensor.fill_(torch.iinfo(tensor.dtype).max)


class EmulatedKernel:
    """A kernel ready to launch on the emulated device in force; ``launch`` has the arguments of jit.LoadedKernel's."""

    def __init__(self, source: KernelSource, smem_bytes: int) -> None:
        device = current_device()
        with _guard:
            module = _modules.get(source.digest)
            if module is None:
                module = _modules[source.digest] = Module(source)
        self.module = module
        needed = smem_bytes + module.static_smem_bytes
        if needed > device.facts.max_smem_bytes:
            raise DriverError(
                f"{source.entry} wants {needed} bytes of shared memory per block; {device.facts.name} has "
                f"{device.facts.max_smem_bytes}"
            )

    def launch(self, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params_address: int) -> None:
        """Run ``grid_x`` blocks of ``block_threads`` threads to their end. ``stream`` is not used.

        Raises EmulatorError for what the emulator finds, RuntimeError outside ``emulated_device``.
        """
        self._run(LaunchShape(grid_x, block_threads, smem_bytes), params_address)

    def cluster_launch(
        self, grid_x: int, block_threads: int, smem_bytes: int, cluster: int
    ) -> Callable[[int, int], None]:
        """``launch`` with ``cluster`` neighbouring blocks as a cluster, as jit.LoadedKernel's."""
        shape = LaunchShape(grid_x, block_threads, smem_bytes, cluster)
        return lambda stream, params_address: self._run(shape, params_address)

    def _run(self, shape: LaunchShape, params_address: int) -> None:
        device = current_device()
        device.launches += 1
        report = self.module.run(
            shape, params_address, device.regions(), device.seed,
            device.limit_s, device.wants_statistics,
        )  # fmt: skip
        if report is not None:
            device.statistics.append(report)


_current: EmulatedDevice | None = None


def current_device() -> EmulatedDevice:
    """The emulated device in force. Raises RuntimeError outside ``emulated_device``."""
    if _current is None:
        raise RuntimeError("no emulated device is in force: use haloconv.emulator.emulated_device()")
    return _current


@contextmanager
def emulated_device(
    seed: int = 0, sm_count: int = 4, arch: str = "sm_90a", limit_s: float = 60.0, statistics: bool = False
) -> Iterator[EmulatedDevice]:
    """Inside, CPU tensors are treated as living on a GPU of ``arch`` with ``sm_count`` multiprocessors.

    Kernels run to their end at their launch, under the schedule of ``seed``; ``limit_s`` is the wall-clock limit of one
    launch. Plans are forgotten on entry and on exit. Raises RuntimeError if the emulator cannot run here, or inside
    another emulated device.
    """
    global _current
    if _current is not None:
        raise RuntimeError("an emulated device is in force already")
    digits = "".join(each for each in arch if each.isdigit())
    capability = (int(digits[:-1]), int(digits[-1]))
    smem = max_smem_bytes_of(capability)
    facts = DeviceFacts(f"emulated {arch}", arch, sm_count, capability, 141 << 30, smem, "none")
    device = EmulatedDevice(seed, facts, limit_s, statistics)
    plan.clear_plans()
    _current = device
    set_stand_in(Device(facts, EmulatedKernel, encode_tiled, device.watch))
    try:
        with device:
            yield device
    finally:
        _current = None
        set_stand_in(None)
        plan.clear_plans()
