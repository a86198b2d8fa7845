"""Kernels that are known ahead: compiled side by side before the first call, which then compiles nothing."""

from __future__ import annotations

import copy
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import haloconv
from haloconv import env, plan
from haloconv.device import Device, set_stand_in
from haloconv.jit import TENSOR_MAP_BYTES, CompileError, KernelSource
from haloconv.problem import ConvSpec, Request
from haloconv.tune import measure
from tests.cpu.test_paths import H200, Noting
from tests.tuned import Clock, FakeFamily, fake_gpu, favouring, only

CODE = sys.modules["haloconv.precompile"]
Load = Callable[[KernelSource], None]


class Compiler:
    """Stands for the compiler and the driver of an H200; ``sources`` has what was asked for, by its name."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.meet: Load = lambda source: None

    def load(self, source: KernelSource, smem_bytes: int) -> Noting:
        self.meet(source)
        self.sources.append(source.digest)
        return Noting()


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    plan.clear_plans()
    set_stand_in(Device(H200, made.load, lambda *_, **__: bytes(TENSOR_MAP_BYTES)))
    yield made
    set_stand_in(None)
    plan.clear_plans()


def network() -> nn.Sequential:
    """Two convolutions of the same form, one that is fused with nothing, one in groups."""
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, stride=2, groups=8),
    )


def images(**options: object) -> torch.Tensor:
    return torch.randn(2, 16, 12, 12, **options)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("learns_images", [False, True])
def test_the_first_step_finds_its_kernels(compiler: Compiler, channels_last: bool, learns_images: bool) -> None:
    model, x = network(), images()
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_(learns_images)
    haloconv.accelerate(model, family="direct", example_inputs=x)
    ahead = set(compiler.sources)
    model(x).square().sum().backward()
    assert ahead and set(compiler.sources) == ahead


@pytest.mark.parametrize("learns_images", [False, True])
def test_rims_are_compiled_ahead(compiler: Compiler, learns_images: bool) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"))
    x = images(requires_grad=learns_images)
    haloconv.accelerate(model, family="direct", example_inputs=x)
    ahead = set(compiler.sources)
    model(x).square().sum().backward()
    assert ahead and set(compiler.sources) == ahead


def test_inference_compiles_no_gradients(compiler: Compiler) -> None:
    model, x = network().eval(), images()
    haloconv.accelerate(model, family="direct", example_inputs=x)
    ahead = set(compiler.sources)
    with torch.no_grad():
        model(x)
    assert set(compiler.sources) == ahead
    model(x).square().sum().backward()
    assert set(compiler.sources) > ahead


def test_directions_say_what_is_compiled(compiler: Compiler) -> None:
    model, x = network().eval(), images()
    haloconv.accelerate(model, family="direct")
    assert haloconv.precompile(model, x, directions=("fprop", "dgrad", "wgrad")) == ()
    ahead = set(compiler.sources)
    model(x).square().sum().backward()
    assert set(compiler.sources) == ahead
    with pytest.raises(ValueError, match="directions are some of fprop, dgrad, wgrad, not backward"):
        haloconv.precompile(model, x, directions=("backward",))


def test_plans_are_kept_and_the_call_binds_nothing_anew(compiler: Compiler) -> None:
    model, x = network().eval(), images()
    haloconv.accelerate(model, family="direct", example_inputs={"input": x})
    made = dict(plan._plans)
    assert {each.choice.family for each in made.values()} == {"direct"}
    with torch.no_grad():
        model(x)
    assert plan._plans == made


def test_the_model_stays_as_it_was(compiler: Compiler) -> None:
    model, x = network(), images()
    model[3].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    haloconv.accelerate(model, example_inputs=(x,))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_pass_is_pytorchs(compiler: Compiler) -> None:
    """Its values are real: a model may decide by them what it does next."""
    seen: list[torch.Tensor] = []
    model, x = network().eval(), images()
    expected = model(x)
    model.register_forward_hook(lambda module, args, y: seen.append(y.detach()))
    haloconv.accelerate(model, family="direct", example_inputs=x)
    torch.testing.assert_close(seen, [expected.detach()])


def test_a_kernel_that_fails_is_left_to_its_layer(compiler: Compiler) -> None:
    model, x = network().eval(), images()
    haloconv.accelerate(model, family="direct")

    def refuse(source: KernelSource) -> None:
        raise CompileError("a fault")

    compiler.meet = refuse
    complaints = haloconv.precompile(model, x)
    assert len(complaints) == 2  # the first two layers are of one form
    assert "fprop 2,16,12,12 -> 16, 3x3" in complaints[0] and complaints[0].endswith("CompileError: a fault")
    with pytest.raises(CompileError, match="a fault"):
        model(x)


def test_what_the_model_raises_is_raised(compiler: Compiler) -> None:
    with pytest.raises(RuntimeError, match="channels"):
        haloconv.accelerate(network(), example_inputs=torch.randn(1, 3, 12, 12))
    assert plan._noted.get() is None


def test_kernels_are_compiled_side_by_side(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    together = threading.Barrier(2, timeout=60)
    compiler.meet = lambda source: together.wait()
    model = network().eval()
    haloconv.accelerate(model, family="direct")
    assert haloconv.precompile(model, images()) == ()
    assert len(compiler.sources) == 2


class Waits(nn.Module):
    """A layer that is done when ``event`` is set."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.event.wait(60)
        return x


def test_kernels_are_compiled_beside_the_pass(compiler: Compiler) -> None:
    """The pass waits for the first kernel here, and would for ever if the compiler waited for the pass."""
    begun = threading.Event()
    compiler.meet = lambda source: begun.set()
    model = nn.Sequential(*network(), Waits(begun)).eval()
    haloconv.accelerate(model, family="direct")
    assert haloconv.precompile(model, images()) == ()
    assert len(compiler.sources) == 2


def test_the_pass_hears_of_a_form_again_whose_kernel_is_there(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer of a form needs a gradient that the first does not: of its images."""
    bound, asked = threading.Event(), []
    bind = plan.bind

    def noting(request: Request, spec: ConvSpec) -> plan.Plan:
        asked.append(request.problem.direction)
        found = bind(request, spec)
        bound.set()
        return found

    monkeypatch.setattr(plan, "bind", noting)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), Waits(bound), nn.Conv2d(16, 16, 3, padding=1))
    haloconv.accelerate(model, family="direct", example_inputs=images())
    assert sorted(asked) == ["dgrad", "fprop", "wgrad"]


def test_a_pass_that_fails_gives_up_what_has_not_begun(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    begun, failed, ended = (threading.Event() for _ in range(3))

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert begun.wait(60)
            raise RuntimeError("a fault of the model")

    def wait_for_the_fault(source: KernelSource) -> None:
        begun.set()
        assert failed.wait(60)
        ended.set()

    compiler.meet = wait_for_the_fault
    model = nn.Sequential(*network(), Fails()).eval()
    haloconv.accelerate(model, family="direct")
    with pytest.raises(RuntimeError, match="a fault of the model"):
        haloconv.precompile(model, images())
    failed.set()
    assert ended.wait(60)
    assert len(compiler.sources) <= 1 and not plan._plans


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("logged", [False, True])
def test_a_line_says_what_takes_long(
    compiler: Compiler, logged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the log if it is asked for, else to a terminal: the compiler is done only after that."""
    told, screen, tell = threading.Event(), Terminal(), CODE._tell

    def heard(line: str) -> None:
        tell(line)
        told.set()

    monkeypatch.setattr(CODE, "_tell", heard)
    monkeypatch.setattr(CODE, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", screen)
    compiler.meet = lambda source: None if told.wait(60) else pytest.fail("nothing was told")
    if logged:
        caplog.set_level(logging.INFO, "haloconv.compile")
    haloconv.accelerate(network().eval(), family="direct", example_inputs=images())
    lines = [record.getMessage() for record in caplog.records] if logged else screen.getvalue().splitlines()
    (line,) = [each for each in lines if "choosing and compiling kernels" in each]
    assert "0 of 2 are done" in line and line.startswith("haloconv: ") is not logged
    assert logged is (screen.getvalue() == "")


def test_a_file_gets_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    CODE._tell("a line")
    monkeypatch.setattr(sys, "stderr", None)
    CODE._tell("a line")
    assert file.getvalue() == ""


def test_nothing_is_measured_beside_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured at its first use is so at its first call, not here."""
    clock = Clock(favouring("special"))
    monkeypatch.setattr(measure, "compare", clock)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    layer, x = haloconv.Conv2d(8, 16, 3, padding=1).eval(), torch.randn(2, 8, 24, 28)
    with fake_gpu(tmp_path), only(FakeFamily("direct", ()), FakeFamily("special")):
        assert haloconv.precompile(layer, x) == ()
        assert not plan._plans
        with torch.no_grad():
            layer(x)
        assert "tuned: 2.00x PyTorch" in repr(layer)


def test_disabled_it_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.DISABLE, "1")
    env.disabled.cache_clear()
    try:
        assert haloconv.precompile(network(), torch.randn(1, 99)) == ()
    finally:
        monkeypatch.undo()
        env.disabled.cache_clear()
