"""Faults in depthwise_window: both kernels and the headers in families/depthwise_window."""

from __future__ import annotations

from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, result: str = "fprop", shape: str = "", finite: bool = True
) -> Mutation:
    kernel = "depthwise_window/wgrad" if result == "wgrad" else "depthwise_window/window"
    return Mutation(name, kernel, fault, edits, on, result, family="depthwise_window", shape=shape, finite=finite)


_BOTH, _PLANES = "tiles and chunks", "the same rows of planes"

STAGING = (
    _fault("no barrier before the products", "pixels are read that others have not staged",
           ("__syncthreads_and(finite)", "finite"), on="window_13x11"),
    _fault("no barrier after the products", "a range of taps is staged over the one that is read",
           ("__syncthreads();  // the term before is read", ""), on="window_13x11", shape=_BOTH),
    _fault("one column beyond the image", "the column right of the image counts as inside",
           ("(unsigned)w < (unsigned)axes[1].extent", "(unsigned)w <= (unsigned)axes[1].extent"), on="window_13x11"),
    _fault("rows beyond the image", "rows below the image count as inside",
           ("end = behind < axes[0].extent ? behind : axes[0].extent;", "end = behind;"), on="window_stride"),
    _fault("no upper border", "rows above the image count as inside",
           ("(unsigned)column.h < (unsigned)last", "column.h < last"), on="window_stride"),
    _fault("all rows above the image", "where none is inside, those above count as inside",
           ("max(0, min(column.h + end * rows.step_h, column.end))", "min(column.h + end * rows.step_h, column.end)"),
           on="window_all_above", result="wgrad"),
    _fault("rows below a window", "rows that the window does not have are staged over the next plane",
           ("if (first + i < end) column.to[", "column.to["), on="window_13x11", shape="images together"),
    _fault("a lane's rows begin at the first one", "lanes that share a column stage the same rows",
           ("column.at += begin * rows.step, column.h", "column.h"), on="window_column"),
    _fault("no row of zeros", "rows outside are whatever shared memory holds",
           ("stored.count : stored.count + 1", "stored.count : stored.count"), on="window_13x11",
           shape="images together"),
    _fault("more rows than are stored", "a window keeps a row less than it needs",
           ("inside < axis.lines - 1 ? inside : axis.lines - 1", "inside - 1"), on="window_13x11"),
    _fault("even and odd quads change places", "pixels are staged where those four columns on are read",
           ("(col / 4 % 2) * half", "(1 - col / 4 % 2) * half"), on="window_13x11"),
    _fault("rows without their skew", "rows are staged closer than they are read",
           ("i * rows.row_words + i / ROWS * rows.skew_words]", "i * rows.row_words]"), on="window_13x11"),
    _fault("residues of the stride in a row", "columns of one residue are staged over those of another",
           ("rho * cols.stride + col - m * cols.stride", "rho * cols.stride"), on="window_stride"),
    _fault("a filter's columns in plain order", "taps of a residue are taken from their neighbours",
           ("rho + (index - rho * p.tap_words) * cols.stride", "index"), on="window_stride"),
    _fault("every plane from the first channel", "the channel's place in the block is ignored",
           ("{image, work.c0 + filter, filter,", "{image, work.c0, filter,"), on="window_nhwc"),
    _fault("planes that do not exist", "images beyond the last one are staged",
           ("image < p.n && work.c0 + filter < p.channels", "work.c0 + filter < p.channels"), on="window_nhwc",
           shape="several channel runs"),
    _fault("images of the next channel", "planes behind the last image of a channel are beyond the batch",
           ("work.n0 + index - outer * p.n", "work.n0 + index"), on="window_13x11", shape="images together"),
    _fault("all waves are as wide", "the last blocks take rows that are others'",
           ("all - first < p.wave ? all - first : p.wave", "p.wave"), on="window_stride", shape=_BOTH),
)  # fmt: skip

PRODUCTS = (
    _fault("filter rows that the window row does not meet", "rows before the filter are read",
           ("(unsigned)(m - i) < (unsigned)taps.rows", "m - i < taps.rows"), on="window_13x11", shape=_BOTH),
    _fault("the last window rows are taken as whole", "rows behind the filter are read",
           ("if (m >= ROWS - 1 && m < taps.rows) {", "if (m >= ROWS - 1) {"), on="window_13x11"),
    _fault("a window row too few", "the last filter row never meets a tile's last row",
           ("all = taps.rows + ROWS - 1,", "all = taps.rows + ROWS - 2,"), on="window_13x11"),
    _fault("window: the first row inside", "a row of the image is left out",
           ("first = stored.first - row, end", "first = stored.first - row + 1, end"), on="window_tall",
           shape=_PLANES),
    _fault("window: the last row inside", "a row of the image is left out",
           ("end = first + stored.count;", "end = first + stored.count - 1;"), on="window_tall", shape=_PLANES),
    _fault("window: rows outside are read", "a row behind the image is taken from the next plane",
           ("return at < (unsigned)count ? at : count;", "return at;"), on="window_13x11",
           shape="images together"),
    _fault("taps left over are lost", "the last three of eleven columns are not added",
           ("if (cols == 3) add_few<3>(row, taps);", ""), on="window_13x11"),
    _fault("padding taps are multiplied", "a tap that is not there meets an infinity: zero times it is a NaN",
           ("if (cols == 3) add_few<3>(row, taps);", "if (cols == 3) add_few<4>(row, taps);"), on="window_nhwc",
           finite=False),
    _fault("taps behind a quad are lost", "four taps more are taken to be left",
           ("cols -= 4, taps += 4;", "taps += 4;"), on="window_nhwc"),
    _fault("the second quad meets the first one's pixels", "taps four to seven are added four columns too far left",
           ("add_taps<4>(sums[i], pixels, 4, quads[1])", "add_taps<4>(sums[i], pixels, 0, quads[1])"),
           on="window_13x11"),
)  # fmt: skip

GEOMETRY = (
    _fault("window: the filter is not flipped", "dgrad walks the taps as fprop does",
           ("            -axis.step,", "            axis.step,"), on="window_13x11", result="dgrad"),
    _fault("inner classes of a dilated gradient", "every class is computed where the first one stands",
           ("axis.residue + inner * axis.spacing", "axis.residue"), on="window_dilated", result="dgrad"),
    _fault("padding at the wrong side of a class", "classes begin at the same column",
           ("index * p.stride - p.pad", "-p.pad"), on="window_dilated"),
    _fault("stride and taps exchanged in a tile's origin", "tiles below the first one begin too far up",
           ("work.rows.stride * work.row0 + range.row0", "work.row0 + range.row0"), on="window_stride", shape=_BOTH),
    _fault("the second filter of a channel", "dgrad takes each channel's first filter again and again",
           ("filter) * p.multiplier + m : work.c0", "filter) * p.multiplier : work.c0"), on="window_31x31",
           result="dgrad"),
    _fault("results beyond the last column", "a tile writes what its class does not have",
           ("wanted[j] = a < work.rows.results && b < work.cols.results;", "wanted[j] = a < work.rows.results;"),
           on="window_13x11"),
    _fault("lanes write before the sums are there", "channels leave without a barrier",
           ("    __syncthreads();\n    const int step", "    const int step"), on="window_nhwc"),
    _fault("classes of columns read the first one", "columns side by side take one class's pixels",
           ("place.class_w * window.class_words +", ""), on="window_dilated"),
    _fault("classes of columns leave apart", "a dilated result is written as if its classes were not joined",
           ("window.classes_w == 1 ? work.cols.step : 1", "work.cols.step"), on="window_dilated"),
    _fault("sums over windows that are read", "sums go to shared memory while others multiply",
           ("    __syncthreads();  // the windows are read\n", ""), on="window_nhwc"),
    _fault("planes of results further apart", "the last plane's results are behind the block's shared memory",
           ("plane_words = tile_pixels + 1;", "plane_words = tile_pixels + 2;"), on="window_low_nhwc"),
    _fault("long sums start anew", "only the last range of taps counts",
           ("m + row + col == 0,", "true,"), on="window_13x11", shape=_BOTH),
    _fault("window: the totals are not taken back", "sums after the last range are cleared",
           ("sum = last ? total : 0.0f;", "sum = 0.0f;"), on="window_31x31", result="dgrad", shape=_BOTH),
    _fault("the first channel's bias", "the bias of a block's first channel is added to all",
           ("p.bias[channel]", "p.bias[0]"), on="window_13x11"),
)  # fmt: skip

GRADIENTS = (
    _fault("slices begin at the first row", "each slice sums the first rows",
           ("{slice_row, p.slice_rows}", "{0, p.slice_rows}"), on="window_13x11", result="wgrad",
           shape=_BOTH),
    _fault("a slice takes its neighbour's rows too", "rows are summed twice",
           ("left < own.rows ? left : own.rows", "left"), on="window_13x11", result="wgrad", shape=_BOTH),
    _fault("the last slice is lost", "one slice is never added",
           ("slice < p.slices;", "slice < p.slices - 1;"), on="window_13x11", result="wgrad", shape=_BOTH),
    _fault("window: the last part is as long as the others", "terms behind the last image are summed",
           ("p.terms - first < p.part_terms ? p.terms : first + p.part_terms", "first + p.part_terms"),
           on="window_both", result="wgrad", shape=_BOTH),
    _fault("every part at the same place", "parts are written over each other",
           ("(i64)work.part * p.channels + k", "(i64)k"), on="window_13x11", result="wgrad", shape=_BOTH),
    _fault("terms are not waited for", "a range of dy is staged over the one that is read",
           ("__syncthreads();  // the term before is read", ""), on="window_13x11", result="wgrad", shape=_BOTH),
)  # fmt: skip

MUTATIONS = (*STAGING, *PRODUCTS, *GEOMETRY, *GRADIENTS)
