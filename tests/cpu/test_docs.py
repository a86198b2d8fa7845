"""What README and docs promise: snippets run, commands and links exist, tables equal the committed results."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import haloconv
from haloconv.bench.results import latest_name, read_rows
from haloconv.bench.suite import SUITES
from haloconv.cli import VERBS, app
from haloconv.env import VARIABLES
from haloconv.families import OWN
from haloconv.reference import ELEMENT_FACTOR, IEEE_NORM, NORM_LIMITS
from haloconv.version import __version__
from tools import readme_results

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
KERNELS = ROOT / "docs" / "kernels"
FAMILY_PAGES = sorted(page for page in KERNELS.glob("*.md") if page.name != "README.md")
KERNEL_PAGES = sorted(KERNELS.rglob("*.md"))
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *GUIDES, *KERNEL_PAGES]
LONG_LINES = ("notebook.md", "results.md", "CHANGELOG.md")  # a diary, and a page that is generated
MOST_LETTERS = 160
SECTIONS = [(page, section) for page, sections in readme_results.PAGES.items() for section in sections]
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\((?P<target>[^)#\s]*)#(?P<anchor>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
RECORD = {
    "case": "A", "direction": "fprop", "precision": "fp32", "layout": "nchw", "family": "direct",
    "aten_ms": 16.4, "haloconv_ms": 20.5, "ratio": 0.8, "share": 0.35, "spread": 0.01, "limit_ms": 7.2,
    "gpu": "Some GPU", "torch": "2.13", "cudnn": "9.19", "cuda": "13.0", "commit": "abc1234",
    "date": "2026-01-02T03:04:05Z",
}  # fmt: skip


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [block["text"] for block in FENCE.finditer(page.read_text("utf-8")) if block["language"] == language]


def shell_lines(*pages: Path) -> list[list[str]]:
    """Every command of the pages' bash blocks, split, without comments."""
    lines = [line for page in pages for text in blocks(page, "bash") for line in text.splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_snippets_run(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "snippet"}
    try:
        for text in blocks(page, "python"):
            exec(compile(text, name_of(page), "exec"), namespace)
    finally:
        haloconv.set_logs(choice=False, compile=False, cache=False)  # calls with logs have more frames


def test_every_page_with_an_api_has_a_snippet() -> None:
    assert {name_of(page) for page in PAGES if blocks(page, "python")} >= {
        "README.md",
        "docs/precision.md",
        "docs/tuning.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(page.read_text("utf-8"))]
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings, code blocks left out."""
    titles = [match["title"] for match in HEADING.finditer(FENCE.sub("", page.read_text("utf-8")))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_anchors_are_headings(page: Path) -> None:
    found = [(match["target"], match["anchor"]) for match in ANCHOR.finditer(page.read_text("utf-8"))]
    inside = [(page.parent / target if target else page, anchor) for target, anchor in found if "://" not in target]
    assert [f"{target}#{anchor}" for target, anchor in inside if anchor not in anchors_of(target)] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    used = {word for words in shell_lines(*PAGES) if words[0] == "make" for word in words[1:] if "=" not in word}
    assert {"demo", "test"} <= used <= targets


def options_of(verb: object) -> set[str]:
    """Every spelling of every option, `--no-tune` beside `--tune`."""
    return {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}


def test_command_lines_exist() -> None:
    """Each `haloconv VERB --option` of the pages is known to the command line."""
    verbs = typer.main.get_command(app).commands
    used = [words[1:] for words in shell_lines(*PAGES) if words[0] == "haloconv"]
    assert used
    for verb, *arguments in used:
        assert verb in verbs
        assert {argument for argument in arguments if argument.startswith("--")} <= options_of(verbs[verb])


def test_help_pages_end_with_commands_that_exist() -> None:
    """Every verb has examples, with options that it has, and its help shows them."""
    verbs = typer.main.get_command(app).commands
    assert verbs.keys() == VERBS.keys()
    for name, (_, examples) in VERBS.items():
        shown = " ".join(CliRunner().invoke(app, [name, "--help"]).output.split())
        assert examples
        for command, meaning in examples:
            program, verb, *arguments = shlex.split(command)
            assert (program, verb) == ("haloconv", name)
            assert {argument for argument in arguments if argument.startswith("-")} <= options_of(verbs[name]), command
            assert f"{command} ({meaning})" in shown


def test_readme_shows_a_result_by_line_30_and_links_every_page() -> None:
    text = README.read_text("utf-8")
    lines = text.splitlines()
    assert 1 < lines.index("<!-- headline:begin -->") < lines.index("<!-- headline:end -->") < 30
    assert re.search(r"\*\*\d+\.\d\d×\*\*", "\n".join(lines[:30]))
    linked = {match["target"] for match in LINK.finditer(text[text.index("## More") :])}
    index = ROOT / "docs" / "kernels" / "README.md"
    assert linked >= {name_of(page) for page in [*PAGES, index] if page not in (README, *FAMILY_PAGES)}
    assert "docs/kernels/README.md" in linked
    for page, folder in ((README, "docs/kernels/"), (index, "")):
        targets = {match["target"] for match in LINK.finditer(page.read_text("utf-8"))}
        assert targets >= {folder + each.name for each in FAMILY_PAGES}


def test_pages_are_short() -> None:
    most = dict.fromkeys([README, *KERNEL_PAGES], 150) | {KERNELS / "README.md": 60}
    assert {name_of(page): len(page.read_text("utf-8").splitlines()) for page in most if
            len(page.read_text("utf-8").splitlines()) > most[page]} == {}  # fmt: skip


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in LONG_LINES], ids=name_of)
def test_lines_of_prose_are_short(page: Path) -> None:
    """So that a page of few lines is a short one. Tables and what is generated are left out."""
    prose = GENERATED.sub("", FENCE.sub("", page.read_text("utf-8"))).splitlines()
    assert [line for line in prose if len(line) > MOST_LETTERS and not line.startswith("|")] == []


def test_each_family_has_a_page_and_more_only_in_a_folder_of_its_name() -> None:
    assert {page.stem for page in FAMILY_PAGES} == set(OWN)
    folders = {page.parent.name for page in KERNEL_PAGES if page.parent != KERNELS}
    assert folders and folders <= set(OWN)


@pytest.mark.parametrize("page", FAMILY_PAGES, ids=name_of)
def test_family_pages_have_the_same_parts_and_name_files_that_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    titles = [match["title"] for match in HEADING.finditer(FENCE.sub("", text))]
    parts = ["The trick", "What bounds it", "Budget", "Files", "What rows prove"]
    assert [title for title in titles if title in parts] == parts and blocks(page, "text")
    files = text[text.index("## Files") : text.index("## What rows prove")]
    folders = [ROOT / "haloconv" / name for name in (f"families/{page.stem}", "families/reduce", "kernels")]
    named = set(re.findall(r"`([\w/]+\.(?:py|cuh?))`", files))
    assert f"families/{page.stem}/" in files and len(named) > 3
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)] == []


def test_design_page_names_files_that_exist() -> None:
    layout = blocks(ROOT / "docs" / "design.md", "text")[0]
    inside = re.findall(r"^  (\S+)", layout.partition("\n")[2].partition("examples/")[0], re.MULTILINE)
    assert len(inside) > 15
    missing = [name for name in inside if not (ROOT / "haloconv" / name).exists()]
    assert not missing


def test_precision_page_states_the_limits_in_force() -> None:
    limits = (ROOT / "docs" / "precision.md").read_text("utf-8").partition("## Limits")[2]
    stated = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", limits, re.MULTILINE))
    ieee, _, growth = stated.pop("fp32").partition(" * ")
    assert float(ieee) == IEEE_NORM and growth == "sqrt(log2(L))"
    assert {label: float(norm) for label, norm in stated.items()} == NORM_LIMITS
    assert f"more than {ELEMENT_FACTOR:g} times the norm's limit" in " ".join(limits.split())


def test_environment_variables_are_those_of_the_package() -> None:
    named = {name for page in PAGES for name in re.findall(r"\bHALOCONV_[A-Z_]+", page.read_text("utf-8"))}
    assert named == set(VARIABLES)


def test_changelog_has_the_form_that_it_names() -> None:
    """Keep a Changelog: Unreleased, then versions with a date, newest first; known headings; a link for each."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"^## \[(.+)\]( - \d{4}-\d\d-\d\d)?$", text, re.MULTILINE)
    assert versions[0] == ("Unreleased", "") and versions[1][0] == __version__
    assert len(versions) == len(re.findall(r"^## ", text, re.MULTILINE)) and all(date for _, date in versions[1:])
    numbers = [tuple(map(int, name.split("."))) for name, _ in versions[1:]]
    assert numbers == sorted(numbers, reverse=True)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds
    assert re.findall(r"^\[(.+)\]: https://", text, re.MULTILINE) == [name for name, _ in versions]


def test_version_is_in_one_place() -> None:
    assert haloconv.__version__ == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'path = "haloconv/version.py"' in pyproject and __version__ not in re.sub(r"[\w-]+[=<>].*", "", pyproject)


@pytest.mark.parametrize("page", readme_results.PAGES)
def test_generated_sections_equal_the_committed_results(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert readme_results.filled(page, text) == text, "run: python -m tools.readme_results"


def test_every_marker_is_filled_by_the_generator() -> None:
    marked = {
        (name_of(page), name) for page in PAGES for name in re.findall(r"<!-- (\w+):begin -->", page.read_text("utf-8"))
    }
    assert marked == set(SECTIONS)
    for page in FAMILY_PAGES:
        assert (name_of(page), "rows") in marked


def test_every_row_of_layers_is_counted_and_shown() -> None:
    """Losses included: each family's wins, ties and losses add up to the rows of all suites."""
    suites = [suite.stem for suite in SUITES.glob("*.toml") if suite.stem != "models"]
    by_gpu = {
        folder.name: [row for suite in suites for row in read_rows(folder / latest_name(suite))]
        for folder in (ROOT / "benchmarks" / "results").iterdir()
    }
    rows = [row for found in by_gpu.values() for row in found]
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    lines = [line.split("|") for line in readme_results.tally_section().splitlines() if line.startswith("| `")]
    assert sum(int(line[2]) for line in lines) == len(rows)
    assert sum(int(number) for line in lines for number in line[3:7]) == len(rows)
    uneven = [row for row in rows if row["precision"] == "tf32" and row["aten_error"] < 1e-5 <= row["error"]]
    assert sum(int(line[6]) for line in lines) == len(uneven) > 0
    assert sum(int(line[5]) for line in lines) == sum(row["ratio"] < 0.98 for row in rows if row not in uneven) > 0
    assert f"All layers: {len(by_gpu['nvidia-h200'])} measurements" in README.read_text("utf-8")
    for row in rows:
        times = f"{readme_results.number(row['aten_ms'])} → {readme_results.number(row['haloconv_ms'])} ("
        assert any(
            times in line for line in text.splitlines() if line.startswith(f"| {row['case']} | {row['precision']} |")
        )


def test_results_section_shows_losses_and_dashes(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results" / "some-gpu"
    folder.mkdir(parents=True)
    unknown = {"direction": "dgrad", "aten_ms": None, "ratio": None, "share": None}
    win = {"case": "unet", "aten_ms": 41.0, "aten_best_ms": 20.5, "ratio": 2.0, "share": 0.7}
    rows = [RECORD, RECORD | unknown, RECORD | win]
    (folder / "latest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    text = readme_results.results_section(tmp_path)
    assert "| A | fp32 | nchw | direct | 16.4 → 20.5 (0.80×, 35 %) | – → 20.5 |" in text
    assert "| unet | fp32 | nchw | direct | 41.0 → 20.5 (**2.00×**, 1.00× of its better layout, 70 %) |" in text
    assert "2 measurements, haloconv faster in 1, within 2 % in 0, slower in 1" in text
    assert "in its faster layout: haloconv faster in 0, within 2 % in 1, slower in 1" in text
    assert "**Some GPU**" in text and "commit abc1234, 2026-01-02;" in text


def write_rows(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / "benchmarks" / "results" / "gpu").mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks" / "results" / "gpu" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_headline_shows_its_layers_whatever_their_figures(tmp_path: Path) -> None:
    assert readme_results.headline_section(tmp_path) == readme_results.NO_RESULTS
    (case, precision, layout, about), *_ = readme_results.HEADLINE
    place = {"case": case, "precision": precision, "layout": layout}
    rows = [{**RECORD, **place, "reason": "asked for"}, {**RECORD, **place, "direction": "wgrad", "ratio": 2.5}]
    write_rows(tmp_path, "latest.jsonl", rows)
    text = readme_results.headline_section(tmp_path)
    assert f"| {about} | {precision} | {layout} | 0.80× | – | **2.50×** |" in text
    assert text.count("| – | – | – |") == len(readme_results.HEADLINE) - 1
    assert "Losses here asked for a family by name" in text and "layout): Some GPU." in text
    write_rows(tmp_path, "latest.jsonl", rows[1:])
    assert "Losses here" not in readme_results.headline_section(tmp_path)


def test_faster_layout_of_the_baseline_comes_from_the_other_row(tmp_path: Path) -> None:
    """Wins that are losses against PyTorch's faster layout are counted as such, over all suites."""
    win = {**RECORD, "aten_ms": 4.0, "haloconv_ms": 2.0, "ratio": 2.0}
    other = {**RECORD, "layout": "nhwc", "aten_ms": 1.0, "haloconv_ms": 2.0, "ratio": 0.5}
    write_rows(tmp_path, "latest.jsonl", [win, other])
    write_rows(tmp_path, "latest-small.jsonl", [{**RECORD, "case": "small", "family": "halo_sm90", "ratio": 1.01}])
    text = readme_results.headline_section(tmp_path)
    assert "All layers: 3 measurements, haloconv faster in 1, within 2 % in 1, slower in 1" in text
    assert "in its faster layout: haloconv faster in 0, within 2 % in 1, slower in 2" in text
    tally = readme_results.tally_section(tmp_path)
    ends = "2.00× A fp32 nchw fprop | 0.50× A fp32 nhwc fprop"
    assert f"| `direct` | 2 | 1 | 0 | 1 | 0 | 1.25× | {ends} | 0.50× | 2 |" in tally
    assert "| `halo_sm90` | 1 | 0 | 1 | 0 | 0 |" in tally
    page = readme_results.family_section("direct", tmp_path)
    assert "| A | nchw | fp32 | 2.00× (0.50×), 35 % |" in page and "| A | nhwc | fp32 | 0.50×, 35 % |" in page
    small = readme_results.family_section("halo_sm90", tmp_path)
    assert "Suites of other layers: 1 measurements" in small


def test_networks_and_the_bars_they_miss(tmp_path: Path) -> None:
    assert readme_results.models_section(tmp_path) == readme_results.NO_NETWORKS
    whole = {**RECORD, "case": "net (model)", "family": "direct", "error": 0.0}
    peaks = {"aten_peak_bytes": 100, "haloconv_peak_bytes": 104}
    rows = [
        {**whole, "direction": "forward", "aten_ms": 3.0, "haloconv_ms": 2.0, "ratio": 1.5, **peaks},
        {**whole, "direction": "step", "aten_ms": 2.0, "haloconv_ms": 2.5, "ratio": 0.8},
        {**RECORD, "case": "net.stem", "error": 0.0, "aten_ms": 0.99, "haloconv_ms": 1.0},
    ]
    write_rows(tmp_path, "latest-models.jsonl", rows)
    text = readme_results.models_section(tmp_path)
    assert (
        "| net | fp32 | nchw | 3.00 → 2.00 (**1.50×**) | 1.04× | 2.00 → 2.50 (0.80×) | – | 1 | 0.99× stem fprop |"
        in text
    )
    assert "1 missed by these rows" in text and "- net fp32 nchw: step of the network at 0.80x" in text
    assert "Inference, 1 settings: 1.50 times PyTorch's speed, 1.50 times its speed in its faster layout." in text
    assert "A training step, 1 settings: 0.80 times PyTorch's speed, 0.80 times its speed in its faster" in text
    faster = {**rows[0], "layout": "nhwc", "aten_ms": 1.0, "ratio": 0.5}
    write_rows(tmp_path, "latest-models.jsonl", [rows[0], faster])
    assert "3.00 → 2.00 (**1.50×**, 0.50×)" in readme_results.models_section(tmp_path)
    write_rows(tmp_path, "latest-models.jsonl", [rows[0], rows[2]])
    assert "all met by these rows" in readme_results.models_section(tmp_path)


@pytest.mark.parametrize(("page", "name"), SECTIONS)
def test_missing_markers_are_refused(page: str, name: str) -> None:
    text = (ROOT / page).read_text("utf-8").replace(f"<!-- {name}:begin -->", "")
    with pytest.raises(ValueError, match=f"{name}:begin"):
        readme_results.filled(page, text)
    assert {"headline", "models", "results", "verified"} <= {section for _, section in SECTIONS}
