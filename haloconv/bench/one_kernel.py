"""One kernel of a family by itself: what ``haloconv bench --family depthwise/band`` times."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from haloconv import plan
from haloconv.families import FAMILIES, check_family
from haloconv.families.base import BoundCall, Config, Family, Kernel
from haloconv.families.closure import kernels
from haloconv.jit import KernelSource
from haloconv.jit.source import kernel_path
from haloconv.problem import Problem, Request, dense_request


def host_module(kernel: str) -> Kernel:
    """The module of a kernel's ``why_not``, ``configs`` and ``bind``; a sum has others."""
    module: Any = importlib.import_module(f"haloconv.{kernel_path(kernel).replace('/', '.')}")
    host: Kernel = module
    return host


def chosen_kernels() -> list[str]:
    """Every kernel that requests are bound to: not sums, and not those that are launched beside others."""
    return [kernel for kernel in kernels() if hasattr(host_module(kernel), "configs")]


def check_asked(name: str) -> None:
    """Raise ValueError if ``name`` is neither ``"auto"``, nor a family's, nor a kernel's as ``depthwise/band``."""
    family, slash, _ = name.partition("/")
    check_family(family)
    own = [kernel for kernel in chosen_kernels() if kernel.startswith(f"{family}/")] if slash else []
    if slash and name not in own:
        raise ValueError(f"{family} has no kernel {name}; it has {', '.join(own) or 'none that can be named'}")


class OneKernel:
    """A family of which one kernel is left, with all configs that it offers itself."""

    def __init__(self, family: Family, kernel: str) -> None:
        self.name, self.directions, self.dtypes = family.name, family.directions, family.dtypes
        self.tensor_cores, self.has_epilogue = family.tensor_cores, family.has_epilogue
        self.has_padding_modes = family.has_padding_modes
        self.depthwise, self.capability, self.newer = family.depthwise, family.capability, family.newer
        self._family, self._kernel, self._module = family, kernel, host_module(kernel)

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """What the family refuses, and what the kernel does with dense tensors."""
        return self._family.why_not(problem, device) or self._module.why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        """The kernel's. Raises RuntimeError if it does not take tensors of these forms."""
        reason = self._module.why_not(request)
        if reason is not None:
            raise RuntimeError(f"{self._kernel} does not take these tensors: {reason}")
        return self._module.configs(request)

    def bind(self, request: Request, config: Config) -> BoundCall:
        return self._module.bind(request, config)

    def sources(self) -> list[KernelSource]:
        return [source for source in self._family.sources() if source.kernel == self._kernel]


@contextmanager
def only(name: str) -> Iterator[str]:
    """Inside, the family of a kernel ``depthwise/band`` has that one alone. Gives the family's name.

    The name of a family, or ``"auto"``, is given back and nothing changes. Plans are forgotten on entry and on exit of
    a kernel's context.
    """
    family, slash, _ = name.partition("/")
    if not slash:
        yield name
        return
    whole = FAMILIES[family]
    FAMILIES[family] = OneKernel(whole, name)
    plan.clear_plans()
    try:
        yield family
    finally:
        FAMILIES[family] = whole
        plan.clear_plans()
