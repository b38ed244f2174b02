"""Record golden values of supervised training by running DeiT's code: ``python make_supervised.py OFFICIAL_CHECKOUT
[--out FOLDER]``.

Provenance: https://github.com/facebookresearch/deit at commit 7e160fe43f0252d17191b71cbb5826254114ea5b (March 2024), in
fp32 on one CPU thread, with timm's ``Mixup`` and ``SoftTargetCrossEntropy``, as its ``main.py`` puts them together.
That code is imported from a checkout outside this repository, and none of it is contained here. ``supervised.json``
records the versions and the SHA-256 of the files run.

One step of their ``train_one_epoch`` for each case, on a small timm ViT with a classifier. Patched:
``torch.cuda.amp.autocast`` is a null context, ``torch.cuda.synchronize`` does nothing, the gradient scaler is a
stand-in that does not scale, and numpy's ``rand``, ``beta`` and ``randint`` give the case's own numbers. The weights
are timm's made wider, and are recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import timm
import torch
from safetensors.torch import save
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

COMMIT = "7e160fe43f0252d17191b71cbb5826254114ea5b"
FILES = ("engine.py", "losses.py", "utils.py")
MODEL: dict[str, int] = {"img_size": 12, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 7}
BATCH, SMOOTHING = 6, 0.1
# What is drawn: for CutMix or not, the share, the centre of the rectangle
CASES: dict[str, dict[str, Any]] = {
    "mixup": {"cuts": False, "share": 0.3, "centre": [0, 0]},
    "cutmix": {"cuts": True, "share": 0.6, "centre": [6, 5]},
    "cutmix at the border": {"cuts": True, "share": 0.25, "centre": [1, 10]},
    "unmixed": {"cuts": None},
}


class Scaler:
    """Stand-in for the gradient scaler: the backward pass alone."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())

    def __call__(self, loss: Tensor, optimizer: Any, clip_grad: Any, parameters: Any, create_graph: bool) -> None:
        self.loss = loss.detach()
        loss.backward()  # type: ignore[no-untyped-call]


def one_step(
    engine: Any, model: nn.Module, images: Tensor, labels: Tensor, case: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Loss of their step and the targets it used; gradients stay in the model."""
    criterion: nn.Module = LabelSmoothingCrossEntropy(SMOOTHING) if case["cuts"] is None else SoftTargetCrossEntropy()
    recorded = list[Tensor]()

    def remember(samples: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        recorded.append(targets)
        loss: Tensor = criterion(outputs, targets)
        return loss

    mixup = None
    if case["cuts"] is not None:
        mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=SMOOTHING, num_classes=MODEL["num_classes"])
    scaler = Scaler()
    with (
        mock.patch.object(torch.cuda.amp, "autocast", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "synchronize"),
        # below 0.5: CutMix; always below 1: mixed
        mock.patch.object(np.random, "rand", return_value=0.0 if case["cuts"] else 0.7),
        mock.patch.object(np.random, "beta", return_value=case.get("share")),
        mock.patch.object(np.random, "randint", side_effect=case.get("centre")),
    ):
        optimizer = SimpleNamespace(zero_grad=model.zero_grad, param_groups=[{"lr": 0.0}])
        arguments = SimpleNamespace(cosub=False, bce_loss=False)
        batches = [(images.clone(), labels.clone())]
        engine.train_one_epoch(
            model, remember, batches, optimizer, torch.device("cpu"), 0, scaler, mixup_fn=mixup, args=arguments
        )
    return scaler.loss, recorded[0]


def golden_steps(engine: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    model = timm.create_model("vit_tiny_patch16_224", **MODEL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(6 * parameter if parameter.ndim > 1 else parameter + 0.2 * torch.randn_like(parameter))
    images = torch.randn(BATCH, 3, 12, 12)
    labels = torch.tensor([0, 3, 6, 2, 3, 5])
    tensors = {
        "images": images,
        "labels": labels,
        **{f"weights/{key}": value.clone() for key, value in model.state_dict().items()},
    }
    losses = {}
    for name, case in CASES.items():
        loss, targets = one_step(engine, model, images, labels, case)
        losses[name] = loss.item()
        tensors |= {f"{name}/loss": loss, f"{name}/targets": targets}
        watched = ("patch_embed.proj.weight", "head.weight", "blocks.1.attn.qkv.weight") if name != "mixup" else None
        for key, parameter in model.named_parameters():
            if watched is None or key in watched:
                assert parameter.grad is not None
                tensors[f"{name}/gradient/{key}"] = parameter.grad.clone()
    return tensors, losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Record golden values from the authors' code.")
    parser.add_argument("checkout", type=Path, help=f"checkout of facebookresearch/deit at {COMMIT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(2021)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(given.checkout.resolve()))
    tensors, losses = golden_steps(importlib.import_module("engine"))
    plain = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    (given.out / "supervised.safetensors").write_bytes(save(plain))
    provenance = {
        "repository": "https://github.com/facebookresearch/deit",
        "commit": COMMIT,
        "python": platform.python_version(),
    }
    provenance |= {name: version(name) for name in ("torch", "timm", "numpy")}
    hashes = {name: hashlib.sha256((given.checkout / name).read_bytes()).hexdigest() for name in FILES}
    record = {
        "provenance": {**provenance, "sha256": hashes},
        "model": MODEL,
        "smoothing": SMOOTHING,
        "cases": CASES,
        "losses": losses,
    }
    (given.out / "supervised.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
