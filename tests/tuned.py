"""What the tests of tuning share: records made up for a device, and a clock that says what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from haloconv import env, plan
from haloconv.choose import records
from haloconv.choose.buckets import bucket_of, layer_key, size_of
from haloconv.choose.records import Record
from haloconv.choose.trust import forget_trust
from haloconv.device import Device, DeviceFacts, runs_kernels, set_stand_in
from haloconv.env import software_stamp
from haloconv.families import FAMILIES
from haloconv.families.base import BoundCall, Config, Family
from haloconv.families.files import device_hash
from haloconv.jit import KernelSource
from haloconv.problem import DIRECTIONS, Problem, Request
from haloconv.support import KERNEL_DTYPES, why_not_elements
from haloconv.tune.first_use import forget_failures
from haloconv.tune.timing import Timing

FACTS = DeviceFacts("Test GPU 9000", "sm_90a", 4, (9, 0), 1 << 33, 232_448, "none")
KERNELS = {"aten": "aten", "direct": "direct/direct", "halo_sm90": "halo_sm90/conv"}
LAYER = Problem("fprop", 2, 8, 24, 28, 16, 3, 3, padding=(1, 1, 1, 1), dtype=torch.float16)


def forget() -> None:
    """As if another process began."""
    records.forget_shelves()
    forget_trust()
    forget_failures()
    plan.clear_plans()
    env.tunes_at_first_use.cache_clear()
    env.never_tunes.cache_clear()
    env.frozen.cache_clear()
    env.disabled.cache_clear()


def record(problem: Problem = LAYER, family: str = "direct", facts: DeviceFacts = FACTS, **changes: Any) -> Record:
    """A record that holds on ``facts`` and is current, unless ``changes`` say otherwise."""
    kernel = KERNELS.get(family, f"{family}/fake")
    own = kernel if family != "aten" else KERNELS["direct"]
    made = Record(
        layer=layer_key(problem), size=size_of(problem), bucket=bucket_of(problem), family=family,
        kernel=kernel, config="", ms=0.5, aten_ms=1.0, own=own, own_ms=0.5, error=1e-4, aten_error=1e-4,
        error_limit=1e-3, difference=1e-4, spread=0.01, runs=10, source=device_hash(own), gpu=facts.name,
        sm_count=facts.sm_count, software=software_stamp(), date="2026-01-02T03:04:05Z",
    )  # fmt: skip
    return replace(made, **changes)


@dataclass
class Clock:
    """Stands in for timing.compare: runs every variant once and reports the ms that ``ms_of`` gives its name."""

    ms_of: Callable[[str], float]
    rounds: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(
        self, variants: Mapping[str, Callable[[], object]], *, device: object, budget_s: float, min_runs: int
    ) -> dict[str, Timing]:
        for call in variants.values():
            call()
        self.rounds.append(tuple(variants))
        return {name: Timing(self.ms_of(name), 0.01, min_runs) for name in variants}


def favouring(family: str, ms: float = 0.5) -> Callable[[str], float]:
    """PyTorch takes 1 ms, the family ``ms``, everything else 2 ms."""
    return lambda name: 1.0 if name == "aten" else ms if name.split(" ")[0] == family else 2.0


@dataclass(frozen=True)
class FakeConfig:
    """A config of the fake family: ``rows`` is its name, ``fault`` what goes wrong."""

    rows: int
    fault: str = ""

    def __str__(self) -> str:
        return f"rows{self.rows}"


@dataclass
class FakeFamily:
    """PyTorch's convolution in fp32 under another name, with configs, some of which are wrong or do not bind.

    ``offers`` are all configs; those whose rows do not divide the image's are not offered for it, and rows1 is offered
    where none is left. ``bound`` are those that were bound, in order.
    """

    name: str
    offers: tuple[FakeConfig, ...] = (FakeConfig(4), FakeConfig(8))
    takes: Callable[[Problem], bool] = lambda problem: True
    tensor_cores: bool = False
    bound: list[FakeConfig] = field(default_factory=list)
    dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES
    directions, has_epilogue, has_padding_modes = DIRECTIONS, False, False
    depthwise, capability, newer = False, (7, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        if not runs_kernels(device):
            return why_not_elements(problem.dtype, device)
        return None if self.takes(problem) else "this fake does not take it"

    def configs(self, request: Request) -> list[Config]:
        fitting = [each for each in self.offers if request.problem.h % each.rows == 0] or [FakeConfig(1)]
        return [Config(f"{self.name}/fake", str(each), each) for each in (fitting if self.offers else [])]

    def sources(self) -> list[KernelSource]:
        return []

    def bind(self, request: Request, config: Config) -> BoundCall:
        self.bound.append(config.derived)
        fault = config.derived.fault
        if fault == "does not bind":
            raise RuntimeError("no such kernel")
        run = _rounded_once(request)
        if fault in ("does not run", "no memory"):
            return _failing if fault == "does not run" else _out_of_memory
        return {"wrong": lambda *args: run(*args) * 1.01, "nan": lambda *args: _with_nan(run(*args))}.get(fault, run)


def _rounded_once(request: Request) -> BoundCall:
    """PyTorch's convolution in fp32, rounded to the dtype: on some CPUs its own in 16 bits rounds sums in between."""
    aten, wide = FAMILIES["aten"], replace(request, problem=replace(request.problem, dtype=torch.float32))
    run = aten.bind(wide, aten.configs(wide)[0])
    return lambda *operands: run(*(each if each is None else each.float() for each in operands)).to(
        request.problem.dtype
    )


def _failing(*_: object) -> torch.Tensor:
    raise RuntimeError("the launch failed")


def _out_of_memory(*_: object) -> torch.Tensor:
    raise torch.cuda.OutOfMemoryError("short")


def _with_nan(result: torch.Tensor) -> torch.Tensor:
    result.view(-1)[-1] = float("nan")
    return result


@contextmanager
def only(*families: Family) -> Iterator[None]:
    """PyTorch and these are all families there are; afterwards all are back, in their order, which means something."""
    before = dict(FAMILIES)
    FAMILIES.clear()
    FAMILIES.update({"aten": before["aten"], **{family.name: family for family in families}})
    try:
        yield
    finally:
        FAMILIES.clear()
        FAMILIES.update(before)


def _none(*_: object) -> NoReturn:
    raise AssertionError("a fake device has no kernels")


def fake_device(facts: DeviceFacts = FACTS) -> Device:
    """CPU tensors count as a GPU's; no kernel can be loaded, so that only fake families run."""
    return Device(facts, load=_none, encode_tiled=_none, keeps_time=True)


@contextmanager
def fake_gpu(folder: Path) -> Iterator[None]:
    """A fake GPU with the families aten and direct, whose records lie in ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.RECORDS_DIR, str(folder / "records"))
        patch.setattr(records, "SHIPPED", folder / "shipped")
        set_stand_in(fake_device())
        forget()
        with only(FAMILIES["direct"]):
            yield
        set_stand_in(None)
        forget()
