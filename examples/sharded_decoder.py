"""Decode latent images with the decoder of models/vae_decoder.py, divided over processes by rows.

    torchrun --nproc-per-node 2 examples/sharded_decoder.py

Each process has its rows of every image inside the decoder; the model's file is unchanged. The images are compared with
those of one process that decodes them whole, unless --alone leaves that out.
"""

from __future__ import annotations

import argparse
import copy
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from haloconv.distributed import shard_spatially

DECODER = Path(__file__).parent / "models" / "vae_decoder.py"


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latent", type=int, nargs=2, default=(9, 8), metavar=("H", "W"))
    parser.add_argument("--channels", type=int, default=8, help="of the last level; the first has four times as many")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="no process that decodes whole images beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    owns_group = not dist.is_initialized()
    if owns_group:
        if "RANK" not in os.environ:
            raise SystemExit("sharded_decoder.py runs in several processes: torchrun --nproc-per-node 2 ...")
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    torch.manual_seed(0)  # all processes draw the same weights
    model = runpy.run_path(str(DECODER))["Model"](4, options.channels).to(options.device)
    single = None if options.alone or dist.get_rank() else copy.deepcopy(model)
    latents = torch.randn(options.batch, 4, *options.latent, device=options.device)

    shard_spatially(model, mesh)
    with torch.no_grad():
        images = model(distribute_tensor(latents, mesh, [Shard(2)]))
        whole = images.full_tensor()  # for the comparison; a program would write out its own rows
        if dist.get_rank() == 0:
            print(f"rank 0 of {dist.get_world_size()} has {list(images.to_local().shape)} of {list(images.shape)}")
            if single is not None:
                most = (whole - single(latents)).abs().max()
                print(f"The images differ from those of one process by at most {most:.1e}")
    if owns_group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # DTensor keeps threads of gloo beyond the process group, on which an interpreter that ends may abort
