"""Faults in the family of double precision on tensor cores: halo_sm80_f64/conv.cu, pack.cu and wgrad.cu."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation


def _conv(
    name: str, fault: str, *edits: tuple[str, str], on: str = "f64_images", result: str = "fprop", shape: str = "",
    kernel: str = "halo_sm80_f64/conv",
) -> Mutation:  # fmt: skip
    return Mutation(f"f64: {name}", kernel, fault, edits, on, result, torch.float64, "halo_sm80_f64", shape)


def _pack(name: str, fault: str, *edits: tuple[str, str], on: str = "f64_groups", result: str = "fprop") -> Mutation:
    return _conv(f"pack: {name}", fault, *edits, on=on, result=result, kernel="halo_sm80_f64/pack")


def _wgrad(
    name: str, fault: str, *edits: tuple[str, str], on: str = "f64_narrow_nhwc", shape: str = "", finite: bool = True,
) -> Mutation:  # fmt: skip
    return Mutation(
        f"f64: wgrad: {name}", "halo_sm80_f64/wgrad", fault, edits, on, "wgrad", torch.float64, "halo_sm80_f64", shape,
        finite,
    )  # fmt: skip


_WAIT = "ptx::cp_async_wait_group<STAGES - 2>();"
_EARLY = (_WAIT, "ptx::cp_async_wait_group<STAGES - 1>();")
_NO_BARRIER = (f"        {_WAIT}\n        __syncthreads();\n", f"        {_WAIT}\n")

MUTATIONS = (
    _conv("a step is not waited for", "pixels and weights are read before they have landed", _EARLY),
    _conv("no barrier", "weights are read that another thread has copied", _NO_BARRIER),
    _conv("a buffer of weights too few", "weights land over those that are being read",
          ("if (++at.w_buffer == STAGES)", "if (++at.w_buffer == STAGES - 1)")),
    _conv("a buffer of pixels too few", "pixels land over those that are being read",
          ("if (++at.x_buffer == p.x_buffers)", "if (++at.x_buffer == p.x_buffers - 1)"), on="f64_pointwise"),
    _conv("rows of the first image", "pixels of the next image are looked for one image too far",
          ("(image - 1) * p.image_rows.value", "image * p.image_rows.value")),
    _conv("the image of staged rows", "rows behind the first image come from that image again",
          ("(behind < 0 ? 0 : image + 1)", "(behind < 0 ? 0 : image)")),
    _conv("the lowest tap", "taps of dgrad go up, and are counted from the first one",
          ("at.row * work.axes.vertical.tap_move - work.low_h", "at.row * work.axes.vertical.tap_move"),
          result="dgrad"),
    _conv("strips without stride", "strips begin at the columns of the output",
          ("work.strip * p.strip_cols * h.pixel_move", "work.strip * p.strip_cols"), on="f64_strips_nhwc",
          shape="strips"),
    _conv("columns behind the last strip", "columns that do not exist are written", (" || col >= h.pixels", ""),
          on="f64_strips_nhwc", shape="strips"),
    _conv("channels behind the last one", "a chunk that is not full reads on",
          ("inside && c < left;", "inside;"), on="f64_groups"),
    _conv("the bias of another filter", "all filters of a lane have one bias",
          ("p.bias[channel + filter]", "p.bias[channel]")),
    _conv("weights of the first octet", "both octets have the same weights",
          ("((first + octet) * BLOCK_EIGHTS + j)", "(octet * BLOCK_EIGHTS + j)")),
    _conv("the second channel", "a lane's two channels are the same one",
          ("a[part / 2 * 4 + part % 2 + 2] = pair.of[1]", "a[part / 2 * 4 + part % 2 + 2] = pair.of[0]")),
    _conv("the residue of columns", "all residues are written to the first one's columns",
          ("(h.residue + (i64)col * h.spacing)", "(i64)col * h.spacing"), on="f64_residues", result="dgrad"),
    _conv("pixels behind the last one", "a tile that is not full writes on", ("m >= work.pixels || ", "")),
    _pack("channels behind the last one", "weights of other filters, and of none, are read",
          ("if (first + e < p.channels) pair", "pair")),
    _pack("the first tap of a residue", "residues of dgrad begin at the first tap",
          ("v.first + tap / h.taps * v.step", "tap / h.taps * v.step"), on="f64_residues", result="dgrad"),
    _pack("channels of a lane", "lanes overlap by a channel", ("+ lane % 4 * 2;", "+ lane % 4;")),
    _wgrad("a step is not waited for", "pixels are read before they have landed", _EARLY),
    _wgrad("no barrier", "pixels are read that another thread has copied", _NO_BARRIER),
    _wgrad("the wrong buffer", "pixels land over those that are being read",
           ("buffer == 0 ? STAGES - 1 : buffer - 1;", "buffer;"), on="f64_five_taps"),
    _wgrad("columns behind the last one", "dy's zeros multiply an infinity",
           ("b[j][part] = there ? value : 0;", "b[j][part] = value;"), on="f64_loose", finite=False),
    _wgrad("rows behind the last one", "dy is read behind its end", ("at.line + line < p.lines && ", "")),
    _wgrad("taps without dilation", "a warp's tap is looked for beside the first one",
           ("lane.tap * p.dil_w;", "lane.tap;"), shape="128 by 32, three taps"),
    _wgrad("taps that do not exist", "sums of them are written over those of the next row",
           ("    if (tap_col >= p.taps_s) return;\n", ""), on="f64_five_taps", shape="128 by 32, three taps"),
    _wgrad("every part from the first pixel", "parts add up the same pixels",
           ("work.step = part * p.part_steps;", "work.step = 0;"), shape="several parts"),
    _wgrad("rows without stride", "rows of x are counted as those of dy",
           ("row * p.stride_h + work.tap_row", "row + work.tap_row")),
    _wgrad("channels behind the last one", "sums are written over those of the next filter",
           ("if (c < p.channels) to[", "to["), on="f64_five_taps"),
)  # fmt: skip
