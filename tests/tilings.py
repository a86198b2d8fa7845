"""Every tiling that halo_sm90 has for a problem, and launches that are made to take a given one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pytest import MonkeyPatch

from haloconv import plan
from haloconv.families.halo_sm90.conv import conv as halo_sm90
from haloconv.families.halo_sm90.conv import conv_edges
from haloconv.families.halo_sm90.conv.configs import best_tilings, copied_tilings, split_tilings, storage_of, tilings
from haloconv.families.halo_sm90.conv.form import Form, form_of
from haloconv.families.halo_sm90.conv.launches import conv_source
from haloconv.families.halo_sm90.conv.shape import Storage
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.families.halo_sm90.pointwise import implicit_gemm
from haloconv.families.reduce.partials import applies
from haloconv.jit import KernelSource
from haloconv.problem import ZEROS, Request
from tests import oracle
from tests.cases import Case, Tensors


def all_tilings(form: Form, storage: Storage) -> list[Tiling]:
    """Every tiling that fits, whatever the cost model thinks of it."""
    return [*tilings(form, storage), *copied_tilings(form, storage), *split_tilings(form, storage)]


@contextmanager
def nth_tiling(index: int) -> Iterator[dict[str, int]]:
    """While active, each launch takes conv's tiling of that index, or its last one; ``most`` is how many the most had.

    Plans that were made before are forgotten, and so are those made here.
    """
    seen = {"most": 0}

    def only(form: Form, storage: Storage, sm_count: int, may_split: bool = True) -> tuple[Tiling, ...]:
        found = all_tilings(form, storage) if may_split else tilings(form, storage)
        seen["most"] = max(seen["most"], len(found))
        return tuple(found[min(index, len(found) - 1) :][:1])

    with MonkeyPatch.context() as patch:
        for kernel in (halo_sm90, conv_edges):
            patch.setattr(kernel, "best_tilings", only)
        patch.setattr(implicit_gemm, "configs", lambda request: [])
        plan.clear_plans()
        yield seen
    plan.clear_plans()


def sources_of(result: str, t: Tensors, one: Case) -> list[KernelSource]:
    """The sources of every tiling of one result."""
    problem = oracle.problem_of(result, t, one.spec)
    first = t.x if problem.direction == "fprop" else t.dy
    modes = oracle.EDGES[result][1] if result in oracle.EDGES else ZEROS
    forms = plan.form_of(first), plan.form_of(t.w)
    request = Request(problem, forms[0], forms[1], oracle.layout_of(one.storage), first.device, modes)
    return [*halo_sm90.sources(request), *halo_sm90.split_sources(request)]


def chosen_sources(request: Request) -> list[KernelSource]:
    """The sources of the tiling that the cost model puts first on a GPU of 132 multiprocessors."""
    storage, may_split = storage_of(request), applies(request.problem.epilogue)
    best = best_tilings(form_of(request.problem), storage, 132, may_split)[0]
    return [conv_source(request.problem, launch) for launch in best.launches]


def all_sources(request: Request) -> list[KernelSource]:
    """The sources of conv.cu, without packing and fix-up, of every tiling."""
    return [source for source in halo_sm90.sources(request) if source.kernel == halo_sm90.KERNEL]
