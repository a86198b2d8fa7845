"""Passes that only look at a model leave cuDNN's search to be made: PyTorch keeps a guessed plan as it keeps a best."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import haloconv
from haloconv import jit
from haloconv.bench.networks.swapped import Options, layers_of
from haloconv.bench.trial import Budget
from haloconv.bench.values import check_model
from haloconv.choose.measuring import ONE_AT_A_TIME
from haloconv.device import Device, set_stand_in
from haloconv.families import FAMILIES
from haloconv.families.base import BoundCall, Config
from haloconv.jit import TENSOR_MAP_BYTES
from haloconv.plan import clear_plans
from haloconv.problem import Problem, Request, dense_request
from haloconv.reference import cudnn_search, unsearched
from haloconv.tune.first_use import complaint_about
from haloconv.tune.problems import problems_of
from tests.cpu.test_paths import H200, Noting

KEPT = (True, False)  # searched, by the key of the user's own calls
APART = (False, True)


def flags() -> tuple[bool, bool]:
    """Whether cuDNN searches, and whether it must be deterministic, which is part of the key of a kept plan."""
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


class Convolutions(TorchFunctionMode):
    """What ``look()`` gave, by default the flags, when each convolution of PyTorch ran."""

    def __init__(self, look: Callable[[], tuple[bool, bool]] = flags) -> None:
        super().__init__()
        self.look = look
        self.seen: list[tuple[bool, bool]] = []

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if getattr(func, "__name__", "") == "conv2d":
            self.seen.append(self.look())
        return func(*args, **kwargs or {})


@pytest.fixture(autouse=True)
def searching() -> Iterator[None]:
    with torch.backends.cudnn.flags(benchmark=True, deterministic=False):
        yield
        assert flags() == KEPT


@contextmanager
def idle_gpu() -> Iterator[None]:
    clear_plans()
    set_stand_in(Device(H200, lambda *_: Noting(), lambda *_, **__: bytes(TENSOR_MAP_BYTES)))
    try:
        yield
    finally:
        set_stand_in(None)
        clear_plans()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1))


def test_a_guess_has_another_key_than_what_follows() -> None:
    with unsearched():
        assert flags() == APART
        with torch.backends.cudnn.flags(benchmark=True, deterministic=True), unsearched():
            assert flags() == (False, False)
    with pytest.raises(KeyError), unsearched():
        raise KeyError


def test_where_all_is_deterministic_cudnn_searches() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with cudnn_search(False), unsearched():
            assert flags() == KEPT
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("family", "expected"), [("direct", APART), ("aten", KEPT)])
def test_compiling_ahead_searches_for_what_pytorch_will_run(family: str, expected: tuple[bool, bool]) -> None:
    with idle_gpu(), Convolutions() as ran:
        haloconv.accelerate(network(), family=family, example_inputs=torch.randn(2, 16, 8, 8))
    assert ran.seen == [expected, expected]


def held() -> tuple[bool, bool]:
    """Whether another thread that would load a kernel waits, and one that would measure."""

    def can_measure() -> bool:
        with suppress(RuntimeError):  # of a lock that was not taken
            taken = ONE_AT_A_TIME.acquire(blocking=False)
            ONE_AT_A_TIME.release()
        return taken

    with ThreadPoolExecutor(1) as another:
        return jit.LOADING.locked(), not another.submit(can_measure).result(30)


@pytest.mark.parametrize(("family", "waits"), [("direct", False), ("aten", True)])
def test_nothing_is_loaded_or_measured_while_pytorch_searches(family: str, waits: bool) -> None:
    with idle_gpu(), Convolutions(held) as ran:
        haloconv.accelerate(network(), family=family, example_inputs=torch.randn(2, 16, 8, 8))
    assert ran.seen == [(waits, waits)] * 2


def test_a_look_at_a_record_searches_nothing() -> None:
    with idle_gpu(), Convolutions() as ran:
        request = dense_request(Problem("fprop", 2, 16, 8, 8, 16, 3, 3), torch.device("cpu"))
        (config, *_) = FAMILIES["direct"].configs(request)
        complaint_about(request, "direct", config)
    assert ran.seen == [APART]


def test_looks_at_records_compile_side_by_side_and_compare_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """While something is measured a look at a record binds its kernel, and then waits."""
    bound, ended = threading.Event(), threading.Event()
    family = FAMILIES["direct"]

    def bind(request: Request, config: Config) -> BoundCall:
        bound.set()
        return family.__class__.bind(family, request, config)

    def look() -> None:
        complaint_about(request, "direct", config)
        ended.set()

    with idle_gpu():
        request = dense_request(Problem("fprop", 2, 16, 8, 8, 16, 3, 3), torch.device("cpu"))
        (config, *_) = family.configs(request)
        monkeypatch.setattr(family, "bind", bind)
        with ThreadPoolExecutor(1) as pool:
            with ONE_AT_A_TIME:
                running = pool.submit(look)
                assert bound.wait(30) and not ended.wait(0.1)
            running.result(30)
    assert ended.is_set()


def test_passes_that_look_for_layers_search_nothing() -> None:
    model, x = network(), torch.randn(2, 16, 8, 8)
    with Convolutions() as ran:
        assert problems_of(model, x, ("fprop",))
        check_model(model, (x,))
        swaps = list(haloconv.accelerate(model, family="direct"))
        options = Options(torch.device("cpu"), "ieee", "direct", 0, Budget(0.0), None)
        assert len(layers_of("a", model, (x,), swaps, options)) == 2
    assert len(ran.seen) == 6 and set(ran.seen) == {APART}
