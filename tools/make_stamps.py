"""Write benchmarks/verified/<family>.json from the results of tests/gpu and of tools/sanitize.py.

Refuses (exit code 1) if a check failed, if only a part of a family's tests ran, or if a source changed since they ran.
After a run with ``--family`` the stamps of the other families stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from haloconv.env import environment_stamp
from tools.stamps import ROOT, VERIFIED, all_hashes

STAMP_KEYS = ("gpu", "torch", "cudnn", "cuda_driver", "cuda_runtime", "driver", "python", "haloconv", "commit")


def read_json(path: Path) -> dict | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def objections(results: dict | None, hashes: dict[str, str]) -> list[str]:
    """Why the results vouch for nothing; empty if they do."""
    if results is None:
        return ["there are no results: run `pytest tests/gpu` on a machine with a GPU first"]
    counts = results["counts"]
    found = [f"{counts[name]} GPU tests {name}" for name in ("failed", "deselected") if counts[name]]
    if not counts["passed"]:
        found.append("no GPU test passed")
    found += [f"{name} changed since the tests ran" for name in hashes if results["hashes"].get(name) != hashes[name]]
    found += [f"no GPU test of {name} passed" for name in hashes if not results["checks"].get(name)]
    found += [f"no error of {name} was recorded" for name in hashes if not results["worst_errors"].get(name)]
    return found


def sanitizer_text(verdict: dict | None, family: str, digest: str) -> str:
    """The sanitizer's verdict on these very sources in one phrase."""
    if verdict is None or verdict["hashes"].get(family) != digest:
        return "not run"
    return ", ".join(f"{tool}: {found['verdict']}" for tool, found in verdict["tools"].items())


def stamp_of(family: str, digest: str, results: dict, verdict: dict | None, environment: dict[str, str]) -> dict:
    errors: dict[str, dict[str, float]] = results["worst_errors"][family]
    by_dtype: dict[str, float] = {}
    for per_dtype in errors.values():
        for dtype, error in per_dtype.items():
            by_dtype[dtype] = max(by_dtype.get(dtype, 0.0), error)
    counts = results["counts"]
    return {
        "family": family,
        "hash": digest,
        **{key: environment[key] for key in STAMP_KEYS},
        "checks": results["checks"][family],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "worst_errors": by_dtype,
        "errors": errors,
        "sanitizer": sanitizer_text(verdict, family, digest),
        "date": environment["date"][:10],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-results", type=Path, default=ROOT / "build" / "gpu-tests.json")
    parser.add_argument("--sanitizer", type=Path, default=ROOT / "build" / "sanitizer.json")
    parser.add_argument("--out", type=Path, default=VERIFIED)
    options = parser.parse_args()
    results, hashes = read_json(options.gpu_results), all_hashes()
    if results is not None:
        hashes = {name: hashes[name] for name in results["families"]}
    against = objections(results, hashes)
    for sentence in against:
        print(f"no stamp: {sentence}", file=sys.stderr)
    if against or results is None:
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    environment, verdict = environment_stamp(), read_json(options.sanitizer)
    for family, digest in hashes.items():
        stamp = stamp_of(family, digest, results, verdict, environment)
        path = options.out / f"{family}.json"
        path.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        print(f"{path}: {stamp['checks']} checks on {stamp['gpu']}, sanitizer {stamp['sanitizer']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
