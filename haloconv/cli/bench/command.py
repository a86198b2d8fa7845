"""``haloconv bench``: time layers, networks, the host side of a call, or compiling, against PyTorch; keep the rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import torch
import typer
from rich.console import Console

from haloconv.bench.costs.cold_start import NETWORKS as COLD_NETWORKS
from haloconv.bench.costs.scaling import PRECISIONS as SCALED_PRECISIONS
from haloconv.bench.costs.scaling import Workload
from haloconv.bench.layer import LAYOUTS
from haloconv.bench.networks.network import Effort, NetworkCase, load_networks
from haloconv.bench.one_kernel import check_asked
from haloconv.bench.results import MAIN_SUITE, gpu_folder, latest_name, newest_rows, read_rows, results_folder
from haloconv.bench.sample import DRAWN, fresh_seed, read_drawn
from haloconv.bench.sample import sample as draw
from haloconv.bench.stale import stale_networks, stale_settings
from haloconv.bench.suite import PRECISIONS, SuiteError, find_suite, load_suite, select
from haloconv.bench.trial import SETTLE_S, Budget
from haloconv.cli.bench.cold_start import ColdStartOrder, bench_cold_start
from haloconv.cli.bench.compiled import SUITE as COMPILED
from haloconv.cli.bench.compiled import bench_compiled
from haloconv.cli.bench.costs import bench_compiling, bench_host_cost, show_own_host_cost
from haloconv.cli.bench.models import SUITE as NETWORKS
from haloconv.cli.bench.models import NetworkOrder, bench_models
from haloconv.cli.bench.scaling import ScalingOrder, bench_scaling
from haloconv.cli.bench.suite import TIMED, Order, SampleOrder, Timed, bench_sample, bench_suite, pieces, stale_pieces
from haloconv.cli.live import make_console
from haloconv.cli.output import check_folder, positive, refusal
from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel
from haloconv.problem import DIRECTIONS
from haloconv.report.rows import WHOLE_DIRECTIONS, WholeDirection

SEED_CASES = ("A", "B", "C")
Word = TypeVar("Word", bound=str)
Only = Mapping[tuple[str, str, str], Collection[tuple[str, str]]]
"""Name, precision and layout of networks, and the cases and directions of their rows."""


def known(name: str) -> str:
    """What ``--family`` names, for ``callback=``. Raises BadParameter if there is no such family or kernel."""
    try:
        check_asked(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return name


def countable(sample: str) -> str:
    """What ``--sample`` names, for ``callback=``. Raises BadParameter if it is no number above 0 and no file."""
    if sample and not _is_count(sample) and not Path(sample).is_file():
        raise typer.BadParameter(f"{sample} is neither a number above 0 nor a file of layers")
    return sample


def _is_count(sample: str) -> bool:
    return sample.isdecimal() and int(sample) > 0


def bench(
    suite: Annotated[Path | None, typer.Option(help="A file, or few_images, fronts, pointwise, rims, models.")] = None,
    case: Annotated[str, typer.Option(help="Names of cases, separated by commas; all by default.")] = "",
    tag: Annotated[str, typer.Option(help="Only cases with one of these tags.")] = "",
    direction: Annotated[str | None, typer.Option(help="Of fprop=forward,dgrad,wgrad,step; default: no step.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of fp64,fp32,tf32x3,tf32,fp16,bf16; by default fp32, networks tf32,bf16.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Of nchw,nhwc; by default nchw, and both for networks.")] = None,
    family: Annotated[str, typer.Option(help="The family, or a kernel as depthwise/band.", callback=known)] = "auto",
    budget: Annotated[float, typer.Option(help="Seconds of timing per row.", callback=positive)] = 0.5,
    other_layout: Annotated[bool, typer.Option(help="Also time PyTorch in the other memory order.")] = True,
    results: Annotated[Path | None, typer.Option(help="The folder of rows, by default beside the suite.")] = None,
    sample: Annotated[str, typer.Option(help="So many random layers, or those of a file.", callback=countable)] = "",
    seed: Annotated[int | None, typer.Option(help="Which random layers; a fresh seed, printed, by default.")] = None,
    models: Annotated[bool, typer.Option("--models", help="Time whole networks instead (--case names them).")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Networks: eager and compiled, both sides.")] = False,
    search: Annotated[bool, typer.Option(help="--compiled: also by max-autotune (minutes a network).")] = True,
    jobs: Annotated[int, typer.Option(help="--compiled: networks at once on each GPU.", min=1)] = 1,
    tune: Annotated[bool, typer.Option(help="Networks: tune each first.")] = True,
    layers: Annotated[bool, typer.Option(help="Networks: time each distinct layer, too.")] = True,
    gpus: Annotated[str, typer.Option(help="Networks: spread them over these GPUs, as 0,1; one by default.")] = "",
    limit: Annotated[float | None, typer.Option(help="Seconds after which nothing begins.", callback=positive)] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Only what has rows that are not of today's sources.")] = False,
    host_cost: Annotated[bool, typer.Option("--host-cost", help="Time the host's side of calls instead.")] = False,
    compile_time: Annotated[bool, typer.Option("--compile-time", help="Time compiling A, B, C or --family.")] = False,
    cold_start: Annotated[bool, typer.Option("--cold-start", help="Time first steps of networks instead.")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="Time images divided over --gpus, or all.")] = False,
) -> None:
    """Time the suite's layers against PyTorch at equal precision, checking every output before and after.
    With --models whole networks (resnet50, convnext_tiny, ...): inference, a training step, every layer, memory.

    Exit code 0: every check passed, every budget and bar was met. 1: not. 2: no GPU, or an option cannot be used.
    """
    console = make_console()
    device = _device(host_cost, console)
    timing = Budget(budget, other_layout=other_layout and not models, settle_s=SETTLE_S)  # networks: both are settings
    try:
        words = _words(case, tag, direction, precision, layout, family)
        suite = find_suite(suite or Path(NETWORKS if models or cold_start else MAIN_SUITE))
        folder, since = _folders_of_rows(results, suite, device, stale)
        if models:
            effort = Effort(timing, tune, layers=layers, search=search)
            order = replace(_networks(suite, words, effort, compiled, since), limit_s=limit, jobs=jobs)
            passed = (bench_compiled if compiled else bench_models)(order, _gpus(gpus) or [device], folder, console)
        elif cold_start:
            passed = bench_cold_start(_starts(suite, words, limit), str(device), folder, console)
        elif scaling:
            passed = bench_scaling(_divided(words, gpus), folder, console)
        elif host_cost:
            passed = bench_host_cost(device, folder, console)
        elif sample:
            passed = bench_sample(_sampled(sample, seed, words, timing, limit), device, folder, console)
        elif compile_time:
            passed = bench_compiling(select(load_suite(suite), SEED_CASES), family, device, folder, console)
        else:
            passed = bench_suite(_layers(suite, words, timing, limit, since), device, folder, console)
    except (SuiteError, typer.BadParameter) as error:
        raise refusal(error) from None
    raise typer.Exit(0 if passed else 1)


def _device(host_cost: bool, console: Console) -> torch.device:
    """Where to time. Raises typer.Exit without a GPU: then our side of the host's time can be told, nothing else."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if not host_cost:
        raise refusal("bench needs an NVIDIA GPU; `haloconv doctor` says why there is none")
    show_own_host_cost(console)
    raise typer.Exit(0)


def _folders_of_rows(results: Path | None, suite: Path, device: torch.device, stale: bool) -> tuple[Path, Path | None]:
    """Where rows of the device go, and where stale ones are looked for, None if they are not.

    Raises typer.BadParameter if nothing can be written there.
    """
    folder = gpu_folder(results or results_folder(suite), torch.cuda.get_device_name(device))
    check_folder("--results", folder / latest_name(suite.stem))
    return folder, folder if stale else None


class Words(NamedTuple):
    """What the command line says of layers, each word an allowed one; None where nothing was said."""

    cases: list[str]
    tags: list[str]
    directions: list[Timed] | None
    precisions: list[PrecisionLabel] | None
    layouts: list[Layout] | None
    family: str


def _words(case: str, tag: str, direction: str | None, precision: str | None, layout: str | None, family: str) -> Words:
    """The words of the options, whatever is timed. Raises typer.BadParameter for one that is not allowed."""
    return Words(
        listed(case),
        listed(tag),
        None if direction is None else choices("--direction", direction.replace("forward", "fprop"), TIMED),
        None if precision is None else choices("--precision", precision, PRECISIONS),
        None if layout is None else choices("--layout", layout, LAYOUTS),
        family,
    )


def _sampled(sample: str, seed: int | None, words: Words, budget: Budget, limit: float | None) -> SampleOrder:
    """The order for random layers, of a fresh seed if none is given, or for all those of a file.

    Raises BadParameter for a file that cannot be read, or beside one for what draws others.
    """
    if _is_count(sample):
        drawn_by = fresh_seed() if seed is None else seed
        return SampleOrder(draw(int(sample), drawn_by, words.precisions or list(DRAWN)), budget, drawn_by, limit)
    if seed is not None or words.precisions:
        raise typer.BadParameter(f"--seed and --precision are for random layers, and {sample} says which it has")
    try:
        return SampleOrder(read_drawn(Path(sample).read_text(encoding="utf-8")), budget, None, limit)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{sample}: {error}") from None


def _layers(suite: Path, words: Words, budget: Budget, limit: float | None, stale: Path | None) -> Order:
    """The order for a suite; for the rows in the folder ``stale`` alone that are not of today's sources.

    By default every direction, fp32 and nchw; of stale rows all.
    """
    cases = select(load_suite(suite), words.cases, words.tags)
    directions = words.directions or [*(DIRECTIONS if stale is None else TIMED)]
    precisions = words.precisions or _usual(["fp32"], PRECISIONS, stale)
    layouts = words.layouts or _usual(["nchw"], LAYOUTS, stale)
    if stale is None:
        return Order(pieces(cases, directions, precisions, layouts, words.family), budget, suite.stem, limit)
    rows = [
        row
        for row in read_rows(stale / latest_name(suite.stem))
        if row["direction"] in directions and row["precision"] in precisions and row["layout"] in layouts
    ]
    return Order(stale_pieces(cases, stale_settings(rows)), budget, suite.stem, limit)


def _stale_rows(folder: Path | None, what: str) -> Only | None:
    """What of networks has rows in the folder that are not of today's sources; None without a folder.

    They are read from the dated files: a bench that was stopped in the middle has not made the file of the latest.
    """
    return None if folder is None else stale_networks(newest_rows(folder, what))


def _networks(suite: Path, words: Words, effort: Effort, compiled: bool, stale: Path | None) -> NetworkOrder:
    """The order for networks; for the rows in the folder ``stale`` alone that are not of today's sources.

    Of these, rows of layers among them, those of the directions that are asked for.
    """
    only = _stale_rows(stale, COMPILED if compiled else NETWORKS)
    whole = words.directions
    if only is not None and not compiled and whole is not None:
        wanted = {key: [row for row in rows if row[1] in whole] for key, rows in only.items()}
        only, whole = {key: rows for key, rows in wanted.items() if rows}, None
    return NetworkOrder(
        cases=_named(load_networks(suite), words.cases),
        precisions=words.precisions or _usual(["tf32", "bf16"], PRECISIONS, only),
        layouts=words.layouts or _usual(["nchw", "nhwc"], LAYOUTS, only),
        effort=effort,
        only=only,
        directions=_whole_directions(whole, compiled),
    )


def _whole_directions(asked: list[Timed] | None, compiled: bool) -> Sequence[WholeDirection]:
    """Inference and a training step, or what ``asked`` names. Raises typer.BadParameter for anything else."""
    names: dict[str, WholeDirection] = {"fprop": "forward", "step": "step"}
    if asked is None:
        return WHOLE_DIRECTIONS
    if not compiled or not set(asked) <= set(names):
        raise typer.BadParameter("--direction of networks is fprop or step with --compiled, else is for --stale alone")
    return [names[each] for each in asked]


def _starts(suite: Path, words: Words, limit: float | None) -> ColdStartOrder:
    """The order for first steps: by default of three networks in bf16, in both layouts."""
    cases = load_networks(suite)
    usual = [each.name for each in cases if each.name in COLD_NETWORKS]
    layouts = words.layouts or ["nhwc", "nchw"]
    return ColdStartOrder(_named(cases, words.cases or usual), words.precisions or ["bf16"], layouts, limit)


def _divided(words: Words, gpus: str) -> ScalingOrder:
    """The order for images divided over GPUs: by default over all of them, in TF32."""
    precisions = choices("--precision", ",".join(words.precisions or ["tf32"]), SCALED_PRECISIONS)
    every = ",".join(str(index) for index in range(torch.cuda.device_count()))
    return ScalingOrder(Workload(), precisions, [str(each) for each in _gpus(gpus or every)])


def _named(cases: list[NetworkCase], names: list[str]) -> list[NetworkCase]:
    """The networks of these names, all without a name. Raises SuiteError for a name that there is not."""
    unknown = [name for name in names if name not in {each.name for each in cases}]
    if unknown:
        raise SuiteError(f"there is no network {', '.join(unknown)}; there are {', '.join(e.name for e in cases)}")
    return [each for each in cases if not names or each.name in names]


def _usual(usual: list[Word], allowed: Collection[Word], stale: object) -> list[Word]:
    """What an option stands for where nothing was said: all for stale rows."""
    return usual if stale is None else [*allowed]


def _gpus(text: str) -> list[torch.device]:
    """The devices that ``--gpus`` names, each once. Raises typer.BadParameter."""
    here = [str(index) for index in range(torch.cuda.device_count())]
    return [torch.device("cuda", int(index)) for index in dict.fromkeys(choices("--gpus", text, here) if text else [])]


def listed(text: str) -> list[str]:
    """The words of an option that takes several, separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def choices(option: str, text: str, allowed: Collection[Word]) -> list[Word]:
    """The words, all of them allowed. Raises typer.BadParameter."""
    known = {str(word): word for word in allowed}
    chosen = listed(text)
    if not chosen or not known.keys() >= set(chosen):
        raise typer.BadParameter(f"{option} takes some of {','.join(allowed)}, not {text!r}")
    return [known[word] for word in chosen]
