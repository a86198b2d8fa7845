"""Stamps as Markdown: a table of all kernels, and a few lines for the README. readme_results.py puts them in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tools.result_tables import table
from tools.stamps import gpus_of

NO_STAMPS = "No kernel has been verified on a GPU yet: `make gpu` on a GPU machine writes the stamps."
_COUNTS = {"checks": "checks", "exact_runs": "exact runs", "fuzz_problems": "fuzz problems", "sanitizer_calls": "calls"}
_SUMMED = ("fuzz_problems", "exact_runs", "sanitizer_calls")
_HEADER = ("kernel", "state", "on", *_COUNTS.values(), "worst norm errors", "compute-sanitizer", "date")


def verified_section(stamps: Mapping[str, dict], waiting: Mapping[str, str]) -> str:
    """The Markdown between the verified markers: one line per kernel that has a stamp or waits for one.

    ``waiting`` maps what is pending to its date and reason. A count that an older stamp lacks is a dash.
    """
    rows = []
    for name in sorted(stamps.keys() | waiting.keys()):
        stamp = stamps.get(name)
        state = f"pending since {waiting[name]}" if name in waiting else "verified"
        if stamp is None:
            rows.append([f"`{name}`", state, *["–"] * (len(_HEADER) - 2)])
            continue
        if "carried_from" in stamp and name not in waiting:
            state += f" at {stamp['carried_from']['commit']}, carried over unchanged"
        others = "".join(f"; {each['gpu']}, {each['checks']} checks" for each in stamp.get("also", []))
        place = f"{stamp['gpu']}, PyTorch {stamp['torch']}{others}"
        counts = [str(stamp.get(key, "–")) for key in _COUNTS]
        errors = ", ".join(f"{label} {error:.1e}" for label, error in sorted(stamp["worst_errors"].items()))
        rows.append([f"`{name}`", state, place, *counts, errors, stamp["sanitizer"], stamp["date"]])
    return "\n".join(table(_HEADER, rows)) if rows else NO_STAMPS


def stamps_line(stamps: Mapping[str, dict], waiting: Mapping[str, str]) -> str:
    """Which families hold all their stamps, what they count together, and what waits for one, with date and reason."""
    if not stamps and not waiting:
        return NO_STAMPS
    late = {name.partition("/")[0] for name in waiting}
    held = sorted({name.partition("/")[0] for name in stamps} - late)
    gpus = ", ".join(sorted({gpu for stamp in stamps.values() for gpu in gpus_of(stamp)}))
    lines = [f"Verified on {gpus}: {_quoted(held)}."] if held else []
    fuzzed, exact, calls = (sum(stamp.get(key, 0) for stamp in stamps.values()) for key in _SUMMED)
    if fuzzed:
        checked = f"{exact} exact results, {fuzzed} results of random problems, {calls} calls under the sanitizer"
        lines.append(f"Counted kernel by kernel: {checked}.")
    by_reason: dict[str, list[str]] = {}
    for name, about in sorted(waiting.items()):
        by_reason.setdefault(about, []).append(name)
    lines += [f"Pending since {about}: {_quoted(names)}." for about, names in by_reason.items()]
    return "\n".join(lines if waiting else [*lines, "Pending: none."])


def campaigns_line(lines: Iterable[Mapping]) -> str:
    """What campaigns of the fuzzer came to, of which ``python -m tests.fuzz --keep`` adds a line each."""
    lines = list(lines)
    if not lines:
        return "No campaign of the fuzzer has been kept yet."
    problems, right = (sum(line[key] for line in lines) for key in ("problems", "right"))
    wrong, since = sum(len(line["wrong"]) for line in lines), min(line["date"] for line in lines)[:10]
    places = sorted({line["gpu"] if line["device"] == "cuda" else "the emulator" for line in lines})
    return (
        f"Since {since}, on {' and '.join(places)}: {problems} random problems, {right} results right, {wrong} wrong."
    )


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
