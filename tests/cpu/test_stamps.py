"""A family's stamp vouches for the sources as they are now, or PENDING.md says since when and why not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import make_stamps, stamps

FAMILIES = stamps.kernel_families()


def read_stamp(family: str) -> dict | None:
    path = stamps.VERIFIED / f"{family}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


VERIFIED = {
    "direct": ({"fprop", "dgrad", "wgrad", "bgrad"}, {"fp32", "fp16", "bf16", "fp64"}),
    "halo_sm80": ({"fprop", "dgrad"}, {"tf32", "fp16", "bf16"}),
    "halo_sm80_wgrad": ({"wgrad"}, {"tf32", "fp16", "bf16"}),
    "depthwise_window": ({"fprop", "dgrad", "wgrad"}, {"fp32", "fp16", "bf16"}),
    "depthwise_toeplitz": ({"fprop", "dgrad", "wgrad"}, {"tf32", "fp16", "bf16"}),
    "halo_sm90": ({"fprop", "dgrad"}, {"tf32", "fp16", "bf16"}),
    "depthwise": ({"fprop", "dgrad", "wgrad"}, {"fp32", "fp16", "bf16"}),
}
HOST_AND_DEVICE = {
    "direct": {"direct.cu", "direct_sums.cu", "geometry.cuh", "direct.py", "direct_sums.py", "launch.py"},
    "halo_sm80": {
        "halo_sm80.cu", "halo_sm80_pack.cu", "order.cuh", "weights.cuh", "shape.cuh", "stage.cuh", "multiply.cuh",
        "write.cuh", "geometry.cuh", "mma.cuh", "mma_half_k.cuh", "halo_sm80_march.cu", "slab.cuh", "pipeline.cuh",
        "band_walk.cuh",
        "halo_sm80.py", "halo_sm80_configs.py", "halo_sm80_fold.py", "halo_sm80_march.py", "halo_sm80_tile.py",
        "launch.py",
    },
    "halo_sm80_wgrad": {
        "halo_sm80_wgrad.cu", "multiply.cuh", "neighbours.cuh", "pieces.cuh", "source.cuh", "sums.cuh", "window.cuh",
        "work.cuh", "mma.cuh", "mma_half_k.cuh", "halo_sm80_wgrad_march.cu", "halo_sm80_wgrad_march_sum.cu", "slab.cuh",
        "pipeline.cuh", "band_walk.cuh",
        "halo_sm80_wgrad.py", "halo_sm80_wgrad_configs.py", "halo_sm80_wgrad_layer.py", "halo_sm80_wgrad_march.py",
        "launch.py",
    },
    "depthwise_window": {
        "depthwise_window.cu", "depthwise_window_wgrad.cu", "geometry.cuh", "line.cuh", "product.cuh", "stage.cuh",
        "windows.cuh",
        "depthwise_window.py", "depthwise_window_axes.py", "depthwise_window_cut.py", "depthwise_window_wgrad.py",
        "launch.py",
    },
    "depthwise_toeplitz": {
        "depthwise_toeplitz.cu", "depthwise_toeplitz_wgrad.cu", "bands.cuh", "planes.cuh", "strips.cuh", "mma.cuh",
        "mma_half_k.cuh",
        "depthwise_toeplitz.py", "depthwise_toeplitz_planes.py", "depthwise_toeplitz_wgrad.py", "launch.py",
    },
    "halo_sm90": {
        "halo_sm90.cu", "halo_sm90_pack.cu", "halo_sm90_repair.cu", "stage.cuh", "tile.cuh", "write.cuh",
        "shape.cuh", "pipeline.cuh", "wgmma.cuh",
        "halo_sm90.py", "halo_sm90_form.py", "halo_sm90_tile.py", "launch.py",
    },
    "depthwise": {
        "depthwise_march.cu", "depthwise_march_wgrad.cu", "march_axes.cuh", "march_row.cuh", "geometry.cuh",
        "depthwise_band.cu", "depthwise_band_wgrad.cu", "depthwise_tile.cu", "strips.cuh", "mma.cuh", "mma_half_k.cuh",
        "depthwise_patch.cu", "depthwise_patch_wgrad.cu", "patches.cuh", "landing.cuh", "depthwise_tile_sm90.cu",
        "pipeline.cuh", "wgmma.cuh", "depthwise_pairs.cu", "pairs.cuh", "band_walk.cuh", "depthwise_pairs_wgrad.cu",
        "depthwise_nhwc_wgrad_sum.cu",
        "depthwise_lanes.cu", "depthwise_lanes_wgrad.cu", "lanes.cuh",
        "depthwise_box.cu", "depthwise_box_wgrad.cu", "boxes.cuh", "quads.cuh", "plane_sum.cuh",
        "depthwise.py", "depthwise_march.py", "depthwise_march_form.py", "depthwise_march_wgrad.py",
        "depthwise_band.py", "depthwise_band_wgrad.py", "depthwise_strips.py", "depthwise_tile.py",
        "depthwise_patch.py", "depthwise_patch_wgrad.py", "depthwise_patches.py", "depthwise_tile_sm90.py",
        "depthwise_pairs.py", "depthwise_pairs_wgrad.py", "depthwise_nhwc_wgrad_sum.py",
        "depthwise_lanes.py", "depthwise_lanes_wgrad.py", "depthwise_lanes_cut.py",
        "depthwise_box.py", "depthwise_box_wgrad.py", "depthwise_boxes.py",
        "launch.py",
    },
}  # fmt: skip


def test_stamped_families_and_their_files() -> None:
    assert set(FAMILIES) == set(VERIFIED) == set(HOST_AND_DEVICE)
    for family, wanted in HOST_AND_DEVICE.items():
        names = {file.name for file in stamps.stamped_files(family)}
        others = set().union(*(HOST_AND_DEVICE[other] for other in HOST_AND_DEVICE if other != family)) - wanted
        assert wanted <= names and not others & names


@pytest.mark.parametrize("family", FAMILIES)
def test_stamp_is_current_or_pending(family: str) -> None:
    if family in stamps.pending():
        return
    stamp = read_stamp(family)
    assert stamp is not None, f"{family} was never verified: run `make gpu` on a GPU, or name it in {stamps.PENDING}"
    assert stamp["hash"] == stamps.family_hash(family), (
        f"{family} changed since {stamp['date']}: run `make gpu` on a GPU, or name it in {stamps.PENDING}"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_stamp_shows_a_clean_run(family: str) -> None:
    stamp = read_stamp(family)
    if stamp is None:
        assert family in stamps.pending()
        return
    assert stamp["family"] == family and stamp["failed"] == 0 and stamp["checks"] > 0
    directions, precisions = VERIFIED[family]
    assert set(stamp["errors"]) == directions and set(stamp["worst_errors"]) == precisions
    assert stamp["gpu"] != "none" and stamp["sanitizer"] and stamp["date"]


def test_pending_names_existing_families_with_a_date_and_a_reason() -> None:
    if not stamps.PENDING.exists():
        return
    lines = [line for line in stamps.PENDING.read_text(encoding="utf-8").splitlines() if line.startswith(("- ", "* "))]
    assert len(lines) == len(stamps.pending()), "a line is not of the form: - `family` (YYYY-MM-DD): reason"
    assert set(stamps.pending()) <= set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "index"),
    [(family, index) for family in FAMILIES for index in range(len(stamps.stamped_files(family)))],
)
def test_every_file_counts(family: str, index: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One changed byte in any of the files changes the hash."""
    files = stamps.stamped_files(family)
    before = stamps.family_hash(family)
    changed = tmp_path / files[index].name
    changed.write_bytes(files[index].read_bytes() + b" ")
    monkeypatch.setattr(stamps, "stamped_files", lambda _: [*files[:index], changed, *files[index + 1 :]])
    assert stamps.family_hash(family) != before


# make_stamps --------------------------------------------------------------------------------------------------------


def results(**other: dict) -> dict:
    return {
        "families": ["direct"],
        "counts": {"passed": 9, "failed": 1, "skipped": 1, "deselected": 0},
        "checks": {"direct": 7},
        "failures": {"halo_sm90": 1},
        "hashes": {"direct": "abc"},
        "worst_errors": {"direct": {"fprop": {"fp32": 1e-7, "fp16": 2e-4}, "dgrad": {"fp32": 3e-7}}},
    } | other


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (results(failures={"direct": 2}), "2 of its GPU tests failed"),
        (results(counts={"deselected": 5, "skipped": 0}), "5 GPU tests were deselected"),
        (results(hashes={"direct": "old"}), "changed"), (results(hashes={}), "changed"),
        (results(checks={}), "none of its GPU tests"), (results(worst_errors={}), "no error"),
    ],
)  # fmt: skip
def test_no_stamp_for_a_run_that_proves_nothing(found: dict, says: str) -> None:
    (sentence,) = make_stamps.objections(found, None, "direct", "abc")
    assert says in sentence


def sanitized(verdict: str, clean: bool) -> dict:
    tools = {"memcheck": {"verdict": verdict}}
    return {"families": {"direct": {"hash": "abc", "clean": clean, "tools": tools}}}


def test_no_stamp_if_the_sanitizer_found_something_in_these_sources() -> None:
    found = sanitized("3 findings in 5 calls", clean=False)
    (sentence,) = make_stamps.objections(results(), found, "direct", "abc")
    assert sentence == "the sanitizer was not clean (memcheck: 3 findings in 5 calls)"
    assert make_stamps.objections(results(hashes={"direct": "new"}), found, "direct", "new") == []


def test_stamp_of_a_good_run() -> None:
    environment = dict.fromkeys(make_stamps.STAMP_KEYS, "x") | {"date": "2026-01-02T03:04:05Z"}
    verdict = sanitized("0 findings in 5 calls", clean=True)
    assert make_stamps.objections(results(), verdict, "direct", "abc") == []
    stamp = make_stamps.stamp_of("direct", "abc", results(), verdict, environment)
    assert stamp["checks"] == 7 and stamp["worst_errors"] == {"fp32": 3e-7, "fp16": 2e-4}
    assert stamp["sanitizer"] == "memcheck: 0 findings in 5 calls" and stamp["date"] == "2026-01-02"
    assert make_stamps.sanitizer_of(verdict, "direct", "other") is None
    assert make_stamps.sanitizer_of(None, "direct", "abc") is None
    assert make_stamps.sanitizer_text(None) == "not run"


def stamps_of(found: dict | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    source, out = folder / "gpu-tests.json", folder / "verified"
    if found is not None:
        source.write_text(json.dumps(found))
    monkeypatch.setattr(make_stamps, "all_hashes", lambda: {"direct": "abc", "halo_sm90": "def"})
    files = ["--gpu-results", str(source), "--sanitizer", str(folder / "none.json"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["make_stamps", *files])
    return make_stamps.main(), sorted(path.name for path in out.glob("*"))


def test_only_families_that_passed_get_a_stamp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert stamps_of(None, tmp_path, monkeypatch) == (1, [])
    assert stamps_of(results(), tmp_path, monkeypatch) == (0, ["direct.json"])
    assert stamps_of(results(families=["direct", "halo_sm90"]), tmp_path, monkeypatch) == (1, ["direct.json"])
