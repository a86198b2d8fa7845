"""Choices for a convolution with what follows it: which records decide, which passes count, what is timed of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import haloconv
from haloconv import backend as backends
from haloconv import plan
from haloconv.choose.buckets import layer_key, read_layer, size_of
from haloconv.choose.choice import Choice, choose
from haloconv.choose.records import Record, shelf_of
from haloconv.choose.rules import by_rule
from haloconv.choose.rules_products import wins_as_a_whole
from haloconv.choose.whole import saved_ms
from haloconv.device import DeviceFacts, set_stand_in
from haloconv.epilogue import applied
from haloconv.families import FAMILIES
from haloconv.families.base import BoundCall, Config
from haloconv.families.files import device_hash
from haloconv.fusion import call as calls
from haloconv.problem import ACTIVATIONS, Epilogue, Problem, Request
from haloconv.tune import measure
from haloconv.tune.problems import wholes_of
from tests.cpu.test_measured import A100, H200
from tests.tuned import LAYER, Clock, FakeConfig, FakeFamily, fake_device, fake_gpu, favouring, only, record
from tools.measured import stood_in

CPU = torch.device("cpu")
RELU, NORM = Epilogue(activation="relu"), Epilogue(scale=True)
LONG, ALL = Epilogue(True, "silu"), Epilogue(True, "relu", True)
NO_RATES = replace(H200, name="NVIDIA H20")
BIG = replace(LAYER, n=8, c=64, h=112, w=112, k=64)  # one pass over it moves 25 MB: 6 us at 4.3 TB/s


def compiled(epilogue: Epilogue) -> Epilogue:
    return epilogue._replace(compiled=True)


class Whole(FakeFamily):
    """A fake whose kernels apply epilogues, in fp32 and rounded once."""

    has_epilogue = True
    has_padding_modes = False

    def bind(self, request: Request, config: Config) -> BoundCall:
        problem = request.problem
        run = super().bind(replace(request, problem=replace(problem, dtype=torch.float32)), config)

        def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, *more: torch.Tensor) -> torch.Tensor:
            sums = run(x, w, None if problem.epilogue.scale else b)
            return applied(sums, b, problem.epilogue, *(each.float() for each in more)).to(problem.dtype)

        return call


@pytest.fixture
def h200(tmp_path: Path) -> Iterator[None]:
    """A GPU whose copy rate is known, with fakes: ``halo_sm90`` applies epilogues, ``halo_sm80`` does not."""
    with fake_gpu(tmp_path), only(FAMILIES["direct"], FakeFamily("halo_sm80"), Whole("halo_sm90")):
        set_stand_in(fake_device(H200))
        yield


def known(problem: Problem, own_ms: float, own: str = "halo_sm90/conv", facts: DeviceFacts = H200) -> None:
    """A record of the problem: PyTorch takes 0.1 ms."""
    wins = measure.is_ahead(own_ms, 0.1, problem.direction)
    made: Record = record(
        problem, own.partition("/")[0] if wins else "aten", facts, own=own, own_ms=own_ms, aten_ms=0.1,
        kernel=own if wins else "aten", ms=min(own_ms, 0.1), source=device_hash(own),
    )  # fmt: skip
    shelf_of(facts).add([made])


# --- what records are found by


@pytest.mark.parametrize("epilogue", [Epilogue(True, "gelu_tanh", True), NORM, RELU, Epilogue(residual=True), LONG])
@pytest.mark.parametrize("in_a_graph", [False, True])
def test_a_record_names_what_follows(epilogue: Epilogue, in_a_graph: bool) -> None:
    whole = replace(LAYER, bias=not epilogue.scale, epilogue=epilogue._replace(compiled=in_a_graph))
    assert read_layer(layer_key(whole), size_of(whole)) == whole
    others = [LAYER, *(replace(whole, epilogue=each) for each in (epilogue._replace(compiled=not in_a_graph), ALL))]
    assert layer_key(whole) not in map(layer_key, others)
    assert layer_key(whole.toward("dgrad")) == layer_key(LAYER.toward("dgrad"))


def test_its_names_are_those_of_an_epilogue() -> None:
    assert layer_key(replace(LAYER, bias=True, epilogue=compiled(RELU))).endswith("fp16 nchw bias relu compiled")
    for wrong in (" silu scale", " swish", " compiled residual", "relu", " relu relu"):
        with pytest.raises(ValueError, match="no layer of a record"):
            read_layer(layer_key(LAYER) + wrong, size_of(LAYER))
    assert all(str(Epilogue(activation=each)) == each for each in ACTIVATIONS)


# --- which passes count


@pytest.mark.parametrize(
    ("family", "bias", "epilogue", "passes"),
    [
        ("halo_sm90", True, Epilogue(), 1),
        ("halo_sm90", True, RELU, 2),
        ("halo_sm90", False, ALL, 3),
        ("halo_sm90", True, compiled(RELU), 1),
        ("halo_sm90", False, compiled(ALL), 1),
        ("halo_sm80", True, RELU, 2),
        ("halo_sm80", False, ALL, 3),
        ("grouped_sm90", True, Epilogue(), 1),
        ("grouped_sm90", True, RELU, 1),
        ("grouped_sm90", False, ALL, 0),
        ("grouped_sm90", True, compiled(RELU), 0),
    ],
)
def test_a_pass_for_each_part_or_one_in_a_compiled_graph(
    family: str, bias: bool, epilogue: Epilogue, passes: int
) -> None:
    whole = replace(BIG, bias=bias, epilogue=epilogue)
    y_bytes = 8 * 64 * 112 * 112 * 2
    assert saved_ms(whole, BIG, family, H200.name) == pytest.approx(passes * 2 * y_bytes / 4.3e12 * 1e3)
    assert saved_ms(BIG, whole, family, H200.name) == -saved_ms(whole, BIG, family, H200.name)
    assert saved_ms(whole, BIG, family, "Test GPU 9000") == 0
    assert saved_ms(BIG, whole, family, "Test GPU 9000") == (None if passes else 0)


# --- which records decide


@pytest.mark.parametrize(
    ("own_ms", "bias", "epilogue", "family"),
    [
        (0.100, False, Epilogue(), "aten"),  # a tie
        (0.100, False, RELU, "halo_sm90"),
        (0.100, True, Epilogue(), "halo_sm90"),
        (0.104, False, compiled(ALL), "aten"),  # one pass, of 6 us
        (0.101, False, compiled(ALL), "halo_sm90"),
        (0.104, False, ALL, "halo_sm90"),  # three of them
        (0.115, False, ALL, "aten"),
    ],
)
def test_a_record_of_the_convolution_counts_what_is_saved(
    own_ms: float, bias: bool, epilogue: Epilogue, family: str, h200: None
) -> None:
    known(BIG, own_ms)
    choice = choose(replace(BIG, bias=bias, epilogue=epilogue), CPU)
    kernel = "aten" if family == "aten" else "" if epilogue.residual else "halo_sm90/conv"  # "": the family's first
    assert (choice.family, choice.kernel) == (family, kernel)
    assert ("as asked here" not in choice.reason) == choice.measured == (not bias and epilogue == Epilogue())


def test_a_family_without_epilogues_saves_the_bias_alone(h200: None) -> None:
    known(BIG, 0.1, "halo_sm80/conv")
    wholes = {each: replace(BIG, bias=True, epilogue=each) for each in (Epilogue(), RELU, compiled(RELU))}
    chosen = {epilogue: choose(whole, CPU).family for epilogue, whole in wholes.items()}
    assert chosen == {Epilogue(): "halo_sm80", RELU: "halo_sm80", compiled(RELU): "aten"}


def test_a_bias_that_inductor_adds_on_the_way_wins_nothing(h200: None) -> None:
    """The record with a bias has PyTorch's pass for it, which a compiled graph does not make."""
    known(replace(BIG, bias=True), 0.095, "halo_sm80/conv")
    assert choose(replace(BIG, bias=True), CPU).family == "halo_sm80"
    assert choose(replace(BIG, bias=True, epilogue=RELU), CPU).family == "halo_sm80"
    assert choose(replace(BIG, bias=True, epilogue=compiled(RELU)), CPU).family == "aten"


def test_a_record_with_a_bias_serves_without_it(h200: None) -> None:
    known(replace(BIG, bias=True), 0.095)
    assert choose(replace(BIG, bias=True), CPU).family == "halo_sm90"
    assert choose(BIG, CPU).family == "aten" and "as asked here" in choose(BIG, CPU).reason
    assert choose(replace(BIG, epilogue=compiled(LONG)), CPU).family == "halo_sm90", "a pass as that for the bias"
    unknown = replace(H200, name="Test GPU 9000")
    set_stand_in(fake_device(unknown))
    known(replace(BIG, bias=True), 0.05, facts=unknown)
    assert choose(replace(BIG, bias=True), CPU).measured
    assert "tuned" not in choose(BIG, CPU).reason, "what a pass takes there is not known"


def test_a_record_of_the_whole_decides(h200: None) -> None:
    known(BIG, 0.05)
    known(replace(BIG, epilogue=RELU), 0.2)
    assert choose(BIG, CPU).family == "halo_sm90"
    choice = choose(replace(BIG, epilogue=RELU), CPU)
    assert choice.family == "aten" and choice.measured and "as asked" not in choice.reason
    assert choose(replace(BIG, epilogue=compiled(RELU)), CPU).family == "halo_sm90", "another key"


def test_what_is_saved_is_that_of_the_size_that_was_measured(h200: None) -> None:
    known(BIG, 0.103)
    near = replace(BIG, n=10, epilogue=compiled(ALL))  # of whose size a pass would be enough
    assert choose(near, CPU).family == "aten" and "measured at 8 x 112 x 112" in choose(near, CPU).reason


def test_a_shipped_record_for_another_epilogue_is_looked_at_first(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known(BIG, 0.1)
    shelf, looked = shelf_of(H200), []
    shelf._own, shelf._shipped = shelf._shipped, shelf._own
    monkeypatch.setattr("haloconv.choose.trust.has_stamp", lambda record: False)
    monkeypatch.setattr("haloconv.choose.trust.examine", lambda *asked: looked.append(asked) or False)
    assert choose(BIG, CPU).family == "aten" and not looked
    choose(replace(BIG, epilogue=RELU), CPU)
    ((asked, request, config),) = looked
    assert (asked.family, asked.kernel) == ("halo_sm90", "halo_sm90/conv") and request.problem.epilogue == RELU


# --- rules


@pytest.mark.parametrize(
    ("change", "epilogue", "family"),
    [
        ({}, Epilogue(), "aten"),
        ({}, compiled(LONG), "halo_sm90"),
        ({"bias": True}, Epilogue(), "halo_sm90"),
        ({"n": 1, "h": 56, "w": 56}, LONG, "aten"),  # too few pixels
        ({"c": 512, "k": 512}, compiled(LONG), "aten"),  # a pass is little beside so many products
        ({"c": 256, "k": 256}, compiled(LONG), "aten"),
        ({"c": 256, "k": 256}, ALL, "halo_sm90"),
        ({"r": 1, "s": 1, "padding": (0,) * 4, "c": 512, "k": 1024}, compiled(RELU), "halo_sm90"),
        ({"r": 1, "s": 1, "padding": (0,) * 4, "c": 2048}, compiled(RELU), "aten"),  # x is most of what moves
        ({"r": 1, "s": 1, "padding": (0,) * 4, "c": 64, "h": 57, "w": 57, "layout": "nchw"}, ALL, "aten"),  # odd planes
        ({"stride": (2, 2)}, LONG, "aten"),
        ({"direction": "dgrad"}, Epilogue(), "aten"),
    ],
)
def test_a_rule_counts_what_is_saved(change: dict, epilogue: Epilogue, family: str) -> None:
    problem = replace(BIG, **{"n": 32, "layout": "nhwc", **change}, epilogue=epilogue)
    for facts, ours in ((H200, family != "aten"), (NO_RATES, False), (A100, False)):  # two have no measured rates
        with stood_in(facts):
            found, _, rule = by_rule(problem, CPU)  # layers that are ahead by themselves have a rule of their own
            assert ours == (wins_as_a_whole(problem, CPU) if "each_tap" in rule else found == "halo_sm90")


# --- what is measured


class Calls(TorchDispatchMode):
    """The convolutions and the passes that PyTorch was asked for, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        name = func.overloadpacket.__name__
        if name in ("convolution", "relu_", "add_", "addcmul", "silu", "relu", "add"):
            bias = name == "convolution" and args[2] is not None
            self.names.append(name + " with a bias" * bias)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("bias", "epilogue", "theirs"),
    [
        (True, RELU, ["convolution with a bias", "relu_"]),
        (False, LONG, ["convolution", "addcmul", "silu"]),
        (False, ALL, ["convolution", "addcmul", "add", "relu_"]),
        (True, compiled(RELU), ["convolution", "relu_"]),
        (False, compiled(LONG), ["convolution", "relu_"]),
        (False, compiled(ALL), ["convolution", "add_"]),
    ],
)
@pytest.mark.usefixtures("h200")
def test_pytorchs_side_is_its_convolution_and_the_passes_after_it(
    bias: bool, epilogue: Epilogue, theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a fake that applies epilogues the whole is verified and timed, of one that does not the passes, too."""
    timed: dict[str, list[str]] = {}

    class Listening(Clock):
        def __call__(self, variants: dict, **how: object) -> dict:
            for name, run in variants.items():
                with Calls() as made:
                    run()
                timed[name] = made.names
            return super().__call__(variants, **how)

    whole = replace(LAYER, bias=bias, epilogue=epilogue)
    with only(FakeFamily("special", (FakeConfig(4),)), Whole("fused", (FakeConfig(4), FakeConfig(8, "wrong")))):
        monkeypatch.setattr(measure, "compare", Listening(favouring("fused")))
        (entry,) = measure.prepared([whole], CPU)
        outcome = measure.measure(entry)
    assert timed["aten"] == theirs and timed["special (rows4)"][1:] == theirs[1:]
    assert "fused (rows4)" in timed and "fused (rows8)" not in timed, "what is wrong is not timed"
    made = outcome.record
    assert (made.layer, made.family) == (layer_key(whole), "fused") and made.error <= made.error_limit
    assert len(outcome.rejected) == 1 and "fused (rows8) is not right" in outcome.rejected[0]


# --- who asks


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """What the backend and fused calls have chosen; PyTorch is chosen for all."""
    problems: list[Problem] = []

    def choose_now(request: Request, family: str) -> Choice:
        problems.append(request.problem)
        return Choice("aten", "chosen by the test")

    for each in (backends, calls):
        monkeypatch.setattr(each, "choose_now", choose_now)
    return problems


class Block(nn.Module):
    """Convolutions whose results are read by convolutions, by a pool, and by nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.next = nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)
        self.pooled, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.silu(self.next(functional.relu(self.norm(self.conv(x)))))
        y = functional.avg_pool2d(functional.relu(self.pooled(y)), 2)
        return self.last(y)


def image() -> torch.Tensor:
    return torch.randn(2, 4, 10, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_the_backend_asks_for_the_whole_and_leaves_inductor_what_pytorch_wins(asked: list[Problem]) -> None:
    """What reads a result from memory makes a pass of its own of what follows; a pool takes it in."""
    graphs: list[tuple[str, str]] = []

    def looking(graph: torch.fx.GraphModule, inputs: object) -> Callable:
        before = str(graph.graph)
        backends.replace_convolutions(graph)
        graphs.append((before, str(graph.graph)))
        return graph.forward

    with torch.no_grad():
        torch.compile(Block().eval(), backend=looking)(image())
    (before, after), *_ = graphs
    assert before == after, "norm, silu and relu are Inductor's, in one kernel"
    assert [(each.bias, each.epilogue) for each in asked] == [
        (False, compiled(Epilogue(True, "relu"))),
        (True, compiled(Epilogue(activation="silu"))),
        (False, Epilogue()),
        (True, Epilogue()),
    ]


def test_a_fused_call_asks_for_the_whole(asked: list[Problem]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.SiLU()).eval()
    haloconv.fuse(model)
    with torch.no_grad():
        model(image())
    assert [(each.bias, each.epilogue) for each in asked] == [(True, RELU), (False, Epilogue(True, "silu"))]


def test_the_operator_asks_for_what_the_backend_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[Problem] = []
    chosen = Choice("aten", "chosen by the test")
    monkeypatch.setattr(plan, "choose_now", lambda request, family: problems.append(request.problem) or chosen)
    plan.clear_plans()
    x, w, spec = image(), torch.randn(6, 4, 3, 3), ((1, 1), (0,) * 4, (1, 1), 1, None, "auto", False)
    torch.ops.haloconv.fprop_epilogue(x, w, torch.randn(6), None, False, "silu", *spec)
    torch.ops.haloconv.fprop(x, w, None, *spec)
    assert [each.epilogue for each in problems] == [compiled(Epilogue(activation="silu")), Epilogue()]
    plan.clear_plans()


# --- tune


@pytest.mark.usefixtures("fresh_dynamo", "h200")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_fused_and_compiled_models_are_tuned_as_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compare", Clock(favouring("halo_sm90")))
    model, x = Block().eval(), image()
    graph = torch.compile(model, backend="haloconv")
    wholes = [compiled(Epilogue(True, "relu")), compiled(Epilogue(activation="silu")), Epilogue(), Epilogue()]
    posed = wholes_of(graph, x)  # two with what follows, and two alone, as the graph runs in channels_last
    assert {each.problem.layout for each in posed} == {"nhwc"}
    assert [each.layer for each in posed] == ["conv", "next", "pooled", "last"]
    assert [each.problem.epilogue for each in posed] == wholes
    posed = wholes_of(graph, x.to(memory_format=torch.channels_last))
    assert [each.problem.epilogue for each in posed] == wholes[:2]
    assert not any(each.problem.epilogue.scale for each in wholes_of(graph.train(), x)), "gradients are recorded"
    assert not wholes_of(model.eval(), x)
    haloconv.fuse(model)
    found = wholes_of(model, x)
    assert [each.problem.epilogue.compiled for each in found] == [False] * 3
    report = haloconv.tune(model, x, directions=("fprop",), progress=False)
    assert "7 problems were measured" in report.notes[0]
    assert all(choose(each.problem, CPU).measured for each in found)
    assert not any(module._forward_pre_hooks for module in model.modules())
