"""Record golden values of MoCo-v3 by running its authors' own modules: ``python make_mocov3.py OFFICIAL_CHECKOUT [--out
FOLDER]``.

Provenance: https://github.com/facebookresearch/moco-v3 at commit c349e6e24f40d3fedb22d973f92defa4cedf37a7 (its last,
November 2021), in fp32 on one CPU thread. That code (CC BY-NC) is imported from a checkout outside this repository, and
none of it is contained here. ``mocov3.json`` records the versions, the SHA-256 of the files run, settings, schedule
values and losses.

Recorded are the four steps of their ``main_moco.train`` over two epochs with ``MoCo_ViT`` on a small
``VisionTransformerMoCo``, which has their frozen patch embedding and fixed positions: views, weights before and after,
gradients of the first step. Weights start as theirs, but with noise on all that would be zero or one, and a wider class
token: mix-ups would not show otherwise.

Patched while their code runs: ``Tensor.cuda`` returns its tensor, ``torch.cuda.amp.autocast`` is a null context, the
gradient scaler is a stand-in that does not scale, ``concat_all_gather`` works in a one-process gloo group. Their code
was written for timm 0.4.9: the name ``timm.models.layers.helpers`` and the attribute ``num_tokens`` (1, the class
token), which timm no longer has, are put back.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import platform
import sys
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import timm.layers.helpers
import torch
from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

COMMIT = "c349e6e24f40d3fedb22d973f92defa4cedf37a7"
MODULES = ("main_moco", "vits", "moco/builder")
BACKBONE = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2}
DIM, MLP_DIM, TEMPERATURE, BATCH, STEPS_PER_EPOCH, EPOCHS_RUN = 8, 20, 0.2, 8, 2, 2
TRAINING = {"lr": 2e-3, "warmup_epochs": 1, "epochs": 4, "moco_m": 0.9, "moco_m_cos": True}
WEIGHT_DECAY = 0.1


class Recorder:
    """Stand-in for the gradient scaler (no scaling), which also records losses, learning rates and the gradients of the
    first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.steps, self.gradients = list[dict[str, float]](), dict[str, Tensor]()

    def scale(self, loss: Tensor) -> Tensor:
        self.steps.append({"loss": loss.item()})
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps[-1]["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        named = {
            name: parameter.grad for name, parameter in self._model.named_parameters() if parameter.grad is not None
        }
        self.gradients = self.gradients or {name: gradient.clone() for name, gradient in named.items()}
        optimizer.step()

    def update(self) -> None: ...


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters only: the running statistics of batch norm are never read."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def build(vits: Any, builder: Any) -> nn.Module:
    torch.manual_seed(2021)
    backbone = partial(vits.VisionTransformerMoCo, **BACKBONE, mlp_ratio=4, qkv_bias=True, stop_grad_conv1=True)
    model: nn.Module = builder.MoCo_ViT(backbone, DIM, MLP_DIM, TEMPERATURE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("cls_token") or parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for base, momentum in zip(model.base_encoder.parameters(), model.momentum_encoder.parameters(), strict=True):  # type: ignore[union-attr, operator]
            momentum.copy_(base)
    return model


def record_steps(main_moco: Any, vits: Any, builder: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = build(vits, builder)
    tensors = {
        f"initial/{name}": value for name, value in weights(model).items() if not name.startswith("momentum_encoder")
    }
    num_steps = EPOCHS_RUN * STEPS_PER_EPOCH
    colours = 2 * torch.randn(num_steps, 1, BATCH, 3, 1, 1)  # one for each image, which makes its views alike
    views = colours + torch.randn(num_steps, 2, BATCH, 3, 8, 8)
    tensors["views"] = views
    recorder = Recorder(model)
    optimizer = torch.optim.AdamW(model.parameters(), TRAINING["lr"], weight_decay=WEIGHT_DECAY)
    args = SimpleNamespace(**TRAINING, gpu=None, rank=1, print_freq=1000)  # rank 1: no summary is written
    with (
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        mock.patch.object(torch.cuda.amp, "autocast", return_value=contextlib.nullcontext()),
    ):
        for epoch in range(EPOCHS_RUN):
            batches = [
                (list(pair.clone()), None) for pair in views[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
            ]
            main_moco.train(batches, model, optimizer, recorder, None, epoch, args)
    tensors |= {f"gradient/{name}": value for name, value in recorder.gradients.items()}
    tensors |= {f"final/{name}": value for name, value in weights(model).items()}
    for step, values in enumerate(recorder.steps):
        values["momentum"] = main_moco.adjust_moco_momentum(step / STEPS_PER_EPOCH, args)
    settings = {
        "backbone": BACKBONE,
        "dim": DIM,
        "mlp_dim": MLP_DIM,
        "temperature": TEMPERATURE,
        "weight_decay": WEIGHT_DECAY,
    }
    settings |= {"batch_size": BATCH, "steps_per_epoch": STEPS_PER_EPOCH, "training": TRAINING}
    return tensors, {"settings": settings, "steps": recorder.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record golden values from the authors' code.")
    parser.add_argument("checkout", type=Path, help=f"checkout of facebookresearch/moco-v3 at {COMMIT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of old names
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(given.checkout.resolve()))
    sys.modules["timm.models.layers.helpers"] = timm.layers.helpers
    VisionTransformer.num_tokens = 1
    vits, builder, main_moco = (importlib.import_module(name) for name in ("vits", "moco.builder", "main_moco"))
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    tensors, report = record_steps(main_moco, vits, builder)
    torch.distributed.destroy_process_group()
    provenance = {
        "repository": "https://github.com/facebookresearch/moco-v3",
        "commit": COMMIT,
        "python": platform.python_version(),
    }
    provenance |= {name: version(name) for name in ("torch", "timm", "numpy")}
    provenance["sha256"] = {
        f"{name}.py": hashlib.sha256((given.checkout / f"{name}.py").read_bytes()).hexdigest() for name in MODULES
    }
    plain = {name: value.contiguous() for name, value in tensors.items()}
    (given.out / "mocov3.safetensors").write_bytes(save(plain))
    (given.out / "mocov3.json").write_text(json.dumps({"provenance": provenance, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
