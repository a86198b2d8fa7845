"""The launches of halo_sm90: pack, convolve, and the fix-up or the sum behind it.

For each its source, with the constants that it is compiled with, and the fields of its struct.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from haloconv.families.common import ELEMENTS, ceil_div, divisor, epilogue_constants, named
from haloconv.families.halo_sm90.conv.classes import Classes, classes_of
from haloconv.families.halo_sm90.conv.form import Form
from haloconv.families.halo_sm90.conv.operands import Operands, tensor_maps
from haloconv.families.halo_sm90.conv.shape import BLOCK_M, Storage, joined_planes, line_warps, threads
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.families.halo_sm90.edges import edge_constants
from haloconv.families.reduce.partials import Axis, Partials, followed
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request

_THREADS = 256  # of a block that packs or fixes up
_FIXUP_BLOCKS = 1024

Fields = dict[str, Value]


def pack_source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The source that packs the filter, for one block height, chunk, order of channels and type."""
    shape, storage = tiling.shape, tiling.storage
    classes = _classes(tiling)
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "BLOCK_M": BLOCK_M,
        "CHUNK_BYTES": shape.chunk_bytes,
        "OPERAND_TERMS": shape.terms,
        "PLANES": joined_planes(shape, storage),
        "SPREAD": int(storage.y_bytes == 4 and not storage.y_inner and not (classes and classes.across > 1)),
        **({"CLASSES_ACROSS": classes.across} if classes else {}),
    }
    return kernel_source("halo_sm90/pack", "halo_sm90_pack", constants)


def _classes(tiling: Tiling) -> Classes | None:
    """What the rows of M are in a strided dgrad."""
    return classes_of(tiling.form, tiling.storage) if tiling.form.interleaves else None


def conv_source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The source of the convolution for one tiling, type and layout: image and filter extents are run-time values."""
    shape, storage, classes = tiling.shape, tiling.storage, _classes(tiling)
    element = ELEMENTS[problem.dtype]
    constants: dict[str, int | str] = {
        "ELEM": element,
        "Y_ELEM": "float" if storage.partial else element,
        "MULTIPLY": "hc::tf32" if problem.dtype == torch.float32 else element,
        "RUN": shape.run,
        "RUNS": shape.runs,
        "FLAT": int(shape.flat),
        "SHARED_TILE": int(shape.shared_tile),
        "KEEPS": int(shape.keeps),
        "FIRST_PHASE": tiling.phases.first,
        "RING": tiling.memory.ring,
        "STAGES": tiling.memory.stages,
        "CHUNK_BYTES": shape.chunk_bytes,
        "OPERAND_TERMS": shape.terms,
        **({"CLASS_ROWS": classes.alike} if classes else {"PACKS": shape.packs}),
        "X_CHANNELS_INNER": int(storage.x_inner),
        "X_BOXES": int(shape.boxes),
        "X_JOINED": storage.x_joined if shape.boxes else 0,
        "RAW_DEPTH": tiling.memory.raw_depth,
        "LINE_WARPS": line_warps(shape, storage),
        "X_VECTOR": int(storage.x_inner and storage.x_whole and not shape.boxes),
        "Y_CHANNELS_INNER": int(storage.y_inner),
        "Y_BOXES": int(tiling.y_boxes),
        "Y_JOINED": storage.y_joined if tiling.lead > 0 else 0,
        "Y_VECTOR": int(storage.y_inner and storage.y_whole and not tiling.y_boxes),
        "Y_BUFFERS": tiling.memory.y_buffers,
        "Y_NEIGHBOURS": classes.across
        if classes and classes.across > 1
        else int(not (storage.y_inner or shape.flat) and shape.pack_w == tiling.form.horizontal.out_step == 1),
        **(epilogue_constants(False) if storage.partial else _epilogue(problem)),
        **edge_constants(storage.modes),
    }
    if storage.has_edges:
        return kernel_source("halo_sm90/conv_edges", "halo_sm90", constants)
    return kernel_source("halo_sm90/conv", "halo_sm90", constants)


def fixup_source(problem: Problem, form: Form, storage: Storage) -> KernelSource:
    """The source of the nonfinite fix-up."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        **_epilogue(problem),
        **edge_constants(storage.modes),
    }
    if form.interleaves:
        constants["CLASSES"] = 1
    return kernel_source("halo_sm90/fixup", "halo_sm90_fixup", constants)


def _epilogue(problem: Problem) -> dict[str, str]:
    """What becomes of a sum before it is an output."""
    return epilogue_constants(problem.bias, problem.epilogue)


def conv_launch(request: Request, tiling: Tiling, operands: Operands) -> Launch:
    """``launch(x, packed, y, bias, not_finite)``, and a residual or a halo if there is one: conv.cu.

    ``y`` is fp32 partial sums in split-K, whose residual the sum adds.
    """
    schedule = tiling.schedule(request.facts.sm_count)
    shape = LaunchShape(schedule.grid, threads(tiling.shape, tiling.storage), tiling.memory.smem_bytes)
    fields = {**_conv_fields(tiling, operands), "schedule": tiling.schedule_fields(schedule)}
    maps = tensor_maps(request.problem.dtype, tiling, operands)
    return Launch(conv_source(request.problem, tiling), request.device, shape, fields, maps, pdl=True)


def _conv_fields(tiling: Tiling, operands: Operands) -> Fields:
    """The scalars of ``HaloParams`` in families/halo_sm90/conv/tile.cuh, but for the schedule."""
    form, shape, vertical, phases = tiling.form, tiling.shape, tiling.vertical, tiling.phases
    across, columns, line = tiling.horizontal, tiling.columns, tiling.line
    rows, cols = form.vertical, form.horizontal
    return {
        **named("x", "nchw", operands.x),
        **_result_fields(form, operands),
        **_class_fields(tiling),
        **_edge_fields(tiling, operands),
        **{"n": form.n, "h": rows.in_extent, "w": cols.in_extent, "channels": form.channels},
        **{"rows": rows.out_extent, "cols": cols.out_extent, "filters": form.filters},
        **{"pad_top": rows.pad, "pad_left": cols.pad + tiling.lead, "lead": tiling.lead},
        **{"stride_h": vertical.stride, "stride_w": across.stride},
        **{"taps_r": vertical.taps, "taps_s": across.taps, "dil_h": vertical.dil, "dil_w": across.dil},
        **{"class_move": vertical.class_move, "line_move": vertical.line_move},
        **{"pack_h": shape.pack_h, "pack_w": shape.pack_w * cols.classes, "strip_cols": columns.strip_cols},
        **{"pitch": divisor(columns.pitch), "wrap": divisor(columns.wrap), "plane_px": divisor(columns.plane_px)},
        **{"planes_w": across.planes, "slot_px": line.slot_px, "slot_bytes": tiling.slot_bytes},
        **{"boxes": line.boxes, "single_boxes": line.single_boxes, "box_px": line.box_px},
        "box_units": divisor(line.box_units),
        **dict(zip(("mid_chunk", "mid_r", "mid_s"), phases.middle, strict=True)),
        "mid_tap": tiling.middle_tap,
        **dict(zip(("next_chunk", "next_r", "next_s"), phases.begin, strict=True)),
        **{"blocks": tiling.blocks, "chunks": tiling.chunks},
    }


def _filter_fields(operands: Operands) -> Fields:
    """The filter's strides."""
    names = ("w_filter", "w_channel", "w_r", "w_s", "w_group")
    return dict(zip(names, (*operands.w, operands.w_group), strict=True))


def _result_fields(form: Form, operands: Operands) -> Fields:
    strides = dict(zip(("y_n", "y_k", "y_row", "y_col"), operands.y, strict=True))
    return {**strides, "y_first": form.horizontal.out_first * operands.y[3]}


def _class_fields(tiling: Tiling) -> Fields:
    """The fields of conv.cu behind the schedule, which a strided dgrad has."""
    classes, rows, cols = _classes(tiling), tiling.form.vertical, tiling.form.horizontal
    if classes is None:
        return {}
    return {
        **{"class_rows": divisor(classes.rows), "class_runs": classes.runs},
        **{"step_h": rows.out_step, "step_w": cols.out_step},
        **{"before_h": rows.out_before, "before_w": cols.out_before},
    }


def _edge_fields(tiling: Tiling, operands: Operands) -> Fields:
    """The columns that outputs read, of which those outside the image are filled, and the rows of a halo."""
    if not tiling.storage.has_edges:
        return {}
    cols, halo = tiling.form.horizontal, operands.halo
    reach = (cols.out_extent - 1) * cols.stride + (cols.taps - 1) * cols.dil + 1
    fields: Fields = {"edge_from": -cols.pad, "edge_to": reach - cols.pad}
    if halo is not None:
        fields |= {**named("halo", "nchw", halo.strides), "halo_top": halo.top, "halo_rows": halo.rows}
    return fields


def pack_launch(request: Request, tiling: Tiling, operands: Operands) -> Launch:
    """``launch(w, packed, not_finite)``: families/halo_sm90/pack.cu."""
    shape, form, vertical, across = tiling.shape, tiling.form, tiling.vertical, tiling.horizontal
    rows, cols = form.vertical, form.horizontal
    pieces = tiling.chunks * tiling.taps * shape.stage_bytes // shape.terms // 16
    planes, w_filter = tiling.y_planes, operands.w[0]
    if planes > 1:  # every few filters of the one group are a group to the kernel
        operands = replace(operands, w=(planes * w_filter, *operands.w[1:]), w_group=w_filter)
    fields: Fields = {
        **_filter_fields(operands),
        **{"filters": form.filters // planes, "channels": form.channels, "blocks": tiling.packed_blocks // planes},
        **{"chunks": tiling.chunks, "taps_r": vertical.taps, "taps_s": across.taps},
        **{"first_r": rows.filter_first, "step_r": rows.filter_step, "count_r": rows.filter_taps},
        **{"first_s": cols.filter_first, "step_s": cols.filter_step, "count_s": cols.filter_taps},
        **{"shift_r": vertical.shift, "shift_s": across.shift, "pack_h": shape.pack_h},
        **{"pack_w": shape.pack_w * cols.classes, "pack_filters": BLOCK_M // shape.packs, "pieces_per_block": pieces},
    }
    if (classes := _classes(tiling)) is not None:
        fields |= {"class_rows": classes.rows, "class_runs": classes.runs}
        fields |= {"filter_dil_r": rows.filter_dil, "filter_dil_s": cols.filter_dil}
    grid = form.groups * tiling.packed_blocks * ceil_div(pieces, _THREADS)
    return Launch(pack_source(request.problem, tiling), request.device, LaunchShape(grid, _THREADS), fields)


def fixup_launch(request: Request, tiling: Tiling, operands: Operands) -> Launch:
    """``launch(x, w, y, bias, not_finite)``, and a residual: fixup.cu, which ends at once if all sums are finite."""
    form = tiling.form
    rows, cols = form.vertical, form.horizontal
    outputs = form.n * form.groups * form.filters * rows.out_extent * cols.out_extent
    fields: Fields = {
        **named("x", "nchw", operands.x),
        **_filter_fields(operands),
        **_result_fields(form, operands),
        "outputs": outputs,
        **{"h": rows.in_extent, "w_extent": cols.in_extent, "channels": form.channels},
        **{"filters": form.filters, "groups": form.groups, "rows": rows.out_extent, "cols": cols.out_extent},
        **{"pad_top": rows.pad, "stride_h": rows.stride, "dil_h": rows.dil},
        **{"pad_left": cols.pad, "stride_w": cols.stride, "dil_w": cols.dil},
        **{"taps_r": rows.taps, "first_r": rows.filter_first, "step_r": rows.filter_step},
        **{"taps_s": cols.taps, "first_s": cols.filter_first, "step_s": cols.filter_step},
    }
    if form.interleaves:
        fields |= {"step_h": rows.out_step, "before_h": rows.out_before, "step_w": cols.out_step}
        fields |= {"before_w": cols.out_before, "count_r": rows.filter_taps, "count_s": cols.filter_taps}
        fields |= {"filter_dil_r": rows.filter_dil, "filter_dil_s": cols.filter_dil}
    shape = LaunchShape(min(_FIXUP_BLOCKS, ceil_div(outputs, _THREADS)), _THREADS)
    return Launch(fixup_source(request.problem, form, tiling.storage), request.device, shape, fields)


def split_sums(problem: Problem, tiling: Tiling) -> Partials:
    """The partial sums of split-K.

    They lie as the output does, with the splits of an image behind each other, or those of a pixel where channels are
    inner.
    """
    form = tiling.form
    pixels = form.vertical.out_extent * form.horizontal.out_extent
    axes: tuple[Axis, ...]
    if tiling.storage.y_inner:
        axes, run_elems = (Axis(form.n * pixels, form.filters), Axis(form.filters, 1, counts=1)), form.filters
    else:
        run_elems = form.filters * pixels
        axes = (Axis(form.n, run_elems), Axis(form.filters, pixels, counts=1), Axis(pixels, 1))
    partials = Partials(problem.dtype, axes, form.splits, run_elems=run_elems)
    return followed(partials, problem)
