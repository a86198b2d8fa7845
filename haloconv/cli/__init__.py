"""The command line: one file per verb. A verb parses, calls the library and prints."""

from __future__ import annotations

import typer

from haloconv.cli import bench, doctor, export, report, run, tune

app = typer.Typer(
    help="2-D convolutions on own CUDA kernels: check them, time them, look after them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
for verb in (run.run, report.report, tune.tune, bench.bench, doctor.doctor):
    app.command()(verb)
app.command("export")(export.export_file)
