"""What all verbs share: the version, completion, help, and terminals that cannot show every character."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from haloconv.cli import VERBS, app
from haloconv.version import __version__

pytestmark = pytest.mark.usefixtures("without_gpu")

PROBLEM = """import torch
from torch.nn import Conv2d as Model
def get_inputs():
    return [torch.rand(1, 1, 4, 4)]
def get_init_inputs():
    return [1, 1, 3]
"""


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout == f"haloconv {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [("haloconv ex", "export"), ("haloconv run --dev", "--device"), ("haloconv run --device emu", "emulator")],
)
def test_shells_complete_verbs_options_and_values(typed: str, wanted: str) -> None:
    count = str(len(typed.split()) - 1)
    environment = {"_HALOCONV_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": count}
    result = CliRunner().invoke(app, [], prog_name="haloconv", env=environment)
    assert wanted in result.stdout.split(), result.output


def test_completion_can_be_installed() -> None:
    help_page = CliRunner().invoke(app, ["--help"]).stdout
    assert "--install-completion" in help_page and "--show-completion" in help_page


@pytest.mark.parametrize(
    "command",
    [("--help",), *((verb, "--help") for verb in VERBS), ("doctor", "--json", "{folder}/größe→.json"),
     ("run", "{problem}", "--family", "aten"), ("run", "{folder}/none→.py")],
    ids=" ".join,
)  # fmt: skip
def test_terminals_of_any_encoding(command: tuple[str, ...], tmp_path: Path) -> None:
    """Python's own error would be a UnicodeEncodeError."""
    problem = tmp_path / "größe→.py"
    problem.write_text(PROBLEM, encoding="utf-8")
    arguments = [word.format(problem=problem, folder=tmp_path) for word in command]
    result = CliRunner(charset="ascii").invoke(app, arguments)
    assert not isinstance(result.exception, UnicodeError), result.exception
    assert result.exit_code == (2 if "none" in command[-1] else 0), result.output
