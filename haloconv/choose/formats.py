"""Records of the format before: what families and configs that they name are called today.

Format 2 knew families and one hash of all their kernels. ``carried.json`` says for such a hash which kernels were
proven to be the same since, and their hash today (tools/migrate_records.py writes it); a record of other kernels is
taken over, too, and holds nowhere.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

BEFORE = 2
_CARRIED = Path(__file__).resolve().parent / "carried.json"
_GROUPED = "rows"  # how the configs of what is grouped_sm90 now began, under halo_sm80 and halo_sm80_wgrad
_KERNELS = {  # family -> its kernel of fprop and dgrad, its kernel of wgrad
    "aten": ("aten", "aten"),
    "direct": ("direct/direct", "direct/direct"),
    "halo_sm80": ("halo_sm80/conv", ""),
    "halo_sm80_wgrad": ("", "halo_sm80_wgrad/wgrad"),
    "halo_sm90": ("halo_sm90/conv", ""),
    "depthwise": ("depthwise/march", "depthwise/march_wgrad"),
    "depthwise_window": ("depthwise_window/window", "depthwise_window/wgrad"),
    "depthwise_toeplitz": ("depthwise_toeplitz/toeplitz", "depthwise_toeplitz/wgrad"),
}
_DEPTHWISE = ("march", "lanes", "pairs", "patch", "box", "band", "tile", "tile_sm90")  # first words of its configs


def taken_over(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of format 2 as one of format 3. Raises KeyError if it is none of format 2."""
    direction, family, own = entry["layer"].split(" ")[0], entry["family"], entry["own"]
    family, kernel, config = _named(family, entry["config"], direction)
    own_kernel = kernel if family != "aten" or own is None else _named(own, "", direction)[1]
    source = "" if own is None else _carried().get(entry["kernels"], {}).get(own_kernel, entry["kernels"])
    taken = {name: value for name, value in entry.items() if name != "kernels"}
    named = {"family": family, "kernel": kernel, "config": config, "own": None if own is None else own_kernel}
    return {**taken, **named, "source": source}


def _named(family: str, config: str, direction: str) -> tuple[str, str, str]:
    """Family, kernel and key of what format 2 called ``family`` and ``config``.

    Of the depthwise kernels that were no march the key is left empty: each offers one config.
    """
    if family.startswith("halo_sm80") and config.startswith(_GROUPED):
        kernel = "grouped_sm90/wgrad" if direction == "wgrad" else "grouped_sm90/conv"
        return "grouped_sm90", kernel, config
    kernel = _KERNELS.get(family, (family, family))[direction == "wgrad"]
    name, _, rest = config.partition(" ")
    if family == "depthwise" and name in _DEPTHWISE:
        kernel = f"depthwise/{name}_wgrad" if direction == "wgrad" else f"depthwise/{name}"
        return family, kernel, rest
    return family, kernel, config


@cache
def _carried() -> dict[str, dict[str, str]]:
    carried: dict[str, dict[str, str]] = json.loads(_CARRIED.read_text(encoding="utf-8"))
    return carried
