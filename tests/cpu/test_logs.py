"""What a user can watch: log lines by topic, and ranges of PyTorch's profiler that name layer, family and kernel."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import haloconv
from haloconv import env, logs, plan
from tests.cpu.test_paths import h200

TOPICS = ("choice", "compile", "cache")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    package = logging.getLogger("haloconv")
    handlers = list(package.handlers)
    plan.clear_plans()
    yield
    package.handlers[:] = handlers
    for topic in TOPICS:
        getattr(logs, topic).setLevel(logging.NOTSET)
    logs.names_layers = False
    plan.clear_plans()


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, groups=8))


def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    haloconv.conv2d(torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3))
    assert caplog.records == []
    monkeypatch.delenv("HALOCONV_LOGS", raising=False)
    assert env.log_topics() == ()


def test_a_choice_names_layer_problem_family_kernel_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    haloconv.set_logs(choice=True)
    model = small_model()
    haloconv.accelerate(model, family="direct")
    x = torch.randn(1, 16, 9, 9)
    with h200():
        model(x).sum().backward()
        told = [record.getMessage() for record in caplog.records]
        model(x).sum().backward()
    assert all(record.name == "haloconv.choice" for record in caplog.records)
    assert len(caplog.records) == len(told), "a warm call logs nothing"
    assert told[0].startswith("0: fprop 1,16,9,9 -> 16, 3x3 tf32 nchw -> direct (direct/direct ")
    assert told[0].endswith("): asked for")
    assert {line.split()[0] + line.split()[1] for line in told} == {
        "0:fprop", "2:fprop", "2:dgrad", "2:wgrad", "0:wgrad",
    }  # fmt: skip


def test_topics_are_turned_on_and_off_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    haloconv.set_logs(choice=True, cache=True)
    haloconv.set_logs(choice=False)
    assert logs.cache.isEnabledFor(logging.INFO) and not logs.choice.isEnabledFor(logging.INFO)
    assert not logs.compile.isEnabledFor(logging.INFO)
    haloconv.conv2d(torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3))
    assert caplog.records == []


def test_lines_reach_stderr_where_nobody_else_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", written := io.StringIO())
    package = logging.getLogger("haloconv")
    package.handlers.clear()
    haloconv.set_logs(compile=True)
    haloconv.set_logs(cache=True)
    assert len(package.handlers) == 1
    logs.compile.info("to a root that has handlers: pytest's")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.compile.info("to a root that has none")
    assert "haloconv.compile: to a root that has none" in written.getvalue()
    assert "pytest's" not in written.getvalue()


@pytest.mark.parametrize(
    "value, topics", [("choice,cache", ("choice", "cache")), (" ALL ", TOPICS), ("0", ()), ("", ())]
)
def test_the_variable_names_topics(
    monkeypatch: pytest.MonkeyPatch, value: str, topics: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HALOCONV_LOGS", value)
    logs._follow_environment()
    assert tuple(name for name in TOPICS if getattr(logs, name).isEnabledFor(logging.INFO)) == topics


def test_an_unknown_topic_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCONV_LOGS", "choices,cache")
    with pytest.warns(RuntimeWarning, match="names choices; there are choice, compile, cache, and all"):
        assert env.log_topics() == ("cache",)


def ranges_of(recorded: profile) -> list[str]:
    return [event.name for event in recorded.events() if event.name.startswith("haloconv.")]


def test_the_profiler_shows_layer_family_and_kernel() -> None:
    model = small_model()
    haloconv.accelerate(model, family="direct")
    x = torch.randn(1, 16, 9, 9)
    with h200():
        model(x).sum().backward()  # warm: nothing is compiled inside the profiler
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            model(x).sum().backward()
    found = ranges_of(recorded)
    kinds = {(name.split()[0].removeprefix("haloconv."), name.split()[1]) for name in found}
    assert kinds == {
        ("fprop", "layer=0"), ("fprop", "layer=2"), ("dgrad", "layer=2"), ("wgrad", "layer=2"), ("wgrad", "layer=0"),
        ("bgrad", "layer=0"), ("bgrad", "layer=2"),
    }  # fmt: skip
    assert all("family=direct kernel=direct/direct" in name for name in found if "bgrad" not in name)
    with h200(), torch.no_grad():
        model(x)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            model(x)
    assert [name.split()[:3] for name in ranges_of(recorded)] == [
        ["haloconv.fprop", f"layer={index}", "family=direct"] for index in (0, 2)
    ]


def test_the_profiler_shows_interior_and_rims() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"))
    haloconv.accelerate(model, family="direct")
    x = torch.randn(1, 16, 9, 9, requires_grad=True)
    with h200():
        model(x).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            model(x).sum().backward()
    found = [" ".join(name.split()[:2]).removeprefix("haloconv.") for name in ranges_of(recorded)]
    image_and_rims = 3  # those above and below are one batch, and those on the left and on the right
    counted = {f"{each} layer=0": image_and_rims for each in ("fprop", "dgrad", "wgrad")}
    assert Counter(found) == {**counted, "bgrad layer=0": 1}


@pytest.mark.parametrize("training", [False, True])
def test_the_profiler_shows_layers_that_are_pytorchs(training: bool) -> None:
    layer, x = haloconv.Conv2d(3, 4, 3), torch.randn(1, 3, 9, 9)
    for _ in range(2):
        with torch.set_grad_enabled(training), profile(activities=[ProfilerActivity.CPU]) as recorded:
            layer(x)
        (name,) = ranges_of(recorded)
        assert name.startswith("haloconv.fprop layer=Conv2d(3, 4, ") and "family=aten" in name


def test_the_profiler_shows_what_compiled_models_call() -> None:
    x, w = torch.randn(1, 3, 9, 9), torch.randn(4, 3, 3, 3, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ops.haloconv.fprop(x, w, None, *plan.ConvSpec()).sum().backward()
    assert {name.split()[0] for name in ranges_of(recorded)} == {"haloconv.fprop", "haloconv.wgrad"}


def test_nvtx_ranges_are_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What emit_nvtx turns on is seen; the ranges themselves need a GPU."""
    made: list[str] = []
    monkeypatch.setattr("haloconv.profiling.profiler.record_function", lambda name: made.append(name) or nullcontext())
    for name in ("_enable_profiler", "_disable_profiler", "kineto_available"):
        monkeypatch.setattr(f"torch.autograd.profiler.{name}", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with torch.autograd.profiler.emit_nvtx():
        haloconv.conv2d(torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3))
    assert made == ["haloconv.fprop family=aten kernel=aten"]


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("a range, and nobody listens")

    for module in ("plan", "autograd", "layer"):
        monkeypatch.setattr(f"haloconv.{module}.named_range", fails)
        monkeypatch.setattr(f"haloconv.{module}.current_layer", fails)
    layer, x = haloconv.Conv2d(16, 16, 3, family="direct"), torch.randn(1, 16, 9, 9, requires_grad=True)
    with h200():
        for _ in range(2):
            layer(x).sum().backward()
    haloconv.Conv2d(3, 4, 3)(torch.randn(1, 3, 9, 9)).sum().backward()
