"""What an export chooses, what it refuses and what it says about both; the command that writes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from haloconv.cli import app
from haloconv.export.cpp import constants
from haloconv.export.export import export
from haloconv.jit.source import KernelSource
from haloconv.problem_file import ProblemFileError
from tests.cpu.test_export import HEAD, HOPPER, INPUTS, PORTABLE, PROBLEMS, families_of, problem, text_of
from tests.exported import load_text


def test_the_choice_follows_architecture_family_and_precision() -> None:
    path = PROBLEMS["a_5x9_dilated"]
    hopper = dict.fromkeys(("fprop", "dgrad", "wgrad"), "halo_sm90")
    assert families_of(text_of("a_5x9_dilated")) == hopper
    direct = dict.fromkeys(hopper, "direct")
    assert families_of(export(path, arch=HOPPER, precision="ieee")) == direct
    assert families_of(export(path, arch=HOPPER, family="direct")) == direct
    assert families_of(text_of("a_5x9_dilated", PORTABLE)) == direct
    assert "PyTorch's own convolution is the choice here" in text_of("b_5x9", PORTABLE)
    assert set(families_of(text_of("depthwise_7x7")).values()) == {"depthwise"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "sm_61"}, "arch must be one of"),
        ({"family": "aten"}, "family must be"),
        ({"precision": "bf16"}, "ieee"),
        ({"family": "halo_sm90", "arch": "sm_80"}, r"9\.0 alone, and sm_80 has 8\.0; .* run on sm_80 are .*halo_sm80,"),
        ({"family": "halo_sm90", "arch": "sm_120"}, "the families that run on sm_120 are .*direct, .*grouped_sm90"),
        ({"family": "halo_sm80", "arch": "sm_75"}, r"8\.0 and newer, and sm_75 has 7\.5"),
        ({"family": "grouped_sm90", "arch": "sm_89"}, r"9\.0 and newer, and sm_89 has 8\.9"),
        ({"precision": "tf32", "arch": "sm_75"}, "sm_75 has no TF32"),
    ],
)
def test_options_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        export(PROBLEMS["c_3x3"], **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conv": "nn.Conv2d(4, 8, 3, padding=1, padding_mode='circular')"}, "pads with padding_mode='circular'"),
        ({"conv": "nn.Linear(8, 8)"}, "no torch.nn.Conv2d ran"),
        ({"conv": "nn.ConvTranspose2d(4, 8, 3)"}, "nothing to export; conv (ConvTranspose2d) stays PyTorch's"),
        ({"forward": "self.conv(x, x)"}, "forward raised TypeError"),
        (
            {"conv": "getattr(nn, 'Conv2d')(4, 8, 3)"},
            "conv is a torch.nn.Conv2d that the file's own text does not make",
        ),
        ({"conv": "nn.Conv2d(4, 8, 3).double()", "forward": "self.conv(x.to(torch.int8))"}, "forward raised"),
    ],
)
def test_refusals_say_why(change: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ProblemFileError, match=re.escape(words)):
        export(problem(tmp_path, **change))


def test_a_family_that_takes_no_direction_is_refused() -> None:
    """The reason is the family's own, and what would run instead is named."""
    words = r"depthwise takes no direction of any layer.*conv fprop \(\w+\), conv dgrad \(\w+\), .*: .*channel"
    with pytest.raises(ProblemFileError, match=words):
        export(PROBLEMS["c_3x3"], arch=HOPPER, family="depthwise")
    with pytest.raises(ProblemFileError, match="precision"):
        export(PROBLEMS["c_3x3"], arch=HOPPER, family="halo_sm90", precision="ieee")


def test_directions_that_the_family_lacks_are_told(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"halo_sm80 does not take all .* wgrad \(halo_sm80_wgrad\).*: .*no weight"):
        export(PROBLEMS["stem_and_grouped"], arch="sm_80", family="halo_sm80")
    arguments = ["--arch", "sm_80", "--family", "halo_sm80", "-o", str(tmp_path / "new.py")]
    result = CliRunner().invoke(app, ["export", str(PROBLEMS["stem_and_grouped"]), *arguments])
    assert result.exit_code == 0 and "halo_sm80 does not take all" in result.output


def test_convolutions_that_stay_pytorchs_are_told(tmp_path: Path) -> None:
    """An exported file has kernels of Conv2d alone."""
    conv = "nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(2), nn.Conv1d(8, 8, 3), nn.ConvTranspose1d(8, 4, 2))"
    path, told = problem(tmp_path, conv), r"conv\.2 \(Conv1d\), conv\.3 \(ConvTranspose1d\) stay PyTorch's"
    with pytest.warns(RuntimeWarning, match=told):
        text = export(path, arch=HOPPER)
    assert "nn.Conv1d(8, 8, 3), nn.ConvTranspose1d(8, 4, 2)" in text
    result = CliRunner().invoke(app, ["export", str(path), "-o", str(tmp_path / "new.py")])
    assert result.exit_code == 0 and "stay PyTorch's" in " ".join(result.output.split())


@pytest.mark.parametrize("line", ["class Layer: pass", "def run(): pass", "FILES = 3"])
def test_names_that_the_exported_file_goes_by_are_refused(line: str, tmp_path: Path) -> None:
    """The file's own launches would call the model's ``run``."""
    name = re.search(r"(?:class|def)? ?(\w+)", line)[1]
    with pytest.raises(ProblemFileError, match=f"has a {name} of its own"):
        export(problem(tmp_path, head=f"{HEAD}{line}\n"), arch=HOPPER)


def test_a_model_from_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "problem.py"
    path.write_text(f"{HEAD}Model = nn.Identity\n{INPUTS}".replace("nn.Identity", "nn.LazyConv2d"), encoding="utf-8")
    with pytest.raises(ProblemFileError):
        export(path)


def test_layouts_are_those_that_the_model_runs_in(tmp_path: Path) -> None:
    text = export(problem(tmp_path, forward="self.conv(x.to(memory_format=torch.channels_last))"))
    formats = dict(re.findall(r"(\w)_format=torch\.(\w+),", text))
    assert formats == {"x": "channels_last", "w": "contiguous_format", "y": "channels_last"}


def test_negative_constants_keep_their_brackets() -> None:
    source = KernelSource("any", "any", (("COL", -3), ("ELEM", "hc::fp16"), ("VEC", 4)), "")
    assert constants(source) == '"COL": "(-3)", "ELEM": "hc::fp16", "VEC": 4'


def test_an_input_may_be_named(tmp_path: Path) -> None:
    module = load_text(export(problem(tmp_path, forward="self.conv(input=x)")))
    with pytest.raises(RuntimeError, match="the kernels run on CUDA devices"):
        module.ModelNew()(torch.rand(1, 4, 8, 8))


def test_one_image_and_one_layer_at_two_shapes(tmp_path: Path) -> None:
    module = load_text(export(problem(tmp_path, forward="self.conv(x).sum() + self.conv(x[0, :, 1:])")))
    assert [(each.name, each.x_shape) for each in module.LAYERS.values()] == [
        ("conv", (1, 4, 8, 8)), ("conv_again", (1, 4, 7, 8))
    ]  # fmt: skip


def test_the_command_writes_the_file(tmp_path: Path) -> None:
    output = tmp_path / "model_new.py"
    arguments = ["export", str(PROBLEMS["c_3x3"]), "-o", str(output), "--arch", HOPPER]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "wrote" in result.output
    assert output.read_text("utf-8") == text_of("c_3x3")


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.py"],
        [str(PROBLEMS["c_3x3"]), "--arch", "sm_1"],
        ["--check"],
        [str(PROBLEMS["c_3x3"]), "--arch", "sm_80", "--family", "halo_sm90"],
        [str(PROBLEMS["c_3x3"]), "--arch", "sm_70", "--precision", "tf32"],
        [str(PROBLEMS["c_3x3"]), "--family", "depthwise"],
    ],
)
def test_the_command_refuses_with_code_2(arguments: list[str], tmp_path: Path) -> None:
    if arguments == ["--check"]:
        arguments = [str(PROBLEMS["c_3x3"]), "--check"]
    result = CliRunner().invoke(app, ["export", *arguments, "-o", str(tmp_path / "out.py")])
    assert result.exit_code == 2 and "error:" in result.stderr
    assert not (tmp_path / "out.py").exists()
