"""Record golden values by running iBOT's official modules: ``python make_ibot.py OFFICIAL_CHECKOUT [--out FOLDER]``.

Provenance: https://github.com/bytedance/ibot (Apache 2.0) at commit da316d82636a7a7356835ef224b13d5f3ace0489, run in
fp32 on one CPU thread. It is imported from a checkout outside this repository; ``ibot.json`` records versions and the
SHA-256 of the files run.

Patched while their code runs: ``Tensor.cuda`` returns its tensor; ``torch.cuda.amp.autocast`` is a null context;
``torch.cuda.synchronize`` and the averaging of logged numbers over processes do nothing; ``DistributedDataParallel`` is
a class that holds the ``module`` and calls it; collectives run in a one-process gloo group;
``utils.cancel_gradients_last_layer``, called between backward and update, is wrapped to record gradients.
``tensorboardX`` and ``munkres``, which nothing here calls, are stubbed. The initial weights are theirs made wider, and
are recorded, as are all inputs and masks.
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
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

COMMIT = "da316d82636a7a7356835ef224b13d5f3ace0489"
MODULES = ("main_ibot", "utils", "models/head", "models/vision_transformer")
LOSS = {"global_views": 2, "local_views": 3, "samples": 4, "side": 3, "dim": 8, "prototypes": 20, "steps": 3}
BACKBONE = {
    "img_size": [8],
    "patch_size": 2,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "qkv_bias": True,
    "drop_path_rate": 0.0,
}
HEAD = {"in_dim": 16, "out_dim": 40, "hidden_dim": 24, "bottleneck_dim": 8}
EPOCHS, EPOCHS_RUN, STEPS_PER_EPOCH, BATCH, CLIP, FROZEN_EPOCHS = 4, 2, 2, 4, 0.5, 1
SCHEDULES = {
    "learning_rate": {"base_value": 4e-3, "final_value": 1e-5},
    "weight_decay": {"base_value": 0.04, "final_value": 0.4},
    "momentum": {"base_value": 0.8, "final_value": 1.0},
}


class Held(nn.Module):
    """Stand-in for DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: list[Tensor], mask: list[Tensor] | None = None) -> Any:
        return self.module(images, mask=mask)


def widen(module: nn.Module) -> None:
    """Wider weights than their 0.02, no bias at zero, no norm and no length at one, no empty mask token: any mix-up
    shows.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_matrix = parameter.ndim > 1 and not name.endswith(("weight_g", "masked_embed"))
            parameter.copy_(6 * parameter if is_matrix else parameter + 0.1 * torch.randn_like(parameter))


def random_masks(num_views: int, num_images: int, side: int) -> Tensor:  # -> [G, B, side, side]
    """About half of the patches, but nothing in the first image of each view, as half of their masks have it."""
    masks = torch.rand(num_views, num_images, side, side) < 0.5
    masks[:, 0] = False
    return masks


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


def golden_loss(main: Any) -> dict[str, Tensor]:
    """Several steps of their loss on outputs of a shared last layer, so that both centres move; the layers stay as they
    are.
    """
    torch.manual_seed(2)
    dim, count, samples, side = (LOSS[key] for key in ("dim", "prototypes", "samples", "side"))
    num_views, num_local = LOSS["global_views"], LOSS["local_views"]
    student_layer, teacher_layer = (nn.utils.weight_norm(nn.Linear(dim, count, bias=False)) for _ in range(2))
    loss_of = main.iBOTLoss(count, count, num_views, num_local, 0.04, 0.07, 0.04, 0.07, 3, LOSS["steps"])
    tensors = {
        f"loss/{who}_{part}": getattr(layer, part).detach().clone()
        for who, layer in (("student", student_layer), ("teacher", teacher_layer))
        for part in ("weight_v", "weight_g")
    }

    def near(anchor: Tensor, *shape: int) -> Tensor:
        return nn.functional.normalize(anchor + 0.7 * torch.randn(*shape, dim), dim=-1)

    for step in range(LOSS["steps"]):
        classes, patches = torch.randn(samples, dim), torch.randn(num_views, samples, side * side, dim)
        student = near(classes, num_views + num_local, samples).requires_grad_()
        student_patches = near(patches, *patches.shape[:-1]).requires_grad_()
        teacher, teacher_patches = near(classes, num_views, samples), near(patches, *patches.shape[:-1])
        masks = random_masks(num_views, samples, side)
        globals_, locals_ = student[:num_views].flatten(0, 1), student[num_views:].flatten(0, 1)
        outputs = loss_of(
            (student_layer(globals_), student_layer(student_patches.flatten(0, 1))),
            (teacher_layer(teacher.flatten(0, 1)).detach(), teacher_layer(teacher_patches.flatten(0, 1)).detach()),
            student_layer(locals_),
            list(masks),
            step,
        )
        trained = (student, student_patches, student_layer.weight_v, student_layer.weight_g)
        gradients = torch.autograd.grad(outputs["loss"], trained)
        values = {
            "student": student,
            "student_patches": student_patches,
            "teacher": teacher,
            "teacher_patches": teacher_patches,
        }
        values |= {
            "masks": masks.flatten(2),
            "class_loss": outputs["cls"],
            "patch_loss": outputs["patch"],
            "loss": outputs["loss"],
        }
        values |= {"centre_after": loss_of.center[0], "patch_centre_after": loss_of.center2[0, 0]}
        values |= {"teacher_temperature": torch.tensor(loss_of.teacher_temp_schedule[step], dtype=torch.float64)}
        names = ("student", "student_patches", "weight_v", "weight_g")
        values |= {f"gradient_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
        tensors |= {f"loss/step{step}/{key}": value.detach().clone() for key, value in values.items()}
    return tensors


def networks(main: Any, models: Any) -> tuple[nn.Module, nn.Module]:
    sizes = {
        "patch_out_dim": HEAD["out_dim"],
        "hidden_dim": HEAD["hidden_dim"],
        "bottleneck_dim": HEAD["bottleneck_dim"],
    }
    heads = [
        main.iBOTHead(HEAD["in_dim"], HEAD["out_dim"], norm_last_layer=False, shared_head=True, **sizes)
        for _ in range(2)
    ]
    student = main.utils.MultiCropWrapper(
        models.VisionTransformer(**BACKBONE, return_all_tokens=True, masked_im_modeling=True), heads[0]
    )
    teacher = main.utils.MultiCropWrapper(models.VisionTransformer(**BACKBONE, return_all_tokens=True), heads[1])
    widen(student)
    teacher.requires_grad_(False).load_state_dict(student.state_dict(), strict=False)
    return student, teacher


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Their state dict holds the shared last layer twice."""
    return {key: value.clone() for key, value in model.state_dict().items() if "last_layer2" not in key}


def golden_steps(main: Any, models: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(2022)
    student, teacher = networks(main, models)
    tensors = {f"initial/{key}": value for key, value in state_of(student).items()}
    schedules = {
        key: main.utils.cosine_scheduler(epochs=EPOCHS, niter_per_ep=STEPS_PER_EPOCH, **given)
        for key, given in SCHEDULES.items()
    }
    loss_of = main.iBOTLoss(HEAD["out_dim"], HEAD["out_dim"], 2, 2, 0.04, 0.07, 0.04, 0.07, 3, EPOCHS)
    # one per sample, which makes its views alike
    colours = 3 * torch.randn(EPOCHS_RUN * STEPS_PER_EPOCH, BATCH, 3, 1, 1)
    data = [
        (colour + torch.randn(2, BATCH, 3, 8, 8), colour + torch.randn(2, BATCH, 3, 4, 4), random_masks(2, BATCH, 4))
        for colour in colours
    ]
    held = Held(student)
    optimizer = torch.optim.AdamW(main.utils.get_params_groups(held))
    args = SimpleNamespace(
        epochs=EPOCHS,
        clip_grad=CLIP,
        freeze_last_layer=FROZEN_EPOCHS,
        global_crops_number=2,
        use_masked_im_modeling=True,
    )
    steps: list[dict[str, Any]] = []
    losses: list[dict[str, float]] = []
    cancel = main.utils.cancel_gradients_last_layer
    loss_of.register_forward_hook(
        lambda module, inputs, output: losses.append({key: value.item() for key, value in output.items()})
    )

    def recording_cancel(epoch: int, model: nn.Module, frozen_epochs: int) -> None:
        cancel(epoch, model, frozen_epochs)
        norms = {
            name.removeprefix("module."): p.grad.norm().item()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        steps.append({"step": len(steps), "epoch": epoch, "losses": losses[-1], "clipped_gradient_norms": norms})

    with (
        official_code_on_cpu(main.utils),
        mock.patch.object(main.utils, "cancel_gradients_last_layer", recording_cancel),
    ):
        for epoch in range(EPOCHS_RUN):
            batches = data[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
            loader = [
                ([*large, *small], torch.zeros(BATCH, dtype=torch.int64), [*masks]) for large, small, masks in batches
            ]
            main.train_one_epoch(
                held, teacher, teacher, loss_of, loader, optimizer, *schedules.values(), epoch, None, args
            )
    for i, (large, small, masks) in enumerate(data):
        tensors |= {f"step{i}/global": large, f"step{i}/local": small, f"step{i}/masks": masks.flatten(2)}
        steps[i] |= {key: float(values[i]) for key, values in schedules.items()}
        steps[i]["teacher_temperature"] = float(loss_of.teacher_temp_schedule[steps[i]["epoch"]])
    for who, model in (("student", student), ("teacher", teacher)):
        tensors |= {f"{who}/{key}": value for key, value in state_of(model).items()}
    tensors |= {"centre": loss_of.center[0], "patch_centre": loss_of.center2[0, 0]}
    settings = {"backbone": BACKBONE, "head": HEAD, "batch_size": BATCH, "clip": CLIP, "frozen_epochs": FROZEN_EPOCHS}
    return tensors, {"settings": settings, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record golden values from iBOT's official code.")
    parser.add_argument("checkout", type=Path, help=f"checkout of bytedance/ibot at {COMMIT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(given.checkout.resolve()))
    sys.modules |= {name: mock.MagicMock() for name in ("tensorboardX", "munkres")}
    official, models = importlib.import_module("main_ibot"), importlib.import_module("models")
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    provenance = {
        "repository": "https://github.com/bytedance/ibot",
        "commit": COMMIT,
        "python": platform.python_version(),
    }
    provenance |= {name: version(name) for name in ("torch", "torchvision", "timm", "numpy")}
    provenance["sha256"] = {
        f"{name}.py": hashlib.sha256((given.checkout / f"{name}.py").read_bytes()).hexdigest() for name in MODULES
    }
    steps, report = golden_steps(official, models)
    tensors = golden_loss(official) | {f"steps/{key}": value for key, value in steps.items()}
    plain = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    (given.out / "ibot.safetensors").write_bytes(save(plain))
    document = {"provenance": provenance, "loss": LOSS, **report}
    (given.out / "ibot.json").write_text(json.dumps(document, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
