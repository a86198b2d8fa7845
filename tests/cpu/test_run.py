"""``haloconv run`` on a machine without a GPU: what it says, what it writes, and when it fails."""

from __future__ import annotations

import json

import pytest
import torch

from haloconv import cli, plan
from haloconv.bench.trial import Budget
from haloconv.module import Conv2d
from tests.verbs import run

pytestmark = [
    pytest.mark.usefixtures("without_gpu"),
    pytest.mark.filterwarnings("ignore:haloconv. PyTorch's own convolution runs:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {layers}

    def forward(self, x):
        {forward}

def get_inputs():
    return [torch.rand({input})]

def get_init_inputs():
    return []
"""


def problem(folder, layers, forward="return self.conv(x)", input="2, 3, 40, 44", name="problem"):
    path = folder / f"{name}.py"
    path.write_text(MODEL.format(layers=layers, forward=forward, input=input))
    return str(path)


@pytest.fixture
def one(tmp_path):
    return problem(tmp_path, "self.conv = nn.Conv2d(3, 4, (3, 5), padding=(1, 2), dilation=(1, 2))")


def rows_of(folder, *arguments: str) -> tuple[dict, dict[tuple[str, str], dict]]:
    result = run(*arguments, "--json", str(folder / "rows.json"), "--force")
    assert result.exit_code == 0, result.output
    content = json.loads((folder / "rows.json").read_text())
    return content, {(row["case"], row["direction"]): row for row in content["rows"]}


def test_every_direction_and_the_model_are_checked(one):
    result = run(one)
    assert result.exit_code == 0, result.output
    assert "reduced size on the CPU" in result.output and "no kernel of haloconv ran" in " ".join(result.output.split())
    assert "inputs cut from (2, 3, 40, 44) to" in result.output
    for word in ("fprop", "dgrad", "wgrad", "bgrad", "forward", "step"):
        assert word in result.output
    assert "6 of 6 rows passed every check; no kernel of haloconv ran." in result.output and "…" not in result.output


def test_json_and_html(one, tmp_path):
    page = tmp_path / "deep" / "page.html"
    content, rows = rows_of(tmp_path, one, "--html", str(page))
    assert content["passed"] is True and content["environment"]["torch"] == torch.__version__
    assert {direction for _, direction in rows} == {"fprop", "dgrad", "wgrad", "bgrad", "forward", "step"}
    fprop = rows["problem", "fprop"]
    assert fprop["family"] == "aten" and fprop["precision"] == "fp32"
    assert 0 < fprop["error"] < fprop["error_limit"] < 1e-5
    for name in ("aten_ms", "haloconv_ms", "ratio", "tflops", "gbps"):
        assert fprop[name] is None, "a time on a CPU says nothing about the kernels"
    text = page.read_text()
    assert "Every check passed; no kernel of haloconv ran." in text
    assert '<th scope="row" rowspan="2">problem (model)</th>' in text and "<td>step</td>" in text


def test_all_kinds_of_layers(tmp_path):
    layers = "; ".join(
        [
            "self.a = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)",
            "self.b = nn.Conv2d(6, 6, (2, 4), padding='same', groups=3)",
            "self.c = nn.Conv2d(6, 4, 3, padding=2, padding_mode='circular')",
            "self.unused = nn.Conv2d(4, 4, 1)",
        ]
    )
    path = problem(tmp_path, layers, "return self.c(input=torch.relu(self.b(self.a(x)))), x.mean()")
    _, rows = rows_of(tmp_path, path)
    names = {case for case, _ in rows}
    assert names == {"problem.a", "problem.b", "problem.c", "problem (model)"}
    assert ("problem.a", "bgrad") not in rows and ("problem.c", "bgrad") in rows


def test_channels_last_layers_are_timed_in_their_layout(tmp_path):
    path = problem(
        tmp_path, "self.conv = nn.Conv2d(3, 4, 3)", "return self.conv(x.to(memory_format=torch.channels_last))"
    )
    _, rows = rows_of(tmp_path, path)
    assert rows["problem", "dgrad"]["layout"] == "nhwc"


def test_half_precision_model(tmp_path):
    path = problem(tmp_path, "self.conv = nn.Conv2d(3, 4, 3, dtype=torch.bfloat16)", "return self.conv(x.bfloat16())")
    content, rows = rows_of(tmp_path, path)
    assert rows["problem", "fprop"]["precision"] == "bf16"
    assert rows["problem", "fprop"]["error_limit"] == 8e-3
    assert any("does not run in float64" in note for note in content["notes"])


def test_several_files_make_one_table(tmp_path, one):
    other = problem(tmp_path, "self.conv = nn.Conv2d(3, 2, 1)", name="other")
    _, rows = rows_of(tmp_path, one, other)
    assert {case for case, _ in rows} == {"problem", "problem (model)", "other", "other (model)"}


def test_seed_fixes_the_tensors(one, tmp_path):
    errors = []
    for seed in ("1", "1", "2"):
        _, rows = rows_of(tmp_path, one, "--seed", seed)
        errors.append([rows["problem", direction]["error"] for direction in ("fprop", "dgrad", "wgrad", "bgrad")])
    assert errors[0] == errors[1] != errors[2]


def test_model_without_convolutions_is_skipped(tmp_path):
    path = problem(tmp_path, "self.linear = nn.Linear(44, 3)", "return self.linear(x)")
    result = run(path, "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 2 and "skipped problem: it holds no torch.nn.Conv2d" in result.output
    assert "Nothing was checked" in result.output and not (tmp_path / "rows.json").exists()


def test_convolution_that_does_not_run_is_skipped(tmp_path):
    path = problem(tmp_path, "self.conv = nn.Conv2d(3, 4, 1)", "return x.sin()")
    result = run(path)
    assert result.exit_code == 2 and "no torch.nn.Conv2d of it ran" in result.output


def spoil(monkeypatch, name, index):
    """Make one element of one direction's result wrong."""
    right = getattr(plan, name)

    def wrong(*arguments):
        result = right(*arguments).clone()
        result.view(-1)[index] += 1.0
        return result

    monkeypatch.setattr(plan, name, wrong)


@pytest.mark.parametrize(
    "name, coordinate", [("fprop", "(0, 0, 0, 2)"), ("dgrad", "(0, 0, 0, 2)"), ("wgrad", "(0, 0, 0, 2)")]
)
def test_one_wrong_element_fails(monkeypatch, one, tmp_path, name, coordinate):
    spoil(monkeypatch, name, 2)
    result = run(one, "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 1, result.output
    output = " ".join(result.output.split())
    assert f"FAILED problem {name}: error" in output and f"first bad element at {coordinate}: got" in output
    content = json.loads((tmp_path / "rows.json").read_text())
    failed = {(row["case"], row["direction"]) for row in content["rows"] if not row["passed"]}
    assert content["passed"] is False and ("problem", name) in failed
    assert {direction for case, direction in failed if case == "problem"} == {name}


def test_wrong_bias_gradient_fails(monkeypatch, one):
    spoil(monkeypatch, "bgrad", 1)
    result = run(one)
    assert result.exit_code == 1 and "at (1,): got" in result.output


def test_wrong_model_fails(monkeypatch, one):
    """An error above the operations, in the module, shows in the rows of the model."""
    forward = Conv2d._conv_forward
    monkeypatch.setattr(Conv2d, "_conv_forward", lambda self, x, w, b: forward(self, x, w, None))
    result = run(one)
    assert result.exit_code == 1
    assert "FAILED problem (model) forward: output: error" in " ".join(result.output.split())


def test_result_that_spoils_later_is_caught(monkeypatch, one):
    """The outputs are checked after the timing too."""
    monkeypatch.setattr(cli.run, "UNTIMED", Budget(seconds=0.0, min_runs=5))
    right, calls = plan.fprop, []

    def tiring(*arguments):
        calls.append(1)
        return right(*arguments) * (1.0 if len(calls) < 5 else 1.5)

    monkeypatch.setattr(plan, "fprop", tiring)
    result = run(one)
    assert result.exit_code == 1 and "FAILED problem fprop" in result.output


@pytest.mark.parametrize(
    "layers, forward, message",
    [
        ("self.conv = nn.Conv2d(4, 4, 3)", "return self.conv(x)", "Model's forward raised RuntimeError"),
        ("self.conv = nn.Conv2d('3', 4, 3)", "return self.conv(x)", "Model raised TypeError"),
    ],
)
def test_models_that_fail(tmp_path, layers, forward, message):
    result = run(problem(tmp_path, layers, forward))
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_missing_file(tmp_path):
    result = run(str(tmp_path / "none.py"))
    assert result.exit_code == 2 and "there is no such file" in " ".join(result.output.split())


def test_bare_convolution(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text(
        "import torch\nfrom torch.nn import Conv2d as Model\n"
        "def get_inputs():\n    return [torch.rand(1, 3, 9, 9)]\ndef get_init_inputs():\n    return [3, 4, 3]\n"
    )
    _, rows = rows_of(tmp_path, str(path))
    assert {("bare", "fprop"), ("bare", "wgrad"), ("bare (model)", "step")} <= rows.keys()


def test_cuda_is_refused_without_a_gpu(one):
    result = run(one, "--device", "cuda")
    assert result.exit_code == 2 and "PyTorch sees no GPU" in result.output


def test_file_that_cannot_be_written(one, tmp_path):
    (tmp_path / "taken").write_text("")
    result = run(one, "--json", str(tmp_path / "taken" / "rows.json"))
    assert result.exit_code == 2 and "cannot write" in result.output


def test_forced_families(one, tmp_path):
    _, rows = rows_of(tmp_path, one, "--family", "aten", "--precision", "ieee")
    assert {row["family"] for row in rows.values()} == {"aten"}


@pytest.mark.parametrize("option", [("--family", "direct"), ("--precision", "tf32")])
def test_what_a_cpu_cannot_show_is_refused(one, option):
    """PyTorch's own convolution would be compared with itself, and pass."""
    result = run(one, *option)
    assert result.exit_code == 2 and "add --device emulator" in " ".join(result.output.split()), result.output
