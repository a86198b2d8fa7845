"""halo_sm80_f64 on a GPU: the emulator's runs of it, and layers of real size in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import haloconv
from tests import oracle
from tests.cases import Case, case, make
from tests.emulated import Run, module_runs
from tests.families import HALO_SM80_F64, Subject, name_of, over
from tests.gpu.runs import check_integers, check_run
from tests.launches import launched

LAST = "channels_last"
LAYERS = (
    case("wide_image", "3x3 on a wide image, without padding", (2, 64, 130, 1022), (128, 3, 3)),
    case("wide_image_nhwc", "the same where channels are neighbours", (2, 64, 130, 1022), (128, 3, 3), storage=LAST),
    case("unet", "3x3 of 128 channels", (2, 128, 128, 128), (128, 3, 3), padding=1),
    case("strided_dilated", "residues of several sizes", (4, 72, 61, 67), (96, 3, 5), padding=(2, 3), stride=(2, 3),
         dilation=(1, 2), storage=LAST),
    case("groups", "groups of 16 channels", (8, 128, 28, 28), (128, 3, 3), padding=1, groups=8),
)  # fmt: skip
RUNS = over(*((HALO_SM80_F64, run) for run in module_runs(HALO_SM80_F64.name)))
CALLS = over(*((HALO_SM80_F64, result, one) for result in HALO_SM80_F64.results for one in LAYERS))


@pytest.mark.parametrize(("subject", "run"), RUNS, ids=str)
def test_run(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with the same blocks."""
    check_run(subject, run, record)


@pytest.mark.parametrize(("subject", "result", "one"), CALLS, ids=name_of)
def test_layer(subject: Subject, result: str, one: Case, record: Callable) -> None:
    """Right, and the same bits every time: a buffer that is filled again too early shows once in a while."""
    dtype = torch.float64
    special, t = subject.on(one, dtype), make(one, dtype, "cuda")
    with oracle.RedZones("cuda") as zones, launched() as names:
        first, *others = (oracle.run(result, t, special) for _ in range(8))
    error = oracle.check(result, first, t, special.spec)
    assert all(oracle.same_bits(first, other) for other in others)
    zones.check()
    record(names, result, subject.label(dtype), error.norm)
    check_integers(subject, result, special, dtype, record)


@pytest.mark.parametrize("subject", over((HALO_SM80_F64,)), ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_images_are_farther_apart_than_32_bits_count(subject: Subject, layout: str) -> None:
    """The second image begins 2^31 elements behind the first: the same bits as where they are neighbours."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    near = torch.randn(2, 16, 9, 12, dtype=torch.float64, device="cuda").to(memory_format=order)
    w = torch.randn(24, 16, 3, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    room = torch.empty((1 << 31) + near[0].numel(), dtype=torch.float64, device="cuda")
    far = room.as_strided(near.shape, (1 << 31, *near.stride()[1:])).copy_(near)
    results = []
    for x in (near, far):
        y = haloconv.conv2d(x, w, padding=1, family=subject.name, strict=True)
        results.append((y.detach(), *torch.autograd.grad(y, w, y.detach())))
    assert all(map(oracle.same_bits, *results))
