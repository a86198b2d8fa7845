"""Host half of families/halo_sm90/pointwise/moments_sum.cu: mean and variance of a filter from those of its boxes."""

from __future__ import annotations

import torch

from haloconv.families.common import ceil_div, divisor
from haloconv.families.halo_sm90.pointwise.product import Product
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value

KERNEL = "halo_sm90/moments_sum"
_THREADS, _FILTERS = 512, 8  # of a block


def source() -> KernelSource:
    """The only source."""
    return kernel_source(KERNEL, "halo_sm90_moments_sum", {})


def bind(product: Product, device: torch.device) -> Launch:
    """``launch(moments of boxes, mean, variance)``, all fp32: of pairs [box][filter] those of each filter."""
    fields: dict[str, Value] = {
        **{"all_pixels": product.pixels, "pixels": box_pixels(product)},
        **{"boxes": product.all_boxes, "filters": product.filters},
    }
    shape = LaunchShape(ceil_div(product.filters, _FILTERS), _THREADS)
    return Launch(source(), device, shape, fields, pdl=True)


def box_pixels(product: Product) -> dict[str, Value]:
    """The fields of BoxPixels in box_pixels.cuh."""
    boxes = product.boxes
    cols, rows = (product.pixels, 1) if product.taps else (product.y.cols, product.y.rows)
    return {
        **{"across": divisor(boxes.across), "down": divisor(boxes.down)},
        **{"cols": cols, "rows": rows, "box_cols": boxes.cols, "box_rows": boxes.rows},
        "one_line": int(boxes.rows == 1 and boxes.across == product.all_boxes),
    }
