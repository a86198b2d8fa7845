"""Faults in the direct family's products: direct.cu with geometry.cuh, staging.cuh and epilogue.cuh."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _fault(name: str, fault: str, *edits: tuple[str, str], on: str, result: str = "fprop") -> Mutation:
    return Mutation(name, "direct/direct", fault, edits, on, result)


PIPELINE = (
    _fault("no barrier after the tile's entries", "warps read entries that others may not have written yet",
           ("0);\n    __syncthreads();\n    a.begin", "0);\n    a.begin"), on="border_3x3"),
    _fault("no barrier between stages", "a warp refills a stage that others still multiply",
           ("false);\n        __syncthreads();\n    }", "false);\n    }"), on="border_3x3"),
    _fault("multiply reads the other slot", "the stage that is about to be refilled is multiplied",
           ("multiply(sums, smem, stage % 2, place)", "multiply(sums, smem, next % 2, place)"), on="border_3x3"),
    _fault("one operand goes to the other slot", "B lands where it is still read",
           ("b.commit(smem.b[next % 2])", "b.commit(smem.b[(next + 1) % 2])"), on="border_3x3"),
    _fault("a single buffer", "both operands are staged over the ones being multiplied",
           ("multiply(sums, smem, stage % 2, place)", "multiply(sums, smem, 0, place)"),
           ("a.commit(smem.a[next % 2])", "a.commit(smem.a[0])"),
           ("b.commit(smem.b[next % 2])", "b.commit(smem.b[0])"), on="border_3x3"),
    _fault("entries always in slot 0", "odd stages read entries that nobody wrote",
           ("smem.b_es)[stage % 2][lane]", "smem.b_es)[0][lane]"), on="border_3x3"),
    _fault("entries two stages ahead", "a stage is fetched with the entries of the one after it",
           ("write_stage_entries(smem, p, work, next + 1)", "write_stage_entries(smem, p, work, next + 2)"),
           on="border_3x3"),
    _fault("entries beyond the stage", "lanes beyond the stage write over their neighbours in shared memory",
           ("    if (lane >= TILE_E) return;\n", ""), on="border_3x3"),
    _fault("idle threads stage too", "units beyond the tile are staged over other elements",
           ("UNITS % THREADS != 0 && unit >= UNITS", "false"), on="four_sides"),
    _fault("rows of shared memory lose their alignment", "vector reads start at addresses that are no multiple of 16",
           ("PITCH = EXTENT + 4", "PITCH = EXTENT + 1"), on="border_3x3"),
)  # fmt: skip

BORDERS = (
    _fault("one row below the image", "the row below the image counts as inside",
           ("(unsigned)(a.h + h) < (unsigned)extent_h", "(unsigned)(a.h + h) <= (unsigned)extent_h"), on="border_3x3"),
    _fault("one column beyond the right border", "the column right of the image counts as inside",
           ("(unsigned)(a.w + w) < (unsigned)extent_w", "(unsigned)(a.w + w) <= (unsigned)extent_w"),
           on="border_3x3", result="dgrad"),
    _fault("no left border", "columns left of the image count as inside",
           ("(unsigned)(a.w + w) < (unsigned)extent_w", "a.w + w < extent_w"), on="border_3x3", result="wgrad"),
    _fault("only the first tap decides", "a warp skips the checks although its last taps leave the image",
           (" && inside(own, moves.h_max, moves.w_max, h, w)", ""), on="wide_bottom_right"),
    _fault("one lane decides for its warp", "a warp skips the checks as soon as one of its pixels may",
           ("__all_sync(0xffffffffu, stay)", "__any_sync(0xffffffffu, stay)"), on="border_3x3"),
    _fault("the wrong side's padding", "columns are shifted by the padding at the top",
           ("DIL_W, p.pad_left, p.q)", "DIL_W, p.pad_top, p.q)"), on="four_sides"),
    _fault("the end of the sum is not masked", "indices beyond the last tap read the first element of a row",
           ("if (e >= work.es) {\n            to = hc::outside();", "if (e >= work.es) {\n            to = entry(0);"),
           on="odd_widths"),
    _fault("pixels beyond the last one", "the last tile reads and writes pixels that do not exist",
           ("} else if (col < cols) {", "} else {"), on="odd_widths"),
    _fault("rows beyond the last channel", "the result's channels are not masked",
           ("row < ROWS && col_offset >= 0", "col_offset >= 0"), on="four_sides", result="dgrad"),
    _fault("the last row is not written", "one channel of the result keeps what was in memory",
           ("row < ROWS && col_offset >= 0", "row < ROWS - 1 && col_offset >= 0"), on="four_sides"),
    _fault("a vector where the row is not aligned", "four results go out in one store at any address",
           ("if (neighbours && aligned && ", "if (neighbours && "), on="odd_widths"),
    _fault("a vector beyond the mask", "four results go out in one store if the first of them is wanted",
           ("wanted[0] && wanted[1] && wanted[2] && wanted[3]", "wanted[0]"), on="channels_last_odd"),
)  # fmt: skip

GEOMETRY = (
    _fault("padding has the wrong sign in a residue", "dgrad takes the taps of another residue class",
           ("(residue + pad - first * dil) % stride", "(residue - pad - first * dil) % stride"),
           on="padding_with_stride", result="dgrad"),
    _fault("residues of the axes swapped", "the vertical residue is taken modulo the horizontal stride",
           ("p.h, work.part / residues_w)", "p.h, work.part % residues_w)"),
           ("p.w_extent, work.part % residues_w)", "p.w_extent, work.part / residues_w)"),
           on="padding_with_stride", result="dgrad"),
    _fault("taps of a residue class not spaced", "a strided dgrad reads neighbouring taps of the filter",
           ("work.vertical.first + tap.row * work.vertical.step", "work.vertical.first + tap.row"),
           on="stride_2", result="dgrad"),
    _fault("the filter is not flipped", "dgrad walks the taps in the direction of fprop",
           ("-(step * dil / stride)", "step * dil / stride"), on="border_3x3", result="dgrad"),
    _fault("filter rows and columns swapped", "the strides of the filter's axes are exchanged",
           ("r * p.w_r + s * p.w_s", "r * p.w_s + s * p.w_r"), on="four_sides"),
    _fault("columns taken as neighbours in the result", "the stride between output columns is ignored",
           ("row * p.y_p + col * p.y_q;", "row * p.y_p + col;"), on="channels_last_odd"),
    _fault("columns taken as neighbours in the input", "the stride between input columns is ignored",
           ("at.n * p.x_n + h * p.x_h + w * p.x_w", "at.n * p.x_n + h * p.x_h + w"), on="every_other_pixel"),
    _fault("columns of the filter gradient misplaced", "the filter's rows are taken to be as long as its columns",
           ("(tap.channel * R + tap.row) * S + tap.col", "(tap.channel * R + tap.row) * R + tap.col"),
           on="four_sides", result="wgrad"),
    _fault("every group reads the first one", "the group's first input channel is ignored",
           ("p.x + group * (C_PER_GROUP * p.x_c)", "p.x"), on="groups_odd"),
    _fault("every group takes the first bias", "the group's first filter is ignored",
           ("p.bias + work.group * K_PER_GROUP", "p.bias"), on="groups_odd"),
    _fault("every part sums the first pixels", "the parts of a filter gradient start at pixel 0",
           ("work.part * p.pixels_per_part : 0", "0 : 0"), on="many_images", result="wgrad"),
    _fault("the last part is as long as the others", "a filter gradient sums pixels behind the last image",
           ("int(left < p.pixels_per_part ? left : p.pixels_per_part)", "int(p.pixels_per_part)"),
           on="many_images", result="wgrad"),
)  # fmt: skip

SUMS = (
    _fault("each promotion starts anew", "long sums keep their last run only",
           ("promote(sums, smem, next == PROMOTE_STAGES, false)", "promote(sums, smem, true, false)"),
           on="many_channels"),
    _fault("the first promotion adds to nothing", "totals start from what was in shared memory",
           ("first ? sum : slot + sum", "slot + sum"), on="many_channels"),
    _fault("the totals are not taken back", "only the sums after the last promotion are written",
           ("promote(sums, smem, false, true);", ";"), on="many_channels", result="dgrad"),
    _fault("the result goes to an input", "fprop writes over x",
           ("p.y + work.group * (K_PER_GROUP * p.y_k), p.y_k, bias", "p.x, p.y_k, bias"), on="border_3x3"),
)  # fmt: skip

MUTATIONS = (*PIPELINE, *BORDERS, *GEOMETRY, *SUMS)
