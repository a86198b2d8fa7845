"""``torch.backends.cudnn.benchmark``, PyTorch's switch for a search at first use, makes layers of ours measure, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import haloconv
from haloconv import env, plan
from haloconv.choose import measuring as choose_measuring
from haloconv.choose.choice import Choice, may_be_measured
from haloconv.choose.records import read_records, records_path
from haloconv.reference import cudnn_search
from haloconv.tune import measure
from tests.tuned import FACTS, Clock, FakeFamily, fake_gpu, favouring, forget, only


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A fake GPU on which a family called special is fastest."""
    made = Clock(favouring("special"))
    monkeypatch.setattr(measure, "compare", made)
    with fake_gpu(tmp_path), only(FakeFamily("direct", ()), FakeFamily("special")):
        yield made


def layer_and_input() -> tuple[haloconv.Conv2d, torch.Tensor]:
    torch.manual_seed(0)
    return haloconv.Conv2d(8, 16, 3, padding=1, bias=False), torch.randn(2, 8, 24, 28)


@pytest.fixture
def cudnn_benchmark() -> Iterator[None]:
    """PyTorch's own switch for a search at first use."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = before


def test_pytorchs_own_switch_measures_at_first_use(clock: Clock, cudnn_benchmark: None) -> None:
    layer, x = layer_and_input()
    layer(x.requires_grad_()).backward(torch.ones(2, 16, 24, 28))
    assert sorted(each.layer.split(" ")[0] for each in read_records(records_path(FACTS.name))) == [
        "dgrad", "fprop", "wgrad",
    ]  # fmt: skip
    assert "tuned: 2.00x PyTorch" in repr(layer)


@pytest.mark.parametrize("variable", [(env.TUNE, "off"), (env.TUNE, "0"), (env.FROZEN, "1")], ids="=".join)
def test_the_environment_overrules_pytorchs_switch(
    clock: Clock, cudnn_benchmark: None, variable: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable)
    forget()
    layer, x = layer_and_input()
    layer(x)
    assert not clock.rounds


def test_pytorchs_switch_measures_nothing_while_others_wait(
    clock: Clock, cudnn_benchmark: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep a layer that PyTorch runs from its native call."""
    monkeypatch.setattr(choose_measuring, "in_a_group", lambda: True)
    layer, x = layer_and_input()
    layer(x)
    (made,) = plan._plans.values()
    assert not clock.rounds and made.choice.family == "special"
    assert not may_be_measured(Choice("aten", "by rule"), "auto")


def test_our_own_searches_are_no_wish_of_the_user(clock: Clock) -> None:
    layer, x = layer_and_input()
    with cudnn_search(True):
        layer(x)
        with cudnn_search(False):
            pass
        layer(x[:1])
    assert torch.backends.cudnn.benchmark is False and not clock.rounds
