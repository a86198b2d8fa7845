"""The scripts of examples/ run: with the libraries where they are installed, and with small stand-ins where not."""

from __future__ import annotations

import copy
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import nn

import haloconv
from haloconv.cli import app
from haloconv.emulator import emulated_device
from tests.launches import launched
from tests.timm_layers import Conv2dSame

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
README = EXAMPLES / "README.md"
SCRIPTS = {"train_timm": "timm", "vae_diffusers": "diffusers"}
SHARDED = ("sharded_unet", "sharded_decoder")  # which tests/cpu/test_spatial.py runs
SMALL = {
    "train_timm": "--model tf_efficientnet_lite0 --batch 2 --image 40 --steps 2 --device cpu",
    "vae_diffusers": "--latent 4 --channels 8 8 --repeat 1 --device cpu",
}
OWN = {
    "vocoder": "--channels 32 --frames 4 --repeat 1 --device cpu",
    "vlm_patch_embedding": "--patches 6 --filters 16 --size 4 --repeat 1 --device cpu",
}
"""Scripts that need no library, with arguments for a small run, and below what they then show."""
OWN_SHOWN = {
    "vocoder": r"^78 of 78 convolutions swapped\n\(1, 1, 1024\) samples; haloconv's differ .* by 0.0e\+00 of",
    "vlm_patch_embedding": r"(?s)^1 of 1 convolutions swapped\n.*"
    r"Conv3d: (embeddings off by \S+e-0[678] .* by \S+e-0[678])\nhaloconv: \1\n"
    r"torch.nn.Linear: embeddings off by \S+e-0[678] .* by \S+e-0[678]\n",
}
SHOWN = {
    "train_timm": r"step 1: loss (\d+\.\d+) with PyTorch, \1 with haloconv\nNo times",
    "vae_diffusers": r"\(1, 3, 8, 8\) images; haloconv's differ from PyTorch's by [0-9.]+e-(0[5-9]|1\d)|by 0.0e\+00",
}


def create_model(name: str, num_classes: int) -> nn.Module:
    layers = (
        Conv2dSame(3, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


class AutoencoderKL(nn.Module):
    """With a decoder of a layer per level."""

    def __init__(self, *, block_out_channels: tuple[int, ...], latent_channels: int, **_: Any) -> None:
        super().__init__()
        widths = [latent_channels, *reversed(block_out_channels)]
        levels = [nn.Conv2d(*pair, 3, padding=1) for pair in zip(widths, widths[1:], strict=False)]
        self.decoder = nn.Sequential(*levels, nn.Upsample(scale_factor=2.0), nn.Conv2d(widths[-1], 3, 3, padding=1))

    def decode(self, latents: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=self.decoder(latents))


STAND_INS = {
    "timm": SimpleNamespace(create_model=create_model),
    "diffusers": SimpleNamespace(AutoencoderKL=AutoencoderKL),
}


def run(script: str, arguments: str) -> None:
    runpy.run_path(str(EXAMPLES / f"{script}.py"))["main"](shlex.split(arguments))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run_with_stand_ins(script: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """What they do with haloconv, also where the library is not installed."""
    monkeypatch.setitem(sys.modules, SCRIPTS[script], STAND_INS[SCRIPTS[script]])
    run(script, SMALL[script])
    shown = capsys.readouterr().out
    assert re.search(SHOWN[script], shown), shown
    count = {"train_timm": "2 of 2", "vae_diffusers": "3 of 3"}[script]
    assert f"{count} convolutions swapped" in shown and " ms per " not in shown


@pytest.mark.parametrize("script", OWN)
def test_scripts_without_libraries_run(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, OWN[script])
    shown = capsys.readouterr().out
    assert re.search(OWN_SHOWN[script], shown) and "No times" in shown and " ms per " not in shown, shown


def test_layers_of_the_vocoder_run_on_our_kernels(emulator_cache: None) -> None:
    """Trained, with weight norm, on the emulator: sound and gradients of one with a block alone are PyTorch's."""
    generator = runpy.run_path(str(EXAMPLES / "vocoder.py"))["Generator"]
    generator.__init__.__globals__.update(RATES=((4, 2),), KERNELS=(3,), DILATIONS=(1, 3))
    torch.manual_seed(0)
    theirs = generator(8).double()
    ours = copy.deepcopy(theirs)
    assert len(haloconv.accelerate(ours)) == 7
    mels = torch.randn(1, 80, 9, dtype=torch.float64)

    def trained(model: nn.Module) -> list[torch.Tensor]:
        sound = model(mels)
        return [sound.detach(), *torch.autograd.grad(sound.pow(2).sum(), [*model.parameters()])]

    with emulated_device(), launched() as names:
        found = trained(ours)
    assert names
    for got, want in zip(found, trained(theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripts_run_with_the_libraries(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(SCRIPTS[script])
    run(script, SMALL[script])
    shown = capsys.readouterr().out
    assert re.search(SHOWN[script], shown), shown
    assert re.search(r"^(\d+) of \1 convolutions swapped", shown)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_library_is_named(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SCRIPTS[script]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit, match=rf"^{script}.py needs {library}: pip install {library} \(.*{library}"):
        run(script, "")


@pytest.mark.parametrize("script", SHARDED)
def test_one_process_is_told_how_to_start_several(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=f"^{script}.py runs in several processes: torchrun --nproc-per-node 2"):
        run(script, "")


def test_every_example_has_a_row_and_every_command_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text("utf-8")
    named = set(re.findall(r"^\| \[([\w.]+)/?\]", text, re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.iterdir() if path != README and path.name != "__pycache__"}
    assert all((EXAMPLES / target).exists() for target in re.findall(r"\]\(([^)#]+)\)", text))
    for library, stand_in in STAND_INS.items():
        monkeypatch.setitem(sys.modules, library, stand_in)
    sources = [text, *((EXAMPLES / f"{script}.py").read_text("utf-8") for script in (*SCRIPTS, *OWN, *SHARDED))]
    programs = r"^ *((?:python|haloconv|torchrun --nproc-per-node \d) .*)$"
    lines = [line for source in sources for line in re.findall(programs, source, re.MULTILINE)]
    verbs = typer.main.get_command(app).commands
    assert len(lines) == 26
    for line in lines:
        program, target, *arguments = shlex.split(re.sub(" --nproc-per-node .", "", line), comments=True)
        if program in ("python", "torchrun"):
            runpy.run_path(str(ROOT / target))["options_of"](arguments)
        else:
            known = {option for parameter in verbs[target].params for option in parameter.opts}
            assert {argument for argument in arguments if argument.startswith("-")} <= known
