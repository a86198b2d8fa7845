"""The page of a report: whole, self-contained, readable by everyone; and ``haloconv report``, which writes it."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from haloconv.bench import targets
from haloconv.bench.suite import Case
from haloconv.cli import app
from haloconv.report import FileOutcome, Report, plots
from haloconv.roofline import ceilings_of
from tests import browser
from tests.cpu.test_report import ENVIRONMENT, FAILED, LOSS, WIN, report
from tests.cpu.test_run import MODEL

ROOT = Path(__file__).resolve().parents[2]
LATEST = ROOT / "benchmarks" / "results" / "nvidia-h200" / "latest.jsonl"
PLACED = replace(WIN, bytes=500_000_000, aten_best_ms=None)
VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}

pytestmark = pytest.mark.filterwarnings("ignore:haloconv. PyTorch's own convolution runs:RuntimeWarning")


class Page(HTMLParser):
    """The page as a browser's parser would have it; whatever is not closed in order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th") and data.strip():
            self.cells.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.tags if name == tag]


def full() -> Report:
    """A report with everything a page can show."""
    rows = [PLACED, replace(PLACED, direction="dgrad", haloconv_ms=32.0), LOSS, replace(FAILED, case="<b>"),
            replace(PLACED, case="n (model)", direction="step", bytes=None, flops=None, limit_ms=None)]  # fmt: skip
    rows += [replace(row, precision="tf32", layout="nhwc") for row in rows[:2]]
    files = [FileOutcome("a", rows[:1]), FileOutcome("b", skipped="not <ours>"), FileOutcome("c", unusable="broken")]
    return Report("a & b", ENVIRONMENT, rows, ["a <note>"], files=files)


def test_page_is_self_contained_and_escaped() -> None:
    text = full().to_html()
    page = Page(text)
    references = [
        v for _, attributes, _ in page.tags for k, v in attributes.items() if k in ("src", "href", "xlink:href")
    ]
    assert references and all(reference.startswith("#") for reference in references)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _, _ in page.tags}
    assert set(re.findall(r"url\((.)", text)) == {"#"} and "@import" not in text and "://" not in text
    assert "&lt;note&gt;" in text and "not &lt;ours&gt;" in text and "a &amp; b" in text and "<b>" not in text
    assert text.lower().startswith("<!doctype html>") and page.all("html") == [{"lang": "en"}]


def test_identifiers_are_unique_and_known() -> None:
    page = Page(full().to_html())
    ids = Counter(attributes["id"] for _, attributes, _ in page.tags if "id" in attributes)
    assert ids and max(ids.values()) == 1
    used = {attributes["href"][1:] for attributes in page.all("use")}
    assert used and used <= ids.keys()


def test_page_suits_phones_print_and_the_dark() -> None:
    text = full().to_html()
    page = Page(text)
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "prefers-color-scheme: dark" in text and "@media print" in text and "@media (max-width:" in text
    tables = [inside for tag, _, inside in page.tags if tag == "table"]
    scrolled = [a for tag, a, _ in page.tags if tag == "div" and a.get("class") == "scroll"]
    assert len(tables) == len(scrolled) == 3 and all(inside[-1] == "div" for inside in tables)
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in scrolled)
    assert {a["scope"] for a in page.all("th")} == {"col", "row"}


def test_plots_take_the_colours_of_the_page_and_have_words() -> None:
    text = full().to_html()
    page = Page(text)
    images = [a for tag, a, _ in page.tags if a.get("role") == "img"]
    drawings = page.all("svg")
    assert len(images) == len(drawings) == 4 and all(len(a["aria-label"]) > 40 for a in images)
    assert all(set(a) == {"viewbox"} for a in drawings)
    inside = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"#[0-9a-fA-F]{6}\b", inside) and "<style" not in inside
    defined = set(re.findall(r"(--\w+):", text))
    assert set(re.findall(r"var\((--\w+)\)", text)) <= defined


def test_page_says_what_came_of_it() -> None:
    text = full().to_html()
    cells = Page(text).cells
    assert {"1.60x", "0.80x", "73%", "FAILED", "37.1", "50", "a", "unusable"} <= set(cells)
    assert "Not every check passed" in text and "NVIDIA H200" in text and "1 of 1 files correct" in text
    assert "2 files left out" in text and "direct: asked for" in text
    assert "Every check passed." in report(WIN).to_html()


def test_page_shows_the_columns_of_the_table() -> None:
    assert "better layout ms" in report(replace(WIN, aten_best_ms=1.5)).to_html()
    assert "better layout ms" not in report(replace(WIN, aten_best_ms=None)).to_html()


def test_without_ceilings_or_bytes_the_page_says_why_there_is_no_roofline() -> None:
    assert "no row has both FLOP and bytes" in report(WIN).to_html()
    other = Report("x", {**ENVIRONMENT, "gpu": "Some GPU"}, [PLACED])
    assert "nobody has measured the ceilings of Some GPU" in other.to_html()
    assert "nothing was measured on a GPU" in Report("x", {"gpu": "none"}, [PLACED]).to_html()


def test_page_without_rows_is_still_a_page() -> None:
    page = Page(Report("empty", ENVIRONMENT).to_html())
    assert page.all("svg") == [] and page.all("h1") == [{}]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'a page needs matplotlib, .*: pip install "haloconv\[cli\]"'):
        report(WIN).to_html()
    result = run("--results", LATEST, "--html", tmp_path / "p.html")
    assert result.exit_code == 2 and 'pip install "haloconv[cli]"' in result.output
    result = CliRunner().invoke(app, ["run", str(problem(tmp_path)), "--html", str(tmp_path / "p.html")])
    assert result.exit_code == 2 and 'pip install "haloconv[cli]"' in result.output


# --- the plots


def test_bars_end_at_their_ratios() -> None:
    """On the logarithmic axis a bar of 4x is twice as long as one of 2x, and losses lie on the other side of 1x."""
    rows = [replace(WIN, case=case, haloconv_ms=16.0 / ratio) for case, ratio in (("a", 2.0), ("b", 4.0), ("c", 0.5))]
    (plot,) = plots.bars(rows, "tf32", "x")
    boxes = [
        [float(value) for value in re.findall(r"[ML] ([\d.]+) [\d.]+", path)]
        for path in re.findall(r'<path d="([^"]*)" clip-path[^>]*style="fill: var\(--fprop\)', plot.svg)
    ]
    two, four, half = ((min(box), max(box)) for box in boxes)
    width = two[1] - two[0]
    assert four[1] - four[0] == pytest.approx(2 * width, rel=1e-3) and half[1] - half[0] == pytest.approx(
        width, rel=1e-3
    )
    assert two[0] == pytest.approx(four[0]) == pytest.approx(half[1])
    assert "3 measurements, from 0.50x (c fprop) to 4.00x (b fprop)" in plot.alt


def test_many_layers_make_several_plots() -> None:
    rows = [replace(WIN, case=f"layer{i}", direction=d) for i in range(50) for d in ("fprop", "dgrad", "wgrad")]
    parts = plots.bars(rows, "tf32", "x")
    assert [len(re.findall("1.60x</text>|>1.60x<", part.svg)) for part in parts] == [42, 42, 42, 24]


def test_labels_leave_out_the_model_that_all_layers_share() -> None:
    assert plots._labels(["net.stem", "net.layer1.0.conv1", "net (model)"]) == ["stem", "layer1.0.conv1", "net (model)"]
    assert plots._labels(["one.stem", "two.stem"]) == ["one.stem", "two.stem"]
    assert plots._labels(["A", "B" * 30]) == ["A", "…" + "B" * 21]


def test_roofline_shows_rows_with_flops_and_bytes() -> None:
    ceilings = ceilings_of("NVIDIA H200")
    plot = plots.roofline([PLACED, WIN, replace(PLACED, precision="bf16")], ceilings, "fp32", "x")
    assert plot is not None and "1 measurements below" in plot.alt and "A fprop reaches 73% of its roofline" in plot.alt
    assert plots.roofline([WIN], ceilings, "fp32", "x") is None
    assert plots.roofline([PLACED], ceilings, "fp64", "x") is None


# --- the verb


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def words(result: Result) -> str:
    return " ".join(result.output.split())


def problem(folder: Path) -> Path:
    layers = "self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))"
    path = folder / "net.py"
    path.write_text(MODEL.format(layers=layers, forward="return self.c(self.b(self.a(x)))", input="2, 3, 20, 24"))
    return path


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_stored_results_become_a_page(tmp_path: Path) -> None:
    """The committed rows, which need no GPU: every row, a roofline for each precision, bytes from the suite."""
    result = run("--results", LATEST, "--html", tmp_path / "p.html", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in LATEST.read_text("utf-8").splitlines()]
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == len(records) and all(row["bytes"] for row in rows)
    page = Page((tmp_path / "p.html").read_text("utf-8"))
    precisions = {record["precision"] for record in records}
    headings = re.findall(r"<figcaption>Roofline, (\w+)", (tmp_path / "p.html").read_text("utf-8"))
    assert set(headings) == precisions and page.cells.count("passed") == len(records)


def test_problems_of_the_suite_are_those_of_its_layers() -> None:
    case = Case("small", (2, 4, 9, 11), 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2)
    layer = case.layer("tf32", "nhwc", "auto", torch.device("cpu"))
    assert all(case.problem(each, "tf32", "nhwc") == layer.problem(each) for each in ("fprop", "dgrad", "wgrad"))


@pytest.mark.usefixtures("without_gpu")
def test_a_problem_file_becomes_a_page(tmp_path: Path) -> None:
    page, rows = tmp_path / "p.html", tmp_path / "r.json"
    result = run(problem(tmp_path), "--html", page, "--json", rows, "--layout", "nhwc", "--precision", "bf16")
    assert result.exit_code == 0, result.output
    found = json.loads(rows.read_text())["rows"]
    assert {row["case"] for row in found} == {"net.a", "net (model)"}  # three layers alike are measured once
    assert {row["count"] for row in found if row["case"] == "net.a"} == {3}
    assert {(row["precision"], row["layout"]) for row in found} == {("bf16", "nhwc")}
    assert "net (model)" in page.read_text("utf-8")


@pytest.mark.usefixtures("without_gpu")
def test_named_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Dropout(0.5))
    monkeypatch.setitem(targets._BUILDERS, "timm", lambda name: net)
    result = run("timm:tiny", "--batch", 2, "--pixels", 18, "--html", tmp_path / "p.html")
    assert result.exit_code == 0 and "tiny" in result.output and net[1].p == 0.0, result.output


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    result = run(f"{library}:resnet50", "--html", tmp_path / "p.html")
    assert result.exit_code == 2 and f"not installed: pip install {library}" in words(result)


@pytest.mark.parametrize(
    "options, message",
    [
        (["x.py"], "and --html FILE"),
        (["--html", "p.html"], "give a model or a problem file"),
        (["x.py", "--results", "y.jsonl", "--html", "p.html"], "give a model or a problem file"),
        (["x.py", "--html", "p.html"], "there is no such file"),
        (["jax:resnet50", "--html", "p.html"], "not from jax"),
        (["--results", "y.jsonl", "--html", "p.html"], "y.jsonl: there is no such file"),
        (["x.py", "--device", "emulator", "--precision", "bf16", "--html", "p.html"], "no whole model under"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2 and message in words(result)


# --- a browser


OVERHANG = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"


def test_the_browser_opens_no_window(tmp_path: Path) -> None:
    """Without it Chromium wants a display, and CI has none; a profile of its own, so that no running one answers."""
    line = browser.command(tmp_path / "p.html", tmp_path / "profile")
    assert "--headless" in line and f"--user-data-dir={tmp_path / 'profile'}" in line


@pytest.mark.skipif(browser.BROWSER is None, reason=browser.NO_BROWSER)
def test_nothing_sticks_out_in_a_browser(tmp_path: Path) -> None:
    """Only tables scroll sideways; a line that cannot be broken would show."""
    text = full().to_html()
    assert browser.evaluate(text, OVERHANG, (390, 1280), tmp_path) == [0, 0]
    (flat,) = browser.evaluate(text.replace('class="scroll"', 'class="flat"'), OVERHANG, (390,), tmp_path)
    assert flat > 100
