"""The site that ``make docs`` builds of the pages in docs: what of it can be held to without building it."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import yaml

import haloconv
from haloconv.accelerate import Acceleration
from haloconv.report import Report, Row
from haloconv.tune.advice import Advice, Piece
from tools import site_links

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), yaml.BaseLoader)  # it names a Python function
PUBLIC = [name for name in haloconv.__all__ if name != "__version__"]


def files_of(nav: object) -> list[str]:
    """The files of a part of the navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [file for part in parts for file in files_of(part)]


def test_every_page_is_in_the_navigation_once_and_every_entry_exists() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    entries = files_of(SITE["nav"])
    assert sorted(entries) == sorted(pages)
    assert entries[:2] == ["index.md", "quickstart.md"]


def test_a_warning_is_an_error_and_anchors_are_those_of_the_forge() -> None:
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\ndocs:")[2].partition("\n\n")[0]
    assert "mkdocs build --strict" in recipe
    assert set(SITE["validation"]["nav"].values()) | set(SITE["validation"]["links"].values()) == {"warn"}
    (toc,) = [each["toc"] for each in SITE["markdown_extensions"] if "toc" in each]
    assert toc["slugify"] == {"kwds": {"case": "lower"}}
    assert SITE["theme"]["font"] == "false"


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("guides/a.md", "[x](../../examples/u.py)", "[x](https://forge/h/blob/main/examples/u.py)"),
        ("a.md", "[x](../README.md#use)", "[x](https://forge/h/blob/main/README.md#use)"),
        ("guides/a.md", "[x](../tuning.md#records)", "[x](../tuning.md#records)"),
        ("a.md", "[x](https://elsewhere/../a) [y](b.md)", "[x](https://elsewhere/../a) [y](b.md)"),
    ],
)
def test_links_out_of_docs_lead_to_the_forge(page: str, text: str, expected: str) -> None:
    place = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert site_links.on_page_markdown(text, place, SimpleNamespace(repo_url="https://forge/h/")) == expected
    assert SITE["hooks"] == ["tools/site_links.py"]


def test_the_site_names_the_home_that_the_package_names() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'Source = "{SITE["repo_url"]}"' in project
    assert f'Documentation = "{SITE["site_url"].rstrip("/")}"' in project


def test_the_reference_has_every_public_name() -> None:
    """Functions that share their name with a module are found by their place and headed by their name."""
    page = (DOCS / "api.md").read_text("utf-8")
    shown = {}
    for place, heading in re.findall(r"^::: (\S+)$(?:\n {4}options:\n {6}heading: (\S+)$)?", page, re.MULTILINE):
        module, _, name = place.rpartition(".")
        shown[heading or place] = getattr(import_module(module), name)
    assert {name: shown.get(f"haloconv.{name}") for name in PUBLIC} == {
        name: getattr(haloconv, name) for name in PUBLIC
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_name_parameters_as_they_are(name: str) -> None:
    """One line each, for a reader of the reference: a line for two would not be found, nor an old name."""
    function = getattr(haloconv, name)
    text = inspect.getdoc(function) or ""
    assert text.partition("\n")[0].endswith((".", ":"))
    section = re.search(r"^Args:\n(?P<lines>(?:(?: .*)?\n)+)", text, re.MULTILINE)
    if section is not None:
        documented = re.findall(r"^ {4}(\S[^:]*):", section["lines"], re.MULTILINE)
        parameters = list(inspect.signature(function).parameters)
        assert documented == [each for each in parameters if each in documented]


def test_the_reference_has_what_public_functions_return() -> None:
    returned = {get_type_hints(getattr(haloconv, name)).get("return") for name in PUBLIC}
    ours = {each for each in returned if getattr(each, "__module__", "").startswith("haloconv.")}
    assert {Acceleration, Advice, Report} <= ours
    shown = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    assert {each.__name__ for each in ours} <= {place.rpartition(".")[2] for place in shown}


@pytest.mark.parametrize("shown", [Acceleration, Advice, Piece, Report, Row])
def test_what_is_returned_has_a_text_too(shown: type) -> None:
    assert not (inspect.getdoc(shown) or "").startswith(f"{shown.__name__}(")


def test_messages_of_the_troubleshooting_page_are_ours() -> None:
    """Word for word, with dots for what a message puts in: each stands in some source file."""
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(messages) >= 10
    texts = "".join(file.read_text("utf-8") for file in (ROOT / "haloconv").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", texts)  # strings that go on in the next line
    sources = joined + re.sub(r"\{[^{}]*\}", "...", joined)
    assert [message for message in messages if message not in sources] == []
