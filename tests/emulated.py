"""The runs of the emulator's tests: which family takes which problems, and one run under one schedule.

A run is a case, a dtype and a result, forced onto one family. Kernels are compiled once for each specialisation:
sizes and seeds cost no build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES, OWN
from haloconv.families.files import kernels_of
from haloconv.precision import Precision
from tests import oracle
from tests.cases import CASES, DTYPE_NAMES, DTYPES, Case, Tensors, generator, make
from tests.emulated_cases import EVERY_DTYPE, HUGE_LEFT_OUT, ON_EMULATOR
from tests.emulated_halo_sm90 import fixups_noted

SM_COUNT = 4
# Families that form fp32 products in TF32.
TENSOR_CORES = tuple(name for name, family in FAMILIES.items() if family.tensor_cores)

# The module of each family's runs, with CASES, runs() and forced(shape); those of direct are here.
MODULES: dict[str, Any] = {name: import_module(f"tests.emulated_{name}") for name in OWN if name != "direct"}
BY_NAME = {
    one.name: one
    for one in (
        *ON_EMULATOR,
        *(each for module in MODULES.values() for each in module.CASES),
    )
}


@dataclass(frozen=True)
class Run:
    """One result of one case on one family, in one dtype.

    ``shape`` forces a way to cut the problem: a tile of ``SHAPES`` on halo_sm90, else what ``forced`` of the family's
    module knows. ``finite`` False: some inputs are infinities and NaN.
    """

    family: str
    case: Case
    dtype: torch.dtype
    result: str
    shape: str = ""
    finite: bool = True

    @property
    def tensors(self) -> Tensors:
        """The operands, on the CPU, the same at each call."""
        operands = make(self.case, self.dtype)
        if self.finite:
            return operands
        return operands._replace(x=with_every_not_finite(operands.x), dy=with_every_not_finite(operands.dy))

    @property
    def forced(self) -> Case:
        """The case with the family forced: a refusal raises instead of running PyTorch's convolution."""
        precision: Precision | None = "tf32" if self.family in TENSOR_CORES and self.dtype == torch.float32 else None
        precision = "tf32x3" if self.shape.startswith("three products") else precision
        spec = self.case.spec._replace(family=self.family, precision=precision, strict=True)
        return replace(self.case, spec=spec)

    @property
    def cut(self) -> tuple[str, bool]:
        """What the kernel is specialised by beside the case: the shape that is forced, and what is not finite."""
        return self.shape, self.finite

    @property
    def pairs(self) -> set:
        """What the run shows: its case with this dtype, with this result and cut like this, and each cut with both."""
        case, cut = (self.family, self.case.name), (self.family, self.cut)
        return {(case, self.dtype), (case, self.result, self.finite), (case, cut), (cut, self.dtype, self.result)}

    @property
    def kernels(self) -> set[str]:
        """The kernels that it is there for: those of its way to cut alone, else the others of its family."""
        apart: dict[str, set[str]] = getattr(MODULES.get(self.family), "KERNELS_APART", {})
        return apart.get(self.shape) or set(kernels_of(self.family)).difference(*apart.values())

    @property
    def is_listed(self) -> bool:
        """Whether it runs a case of the shared list, on which every family gives every result."""
        return self.finite and self.case in CASES

    @property
    def of_case(self) -> tuple:
        """What it shows of its case: of one of the shared list that with this result."""
        return ((self.family, self.case.name), *((self.result, self.finite) if self.is_listed else ()))

    @property
    def shown(self) -> set:
        """Less than the pairs: its case, and its cut with dtype and result."""
        return {self.of_case, ((self.family, self.cut), self.dtype, self.result)}

    def __str__(self) -> str:
        parts = (self.family, self.case.name, DTYPE_NAMES[self.dtype], self.result, self.shape)
        return " ".join(part for part in (*parts, "" if self.finite else "not finite") if part)


def forced(family: str, shape: str) -> AbstractContextManager[None]:
    """While active, the family cuts problems as ``shape`` says, whatever its cost model prefers."""
    return MODULES[family].forced(shape) if family in MODULES else nullcontext()


def execute(run: Run, tensors: Tensors, seed: int) -> torch.Tensor:
    """The result from the emulator under one schedule. Raises EmulatorError for what it finds."""
    with emulated_device(seed=seed, sm_count=SM_COUNT), forced(run.family, run.shape), fixups_noted() as flags:
        result = oracle.run(run.result, tensors, run.forced)
    assert not (run.finite and any(flags)), "halo_sm90 fixes outputs up although every sum is finite"
    return result


def with_every_not_finite(t: torch.Tensor) -> torch.Tensor:
    """A copy of a dense tensor with five values that are not finite, at random places.

    Both infinities, and NaN with the smallest and the largest payload, whose words are the next to an infinity's and to
    the end of the range: arithmetic on words may make something else of them.
    """
    words, places = t.clone(), torch.randperm(t.numel(), generator=generator("not finite", t.device))[:5]
    words = words.view(oracle.BITS[t.element_size()])
    infinity = torch.tensor(float("inf"), dtype=t.dtype).view(words.dtype).item()
    low, high = torch.iinfo(words.dtype).min, torch.iinfo(words.dtype).max
    special = torch.tensor([infinity, infinity + low, infinity + 1, high, -1], dtype=words.dtype)
    words[torch.unravel_index(places, t.shape)] = special[: places.numel()]
    return words.view(t.dtype)


def direct_runs() -> Iterator[Run]:
    """Every case in fp32 and, where a path depends on it, in every dtype; every direction."""
    for one in ON_EMULATOR:
        for dtype in DTYPES if one.name in EVERY_DTYPE else (torch.float32,):
            results = [result for result in oracle.RESULTS if (one.name, result) not in HUGE_LEFT_OUT]
            yield from (Run("direct", one, dtype, result) for result in results)


def module_runs(family: str) -> Iterator[Run]:
    """What the family's module lists: cases of every path, with the shape that is forced."""
    for name, dtype, result, shape, finite in MODULES[family].runs():
        yield Run(family, BY_NAME[name], dtype, result, shape, finite)


FAMILY_RUNS: dict[str, Callable[[], Iterator[Run]]] = {
    "direct": direct_runs,
    **{family: partial(module_runs, family) for family in MODULES},
}
