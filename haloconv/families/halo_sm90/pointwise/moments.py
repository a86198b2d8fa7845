"""Host half of families/halo_sm90/pointwise/moments.cu: fprop with mean and variance of each filter's results.

What a batch norm in training mode needs of the result that it follows, and a group norm of each image's. The
convolution is that of pointwise.py or implicit_gemm.py, with their tiles, a bias and a residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from haloconv.families.base import Config
from haloconv.families.common import as_the_result, few_apart
from haloconv.families.halo_sm90.pointwise import implicit_gemm, moments_sum, pointwise
from haloconv.families.halo_sm90.pointwise.pointwise import multiply_launch, pack_launch, pack_source, packed_filters
from haloconv.families.halo_sm90.pointwise.product import TMA_BYTES, Product
from haloconv.families.halo_sm90.pointwise.tile import Tile, shipped_tiles
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Value
from haloconv.problem import Request

__all__ = ["KERNEL", "bind", "has_moments", "sources"]

KERNEL = "halo_sm90/moments"
_PLAIN = (pointwise.KERNEL, implicit_gemm.KERNEL)


def has_moments(request: Request, config: Config, per_image: bool = False) -> bool:
    """Whether results of a config of the plain kernels can be measured as they are stored: whole sums, in nhwc.

    Behind a scale or an activation no norm of a network stands. Those of each image need boxes of one image.
    """
    problem = request.problem
    added = problem.direction == "fprop" and not (problem.epilogue.scale or problem.epilogue.activation)
    if not added or config.kernel not in _PLAIN or config.derived.parts > 1:
        return False
    product: Product = _plain_kernel(request).product_of(request)
    in_order = product.x_inner and product.y_inner and not product.copied
    return in_order and (not per_image or moments_sum.has_boxes_of_images(product))


def _plain_kernel(request: Request) -> ModuleType:
    """What runs the convolution alone."""
    one_tap = request.problem.r * request.problem.s == 1
    return pointwise if one_tap else implicit_gemm


def source(product: Product, tile: Tile) -> KernelSource:
    """The source of the plain kernel with MOMENTS."""
    constants = implicit_gemm.constants_of if product.taps else pointwise.constants
    return kernel_source(KERNEL, "halo_sm90_moments", {**constants(product, tile), "MOMENTS": 1})


def bind(request: Request, config: Config, per_image: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The launches for a request and a config of which ``has_moments`` is true.

    ``fprop(x, w, b, residual) -> (y, mean, variance)``, statistics by image and filter, or by filter.
    """
    product, tile = _plain_kernel(request).product_of(request), config.derived
    shape, strides, filters = request.result_shape, request.result_strides, product.filters
    pack = pack_launch(request, product, tile) if product.packs else None
    more: dict[str, Value] = {"pixels": moments_sum.box_pixels(product), "boxes": product.all_boxes}
    multiply = multiply_launch(request, product, tile, source(product, tile), more)
    images = request.problem.n if per_image else 1
    add = moments_sum.bind(product, request.device, images)
    pairs = 2 * product.all_boxes * filters
    packed_bytes = product.packed_bytes(tile.spans(product))

    def run(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x.new_empty_strided(shape, strides)
        b = b if b is None or b.is_contiguous() else b.contiguous()
        ordered = [as_the_result(each, strides, TMA_BYTES) for each in residual]
        of_boxes = torch.empty(pairs, dtype=torch.float32, device=x.device)
        mean, variance = (torch.empty(images * filters, dtype=torch.float32, device=x.device) for _ in range(2))
        packed = None if pack is None else packed_filters(pack, w, packed_bytes)
        ready, bias = w.data_ptr() if packed is None else packed[1], 0 if b is None else b.data_ptr()
        multiply(x.data_ptr(), ready, y.data_ptr(), bias, *(each.data_ptr() for each in ordered), of_boxes.data_ptr())
        add(of_boxes.data_ptr(), mean.data_ptr(), variance.data_ptr())
        return y, mean, variance

    return run


def sources(request: Request) -> Iterator[KernelSource]:
    """The sources of a tile of each kind that the request may have on an NVIDIA H200, packing, and the sum."""
    product = _plain_kernel(request).product_of(request)
    whole = [tile for tile in shipped_tiles(product) if tile.parts == 1]
    for tile in few_apart(whole, lambda tile: (tile.m_blocks, tile.split_n, tile.keeps_w, tile.in_cluster), len(whole)):
        yield source(product, tile)
    if product.packs:
        yield pack_source(product)
    yield moments_sum.source()
