"""Records of the format before: each keeps what was measured, under today's names."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from haloconv import env
from haloconv.choose import formats, records
from haloconv.choose.buckets import read_layer
from haloconv.choose.records import SHIPPED, Record, read_records, records_path, shelf_of
from haloconv.device import DeviceFacts
from haloconv.export.record import recorder
from haloconv.families import FAMILIES
from haloconv.families.files import device_hash
from haloconv.problem import dense_request
from tests.tuned import FACTS, LAYER, record
from tools.stamps import pending

CPU = torch.device("cpu")
H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
OLD_HASH = "a" * 64


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(env.RECORDS_DIR, str(tmp_path))
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "shipped")
    kernels = ("direct/direct", "depthwise/march_wgrad", "halo_sm90/conv", "grouped_sm90/conv")
    monkeypatch.setattr(formats, "_carried", lambda: {OLD_HASH: {each: device_hash(each) for each in kernels}})
    records.forget_shelves()
    yield tmp_path
    records.forget_shelves()


def old_entry(family: str, config: str = "", own: str | None = "same", layer: str = "", **changes: object) -> dict:
    """An entry as format 2 had it."""
    made = {**vars(record()), **changes}
    made = {name: value for name, value in made.items() if name not in ("kernel", "source")}
    layer = layer or made["layer"]
    own = family if own == "same" else own
    return {**made, "layer": layer, "family": family, "config": config, "own": own, "kernels": OLD_HASH}


NAMES = [
    ("fprop", "halo_sm90", "run128 terms1", "halo_sm90", "halo_sm90/conv", "run128 terms1"),
    ("dgrad", "halo_sm80", "m_tiles2 split", "halo_sm80", "halo_sm80/conv", "m_tiles2 split"),
    ("wgrad", "halo_sm80_wgrad", "tile_p4", "halo_sm80_wgrad", "halo_sm80_wgrad/wgrad", "tile_p4"),
    ("fprop", "halo_sm80", "rows2 m_tiles1", "grouped_sm90", "grouped_sm90/conv", "rows2 m_tiles1"),
    ("wgrad", "halo_sm80_wgrad", "rows1 k_steps2", "grouped_sm90", "grouped_sm90/wgrad", "rows1 k_steps2"),
    ("dgrad", "depthwise", "march q4 c1 a3 m5", "depthwise", "depthwise/march", "q4 c1 a3 m5"),
    ("wgrad", "depthwise", "march q4 c1 a3 m5", "depthwise", "depthwise/march_wgrad", "q4 c1 a3 m5"),
    ("fprop", "depthwise", "tile_sm90", "depthwise", "depthwise/tile_sm90", ""),
    ("wgrad", "depthwise", "box", "depthwise", "depthwise/box_wgrad", ""),
    ("fprop", "depthwise_window", "", "depthwise_window", "depthwise_window/window", ""),
    ("wgrad", "depthwise_toeplitz", "images8", "depthwise_toeplitz", "depthwise_toeplitz/wgrad", "images8"),
    ("fprop", "direct", "", "direct", "direct/direct", ""),
    ("fprop", "aten", "", "aten", "aten", ""),
]


@pytest.mark.parametrize(("direction", "old_family", "old_config", "family", "kernel", "config"), NAMES)
def test_names(direction: str, old_family: str, old_config: str, family: str, kernel: str, config: str) -> None:
    own = "direct" if old_family == "aten" else "same"
    found = formats.taken_over(old_entry(old_family, old_config, own, layer=f"{direction} 8->16"))
    assert (found["family"], found["kernel"], found["config"]) == (family, kernel, config)
    assert found["own"] == ("direct/direct" if family == "aten" else kernel) and "kernels" not in found


def test_a_kernel_that_is_the_same_keeps_its_records() -> None:
    found = formats.taken_over(old_entry("direct"))
    assert Record(**found).holds_on(FACTS)
    changed = formats.taken_over(old_entry("depthwise", "march q1", layer="fprop 8->8"))
    assert changed["source"] == OLD_HASH and not Record(**changed).holds_on(FACTS)
    nobody = formats.taken_over(old_entry("aten", own=None, own_ms=None))
    assert Record(**nobody).holds_on(FACTS)


def test_a_users_file_is_read_and_written_in_todays_format(own_folder: Path) -> None:
    old, new = own_folder / records_path(FACTS.name).name.replace(".v3.", ".v2."), records_path(FACTS.name)
    entries = [old_entry("direct"), old_entry("aten", own="direct", layer=f"{LAYER.toward('dgrad').direction} other")]
    before = json.dumps({"format": 2, "records": entries})
    old.write_text(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shelf_of(FACTS).find(LAYER)[0].kernel == "direct/direct" and not new.exists()
        shelf_of(FACTS).keep([record(LAYER.toward("wgrad"))])
    assert json.loads(new.read_text())["format"] == 3 and old.read_text() == before
    assert len(read_records(new)) == 3
    old.write_text("damaged, and nobody asks")
    assert len(read_records(new)) == 3


def test_shipped_records_name_configs_that_are_offered() -> None:
    """A config that no family offers would give way to another one, of which nothing was measured.

    Records of kernels that have changed since are followed by nobody; only a pending kernel may have such.
    """
    offered: Counter = Counter()
    found = read_records(SHIPPED / "nvidia-h200.json")
    current = [each for each in found if each.source == device_hash(each.own or "aten")]
    assert {each.own for each in found} - {each.own for each in current} <= pending().keys() and len(current) > 300
    with recorder(H200):
        for one in current:
            configs = FAMILIES[one.family].configs(dense_request(read_layer(one.layer, one.size), CPU))
            keys = {config.key for config in configs if config.kernel == one.kernel}
            offered[bool(keys) and (one.config in keys or not one.config)] += 1
    assert offered[False] == 0, offered
