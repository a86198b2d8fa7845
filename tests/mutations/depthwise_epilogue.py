"""Faults in how depthwise kernels apply what follows their sums: finish.cuh and who calls it."""

from __future__ import annotations

import torch

from tests.emulated_depthwise import OLDER, SMALL
from tests.mutations.mutation import Mutation

_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, kernel: str, result: str = "scale_residual",
    dtype: torch.dtype = _FP32, shape: str = "", finite: bool = True,
) -> Mutation:  # fmt: skip
    full = f"{kernel}: {name}"
    return Mutation(full, f"depthwise/{kernel}", fault, edits, on, result, dtype, "depthwise", shape, finite)


MARCH = (
    _fault("a scale for all", "all filters have the first one's bias and scale", ("(bias)[filter];", "(bias)[0];"),
           on="march_large", result="scale_relu", kernel="march"),
    _fault("the scale of the neighbour", "channels of a thread have the first one's bias and scale",
           ("finish[c].load(p.bias, place.channel + c);", "finish[c].load(p.bias, place.channel);"), on="march_nhwc",
           dtype=_BF16, kernel="march"),
    _fault("the activation before the residual", "what is added may be negative",
           ("finished<Affine::NONE, KIND>(finished<BEFORE, Activation::NONE>(sum, own) + residual, own);",
            "finished<BEFORE, KIND>(sum, own) + residual;"), on="march_strips", result="residual_relu", kernel="march"),
    _fault("no residual", "a scale alone", ("            to.unpack(y);\n", ""), on="march_3x3", kernel="march"),
    _fault("the first row's residual", "all rows get that of one",
           ("(out - reinterpret_cast<const char*>(p.out)),", "0 * (out - reinterpret_cast<const char*>(p.out)),"),
           on="march_nhwc_stride", kernel="march"),
    _fault("a residual behind the row", "it is read where no output is",
           ("wanted ? out_mask : 0, out_col", "~0u, out_col"), on="march_nhwc_odd", kernel="march"),
)  # fmt: skip

PAIRS = (
    _fault("halves of the residual", "channels of a pair change places",
           ("low{(unsigned short)words.of[pair]}, high{(unsigned short)(words.of[pair] >> 16)};",
            "high{(unsigned short)words.of[pair]}, low{(unsigned short)(words.of[pair] >> 16)};"), on="pairs_3x3",
           dtype=_FP16, kernel="pairs"),
    _fault("the residual of a column", "all pixels of a row get that of one",
           ("* p.y_width + col) * p.channels + channel);", "* p.y_width) * p.channels + channel);"), on="pairs_7x7",
           dtype=_BF16, kernel="pairs"),
    _fault("a residual below the image", "it is read where no output is", ("if (row < p.y_rows && col", "if (col"),
           on="pairs_3x3", dtype=_FP16, kernel="pairs"),
    _fault("a residual of the first strip", "all strips get that of one",
           ("+ row + patch_row, run.strip * p.strip_cols);", "+ row + patch_row, 0);"), on="pairs_7x7", dtype=_BF16,
           kernel="pairs"),
    _fault("the scale of a pair", "the second channel of a pair has the first one's",
           ("finish[2 * pair + 1](sums", "finish[2 * pair](sums"), on="pairs_many", result="scale_relu", dtype=_BF16,
           kernel="pairs"),
    _fault("the second sum alone", "nothing follows a sum that is formed again",
           ("sum = finish(sum, to_acc(residual_at<elem_t>(p, channel, image, row, col + at)));", ""), on="pairs_5x5",
           dtype=_BF16, finite=False, kernel="pairs"),
)  # fmt: skip

PLANES = (
    _fault("the residual of a row of patches", "all rows of patches get that of one",
           ("row + i / 4 * EDGE + i / 2 % 2, x = col", "row + i / 2 % 2, x = col"), on="patch_3x3", dtype=_FP16,
           kernel="patch"),
    _fault("the bias twice", "it is added behind the epilogue once more",
           ("EPILOGUE ? 0.f : weights.bias", "weights.bias"), on="patch_strips", result="residual_relu", dtype=_BF16,
           kernel="patch"),
    _fault("the residual of a strip", "all strips get that of one",
           ("unit, unit.strip * p.cut.rows + row, col);", "unit, row, col);"), on="patch_strips",
           result="residual_relu", dtype=_BF16, kernel="patch"),
    _fault("the residual of even columns", "neighbours get the same",
           ("col = i / 4 * 16 + threadIdx.x % 32 / 4 * 2 + i / 2 % 2;",
            "col = i / 4 * 16 + threadIdx.x % 32 / 4 * 2;"), on="band_strips", dtype=_FP16, shape=OLDER, kernel="band"),
    _fault("the residual of a row", "all rows of a tile get that of one",
           ("own(of[i][col], residual.of[col]);\n            to += stride;", "own(of[i][col], residual.of[col]);"),
           on="band_strips", shape=OLDER, kernel="tile"),
    _fault("the scale of a channel", "all have the first one's",
           ("sums.finish(p, unit.channel, out", "sums.finish(p, 0, out"), on="patch_3x3", kernel="tile_sm90"),
    _fault("the residual of an image", "all images get that of one",
           ("sums.finish(p, channel, out + unit.image * p.out_n +", "sums.finish(p, channel, out +"), on="box_7x7",
           shape=SMALL, kernel="box"),
    _fault("the residual of a pixel", "it is that of the next channels",
           ("row * stride + b * CHANNELS;", "row * stride + b;"), on="lanes_3x3", shape=SMALL, kernel="lanes"),
    _fault("a residual outside", "it is read where no output is", ("output, row < rows && b < cols)", "output, true)"),
           on="lanes_3x3", shape=SMALL, kernel="lanes"),
)  # fmt: skip

MUTATIONS = (*MARCH, *PAIRS, *PLANES)
