"""Small runs, good and bad, whose probes calibrate the choice of a checkpoint without labels.

    python benchmarks/checkpoint_runs.py --data demo:train --name fashion --output docs/results/choosing-checkpoints
    python benchmarks/choose_checkpoint.py docs/results

The demo recipe with a smaller network, a few minutes a run on one core. Each setting below is trained on the same
images; the others are held out and probed. The rows of all probes go to OUTPUT/NAME.jsonl, with the setting as "name"
and, besides the probe's own measures, "linear_top1": a linear classifier fitted to the features of the training images
and tested on the held-out ones. A setting that is there already is not trained again.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from massl.commands.pretrain import pretrain
from massl.data.sources import open_source
from massl.training import probes

_SMALL = {
    "data.num_workers": 0,
    "backbone.timm_options": {"embed_dim": 64, "depth": 2, "num_heads": 2, "weight_init": "jax"},
    "trainer.batch_size": 64,
    "trainer.epochs": 12,
    "trainer.log_every_steps": 100_000,
    "trainer.checkpoint_every_steps": 100_000,
    "probes.every_epochs": 1,
    "probes.database": "",
    "probes.queries": "",
}
_KEPT = ("step", "loss", "effective_rank", "alpha_req", "other_view_top1", "knn_top1", "linear_top1")
_METHOD = {"massl": {"method.memory.num_rows": 1024, "method.memory.block_size": 256}}
_RATE, _NO_NORM = "optimizer.learning_rate", {"method.head.batch_norm": False}
_CONTINUED = {"trainer.epochs": 4, "optimizer.warmup_epochs": 0, "trainer.seed": 1}
# Of each setting its method, the values that differ, and the setting whose weights it starts from.
SETTINGS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "massl": ("massl", {}, ""),
    "late-divergence": ("massl", {_RATE: 0.1, "optimizer.warmup_epochs": 12}, ""),  # the rate rises to the end
    "mocov3": ("mocov3", {}, ""),
    "dino": ("dino", {}, ""),
    "no-batch-norm": ("massl", {**_NO_NORM, "method.teacher.momentum": 0.8}, ""),
    "continued": ("massl", {**_CONTINUED, _RATE: 5e-4}, "massl"),
    "continued-high-rate": ("massl", {**_CONTINUED, _RATE: 0.03}, "massl"),
    "nnclr": ("nnclr", {}, ""),
    "high-rate": ("massl", {_RATE: 0.03}, ""),
    "mae": ("mae", {}, ""),
    "multi-crop": ("massl", {"views.num_local": 4, "method.teacher.momentum": 0.98}, ""),
    "massl-seed1": ("massl", {"trainer.seed": 1}, ""),
    "carp": ("carp", {}, ""),
    "mocov3-late-divergence": ("mocov3", {_RATE: 0.1, "optimizer.warmup_epochs": 12}, ""),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train small runs whose probes calibrate the choice of a checkpoint.")
    parser.add_argument("--data", required=True, help="labelled images")
    parser.add_argument("--name", required=True, help="of the data set; names the file")
    parser.add_argument("--images", default=1800, type=int, help="how many images to train on; the others are probed")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--output", required=True, type=Path, help="folder of the .jsonl files")
    chosen = parser.parse_args(arguments)
    chosen.output.mkdir(parents=True, exist_ok=True)
    file = chosen.output / f"{chosen.name}.jsonl"
    done = {json.loads(line)["name"] for line in file.read_text().splitlines()} if file.exists() else set()
    hold_out = 1 - chosen.images / len(open_source(chosen.data))
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="massl-checkpoints-"))
    try:
        for name in chosen.settings:
            if name in done:
                continue
            rows = train(name, folder, {**_SMALL, "data.source": chosen.data, "data.hold_out": round(hold_out, 6)})
            with file.open("a") as out:
                out.writelines(json.dumps({"name": name, **row}) + "\n" for row in rows)
            print(chosen.name, name, [row["knn_top1"] for row in rows], flush=True)
    finally:
        shutil.rmtree(folder)


def train(name: str, folder: Path, values: Mapping[str, Any]) -> list[dict[str, float]]:
    """The rows of a run's probes."""
    method, changed, start = SETTINGS[name]
    if start and not (folder / start).exists():
        train(start, folder, values)
    linear: list[float] = []
    plain = probes.knn_accuracy

    def also_linear(queries: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor, **options: Any) -> float:
        linear.append(linear_accuracy(queries, labels, rows, row_labels))
        return plain(queries, labels, rows, row_labels, **options)

    probes.knn_accuracy = also_linear
    try:
        result = pretrain(
            output=folder / name,
            recipe="demo-vit",
            overrides={**values, "method.name": method, **_METHOD.get(method, {}), **changed},
            init=folder / start if start else None,
        )
    finally:
        probes.knn_accuracy = plain
    rows = [row for row in result.metrics if "knn_top1" in row]
    # the last features are raw pixels, which the command measures at the end
    return [
        {key: round(value, 4) for key, value in {**row, "linear_top1": top1}.items() if key in _KEPT}
        for row, top1 in zip(rows, linear, strict=False)
    ]


def linear_accuracy(queries: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor) -> float:
    """Accuracy in percent of a least-squares classifier of the standardised unit features, with a little ridge."""
    rows, queries = normalize(rows.double(), dim=1), normalize(queries.double(), dim=1)
    mean, scale = rows.mean(dim=0), rows.std(dim=0).clamp(min=1e-8)
    ones = torch.ones(len(rows), 1, dtype=torch.float64), torch.ones(len(queries), 1, dtype=torch.float64)
    rows, queries = (rows - mean) / scale, (queries - mean) / scale
    rows, queries = torch.cat([rows, ones[0]], dim=1), torch.cat([queries, ones[1]], dim=1)
    ridge = 0.01 * len(rows) * torch.eye(rows.shape[1], dtype=torch.float64)
    targets = one_hot(row_labels).double()
    found = (queries @ torch.linalg.solve(rows.T @ rows + ridge, rows.T @ targets)).argmax(dim=1)
    return 100 * float((found == labels).double().mean())


if __name__ == "__main__":
    main()
