"""haloconv doctor --bundle: all that a bug report needs, and nothing of the user's; the remedies, in one process."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from haloconv import env
from haloconv.choose import records
from haloconv.cli import app
from haloconv.doctor import bundle, checks, facts
from haloconv.jit import cache
from haloconv.jit.upkeep import keep_failure
from tests.toy_kernel import ARCH
from tests.tuned import FACTS, record


@pytest.fixture(autouse=True)
def own_folders(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home" / "mary")
    monkeypatch.setattr("getpass.getuser", lambda: "mary")
    monkeypatch.setattr("platform.node", lambda: "marys-laptop")
    monkeypatch.setenv(env.RECORDS_DIR, str(tmp_path / "home" / "mary" / "records"))
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "home" / "mary" / "cache"))
    monkeypatch.setattr(checks, "_compile_probe", lambda: f"{ARCH} in 1 ms")


def opened(data: bytes) -> dict[str, str]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    return {name: archive.read(name).decode() for name in archive.namelist()}


def test_the_command_writes_the_bundle(tmp_path: Path) -> None:
    out = tmp_path / "bug.zip"
    run = CliRunner().invoke(app, ["doctor", "--bundle", str(out)])
    assert run.exit_code == 0 and "README.txt before you send it" in run.output, run.output
    found = opened(out.read_bytes())
    assert set(found) == {"README.txt", "doctor.json", "packages.txt", "environment.txt"}
    for name in found.keys() - {"README.txt"}:
        assert name in found["README.txt"]
    findings = json.loads(found["doctor.json"])
    assert findings["facts"]["versions"]["PyTorch"].startswith(torch.__version__)
    assert {check["name"] for check in findings["checks"]} >= {"compile a kernel", "g++ for the emulator"}
    assert f"torch=={torch.__version__.split('+')[0]}" in found["packages.txt"]
    assert all(name in found["environment.txt"] for name in env.VARIABLES)
    again = CliRunner().invoke(app, ["doctor", "--bundle", str(out)])
    assert again.exit_code == 2 and opened(out.read_bytes()) == found


def test_the_bundle_holds_records_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(bundle, "device_facts", lambda index: FACTS)
    records.write_records(records.records_path(FACTS.name), [record()], FACTS)
    keep_failure(cache.prepare_root(), "abc-sm_90a", f"{Path.home()}/x.cu does not compile")
    found = opened(bundle.bundle({}, []))
    assert found[f"records/{records.records_path(FACTS.name).name}"].count('"layer"') == 1
    assert found["failures/abc-sm_90a.log"] == "~/x.cu does not compile\n"


def test_the_bundle_names_neither_user_nor_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{Path.home()}/lib:/data/mary/lib:/maryland")
    keep_failure(cache.prepare_root(), "abc", "on marys-laptop, by mary")
    found = opened(bundle.bundle(facts.gather_facts(), checks.run_checks()))
    whole = "".join(found.values())
    assert str(Path.home()) not in whole and "marys-laptop" not in whole
    assert "LD_LIBRARY_PATH=~/lib:/data/<user>/lib:/maryland" in found["environment.txt"]
    assert found["failures/abc.log"] == "on <machine>, by <user>\n"
    assert "~/cache/kernels" in found["doctor.json"]


@pytest.mark.parametrize(
    "driver, remedy",
    [
        (13000, "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"),
        (12090, "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"),
        (12060, "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"),
        (11080, checks.UPDATE_DRIVER),
    ],
)
def test_the_pytorch_that_is_named_fits_the_driver(monkeypatch: pytest.MonkeyPatch, driver: int, remedy: str) -> None:
    monkeypatch.setattr(checks, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = checks.run_checks()[0]
    assert seen.name == "PyTorch sees the GPU" and not seen.ok and seen.remedy == remedy


@pytest.mark.parametrize(
    "tool, remedy", [("dnf", "sudo dnf install gcc-c++"), ("", "conda install -c conda-forge gxx")]
)
def test_the_compiler_is_installed_as_this_system_does(monkeypatch: pytest.MonkeyPatch, tool: str, remedy: str) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == tool else None)
    monkeypatch.setattr(checks, "available", lambda: "it is not installed")
    found = {check.name: check for check in checks.run_checks()}["g++ for the emulator"]
    assert (found.ok, found.needed, found.detail, found.remedy) == (False, False, "it is not installed", remedy)


def test_the_doctor_says_what_limits_and_disables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env, "disabled", lambda: True)
    monkeypatch.setenv(env.CACHE_LIMIT, "1GiB")
    monkeypatch.setenv(env.CACHE_DIR, f"{tmp_path}:/opt/haloconv")
    run = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert "HALOCONV_DISABLE is set, so that PyTorch's own convolution runs" in run.output
    assert "of at most 1024.0 MiB" in run.output and "/opt/haloconv" in run.output
