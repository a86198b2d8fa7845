"""torch.compile(model, backend="haloconv"): values of float64 on our kernels, the entry point, modes and options."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

from haloconv import backend as backends
from haloconv.env import child_environment
from haloconv.precision import convolution_precision
from tests.compiled import Decoder, Residual, Separable, emulated, image, through_aot

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]


MODELS = {Residual: 3, Separable: 3, Decoder: 3}
"""Models, and how many convolutions each has."""


def results(model: Callable, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    return [y, *torch.autograd.grad((y * weights.to(y.dtype)).sum(), [x, *parameters])]


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours.double() - truth).norm() / truth.norm()).item()


@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_models_have_the_values_of_float64_on_our_kernels(cls: type[nn.Module], training: bool) -> None:
    """fp32 in full precision: within 2e-6, which one product in TF32, or a missing tap, is far beyond."""
    torch.manual_seed(0)
    model = cls().train(training)
    oracle, x = copy.deepcopy(model).double(), image()
    with emulated() as device, convolution_precision("ieee"):
        compiled = torch.compile(model, backend=through_aot, fullgraph=True)
        if training:
            got = results(compiled, x, [*model.parameters()])
        else:
            with torch.no_grad():
                got = [compiled(x)]
        assert device.launches >= MODELS[cls] * (3 if training else 1) - training
    want = results(oracle, x.double(), [*oracle.parameters()]) if training else [oracle(x.double())]
    assert max(error(one, other) for one, other in zip(got, want, strict=True)) < 2e-6


@pytest.mark.usefixtures("emulator_cache")
def test_a_training_step_through_inductor_runs_on_our_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.SiLU())
    oracle, x = copy.deepcopy(model).double(), image()
    quick = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}  # the other is younger than PyTorch 2.6
    quick = {name: value for name, value in quick.items() if name in inductor_config.get_config_copy()}
    with emulated() as device, convolution_precision("ieee"), inductor_config.patch(quick):
        got = results(torch.compile(model, backend=backends.backend, fullgraph=True), x, [*model.parameters()])
        assert device.launches >= 3
    for one, other in zip(got, results(oracle, x.double(), [*oracle.parameters()]), strict=True):
        assert error(one, other) < 2e-6


def test_the_entry_point_is_found_without_an_import(tmp_path: Path) -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    assert named == {"torch_dynamo_backends": {"haloconv": "haloconv.backend:backend"}}
    installed = tmp_path / "haloconv-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: haloconv\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[torch_dynamo_backends]\nhaloconv = haloconv.backend:backend\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport torch\n"
        "assert 'haloconv' in torch._dynamo.list_backends() and 'haloconv' not in sys.modules\n"
        "compiled = torch.compile(torch.relu, backend='haloconv')\n"
        "from haloconv.backend import backend\n"
        "assert torch._dynamo.lookup_backend('haloconv') is backend\n"
    )
    subprocess.run([sys.executable, "-c", code], env=child_environment(), check=True, timeout=120)


class Inductor:
    """What stands for Inductor: it keeps what it was given."""

    calls: list[tuple] = []

    def __init__(self, mode: str | None, options: dict | None, dynamic: bool | None) -> None:
        self.settings = mode, options

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable:
        self.calls.append((*self.settings, graph))
        return graph.forward


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> type[Inductor]:
    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Inductor)
    monkeypatch.setattr(Inductor, "calls", [])
    return Inductor


@pytest.mark.parametrize(
    "given",
    [{}, {"mode": "max-autotune"}, {"mode": "reduce-overhead", "fullgraph": True}, {"options": {"freezing": True}}],
    ids=str,
)
def test_modes_and_options_are_inductors(given: dict, inductor: type[Inductor]) -> None:
    torch.compile(torch.relu, backend=backends.backend, **given)(image())
    assert [call[:2] for call in inductor.calls] == [(given.get("mode"), given.get("options"))]


def test_options_that_inductor_does_not_know_are_refused() -> None:
    with pytest.raises(Exception, match="Unexpected optimization option nonsense"):
        torch.compile(torch.relu, backend=backends.backend, options={"nonsense": 1})(image())


def test_a_graph_of_convolutions_that_stay_pytorchs_is_untouched(inductor: type[Inductor]) -> None:
    """On a CPU all do."""
    plain: list[torch.fx.GraphModule] = []
    model = Residual()
    torch.compile(model, backend=backends.backend)(image())
    torch._dynamo.reset()
    torch.compile(model, backend=lambda graph, inputs: plain.append(graph) or graph.forward)(image())
    ((_, _, graph),) = inductor.calls
    assert graph.code == plain[0].code and "haloconv" not in graph.code


@pytest.mark.parametrize("version", ["2.4.1", "2.5.0+cu124"])
def test_an_older_pytorch_gets_a_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"needs PyTorch 2.6 or newer, and this is {version[:3]}.*accelerate"):
        backends.backend(torch.fx.symbolic_trace(nn.ReLU()), [image()])
    for newer in ("2.6.0", "2.10.0a0+git", "3.0"):
        backends.check_version(newer)
