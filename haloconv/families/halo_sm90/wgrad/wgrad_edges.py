"""Host half of families/halo_sm90/wgrad/wgrad_edges.cu: wgrad with padding that wraps, mirrors or repeats.

Rows that stand above and below an image are summed over as if they were its own, and staged from where they come.
"""

from __future__ import annotations

from dataclasses import replace

from haloconv.families.base import BoundCall, Config
from haloconv.families.halo_sm90.terms import TERMS
from haloconv.families.halo_sm90.wgrad import wgrad
from haloconv.families.halo_sm90.wgrad.operand import PIECE_BYTES, Operand
from haloconv.problem import ZEROS, Direction, Request

KERNEL = "halo_sm90/wgrad_edges"
DIRECTIONS: tuple[Direction, ...] = ("wgrad",)
MOST_COST = 1.1
"""How many times as long as with zeros around the image a launch may take, by the cost model."""


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, whatever its tensors' forms, else a sentence that says why not."""
    if request.modes == ZEROS:
        return "what is outside the image is zeros, which wgrad knows"
    if request.modes[0] == "halo":
        return "rows of a halo are in no tensor that the gradient is given"
    if request.problem.precision in TERMS:
        return "the threads that split dy into several terms have no registers for pixels outside the image"
    return wgrad.why_not(replace(request, modes=ZEROS))


def configs(request: Request) -> list[Config]:
    """The best tilings by the cost model that cost not much more than the best one with zeros around the image."""
    if why_not(request) is not None or _cuts_pieces(request):
        return []
    most = MOST_COST * wgrad.tilings(replace(request, modes=ZEROS))[0].cycles
    fitting = [each for each in wgrad.tilings(request) if each.cycles <= most]
    return [Config(KERNEL, str(each), each) for each in wgrad.best(fitting)]


def _cuts_pieces(request: Request) -> bool:
    """Whether TMA brings channels as neighbours, the last of which are less than 16 bytes: threads write whole ones."""
    problem = request.problem
    x = Operand.of(problem, request.second, problem.x_shape, problem.c_per_group)
    return x.inner and problem.c_per_group * problem.dtype.itemsize % PIECE_BYTES != 0


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    return wgrad.bind(request, config)
