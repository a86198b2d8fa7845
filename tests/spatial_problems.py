"""Random convolutions of images that are sharded, and what one process makes of them; for tests/spatial_ranks.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from haloconv import distributed
from haloconv.distributed.image import Image
from haloconv.problem import PADDING_MODES, PaddingMode
from tests.usages import Place

Tensor = torch.Tensor
Placements = tuple[Placement, ...]
ROWS, COLUMNS = Shard(2), Shard(3)
CPU = Place("cpu")
BUSY_CYCLES = 40_000_000


@lru_cache
def meshes() -> dict[str, tuple[DeviceMesh, Placements]]:
    """Every mesh that images are sharded over here; of two processes there are two side by side."""
    square, line = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")), init_device_mesh("cpu", (4,))
    return {
        "2x2": (square, (ROWS, COLUMNS)),
        "2x1": (square["rows"], (ROWS,)),
        "1x2": (square["columns"], (COLUMNS,)),
        "1x4": (line, (COLUMNS,)),
        "4x1": (line, (ROWS,)),
        "2x2 of rows": (square, (ROWS, ROWS)),
        "images and rows": (square, (Shard(0), ROWS)),
    }


@dataclass(frozen=True)
class Case:
    """One convolution of integers. ``sides`` are (top, bottom, left, right)."""

    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    stride: tuple[int, int]
    sides: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    modes: tuple[PaddingMode, PaddingMode]
    channels_last: bool
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and b as one process has them, leaves that want gradients, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (self.x, self.w, self.w[:1])
        x, w, b = (torch.randint(-3, 4, shape, generator=generator).double() for shape in shapes)
        x = x.contiguous(memory_format=torch.channels_last) if self.channels_last else x
        return x.requires_grad_(), w.requires_grad_(), b.requires_grad_()

    def in_one_process(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """The convolution of a padded copy."""
        top, bottom, left, right = self.sides
        for sides, mode in (((0, 0, top, bottom), self.modes[0]), ((left, right, 0, 0), self.modes[1])):
            x = torch.nn.functional.pad(x, sides, mode="constant" if mode == "zeros" else mode)
        return torch.nn.functional.conv2d(x, w, b, self.stride, 0, self.dilation, self.groups)

    def sharded(self, x: DTensor, w: Tensor, b: Tensor, on: Place) -> DTensor:
        """The same on this rank's shard."""
        spec = (self.stride, self.sides, self.dilation, self.groups)
        return distributed.conv2d(x, w, b, *spec, padding_mode=self.modes, family=on.family, strict=on.strict)


def draw(random: Random) -> Case:
    """A case with a result: images down to one row, filters up to five taps, padding of all modes."""
    axes: list[tuple[int, int, int, PaddingMode, int, int]] = []
    while len(axes) < 2:
        extent, taps, dilation = random.randint(1, 11), random.randint(1, 5), random.choice((1, 1, 2, 3))
        mode = random.choice(PADDING_MODES)
        most = {"circular": extent, "reflect": extent - 1}.get(mode, 4)
        before, after = random.randint(0, min(most, 4)), random.randint(0, min(most, 4))
        if extent + before + after > dilation * (taps - 1):
            axes.append((extent, taps, dilation, mode, before, after))
    (h, r, d0, m0, top, bottom), (w, s, d1, m1, left, right) = axes
    groups, c, k = random.choice((1, 2)), random.randint(1, 2), random.randint(1, 2)
    return Case(
        (random.choice((1, 2)), c * groups, h, w), (k * groups, c, r, s), (random.randint(1, 3), random.randint(1, 3)),
        (top, bottom, left, right), (d0, d1), groups, (m0, m1), random.random() < 0.3, random.randrange(1 << 30),
    )  # fmt: skip


def integers(*shape: int) -> Tensor:
    """What all ranks draw alike, as a leaf."""
    return torch.randint(-3, 4, shape).double().requires_grad_()


def shard(whole: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """This rank's part of what all ranks have, without communication; a leaf if ``whole`` is one."""
    part = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
    part.requires_grad_(whole.requires_grad)
    return part


def _parts(ours: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """A result and what one process has there, on the CPU: of a DTensor this rank's part, and where that begins."""
    assert ours.shape == whole.shape and ours.dtype == whole.dtype
    begin = [0] * ours.dim()
    if isinstance(ours, DTensor):
        image = Image(ours.device_mesh, tuple(ours.placements))
        begin = [image.bounds(extent, dim)[image.shard_index(dim)] for dim, extent in enumerate(ours.shape)]
        whole = shard(whole.to(image.mesh.device_type), image.mesh, image.placements).to_local()
        ours = ours.to_local()
    return ours.detach().cpu(), whole.detach().cpu(), begin


def same(ours: Tensor, whole: Tensor) -> bool:
    """Whether a result is, bit for bit, that of one process: of a DTensor this rank's part."""
    return torch.equal(*_parts(ours, whole)[:2])


def difference(name: str, ours: Tensor, whole: Tensor) -> str | None:
    """Where and how far a result is not that of one process, by indices of the whole; None if nowhere."""
    here, wanted, begin = _parts(ours, whole)
    away = (here - wanted).abs()
    wrong = (~(away == 0)).nonzero().tolist()  # nan, too
    if not wrong:
        return None
    first, last = ([low + at for low, at in zip(begin, each, strict=True)] for each in (wrong[0], wrong[-1]))
    at, off = tuple(wrong[0]), float(away.max())
    return (
        f"{name} is off by up to {off:.3g} in {len(wrong)} of {away.numel()} elements, from {first} to "
        f"{last} of {list(ours.shape)}, this rank's {list(here.shape)} from {begin} on; at {first} it is "
        f"{float(here[at])!r} and not {float(wanted[at])!r}"
    )


def late(device: str, *tensors: Tensor) -> list[Tensor]:
    """Leaves on a device. A GPU writes them late: what does not wait for the stream that they are on reads zeros."""
    there = [each.detach().to(device) for each in tensors]
    if device == "cuda":
        sources, there = there, [torch.zeros_like(each) for each in there]
        torch.cuda._sleep(BUSY_CYCLES)
        for source, each in zip(sources, there, strict=True):
            each.copy_(source)
    return [each.requires_grad_() for each in there]


def differences(case: Case, mesh: DeviceMesh, placements: Placements, second: bool, on: Place = CPU) -> list[str]:
    """Where fprop, dx, dw, db are not those of one process on a CPU; with ``second`` their gradients, too."""
    device, found = mesh.device_type, []
    leaves = case.tensors()
    x, w, b = late(device, *leaves)
    ours = (shard(x, mesh, placements), w, b)
    y, expected = case.sharded(*ours, on), case.in_one_process(*leaves)
    found.append(difference("y", y, expected))
    generator = torch.Generator().manual_seed(case.seed + 1)
    dy = torch.randint(-3, 4, expected.shape, generator=generator).double().requires_grad_()
    d_ours = shard(late(device, dy)[0], mesh, placements)
    gradients = torch.autograd.grad(y, ours, d_ours, create_graph=second)
    wanted = torch.autograd.grad(expected, leaves, dy, create_graph=second)
    for name, *pair in zip(("dx", "dw", "db"), gradients, wanted, strict=True):
        found.append(difference(name, *pair))
    if second:
        ones = [torch.randint(-3, 4, each.shape, generator=generator).double() for each in wanted[:2]]
        one, other = (each.detach() for each in late(device, *ones))
        again = torch.autograd.grad(gradients[:2], (*ours[:2], d_ours), [shard(one, mesh, placements), other])
        all_of_one = torch.autograd.grad(wanted[:2], (*leaves[:2], dy), ones)
        for name, *pair in zip(("x", "w", "dy"), again, all_of_one, strict=True):
            found.append(difference(f"the second gradient of {name}", *pair))
    return [each for each in found if each is not None]


def assert_equal(case: Case, mesh: DeviceMesh, placements: Placements, second: bool) -> None:
    """fprop, dx, dw, db are those of one process; with ``second`` their gradients, too."""
    found = differences(case, mesh, placements, second)
    assert not found, f"{'; '.join(found)}: {case}"
