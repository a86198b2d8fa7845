"""The page of a report: whole, self-contained, readable by everyone; and ``haloconv report``, which writes it."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from haloconv.cli.report import stored_report
from haloconv.report import FileOutcome, Report, plots
from haloconv.report.sections import Scale
from haloconv.roofline import ceilings_of
from tests import browser
from tests.cpu.test_report import ENVIRONMENT, FAILED, LOSS, WIN, report

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "benchmarks" / "results" / "nvidia-h200" / "latest-models.jsonl"
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
    assert len(tables) == len(scrolled) == 6 and all(inside[-1] == "div" for inside in tables)
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in scrolled)
    assert {a["scope"] for a in page.all("th")} == {"col", "row"}


def test_plots_take_the_colours_of_the_page_and_have_words() -> None:
    text = full().to_html()
    page = Page(text)
    images = [a for tag, a, _ in page.tags if a.get("role") == "img"]
    drawings = page.all("svg")
    assert len(images) == len(drawings) == 2 and all(len(a["aria-label"]) > 40 for a in images)
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


def test_headings_come_in_order_and_links_lead_somewhere() -> None:
    for made in (full(), report(WIN), Report("empty", ENVIRONMENT), models()):
        page = Page(made.to_html())
        levels = [int(tag[1]) for tag, _, _ in page.tags if re.fullmatch("h[1-6]", tag)]
        assert levels.count(1) == 1 and levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
        ids = {attributes["id"] for _, attributes, _ in page.tags if "id" in attributes}
        assert {attributes["href"][1:] for attributes in page.all("a")} <= ids
        assert all(inside[-1] == "details" for tag, _, inside in page.tags if tag == "summary")
        assert {attributes["scope"] for attributes in page.all("th")} <= {"col", "colgroup", "row"}


@pytest.mark.parametrize("look", ["light", "dark", "print"])
def test_text_and_marks_stand_out_from_the_ground(look: str) -> None:
    """WCAG AA: text at 4.5 to 1, what is drawn at 3 to 1."""
    css = (ROOT / "haloconv" / "report" / "templates" / "report.css").read_text("utf-8")
    colours = dict(zip(("light", "dark", "print"), re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL), strict=True))
    known = dict(re.findall(r"--(\w+): (#\w+);", colours[look]))
    for names, least in ((("ink", "faint", "good", "bad"), 4.5), (("fprop", "dgrad", "wgrad", "whole"), 3.0)):
        assert all(contrast(known[name], known["ground"]) >= least for name in names), known


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours written as #rgb or #rrggbb."""
    bright = []
    for colour in (one, other):
        digits = colour[1:] if len(colour) == 7 else "".join(each * 2 for each in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        bright.append(sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(bright) + 0.05) / (min(bright) + 0.05)


# --- networks


@functools.cache
def models() -> Report:
    """The committed rows of networks."""
    return stored_report(MODELS, Path("suite"))


@functools.cache
def models_page() -> str:
    return models().to_html()


def test_the_page_of_networks_is_small_and_has_every_row() -> None:
    text, made = models_page(), models()
    assert len(text.encode()) < 1_000_000
    failed = [row for row in made.rows if not row.passed]
    assert len(made.rows) > 2000 and Page(text).cells.count("passed") == len(made.rows) - len(failed)
    assert len(made.complaints()) == len(failed) and all(escape(each) in text for each in made.complaints())


def test_networks_come_first_then_a_folded_section_each() -> None:
    page, rows = Page(models_page()), models().rows
    names = list(dict.fromkeys(row.case.partition(" ")[0] for row in rows if row.case.endswith(" (model)")))
    folded = [attributes for attributes in page.all("details") if attributes.get("class") == "part"]
    assert len(names) == len(folded) == 7 and not any("open" in attributes for attributes in page.all("details"))
    text = models_page()
    first = text[: text.index("<nav")]
    assert all(f">{name}</a>" in first for name in names) and "faster layout" in first and "<svg" not in first
    assert (
        first.index('id="networks"') < text.index('id="whole-1"') < text.index('id="slower"') < text.index("<details")
    )


def stamp(made: Report) -> list[str]:
    """What stands below the title."""
    line = re.search(r'<p class="stamp">(.*?)</p>', made.to_html(), flags=re.DOTALL)
    return re.findall("<span>(.*?)</span>", line[1])


def test_what_was_measured_where_stands_at_the_top() -> None:
    known = {"date": "2026-11-22 to 2026-11-23", "gpu": "NVIDIA H200", "torch": "2.11.0", "cudnn": "91900",
             "cuda": "13.0", "commit": "abc, def"}  # fmt: skip
    facts = ["NVIDIA H200", "PyTorch 2.11.0", "cuDNN 9.19.0", "CUDA 13.0", "commit abc, def"]
    assert stamp(Report("x", known, [WIN])) == [known["date"], *facts]
    older = {**known, "date": "2026-11-20T10:00:00Z", "cudnn": "8902", "commit": "none"}
    assert stamp(Report("x", older, [WIN])) == ["2026-11-20 10:00 UTC", *facts[:2], "cuDNN 8.9.2", facts[3]]
    assert stamp(Report("x", {"gpu": "none", "torch": "2.11.0", "cudnn": "none"}, [WIN])) == ["PyTorch 2.11.0"]
    assert models().environment["commit"] in models_page().partition("</header>")[0]


def test_a_network_is_set_against_both_layouts_of_pytorch() -> None:
    """Ours in nchw is 1.25 times as fast as PyTorch's in nchw, and slower than PyTorch's in nhwc."""
    nchw = replace(WIN, case="n (model)", direction="step", aten_ms=10.0, haloconv_ms=8.0, aten_best_ms=None)
    nhwc = replace(nchw, layout="nhwc", aten_ms=6.0, haloconv_ms=5.0)
    text = Report("x", ENVIRONMENT, [nchw, nhwc]).to_html()
    spans = re.search(r'<tr><th scope="row"><a href="#of-n">n</a></th>(.*?)</tr>', text, flags=re.DOTALL)[1]
    words = re.sub(r"<[^>]*>", " ", spans).split()
    assert words == ["–", "–", "–", "1.20x", "to", "1.25x", "0.75x", "to", "1.20x", "1.20x"]
    assert '<span class="bad">0.75x</span>' in spans and "6.000" in Page(text).cells


def test_what_is_not_known_has_no_column() -> None:
    """One network in one layout has no faster layout; nothing timed, no speeds of files."""
    one = replace(WIN, case="n (model)", direction="step", aten_best_ms=None)
    cells = Page(report(one, replace(PLACED, case="n.a")).to_html()).cells
    assert "faster layout" not in cells and "against faster layout" not in cells and "peak memory" not in cells
    untimed = replace(one, aten_ms=None, haloconv_ms=None)
    files = [FileOutcome("n", [untimed]), FileOutcome("m", [untimed])]
    made = Report("x", {"gpu": "none"}, [untimed], files=files)
    assert {"file", "check"} <= set(Page(made.to_html()).cells) and "forward" not in Page(made.to_html()).cells
    made.files = [FileOutcome("n", [one]), FileOutcome("m", [one])]
    made.rows = [one]
    assert {"file", "check", "forward", "1.60x"} <= set(Page(made.to_html()).cells)
    assert 'id="networks"' not in made.to_html()  # the files are the networks


def test_names_are_whole() -> None:
    long = "net." + "abcdefghij" * 6
    rows = [replace(WIN, case="net (model)", direction="forward"), replace(PLACED, case=long, count=3)]
    text = Report("x", ENVIRONMENT, rows).to_html()
    assert f"{long[4:]} (3 alike)" in Page(text).cells and "…" not in text


def test_losses_have_a_table_of_their_own() -> None:
    rows = [replace(WIN, case=f"layer{i:02}", haloconv_ms=16.0 + i) for i in range(30)]
    text = Report("x", ENVIRONMENT, rows).to_html()
    table = text[text.index('id="slower"') : text.index("Layer by layer")]
    assert "0 faster, 1 within 2 %, 29 slower" in table and "The 20 slowest:" in table
    assert re.findall(r">layer(\d\d)<", table) == [f"{i:02}" for i in range(29, 9, -1)]
    assert "None is more than 2 % slower." in report(WIN).to_html()


def test_full_fp32_of_pytorch_is_marked() -> None:
    text = report(replace(WIN, precision="tf32", aten_error=3e-7)).to_html()
    assert "16.00 †" in Page(text).cells and "it computed full fp32" in text
    assert "†" not in report(WIN).to_html()


def test_reasons_are_numbered_where_the_rows_name_them() -> None:
    rows = [WIN, replace(WIN, direction="dgrad"), replace(WIN, direction="wgrad", reason="by rule")]
    text = report(*rows).to_html()
    cells = [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in Page(text).cells]
    assert (cells.count("direct #1"), cells.count("direct #2")) == (2, 1)
    assert text.index("<li>direct: asked for</li>") < text.index("<li>direct: by rule</li>")


# --- the plots


def test_bars_end_at_their_ratios() -> None:
    """On the logarithmic scale a bar of 4x is twice as long as one of 2x, and losses lie on the other side of 1x."""
    rows = [replace(WIN, case=case, haloconv_ms=16.0 / ratio) for case, ratio in (("a", 2.0), ("b", 4.0), ("c", 0.5))]
    text = Report("x", ENVIRONMENT, [*rows, replace(WIN, case="d", haloconv_ms=16.1)]).to_html()
    text = text[text.index("Layer by layer") :]
    one = float(re.search(r'style="--one:([\d.]+)"', text)[1])
    bars = re.findall(r'<td class="(good|bad)" style="--b:([\d.]+)">([\d.]+)x</td>', text)
    ends = {ratio: (look, float(end)) for look, end, ratio in bars}
    assert ends.keys() == {"2.00", "4.00", "0.50"}  # within 2 % there is no bar
    width = ends["2.00"][1] - one
    assert width > 10 and ends["4.00"][1] - one == pytest.approx(2 * width, abs=0.2)
    assert one - ends["0.50"][1] == pytest.approx(width, abs=0.2)
    assert [ends[ratio][0] for ratio in ("2.00", "4.00", "0.50")] == ["good", "good", "bad"]


@pytest.mark.parametrize("ratios, low, high", [([], 0.5, 2), ([1.0], 0.5, 2), ([0.3, 9.0], 0.25, 16), ([4.0], 0.5, 4)])
def test_every_bar_has_room(ratios: list[float], low: float, high: float) -> None:
    scale = Scale.of([*ratios, 0.0, math.nan, math.inf])
    assert (
        scale == (low, high)
        and scale.ends[0] in ("", f"1/{1 / low:g}x")
        and all(0 <= scale.at(ratio) <= 100 for ratio in ratios)
    )


def test_points_of_a_roofline_say_what_they_are() -> None:
    ceilings = ceilings_of("NVIDIA H200")
    other = replace(PLACED, case="B & C", direction="dgrad", haloconv_ms=15.9)
    plot = plots.roofline([PLACED, other], ceilings, "fp32", "x")
    titles = re.findall(r"<use [^>]*><title>([^<]*)</title></use>", plot.svg)
    assert titles == ["A fprop nchw: 37.1 (73%), PyTorch 23.2", "B &amp; C dgrad nchw: 23.3 (46%)"]
    assert len(re.findall("<use ", plot.svg)) == 3  # PyTorch's point is drawn where it is not ours


def test_roofline_shows_rows_with_flops_and_bytes() -> None:
    ceilings = ceilings_of("NVIDIA H200")
    plot = plots.roofline([PLACED, WIN, replace(PLACED, precision="bf16")], ceilings, "fp32", "x")
    assert plot is not None and "1 measurements below" in plot.alt and "A fprop reaches 73% of its roofline" in plot.alt
    assert plots.roofline([WIN], ceilings, "fp32", "x") is None
    assert plots.roofline([PLACED], ceilings, "fp64", "x") is None


# --- a browser


OVERHANG = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
LOOK = """
const e = document.documentElement; const link = document.querySelector('a[href="#of-resnet50"]');
const found = {overhang: e.scrollWidth - e.clientWidth, height: e.scrollHeight,
  first: link.getBoundingClientRect().bottom,
  ground: window.getComputedStyle(document.body).backgroundColor};
window.location.hash = link.hash; const target = document.getElementById("of-resnet50");
found.opened = target.closest("details").open && target.getBoundingClientRect().height > 100;
document.querySelectorAll("details").forEach(each => each.open = true);
const bar = document.querySelector("#whole-1 ~ .scroll td[style]");
found.bar = [parseFloat(window.getComputedStyle(bar).backgroundSize), parseFloat(bar.style.getPropertyValue("--b")),
  parseFloat(bar.closest("table").style.getPropertyValue("--one"))];
found.openOverhang = e.scrollWidth - e.clientWidth; return found;"""
DARK = "--blink-settings=preferredColorScheme=0"


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


@pytest.mark.skipif(browser.BROWSER is None, reason=browser.NO_BROWSER)
def test_the_page_of_networks_in_a_browser(tmp_path: Path) -> None:
    """Networks on the first screen, short while folded, a link opens its section, nothing sticks out; in the dark."""
    phone, screen = browser.evaluate(models_page(), LOOK, (390, 1280), tmp_path, DARK)
    for look in (phone, screen):
        assert look["overhang"] == look["openOverhang"] == 0 and look["opened"]
        assert look["ground"] == "rgb(21, 24, 27)" and look["height"] < 6000
    assert screen["first"] < 900
    pixels, to, one = screen["bar"]
    assert pixels == pytest.approx(8 * 16 * (to - one) / 100, abs=0.5) and pixels > 5
