"""The command ``haloconv``, and ``python -m haloconv``."""

from __future__ import annotations

import sys
from importlib import import_module

from haloconv import extras


def main() -> None:
    """Run the command line. Without the packages that it is made of: one sentence, and exit code 2."""
    sentence = extras.missing("the command line", *extras.CLI)
    if sentence is not None:
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)
    import_module("haloconv.cli").app(prog_name="haloconv")


if __name__ == "__main__":
    main()
