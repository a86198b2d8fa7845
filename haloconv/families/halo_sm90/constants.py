"""The kernel texts of halo_sm90: which constants a launch is compiled with."""

from __future__ import annotations

import torch

from haloconv.families.halo_sm90.shape import BLOCK_M, joined_planes, line_warps
from haloconv.families.halo_sm90.tile import Tiling
from haloconv.jit import KernelSource, kernel_source
from haloconv.problem import Problem

_ELEMENTS = {torch.float32: "float", torch.float16: "hc::fp16", torch.bfloat16: "hc::bf16"}


def pack_source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The text of the packing kernel for one block height, chunk, order of channels and type."""
    config, storage = tiling.config, tiling.storage
    constants = {
        "ELEM": _ELEMENTS[problem.dtype],
        "BLOCK_M": BLOCK_M,
        "CHUNK_BYTES": config.chunk_bytes,
        "OPERAND_TERMS": config.terms,
        "PLANES": joined_planes(config, storage),
        "SPREAD": int(storage.y_bytes == 4 and not storage.y_inner),
    }
    return kernel_source("halo_sm90/pack", "halo_sm90_pack", constants)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The text of the kernel for one tile shape, type and layout: image and filter extents are run-time values."""
    config, storage = tiling.config, tiling.storage
    element = _ELEMENTS[problem.dtype]
    constants = {
        "ELEM": element,
        "Y_ELEM": "float" if storage.partial else element,
        "MULTIPLY": "hc::tf32" if problem.dtype == torch.float32 else element,
        "RUN": config.run,
        "RUNS": config.runs,
        "FLAT": int(config.flat),
        "SHARED_TILE": int(config.shared_tile),
        "KEEPS": int(config.keeps),
        "FIRST_PHASE": tiling.phases.first,
        "RING": tiling.ring,
        "STAGES": tiling.stages,
        "CHUNK_BYTES": config.chunk_bytes,
        "OPERAND_TERMS": config.terms,
        "PACKS": config.packs,
        "X_CHANNELS_INNER": int(storage.x_inner),
        "X_BOXES": int(config.boxes),
        "X_JOINED": storage.x_joined if config.boxes else 0,
        "RAW_DEPTH": tiling.raw_depth,
        "LINE_WARPS": line_warps(config, storage),
        "X_VECTOR": int(storage.x_inner and storage.x_whole and not config.boxes),
        "Y_CHANNELS_INNER": int(storage.y_inner),
        "Y_BOXES": int(tiling.y_boxes),
        "Y_JOINED": int(tiling.lead > 0),
        "Y_VECTOR": int(storage.y_inner and storage.y_whole and not tiling.y_boxes),
        "Y_BUFFERS": tiling.y_buffers,
        "Y_NEIGHBOURS": int(
            not (storage.y_inner or config.flat) and config.pack_w == tiling.form.horizontal.out_step == 1
        ),
        **({"HAS_BIAS": 0, "HAS_RELU": 0} if storage.partial else _finish(problem)),
    }
    return kernel_source("halo_sm90/conv", "halo_sm90", constants)


def repair_source(problem: Problem) -> KernelSource:
    """The text of the repairing kernel."""
    constants = {"ELEM": _ELEMENTS[problem.dtype], **_finish(problem)}
    return kernel_source("halo_sm90/fixup", "halo_sm90_repair", constants)


def sum_source(problem: Problem) -> KernelSource:
    """The text of the kernel that adds up the parts of sums."""
    constants = {"ELEM": _ELEMENTS[problem.dtype], **_finish(problem)}
    return kernel_source("halo_sm90/sum", "halo_sm90_sum", constants)


def _finish(problem: Problem) -> dict[str, int]:
    """What becomes of a sum before it is an output."""
    return {"HAS_BIAS": int(problem.bias), "HAS_RELU": int(problem.activation == "relu")}
