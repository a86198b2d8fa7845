"""One word per thing: the glossary's terms are unique, and words of the old dialect stay away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h", ".j2")
CODE = sorted(
    file
    for folder in ("haloconv", "tests", "tools")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in SUFFIXES and file != Path(__file__)
)
TERM = re.compile(r"^\| (?P<term>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)
NOT_PROSE = re.compile(r"^```.*?^```$|`[^`]*`|<!--.*?-->|\]\([^)]*\)", re.MULTILINE | re.DOTALL)

OLD_WORDS = {
    r"copy engines?": "TMA",
    r"overlapping launch\w*|launch\w* overlap\w*": "PDL",
    r"rivals?": "baseline",
    r"shares? of the limit|shares are of": "roofline fraction",
    r"(?:a|the|its|their|each) shares?\b(?! (?:a|the|its|their) )": "fraction, or range of work tiles",
    r"parts of (?:the )?channels": "split-K",
    r"turn(?:s|ed|ing)?(?! o(?:n|ff)\b)": "transpose, flip, or alternate",
    r"repair(?:s|ed|ing)?": "nonfinite fix-up",
    r"texts?": "source, or sentence",
    r"(?<!launch\x20)tapes?": "launch tape",
    r"(?:dilation|row|stride) class(?:es)?|class(?:es)? of (?:its |the )?(?:rows|pixels|columns)": "residue class",
    r"runs? of (?:neighbouring |the )?(?:output )?pixels|consumer's run": "pixel run",
    r"(?:joined|raw) (?:rows|planes)": "rows or planes end to end",
    r"steps? of (?:a|the|one) (?:block|column)": "work tile",
}
"""Regular expressions of words that docs do not use any more, and what stands in their place."""

PRIVATE_WORDS_IN_CODE = {
    r"copy engines?": "TMA",
    r"overlapping launch\w*|launch\w* overlap\w*": "PDL",
    r"dilation class(?:es)?": "residue class",
    r"parts of (?:the )?channels": "split-K",
    r"repair(?:s|ed|ing)?": "nonfinite fix-up",
    r"(?:\w*_)?rival\w*": "baseline",
    r"shares? of the limit|of the limit": "roofline fraction",
    r"(?:joined|raw) (?:rows|planes)": "rows or planes end to end",
    r"(?:a|an equal|its|their|each|\w+'s) shares?(?! (?:a|the|its|their) )|cut\.share": "part, fraction, or per_block",
    r"(?:class|struct) ways?": "tiling, variant or writer",
    r"_(?:VERY_)?(?:FEW|MANY|SOME)_(?:TAPS|ROWS|PIXELS|CHANNELS|WEIGHTS|ROUNDS|WARPS)": "the number, where it decides",
    r"(?:joined|kernels?|kernels'|kernel's(?: own)?) texts?|kernel_text\w*|(?:source|joined)\.text|texts? that NVRTC"
    r"|NVRTC \w+ the text|noted_texts|\w*TEXT_NAME": "source",
    r"way_of|_WAYS|ways?(?=:? (?:==?|!=|not in|str\b)|``)": "route, form or variant",
    r"(?:\w*_)?(?<!columns\x20in\x20)turn(?:s|ed|ing)?"  # of columns in turn: stamps hold by the names of runs
    r"(?:_(?!o(?:n|ff)(?:_|\b))\w+|(?!\w|\s+o(?:n|ff)\b))": "round, alternate, transpose or flip",
    r"(?:\w*_)?shares?(?:_\w+)?(?= [-+*/<]?=)|\w+_SHARE": "part, fraction, or per_block",
    r"overlapping(?=\()": "pdl_launch",
}
"""The same for what we wrote besides: a word comes here when the last place that used it is renamed."""


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The page without code, comments and link targets; line numbers stay."""
    text = page.read_text("utf-8")
    return NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)


def places(pattern: str, text: str) -> list[str]:
    """Line and words of each find, whatever the case; a phrase may go across a line's end."""
    spaced = re.compile(r"\b(?:" + pattern.replace(" ", r"\s+") + r")\b", re.IGNORECASE)
    return [f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in spaced.finditer(text)]


def terms() -> list[tuple[str, str]]:
    """Term and meaning of every line of the glossary's tables."""
    rows = [(match["term"].strip(), match["meaning"]) for match in TERM.finditer(GLOSSARY.read_text("utf-8"))]
    return [(term, meaning) for term, meaning in rows if term != "word" and set(term) != {"-"}]


@pytest.mark.parametrize("word", OLD_WORDS)
def test_old_words_do_not_stand_in_docs(word: str) -> None:
    found = {name_of(page): where for page in PAGES if (where := places(word, prose(page)))}
    assert found == {}, f"say: {OLD_WORDS[word]}"


@pytest.mark.parametrize("word", PRIVATE_WORDS_IN_CODE)
def test_private_words_do_not_stand_in_code(word: str) -> None:
    found = {name_of(file): where for file in CODE if (where := places(word, file.read_text("utf-8")))}
    assert found == {}, f"say: {PRIVATE_WORDS_IN_CODE[word]}"


def test_every_term_is_explained_once() -> None:
    words = [word for term, _ in terms() for word in re.split(r", | (?=`)", term)]
    assert len(words) > 60
    assert sorted(words) == sorted(set(words))
    assert [term for term, meaning in terms() if len(meaning) < 10] == []


def test_words_of_several_senses_are_explained() -> None:
    """Each has one meaning where it stands alone; what else it could be has a name of its own."""
    meanings = dict(terms())
    assert {"block", "filter block", "run", "pixel run", "unit", "descriptor unit"} <= meanings.keys()
    others = {
        name_of(file): where
        for file in CODE
        if file.suffix == ".py" and file.is_relative_to(ROOT / "haloconv") and "families" not in file.parts
        and (where := places(r"class (?:Run|Block|Unit)s?", file.read_text("utf-8")))
    }  # fmt: skip
    assert others.keys() == {"haloconv/rims.py"}, "of pixels a run, of CUDA a block: say rectangle or setting"


def test_groups_of_terms_are_alphabetical() -> None:
    groups = GLOSSARY.read_text("utf-8").split("\n## ")[1:]
    assert len(groups) >= 4
    for group in groups:
        names = [match["term"].strip(" `").lower() for match in TERM.finditer(group)]
        names = [name for name in names if name != "word" and set(name) != {"-"}]
        assert len(names) > 3 and names == sorted(names), group.splitlines()[0]


def test_places_finds_words_across_lines_and_leaves_code_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "The copy\nengine `rival` [a](rival.md) brings\n```text\nrival\n```\nRivals return it turned off.\n"
    )
    found = {word: places(word, prose(page)) for word in OLD_WORDS}
    assert {word: where for word, where in found.items() if where} == {
        r"copy engines?": ["1: copy\nengine"],
        r"rivals?": ["6: Rivals"],
    }


@pytest.mark.parametrize(
    ("line", "is_private"),
    [
        ("the kernel's text, as NVRTC gets it", True), ("a page's text", False),
        ("way = way_of(x)", True), ("is under way", False),
        ("self.turns = 1", True), ("they take turns", True), ("return turn_ms", True), ("return x", False),
        ("logs are turned on", False), ("def test_it_can_be_turned_off() -> None:", False),
        ("share = 1 / n", True), ('{"share": 0.5}', False), ("blocks share them", False),
        ("kernel.overlapping(1, 2)", True), ("overlapping writes", False),
    ],
)  # fmt: skip
def test_private_words_are_told_from_plain_english(line: str, is_private: bool) -> None:
    assert any(places(word, line) for word in PRIVATE_WORDS_IN_CODE) == is_private
