"""An exported file's C++ and kernels without a GPU: its launches are the families', its results are right."""

from __future__ import annotations

import locale
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch

from haloconv import emulator
from haloconv.choose.choice import Choice
from haloconv.emulator import emulated_device
from haloconv.emulator.build import _run
from haloconv.export.export import export, facts_of, record
from haloconv.export.layers import Layer, choose_and_record, layers_of
from haloconv.export.record import CPU, Clear, Forms, recorder, tape_of
from haloconv.families import FAMILIES, OWN
from haloconv.problem import DIRECTIONS, dense_request
from haloconv.problem_file import load_problem_file
from tests import emulated_halo_sm90, emulated_halo_sm90_implicit_gemm, emulated_halo_sm90_wgrad_ss
from tests.cases import CASES
from tests.emulated import MODULES
from tests.exported import Host, emulate, load_text, on_emulator
from tests.fuzz.campaign import commit_seed

MISSING = emulator.available()
ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = [
    *sorted((ROOT / "examples" / "problems").glob("*.py")),
    *sorted((ROOT / "tests" / "problems").glob("[!_]*.py")),
]
MOST_DRAWN = 120  # cases of a family, in a direction and a layout
NORM_LIMIT = 2e-3  # TF32 in every layer

pytestmark = [
    pytest.mark.usefixtures("emulator_cache"),
    pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}"),
]

SMALL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 24, (1, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2))

    def forward(self, x):
        return torch.tanh(self.conv(x))  # smooth: a rounded sum changes no slope by much


def get_inputs():
    return [torch.randn(2, 6, 9, 24)]


def get_init_inputs():
    return []
"""


HALVES = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(24, 32, 3, padding=1, bias=False).half()

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.randn(2, 24, 7, 7).half()]


def get_init_inputs():
    return []
"""


def recorded(path: Path, arch: str, family: str = "auto") -> list[Layer]:
    """The layers as ``export`` records them."""
    layers = layers_of(load_problem_file(path), None)
    record(layers, facts_of(arch), family)
    return layers


def names_of(layers: list[Layer]) -> set[str]:
    return {choice.family for layer in layers for choice in layer.choices.values()}


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.stem)
def test_the_file_launches_what_the_families_launch(path: Path, tmp_path: Path) -> None:
    """Geometry, every field of every kernel's struct, maps, fills and streams, for the full sizes."""
    layers = recorded(path, "sm_90a")
    host = Host(load_text(export(path, arch="sm_90a")), layers, tmp_path, lambda launch, address: None)
    for layer in layers:
        for name, tape in layer.functions.items():
            places = [(place + 1) << 44 for place in range(len(tape.operands) + 2)]
            getattr(host, name)(*places, 0x5EED0)
    assert host.faults == []
    assert host.launches == sum(len(tape.launches) for layer in layers for tape in layer.tapes.values()) > 0


@pytest.mark.parametrize(("arch", "family"), [("sm_90a", "auto"), ("sm_70", "direct")])
def test_results_are_right(arch: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.py"
    path.write_text(SMALL, encoding="utf-8")
    layers = recorded(path, arch, family)
    expected = {"direct"} if family == "direct" else {"halo_sm90", "halo_sm80_wgrad"}
    assert names_of(layers) == expected
    if family == "auto":  # rows that no tap reaches are filled with zeros
        assert any(isinstance(step, Clear) for step in layers[0].tapes["dgrad"].steps)
    module = load_text(export(path, arch=arch, family=family))
    host = Host(module, layers, tmp_path, emulate)
    torch.manual_seed(0)
    (x,), model, theirs = module.get_inputs(), module.ModelNew(), load_problem_file(path).model()
    theirs.load_state_dict(model.state_dict())
    x.requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    want = theirs.double()(exact_x)
    dy = torch.randn(want.shape)
    with emulated_device(arch=arch) as device, on_emulator(module, host, device, monkeypatch):
        y = model(x)
        gradients = torch.autograd.grad(y, [x, *model.parameters()], dy)
    assert host.faults == []
    exact = torch.autograd.grad(want, [exact_x, *theirs.parameters()], dy.double())
    names = ["y", "x", *dict(model.named_parameters())]
    for name, got, right in zip(names, [y, *gradients], [want, *exact], strict=True):
        error = (got.double() - right).norm() / right.norm()
        assert error < NORM_LIMIT, f"{name}: {error:.2e}"


@pytest.mark.parametrize("family", OWN)
def test_every_config_of_a_family_can_be_recorded(family: str) -> None:
    """Cases that the commit draws, in either layout: each config uses tensors in ways that a recorded one has."""
    drawn, recorded_configs = Random(f"{commit_seed()} {family}"), 0
    cases = MODULES[family].CASES if family in MODULES else CASES
    every = list(product(cases, DIRECTIONS, ("nchw", "nhwc")))
    for one, direction, layout in drawn.sample(every, min(MOST_DRAWN, len(every))):
        precision = "tf32" if FAMILIES[family].tensor_cores and torch.float32 in one.dtypes else None
        dtype = drawn.choice(one.dtypes)
        problem = replace(one.problem(), dtype=dtype, precision=precision if dtype == torch.float32 else "ieee")
        posed = problem.toward(direction)
        with recorder(facts_of("sm_90a")) as device:
            if FAMILIES[family].why_not(posed, CPU) is not None:
                continue
            request = dense_request(replace(posed, layout=layout), CPU)
            for config in FAMILIES[family].configs(request):
                choice = Choice(family, "by a test", measured=True, kernel=config.kernel, config=config.key)
                tape = tape_of(device, posed, choice, Forms(layout, layout))
                assert tape.launches, (one.name, direction, layout, config)
                recorded_configs += 1
    assert recorded_configs


def test_clusters_are_launched_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight gradient whose parts are a cluster: without one each block would write its own sums as the result."""
    path = tmp_path / "clusters.py"
    path.write_text(HALVES, encoding="utf-8")
    with emulated_halo_sm90.forced(emulated_halo_sm90_wgrad_ss.CLUSTER):
        layers = recorded(path, "sm_90a", "halo_sm90")
        text = export(path, arch="sm_90a", family="halo_sm90")
    (launch,) = [each for each in layers[0].tapes["wgrad"].launches if each.shape.cluster > 1]
    assert launch.shape.cluster == 2 and text.count('launch_clusters("') == 1
    module = load_text(text)
    host = Host(module, layers, tmp_path, emulate)
    model = module.ModelNew()
    x = torch.randint(-2, 3, (2, 24, 7, 7)).half()
    with emulated_device(arch="sm_90a") as device, on_emulator(module, host, device, monkeypatch):
        y = model(x)
        dy = torch.randint(-2, 3, y.shape).to(y.dtype)
        (got,) = torch.autograd.grad(y, [model.conv.weight], dy)
    assert host.faults == []
    want = torch.nn.grad.conv2d_weight(x.double(), got.shape, dy.double(), padding=1)
    assert torch.equal(got.double(), want.half().double())


FAR_APART = HALVES.replace("3, padding=1, bias=False).half()", "3, padding=3, dilation=3).half()").replace(
    "randn(2, 24, 7, 7).half()", "randn(2, 24, 7, 7).half().to(memory_format=torch.channels_last)"
)


def test_pixels_come_by_im2col(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of several taps in channels_last: corners and steps are in the file, and its results are right."""
    path = tmp_path / "apart.py"
    path.write_text(FAR_APART, encoding="utf-8")
    with emulated_halo_sm90_implicit_gemm.forced("taps"):
        layers = recorded(path, "sm_90a", "halo_sm90")
        text = export(path, arch="sm_90a", family="halo_sm90")
    launches = [tape.launches[-1] for name, tape in layers[0].tapes.items() if name in ("fprop", "dgrad")]
    assert {each.source.kernel for each in launches} == {"halo_sm90/implicit_gemm"} and len(launches) == 2
    assert text.count("*/ pixel_map(") == 2 and "/* corners, steps */ {-3, -3}, {-3, -3}, {1, 1}" in text
    module = load_text(text)
    host = Host(module, layers, tmp_path, emulate)
    model, x = module.ModelNew(), torch.randint(-2, 3, (2, 24, 7, 7)).half().requires_grad_()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randint(-2, 3, each.shape))
    with emulated_device(arch="sm_90a") as device, on_emulator(module, host, device, monkeypatch):
        y = model(x)
        dy = torch.randint(-2, 3, y.shape).to(y.dtype)
        (got,) = torch.autograd.grad(y, [x], dy)
    assert host.faults == []
    exact = x.detach().double().requires_grad_()
    want = torch.nn.functional.conv2d(exact, *(each.double() for each in model.parameters()), padding=3, dilation=3)
    assert torch.equal(y.double(), want)
    assert torch.equal(got.double(), torch.autograd.grad(want, [exact], dy.double())[0])


def test_files_without_im2col_have_no_map_of_pixels(tmp_path: Path) -> None:
    path = tmp_path / "halves.py"
    path.write_text(HALVES, encoding="utf-8")
    with emulated_halo_sm90_implicit_gemm.left_out():
        text = export(path, arch="sm_90a", family="halo_sm90")
    assert "Map box_map(" in text and "pixel_map" not in text and "Im2col" not in text


def test_a_wrong_field_would_be_found(tmp_path: Path) -> None:
    """The comparison is of the bytes that the C++ passes on."""
    path = tmp_path / "small.py"
    path.write_text(SMALL, encoding="utf-8")
    layers = recorded(path, "sm_70", "direct")
    text = export(path, arch="sm_70", family="direct").replace("/* pad_left */ 2", "/* pad_left */ 3")
    text = text.replace("Address{workspace}", "Address{workspace + 8}")
    host = Host(load_text(text), layers, tmp_path, lambda launch, address: None)
    for layer in layers:
        for name, tape in layer.functions.items():
            getattr(host, name)(*[(place + 1) << 44 for place in range(len(tape.operands) + 2)], 0x5EED0)
    assert any("pad_left is 3, recorded 2" in fault for fault in host.faults)
    assert any(".partials is" in fault for fault in host.faults)


def test_a_config_that_was_measured_is_the_one_exported() -> None:
    """Not the one that the family's model prefers."""
    (layer,) = layers_of(load_problem_file(PROBLEMS[0]), "tf32")
    with recorder(facts_of("sm_90a")) as device:
        best, other = FAMILIES["halo_sm90"].configs(dense_request(layer.fprop, CPU))[:2]
        tapes = []
        for config in (best, other):
            measured = Choice("halo_sm90", "by a test", measured=True, kernel=config.kernel, config=config.key)
            layer.choices["fprop"] = measured
            choose_and_record(layer, device, "auto")
            tapes.append(layer.tapes["fprop"])
    assert tapes[0] != tapes[1] and layer.choices["fprop"].reason == "by a test"


def test_a_build_s_messages_need_no_locale() -> None:
    """In the locale C, which a library may leave behind, g++'s quotation marks are no text."""
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C")
    try:
        assert _run(["bash", "-c", r"printf '\342\200\230x\342\200\231' >&2; exit 1"]) == "\u2018x\u2019"
    finally:
        locale.setlocale(locale.LC_ALL, before)
