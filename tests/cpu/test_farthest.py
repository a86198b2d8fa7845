"""Which layers are to be timed next: those of our kernels that are furthest from measured ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from haloconv.bench import sample
from tools import farthest
from tools.farthest import Measured, kind_of, place_of
from tools.measured import facts_of, gpus, stood_in

H200 = next(gpu for gpu in gpus() if gpu["name"] == "NVIDIA H200")


@pytest.fixture(autouse=True)
def on_an_h200() -> Iterator[None]:
    with stood_in(facts_of(H200)):
        yield


def stems(*images: int, size: int = 224) -> list[sample.Drawn]:
    lines = [f"stem {n}x3x{size}x{size} k64 7x7 s2 p3x3 d1 g1 fprop fp16 nchw" for n in images]
    return sample.read_drawn("\n".join(lines))


def known(*drawn: sample.Drawn, ratio: float = 2.0) -> dict:
    found: dict = {}
    for each in drawn:
        found.setdefault(kind_of(each.problem)[1], []).append(Measured(place_of(each.problem), ratio))
    return found


def test_layers_of_pytorch_have_no_kind_and_others_that_of_their_kernel() -> None:
    ours, theirs = sample.read_drawn(
        "stem 8x3x224x224 k64 7x7 s2 p3x3 d1 g1 fprop fp16 nchw\ndense 8x64x28x28 k64 1x1 s1 d1 g1 wgrad fp32 nchw"
    )
    assert kind_of(theirs.problem) is None
    assert kind_of(ours.problem) == (
        "halo_sm80", ("halo_sm80 has_few_channels", "halo_sm80/conv", "nchw", "16 bits", "fprop")
    )  # fmt: skip


def test_a_distance_of_one_is_a_factor_of_two() -> None:
    few, twice, wide = (each.problem for each in (*stems(8, 16), *stems(8, size=448)))
    apart = [abs(a - b) for a, b in zip(place_of(few), place_of(twice), strict=True)]
    assert apart == [1, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert [abs(a - b) for a, b in zip(place_of(few), place_of(wide), strict=True)] == [2, 0, 1, 2, 0, 0, 0, 0, 0, 0]
    aligned = replace(few, w=232)
    assert place_of(aligned)[-1] - place_of(replace(few, w=229))[-1] == 1.5


def test_what_was_measured_and_what_is_like_it_is_not_chosen() -> None:
    far, near, same = stems(128, 8, 9)
    assert list(farthest.farthest([near, same], known(near), 5)) == []
    assert list(farthest.farthest([near, far, same], known(near), 5)) == [far]
    assert list(farthest.farthest([near, far, same], {}, 5)) == [same, far]  # all is unknown: two are near each other
    assert list(farthest.farthest([near, far, same], {}, 1)) == [same]
    assert list(farthest.farthest([], {}, 5)) == []


def test_draws_near_to_slow_rows_come_first() -> None:
    measured, far = stems(8)[0], stems(128)[0]
    other = sample.read_drawn(str(measured).replace("fprop", "wgrad"))[0]
    its_far = sample.read_drawn(str(far).replace("fprop", "wgrad"))[0]
    for slow, fast, first in ((measured, other, far), (other, measured, its_far)):
        measured_so = known(slow, ratio=1.0) | known(fast, ratio=3.0)
        assert next(farthest.farthest([far, its_far], measured_so, 2)) == first


def test_rows_and_records_are_what_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    found = farthest.measured(H200)
    assert sum(map(len, found.values())) > 1000 and all(each.ratio > 0 for many in found.values() for each in many)
    monkeypatch.setattr(sys, "argv", ["farthest", "--draws", "60", "--count", "3"])
    monkeypatch.setattr(farthest, "measured", lambda gpu: found)
    farthest.main()
    chosen = sample.read_drawn(capsys.readouterr().out)
    assert 0 < len(chosen) <= 3 and {each.key for each in chosen} <= {each.key for each in sample.sample(60, 1)}
    monkeypatch.setattr(sys, "argv", ["farthest", "NVIDIA Nothing"])
    with pytest.raises(SystemExit):
        farthest.main()
