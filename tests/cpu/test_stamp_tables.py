"""Stamps on the pages: a line a kernel with what was counted, and what waits for a GPU is shown as pending."""

from __future__ import annotations

import json
from pathlib import Path

from tools.stamp_tables import NO_STAMPS, campaigns_line, stamps_line, verified_section
from tools.stamps import read_stamps

STAMP = {
    "gpu": "Some GPU", "torch": "2.13", "checks": 7, "exact_runs": 5, "fuzz_problems": 300, "sanitizer_calls": 28,
    "worst_errors": {"fp16": 3e-4, "fp32": 2e-7}, "sanitizer": "memcheck: 0 findings in 7 calls", "date": "2026-01-01",
}  # fmt: skip
COUNTS = ("exact_runs", "fuzz_problems", "sanitizer_calls")
OLDER = {key: value for key, value in STAMP.items() if key not in COUNTS}
ERRORS = "fp16 3.0e-04, fp32 2.0e-07 | memcheck: 0 findings in 7 calls | 2026-01-01 |"


def test_a_line_a_kernel_shows_its_stamp_or_that_it_is_pending() -> None:
    assert verified_section({}, {}) == NO_STAMPS
    text = verified_section({"direct/direct": STAMP, "halo/conv": STAMP}, {"halo/conv": "2026-01-02: changed since"})
    facts = f"Some GPU, PyTorch 2.13 | 7 | 5 | 300 | 28 | {ERRORS}"
    assert f"| `direct/direct` | verified | {facts}" in text
    assert f"| `halo/conv` | pending since 2026-01-02: changed since | {facts}" in text
    new = verified_section({}, {"new/conv": "x"}).splitlines()
    assert new[-1] == "| `new/conv` | pending since x" + " | –" * 8 + " |"
    assert {line.count("|") for line in (*new, *text.splitlines())} == {11}


def test_a_stamp_that_was_carried_says_from_where_and_what_it_lacks_is_a_dash(tmp_path: Path) -> None:
    carried = {**OLDER, "carried_from": {"commit": "abc1234"}}
    kernels = {"conv": carried, "wgrad": STAMP}
    (tmp_path / "halo.json").write_text(json.dumps({"family": "halo", "kernels": kernels}), "utf-8")
    stamps = read_stamps(tmp_path)
    assert list(stamps) == ["halo/conv", "halo/wgrad"]
    text = verified_section(stamps, {})
    verified = "| `halo/conv` | verified at abc1234, carried over unchanged | Some GPU, PyTorch 2.13 | 7 | – | – | – | "
    assert verified + ERRORS in text
    assert "| `halo/wgrad` | verified | Some GPU, PyTorch 2.13 | 7 | 5 | 300 | 28 |" in text
    pending = verified_section(stamps, {"halo/conv": "2026-01-02: changed"})
    assert "| `halo/conv` | pending since 2026-01-02: changed | Some GPU" in pending


def test_a_few_lines_say_what_is_verified_and_what_waits() -> None:
    waiting = {"halo/conv": "2026-01-02: changed since"}
    stamps = {"direct/direct": OLDER, "halo/conv": OLDER, "halo/wgrad": OLDER}
    assert stamps_line(stamps, waiting) == (
        "Verified on Some GPU: `direct`.\nPending since 2026-01-02: changed since: `halo/conv`."
    )
    assert stamps_line({"direct/direct": OLDER}, {}) == "Verified on Some GPU: `direct`.\nPending: none."
    assert stamps_line({}, {}) == NO_STAMPS
    both = {**waiting, "halo/wgrad": "2026-01-02: changed since", "new/conv": "2026-01-03: new"}
    assert stamps_line({}, both).splitlines() == [
        "Pending since 2026-01-02: changed since: `halo/conv`, `halo/wgrad`.",
        "Pending since 2026-01-03: new: `new/conv`.",
    ]
    counted = stamps_line({"direct/direct": STAMP, "halo/conv": STAMP, "halo/wgrad": OLDER}, {}).splitlines()
    assert counted == [
        "Verified on Some GPU: `direct`, `halo`.",
        "Counted kernel by kernel: 10 exact results, 600 results of random problems, 56 calls under the sanitizer.",
        "Pending: none.",
    ]


def test_campaigns_of_the_fuzzer_are_added_up_with_what_was_wrong() -> None:
    one = {"device": "cpu", "gpu": "none", "problems": 5, "right": 9, "wrong": [], "date": "2026-01-02T03:04:05Z"}
    other = {**one, "device": "cuda", "gpu": "Some GPU", "wrong": ["a", "b"], "date": "2026-01-01T03:04:05Z"}
    assert campaigns_line([one, other]) == (
        "Since 2026-01-01, on Some GPU and the emulator: 10 random problems, 18 results right, 2 wrong."
    )
    assert campaigns_line([]) == "No campaign of the fuzzer has been kept yet."
