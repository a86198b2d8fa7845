"""What a warm call costs the host, before the device has anything to do: ours and PyTorch's alternate, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv import plan
from haloconv.bench.costs.kernels import Cost
from haloconv.bench.networks.swapped import in_memory_format
from haloconv.device import Device, DeviceFacts, device_facts, set_stand_in, stand_in
from haloconv.families import FAMILIES
from haloconv.functional import conv2d
from haloconv.jit import TENSOR_MAP_BYTES, KernelSource
from haloconv.module import Conv2d
from haloconv.tune.timing import host_cost

ROUNDS = 5
BUDGETS_US = {"F.conv2d, no grad": 12.0, "nn.Conv2d, with grad": 25.0}
NOT_MEASURED = (
    "There is no GPU: this is our side alone, up to the launch, on a stand-in for an H200 that runs nothing. Not "
    "measured: the driver's part of a launch, and PyTorch's side. Nothing was written."
)
H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
_CPU = torch.device("cpu")


class Sample(NamedTuple):
    """A small layer that a family takes, whose kernels take less time than the host."""

    family: str
    channels: int
    groups: int
    dtype: torch.dtype
    pixels: int = 16
    layout: torch.memory_format = torch.contiguous_format


SAMPLES = (
    Sample("direct", 8, 1, torch.float32),
    Sample("halo_sm90", 64, 1, torch.float16),
    Sample("halo_sm80", 16, 4, torch.float16),
    Sample("grouped_sm90", 64, 8, torch.float16, layout=torch.channels_last),
    Sample("depthwise", 32, 32, torch.float16),
)


@dataclass(frozen=True)
class HostCost(Cost):
    """Wall us that the host needs to enqueue one warm call, on PyTorch's side and on ours, in the same run.

    ``aten_us`` is None where PyTorch's side was not measured. ``budget_us`` is what PyTorch took when the budget was
    set, None for what has none. Hosts differ, and one host from run to run, so that the bar is PyTorch in the same run.
    """

    what: str
    aten_us: float | None
    haloconv_us: float
    budget_us: float | None = None

    @property
    def within_budget(self) -> bool:
        """At most what PyTorch takes in the same run."""
        return self.aten_us is None or self.haloconv_us <= self.aten_us


class _Sides(NamedTuple):
    what: str
    aten: Callable[[], object]
    haloconv: Callable[[], object]


def host_costs(device: torch.device, repeats: int = 200) -> list[HostCost]:
    """The host's cost of a small 3x3 layer of each family that runs on the device.

    Inference and a training step, which is forward and those gradients that the family computes; of ``direct`` the
    function without a graph, too, and the forward pass that records one.
    """
    samples = [each for each in SAMPLES if _runs_on(each, device)]
    return [_alternating(sides, repeats, device) for each in samples for sides in _sides(each, device)]


def own_host_costs(repeats: int = 200) -> list[HostCost]:
    """Our side alone, without a GPU: on a stand-in whose kernels do nothing."""
    with _idle(H200):
        sides = [each for sample in SAMPLES for each in _sides(sample, _CPU)]
        return [HostCost(each.what, None, _median(each.haloconv, repeats, _CPU)) for each in sides]


def _runs_on(sample: Sample, device: torch.device) -> bool:
    """Whether the sample's family has kernels for the device; all do where PyTorch runs everything."""
    if device.type != "cuda" and stand_in() is None:
        return sample.family == "direct"
    family, capability = FAMILIES[sample.family], device_facts(device.index).capability
    return capability == family.capability or (family.newer and capability > family.capability)


def _sides(sample: Sample, device: torch.device) -> Iterator[_Sides]:
    torch.manual_seed(0)
    n, family, directions = sample.channels, sample.family, FAMILIES[sample.family].directions
    x = torch.randn((1, n, sample.pixels, sample.pixels), dtype=sample.dtype, device=device)
    x = x.contiguous(memory_format=sample.layout).requires_grad_("dgrad" in directions)
    theirs = torch.nn.Conv2d(n, n, 3, groups=sample.groups, dtype=sample.dtype, device=device)
    in_memory_format(theirs, sample.layout)
    theirs.weight.requires_grad_("wgrad" in directions)
    ours = Conv2d.from_torch(theirs, family=family, precision="tf32" if FAMILIES[family].tensor_cores else None)
    w, b, dy = theirs.weight, theirs.bias, theirs(x).detach()
    if family == "direct":
        yield _Sides(
            "F.conv2d, no grad",
            _without_graph(lambda: torch.nn.functional.conv2d(x, w, b)),
            _without_graph(lambda: conv2d(x, w, b, family=family)),
        )
        yield _Sides("nn.Conv2d, with grad", lambda: theirs(x), lambda: ours(x))
    yield _Sides(f"{family}, inference", _without_graph(lambda: theirs(x)), _without_graph(lambda: ours(x)))

    leaves = ((x, "dgrad"), (w, "wgrad"), (b, ""))
    wanted = [leaf for leaf, direction in leaves if leaf is not None and direction in ("", *directions)]

    def step(layer: torch.nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(x), wanted, dy)

    yield _Sides(f"{family}, training step", step(theirs), step(ours))


def _without_graph(call: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(call)


def _alternating(sides: _Sides, repeats: int, device: torch.device) -> HostCost:
    aten, ours = [], []
    for _ in range(ROUNDS):
        aten.append(host_cost(sides.aten, repeats, rounds=3, device=device))
        ours.append(host_cost(sides.haloconv, repeats, rounds=3, device=device))
    return HostCost(sides.what, statistics.median(aten), statistics.median(ours), BUDGETS_US.get(sides.what))


def _median(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    return statistics.median(host_cost(call, repeats, rounds=3, device=device) for _ in range(ROUNDS))


class _IdleKernel:
    def launch(self, *_: int) -> None:
        pass

    def cluster_launch(self, *_: int) -> Callable[[int, int], None]:
        return self.launch


@contextmanager
def _idle(facts: DeviceFacts) -> Iterator[None]:
    """Inside, calls on CPU tensors choose, bind and launch as on a GPU of these facts, and nothing runs."""

    def load(source: KernelSource, smem_bytes: int) -> _IdleKernel:
        return _IdleKernel()

    def encode(*arguments: object, **options: object) -> bytes:
        return bytes(TENSOR_MAP_BYTES)

    plan.clear_plans()
    set_stand_in(Device(facts, load, encode))
    try:
        yield
    finally:
        set_stand_in(None)
        plan.clear_plans()
