"""Records that the package ships: each is looked at once before it is followed, and a wrong one is not followed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haloconv.choose import records, trust
from haloconv.choose.choice import choose
from haloconv.choose.records import write_records
from tests.tuned import FACTS, LAYER, FakeConfig, FakeFamily, fake_gpu, only, record

CPU = torch.device("cpu")
NCHW = replace(LAYER, dtype=torch.float32)


@pytest.fixture
def special(tmp_path: Path) -> Iterator[FakeFamily]:
    """A family of a fake GPU, beside a direct that offers nothing."""
    family = FakeFamily("special")
    with fake_gpu(tmp_path), only(FakeFamily("direct", ()), family):
        yield family


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def write(**changes: object) -> None:
        write_records(records.shipped_path(FACTS.name), [record(NCHW, "special", config="rows8", **changes)], FACTS)

    return write


def test_a_shipped_record_is_looked_at_once(special: FakeFamily, shipped: Callable) -> None:
    shipped()
    found = choose(NCHW, CPU)
    assert (found.family, found.config) == ("special", "rows8") and "tuned, as shipped: 2.00x" in found.reason
    assert special.bound == [FakeConfig(8)], "it ran before it was trusted"
    choose(replace(NCHW, h=32, w=30), CPU)
    choose(NCHW, CPU)
    assert special.bound == [FakeConfig(8)]


@pytest.fixture
def stamp(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The one stamp that there is, of the kernel that the shipped record names."""
    (found,) = [record(NCHW, "special", config="rows8")]
    made: dict[str, object] = {"gpus": ["Another GPU", found.gpu], "source": found.source}
    monkeypatch.setattr(trust, "stamped", lambda: {found.kernel: made})
    return made


def test_a_record_of_a_stamped_kernel_needs_no_look(special: FakeFamily, shipped: Callable, stamp: dict) -> None:
    shipped()
    found = choose(NCHW, CPU)
    assert (found.family, found.config, special.bound) == ("special", "rows8", [])


@pytest.mark.parametrize("other", [{"gpus": ["NVIDIA H100"]}, {"source": "0" * 64}])
def test_a_stamp_of_another_gpu_or_of_other_code_does_not_count(
    special: FakeFamily, shipped: Callable, stamp: dict, other: dict
) -> None:
    stamp |= other
    shipped()
    assert choose(NCHW, CPU).config == "rows8" and special.bound == [FakeConfig(8)]


@pytest.mark.parametrize("fault", ["wrong", "nan", "does not bind", "does not run"])
def test_a_shipped_record_that_is_wrong_here_is_not_followed(
    special: FakeFamily, shipped: Callable, fault: str
) -> None:
    shipped()
    special.offers = (FakeConfig(8, fault),)
    before = records.shipped_path(FACTS.name).read_text()
    with pytest.warns(RuntimeWarning, match="a shipped record is not followed"):
        assert not choose(NCHW, CPU).measured
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not choose(NCHW, CPU).measured
    assert records.shipped_path(FACTS.name).read_text() == before


def test_a_shipped_record_for_other_kernels_is_not_followed(special: FakeFamily, shipped: Callable) -> None:
    shipped(source="0" * 64)
    assert not choose(NCHW, CPU).measured and not special.bound


def test_nothing_is_looked_at_while_a_graph_is_captured(
    special: FakeFamily, shipped: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped()
    monkeypatch.setattr(trust, "is_capturing", lambda device: True)
    assert not choose(NCHW, CPU).measured and not special.bound
    monkeypatch.setattr(trust, "is_capturing", lambda device: False)
    assert choose(NCHW, CPU).config == "rows8"
