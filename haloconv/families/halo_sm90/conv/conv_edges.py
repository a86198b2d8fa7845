"""Host half of families/halo_sm90/conv/conv_edges.cu: conv with padding that wraps, mirrors or repeats, in one launch.

Rows above and below an image may also be those of another tensor, the halo: of a shard those that other shards have.
A gradient is such a convolution itself where pixels wrap around an image that is as large as the output.
"""

from __future__ import annotations

from dataclasses import replace

from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.halo_sm90.conv import configs as of_zeros
from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.conv.configs import best_tilings, cost, storage_of
from haloconv.families.halo_sm90.conv.form import form_of
from haloconv.families.halo_sm90.terms import TERMS
from haloconv.families.reduce.partials import applies
from haloconv.problem import ZEROS, Direction, Request

KERNEL = "halo_sm90/conv_edges"
DIRECTIONS: tuple[Direction, ...] = ("fprop", "dgrad")
MOST_COST = 1.1
"""How many times as long as with zeros around the image a launch may take.

Rims took 6 to 29 % more than zeros alone: fp32 layers on an NVIDIA H200 (suite rims, rows of 2026-11-26)."""


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, whatever its tensors' forms, else a sentence that says why not."""
    problem = request.problem
    if request.modes == ZEROS:
        return "what is outside the image is zeros, which conv knows"
    if request.modes[0] == "halo" and not any(problem.padding[:2]):
        return "no rows are padded, so that there is no halo"
    if problem.precision in TERMS:
        return "sums of several terms have a fix-up, which knows zeros around the image alone"
    if problem.direction == "dgrad":
        sizes = zip(request.modes, ((problem.h, problem.p), (problem.w, problem.q)), strict=True)
        wraps = all(mode == "zeros" or (mode == "circular" and x == y) for mode, (x, y) in sizes)
        if not wraps or problem.stride != (1, 1):
            return "the gradient is no convolution of dy with such padding"
    return conv.why_not(replace(request, modes=ZEROS))


def configs(request: Request) -> list[Config]:
    """The best tilings by the cost model that cost not much more than the best one with zeros around the image."""
    if why_not(request) is not None:
        return []
    problem, storage, sm_count = request.problem, storage_of(request), request.facts.sm_count
    form, may_split = form_of(problem), applies(problem.epilogue)
    zeros = of_zeros.best_tilings(form, replace(storage, modes=ZEROS), sm_count, may_split)
    most = MOST_COST * min((cost(each, each.storage, sm_count) for each in zeros), default=0.0)
    found = best_tilings(form, storage, sm_count, may_split)
    fitting = [each for each in found if cost(each, each.storage, sm_count) <= most]
    return [Config(KERNEL, config_key(tiling.shape), tiling) for tiling in fitting[:MOST_CONFIGS]]


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx, with pixels of the image outside it; fprop(x, w, b, halo) -> y."""
    return conv.bind(request, config)
