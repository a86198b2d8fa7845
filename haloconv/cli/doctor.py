"""``haloconv doctor``: what this machine has, what works on it, and what to do about what does not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from haloconv import env, jit
from haloconv.choose.choice import DISABLED
from haloconv.cli.output import Force, check_outputs, refusal, write_output
from haloconv.doctor.bundle import bundle
from haloconv.doctor.checks import Check, run_checks
from haloconv.doctor.facts import Facts, gather_facts


def doctor(
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="First remove every compiled kernel, the emulator's too.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the findings to FILE.")
    ] = None,
    bundle_file: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE.zip", help="Also write all that a bug report needs to FILE.zip."),
    ] = None,
    force: Force = False,
) -> None:
    """Show what this machine has and what works on it. The exit code is 0 if everything it needs works."""
    console = Console()
    try:
        check_outputs({"--json": json_file, "--bundle": bundle_file}, force=force)
    except typer.BadParameter as error:
        raise refusal(error) from None
    if clear_cache:
        console.print(f"removed {jit.clear_cache()} entries from {jit.cache_root()}", soft_wrap=True)
    facts = gather_facts()
    checks = run_checks()
    healthy = all(check.ok or not check.needed for check in checks)
    _show(console, facts, checks, healthy)
    if json_file is not None:
        findings = {"healthy": healthy, "facts": facts, "checks": [asdict(check) for check in checks]}
        write_output(json_file, json.dumps(findings, indent=1) + "\n", console)
    if bundle_file is not None:
        write_output(bundle_file, bundle(facts, checks), console)
        console.print("look into its README.txt before you send it", markup=False)
    raise typer.Exit(0 if healthy else 1)


def _show(console: Console, facts: Facts, checks: list[Check], healthy: bool) -> None:
    for section, values in facts.items():
        table = Table(title=section, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="cyan", overflow="fold")
        table.add_column(overflow="fold")
        for name, value in values.items():
            table.add_row(Text(name), Text(value))
        console.print(table, "")
    table = Table(title="checks", title_justify="left", title_style="bold", show_header=False, box=None)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        style = "green" if check.ok else "red" if check.needed else "yellow"
        remedy = f"\nremedy: {check.remedy}" if check.remedy and not check.ok else ""
        table.add_row(Text(check.verdict, style=style), Text(check.name), Text(check.detail + remedy))
    console.print(table, "")
    if env.disabled():
        console.print(f"{DISABLED}, whatever works here", style="bold yellow")
    console.print(
        "everything that this machine needs works" if healthy else "something that this machine needs does not work",
        style="bold green" if healthy else "bold red",
    )
