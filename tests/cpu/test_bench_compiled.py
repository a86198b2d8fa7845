"""``haloconv bench --models --compiled``: every variant of running a network is checked, timed and recorded, once.

What stands for Inductor here runs the graph as it is, and times are given: nothing is measured.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from haloconv.bench.networks import compiled, whole
from haloconv.bench.networks.compiled import VARIANTS, CutShortError, Piece, PieceControl, try_piece
from haloconv.bench.networks.network import Effort, NetworkCase, Setting
from haloconv.bench.networks.workers import GpuLock
from haloconv.bench.stale import is_stale
from haloconv.bench.trial import Budget
from haloconv.cli import app
from haloconv.cli.bench import command as bench
from haloconv.cli.bench import compiled as verb
from haloconv.cli.bench.models import NetworkOrder
from haloconv.tune.timing import Timing

CPU = torch.device("cpu")
BUDGET = Budget(seconds=0.0, min_runs=1)
EFFORT = Effort(BUDGET)
NET = """
import torch
from torch import nn

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))

def get_inputs():
    return [torch.randn(2, 3, 8, 8)]

def get_init_inputs():
    return []
"""
MS = {str(variant): ms for variant, ms in zip(VARIANTS, (3.0, 2.0, 1.5, 2.5, 1.0, 1.2, 2.2), strict=True)}


class Inductor:
    """Stands for Inductor. Notes how it was asked to compile; ``factor`` of the output is 1 where it is right."""

    asked: list[tuple] = []
    factor = 1.0

    def __init__(self, mode: str | None, options: dict | None, *others: object) -> None:
        self.mode = mode

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable:
        self.asked.append((self.mode, torch._inductor.config.freezing, torch.is_grad_enabled()))
        if self.mode != "max-autotune":
            return graph.forward
        return lambda *given: tuple(each * self.factor for each in graph.forward(*given))


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Inductor)
    monkeypatch.setattr(Inductor, "asked", [])

    def timed(calls: dict[str, Callable], device: torch.device, budget: Budget) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: Timing(MS[name], 0.01, 3) for name in calls}

    monkeypatch.setattr(compiled, "compared", timed)


@pytest.fixture
def case(tmp_path: Path) -> NetworkCase:
    (tmp_path / "net.py").write_text(NET)
    return NetworkCase("net", str(tmp_path / "net.py"))


def row_of(piece: Piece, variants: dict) -> dict:
    key = dict(zip(("case", "direction", "precision", "layout"), piece.key, strict=True))
    return {**key, "variants": variants, **compiled._decided_by(set(), "None")}


def piece(case: NetworkCase, direction: str, precision: str = "fp32") -> Piece:
    return Piece(Setting(case, precision, "nhwc"), direction)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("direction", ["forward", "step"])
def test_every_way_is_checked_and_timed(case: NetworkCase, direction: str, precision: str) -> None:
    row = try_piece(piece(case, direction, precision), EFFORT, CPU)
    assert [row[name] for name in ("case", "direction", "precision", "layout")] == ["net", direction, precision, "nhwc"]
    of_both = VARIANTS[:-1] if direction == "step" else VARIANTS  # norms that are trained are not fused
    assert {name: variant["ms"] for name, variant in row["variants"].items()} == {str(x): MS[str(x)] for x in of_both}
    assert [*MS][0::3] == ["PyTorch eager", "haloconv eager", "haloconv fused"]
    for variant in row["variants"].values():
        assert variant["complaint"] is None and 0 <= variant["error"] < (1e-5 if precision == "fp32" else 0.1)
        assert variant["first_call_s"] >= 0 and variant["peak_bytes"] is None
    assert [variant["graphs"] > 0 for variant in row["variants"].values()] == [
        bool(variant.mode) for variant in of_both
    ]
    modes = {mode for mode, *_ in Inductor.asked}
    assert modes == {"default", "max-autotune", None}
    frozen = {(mode == "max-autotune" and direction == "forward", freezing) for mode, freezing, _ in Inductor.asked}
    assert frozen == {(each, each) for each, _ in frozen}


def test_a_way_that_computes_something_else_has_a_complaint(case: NetworkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inductor, "factor", 1.001)
    variants = try_piece(piece(case, "forward"), EFFORT, CPU)["variants"]
    wrong = [name for name, variant in variants.items() if variant["complaint"]]
    assert wrong == ["PyTorch max-autotune", "haloconv max-autotune"]


def test_a_way_that_raises_is_not_timed_and_the_others_are(case: NetworkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(Inductor, "__call__", refuse)
    variants = try_piece(piece(case, "forward"), EFFORT, CPU)["variants"]
    timed = {name for name, variant in variants.items() if "ms" in variant}
    assert timed == {"PyTorch eager", "haloconv eager", "haloconv fused"}
    assert all("no compiler here" in variants[name]["complaint"] for name in variants if "ms" not in variants[name])


@pytest.mark.parametrize("direction", ["forward", "step"])
def test_what_all_are_set_against_is_computed_once(
    case: NetworkCase, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where something is judged on several draws; and each of ours is set against it as before."""
    known: list[tuple[int, bool]] = []
    truth, draw = whole._truth, whole._draw
    drawn: list[int] = []
    monkeypatch.setattr(whole, "_truth", lambda *given: (known.append(given), truth(*given))[1])
    monkeypatch.setattr(whole, "_draw", lambda *given: (drawn.append(given[1]), draw(*given))[1])
    monkeypatch.setattr(Inductor, "factor", 1.001)
    variants = try_piece(piece(case, direction), EFFORT, CPU)["variants"]
    assert len(known) == whole.DRAWS == len({*drawn}) and len(drawn) > len(known)
    assert [name for name, each in variants.items() if each["complaint"]] == [
        "PyTorch max-autotune",
        "haloconv max-autotune",
    ]


def test_a_row_names_the_kernels_that_ran_and_what_chose_them(
    case: NetworkCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Launch:
        def __init__(self, kernel: str) -> None:
            self.source = type("Source", (), {"kernel": kernel})

        def __call__(self, *pointers: int) -> None:
            ran.append(pointers)

    ran: list[tuple[int, ...]] = []
    plain, fused = Launch.__call__, compiled.fuse
    monkeypatch.setattr(compiled, "Launch", Launch)
    assert try_piece(piece(case, "forward"), EFFORT, CPU)["kernel"] == "aten"

    def launch(*called: object) -> None:
        for name in ("halo_sm80/pack", "halo_sm80/conv"):
            Launch(name)(1)

    def launching(model: torch.nn.Module) -> None:
        model.register_forward_hook(launch)
        fused(model)

    monkeypatch.setattr(compiled, "fuse", launching)
    row = try_piece(piece(case, "forward"), EFFORT, CPU)
    assert row["kernel"] == "halo_sm80/conv" and ran and Launch.__call__ is plain
    assert not is_stale(row)
    for changed in ({"source": "0" * 64}, {"backend": "0" * 64}, {"backend": None}, {"kernel": "halo_sm80/gone"}):
        assert is_stale({**row, **changed}), changed


def test_the_gpu_is_lent_while_inductor_compiles_and_does_not_search(case: NetworkCase) -> None:
    class Lock:
        held, lent = False, 0

        def acquire(self) -> None:
            assert not self.held
            self.held = True

        def release(self) -> None:
            assert self.held
            self.held, self.lent = False, self.lent + 1

    lock, compile_graph, held = Lock(), Inductor.__call__, []

    def noted(self: Inductor, *given: object) -> Callable:
        held.append((self.mode, lock.held))
        return compile_graph(self, *given)

    with pytest.MonkeyPatch.context() as patched, GpuLock(lock) as gpu:
        patched.setattr(Inductor, "__call__", noted)
        try_piece(piece(case, "step"), EFFORT, CPU, PieceControl(gpu=gpu))
        assert lock.held and Inductor.__call__ is noted
    assert held and all(is_held == (mode == "max-autotune") for mode, is_held in held)
    assert not lock.held and lock.lent == 1 + sum(mode != "max-autotune" for mode, _ in held) and gpu.waited_s >= 0


def test_the_next_piece_compiles_anew(case: NetworkCase) -> None:
    counts = []
    for _ in range(2):
        try_piece(piece(case, "forward"), EFFORT, CPU)
        counts.append(len(torch._dynamo.eval_frame.cached_backends))
        compiled.forget_compiled()
        counts.append(len(torch._dynamo.eval_frame.cached_backends))
    assert counts[0] == counts[2] > 0 == counts[1] == counts[3]


def test_a_piece_ends_between_two_variants_when_the_time_is_up(case: NetworkCase) -> None:
    with pytest.raises(CutShortError, match="after 0 variants"):
        try_piece(piece(case, "forward"), EFFORT, CPU, PieceControl(deadline=0.0))


def test_the_verb_records_each_row_tells_both_sides_at_their_best_and_goes_on(
    case: NetworkCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(limit_s: float | None = None) -> tuple[bool, str]:
        console = Console(width=200, file=io.StringIO())
        order = NetworkOrder([case], ["fp32"], ["nchw", "nhwc"], EFFORT, limit_s)
        return verb.bench_compiled(order, [CPU], tmp_path, console), " ".join(console.file.getvalue().split())

    tried = []

    def try_one(piece: Piece, *others: object) -> dict:
        tried.append(piece.key)
        factor = 1.0 if piece.setting.layout == "nchw" else 0.5
        variants = {
            name: {"ms": ms * factor, "first_call_s": 7.0, "peak_bytes": 100, "complaint": None}
            for name, ms in MS.items()
        }
        variants["haloconv compiled"] |= {"first_call_s": 9.0, "peak_bytes": 103}
        return row_of(piece, variants)

    monkeypatch.setattr(verb, "try_piece", try_one)
    passed, text = run(limit_s=-1.0)
    assert not passed and not tried and text.count("cut, 0 s of --limit are left") == 4
    passed, text = run()
    assert passed and len(tried) == 4 and "7.0, 9.0 1.50x 1.03x" in text
    (daily,) = tmp_path.glob("20*-compiled.jsonl")
    rows = [json.loads(line) for line in daily.read_text().splitlines()]
    assert len(rows) == 4 and all({"gpu", "torch", "commit", "date"} <= row.keys() for row in rows)
    assert (tmp_path / "latest-compiled.jsonl").exists()
    passed, text = run()
    assert passed and len(tried) == 4 and "4 rows are in" in text


def test_one_direction_is_run_where_it_alone_is_asked_for(
    case: NetworkCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def try_one(piece: Piece, *others: object) -> dict:
        tried.append(piece.direction)
        return row_of(piece, {})

    monkeypatch.setattr(verb, "try_piece", try_one)
    order = NetworkOrder([case], ["fp32"], ["nchw"], EFFORT, directions=["step"])
    verb.bench_compiled(order, [CPU], tmp_path, Console(width=200, file=io.StringIO()))
    assert tried == ["step"]


def test_memory_or_times_that_are_not_known_are_dashes() -> None:
    assert verb._compared(None, None)[0] == "–"
    side = "PyTorch eager", {"ms": 2.0, "first_call_s": 1.0, "peak_bytes": None}
    assert verb._compared(side, side) == ["1.0, 1.0", "1.00x", verb.ratio_text(None)]


def test_the_option_gives_the_networks_to_this_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(bench, "bench_compiled", lambda order, *others: orders.append((order, *others)) or True)
    words = ["bench", "--models", "--compiled", "--case", "unet", "--precision", "bf16", "--limit", "60"]
    assert CliRunner().invoke(app, words).exit_code == 0
    ((order, devices, folder, _),) = orders
    assert [str(setting) for setting in order.settings] == ["unet bf16 nchw", "unet bf16 nhwc"] and order.limit_s == 60
    assert devices == [torch.device("cuda", 0)] and folder.name == "nvidia-h200"
    assert order.directions == ("forward", "step") and order.jobs == 1
    assert CliRunner().invoke(app, [*words, "--jobs", "3"]).exit_code == 0 and orders[-1][0].jobs == 3

    assert CliRunner().invoke(app, [*words, "--direction", "step"]).exit_code == 0
    assert orders[-1][0].directions == ["step"]
    assert CliRunner().invoke(app, [*words, "--direction", "forward"]).exit_code == 0
    assert orders[-1][0].directions == ["forward"]
    for refused in ([*words, "--direction", "wgrad"], ["bench", "--models", "--direction", "step"]):
        result = CliRunner().invoke(app, refused)
        assert result.exit_code == 2 and "fprop or step" in " ".join(result.output.split())
