"""The ways of a call: warm, few frames between the layer and its first launch; cold, nothing that it does not need."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

import haloconv
from haloconv import plan
from haloconv.choose import choice
from haloconv.device import Device, DeviceFacts, set_stand_in
from haloconv.jit import TENSOR_MAP_BYTES, KernelSource

PACKAGE = Path(haloconv.__file__).resolve().parent
H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
FRAMES = 4  # of ours, between Layer.forward and the first launch
CALLS = 9  # of ours, from Layer.forward to the first launch, those that returned among them


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
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_few_frames_between_a_warm_layer_and_its_first_launch(name: str, training: bool) -> None:
    layer, shape, dtype = LAYERS[name]
    layer = layer.to(dtype=dtype, memory_format=torch.channels_last)
    x = torch.randn(shape).to(dtype=dtype, memory_format=torch.channels_last)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and _is_ours(frame):
            calls.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

    with h200() as kernel, torch.set_grad_enabled(training):
        layer(x)
        kernel.stacks.clear()
        sys.setprofile(note)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    between = [each for each in kernel.stacks[0] if not each.startswith("launch.py")]
    assert len(between) <= FRAMES, between
    first = next(at for at, each in enumerate(calls) if each.endswith("__call__"))
    assert calls[0] in ("Layer.forward", "forward") and first <= CALLS, calls[: first + 1]


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
