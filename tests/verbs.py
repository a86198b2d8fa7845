"""The command line in this process: a verb is run, and what it said is read."""

from __future__ import annotations

from collections.abc import Mapping

from typer.testing import CliRunner, Result

from haloconv.cli import app


def invoke(*arguments: object, env: Mapping[str, str] | None = None) -> Result:
    """What ``haloconv`` does with the arguments."""
    return CliRunner().invoke(app, [*map(str, arguments)], env=env)


def run(*arguments: object) -> Result:
    """``haloconv run``."""
    return invoke("run", *arguments)


def words(result: Result) -> str:
    """All that was printed, with single spaces and no line ends."""
    return " ".join(result.output.split())
