"""Record golden values of MAE by running its authors' own modules: ``python make_mae.py OFFICIAL_CHECKOUT [--out
FOLDER]``.

Provenance: https://github.com/facebookresearch/mae at commit efb2a8062c206524e35e47d04501ed4f544c0ae8 (April 2022), in
fp32 on one CPU thread. That code is imported from a checkout outside this repository, and none of it is contained here.
``mae.json`` records the versions and the SHA-256 of the files run.

Their ``MaskedAutoencoderViT`` runs as a whole on a small network, with and without normalised pixels. Patched while it
runs: timm's ``Block`` loses the argument ``qk_scale``, which it no longer takes (they pass None); ``np.float`` is
float; ``torch.rand``, which is their only draw, is wrapped to record. The weights are theirs made wider, without zeros
and ones that would hide mix-ups, and are recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import timm.models.vision_transformer
import torch
from safetensors.torch import save
from torch import Tensor

COMMIT = "efb2a8062c206524e35e47d04501ed4f544c0ae8"
FILES = ("models_mae.py", "util/pos_embed.py")
ENCODER = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
MODEL = ENCODER | {"decoder_embed_dim": 12, "decoder_depth": 2, "decoder_num_heads": 3}
BATCH, MASK_RATIO = 3, 0.75


def official_model(checkout: Path) -> Any:
    """Their model, built with a timm newer than they knew."""
    plain_block = timm.models.vision_transformer.Block

    def block(*args: Any, qk_scale: None, **options: Any) -> Any:
        return plain_block(*args, **options)

    sys.path.insert(0, str(checkout.resolve()))
    with (
        mock.patch.object(timm.models.vision_transformer, "Block", block),
        mock.patch.object(np, "float", float, create=True),
    ):
        models = importlib.import_module("models_mae")
        norm = models.partial(torch.nn.LayerNorm, eps=1e-6)  # as in each of their named models
        return models.MaskedAutoencoderViT(**MODEL, norm_layer=norm)


def golden_passes(model: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "pos_embed" not in name:
                parameter.copy_(2 * parameter if parameter.ndim > 1 else parameter + 0.2 * torch.randn_like(parameter))
    # neighbouring pixels are alike, patches differ in contrast
    images = torch.randn(BATCH, 3, 16, 16).cumsum(dim=2).cumsum(dim=3) / 8
    tensors = {"images": images, **{f"weights/{key}": value for key, value in model.state_dict().items()}}
    draw, noises, losses = torch.rand, list[Tensor](), dict[str, float]()

    def rand(*size: int, device: torch.device) -> Tensor:
        noises.append(draw(*size, device=device))
        return noises[-1]

    for case, normalised in (("normalised", True), ("plain", False)):
        model.zero_grad()
        model.norm_pix_loss = normalised
        with mock.patch.object(torch, "rand", rand):
            loss, predictions, mask = model(images, mask_ratio=MASK_RATIO)
        loss.backward()
        losses[case] = loss.item()
        tensors |= {
            f"{case}/noise": noises[-1],
            f"{case}/predictions": predictions,
            f"{case}/mask": mask,
            f"{case}/loss": loss,
        }
        if normalised:
            gradients = {
                name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad
            }
            tensors |= {f"{case}/gradient/{name}": gradient for name, gradient in gradients.items()}
    return tensors, losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Record golden values from the authors' code.")
    parser.add_argument("checkout", type=Path, help=f"checkout of facebookresearch/mae at {COMMIT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(2022)
    sys.dont_write_bytecode = True
    tensors, losses = golden_passes(official_model(given.checkout))
    plain = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    (given.out / "mae.safetensors").write_bytes(save(plain))
    provenance = {
        "repository": "https://github.com/facebookresearch/mae",
        "commit": COMMIT,
        "python": platform.python_version(),
    }
    provenance |= {name: version(name) for name in ("torch", "timm", "numpy")}
    hashes = {name: hashlib.sha256((given.checkout / name).read_bytes()).hexdigest() for name in FILES}
    record = {
        "provenance": {**provenance, "sha256": hashes},
        "model": MODEL,
        "mask_ratio": MASK_RATIO,
        "losses": losses,
    }
    (given.out / "mae.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
