"""Faults in the sums beside the products: bgrad.cu and partials.cu of families/reduce."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutations.mutation import Mutation

_TREE_STEP = "sums[pixel_lane][channel_lane] += sums[pixel_lane + half][channel_lane];"


def _fault(name: str, fault: str, *edits: tuple[str, str], on: str) -> Mutation:
    return Mutation(name, "reduce/bgrad", fault, edits, on, "bgrad")


def _of_partials(name: str, fault: str, *edits: tuple[str, str], on: str = "many_images", **run: Any) -> Mutation:
    return Mutation(f"partials: {name}", "reduce/partials", fault, edits, on, **{"result": "wgrad", **run})


BGRAD = (
    _fault("no barrier before the tree", "lanes add sums that others may not have written yet",
           (": acc_t(0);\n    __syncthreads();", ": acc_t(0);"), on="border_3x3"),
    _fault("no barrier inside the tree", "a step of the tree overtakes the one before",
           (f"{_TREE_STEP}\n        __syncthreads();", _TREE_STEP), on="border_3x3"),
    _fault("a barrier that only some threads reach", "the barrier stands inside the condition",
           (f"if (pixel_lane < half) {_TREE_STEP}\n        __syncthreads();",
            f"if (pixel_lane < half) {{ {_TREE_STEP} __syncthreads(); }}"), on="border_3x3"),
    _fault("the tree reads one lane too far", "an element behind a static shared array is read",
           ("sums[pixel_lane + half]", "sums[pixel_lane + half + 1]"), on="border_3x3"),
    _fault("the tree ends early", "the odd lanes' part is lost",
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
    _fault("one part twice", "a part takes pixels of the next one",
           ("pixels * (part + 1) / p.parts", "pixels * (part + 1) / p.parts + 1"),
           on="channels_last_many_pixels"),
)  # fmt: skip

_SLABS: dict[str, Any] = {"on": "grouped_wgrad_strips", "family": "grouped_sm90", "dtype": torch.float16}
_SPLITS: dict[str, Any] = {"family": "halo_sm90", "shape": "split-K of two", "result": "fprop"}
_BLOCKS: dict[str, Any] = {"on": "pairs_wgrad_channels", "family": "depthwise", "dtype": torch.float16}
PARTIALS = (
    _of_partials("the last part is lost", "one partial result is never added",
                 ("at < p.parts ?", "at < p.parts - 1 ?"), on="four_sides"),
    _of_partials("the next part", "parts are one element apart", ("from[at * p.part_stride]", "from[at]")),
    _of_partials("the parts of one thread", "what the other threads of an element have added is left out",
                 ("other < THREADS;", "other < 2 * p.block_elems;")),
    _of_partials("a thread begins with the next part", "the first part does not count",
                 ("p, i, part) : acc_t(0)", "p, i, part + 1) : acc_t(0)")),
    _of_partials("threads are not waited for", "sums are added before others have written them",
                 ("        __syncthreads();\n", "")),
    _of_partials("every thread writes", "threads that have added later parts write, too",
                 ("        if (part > 0) return;\n", "")),
    _of_partials("elements behind the last", "threads without an element write",
                 ("inside ? sum_parts(p, i, part) : acc_t(0)", "sum_parts(p, i, part)"),
                 ("    if (inside) write", "    write")),
    _of_partials("the extent of another axis", "taps are counted by the channels of a block",
                 ("quotient(i, axis.extent)", "quotient(i, p.axes[AXES - 1].extent)"),
                 **_BLOCKS),
    _of_partials("strides of the axis beside", "rows of the filter are as far apart as columns",
                 ("at * axis.stride", "at * p.axes[a > 1 ? AXES - 1 : a].stride"), on="four_sides"),
    _of_partials("an axis begins with the whole rest", "what outer axes count is counted again",
                 ("int(i - rest * index_t(axis.extent.value))", "int(i)"), on="four_sides"),
    _of_partials("padding is written", "a block's channels that are not there are written",
                 ("    if (place.count >= p.limit) return;\n", ""), **_BLOCKS),
    _of_partials("parts without a gap", "groups that are not there are left out between the parts",
                 ("from[at * p.part_stride]", "from[at * p.elems]"), **_SLABS),
    _of_partials("taps behind the last", "the padding of an odd row of taps is written",
                 ("    if (place.count >= p.limit) return;\n", ""), **_SLABS),
    _of_partials("nothing is counted", "no channel is behind the last one",
                 (", place.count += at * axis.count;", ";"), **_BLOCKS),
    _of_partials("the first split is all of a sum", "the other ranges of the channels are lost",
                 ("at < p.parts ?", "at < 1 ?"), on="split_small", **_SPLITS),
    _of_partials("splits that are no images apart", "partial sums of the next image count",
                 ("from[at * p.part_stride]", "from[at]"), on="split_nhwc", **_SPLITS),
    _of_partials("runs without a gap", "every image is the first",
                 (" + i64(quotient(i, p.run)) * p.run_gap", ""), on="split_small", **_SPLITS),
    _of_partials("partial sums without the bias", "it is added by nobody",
                 ("if (HAS_BIAS) sum +=", "if (false) sum +="), on="split_few", **{**_SPLITS, "result": "relu"}),
    _of_partials("the bias of another axis", "a pixel's number is taken for its filter's",
                 ("at * axis.count", "at * p.axes[AXES - 2].count"), on="split_few", **{**_SPLITS, "result": "relu"}),
    _of_partials("partial sums without ReLU", "outputs may be below zero", ("HAS_RELU ? hc::relu(sum) : sum", "sum"),
                 on="split_few_nhwc", **{**_SPLITS, "result": "relu"}),
)  # fmt: skip

MUTATIONS = (*BGRAD, *PARTIALS)
