"""Faults in how halo_sm90 makes residue classes of a strided gradient rows of M, and rows of dx of their sums."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutations.mutation import Mutation

_FP16, _FP32 = torch.float16, torch.float32


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, kernel: str = "halo_sm90/conv",
    dtype: torch.dtype = _FP32, shape: str = "", finite: bool = True,
) -> Mutation:  # fmt: skip
    return Mutation(f"classes: {name}", kernel, fault, edits, on, "dgrad", dtype, "halo_sm90", shape, finite)


_PACK: dict[str, Any] = {"kernel": "halo_sm90/pack"}
_FIXUP: dict[str, Any] = {"kernel": "halo_sm90/fixup", "finite": False}

MUTATIONS = (
    _fault("one for all", "all residues of rows have the same taps",
           ("p.step_r * r + at.residue_h,", "p.step_r * r,"), on="classes_3x3", **_PACK),
    _fault("taps between filter rows", "a tap that a class has not gets the one before",
           ("index >= 0 && index % dil == 0 && index / dil < count ?", "index >= 0 && index / dil < count ?"),
           on="classes_dilated", **_PACK),
    _fault("a tap too many", "a class gets a tap behind the filter's last", ("&& index / dil < count ?", "?"),
           on="classes_1x7_by_4", **_PACK),
    _fault("neighbours exchanged", "rows i and i + 8 of a warp have each other's class",
           ("+ 2 * pair + m / 8;", "+ 2 * pair + 1 - m / 8;"), on="classes_4x4", **_PACK),
    _fault("pairs exchanged", "of four columns the first two come last",
           ("in_run % 16, pair = m % 8 % PAIRS;", "in_run % 16, pair = PAIRS - 1 - m % 8 % PAIRS;"),
           on="classes_1x7_by_4", **_PACK),
    _fault("rows behind the last run", "the rest of a block is a class, too",
           ("    if (run >= p.class_runs) return {p.filters, 0, 0};\n", ""), on="classes_3x3"),
    _fault("before the first pixel", "columns count from the first place's first pixel",
           ("* p.step_w + residue_col - p.before_w;", "* p.step_w + residue_col;"), on="classes_4x4"),
    _fault("rows above the first", "rows of dx above the first are written",
           ("(unsigned)out_row < (unsigned)p.rows &&", "out_row < p.rows &&"),
           on="classes_4x4", shape="flat"),
    _fault("boxes above the first row", "TMA gets a negative coordinate", ("if (row >= 0)", "if (true)"),
           on="classes_nhwc_above", shape="boxes in rows"),
    _fault("boxes of one class", "all columns go to the first class's",
           ("filters.residue % p.pack_w,", "0,"), on="classes_nhwc_3x3", shape="boxes in rows"),
    _fault("parts of one class", "all boxes of a block go where its first one does",
           ("CLASSES ? filters_of(p, consumer, segment.first, part * PACK_FILTERS) : filters", "filters"),
           on="classes_nhwc_few", shape="rows"),
    _fault("pieces are not shifted", "a piece begins where its row does, at no multiple of 8 bytes",
           ("aligned ? at.col & PIECE_PX - 1 : 0;", "0;"), on="classes_4x4", shape="rows"),
    _fault("flat pieces are not shifted", "a piece is a place's, which begins at no multiple of it",
           ("aligned ? at.col & PIECE_PX - 1 : 0;", "FLAT ? 0 : at.col & PIECE_PX - 1;"), on="classes_1x15",
           shape="flat"),
    _fault("pieces of two rows", "the line's last place and its first are a piece", (
        "begin.inside && end.inside && end.offset == begin.offset + PX - 1", "begin.inside && end.inside"),
           on="classes_1x15", shape="flat"),
    _fault("a piece's rest", "pixels of a piece that is not whole stay unwritten",
           ("} else if (begin.inside || end.inside) {", "} else if (begin.inside && end.inside) {"),
           on="classes_1x15", shape="flat", dtype=_FP16),
    _fault("pieces of filters behind the last", "lanes store them",
           ("                if (line < rows.count)\n", ""), on="classes_1x15", shape="flat"),
    _fault("rows of any length", "pieces are stored in rows whose length is no multiple of theirs",
           ("% PIECE_PX == 0);", "% PIECE_PX >= 0);"), on="classes_odd", shape="rows"),
    _fault("a line's end before its begin", "pixels that went to the begin are stored there",
           ("if (px > 0 || shift == 0) {", "if (true) {"), on="classes_4x4", shape="rows"),
    _fault("a piece behind the row", "pieces that are outside are stored, too",
           ("if ((unsigned)first < (unsigned)cols) *", "*"), on="classes_4x4", dtype=_FP16, shape="rows"),
    _fault("a pixel behind the line", "the last one does not go to its begin",
           ("Buffer::offset(line, (px + 1) % Buffer::PIXELS)", "Buffer::offset(line, px + 1)"), on="classes_4x4",
           shape="rows"),
    _fault("elements of one class", "pixel by pixel all classes go to the first",
           ("filters.residue + residue));", "filters.residue));"), on="classes_4x4", shape="flat"),
    _fault("filters behind the last", "lanes store them", ("if (filter + j < count) to[j]", "if (count > 0) to[j]"),
           on="classes_nhwc_odd"),
    _fault("the first part for all", "lanes store all classes of a block at the first one's place",
           ("if (part == own) offset =", "if (part == 0) offset ="), on="classes_nhwc_odd"),
    _fault("nothing is noted", "no fix-up follows although classes have zero taps",
           ("NEEDS_FIXUP = CLASSES || PACKS > 1 ||", "NEEDS_FIXUP ="), on="classes_3x3", finite=False),
    _fault("the fix-up of one class", "outputs are summed anew over the first class's taps",
           ("= class_h + p.first_r", "= p.first_r"), on="classes_3x3", **_FIXUP),
    _fault("the fix-up between filter rows", "a class gets taps that it has not",
           ("return index >= 0 && index % dil == 0 && index", "return index >= 0 && index"), on="classes_dilated",
           **_FIXUP),
)  # fmt: skip
