"""Write haloconv/bench/suites/layers.jsonl: the distinct convolutions of networks, a line each, with their origin.

python -m tools.layer_tables     # needs timm, torchvision, segmentation-models-pytorch and diffusers

`haloconv bench --sample` draws layers from these tables. Networks run on the meta device: no weights, no GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from haloconv.bench.sample import LAYERS, name_of_layer
from haloconv.bench.suite import Case
from haloconv.calls import noting_calls
from haloconv.problem import as_pair

CLASSIFICATION = (
    "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "convnext_tiny", "efficientnet_b0",
    "efficientnetv2_rw_s", "regnety_016", "mobilenetv3_large_100", "densenet121", "vgg16",
    "darknet53", "hrnet_w18", "inception_v3", "dla34",
    "repvgg_a2", "res2net50_26w_4s", "xception41", "mixnet_m", "ghostnet_100",
)  # fmt: skip
SEGMENTATION = ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
DECODERS = ("Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3Plus")


class Network(NamedTuple):
    """What to run: ``package`` and ``name`` are its origin, ``make()`` the module, ``inputs`` shapes and values."""

    kind: str
    package: str
    name: str
    make: Callable[[], torch.nn.Module]
    inputs: tuple[tuple[int, ...] | int, ...]


def networks() -> Iterator[Network]:
    """All of them. Raises ImportError where a package is missing."""
    timm, tv, smp, diffusers = map(
        import_module, ("timm", "torchvision.models", "segmentation_models_pytorch", "diffusers")
    )
    image = ((1, 3, 224, 224),)
    for name in CLASSIFICATION:
        yield Network("classification", "timm", name, partial(timm.create_model, name), image)
    for name in SEGMENTATION:
        make = getattr(tv.segmentation, name)
        yield Network(
            "segmentation",
            "torchvision",
            name,
            partial(make, weights=None, weights_backbone=None),
            ((1, 3, 512, 512),),
        )
    for name in DECODERS:
        made = getattr(smp, name)
        yield Network(
            "segmentation", "segmentation-models-pytorch", f"{name}(resnet34)",
            partial(made, "resnet34", encoder_weights=None), ((1, 3, 512, 512),),
        )  # fmt: skip
    yield Network(
        "diffusion U-Net", "diffusers", "UNet2DConditionModel(sample_size=64, cross_attention_dim=768)",
        lambda: diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768),
        ((1, 4, 64, 64), 1, (1, 77, 768)),
    )  # fmt: skip
    yield Network(
        "diffusion U-Net", "diffusers", "UNet2DModel(sample_size=64)",
        lambda: diffusers.UNet2DModel(sample_size=64), ((1, 3, 64, 64), 1),
    )  # fmt: skip
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    width = (128, 256, 512, 512)
    yield Network(
        "VAE", "diffusers", "AutoencoderKL(block_out_channels=(128, 256, 512, 512))",
        lambda: diffusers.AutoencoderKL(block_out_channels=width, layers_per_block=2, **blocks),
        ((1, 3, 512, 512),),
    )  # fmt: skip


def layers_of(network: Network) -> Counter[str]:
    """How often each distinct convolution runs in one forward pass of one image."""
    found: Counter[str] = Counter()

    def note(_: str, module: torch.nn.Conv2d, x: torch.Tensor, __: torch.Tensor) -> None:
        padding = module.padding if isinstance(module.padding, tuple) else _same(module)
        n, c, h, w = x.shape
        layer = Case(
            "",
            (n, c, h, w),
            module.out_channels,
            as_pair(module.kernel_size, "kernel_size"),
            as_pair(module.stride, "stride"),
            padding,
            as_pair(module.dilation, "dilation"),
            module.groups,
        )
        found[name_of_layer(layer)] += 1

    with torch.device("meta"), torch.no_grad():
        model = network.make().eval()
        layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)}
        with noting_calls(layers, note):
            model(*(torch.empty(each) if isinstance(each, tuple) else each for each in network.inputs))
    return found


def _same(module: torch.nn.Conv2d) -> tuple[int, int]:
    if module.padding == "valid":
        return 0, 0
    rows, cols = (
        dilation * (taps - 1) // 2 for taps, dilation in zip(module.kernel_size, module.dilation, strict=True)
    )
    return rows, cols


def main(path: Path = LAYERS) -> None:
    lines = []
    for network in networks():
        layers = layers_of(network)
        origin = f"{network.package} {version(network.package)}"
        shape = network.inputs[0]
        entry = {
            "network": network.name,
            "kind": network.kind,
            "origin": origin,
            "input": shape,
            "layers": dict(layers),
        }
        lines.append(json.dumps(entry) + "\n")
        sys.stdout.write(f"{network.name}: {len(layers)} distinct of {sum(layers.values())} convolutions\n")
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
