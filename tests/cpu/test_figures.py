"""Figures of speed in prose come from rows: they stand between a generator's markers, or not at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from haloconv.bench.trial import AS_LARGE
from haloconv.choose.whole import HOST_MS, MARGIN
from tools.result_tables import TIE

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.md"  # what was tried, each figure marked as a probe
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != NOTEBOOK]
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
FIGURE = re.compile(
    r"\d[\d.,]*\s?(?:×|TFLOP/s|TB/s|GB/s|[mµun]s\b)"
    r"|\d[\d.,]*\s?(?:x|times)\s+(?:as\s+(?:fast|slow)|faster|slower|cuDNN|PyTorch|its\s+speed)"
    r"|\d[\d.,]*\s?%\s+(?:faster|slower|ahead|less\s+time|of\s+(?:the|a|its)\s+[\w-]*\s?roofline)"
)
RULES = {
    "docs/tuning.md": {"3 % faster": MARGIN - 1, "4 us": HOST_MS * 1e3},
    "docs/results.md": {"2 % faster": TIE, "2 % slower": TIE},
    "docs/design.md": {"5 % ahead": 0.05},
    "docs/precision.md": {"1.05 times PyTorch": AS_LARGE},
}
"""Figures that are rules of the code, with their constants; no row can prove or deny them."""


def figures(page: Path) -> list[str]:
    """Figures of speed outside of generated sections, code blocks included."""
    text = GENERATED.sub("", page.read_text("utf-8"))
    return [" ".join(match[0].split()) for match in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_figure_of_speed_stands_in_prose(page: Path) -> None:
    assert set(figures(page)) <= set(RULES.get(page.relative_to(ROOT).as_posix(), {}))


def test_rules_in_prose_are_those_of_the_code() -> None:
    for name, rules in RULES.items():
        assert set(rules) <= set(figures(ROOT / name)), name
        for said, value in rules.items():
            number, unit = said.split()[:2]
            assert float(number) == pytest.approx(100 * value if unit == "%" else value), said


@pytest.mark.parametrize(
    "text",
    ["takes 1.77 ms", "reaches 440 TFLOP/s", "2.08 times as fast", "4.0 times cuDNN", "8.17x PyTorch", "**2.1×**",
     "98 % of the roofline", "3 % of a tensor-core roofline", "22 % less time", "60 us"],
)  # fmt: skip
def test_figures_are_found(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"It {text}.\n<!-- rows:begin -->\nIt {text}.\n<!-- rows:end -->\n")
    assert len(figures(page)) == 1


def test_sizes_and_counts_are_no_figures_of_speed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("31 x 31 taps, 512x512, 4 times that, 15 % of the rows, 8 x 2 KB, twice, within 15 minutes, 5x9\n")
    assert figures(page) == []
