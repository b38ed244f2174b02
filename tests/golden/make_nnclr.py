"""Record reference values of NNCLR from independent code: ``python make_nnclr.py LIGHTLY_CHECKOUT SOLO_LEARN_CHECKOUT
[--out FOLDER]``.

The authors published no code. So these values come from two re-implementations, neither of which follows the paper in
every part alone:

- heads and nearest-neighbour memory from https://github.com/lightly-ai/lightly at commit
  e8d317fc5a87f4387a85a35e689869039ec249ee (its loss is not used: NTXentLoss adds further negatives, which the paper
  does not have);
- the loss from https://github.com/vturrisi/solo-learn at commit 9187ea39c2c3f43c455ab06664d2b019a9802954 (its heads
  have biases before batch norm). Only the file ``solo/losses/nnclr.py`` is run, with a stand-in for the module of
  collectives that it imports.

Each loss is also computed by ``paper_loss`` below, our transcription of the paper's formula in NumPy and float64; the
script stops where they differ. The loop (symmetric halves, which view enters the memory) is ours, after the paper's
algorithm; weights take plain gradient steps, because AdamW would blow up the rounding noise of gradients that are
exactly zero. Run in fp32 on one CPU thread. None of the two projects' code is contained here; ``nnclr.json`` records
the versions and the SHA-256 of the files run.

Weights start as torch and timm draw them, but with noise on all that would be zero or one: mix-ups would not show
otherwise. Only the bias of the projector's last batch norm stays zero: the predictor's takes it away again, it is never
trained, and ours has none.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import platform
import sys
import types
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save
from torch import Tensor, nn

LIGHTLY_COMMIT, SOLO_COMMIT = "e8d317fc5a87f4387a85a35e689869039ec249ee", "9187ea39c2c3f43c455ab06664d2b019a9802954"
LIGHTLY_FILES = (
    "lightly/models/modules/heads.py",
    "lightly/models/modules/memory_bank.py",
    "lightly/models/modules/nn_memory_bank.py",
)
SOLO_FILE = "solo/losses/nnclr.py"
BACKBONE = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2}
DIM, PROJECTOR_DIM, PREDICTOR_DIM, ROWS, TEMPERATURE, BATCH, NUM_STEPS = 8, 20, 24, 24, 0.1, 8, 4
LEARNING_RATE = 0.003
UNTRAINED = "projector.layers.7.bias"


def paper_loss(friends: Tensor, predictions: Tensor) -> float:
    """The paper's formula: minus the log of the softmax, over the predictions of the batch, of the similarity to the
    friend.
    """
    unit = [
        rows / np.linalg.norm(rows, axis=1, keepdims=True)
        for rows in (friends.double().numpy(), predictions.detach().double().numpy())
    ]
    exponentials = np.exp(unit[0] @ unit[1].T / TEMPERATURE)
    return float(-np.log(np.diag(exponentials) / exponentials.sum(axis=1)).mean())


def solo_loss(checkout: Path) -> Any:
    stand_in = types.ModuleType("solo.utils.misc")
    stand_in.gather, stand_in.get_rank = (lambda rows: rows), (lambda: 0)  # type: ignore[attr-defined]
    sys.modules["solo.utils.misc"] = stand_in
    specification = importlib.util.spec_from_file_location("solo_nnclr", checkout / SOLO_FILE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.nnclr_loss_func


def build(heads: Any) -> nn.ModuleDict:
    torch.manual_seed(2021)
    model = nn.ModuleDict(
        {
            "backbone": timm.create_model("vit_tiny_patch16_224", num_classes=0, **BACKBONE),
            "projector": heads.NNCLRProjectionHead(BACKBONE["embed_dim"], PROJECTOR_DIM, DIM),
            "predictor": heads.NNCLRPredictionHead(DIM, PREDICTOR_DIM, DIM),
        }
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == UNTRAINED:
                continue
            if parameter.ndim == 1 or name.endswith(("cls_token", "pos_embed")):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "blocks" in name:  # 0.02 as timm draws them is little for 12 channels
                parameter.mul_(8)
    return model.train()


def record_steps(heads: Any, banks: Any, loss_of: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = build(heads)
    bank = banks.NNMemoryBankModule(size=(ROWS, DIM))
    tensors = {f"initial/{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors["memory/initial"] = bank.bank.clone()
    colours = 2 * torch.randn(NUM_STEPS, 1, BATCH, 3, 1, 1)  # one for each image, which makes its views alike
    tensors["views"] = colours + torch.randn(NUM_STEPS, 2, BATCH, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = list[float]()
    for step, (first, second) in enumerate(tensors["views"]):
        z1, z2 = (model["projector"](model["backbone"](view)) for view in (first, second))
        p1, p2 = model["predictor"](z1), model["predictor"](z2)
        friends2 = bank(z2.detach(), update=False)
        friends1 = bank(z1.detach(), update=True)  # it looks first, then takes z1 in
        loss = loss_of(friends1, p2, temperature=TEMPERATURE) / 2 + loss_of(friends2, p1, temperature=TEMPERATURE) / 2
        np.testing.assert_allclose(loss.item(), (paper_loss(friends1, p2) + paper_loss(friends2, p1)) / 2, rtol=1e-5)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            tensors |= {
                f"gradient/{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        losses.append(loss.item())
    tensors |= {f"final/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors["memory/final"] = bank.bank
    assert tensors.pop(f"initial/{UNTRAINED}").abs().max() == 0
    assert tensors.pop(f"gradient/{UNTRAINED}").abs().max() < 1e-6
    assert tensors.pop(f"final/{UNTRAINED}").abs().max() < 1e-7
    settings = {
        "backbone": BACKBONE,
        "dim": DIM,
        "projector_dim": PROJECTOR_DIM,
        "predictor_dim": PREDICTOR_DIM,
        "batch_size": BATCH,
    }
    settings |= {"memory_rows": ROWS, "temperature": TEMPERATURE, "learning_rate": LEARNING_RATE}
    return tensors, {"settings": settings, "losses": losses, "final_pointer": int(bank.bank_ptr)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record reference values from two re-implementations.")
    parser.add_argument("lightly", type=Path, help=f"checkout of lightly-ai/lightly at {LIGHTLY_COMMIT}")
    parser.add_argument("solo_learn", type=Path, help=f"checkout of vturrisi/solo-learn at {SOLO_COMMIT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(given.lightly.resolve()))
    heads, banks = (importlib.import_module(f"lightly.models.modules.{name}") for name in ("heads", "nn_memory_bank"))
    tensors, report = record_steps(heads, banks, solo_loss(given.solo_learn))
    provenance: dict[str, Any] = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "timm", "numpy")},
    }
    provenance["lightly"] = {"repository": "https://github.com/lightly-ai/lightly", "commit": LIGHTLY_COMMIT}
    provenance["solo-learn"] = {"repository": "https://github.com/vturrisi/solo-learn", "commit": SOLO_COMMIT}
    files = [(given.lightly, name) for name in LIGHTLY_FILES] + [(given.solo_learn, SOLO_FILE)]
    provenance["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder, name in files}
    (given.out / "nnclr.safetensors").write_bytes(save({name: value.contiguous() for name, value in tensors.items()}))
    (given.out / "nnclr.json").write_text(json.dumps({"provenance": provenance, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
