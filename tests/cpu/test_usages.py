"""Every usage of an accelerated model on the CPU: around PyTorch's own convolution, and around our kernels emulated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from haloconv.emulator import available, emulated_device
from tests.usages import USAGES, Place

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accelerate.md"
SLOW = ("other_dtypes", "compiled")  # on the emulator: kernels for each dtype; the GPU tests run them


@pytest.mark.parametrize("usage", USAGES)
def test_usage(usage: str, own_autograd: None) -> None:
    """``own_autograd``: the gradients are those of haloconv.autograd, as they are where our kernels run."""
    USAGES[usage](Place("cpu"))


@pytest.mark.parametrize("usage", [usage for usage in USAGES if usage not in SLOW])
def test_usage_of_our_kernels(usage: str, emulator_cache: None) -> None:
    if available() is not None:
        pytest.skip(available())
    with emulated_device():
        USAGES[usage](Place("cpu", "direct", strict=True))


def test_the_page_has_a_row_for_every_usage() -> None:
    rows = PAGE.read_text("utf-8").partition("| usage | test |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", "".join(line.rpartition("| ")[2] for line in rows.splitlines() if "|" in line)))
    assert named == {usage for usage in USAGES if ", " not in usage} | {"weights_made_anew"}
    assert all((PAGE.parents[1] / file).exists() for file in re.findall(r"tests/\w+/\w+\.py", rows))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows the report of a machine without a GPU")
def test_the_page_shows_the_report_that_its_snippet_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text("utf-8")
    snippet, shown = (re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1] for language in ("python", "text"))
    exec(compile(snippet, PAGE.name, "exec"), {})
    assert capsys.readouterr().out == shown
