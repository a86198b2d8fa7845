"""sum_partials on the emulator: exact sums of small integers at every place, for every way in which partials lie."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from haloconv import emulator
from haloconv.emulator import emulated_device
from haloconv.families.reduce import partials
from haloconv.families.reduce.partials import Axis, Partials

pytestmark = [
    pytest.mark.skipif(emulator.available() is not None, reason=f"no emulator: {emulator.available()}"),
    pytest.mark.usefixtures("emulator_cache"),
]
CPU, SM_COUNT = torch.device("cpu"), 4
NEVER = 777.0  # what is not written keeps this value
FILTER = (Axis(5, 1), Axis(3, 45), Axis(3, 15), Axis(3, 5))  # K, C, R, S in memory as C, R, S, K
FRAGMENTS = (Axis(2, 8), Axis(1, 3), Axis(3, 128), Axis(2, 16, 1), Axis(2, 1), Axis(4, 32), Axis(2, 2))
CHANNEL_BLOCKS = (Axis(3, 8, 8), Axis(2, 40), Axis(2, 20), Axis(8, 1, 1))
PIXELS_INNER = (Axis(2, 5 * 12), Axis(5, 12, 1), Axis(12, 1))
CASES = {
    "filter": Partials(torch.float32, FILTER, 3),
    "filter, one part": Partials(torch.bfloat16, FILTER, 1),
    "filter, many parts": Partials(torch.float16, FILTER, 37),
    "filter, very many parts": Partials(torch.float32, FILTER, 301),
    "doubles": Partials(torch.float64, FILTER, 5),
    "doubles, many parts": Partials(torch.float64, FILTER, 20),
    "one axis": Partials(torch.float32, (Axis(300, 1),), 9),
    "seven axes, a gap between the parts": Partials(torch.float32, FRAGMENTS, 4, part_elems=250),
    "seven axes, many parts": Partials(torch.float16, FRAGMENTS, 11, part_elems=192),
    "channels behind the last": Partials(torch.float32, CHANNEL_BLOCKS, 2, limit=20),
    "many parts, channels behind the last": Partials(torch.bfloat16, CHANNEL_BLOCKS, 10, limit=20),
    "images": Partials(torch.float32, PIXELS_INNER, 3, run_elems=60),
    "images, a bias": Partials(torch.float32, PIXELS_INNER, 3, run_elems=60, bias=True),
    "images, many parts, a bias, ReLU": Partials(torch.float16, PIXELS_INNER, 12, run_elems=60, bias=True, relu=True),
    "pixels, a bias, ReLU": Partials(torch.float32, (Axis(24, 5), Axis(5, 1, 1)), 2, run_elems=5, bias=True, relu=True),
}


def integers(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-8, 9, (count,), generator=torch.Generator().manual_seed(0)).to(dtype)


def expected(one: Partials, sums: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` with every element at its place, one after the other, in Python's numbers."""
    run, stride = one.run_elems or one.elems, one.run_elems or one.part_elems or one.elems
    places = product(*(range(axis.extent) for axis in one.axes))
    for i, place in enumerate(places):
        first = i + i // run * (one.parts - 1) * one.run_elems
        total = sum(sums[first + part * stride].item() for part in range(one.parts))
        count = sum(at * axis.counts for at, axis in zip(place, one.axes, strict=True))
        if count >= one.limit:
            continue
        total += bias[count].item() if one.bias else 0
        offset = sum(at * axis.stride for at, axis in zip(place, one.axes, strict=True))
        out[offset] = max(total, 0) if one.relu else total
    return out


WIDE = ("filter, many parts", "images, a bias")


@pytest.mark.parametrize(("name", "wide"), [*((name, False) for name in CASES), *((name, True) for name in WIDE)])
def test_sums_are_exact_and_nothing_else_is_written(name: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``wide``: as if a part had 2^31 elements or more."""
    one = CASES[name]
    if wide:
        monkeypatch.setattr(partials, "_INT32_ELEMS", 1)
    sums, bias = integers(one.total_elems, one.acc_dtype), integers(8, one.dtype)
    out_elems = 1 + sum((axis.extent - 1) * axis.stride for axis in one.axes)

    with emulated_device(sm_count=SM_COUNT) as device:
        launch = partials.bind_sum(one, CPU)

        def run(sums: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            out = sums.new_empty(out_elems, dtype=one.dtype).fill_(NEVER)
            launch(out.data_ptr(), sums.data_ptr(), bias.data_ptr())
            return out

        got = device.watch(run)(sums, bias)
    assert torch.equal(got, expected(one, sums, bias, torch.full((out_elems,), NEVER, dtype=one.dtype)))


def test_cases_meet_every_number_of_threads_and_axes() -> None:
    met = {(partials.part_lanes(one), dict(partials.source(one).constants)["AXES"]) for one in CASES.values()}
    assert met == {(1, 4), (8, 4), (32, 4), (1, 7), (8, 7)}


def test_few_elements_of_many_parts_are_shared_by_threads() -> None:
    def lanes(elems: int, *parts: int) -> list[int]:
        return [partials.part_lanes(Partials(torch.float32, (Axis(elems, 1),), each)) for each in parts]

    assert lanes(1000, 1, 8, 9, 255, 256) == [1, 1, 8, 8, 32]
    assert lanes(50_000, 63, 64) == [1, 8]
    assert lanes(1 << 20, 200) == [1]
