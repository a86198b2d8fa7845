"""Tools that rewrite, compile or export whole models, given accelerated ones: each works or says what to do."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx

import haloconv

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accelerate.md"
ENGINES = [engine for engine in ("x86", "fbgemm", "qnnpack") if engine in torch.backends.quantized.supported_engines]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def net(extent: tuple[int, int] = (1, 3), padding: object = (0, 1)) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, extent, padding=padding, groups=2)
    return nn.Sequential(*layers).eval()


UNEVEN = ((1, 4), "same")  # padded by one column on the left and two on the right


def accelerated(*layer: object) -> nn.Sequential:
    model = net(*layer)
    haloconv.accelerate(model)
    return model


def image() -> torch.Tensor:
    return torch.randn(2, 3, 10, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend of quantised layers that this machine has."""
    if not ENGINES:
        pytest.skip("this PyTorch has no quantised layers")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINES[0]
    yield ENGINES[0]
    torch.backends.quantized.engine = before


def eager(model: nn.Module, engine: str, x: torch.Tensor) -> nn.Module:
    """A model in which prepare has put observers."""
    model = nn.Sequential(quantization.QuantStub(), model, quantization.DeQuantStub()).eval()
    model.qconfig = quantization.get_default_qconfig(engine)
    prepared = quantization.prepare(model)
    prepared(x)
    return prepared


def eager_training(model: nn.Module, engine: str, x: torch.Tensor) -> nn.Module:
    model.train().qconfig = quantization.get_default_qat_qconfig(engine)
    return quantization.prepare_qat(model)


def traced(model: nn.Module, engine: str, x: torch.Tensor) -> nn.Module:
    prepared = quantize_fx.prepare_fx(model, quantization.get_default_qconfig_mapping(engine), (x,))
    prepared(x)
    return prepared


def traced_training(model: nn.Module, engine: str, x: torch.Tensor) -> nn.Module:
    return quantize_fx.prepare_qat_fx(model.train(), quantization.get_default_qat_qconfig_mapping(engine), (x,))


PREPARE = {"prepare": eager, "prepare_qat": eager_training, "prepare_fx": traced, "prepare_qat_fx": traced_training}


def kinds(model: nn.Module) -> list[str]:
    """The classes of all convolutions, by module and name."""
    modules = [each for each in model.modules() if "Conv" in type(each).__name__]
    return sorted(f"{type(each).__module__}.{type(each).__name__}" for each in modules)


@pytest.mark.parametrize("tool", PREPARE)
def test_quantisation_of_our_layers_is_refused_with_the_way_out(tool: str, engine: str) -> None:
    """These tools look layers up by exact type: they would leave ours in floating point without a word."""
    with pytest.raises(RuntimeError, match=r"haloconv.restore\(model\) before prepare"):
        PREPARE[tool](accelerated(), engine, image())


@pytest.mark.parametrize("tool", ["prepare", "prepare_fx"])
def test_a_restored_model_is_quantised_as_one_that_was_never_accelerated(tool: str, engine: str) -> None:
    convert = {"prepare": quantization.convert, "prepare_fx": quantize_fx.convert_fx}[tool]
    restored, x = accelerated(), image()
    haloconv.restore(restored)
    ours, theirs = (convert(PREPARE[tool](model, engine, x)) for model in (restored, net()))
    assert kinds(ours) == kinds(theirs) and all("quantized" in kind for kind in kinds(ours)) and len(kinds(ours)) == 2
    assert torch.equal(ours(x), theirs(x))


def test_a_layer_whose_qconfig_is_none_stays_ours(engine: str) -> None:
    model, x = accelerated(), image()
    mapping = quantization.get_default_qconfig_mapping(engine).set_object_type(haloconv.Conv2d, None)
    converted = quantize_fx.convert_fx(quantize_fx.prepare_fx(copy.deepcopy(model), mapping, (x,)))
    assert kinds(converted) == ["haloconv.module.Conv2d"] * 2
    for layer in (model[0], model[2]):
        layer.qconfig = None
    assert kinds(quantization.convert(eager(model, engine, x))) == ["haloconv.module.Conv2d"] * 2


@pytest.mark.parametrize("tool", ["prepare", "prepare_fx"])
def test_accelerate_leaves_what_is_about_to_be_converted(tool: str, engine: str) -> None:
    prepared = PREPARE[tool](net(), engine, image())
    report = haloconv.accelerate(prepared)
    assert not report.swaps and len(report.left) == 2
    assert all("accelerate after convert" in left.reason and left.convolution for left in report.left)
    with pytest.raises(RuntimeError, match="accelerate after convert"):
        haloconv.accelerate(prepared, strict=True)


def test_dynamic_quantisation_leaves_convolutions_as_they_are(engine: str) -> None:
    """It has none of its own for them, be they PyTorch's or ours."""
    model = nn.Sequential(accelerated(), nn.Flatten(), nn.Linear(960, 4)).eval()
    converted = quantization.quantize_dynamic(model)
    assert kinds(converted) == ["haloconv.module.Conv2d"] * 2 and "quantized" in type(converted[2]).__module__
    assert converted(image()).shape == (2, 4)


@pytest.mark.parametrize("part", ["model", "layer"])
def test_script_is_refused_with_the_ways_out(part: str) -> None:
    model = accelerated()
    with pytest.raises(RuntimeError, match=r"torch.jit.trace, torch.export .* haloconv.restore\(model\)"):
        torch.jit.script(model if part == "model" else model[0])
    assert kinds(model) == ["haloconv.module.Conv2d"] * 2
    haloconv.restore(model)
    assert torch.equal(torch.jit.script(model)(image()), net()(image()))


@pytest.mark.parametrize("then", [lambda traced: traced, torch.jit.freeze, torch.jit.optimize_for_inference])
def test_a_traced_model_is_saved_loaded_and_frozen(then: Callable) -> None:
    model, x = accelerated(), image()
    with torch.no_grad():
        program = then(torch.jit.trace(model, x))
        buffer = io.BytesIO()
        torch.jit.save(program, buffer)
        loaded = torch.jit.load(io.BytesIO(buffer.getvalue()))
        assert "haloconv::fprop" in str(loaded.inlined_graph)
        torch.testing.assert_close(loaded(x), net()(x))


def test_the_old_onnx_exporter_traces_pytorchs_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.onnx.export(dynamo=False) sees while it traces."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.jit.trace(accelerated(*UNEVEN), image())
    called = {node.kind() for node in program.inlined_graph.nodes()}
    assert "aten::_convolution" in called and not any(kind.startswith("haloconv") for kind in called)
    torch.testing.assert_close(program(image()), net(*UNEVEN)(image()))


def test_the_new_onnx_exporter_exports_pytorchs_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.onnx.export(dynamo=True) has of a model."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(accelerated(*UNEVEN), (image(),))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not any("haloconv" in target for target in called)
    torch.testing.assert_close(program.module()(image()), net(*UNEVEN)(image()))


def test_an_exported_program_has_a_decomposition_into_pytorchs_operators() -> None:
    program = torch.export.export(accelerated(*UNEVEN), (image(),))
    plain = program.run_decompositions(haloconv.decompositions())
    called = [str(node.target) for node in plain.graph.nodes if node.op == "call_function"]
    assert not any("haloconv" in target for target in called) and "aten.convolution.default" in called
    torch.testing.assert_close(plain.module()(image()), net(*UNEVEN)(image()))


@pytest.mark.parametrize("source", ["model", "program", "old exporter"])
def test_onnx_files_have_standard_convolutions(source: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    if source != "old exporter":
        pytest.importorskip("onnxscript")
    model, x, path = accelerated(*UNEVEN), image(), tmp_path / "model.onnx"
    given = (
        torch.export.export(model, (x,)).run_decompositions(haloconv.decompositions()) if source == "program" else model
    )
    torch.onnx.export(given, () if source == "program" else (x,), str(path), dynamo=source != "old exporter")
    called = {node.op_type for node in onnx.load(path).graph.node}
    assert "Conv" in called and not any("haloconv" in kind.lower() for kind in called)


def test_copies_and_files_hold_nothing_of_this_process() -> None:
    """A layer that was left to PyTorch on one machine is chosen for anew on another."""
    layer = accelerated(*UNEVEN)[0]
    layer(image())
    assert vars(layer).keys() >= {"_spec", "_calls", "_last_input"}
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not vars(other).keys() & {"_spec", "_calls", "_last_input"}
        assert torch.equal(other(image()), layer(image()))


def test_layers_from_files_of_older_versions_take_the_defaults() -> None:
    layer = accelerated(*UNEVEN)[0]
    state = {name: value for name, value in layer.__getstate__().items() if name not in ("strict", "padding_mode")}
    other = haloconv.Conv2d.__new__(haloconv.Conv2d)
    other.__setstate__(state)
    assert torch.equal(other(image()), layer(image())) and other.strict is False


def test_the_page_names_a_test_for_every_tool() -> None:
    rows = PAGE.read_text("utf-8").partition("| tool | what happens | test |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(test_\w+)`", rows))
    assert named and named <= globals().keys()
    tests = {name for name in globals() if name.startswith("test_")}
    assert tests - named == {"test_the_page_names_a_test_for_every_tool"}
