"""The ways of a call: warm, few frames between the layer and its first launch; cold, nothing that it does not need."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

import haloconv
from haloconv import plan
from haloconv.choose import choice
from haloconv.device import Device, DeviceFacts, set_stand_in
from haloconv.families import FAMILIES, OWN
from haloconv.jit import TENSOR_MAP_BYTES, KernelSource

PACKAGE = Path(haloconv.__file__).resolve().parent
H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
FRAMES = 4  # of ours, between Layer.forward and the first launch
CALLS = 9  # of ours, from Layer.forward to the first launch, those that returned among them
FUNCTION_FRAMES, FUNCTION_CALLS = 6, 11  # the same from haloconv.conv2d on
BACKWARD_FRAMES, BACKWARD_CALLS = 5, 6  # the same from where autograd calls us on; the frames of every launch


class Noting:
    """A kernel that runs nothing; ``stacks`` has the names of frames above each launch, the nearest first."""

    def __init__(self) -> None:
        self.stacks: list[list[str]] = []

    def launch(self, *_: int) -> None:
        frame, names = sys._getframe(1), []
        while frame is not None and not _is_forward(frame):
            if _is_ours(frame):
                names.append(f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}")
            frame = frame.f_back
        self.stacks.append(names)


def _is_ours(frame: FrameType) -> bool:
    return PACKAGE in Path(frame.f_code.co_filename).parents


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code is haloconv.Conv2d.forward.__code__


@contextmanager
def h200() -> Iterator[Noting]:
    """Inside, calls on CPU tensors choose, bind and launch as on an H200, and nothing runs."""
    kernel = Noting()

    def load(source: KernelSource, smem_bytes: int) -> Noting:
        return kernel

    plan.clear_plans()
    set_stand_in(Device(H200, load, lambda *_, **__: bytes(TENSOR_MAP_BYTES)))
    try:
        yield kernel
    finally:
        set_stand_in(None)
        plan.clear_plans()


LAYERS = {
    "direct": (haloconv.Conv2d(16, 16, 3, padding=1, family="direct", strict=True), (2, 16, 20, 24), torch.float32),
    "halo_sm90": (haloconv.Conv2d(64, 64, 3, padding=1, family="halo_sm90", strict=True), (2, 64, 20, 24), torch.half),
    "halo_sm80": (haloconv.Conv2d(3, 64, 7, stride=2, family="halo_sm80", strict=True), (2, 3, 64, 64), torch.half),
    "depthwise": (
        haloconv.Conv2d(32, 32, 3, padding=1, groups=32, family="depthwise", strict=True),
        (2, 32, 24, 24),
        torch.half,
    ),
    "grouped_sm90": (
        haloconv.Conv2d(64, 64, 3, padding=1, groups=8, family="grouped_sm90", strict=True),
        (2, 64, 24, 24),
        torch.half,
    ),
    "halo_sm80_f64": (
        haloconv.Conv2d(16, 16, 3, padding=1, family="halo_sm80_f64", strict=True),
        (2, 16, 20, 24),
        torch.double,
    ),
    "depthwise_window": (
        haloconv.Conv2d(32, 32, 3, padding=1, groups=32, family="depthwise_window", strict=True),
        (2, 32, 24, 24),
        torch.half,
    ),
    "depthwise_toeplitz": (
        haloconv.Conv2d(32, 32, 13, padding=6, groups=32, family="depthwise_toeplitz", strict=True),
        (2, 32, 24, 24),
        torch.half,
    ),
}
BACKWARD = {
    **LAYERS,
    "halo_sm80_wgrad": (haloconv.Conv2d(3, 64, 7, stride=2, family="halo_sm80_wgrad"), (2, 3, 64, 64), torch.half),
}


def placed(name: str) -> tuple[haloconv.Conv2d, torch.Tensor]:
    layer, shape, dtype = BACKWARD[name]
    order = {"dtype": dtype, "memory_format": torch.channels_last}
    return layer.to(**order), torch.randn(shape).to(**order)


def calls_of(run: Callable[[], object]) -> list[str]:
    """The names of our functions in the order in which ``run`` calls them."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and _is_ours(frame):
            calls.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def check_few(stacks: list[list[str]], calls: list[str], frames: int, most_calls: int) -> None:
    """Between where PyTorch or the user calls us and launches, and until the first one."""
    for stack in stacks:
        between = [each for each in stack if not each.startswith("launch.py")]
        assert len(between) <= frames, between
    first = next(at for at, each in enumerate(calls) if each.endswith(".__call__"))
    assert first <= most_calls, calls[: first + 1]


def test_every_family_has_a_layer() -> None:
    """One of gradients alone is asked in the backward pass alone."""
    assert set(LAYERS) == {name for name in OWN if "fprop" in FAMILIES[name].directions}
    assert set(BACKWARD) == set(OWN)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_few_frames_between_a_warm_layer_and_its_first_launch(name: str, training: bool) -> None:
    layer, x = placed(name)
    with h200() as kernel, torch.set_grad_enabled(training):
        layer(x)
        kernel.stacks.clear()
        calls = calls_of(lambda: layer(x))
    assert calls[0] == "layer.forward"
    check_few(kernel.stacks[:1], calls, FRAMES, CALLS)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_few_frames_between_a_warm_function_and_its_first_launch(name: str, training: bool) -> None:
    layer, x = placed(name)
    given = {"padding": layer.padding, "stride": layer.stride, "groups": layer.groups, "family": name, "strict": True}
    with h200() as kernel, torch.set_grad_enabled(training):
        haloconv.conv2d(x, layer.weight, layer.bias, **given)
        kernel.stacks.clear()
        calls = calls_of(lambda: haloconv.conv2d(x, layer.weight, layer.bias, **given))
    assert calls[0] == "functional.conv2d"
    check_few(kernel.stacks[:1], calls, FUNCTION_FRAMES, FUNCTION_CALLS)


@pytest.mark.filterwarnings("ignore:haloconv. PyTorch's own convolution runs fprop")
@pytest.mark.parametrize("name", BACKWARD)
def test_few_frames_between_autograd_and_launches_of_a_warm_backward_pass(name: str) -> None:
    """Of the gradients that the family has."""
    layer, x = placed(name)
    x.requires_grad_("dgrad" in FAMILIES[name].directions)
    layer.requires_grad_("wgrad" in FAMILIES[name].directions)
    with h200() as kernel:
        ys = [layer(x) for _ in range(2)]
        dy = torch.ones_like(ys[0])
        ys[0].backward(dy)
        kernel.stacks.clear()
        calls = calls_of(lambda: ys[1].backward(dy))
        layer.requires_grad_()
    assert calls[0] == "autograd.backward"
    check_few(kernel.stacks, calls, BACKWARD_FRAMES, BACKWARD_CALLS)


def test_a_first_call_goes_down_as_the_design_page_says() -> None:
    text = (PACKAGE.parent / "docs" / "design.md").read_text("utf-8")
    flow = re.search(r"^Conv2d\.forward -> .*?-> launch$", text, re.MULTILINE | re.DOTALL)
    assert flow is not None
    named = [
        each for each in re.findall(r"-> ([a-z]+\.\w+)", flow[0]) if each != "cache.get_kernel"
    ]  # not here: no GPU
    layer, x, calls = haloconv.Conv2d(8, 24, 3, family="direct"), torch.randn(1, 8, 9, 9), []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and _is_ours(frame):
            calls.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    with h200(), torch.no_grad():
        sys.setprofile(note)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    assert len(named) > 4 and [calls.index(each) for each in named] == sorted(calls.index(each) for each in named)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions that were chosen for, in order."""
    found: list[str] = []
    choose = choice.choose
    plan.clear_plans()

    def noting(problem, *rest):
        found.append(problem.direction)
        return choose(problem, *rest)

    for module in (choice, plan):
        monkeypatch.setattr(module, "choose", noting)
    return found


@pytest.mark.parametrize("family", ["auto", "aten", "direct"])
def test_inference_chooses_for_nothing_but_fprop(family: str, asked: list[str]) -> None:
    layer, x = haloconv.Conv2d(4, 4, 3, family=family), torch.randn(1, 4, 9, 9)
    with h200(), torch.no_grad():
        layer(x)
        layer(x)
    layer = haloconv.Conv2d(4, 4, 3, family="aten")
    with torch.inference_mode():
        layer(x)
    assert set(asked) == {"fprop"}


@pytest.mark.parametrize("wants_dx", [False, True])
def test_a_layer_of_pytorchs_asks_for_the_gradients_that_are_wanted(wants_dx: bool, asked: list[str]) -> None:
    layer, x = haloconv.Conv2d(4, 4, 3), torch.randn(1, 4, 9, 9, requires_grad=wants_dx)
    layer(x)
    assert sorted(asked) == (["dgrad", "fprop", "wgrad"] if wants_dx else ["fprop", "wgrad"])


def test_a_layer_that_ran_without_gradients_has_them_all_the_same() -> None:
    """That its calls are PyTorch's own in inference says nothing about training, and the other way round."""
    layer, x = haloconv.Conv2d(4, 4, 3), torch.randn(1, 4, 9, 9)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
    settled = dict(vars(layer)["_calls"])
    layer(x).sum().backward()
    assert layer.weight.grad is not None and vars(layer)["_calls"] != settled
    y = layer(x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None and torch.equal(y, torch.nn.functional.conv2d(x, layer.weight, layer.bias))
