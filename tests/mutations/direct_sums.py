"""Faults in the plain sums beside the products: direct_sums.cu."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TREE_STEP = "sums[pixel_lane][channel_lane] += sums[pixel_lane + half][channel_lane];"


def _fault(name: str, fault: str, *edits: tuple[str, str], on: str, result: str = "bgrad") -> Mutation:
    return Mutation(name, "direct_sums", fault, edits, on, result)


MUTATIONS = (
    _fault("no barrier before the tree", "lanes add sums that others may not have written yet",
           ("[channel_lane] = sum;\n    __syncthreads();", "[channel_lane] = sum;"), on="border_3x3"),
    _fault("no barrier inside the tree", "a step of the tree overtakes the one before",
           (f"{_TREE_STEP}\n        __syncthreads();", _TREE_STEP), on="border_3x3"),
    _fault("a barrier that only some threads reach", "the barrier stands inside the condition",
           (f"if (pixel_lane < half) {_TREE_STEP}\n        __syncthreads();",
            f"if (pixel_lane < half) {{ {_TREE_STEP} __syncthreads(); }}"), on="border_3x3"),
    _fault("the tree reads one lane too far", "an element behind a static shared array is read",
           ("sums[pixel_lane + half]", "sums[pixel_lane + half + 1]"), on="border_3x3"),
    _fault("the tree ends early", "the odd lanes' share is lost", ("half > 0", "half > 1"), on="border_3x3"),
    _fault("one pixel behind the row", "the end of a row is taken as inside", ("q < end", "q <= end"), on="border_3x3"),
    _fault("channels beyond the last one", "lanes without a channel write partial sums",
           ("if (pixel_lane == 0 && channel < p.k)", "if (pixel_lane == 0)"), on="channels_last"),
    _fault("the last part is lost", "one partial result is never added",
           ("part < p.parts;", "part < p.parts - 1;"), on="many_images", result="wgrad"),
    _fault("elements beyond the filter", "threads without an element write",
           ("    if (i >= p.elems) return;\n", ""), on="many_images", result="wgrad"),
    _fault("rows counted by columns", "an element's row is taken modulo the filter's columns",
           ("i / p.s % p.r", "i / p.s % p.s"), on="four_sides", result="wgrad"),
)  # fmt: skip
