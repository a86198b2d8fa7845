"""``python -m tests.mutations [NAME...]``: plant every fault, or those whose name contains a NAME; print the list."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

from haloconv import emulator
from tests.mutations import MUTATIONS
from tests.mutations.runner import judge

PROCESSES = 2


def main(names: list[str]) -> int:
    missing = emulator.available()
    if missing is not None:
        print(f"the emulator cannot run: {missing}")
        return 2
    chosen = [one for one in MUTATIONS if not names or any(name in one.name for name in names)]
    caught = 0
    with ProcessPoolExecutor(PROCESSES) as pool:
        for verdict in pool.map(judge, chosen):
            print(verdict, flush=True)
            caught += verdict.caught
    print(f"{caught} of {len(chosen)} planted faults caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
