"""The sources of halo_sm90's kernels: which constants a launch is compiled with."""

from __future__ import annotations

import torch

from haloconv.families.common import ELEMENTS
from haloconv.families.halo_sm90.shape import BLOCK_M, joined_planes, line_warps
from haloconv.families.halo_sm90.tile import Tiling
from haloconv.jit import KernelSource, kernel_source
from haloconv.problem import Problem


def pack_source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The source that packs the filter, for one block height, chunk, order of channels and type."""
    shape, storage = tiling.shape, tiling.storage
    constants = {
        "ELEM": ELEMENTS[problem.dtype],
        "BLOCK_M": BLOCK_M,
        "CHUNK_BYTES": shape.chunk_bytes,
        "OPERAND_TERMS": shape.terms,
        "PLANES": joined_planes(shape, storage),
        "SPREAD": int(storage.y_bytes == 4 and not storage.y_inner),
    }
    return kernel_source("halo_sm90/pack", "halo_sm90_pack", constants)


def conv_source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The source of the convolution for one tiling, type and layout: image and filter extents are run-time values."""
    shape, storage = tiling.shape, tiling.storage
    element = ELEMENTS[problem.dtype]
    constants = {
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
        "PACKS": shape.packs,
        "X_CHANNELS_INNER": int(storage.x_inner),
        "X_BOXES": int(shape.boxes),
        "X_JOINED": storage.x_joined if shape.boxes else 0,
        "RAW_DEPTH": tiling.memory.raw_depth,
        "LINE_WARPS": line_warps(shape, storage),
        "X_VECTOR": int(storage.x_inner and storage.x_whole and not shape.boxes),
        "Y_CHANNELS_INNER": int(storage.y_inner),
        "Y_BOXES": int(tiling.y_boxes),
        "Y_JOINED": int(tiling.lead > 0),
        "Y_VECTOR": int(storage.y_inner and storage.y_whole and not tiling.y_boxes),
        "Y_BUFFERS": tiling.memory.y_buffers,
        "Y_NEIGHBOURS": int(
            not (storage.y_inner or shape.flat) and shape.pack_w == tiling.form.horizontal.out_step == 1
        ),
        **({"HAS_BIAS": 0, "HAS_RELU": 0} if storage.partial else _epilogue(problem)),
    }
    return kernel_source("halo_sm90/conv", "halo_sm90", constants)


def fixup_source(problem: Problem) -> KernelSource:
    """The source of the nonfinite fix-up."""
    constants = {"ELEM": ELEMENTS[problem.dtype], **_epilogue(problem)}
    return kernel_source("halo_sm90/fixup", "halo_sm90_fixup", constants)


def _epilogue(problem: Problem) -> dict[str, int]:
    """What becomes of a sum before it is an output."""
    return {"HAS_BIAS": int(problem.bias), "HAS_RELU": int(problem.activation == "relu")}
