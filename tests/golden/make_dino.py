"""Record golden values by running DINO's official modules: ``python make_dino.py OFFICIAL_CHECKOUT [--out FOLDER]``.

Provenance: https://github.com/facebookresearch/dino (Apache 2.0) at commit 7c446df5b9f45747937fb0d72314eb9f7b66930a,
run in fp32 on one CPU thread. It is imported from a checkout outside this repository; ``dino.json`` records versions
and the SHA-256 of the files run.

Patched while their code runs: ``Tensor.cuda`` returns its tensor; ``torch.cuda.amp.autocast`` is a null context;
``torch.cuda.synchronize`` and the averaging of logged numbers over processes do nothing; ``DistributedDataParallel`` is
an ``nn.Sequential`` of one ``module``; ``all_reduce`` runs in a one-process gloo group;
``utils.cancel_gradients_last_layer``, called between backward and update, is wrapped to record gradients. The initial
weights are theirs made wider, and are recorded, as are all inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import platform
import sys
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

COMMIT = "7c446df5b9f45747937fb0d72314eb9f7b66930a"
MODULES = ("main_dino", "utils", "vision_transformer")
LOSS = {"views": 5, "samples": 4, "dim": 8, "prototypes": 24, "steps": 3}
HEAD = {"in_dim": 12, "out_dim": 24, "hidden_dim": 20, "bottleneck_dim": 8}
BACKBONE = {
    "img_size": [8],
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "qkv_bias": True,
    "drop_path_rate": 0.0,
}
STEP_HEAD = {"in_dim": 16, "out_dim": 40, "hidden_dim": 24, "bottleneck_dim": 8}
EPOCHS, EPOCHS_RUN, STEPS_PER_EPOCH, BATCH, CLIP, FROZEN_EPOCHS = 4, 3, 2, 4, 0.5, 1
SCHEDULES = {
    "learning_rate": {"base_value": 4e-3, "final_value": 1e-5},
    "weight_decay": {"base_value": 0.04, "final_value": 0.4},
    "momentum": {"base_value": 0.8, "final_value": 1.0},
}


def widen(module: nn.Module) -> None:
    """Wider weights than their 0.02, no bias at zero, no norm and no length at one: any mix-up shows."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_matrix = parameter.ndim > 1 and not name.endswith("weight_g")
            parameter.copy_(6 * parameter if is_matrix else parameter + 0.1 * torch.randn_like(parameter))


@contextlib.contextmanager
def official_code_on_cpu(utils: Any) -> Iterator[None]:
    with (
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        mock.patch.object(torch.cuda.amp, "autocast", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(utils.SmoothedValue, "synchronize_between_processes"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


def golden_head(vits: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    head = vits.DINOHead(
        HEAD["in_dim"], HEAD["out_dim"], hidden_dim=HEAD["hidden_dim"], bottleneck_dim=HEAD["bottleneck_dim"]
    )
    widen(head)
    features = torch.randn(6, HEAD["in_dim"])
    return {f"head/{key}": value for key, value in head.state_dict().items()} | {
        "head/features": features,
        "head/outputs": head(features),
    }


def golden_loss(main: Any) -> dict[str, Tensor]:
    """Several steps of their loss on outputs of their last layer, so that the centre moves; the layers stay as they
    are.
    """
    torch.manual_seed(2)
    dim, count = LOSS["dim"], LOSS["prototypes"]
    student_layer, teacher_layer = (nn.utils.weight_norm(nn.Linear(dim, count, bias=False)) for _ in range(2))
    for layer in (student_layer, teacher_layer):
        layer.weight_g.data = 1 + 0.2 * torch.rand(count, 1)
    loss_of = main.DINOLoss(count, LOSS["views"], 0.04, 0.07, 3, LOSS["steps"])
    tensors = {
        f"loss/{who}_{part}": getattr(layer, part).detach().clone()
        for who, layer in (("student", student_layer), ("teacher", teacher_layer))
        for part in ("weight_v", "weight_g")
    }
    for step in range(LOSS["steps"]):
        # views of a sample are alike, so that the loss is not that of pure noise
        centres = torch.randn(LOSS["samples"], dim)
        student = nn.functional.normalize(
            centres + 0.7 * torch.randn(LOSS["views"], LOSS["samples"], dim), dim=-1
        ).requires_grad_()
        teacher = nn.functional.normalize(centres + 0.7 * torch.randn(2, LOSS["samples"], dim), dim=-1)
        loss = loss_of(student_layer(student.flatten(0, 1)), teacher_layer(teacher.flatten(0, 1)).detach(), step)
        trained = (student, student_layer.weight_v, student_layer.weight_g)
        gradients = dict(zip(("student", "weight_v", "weight_g"), torch.autograd.grad(loss, trained), strict=True))
        values = {"student": student, "teacher": teacher, "loss": loss, "centre_after": loss_of.center[0]}
        values |= {"teacher_temperature": torch.tensor(loss_of.teacher_temp_schedule[step], dtype=torch.float64)}
        values |= {f"gradient_{name}": gradient for name, gradient in gradients.items()}
        tensors |= {f"loss/step{step}/{key}": value.detach().clone() for key, value in values.items()}
    return tensors


def golden_steps(main: Any, vits: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(2021)
    arguments = {key: value for key, value in STEP_HEAD.items() if key not in ("in_dim", "out_dim")}
    student, teacher = (
        main.utils.MultiCropWrapper(
            vits.VisionTransformer(**BACKBONE, norm_layer=partial(nn.LayerNorm, eps=1e-6)),  # as their vit_small
            vits.DINOHead(STEP_HEAD["in_dim"], STEP_HEAD["out_dim"], norm_last_layer=False, **arguments),
        )
        for _ in range(2)
    )
    widen(student)
    teacher.requires_grad_(False).load_state_dict(student.state_dict())
    tensors = {f"initial/{key}": value.clone() for key, value in student.state_dict().items()}
    schedules = {
        key: main.utils.cosine_scheduler(epochs=EPOCHS, niter_per_ep=STEPS_PER_EPOCH, **given)
        for key, given in SCHEDULES.items()
    }
    loss_of = main.DINOLoss(STEP_HEAD["out_dim"], 5, 0.04, 0.07, 3, EPOCHS)
    # one per sample, which makes its views alike
    colours = 3 * torch.randn(EPOCHS_RUN * STEPS_PER_EPOCH, BATCH, 3, 1, 1)
    data = [(colour + torch.randn(2, BATCH, 3, 8, 8), colour + torch.randn(3, BATCH, 3, 4, 4)) for colour in colours]
    held = nn.Sequential(OrderedDict(module=student))
    optimizer = torch.optim.AdamW(main.utils.get_params_groups(held))
    args = SimpleNamespace(epochs=EPOCHS, clip_grad=CLIP, freeze_last_layer=FROZEN_EPOCHS)
    steps: list[dict[str, Any]] = []
    losses: list[Tensor] = []
    cancel = main.utils.cancel_gradients_last_layer
    loss_of.register_forward_hook(lambda module, inputs, output: losses.append(output.detach().clone()))

    def recording_cancel(epoch: int, model: nn.Module, frozen_epochs: int) -> None:
        cancel(epoch, model, frozen_epochs)
        norms = {
            name.removeprefix("module."): p.grad.norm().item()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        steps.append({"step": len(steps), "epoch": epoch, "loss": losses[-1].item(), "clipped_gradient_norms": norms})

    with (
        official_code_on_cpu(main.utils),
        mock.patch.object(main.utils, "cancel_gradients_last_layer", recording_cancel),
    ):
        for epoch in range(EPOCHS_RUN):
            batches = data[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
            loader = [([*large, *small], torch.zeros(BATCH)) for large, small in batches]
            main.train_one_epoch(
                held, teacher, teacher, loss_of, loader, optimizer, *schedules.values(), epoch, None, args
            )
    for i, (large, small) in enumerate(data):
        tensors |= {f"step{i}/global": large, f"step{i}/local": small}
        steps[i] |= {key: float(values[i]) for key, values in schedules.items()}
        steps[i]["teacher_temperature"] = float(loss_of.teacher_temp_schedule[steps[i]["epoch"]])
    for who, model in (("student", student), ("teacher", teacher)):
        tensors |= {f"{who}/{key}": value for key, value in model.state_dict().items()}
    tensors["centre"] = loss_of.center[0]
    settings = {
        "backbone": BACKBONE,
        "head": STEP_HEAD,
        "batch_size": BATCH,
        "clip": CLIP,
        "frozen_epochs": FROZEN_EPOCHS,
    }
    return tensors, {"settings": settings, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record golden values from DINO's official code.")
    parser.add_argument("checkout", type=Path, help=f"checkout of facebookresearch/dino at {COMMIT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(given.checkout.resolve()))
    official, vits = importlib.import_module("main_dino"), importlib.import_module("vision_transformer")
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    provenance = {
        "repository": "https://github.com/facebookresearch/dino",
        "commit": COMMIT,
        "python": platform.python_version(),
    }
    provenance |= {name: version(name) for name in ("torch", "torchvision", "numpy")}
    provenance["sha256"] = {
        f"{name}.py": hashlib.sha256((given.checkout / f"{name}.py").read_bytes()).hexdigest() for name in MODULES
    }
    steps, report = golden_steps(official, vits)
    tensors = golden_head(vits) | golden_loss(official) | {f"steps/{key}": value for key, value in steps.items()}
    plain = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    (given.out / "dino.safetensors").write_bytes(save(plain))
    document = {"provenance": provenance, "loss": LOSS, "head": HEAD, **report}
    (given.out / "dino.json").write_text(json.dumps(document, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
