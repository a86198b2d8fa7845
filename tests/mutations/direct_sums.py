"""Faults in the plain sums beside the products: direct_sums.cu."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TREE_STEP = "sums[pixel_lane][channel_lane] += sums[pixel_lane + half][channel_lane];"


def _fault(name: str, fault: str, *edits: tuple[str, str], on: str, result: str = "bgrad") -> Mutation:
    return Mutation(name, "reduce/sums", fault, edits, on, result)


MUTATIONS = (
    _fault("no barrier before the tree", "lanes add sums that others may not have written yet",
           (": acc_t(0);\n    __syncthreads();", ": acc_t(0);"), on="border_3x3"),
    _fault("no barrier inside the tree", "a step of the tree overtakes the one before",
           (f"{_TREE_STEP}\n        __syncthreads();", _TREE_STEP), on="border_3x3"),
    _fault("a barrier that only some threads reach", "the barrier stands inside the condition",
           (f"if (pixel_lane < half) {_TREE_STEP}\n        __syncthreads();",
            f"if (pixel_lane < half) {{ {_TREE_STEP} __syncthreads(); }}"), on="border_3x3"),
    _fault("the tree reads one lane too far", "an element behind a static shared array is read",
           ("sums[pixel_lane + half]", "sums[pixel_lane + half + 1]"), on="border_3x3"),
    _fault("the tree ends early", "the odd lanes' share is lost",
           ("PIXEL_LANES / 2; half > 0", "PIXEL_LANES / 2; half > 1"), on="border_3x3"),
    _fault("one pixel behind the last", "the end of the pixels is taken as inside",
           ("pixel < end ?", "pixel <= end ?"), on="border_3x3"),
    _fault("no carry into the next row", "rows run on into what lies between them",
           ("col -= p.q, ++row, offset += p.next_row;", "col -= p.q, ++row;"), on="channels_last_sliced"),
    _fault("no carry into the next image", "images follow each other as their rows do",
           ("row -= p.p, offset += p.next_image;", "row -= p.p;"), on="border_3x3"),
    _fault("eight pixels across the end of a row", "what lies between rows is summed",
           ("at.col + ALL_BUT_ONE < p.q", "at.col < p.q"),
           on="sliced_many_pixels"),
    _fault("channels beyond the last one", "lanes without a channel write partial sums",
           ("if (pixel_lane == 0 && channel < p.k)", "if (pixel_lane == 0)"), on="channels_last_odd"),
    _fault("the last part is lost", "one partial result is never added",
           ("part < p.parts;", "part < p.parts - 1;"), on="many_images", result="wgrad"),
    _fault("one part twice", "a part takes pixels of the next one",
           ("pixels * (part + 1) / p.parts", "pixels * (part + 1) / p.parts + 1"),
           on="channels_last_many_pixels"),
    _fault("elements beyond the filter", "threads without an element write",
           ("    if (i >= p.elems) return;\n", ""), on="many_images", result="wgrad"),
    _fault("rows counted by columns", "an element's row is taken modulo the filter's columns",
           ("i / p.s % p.r", "i / p.s % p.s"), on="four_sides", result="wgrad"),
)  # fmt: skip
