"""Write benchmarks/verified/<family>.json from the results of tests/gpu and of tools/sanitize.py.

Refuses a family (exit code 1) if a check of it failed, a part of its tests did not run, its sources changed since, or
the sanitizer was not clean.
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


def objections(results: dict, verdict: dict | None, family: str, digest: str) -> list[str]:
    """Why the results do not vouch for the family's sources of this digest; empty if they do."""
    sanitized = sanitizer_of(verdict, family, digest)
    failed, deselected = results["failures"].get(family, 0), results["counts"]["deselected"]
    found = {
        f"{failed} of its GPU tests failed": failed,
        f"{deselected} GPU tests were deselected": deselected,
        "its sources changed since the tests ran": results["hashes"].get(family) != digest,
        "none of its GPU tests passed": not results["checks"].get(family),
        "no error of it was recorded": not results["worst_errors"].get(family),
        f"the sanitizer was not clean ({sanitizer_text(sanitized)})": sanitized and not sanitized["clean"],
    }
    return [sentence for sentence, holds in found.items() if holds]


def sanitizer_of(verdict: dict | None, family: str, digest: str) -> dict | None:
    """What the sanitizer says of these very sources of the family; None if it did not run on them."""
    found = (verdict or {"families": {}})["families"].get(family)
    return found if found and found["hash"] == digest else None


def sanitizer_text(sanitized: dict | None) -> str:
    """The sanitizer's verdict on a family in one phrase."""
    if sanitized is None:
        return "not run"
    return ", ".join(f"{tool}: {found['verdict']}" for tool, found in sanitized["tools"].items())


def stamp_of(family: str, digest: str, results: dict, verdict: dict | None, environment: dict[str, str]) -> dict:
    errors: dict[str, dict[str, float]] = results["worst_errors"][family]
    by_dtype: dict[str, float] = {}
    for per_dtype in errors.values():
        for dtype, error in per_dtype.items():
            by_dtype[dtype] = max(by_dtype.get(dtype, 0.0), error)
    return {
        "family": family,
        "hash": digest,
        **{key: environment[key] for key in STAMP_KEYS},
        "checks": results["checks"][family],
        "failed": 0,
        "skipped": results["counts"]["skipped"],
        "worst_errors": by_dtype,
        "errors": errors,
        "sanitizer": sanitizer_text(sanitizer_of(verdict, family, digest)),
        "date": environment["date"][:10],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-results", type=Path, default=ROOT / "build" / "gpu-tests.json")
    parser.add_argument("--sanitizer", type=Path, default=ROOT / "build" / "sanitizer.json")
    parser.add_argument("--out", type=Path, default=VERIFIED)
    options = parser.parse_args()
    results = read_json(options.gpu_results)
    if results is None:
        print("no stamp: run `pytest tests/gpu` on a machine with a GPU first", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    environment, verdict, hashes = environment_stamp(), read_json(options.sanitizer), all_hashes()
    refused = False
    for family in results["families"]:
        digest = hashes[family]
        against = objections(results, verdict, family, digest)
        if against:
            print(f"no stamp of {family}: {'; '.join(against)}", file=sys.stderr)
            refused = True
            continue
        stamp = stamp_of(family, digest, results, verdict, environment)
        path = options.out / f"{family}.json"
        path.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        print(f"{path}: {stamp['checks']} checks on {stamp['gpu']}, sanitizer {stamp['sanitizer']}")
    return int(refused)


if __name__ == "__main__":
    sys.exit(main())
