"""How a DTensor of images lies on a mesh: the bounds of its shards, this rank's place among them, its local pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from haloconv.distributed.group import Group, coordinate, group_of, ranks_along
from haloconv.layout import Layout, is_channels_last, strides_of
from haloconv.rims import Bounds, Place, even_bounds

Tensor = torch.Tensor
ROWS, COLUMNS = 2, 3


class Image(NamedTuple):
    """Where the shards of (N, C, H, W) tensors are: images along N, rows, columns, each along some mesh dimensions."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def mesh_dims(self, *dims: int) -> tuple[int, ...]:
        """The mesh dimensions along which one of the tensor's ``dims`` is sharded."""
        return tuple(at for at, each in enumerate(self.placements) if isinstance(each, Shard) and each.dim in dims)

    def bounds(self, extent: int, dim: int) -> Bounds:
        """The bounds of all shards of a tensor's dimension, as DTensor has them."""
        return nested_bounds(extent, tuple(self.mesh.size(at) for at in self.mesh_dims(dim)))

    def shard_index(self, dim: int) -> int:
        """Which of the shards along a dimension this rank has."""
        at, index = coordinate(self.mesh), 0
        for each in self.mesh_dims(dim):
            index = index * self.mesh.size(each) + at[each]
        return index

    @property
    def place(self) -> Place:
        return self.shard_index(ROWS), self.shard_index(COLUMNS)

    def ranks(self) -> dict[Place, int]:
        """The rank of each shard of the images that this rank has shards of."""
        dims, places = self.mesh_dims(ROWS, COLUMNS), {}
        for number, rank in enumerate(ranks_along(self.mesh, dims)):
            index, sizes, left = [0, 0], [1, 1], number
            for dim in reversed(dims):  # row-major: the last dimension's index is the fastest
                left, at = divmod(left, self.mesh.size(dim))
                axis = 0 if dim in self.mesh_dims(ROWS) else 1
                index[axis], sizes[axis] = index[axis] + at * sizes[axis], sizes[axis] * self.mesh.size(dim)
            places[index[0], index[1]] = rank
        return places

    def all_ranks(self) -> Group | None:
        """The ranks that have other pixels, of these images or not: gradients of weights are summed over them."""
        dims = self.mesh_dims(0, ROWS, COLUMNS)
        return group_of(self.mesh, dims, dims)

    def spatial_ranks(self) -> Group | None:
        """The ranks that have shards of the same images. They agree with those of other images, too."""
        return group_of(self.mesh, self.mesh_dims(ROWS, COLUMNS), self.mesh_dims(0, ROWS, COLUMNS))

    def shape_here(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The extents of this rank's shard of (N, C, H, W)."""
        pieces = [self.bounds(extent, dim)[self.shard_index(dim) :][:2] for dim, extent in enumerate(shape)]
        return tuple(high - low for low, high in pieces)

    def closed(self, local: Tensor, shape: Sequence[int]) -> DTensor:
        """The DTensor of these extents whose shard here is ``local``; memory order of the whole as of the shard."""
        if local.dim() == 4:
            layout: Layout = "nhwc" if is_channels_last(tuple(local.shape), local.stride()) else "nchw"
            strides: tuple[int, ...] = strides_of(tuple(shape), layout)
        else:
            strides = torch.empty(shape, device="meta").stride()
        return from_local(local, self, torch.Size(shape), strides)


def from_local(local: Tensor, image: Image, shape: torch.Size, strides: tuple[int, ...]) -> DTensor:
    """``local`` as this rank's part of a DTensor, with gradients of any order.

    Those of ``DTensor.from_local`` end where it brings a gradient to other placements, as the sum of those of a tensor
    that all ranks have alike, which autograd does not see; and in PyTorch 2.11 at the second order anywhere, as those
    of ``DTensor.to_local`` do.
    """
    closed: DTensor = _FromLocal.apply(local, image, shape, strides)
    return closed


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, image: Image, shape: torch.Size, strides: tuple[int, ...]) -> DTensor:
        ctx.placements = image.placements
        return DTensor.from_local(local, image.mesh, image.placements, run_check=False, shape=shape, stride=strides)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        if tuple(gradient.placements) != ctx.placements:
            gradient = gradient.redistribute(placements=ctx.placements)
        return to_local(gradient), None, None, None


def to_local(x: DTensor) -> Tensor:
    """This rank's shard, with gradients of any order.

    In PyTorch 2.11 (not in 2.13) those of ``DTensor.to_local`` end at the first order: its backward makes a DTensor
    that autograd does not connect with the gradient of the shard, and what crosses shards is then missing.
    """
    pixels: Tensor = _ToLocal.apply(x)
    return pixels


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.image, ctx.shape = Image(x.device_mesh, tuple(x.placements)), x.shape
        local = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        closed: DTensor = ctx.image.closed(gradient, ctx.shape)
        return closed


@lru_cache(maxsize=4096)
def nested_bounds(extent: int, counts: tuple[int, ...]) -> Bounds:
    """The bounds of shards that are divided again by each of ``counts``."""
    bounds: Bounds = (0, extent)
    for count in counts:
        parts = [[low + each for each in even_bounds(high - low, count)[:-1]] for low, high in pairwise(bounds)]
        bounds = (*(each for part in parts for each in part), extent)
    return bounds


def image_of(x: DTensor) -> tuple[DTensor, Image]:
    """A DTensor (N, C, H, W) and where its shards are. What is sharded along C or still a sum is gathered first.

    Raises:
        RuntimeError: it has not four dimensions, or is sharded in a way that torch.chunk does not divide, or the
            shard of this rank is not the one that DTensor's rule gives it.
    """
    if x.dim() != 4:
        raise RuntimeError(f"haloconv.distributed takes images (N, C, H, W), not a DTensor of {list(x.shape)}")
    other = [each for each in x.placements if type(each) not in (Shard, Replicate) and not isinstance(each, Partial)]
    if other:
        raise RuntimeError(f"haloconv.distributed takes DTensors with Shard and Replicate placements, not {other[0]}")
    kept = [each if isinstance(each, Shard) and each.dim != 1 else Replicate() for each in x.placements]
    if kept != list(x.placements):
        x = x.redistribute(placements=kept)
    image = Image(x.device_mesh, tuple(x.placements))
    here, expected = tuple(x.to_local().shape), image.shape_here(x.shape)
    if here != expected:
        raise RuntimeError(
            f"haloconv.distributed: of {list(x.shape)} sharded as {list(x.placements)} this rank has {list(here)}, and "
            f"should have {list(expected)}. Use distribute_tensor, or give from_local the shape and stride of the whole"
        )
    return x, image


def gathered(weight: Tensor, image: Image) -> Tensor:
    """A weight as every rank has it: a plain tensor as it is, a DTensor gathered; its gradient goes the way back.

    Raises RuntimeError for a DTensor on another mesh.
    """
    if not isinstance(weight, DTensor):
        return weight
    if weight.device_mesh != image.mesh:
        raise RuntimeError(
            f"haloconv.distributed: the image is on {image.mesh} and a weight on {weight.device_mesh}; both must be on "
            "one mesh, or the weight a plain tensor"
        )
    return to_local(weight.redistribute(placements=[Replicate()] * image.mesh.ndim))
