"""Faults in the depthwise kernels that stage planes: band.cu, band_wgrad.cu, tile.cu."""

from __future__ import annotations

import torch

from tests.emulated_depthwise import OLDER
from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, result: str = "fprop",
    dtype: torch.dtype = torch.float16, finite: bool = True,
) -> Mutation:  # fmt: skip
    kernel = "depthwise/tile" if dtype == torch.float32 else "depthwise/band"
    kernel = "depthwise/band_wgrad" if result == "wgrad" else kernel
    return Mutation(name, kernel, fault, edits, on, result, dtype, family="depthwise", shape=OLDER, finite=finite)


STAGING = (
    _fault("band: rows outside are read", "the rows above and below the image count as inside",
           ("(unsigned)(first + at) < (unsigned)s.extent ? PIECE_BYTES : 0", "PIECE_BYTES"), on="band_3x5"),
    _fault("band: pieces in the wrong row", "a thread goes down its rows one by one",
           ("buffer += hop * s.row_bytes;", "buffer += s.row_bytes;"), on="band_3x5"),
    _fault("band: no columns of zeros", "rows begin where the zeros belong",
           ("(s.left + piece) * PIECE_BYTES;", "piece * PIECE_BYTES;"), on="band_3x5"),
    _fault("band: zeros on the left only", "what lies behind a row is what memory held",
           (" || piece >= s.left + s.width)", ")"), on="band_3x5"),
    _fault("band: no spare rows", "what lies behind the last row is what memory held",
           ("row < s.rows + s.spare; row", "row < s.rows; row"), on="band_strips"),
    _fault("band: strips are not counted", "a plane's second strip is another image's first",
           ("while (strip >= strips) strip -= strips, ++image;", "image += strip, strip = 0;"), on="band_strips"),
    _fault("band: a block does its neighbour's strips", "a block goes from strip to strip of the channel",
           ("        ahead += partition.parts;", "        ahead += 1;"), on="band_7x7"),
    _fault("band: a copy too few is waited for", "a strip is multiplied before it has landed",
           ("cp_async_wait_group<DEPTH - 2>()", "cp_async_wait_group<DEPTH - 1>()"), on="band_7x7"),
    _fault("band: no barrier", "a strip is multiplied before other threads' copies have landed",
           ("cp_async_wait_group<DEPTH - 2>();\n        __syncthreads();", "cp_async_wait_group<DEPTH - 2>();"),
           on="band_7x7"),
    _fault("band: a buffer is used too early", "the copies overwrite the strip that is multiplied",
           ("copy(smem + free * partition.buffer_bytes", "copy(smem + full * partition.buffer_bytes"), on="band_many"),
)  # fmt: skip

PRODUCTS = (
    _fault("band: the tap before", "taps are one column late",
           ("const int at = i % WIDTH - BEFORE + i / (R * WIDTH);", "const int at = i % WIDTH - BEFORE;"),
           on="band_3x5"),
    _fault("band: the filter's dilation", "taps are neighbours", ("at % DIL_W == 0", "at % DIL_W == 1"),
           on="band_sides"),
    _fault("band: the rows' dilation", "filter rows meet neighbouring rows",
           ("load_row(x, rows + r * DIL_H * p", "load_row(x, rows + r * p"), on="band_sides"),
    _fault("band: dgrad's filter is not flipped", "rows of the filter are in fprop's order",
           ("DGRAD ? R - 1 - r : r", "r"), on="band_sides", result="dgrad"),
    _fault("band: even and odd columns change places", "the fragments' rows stand for columns in another order",
           ("(2 * group + i % 2) + p.pad_left", "(2 * group + 1 - i % 2) + p.pad_left"), on="band_3x5"),
    _fault("band: bands before the filter", "the filter's rows are read before they are written",
           ("filter.load(p, channel);\n    __syncthreads();", "filter.load(p, channel);"), on="band_7x7"),
    _fault("band: no bias", "sums begin with zero",
           ("sums[tile][j] = bands.bias;", "sums[tile][j] = 0;"), on="band_3x5"),
    _fault("band: filters of another channel", "each output channel reads its own input channel",
           ("p.in, channel / MULTIPLIER", "p.in, channel"), on="band_5x5_multiplier"),
)  # fmt: skip

STEPS = (
    _fault("band: another piece of the window", "the second half of a slice is the first once more",
           ("x[2 * (tile + slice) + 1]}", "x[2 * (tile + slice)]}"), on="band_3x5"),
    _fault("band: one step of columns", "the columns behind the first step are left out",
           ("col < p.out_cols; col += COLS)", "col < COLS; col += COLS)"), on="band_5x5_multiplier"),
    _fault("band: columns beyond the last", "a step writes all its columns",
           (" && col < cols)\n", ")\n"), on="band_3x5"),
    _fault("band: rows beyond the last", "a step writes all its rows",
           ("(rows < ROWS ? rows : ROWS)", "ROWS"), on="band_7x7"),
    _fault("band: pieces leave too early", "a warp reads sums that other lanes have not written",
           ("        __syncwarp();\n        elem_t* piece", "        elem_t* piece"), on="band_3x5"),
    _fault("band: sums overwrite those that leave", "a warp's next step does not wait for its pieces",
           ("const {\n        __syncwarp();\n", "const {\n"), on="band_strips"),
    _fault("band: no second sum", "zero times an infinity stays in the sum",
           ("if (!finite(sums)) sum_again(sums, p, bands, channel, window);", ""), on="band_many",
           dtype=torch.bfloat16, finite=False),
    _fault("band: the second sum of a neighbour", "sums that are not finite become the next column's",
           ("(i / 4 * 16 + col + i / 2 % 2)", "(i / 4 * 16 + col + 1 - i / 2 % 2)"), on="band_many",
           dtype=torch.bfloat16, finite=False),
)  # fmt: skip

WGRAD = (
    _fault("band wgrad: rows as they are", "a row of dy meets the rows of x eight further on",
           ("dy + (high + lane % 8) * p.dy_staged.row_bytes + (tile * 16 + low) * 2",
            "dy + (low + lane % 8) * p.dy_staged.row_bytes + (tile * 16 + high) * 2"), on="band_3x5", result="wgrad"),
    _fault("band wgrad: tiles are not shifted", "the second tile of dy meets the first one's window",
           ("const int at = 2 * tile + j;", "const int at = j;"), on="band_3x5", result="wgrad"),
    _fault("band wgrad: warps do not share the filter", "all warps sum the filter's first rows",
           ("slice * FILTER_ROWS);\n        col", "0);\n        col"), on="band_7x7", result="wgrad"),
    _fault("band wgrad: the diagonal beside", "taps are a column further left",
           ("p.x_staged.left * PIECE - p.pad_left;", "p.x_staged.left * PIECE - p.pad_left + 1;"), on="band_3x5",
           result="wgrad"),
    _fault("band wgrad: every other warp", "the sums of half of the warps are lost",
           ("slice + lane / 16 * SLICES", "slice"), on="band_3x5", result="wgrad"),
    _fault("band wgrad: steps of another row", "a warp's next step is in the row after the next",
           ("col -= col_steps, row += ROWS;", "col -= col_steps, row += 2 * ROWS;"), on="band_strips", result="wgrad"),
    _fault("band wgrad: filters of another channel", "each filter meets the channel of its own number",
           ("p.x, filter / MULTIPLIER", "p.x, filter"), on="band_5x5_multiplier", result="wgrad"),
    _fault("band wgrad: sums of the next row", "a row's sums overwrite those that are being added",
           ("        if (i > 0) __syncthreads();\n", ""), on="band_7x7", result="wgrad"),
    _fault("band wgrad: diagonals too early", "diagonals are added before all warps have written their sums",
           ("        __syncthreads();\n        add_diagonals", "        add_diagonals"), on="band_7x7", result="wgrad"),
    _fault("band wgrad: no second sum", "zero times an infinity stays in the sum",
           ("if (sum * 0.f != 0.f)", "if (false)"), on="band_many", result="wgrad", dtype=torch.bfloat16, finite=False),
    _fault("band wgrad: the second sum of another tap", "a sum that is not finite becomes that of a tap further right",
           ("w = col + s * DIL_W - p.pad_left", "w = col + s * DIL_W"), on="band_many", result="wgrad",
           dtype=torch.bfloat16, finite=False),
)  # fmt: skip


TILES = (
    _fault("tile: no lead", "windows begin with the first column that is copied",
           ("row[(LEAD + col + s) / 4].of[(LEAD + col + s) % 4]",
            "row[(col + s) / 4].of[(col + s) % 4]"), on="band_3x5",
           dtype=torch.float32),
    _fault("tile: a row of the filter too few", "the last row that a window meets is left out",
           ("at < ROWS + R - 1", "at < ROWS + R - 2"), on="band_7x7", dtype=torch.float32),
    _fault("tile: dgrad's filter is not flipped", "columns of the filter are in fprop's order",
           ("DGRAD ? S - 1 - s : s", "s"), on="band_3x5", result="dgrad", dtype=torch.float32),
    _fault("tile: rows beyond the last", "a thread writes all its rows", ("if (i < rows)", "if (true)"),
           on="band_5x5_multiplier", dtype=torch.float32),
    _fault("tile: no bias", "sums begin with zero", ("of[row][col] = filter.bias;", "of[row][col] = 0;"),
           on="band_3x5", dtype=torch.float32),
    _fault("tile: the strip's rows", "all strips are written where the first one is",
           ("unit.image * p.out_n + first_row * p.out_h", "unit.image * p.out_n"), on="band_strips",
           dtype=torch.float32),
    _fault("tile: another channel's filter", "all channels have the first one's filter",
           ("filter.load(p, channel)", "filter.load(p, 0)"), on="band_3x5", dtype=torch.float32),
)  # fmt: skip

MUTATIONS = (*STAGING, *PRODUCTS, *STEPS, *WGRAD, *TILES)
