"""What a bug report needs, in one zip file without anything of the user's."""

from __future__ import annotations

import getpass
import io
import json
import platform
import re
import zipfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from haloconv import env, jit
from haloconv.choose.records import records_path
from haloconv.device import device_facts
from haloconv.doctor.checks import Check
from haloconv.doctor.facts import Facts
from haloconv.jit.upkeep import failures

_PACKAGES = re.compile(r"(haloconv|torch|torchvision|timm|triton|numpy|cuda-.*|nvidia-.*|filelock|platformdirs)")

README = """This file was written by `haloconv doctor --bundle` for a bug report. It holds:

doctor.json           what `haloconv doctor` found: versions, GPUs, folders of haloconv, flags, checks
packages.txt          versions of haloconv, PyTorch, CUDA's packages, and a few that they need
environment.txt       HALOCONV_* and the variables of CUDA that are set
records/              tuning records of this machine's GPUs: shapes of convolutions, times, versions, dates
failures/             what the compiler said of kernels that did not compile: sources of haloconv, with constants

No weights, no data, no code and no list of files of yours is in it. The home folder, the user's name and the
machine's name are replaced by ~, <user> and <machine>; other folders that the variables name are shown as they are.
"""


def bundle(facts: Facts, checks: list[Check]) -> bytes:
    """The zip file with the doctor's findings and all else that ``README`` lists."""
    findings = {"facts": facts, "checks": [asdict(check) for check in checks]}
    files = {
        "README.txt": README,
        "doctor.json": json.dumps(findings, indent=1) + "\n",
        "packages.txt": "".join(f"{line}\n" for line in _packages()),
        "environment.txt": "".join(f"{name}={value}\n" for name, value in env.variables_in_force().items()),
        **{f"records/{path.name}": text for path, text in _read(_record_files())},
        **{f"failures/{path.name}": text for path, text in _read(failures(jit.cache_root()))},
    }
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, _without_the_user(text))
    return written.getvalue()


def _packages() -> list[str]:
    found = {each.metadata["Name"] or "": each.version for each in metadata.distributions()}
    return sorted(f"{name}=={version}" for name, version in found.items() if _PACKAGES.fullmatch(name.lower()))


def _record_files() -> list[Path]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return list(dict.fromkeys(records_path(device_facts(index).name) for index in range(count)))


def _read(paths: list[Path]) -> list[tuple[Path, str]]:
    """The files that can be read, with their content."""
    found = []
    for path in paths:
        try:
            found.append((path, path.read_text(encoding="utf-8", errors="replace")))
        except OSError:
            continue
    return found


def _without_the_user(text: str) -> str:
    """The text without the home folder, the user's name and the machine's name, as far as they are told."""
    try:
        home, user = str(Path.home()), getpass.getuser()
    except (RuntimeError, OSError, KeyError):
        home, user = "", ""
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)
    for name, shown in ((user, "<user>"), (platform.node(), "<machine>")):
        if name and name != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
    return text
