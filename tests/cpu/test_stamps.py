"""A kernel's stamp vouches for the sources as they are now, or PENDING.md says since when and why not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from haloconv import families
from haloconv.bench.stale import same_sources
from haloconv.choose import trust
from haloconv.families import closure
from haloconv.families.files import device_hash, kernels_of
from tests.cases import DTYPE_NAMES
from tests.cpu.test_gpu_results import COLLECTED, DIRECT, begin, ended
from tests.cpu.test_jit_compile import SPILLING
from tests.families import FACTS
from tests.oracle import EDGES
from tests.toy_kernel import toy_source
from tools import make_stamps, stamps
from tools.gpu_results import GpuResults
from tools.result_lines import append_line
from tools.sanitizer_results import TOOLS, SanitizerResults, ToolVerdict

KERNELS = stamps.kernels()
FAMILIES = stamps.kernel_families()
STAMPS = stamps.read_stamps()

SUMS = ({"fprop", "dgrad", "wgrad", "bgrad", "relu", "residual_relu"}, {"fp32", "fp64", "fp16", "bf16"})  # of reduce
DRAWN = {"tf32", "tf32x3"}
"""What random problems of fp32 tensors may ask for, beside a family's own: others answer tf32x3 with full products."""


def verified(family: str) -> tuple[set[str], set[str]]:
    """The results and precisions that the stamps of a family's kernels have together."""
    if family not in families.OWN:
        return SUMS
    known = families.FAMILIES[family]
    labels = {"tf32" if known.tensor_cores and each == torch.float32 else DTYPE_NAMES[each] for each in known.dtypes}
    return {*known.directions, *FACTS[family].proven, *(EDGES if known.has_padding_modes else ())}, labels


# Files of families/ that decide no result: lists of families and of sources, contracts, hashes, which kernel is asked.
DECIDE_NOTHING = {"__init__.py", "aten.py", "closure.py", "files.py", "sources.py", "family.py"}
EVERYWHERE = {"base.py", "common.py", "launch.py", "driver.py", "source.py", "params.py", "cache.py", "compile.py"}
HOST_AND_DEVICE = {
    "direct/direct": {"direct/direct.cu", "reduce/partials.cu", "reduce/partials.py", "geometry.cuh"},
    "reduce/bgrad": {"reduce/bgrad.cu"},
    "reduce/partials": {"reduce/partials.cu"},
    "halo_sm80/conv": {
        "halo_sm80/conv.cu", "halo_sm80/pack.cu", "halo_sm80/fold.py", "halo_sm80/tilings.py", "halo_sm80/tile.py",
        "mma.cuh",
    },
    "halo_sm80_wgrad/wgrad": {
        "halo_sm80_wgrad/wgrad.cu", "halo_sm80_wgrad/layer.py", "halo_sm80_wgrad/blocks.py",
        "reduce/partials.cu", "mma.cuh",
    },
    "halo_sm80_f64/conv": {
        "halo_sm80_f64/conv.cu", "halo_sm80_f64/pack.cu", "halo_sm80_f64/tile.py", "geometry.cuh", "mma_f64.cuh",
    },
    "halo_sm80_f64/wgrad": {"halo_sm80_f64/wgrad.cu", "halo_sm80_f64/tile.py", "reduce/partials.cu", "mma_f64.cuh"},
    "grouped_sm90/conv": {"grouped_sm90/conv.cu", "grouped_sm90/slab.cuh", "grouped_sm90/slab.py"},
    "grouped_sm90/wgrad": {"grouped_sm90/wgrad.cu", "reduce/partials.cu", "grouped_sm90/slab.py"},
    "halo_sm90/conv": {
        "halo_sm90/conv.cu", "halo_sm90/pack.cu", "halo_sm90/fixup.cu", "reduce/partials.cu", "conv/form.py",
        "conv/tile.py", "wgmma.cuh",
    },
    "halo_sm90/wgrad": {"wgrad/wgrad.cu", "wgrad/wgrad_sum.cu", "wgrad/arrange.cu", "wgrad/arrange.py", "wgmma.cuh"},
    "depthwise_window/window": {"depthwise_window/window.cu", "depthwise_window/axes.py", "depthwise_window/cut.py"},
    "depthwise_window/wgrad": {"depthwise_window/wgrad.cu", "depthwise_window/windows.cuh", "reduce/partials.cu"},
    "depthwise_toeplitz/toeplitz": {"depthwise_toeplitz/toeplitz.cu", "depthwise_toeplitz/planes.py", "mma.cuh"},
    "depthwise_toeplitz/wgrad": {"depthwise_toeplitz/wgrad.cu", "depthwise_toeplitz/bands.cuh", "reduce/partials.cu"},
    "depthwise/band": {"depthwise/band.cu", "depthwise/strips.py", "depthwise/strips.cuh", "mma.cuh"},
    "depthwise/lanes_wgrad": {"depthwise/lanes_wgrad.cu", "depthwise/lanes_cut.py", "reduce/partials.cu"},
    "depthwise/tile_sm90": {"depthwise/tile_sm90.cu", "depthwise/landing.cuh", "mbarrier.cuh"},
    "depthwise/plane_wgrad": {"depthwise/small_planes.cuh", "depthwise/small_planes.py", "reduce/partials.cu"},
    "depthwise/march": {"depthwise/march.cu", "depthwise/march_axes.cuh", "depthwise/march_form.py"},
}  # fmt: skip
BORROWS = {"grouped_sm90": {"halo_sm90"}, "halo_sm80": {"halo_sm90"}, "halo_sm80_wgrad": {"halo_sm80"}}
BORROWS |= {"depthwise_toeplitz": {"depthwise"}}
"""Folders of other families from which a family's kernels take a header or a rule without launching their kernels."""


def covered(kernel: str) -> set[str]:
    """What a stamp covers: of each file its name, alone, with its folder and, in families, with its family."""
    files = stamps.stamped_files(kernel)
    folders = {f"{file.parent.name}/{file.name}" for file in files}
    return {file.name for file in files} | folders | {f"{family}/{file.name}" for family, file in of_families(files)}


def of_families(files: Iterable[Path]) -> list[tuple[str, Path]]:
    """The files of families, each with the folder in families/ that it lies in, at whatever depth."""
    places = [(file.relative_to(stamps.SOURCE_ROOT).parts, file) for file in files]
    return [(parts[1], file) for parts, file in places if parts[0] == "families" and len(parts) > 2]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_stamp_covers_what_decides_the_kernels_results(kernel: str) -> None:
    assert HOST_AND_DEVICE.get(kernel, set()) | EVERYWHERE | {f"{kernel}.py", f"{kernel}.cu"} <= covered(kernel)
    family, launched = kernel.split("/")[0], {name.split("/")[0] for name in stamps.launched(kernel)}
    folders = {name for name, _ in of_families(stamps.stamped_files(kernel))}
    assert folders <= {family, *launched, *BORROWS.get(family, ())}
    assert {name for name in covered(kernel) if name.endswith(".cu")} >= {
        f"{name}.cu" for name in stamps.launched(kernel)
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_stamp_covers_where_files_lie_and_what_is_logged(kernel: str) -> None:
    """A new environment variable or log line does not make what was verified unverified."""
    assert not {"env.py", "logs.py", "version.py"} & covered(kernel)


def test_no_file_of_the_families_is_in_no_stamp() -> None:
    covered_files = {file for kernel in KERNELS for file in stamps.stamped_files(kernel)}
    files = {file for file in (stamps.SOURCE_ROOT / "families").rglob("*") if file.suffix in (".py", ".cu", ".cuh")}
    assert {file.name for file in files - covered_files} <= DECIDE_NOTHING
    headers = set((stamps.SOURCE_ROOT / "kernels").rglob("*.cuh"))
    assert headers <= covered_files
    assert set(FAMILIES) == {*families.OWN, "reduce"}
    assert [name for family in FAMILIES for name in kernels_of(family)] == [*KERNELS]


@pytest.mark.parametrize("kernel", KERNELS)
def test_stamp_matches_its_sources_or_is_pending(kernel: str) -> None:
    if kernel in stamps.pending():
        return
    stamp = STAMPS.get(kernel)
    assert stamp is not None, f"{kernel} was never verified: run `make gpu` on a GPU, or name it in {stamps.PENDING}"
    assert stamp["hash"] == stamps.stamp_hash(kernel), (
        f"{kernel} changed since {stamp['date']}: run `make gpu` on a GPU, or name it in {stamps.PENDING}"
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_stamp_shows_a_clean_run(kernel: str) -> None:
    stamp = STAMPS.get(kernel)
    if stamp is None:
        assert kernel in stamps.pending()
        return
    assert stamp["failed"] == 0 and stamp["checks"] > 0 and stamp["gpu"] != "none" and stamp["date"]
    assert all(f"{tool}: 0 findings in " in stamp["sanitizer"] for tool in TOOLS)
    assert "carried_from" in stamp or stamp["sanitizer_calls"] > 0
    directions, precisions = verified(kernel.split("/")[0])
    assert set() < set(stamp["errors"]) <= directions and set() < set(stamp["worst_errors"]) <= {*precisions, *DRAWN}


@pytest.mark.parametrize("family", FAMILIES)
def test_stamps_of_a_family_show_all_its_results_and_precisions(family: str) -> None:
    found = {kernel: stamp for kernel, stamp in STAMPS.items() if kernel.split("/")[0] == family}
    missing = {kernel for kernel in kernels_of(family) if kernel not in found}
    assert missing <= stamps.pending().keys()
    if not missing:
        directions, precisions = verified(family)
        assert set().union(*(stamp["errors"] for stamp in found.values())) == directions
        seen = set().union(*(stamp["worst_errors"] for stamp in found.values()))
        assert precisions <= seen <= {*precisions, *DRAWN}


def test_pending_names_existing_kernels_with_a_date_and_a_reason() -> None:
    if not stamps.PENDING.exists():
        return
    lines = [line for line in stamps.PENDING.read_text(encoding="utf-8").splitlines() if line.startswith(("- ", "* "))]
    assert len(lines) == len(stamps.pending()), "a line is not of the form: - `family/kernel` (YYYY-MM-DD): reason"
    assert set(stamps.pending()) <= set(KERNELS)
    assert set(STAMPS) <= set(KERNELS), "a stamp of a kernel that is gone"


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_file_counts(kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One more statement in any of the files changes the hash; a comment and a blank line do not."""
    files = stamps.stamped_files(kernel)
    before = stamps.stamp_hash.__wrapped__(kernel)
    for index, file in enumerate(files):
        text, host = file.read_text(encoding="utf-8"), file.suffix == ".py"
        for more, same in (("\nONE_MORE = 1\n", False), ("\n# a remark\n\n" if host else "\n// a remark\n\n", True)):
            changed = tmp_path / f"{same} {index}{file.suffix}"
            changed.write_text(text + more, encoding="utf-8")
            changed_files = [*files[:index], changed, *files[index + 1 :]]
            with monkeypatch.context() as patch:
                patch.setattr(closure, "stamped_files", lambda _, found=changed_files: found)
                assert (stamps.stamp_hash.__wrapped__(kernel) == before) is same, file


# make_stamps --------------------------------------------------------------------------------------------------------

ENVIRONMENT = dict.fromkeys(make_stamps.STAMP_KEYS, "x") | {"gpu": "a GPU", "date": "2026-01-02T03:04:05Z"}
CLEAN = dict.fromkeys(TOOLS, ToolVerdict(5, 5, 5))
CLEAN_WORDS = ", ".join(f"{tool}: 0 findings in 5 calls" for tool in sorted(TOOLS))
RUN = begin("1") | {"environment": ENVIRONMENT}
GOOD = [COLLECTED, RUN, ended("1", "a", error=3e-7), ended("1", "b", error=1e-7)]


def found_in(*lines: dict) -> make_stamps.KernelResults:
    return GpuResults(lines).of_kernel(DIRECT, "abc")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([*GOOD, ended("1", "b", "failed")], ["1 of its GPU tests failed"]),
        ([*GOOD, ended("1", "b", "failed", kernels=())], ["1 GPU tests failed before a kernel was launched"]),
        (GOOD[:3], ["1 of its GPU tests are left on these sources"]),
        ([RUN, ended("1", "a")], ["no run of all its GPU tests", "none of its GPU tests passed", "no error of it"]),
        ([COLLECTED, RUN], ["2 of its GPU tests are left", "none of its GPU tests passed", "no error of it"]),
        ([*GOOD, RUN | {"run": "2", "hashes": {DIRECT: "old"}}, ended("2", "b")], ["1 of its GPU tests are left"]),
        ([*GOOD, begin("2", "another"), ended("2", "b")], ["it ran on GPUs of several models: a GPU, another"]),
        ([*GOOD[:2], *(ended("1", test) | {"errors": []} for test in "ab")], ["no error of it was recorded"]),
    ],
)  # fmt: skip
def test_no_stamp_for_a_run_that_proves_nothing(lines: list[dict], says: list[str]) -> None:
    against = make_stamps.objections(found_in(*lines), CLEAN)
    assert len(against) == len(says) and all(map(str.startswith, against, says))


@pytest.mark.parametrize(
    ("verdicts", "says"),
    [
        ({}, "not run"),
        ({"memcheck": ToolVerdict(5, 5, 5)}, "memcheck: 0 findings in 5 calls"),
        (CLEAN | {"racecheck": ToolVerdict(4, 5, 9)}, "racecheck: 1 of 5 calls left"),
        (CLEAN | {"initcheck": ToolVerdict(4, 5, 5, ("3 findings in 5 calls",))}, "initcheck: 3 findings in 5 calls"),
        (CLEAN | {"initcheck": ToolVerdict(0, 0, 5)}, "initcheck: 0 findings in 0 of 5 calls"),
    ],
)
def test_no_stamp_without_the_sanitizers_clean_word(verdicts: dict[str, ToolVerdict], says: str) -> None:
    (sentence,) = make_stamps.objections(found_in(*GOOD), verdicts)
    assert sentence.startswith("the sanitizer was not clean (") and says in sentence


def test_stamp_of_a_good_run() -> None:
    found, verdicts = found_in(*GOOD), CLEAN | {"racecheck": ToolVerdict(2, 2, 5)}
    assert make_stamps.objections(found, verdicts) == []
    stamp = make_stamps.stamp_of("abc", found, verdicts)
    assert stamp["hash"] == "abc" and stamp["checks"] == 2 and stamp["worst_errors"] == {"fp32": 3e-7}
    assert stamp["errors"] == {"fprop": {"fp32": 3e-7}} and stamp["date"] == "2026-01-02" and stamp["gpu"] == "a GPU"
    assert (stamp["fuzz_problems"], stamp["exact_runs"], stamp["sanitizer_calls"]) == (10, 0, 17)
    assert stamp["sanitizer"] == CLEAN_WORDS.replace("racecheck: 0 findings in 5", "racecheck: 0 findings in 2 of 5")


def test_only_kernels_that_passed_get_a_stamp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The family's other stamps stay, but for those of kernels that are gone."""
    tests, out, other = tmp_path / "tests.jsonl", tmp_path / "verified", "halo_sm90/conv"
    arguments = ["make_stamps", "--gpu-results", str(tests), "--out", str(out), "--family", "direct"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(make_stamps, "all_hashes", lambda: {DIRECT: "abc", "direct/other": "def", other: "x"})
    monkeypatch.setattr(SanitizerResults, "of_kernel", lambda self, kernel, digest: CLEAN)
    sources, spilled = {DIRECT: ["one", "two"], "direct/other": []}, ["8 bytes"]
    monkeypatch.setattr(make_stamps, "ci_sources", lambda: sources)
    monkeypatch.setattr(make_stamps, "spilling", lambda of: spilled)
    assert make_stamps.main() == 1 and not out.exists()
    for line in GOOD:
        append_line(tests, line)
    assert make_stamps.main() == 1 and not stamps.read_stamps(out), "a CI source spills"
    spilled.clear()
    assert make_stamps.main() == 1 and stamps.read_stamps(out).keys() == {DIRECT}
    assert stamps.read_stamps(out)[DIRECT]["sources"] == 2
    monkeypatch.setattr(make_stamps, "all_hashes", lambda: {DIRECT: "abc"})
    assert make_stamps.main() == 0
    monkeypatch.setattr(make_stamps, "all_hashes", lambda: {DIRECT: "changed"})
    assert make_stamps.main() == 1 and stamps.read_stamps(out)[DIRECT]["hash"] == "abc"


def test_sources_that_spill_are_told() -> None:
    assert make_stamps.spilling([toy_source()]) == []
    (sentence,) = make_stamps.spilling([toy_source(), replace(SPILLING, constants=(("A", 1),))])
    assert sentence.endswith(" bytes with {'A': 1}") and int(sentence.split()[0]) > 0


def test_every_kernel_has_ci_sources() -> None:
    sources = make_stamps.ci_sources()
    assert sources.keys() == set(stamps.kernels()) and all(sources.values())
    assert {source.kernel for of in sources.values() for source in of} == {
        source.kernel for family in families.OWN for source in families.FAMILIES[family].sources()
    }


def test_stamps_of_other_kernels_stay_and_those_of_kernels_that_are_gone_go(tmp_path: Path) -> None:
    kept, gone, new = {"hash": "kept"}, {"hash": "gone"}, {"hash": "new"}
    content = {"halo_sm90": {"conv": kept, "old": gone}, "direct": {"old": gone}, "depthwise": {"band": kept}}
    for family, kernels in content.items():
        (tmp_path / f"{family}.json").write_text(json.dumps({"family": family, "kernels": kernels}))
    assert stamps.write_stamps({"halo_sm90/wgrad": new}, tmp_path) == [tmp_path / "halo_sm90.json"]
    wanted = {"depthwise/band": kept, "halo_sm90/conv": kept, "halo_sm90/wgrad": new}
    assert stamps.read_stamps(tmp_path) == wanted and not (tmp_path / "direct.json").exists()


def test_the_package_knows_the_stamps_that_hold() -> None:
    """After a change of sources or stamps: python -m tools.stamps."""
    assert trust.stamped() == stamps.stamped(STAMPS)


def test_a_stamp_of_other_sources_is_not_told_to_the_package() -> None:
    holds, other = {"hash": stamps.stamp_hash(KERNELS[0]), "gpu": "A GPU"}, {"hash": "0" * 64, "gpu": "A GPU"}
    found = stamps.stamped({KERNELS[0]: holds, KERNELS[1]: other, "gone/kernel": holds})
    assert found == {KERNELS[0]: {"gpus": ["A GPU"], "source": device_hash(KERNELS[0])}}


def test_gpu_models_vouch_for_the_same_sources_side_by_side(tmp_path: Path) -> None:
    """What another model found stays beside the newest stamp, once each, until the sources change."""
    kernel, facts = KERNELS[0], {"checks": 7, "date": "2026-01-01"}
    before = {"hash": stamps.stamp_hash(kernel), "gpu": "A GPU", "errors": {}, **facts}
    stamps.write_stamps({kernel: before}, tmp_path)
    for gpu, others in (("Another GPU", ["A GPU"]), ("A third", ["A GPU", "Another GPU"]),
                        ("A GPU", ["A third", "Another GPU"])):  # fmt: skip
        stamps.write_stamps({kernel: {**before, "gpu": gpu}}, tmp_path)
        found = stamps.read_stamps(tmp_path)[kernel]
        assert found["gpu"] == gpu and found["also"] == [{"gpu": other, **facts} for other in others]
    assert stamps.stamped({kernel: found})[kernel]["gpus"] == ["A GPU", "A third", "Another GPU"]
    stamps.write_stamps({kernel: {**before, "hash": "of other sources"}}, tmp_path)
    assert "also" not in stamps.read_stamps(tmp_path)[kernel]


def test_a_new_stamp_of_the_same_sources_knows_what_was_carried_to_them(tmp_path: Path) -> None:
    kernel = KERNELS[0]
    new = {"hash": stamps.stamp_hash(kernel), "gpu": "A GPU"}
    carried = {"carried_from": {"hash": "judged", "between": ["moved"]}}
    stamps.write_stamps({kernel: new | carried}, tmp_path)
    for again in (new, new | {"gpu": "Another GPU"}):
        stamps.write_stamps({kernel: again}, tmp_path)
        found = stamps.read_stamps(tmp_path)[kernel]
        assert found["same"] == ["judged", "moved"] and "carried_from" not in found
        assert same_sources(tmp_path, kernel) == {"judged", "moved"}
        same_sources.cache_clear()


def test_a_record_is_trusted_on_each_gpu_model_that_vouches_for_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "stamped", lambda: {"a/kernel": {"gpus": ["A GPU", "Another GPU"], "source": "1234"}})
    for gpu, source, trusted in (("A GPU", "1234", True), ("Another GPU", "1234", True), ("A third", "1234", False),
                                 ("A GPU", "5678", False)):  # fmt: skip
        record = SimpleNamespace(family="a", kernel="a/kernel", gpu=gpu, source=source)
        assert trust.has_stamp(record) is trusted
