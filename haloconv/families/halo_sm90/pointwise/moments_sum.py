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


def bind(product: Product, device: torch.device, images: int = 1) -> Launch:
    """``launch(moments of boxes, mean, variance)``, all fp32: of pairs [box][filter] those of each filter.

    They are of all images, or of each of ``images``, which `has_boxes_of_images` must allow.
    """
    blocks = ceil_div(product.filters, _FILTERS)
    fields: dict[str, Value] = {
        **{"all_pixels": product.pixels // images, "pixels": box_pixels(product)},
        **{"boxes": product.all_boxes // images, "filters": product.filters, "blocks": blocks},
    }
    return Launch(source(), device, LaunchShape(images * blocks, _THREADS), fields, pdl=True)


def has_boxes_of_images(product: Product) -> bool:
    """Whether each box has pixels of one image alone, and each image as many boxes."""
    images, (cols, rows, across, _) = product.problem.n, product.boxes
    if images == 1 or (product.y.images == images and product.taps is None):
        return True
    if product.taps is None and product.y.rows > 1:  # rows of several images, one above the other
        return product.y.rows % (images * rows) == 0
    return rows == 1 and product.pixels % (images * cols) == 0 and across % images == 0


def box_pixels(product: Product) -> dict[str, Value]:
    """The fields of BoxPixels in box_pixels.cuh."""
    boxes = product.boxes
    cols, rows = (product.pixels, 1) if product.taps else (product.y.cols, product.y.rows)
    return {
        **{"across": divisor(boxes.across), "down": divisor(boxes.down)},
        **{"cols": cols, "rows": rows, "box_cols": boxes.cols, "box_rows": boxes.rows},
        "one_line": int(boxes.rows == 1 and boxes.across == product.all_boxes),
    }
