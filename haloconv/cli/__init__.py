"""The command line: one file per verb. A verb parses, calls the library and prints."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from haloconv.cli import doctor, export, report, run, tune
from haloconv.cli.bench import command as bench
from haloconv.version import __version__

VERBS: dict[str, tuple[Callable[..., None], tuple[tuple[str, str], ...]]] = {
    "run": (
        run.run,
        (
            ("haloconv run my_model.py", "every layer in every direction, then the whole model"),
            ("haloconv run KernelBench/level1", "a folder; what holds no torch.nn.Conv2d is skipped"),
            ("haloconv run --precision ieee my_model.py", "full fp32 on both sides, without TF32"),
            ("haloconv run --device emulator --stats my_model.py", "our kernels without a GPU; bytes, bank conflicts"),
        ),
    ),
    "report": (
        report.report,
        (
            ("haloconv report timm:resnet50 --precision bf16 --layout nhwc --html page.html", "a model by name"),
            ("haloconv report my_model.py --html page.html", "a problem file"),
            ("haloconv report --results rows.jsonl --html page.html", "stored rows, without a GPU"),
        ),
    ),
    "tune": (
        tune.tune,
        (
            ("haloconv tune my_model.py", "measure its layers; later processes know the choices"),
            ("haloconv tune resnet50 --precision bf16 --layout nhwc --batch 64", "a model under autocast"),
            ("haloconv tune --suite suite --tag depthwise --limit 120", "at most two minutes"),
            ("haloconv tune --stale", "again what was measured on kernels that have changed since"),
        ),
    ),
    "export": (
        export.export_file,
        (("haloconv export my_model.py -o model_new.py", "one file that needs PyTorch and nvcc, not haloconv"),),
    ),
    "bench": (
        bench.bench,
        (
            (
                "haloconv bench --case A,resnet_stem --precision tf32,fp16 --layout nchw,nhwc",
                "some layers of the suite",
            ),
            ("haloconv bench --stale --limit 500", "again what was not measured on today's kernels"),
            ("haloconv bench --models --case resnet50,unet --limit 300", "whole networks, tuned first"),
            ("haloconv bench --host-cost", "what a call costs the host"),
        ),
    ),
    "doctor": (
        doctor.doctor,
        (
            ("haloconv doctor", "what works here, what does not, and the remedy"),
            ("haloconv doctor --clear-cache", "forget every compiled kernel"),
            ("haloconv doctor --bundle bug.zip", "what a bug report needs, in one file"),
        ),
    ),
}
"""Every verb, with the examples that its help ends with: a command and what it does."""


def epilog(examples: tuple[tuple[str, str], ...]) -> str:
    """The examples as the last paragraphs of a help page."""
    return "\n\n".join(["Examples:", *(f"{command}  ({meaning})" for command, meaning in examples)])


class Verbs(TyperGroup):
    """The command line, on terminals of any encoding: what one cannot show becomes a question mark, not an error."""

    def main(self, *args: Any, **options: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # stderr never fails: Python has it write escapes
        return super().main(*args, **options)


app = typer.Typer(
    cls=Verbs,
    help="2-D convolutions of PyTorch on own CUDA kernels: check them, time them, choose, and see why.",
    epilog=epilog(
        (
            ("haloconv doctor", "1. is everything here?"),
            ("haloconv run my_model.py", "2. is it right, and faster?"),
            ("haloconv tune my_model.py", "3. measure once which kernels its layers run on"),
            ("haloconv report my_model.py --html page.html", "4. a page about every layer"),
            ("haloconv VERB --help", "more examples"),
        )
    ),
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"haloconv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """What stands before a verb."""


for name, (verb, examples) in VERBS.items():
    app.command(name, epilog=epilog(examples))(verb)
