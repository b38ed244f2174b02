"""Record golden values by running the authors' own modules: ``python make_golden.py OFFICIAL_CHECKOUT [--out FOLDER]``.

Provenance: https://github.com/sthalles/MaSSL at commit 0fa1456e4ccdb4160379eee7c31996535cd7d2d0 (its last, October
2024), run with torch 2.15.0, timm 1.0.30 and numpy 2.4.6 in fp32 on one CPU thread. That code has no licence: it is
imported from a checkout outside this repository, and none of it is contained here. ``steps.json`` records the SHA-256
of the files run.

Patched while the authors' code runs: ``Tensor.cuda`` returns its tensor; ``torch.cuda.amp.autocast`` is a null context;
the gradient scaler is a stand-in that does not scale (``Recorder``); ``torch.multinomial`` and ``utils.clip_gradients``
are wrapped to record, not changed; ``DistributedDataParallel`` is an ``nn.Sequential`` of one ``module``;
``all_gather`` runs in a one-process gloo group. No import is stubbed. The initial weights are theirs made wider, and
are recorded, as are the inputs and draws.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import platform
import sys
from collections import OrderedDict
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

COMMIT = "0fa1456e4ccdb4160379eee7c31996535cd7d2d0"
MODULES = (
    "criterion",
    "head",
    "koleo",
    "main_massl",
    "memory_bank",
    "random_partition",
    "utils",
    "models/vision_transformer",
)
# views V, samples N, dimension D, memory rows K, block size N_b, student temperature, teacher temperature (always 2
# teacher views)
LOSS_CASES = {
    "small": (2, 4, 8, 32, 8, 0.1, 0.04),
    "remainder": (5, 5, 8, 50, 16, 0.2, 0.05),  # 3 blocks of 16, two rows left out
    "multicrop": (12, 4, 16, 64, 16, 0.1, 0.07),
}
BACKBONE = {
    "img_size": [16],
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "qkv_bias": True,
    "drop_path_rate": 0.0,
}
HEAD = {"in_dim": 32, "hidden_dim": 64, "bottleneck_dim": 16}
EPOCHS, EPOCHS_RUN, STEPS_PER_EPOCH, BATCH, ROWS, BLOCK, STUDENT_TAU, CLIP = 5, 3, 4, 8, 64, 16, 0.1, 0.5
SCHEDULES: dict[str, dict[str, float]] = {
    "learning_rate": {"base_value": 1e-3, "final_value": 1e-6, "warmup_epochs": 1},
    "weight_decay": {"base_value": 0.04, "final_value": 0.4},
    "momentum": {"base_value": 0.9, "final_value": 1.0},
    "teacher_temperature": {"base_value": 0.07, "final_value": 0.07, "warmup_epochs": 2, "start_warmup_value": 0.04},
}
WITHOUT_WARMUP: dict[str, dict[str, float]] = {
    "learning_rate_without_warmup": {"base_value": 2e-3, "final_value": 1e-6}
}


class Recorder:
    """Stand-in for the gradient scaler (no scaling) that also records each draw, loss, clip and optimiser setting."""

    def __init__(self) -> None:
        self.permutations, self.losses = list[Tensor](), list[Tensor]()
        self.steps, self._clip = list[dict[str, Any]](), dict[str, Any]()

    def scale(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.detach().clone())
        return loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None: ...

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        decayed, plain = optimizer.param_groups
        assert decayed["lr"] == plain["lr"]
        assert plain["weight_decay"] == 0.0
        self.steps.append(
            {"learning_rate": float(decayed["lr"]), "weight_decay": float(decayed["weight_decay"]), **self._clip}
        )
        optimizer.step()

    def update(self) -> None: ...

    @contextlib.contextmanager
    def recording(self, utils: Any) -> Iterator[None]:
        """Apply every patch of the module docstring, recording the multinomial draws and what the clip changes."""
        draw, clip_gradients = torch.multinomial, utils.clip_gradients

        def multinomial(*args: Any, **kwargs: Any) -> Tensor:
            self.permutations.append(draw(*args, **kwargs))
            return self.permutations[-1]

        def clip(model: nn.Module, value: float) -> list[float]:
            named = {name.removeprefix("module."): p for name, p in model.named_parameters() if p.grad is not None}
            before = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
            norms: list[float] = clip_gradients(model, value)
            clipped = [
                name for name, p in named.items() if p.grad is not None and not torch.equal(p.grad, before[name])
            ]
            self._clip = {"gradient_norms": dict(zip(named, norms, strict=True)), "clipped": clipped}
            return norms

        with (
            mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
            mock.patch.object(torch.cuda.amp, "autocast", return_value=contextlib.nullcontext()),
            mock.patch.object(torch, "multinomial", multinomial),
            mock.patch.object(utils, "clip_gradients", clip),
        ):
            yield


def golden_loss(main: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for seed, (name, (views, samples, dim, rows, block, student_temp, teacher_temp)) in enumerate(LOSS_CASES.items()):
        torch.manual_seed(seed)
        recorder, bank = Recorder(), main.MemoryBank(views, rows, dim)
        memory = bank.queue.T.clone()
        centres = torch.randn(samples, dim)  # views of a sample are alike, so that the loss is not that of pure noise
        student = nn.functional.normalize(centres + 0.7 * torch.randn(views, samples, dim), dim=-1).requires_grad_()
        teacher = nn.functional.normalize(centres + 0.7 * torch.randn(2, samples, dim), dim=-1)
        with recorder.recording(main.utils):
            student_logits = bank(student.flatten(0, 1)) / student_temp
            teacher_logits = bank(teacher.flatten(0, 1), update=True) / teacher_temp
            partition = main.RandomPartition(SimpleNamespace(ncrops=views, out_dim=rows))
            loss = main.Criterion()(*partition(student_logits, teacher_logits, block))
            (gradient,) = torch.autograd.grad(loss, student)
        values = {"student": student, "teacher": teacher, "memory": memory, "loss": loss, "gradient": gradient}
        values |= {"memory_after": bank.queue.T, "pointer_after": bank.queue_ptr, "block_size": torch.tensor(block)}
        student_tau, teacher_tau = torch.tensor([student_temp, teacher_temp], dtype=torch.float64)
        values |= {
            "student_temperature": student_tau,
            "teacher_temperature": teacher_tau,
            "permutation": recorder.permutations[0],
        }
        tensors |= {f"{name}/{key}": value for key, value in values.items()}
    return tensors


def golden_steps(main: Any, models: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(2024)
    student, teacher = (
        main.utils.MultiCropWrapper(models.VisionTransformer(**BACKBONE), main.ProjectionHead(**HEAD)) for _ in range(2)
    )
    # wider weights than their 0.02, too small for 32 channels; no bias at zero, no norm at one: any mix-up shows
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(8 * parameter if parameter.ndim > 1 else parameter + 0.05 * torch.randn_like(parameter))
    teacher.requires_grad_(False).load_state_dict(student.state_dict())
    bank = main.MemoryBank(5, ROWS, HEAD["bottleneck_dim"])
    tensors = {f"initial/{key}": value.clone() for key, value in student.state_dict().items()}
    tensors["memory/initial_rows"] = bank.queue.T.clone()
    schedules = {
        key: main.utils.cosine_scheduler(epochs=EPOCHS, niter_per_ep=STEPS_PER_EPOCH, **given)
        for key, given in SCHEDULES.items()
    }
    # one per sample, which makes its views alike
    colours = 3 * torch.randn(EPOCHS_RUN * STEPS_PER_EPOCH, BATCH, 3, 1, 1)
    data = [(colour + torch.randn(2, BATCH, 3, 16, 16), colour + torch.randn(3, BATCH, 3, 8, 8)) for colour in colours]
    batches = [([*large.clone(), *small.clone()], torch.zeros(BATCH)) for large, small in data]
    args = SimpleNamespace(
        ncrops=5, out_dim=ROWS, student_temp=STUDENT_TAU, partition_size=BLOCK, clip_grad=CLIP, koleo_loss_weight=0.0
    )
    recorder, held = Recorder(), nn.Sequential(OrderedDict(module=student))
    optimizer = torch.optim.AdamW(main.utils.get_params_groups(held))
    with recorder.recording(main.utils):
        for epoch in range(EPOCHS_RUN):
            loader = batches[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
            # in the order of SCHEDULES
            objects = (held, teacher, teacher, main.Criterion(), loader, optimizer, *schedules.values(), None)
            main.train_one_epoch(*objects, epoch, recorder, main.RandomPartition(args), bank, None, args)
    for i, ((large, small), permutation, loss) in enumerate(
        zip(data, recorder.permutations, recorder.losses, strict=True)
    ):
        tensors |= {
            f"step{i}/global": large,
            f"step{i}/local": small,
            f"step{i}/permutation": permutation,
            f"step{i}/loss": loss,
        }
        used = {key: float(schedules[key][i]) for key in ("momentum", "teacher_temperature")}
        recorder.steps[i] = {"step": i, "epoch": i // STEPS_PER_EPOCH, "loss": loss.item(), **used, **recorder.steps[i]}
    tensors |= {"memory/rows": bank.queue.T, "memory/pointer": bank.queue_ptr}
    for who, model in (("student", student), ("teacher", teacher)):
        tensors |= {f"{who}/{key}": value for key, value in model.state_dict().items()}
    settings = {"backbone": BACKBONE, "head": HEAD, "memory_rows": ROWS, "block_size": BLOCK, "batch_size": BATCH}
    settings |= {
        "koleo_weight": args.koleo_loss_weight,
        "student_temperature": STUDENT_TAU,
        "clip": CLIP,
        "optimizer": "AdamW",
    }
    settings |= {key: optimizer.defaults[key] for key in ("betas", "eps")} | {
        "global_views": 2,
        "local_views": 3,
        "epochs": EPOCHS,
    }
    settings |= {"epochs_run": EPOCHS_RUN, "steps_per_epoch": STEPS_PER_EPOCH, "schedules": SCHEDULES}
    return tensors, {"settings": settings, "final_pointer": int(bank.queue_ptr), "steps": recorder.steps}


@torch.no_grad()
def golden_position(models: Any) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = models.VisionTransformer(img_size=[224], patch_size=16, embed_dim=8, depth=1, num_heads=2)
    model.pos_embed.copy_(torch.randn_like(model.pos_embed))
    tensors = {"pos_embed": model.pos_embed.detach().clone()}
    # the last has 196 patches too, in another shape
    for height, width in ((96, 96), (480, 480), (112, 176), (112, 448)):
        tokens = torch.zeros(1, 1 + (height // 16) * (width // 16), 8)
        tensors[f"{height}x{width}"] = model.interpolate_pos_encoding(tokens, height, width)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description="Record golden values from the authors' code.")
    parser.add_argument("checkout", type=Path, help=f"checkout of sthalles/MaSSL at {COMMIT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(given.checkout.resolve()))
    official, models = importlib.import_module("main_massl"), importlib.import_module("models")
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    provenance = {
        "repository": "https://github.com/sthalles/MaSSL",
        "commit": COMMIT,
        "python": platform.python_version(),
    }
    provenance |= {name: version(name) for name in ("torch", "timm", "numpy")}
    hashes = {
        f"{name}.py": hashlib.sha256((given.checkout / f"{name}.py").read_bytes()).hexdigest() for name in MODULES
    }
    steps, report = golden_steps(official, models)
    files = {"loss": golden_loss(official), "steps": steps, "position": golden_position(models)}
    for name, tensors in files.items():
        plain = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
        (given.out / f"{name}.safetensors").write_bytes(save(plain))
    cases = {key: {"epochs": 5, "niter_per_ep": 7, **values} for key, values in (SCHEDULES | WITHOUT_WARMUP).items()}
    schedules = {
        key: {"arguments": values, "values": official.utils.cosine_scheduler(**values).tolist()}
        for key, values in cases.items()
    }
    documents = {"steps": {"provenance": {**provenance, "sha256": hashes}, **report}, "schedules": schedules}
    for name, document in documents.items():
        (given.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
