"""What families offer: few configs of a kernel, each with a key of its own, each right on the emulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from haloconv import emulator
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES, OWN
from haloconv.families.base import MOST_CONFIGS, config_key
from haloconv.families.common import few_apart
from haloconv.plan import problem_of
from haloconv.problem import Request, TensorForm
from tests import oracle
from tests.cases import Case, make
from tests.families import FACTS

MISSING = emulator.available()
RUNS = [(name, direction) for name in OWN for direction in FAMILIES[name].directions]


@dataclass(frozen=True)
class Bindable:
    """The request for one direction of a case in a dtype, and its operands."""

    one: Case
    direction: str
    dtype: torch.dtype

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        t = make(self.one, self.dtype)
        return {"fprop": (t.x, t.w, t.b), "dgrad": (t.dy, t.w), "wgrad": (t.dy, t.x)}[self.direction]

    def request(self) -> Request:
        t = make(self.one, self.dtype)
        bias = self.direction == "fprop"
        layout = oracle.layout_of(self.one.storage)
        problem = problem_of(self.direction, t.x.shape, t.w.shape, self.one.spec, self.dtype, layout)
        first, second = (TensorForm(each.stride(), True) for each in self.operands[:2])
        return Request(replace(problem, bias=bias), first, second, layout, torch.device("cpu"))


@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
@pytest.mark.parametrize(("family", "direction"), RUNS)
def test_every_candidate_is_right(family: str, direction: str) -> None:
    dtypes = FAMILIES[family].dtypes
    one = Bindable(FACTS[family].takes, direction, torch.float16 if torch.float16 in dtypes else dtypes[0])
    t = make(one.one, one.dtype)
    with emulated_device(sm_count=2) as device:
        request = one.request()
        assert FAMILIES[family].why_not(request.problem, request.device) is None
        candidates = FAMILIES[family].configs(request)
        assert 1 <= max(Counter(config.kernel for config in candidates).values()) <= MOST_CONFIGS
        names = [(config.kernel, config.key) for config in candidates]
        assert len(set(names)) == len(names) and all("\n" not in key for _, key in names)
        assert candidates == FAMILIES[family].configs(request)
        for config in candidates:
            call = device.watch(FAMILIES[family].bind(request, config))
            operands = {"fprop": (t.x, t.w, t.b), "dgrad": (t.dy, t.w), "wgrad": (t.dy, t.x)}[direction]
            oracle.check(direction, call(*operands), t, one.one.spec)


@dataclass(frozen=True)
class Example:
    tile_p: int
    boxes: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class Named:
    cols: int

    def __str__(self) -> str:
        return f"q{self.cols}"


def test_keys_of_configs() -> None:
    assert config_key(Example(4, boxes=True)) == "tile_p4 boxes"
    assert config_key((Example(4), Named(8))) == "tile_p4 | q8"
    assert config_key((Example(4), Example(4))) == "tile_p4"


def test_few_apart_takes_the_first_of_each_kind() -> None:
    assert few_apart(["a1", "a2", "b1", "c1", "d1"], lambda item: item[0]) == ["a1", "b1", "c1"]
    assert few_apart(["a1", "a2"], lambda item: item[0]) == ["a1"]
