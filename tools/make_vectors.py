"""Run the conformance cases on a GPU and write what it gave: ``python -m tools.make_vectors [PATH]``.

PATH is tests/conformance/vectors/sm_90.npz unless given. tests/cpu/test_emulator_conformance.py holds the emulator to
the file. Cases that it has leave the list of those that are pending. Exits with 1 if a case gave no result, or one that
NumPy does not expect; results are written all the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from tests.conformance import on_gpu, vectors
from tests.conformance.suite import BY_NAME, CASES


def main() -> int:
    """Write the file; the exit status."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else vectors.PATH
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("a GPU of compute capability 9.0 is needed")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        results = on_gpu.run_all(list(BY_NAME), Path(folder))
    complaints = vectors.record({case: results[case.name] for case in CASES}, on_gpu.about(), path)
    made = vectors.Vectors(path).names()
    if path == vectors.PATH:
        vectors.no_longer_pending(made)
    print(*complaints, sep="\n")
    print(f"{len(made)} of {len(CASES)} cases, {path.stat().st_size} bytes: {path}")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
