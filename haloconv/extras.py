"""Packages of the extra ``cli``, which layers do without: what asks for them says so when they are not there."""

from __future__ import annotations

import importlib.util

CLI = ("typer", "rich", "jinja2", "matplotlib")
"""What ``pip install "haloconv[cli]"`` adds."""


def missing(what: str, *packages: str) -> str | None:
    """The sentence that says which of ``packages`` are not installed and how to install them; None if all are.

    ``what`` begins the sentence: whatever needs the packages, in the singular.
    """
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    verb = "is" if len(absent) == 1 else "are"
    return f'{what} needs {", ".join(absent)}, which {verb} not installed: pip install "haloconv[cli]"'


def require(what: str, *packages: str) -> None:
    """Raise ModuleNotFoundError with the sentence of ``missing`` if there is one."""
    sentence = missing(what, *packages)
    if sentence is not None:
        raise ModuleNotFoundError(sentence)
