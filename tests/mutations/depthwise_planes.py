"""Faults in the depthwise kernels of small planes: plane.cu, plane_wgrad.cu and what they share, small_planes.cuh."""

from __future__ import annotations

import torch

from tests.emulated_depthwise_planes import PLANES
from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "plane_5x5", result: str = "fprop",
    dtype: torch.dtype = torch.float16, finite: bool = True,
) -> Mutation:  # fmt: skip
    kernel = "depthwise/plane_wgrad" if result == "wgrad" else "depthwise/plane"
    return Mutation(f"plane: {name}", kernel, fault, edits, on, result, dtype, "depthwise", PLANES, finite)


RUNS = (
    _fault("what is left over does not come", "less than 16 bytes at the end of a run count as nothing",
           ("if (threadIdx.x < PIECE && whole * (int)sizeof(Elem) < bytes)", "if (false)")),
    _fault("a piece is read beyond a run's end", "the last piece is read whole",
           ("if (piece < bytes / PIECE_BYTES)", "if (piece * PIECE_BYTES < bytes)")),
    _fault("an element is read beyond a run's end", "as many elements as a piece has are read",
           ("at * (int)sizeof(Elem) < bytes ? run[at] : Elem{}", "run[at]")),
    _fault("what is left over does not leave", "elements behind the last whole piece are not written",
           ("if (rest * (int)sizeof(Elem) < bytes) run[rest]", "if (false) run[rest]")),
    _fault("a run is written beyond its end", "a piece that begins in the run leaves whole",
           ("if ((piece + 1) * PIECE_BYTES > bytes) break;", "if (piece * PIECE_BYTES >= bytes) break;")),
    _fault("planes side by side", "pieces are not set apart where planes are whole pieces",
           ("return piece / PLANE_PIECES * PITCH + piece % PLANE_PIECES * PIECE_BYTES;", "return piece * PIECE_BYTES;"),
           on="plane_wide"),
    _fault("copies are not waited for", "planes are read while they come",
           ("    hc::ptx::cp_async_wait_group<0>();\n    __syncthreads();\n    const int plane",
            "    __syncthreads();\n    const int plane")),
    _fault("the run of the first block", "all blocks read the first planes",
           ("p.in + (i64)p.multiplier.quotient(first) * (IN_H * IN_W)", "p.in")),
    _fault("a run of outputs as input", "filters of one channel begin at planes of their own",
           ("(i64)p.multiplier.quotient(first) * (IN_H * IN_W)", "(i64)first * (IN_H * IN_W)"), on="plane_three"),
)  # fmt: skip

ROWS = (
    _fault("odd halves as even ones", "rows that begin amid a word are read from its begin",
           ("        } else {\n            const unsigned moved = at & 2 ? 0x5432 : 0x3210;",
            "        } else {\n            const unsigned moved = 0x3210;")),
    _fault("odd halves are written as even ones", "rows that begin amid a word are packed from its begin",
           ("        const unsigned moved = amid ? 0x5432 : 0x3210;", "        const unsigned moved = 0x3210;")),
    _fault("the half that stands alone", "always the last one, also of rows that begin amid a word",
           ("const unsigned alone = amid ? words[0] : words[WORDS - 1];", "const unsigned alone = words[WORDS - 1];")),
    _fault("rows outside the plane", "a window's rows above and below the plane are read",
           ("(!ONE && (unsigned)in_row >= (unsigned)IN_H)", "(false)"), on="plane_3x3"),
    _fault("the last column", "what it is multiplied by is left out", ("|| at >= IN_W) continue;",
           "|| at >= IN_W - 1) continue;")),
    _fault("columns without a stride", "neighbouring outputs of a strided layer meet neighbouring inputs",
           ("col * STRIDE_W + s * DIL_W - PAD_LEFT;\n                const int at = DGRAD",
            "col + s * DIL_W - PAD_LEFT;\n                const int at = DGRAD"), on="plane_sides"),
    _fault("rows that a strip does not have", "the last strip writes all rows",
           ("return i < FULL_ROWS || strip < STRIPS - 1;", "return true;"), on="plane_3x3"),
    _fault("a window without its last row", "the last row that a strip meets is left out",
           ("at <= LAST_ROW; ++at) {\n            const int in_row",
            "at < LAST_ROW; ++at) {\n            const int in_row"), on="plane_large"),
    _fault("strips without their stride", "strips of a strided layer begin rows too early",
           ("DGRAD ? ROWS / STRIDE_H : ROWS * STRIDE_H;", "DGRAD ? ROWS / STRIDE_H : ROWS;"), on="plane_stride"),
    _fault("strips of dx", "rows of dy from strip to strip are those of dx",
           ("DGRAD ? ROWS / STRIDE_H : ROWS * STRIDE_H;", "ROWS * STRIDE_H;"), on="plane_stride", result="dgrad"),
    _fault("rows of dy between the steps", "dx meets dy at taps that its residue class does not have",
           ("(DGRAD && far % STRIDE_W != 0)", "false"), on="plane_stride", result="dgrad"),
    _fault("taps between dilated ones", "a row meets the tap before it", ("far % dil == 0 && ", ""),
           on="plane_dilated"),
)  # fmt: skip

SUMS = (
    _fault("filters do not begin anew", "behind the last filter stands what follows it in memory",
           ("p.w[in_all - p.w_elems.quotient(in_all) * p.w_elems.value]", "p.w[in_all]")),
    _fault("filters of the first block", "all blocks begin with the first filter",
           ("first_filter = first - p.filters.quotient(first) * p.filters.value;", "first_filter = 0;")),
    _fault("the bias of the first planes", "planes of later blocks begin with biases of the first",
           ("filter = first + plane - p.filters.quotient(first + plane) * p.filters.value;",
            "filter = plane - p.filters.quotient(plane) * p.filters.value;")),
    _fault("outputs too early", "results are written while others still read the input",
           ("    __syncthreads();  // the input has been read\n", ""), on="plane_3x3"),
    _fault("outputs leave too early", "a run leaves before all rows stand in it",
           ("    __syncthreads();\n    Out::leave", "    Out::leave")),
    _fault("a residual is overwritten", "rows are written beside halves that a neighbour reads",
           ("    if (RESIDUAL) __syncthreads();  // a row of halves is read with a neighbour's half\n", ""),
           result="scale_residual"),
    _fault("the residual of the first block", "all blocks add the first planes' residual",
           ("p.residual + out, planes", "p.residual, planes"), result="scale_residual"),
)  # fmt: skip

WGRAD = (
    _fault("wgrad: images of one part", "blocks begin with the first image",
           ("begin(int(blockIdx.x / (unsigned)p.groups) * p.part_images)", "begin(0)"), on="plane_steps",
           result="wgrad"),
    _fault("wgrad: images behind the last one", "an image that is not there is added",
           ("plane < work.planes && image + slot < work.end) sums", "plane < work.planes) sums"), on="plane_steps",
           result="wgrad"),
    _fault("wgrad: images of the next part", "a step asks for and adds images of the next part",
           ("end(min(begin + p.part_images, p.images))", "end(min(begin + p.part_images + 1, p.images))"),
           on="plane_steps", result="wgrad"),
    _fault("wgrad: one step", "a step is multiplied while it comes",
           ("hc::ptx::cp_async_wait_group<1>();", "hc::ptx::cp_async_wait_group<2>();"), on="plane_steps",
           result="wgrad"),
    _fault("wgrad: a step is overwritten", "images come to where others are read",
           ("        __syncthreads();  // the images have been read\n", ""), on="plane_steps", result="wgrad"),
    _fault("wgrad: one buffer", "each step is multiplied as the first", ("SLOTS, now ^= 1)", "SLOTS)"),
           on="plane_steps", result="wgrad"),
    _fault("wgrad: the first group of filters", "all groups read the first planes of dy",
           ("(i64)work.filter * (OUT_H * OUT_W), work.planes", "0, work.planes"), on="plane_steps", result="wgrad"),
    _fault("wgrad: channels of their own", "filters of one channel read others",
           ("X::row_at(plane / MULTIPLIER, x_row)", "X::row_at(plane, x_row)"), on="plane_multiplier", result="wgrad"),
    _fault("wgrad: rows of dy beyond the last", "what was in registers, here ones, counts as a row",
           ("(CUTS && !has_row(i, strip))", "false"),
           ("float rows[ROWS][OUT_W];", "float rows[ROWS][OUT_W];\n        for (auto& row : rows)\n"
            "            for (float& each : row) each = 1.f;"), on="plane_3x3", result="wgrad"),
    _fault("wgrad: sums of one part of a block", "sums of other strips and images are lost",
           ("part < STRIPS * SLOTS; ++part", "part < 1; ++part"), on="plane_3x3", result="wgrad"),
    _fault("wgrad: sums too early", "sums are added before they stand there",
           ("sums.of[tap];\n    __syncthreads();", "sums.of[tap];"), on="plane_3x3", result="wgrad"),
    _fault("wgrad: one part of sums", "parts overwrite each other",
           ("((i64)(blockIdx.x / (unsigned)p.groups) * p.filters + work.filter)", "(i64)work.filter"), on="plane_steps",
           result="wgrad"),
    _fault("wgrad: no products with the padding", "an infinity of dy times a zero beside x is left out",
           ("if (plane < work.planes && !sums.finite())", "if (false)"), on="plane_dilated", result="wgrad",
           dtype=torch.bfloat16, finite=False),
    _fault("wgrad: what meets the padding alone is not seen", "an infinity that meets no pixel of x is left out",
           ("(SHOWS ? 0 : ROWS * OUT_W)", "0"), on="plane_border", result="wgrad", dtype=torch.bfloat16, finite=False),
)  # fmt: skip

MUTATIONS = (*RUNS, *ROWS, *SUMS, *WGRAD)
