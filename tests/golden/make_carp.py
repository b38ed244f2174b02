"""Record golden values of CARP by running its authors' own modules: ``python make_carp.py OFFICIAL_CHECKOUT [--out
FOLDER]``.

Provenance: https://github.com/sthalles/carp at commit c9b068b4bbf4978520617baf9f3277f7098f1596 (its last, October
2023), in fp32 on one CPU thread. That code is imported from a checkout outside this repository, and none of it is
contained here. ``carp.json`` records the versions and the SHA-256 of the files run.

``loss`` calls their ``RandomPartition`` and ``CARPLoss``; the logits before them are ours, a plain product. ``step`` is
one step of their ``train_one_epoch`` with their ``MultiCropWrapper`` and ``CARPHead`` on a small timm ViT (theirs are
convolutional networks). All crops have one size there, so that no position embedding needs resampling. Patched while
their code runs: ``Tensor.cuda`` returns its tensor, ``torch.cuda.amp.autocast`` is a null context, the gradient scaler
is a stand-in that does not scale, ``torch.multinomial`` is wrapped to record, ``DistributedDataParallel`` is an
``nn.Sequential`` of one ``module``. No import is stubbed.
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
from collections import OrderedDict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import timm
import torch
from safetensors.torch import save
from torch import Tensor, nn

COMMIT = "c9b068b4bbf4978520617baf9f3277f7098f1596"
MODULES = ("main_carp", "utils", "modules/carp_head", "modules/carp_loss", "modules/random_partition")
# views V, images N, dimension D, prototypes K, block size, length of the embeddings (always 2 teacher views)
LOSS_CASES = {
    "small": (2, 4, 8, 32, 8, 3.0),
    "remainder": (5, 5, 8, 50, 16, 6.0),  # 3 blocks of 16, two prototypes left out
    "clamped": (4, 6, 8, 32, 16, 60.0),  # overlaps beyond the authors' limits on both sides
}
BACKBONE = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 0}
HEAD = {"hidden_dim": 32, "bottleneck_dim": 8}
PROTOTYPES, BLOCK, BATCH, VIEWS, MOMENTUM = 48, 16, 6, 5, 0.75


class Recorder:
    """Stand-in for the gradient scaler (no scaling), which also records the draws."""

    def __init__(self) -> None:
        self.permutations = list[Tensor]()

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def update(self) -> None: ...

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Apply every patch of the module docstring."""
        draw = torch.multinomial

        def multinomial(*given: Any, **named: Any) -> Tensor:
            self.permutations.append(draw(*given, **named))
            return self.permutations[-1]

        with (
            mock.patch.object(torch.Tensor, "cuda", lambda tensor, *given, **named: tensor),
            mock.patch.object(torch.cuda.amp, "autocast", return_value=contextlib.nullcontext()),
            mock.patch.object(torch, "multinomial", multinomial),
        ):
            yield


def golden_loss(main: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for seed, (name, (views, images, dim, prototypes, block, length)) in enumerate(LOSS_CASES.items()):
        torch.manual_seed(seed)
        recorder = Recorder()
        centres = torch.randn(images, dim)  # views of an image are alike, so that the loss is not that of pure noise
        student = length * nn.functional.normalize(centres + 0.7 * torch.randn(views, images, dim), dim=-1)
        teacher = length * nn.functional.normalize(centres + 0.7 * torch.randn(2, images, dim), dim=-1)
        student_prototypes = nn.functional.normalize(torch.randn(prototypes, dim), dim=-1)
        teacher_prototypes = nn.functional.normalize(student_prototypes + 0.1 * torch.randn(prototypes, dim), dim=-1)
        student.requires_grad_()
        student_prototypes.requires_grad_()
        with recorder.recording():
            partition = main.RandomPartition(SimpleNamespace(ncrops=views, out_dim=prototypes))
            logits = student.flatten(0, 1) @ student_prototypes.T, teacher.flatten(0, 1) @ teacher_prototypes.T
            consistency, entropy = main.CARPLoss()(*partition(*logits, block))
            gradients = torch.autograd.grad(consistency + entropy, (student, student_prototypes))
        values = {
            "student": student,
            "teacher": teacher,
            "block_size": torch.tensor(block),
            "permutation": recorder.permutations[0],
        }
        values |= {"student_prototypes": student_prototypes, "teacher_prototypes": teacher_prototypes}
        values |= {
            "consistency": consistency,
            "entropy": entropy,
            "student_gradient": gradients[0],
            "prototype_gradient": gradients[1],
        }
        tensors |= {f"{name}/{key}": value for key, value in values.items()}
    return tensors


def golden_step(main: Any) -> dict[str, Tensor]:
    torch.manual_seed(2023)
    networks = []
    for _ in range(2):
        backbone = timm.create_model("vit_tiny_patch16_224", **BACKBONE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the weight norm they use, which torch has renamed
            head = main.CARPHead(BACKBONE["embed_dim"], PROTOTYPES, use_bn=True, **HEAD)
        networks.append(main.utils.MultiCropWrapper(backbone, head).train())
    student, teacher = networks
    # wider weights than theirs, too small for 16 channels; no bias at zero, no norm at one: any mix-up shows
    with torch.no_grad():
        for network in networks:
            for name, parameter in network.named_parameters():
                if not name.endswith("weight_g"):
                    parameter.copy_(
                        8 * parameter if parameter.ndim > 1 else parameter + 0.05 * torch.randn_like(parameter)
                    )
    named = {"student": student, "teacher": teacher}
    tensors = {
        f"{who}/{key}": value.detach().clone()
        for who, network in named.items()
        for key, value in network.named_parameters()
    }
    colours = 3 * torch.randn(BATCH, 3, 1, 1)  # one per image, which makes its views alike
    views = colours + torch.randn(VIEWS, BATCH, 3, 8, 8)
    recorder, terms = Recorder(), list[tuple[Tensor, Tensor]]()
    criterion = main.CARPLoss()

    def recorded_criterion(*given: Any) -> tuple[Tensor, Tensor]:
        terms.append(criterion(*given))
        return terms[-1]

    options = SimpleNamespace(
        ncrops=VIEWS, out_dim=PROTOTYPES, partition_size=BLOCK, gradient_accumulation_steps=1, print_freq=1
    )
    held, optimizer = nn.Sequential(OrderedDict(module=student)), mock.Mock(param_groups=[{}, {}])
    gradients: dict[str, Tensor] = {}
    optimizer.zero_grad.side_effect = lambda: gradients.update(
        {f"gradient/{key}": value.grad.clone() for key, value in student.named_parameters() if value.grad is not None}
    )
    with recorder.recording():
        batches = [([*views.clone()], None)]
        partition = main.RandomPartition(options)
        main.train_one_epoch(
            held,
            teacher,
            teacher,
            recorded_criterion,
            batches,
            optimizer,
            [0.1],
            [0.0],
            [MOMENTUM],
            0,
            recorder,
            partition,
            None,
            options,
        )
    tensors |= gradients | {f"teacher_after/{key}": value.clone() for key, value in teacher.named_parameters()}
    return tensors | {
        "views": views,
        "permutation": recorder.permutations[0],
        "consistency": terms[0][0],
        "entropy": terms[0][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Record golden values of CARP from its authors' code.")
    parser.add_argument("checkout", type=Path, help=f"checkout of sthalles/carp at {COMMIT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(given.checkout.resolve()))
    official = importlib.import_module("main_carp")
    tensors = {f"loss/{key}": value for key, value in golden_loss(official).items()}
    tensors |= {f"step/{key}": value for key, value in golden_step(official).items()}
    plain = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    (given.out / "carp.safetensors").write_bytes(save(plain))
    provenance = {
        "repository": "https://github.com/sthalles/carp",
        "commit": COMMIT,
        "python": platform.python_version(),
    }
    provenance |= {name: version(name) for name in ("torch", "timm", "numpy")}
    hashes = {
        f"{name}.py": hashlib.sha256((given.checkout / f"{name}.py").read_bytes()).hexdigest() for name in MODULES
    }
    settings = {
        "backbone": BACKBONE,
        "head": HEAD,
        "num_prototypes": PROTOTYPES,
        "block_size": BLOCK,
        "momentum": MOMENTUM,
    }
    document = {"provenance": {**provenance, "sha256": hashes}, "step": settings}
    (given.out / "carp.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
