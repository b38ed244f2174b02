"""Continued training against the frozen start and against training from scratch, in one table.

    python benchmarks/continued.py --init runs/tiny-imagenet --data imagenette/train --test imagenette/val \
        --recipe massl-imagenette --minutes 3 --output continued

`--init` is a run of massl, or any weights that `massl pretrain --init` takes. Every run has the same recipe and number
of epochs; `scratch, 3x` has three times as many. Without `--recipe` it is what `auto` chooses. With `--minutes` a trial
finds the epochs of the first run, and all others take them. The k-NN accuracies are those of the run's own probes: the
images of `--test` classified by those of `--data`; without `--test`, a fifth of `--data` that is held out of training.
Rows are appended to results.jsonl in the folder `--output`, where a run that is there already is not repeated.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tune import rows_of

from massl.commands.pretrain import pretrain
from massl.commands.recipe import parse_set_options
from massl.commands.recipes import AUTO
from massl.config import MasslError, read_yaml
from massl.training.init_settings import LAYER_DECAY, LEARNING_RATE_FACTOR
from massl.weights.models import open_model

# The gentlest start, which transformers of others get. A run of the same method is taken whole, at full rates.
_BACKBONE = {
    "init.part": "backbone",
    "init.keep_statistics": True,
    "init.layer_decay": LAYER_DECAY,
    "init.learning_rate_factor": LEARNING_RATE_FACTOR,
}
# name -> settings
_CONTINUED: dict[str, dict[str, Any]] = {
    "continued": {},
    "continued, backbone only": _BACKBONE,
    "  without head first": _BACKBONE | {"init.head_epochs": 0.0},
    "  without filled memory": _BACKBONE | {"init.fill_memory": False},
    "  without kept statistics": _BACKBONE | {"init.keep_statistics": False},
    "  without layer decay": _BACKBONE | {"init.layer_decay": 1.0},
    "  without lower rate": _BACKBONE | {"init.learning_rate_factor": 1.0},
    "  without all of these": _BACKBONE
    | {
        "init.head_epochs": 0.0,
        "init.fill_memory": False,
        "init.keep_statistics": False,
        "init.layer_decay": 1.0,
        "init.learning_rate_factor": 1.0,
    },
}
_SCRATCH = {"scratch": 1, "scratch, 3x": 3}  # times the epochs
RUNS = tuple(name.strip() for name in [*_CONTINUED, *_SCRATCH])
_NUM_PROBES = 6
_ROWS = "results.jsonl"
_HOLD_OUT = 0.2
_DIP = 3.0  # points below the start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continue from weights, with and without each part of the protocol.")
    parser.add_argument("--init", required=True, help="a run of massl, a weights file, or a timm name with a tag")
    parser.add_argument("--data", required=True, help="labelled images to train on")
    parser.add_argument("--test", help="labelled images to classify; without them, images held out of training")
    parser.add_argument("--recipe", default=AUTO)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--output", required=True, type=Path)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float)
    length.add_argument("--epochs", type=int)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    parser.add_argument("--only", nargs="+", default=RUNS, choices=RUNS, metavar="RUN", help=f"of {'; '.join(RUNS)}")
    chosen = parser.parse_args(arguments)
    try:
        compare(chosen)
    except MasslError as error:
        raise SystemExit(f"continued.py: {error}") from None


def compare(chosen: argparse.Namespace) -> None:
    model = open_model(chosen.init)
    scored: dict[str, Any] = {"data.hold_out": _HOLD_OUT}
    if chosen.test:
        scored = {"probes.database": chosen.data, "probes.queries": chosen.test}
    common = scored | {"trainer.seed": chosen.seed, **parse_set_options(chosen.set)}
    # scratch has the same network and colours
    arguments = {key: value for key, value in model.backbone.timm_arguments.items() if key not in ("num_classes",)}
    same = {"backbone.name": str(arguments.pop("model_name")).partition(".")[0]}
    same |= {"backbone.image_size": arguments.pop("img_size", None), "backbone.stem": arguments.pop("stem", "")}
    same |= {"backbone.patch_size": arguments.pop("patch_size", None), "backbone.timm_options": arguments}
    same |= {"views.mean": list(model.mean), "views.std": list(model.std)}
    if chosen.recipe == AUTO:  # it has no values of another network that these must replace
        same = {key: value for key, value in same.items() if value is not None}
    epochs, done = chosen.epochs, {row["name"]: row for row in rows_of(chosen.output / _ROWS)}
    rows = []
    plans: list[tuple[str, dict[str, Any] | None, int]] = [(name, own, 1) for name, own in _CONTINUED.items()]
    plans += [(name, None, times) for name, times in _SCRATCH.items()]
    for name, own, times in plans:
        if name.strip() not in chosen.only:
            continue
        overrides = common | (same if own is None else own)
        if epochs is not None:
            probing = {"trainer.epochs": epochs * times, "probes.every_epochs": epochs * times / _NUM_PROBES}
            overrides |= probing
        row = done.get(name) or _run(name, overrides, chosen, use_init=own is not None, by_minutes=epochs is None)
        epochs = epochs or row["epochs"]
        rows.append(row)
        print(table(rows), flush=True)
    (chosen.output / "table.txt").write_text(table(rows) + "\n")


def _run(
    name: str, overrides: Mapping[str, Any], chosen: argparse.Namespace, *, use_init: bool, by_minutes: bool
) -> dict[str, Any]:
    folder = chosen.output / "-".join("".join(sign if sign.isalnum() else " " for sign in name).split())
    began = time.perf_counter()
    result = pretrain(
        chosen.data,
        recipe=chosen.recipe,
        output=folder,
        init=chosen.init if use_init else None,
        overrides=overrides,
        minutes=chosen.minutes if by_minutes else None,
    )
    if not result.finished:
        raise SystemExit(f"continued.py: {folder.name} was interrupted; the same command goes on with it")
    seconds = time.perf_counter() - began
    probes = [(int(row["step"]), row["knn_top1"]) for row in result.metrics if "knn_top1" in row]
    losses = [row["loss"] for row in result.metrics]
    scores = [score for _, score in probes]
    row = {
        "name": name,
        "start": scores[0],
        "lowest": min(scores),
        "third": scores[min(len(scores) - 1, max(1, len(scores) // 3))],
        "end": scores[-1],
        "best": max(scores),
        "first_loss": losses[0],
        "steps": probes[-1][0],
        "epochs": int(read_yaml(folder / "recipe.yaml")["trainer"]["epochs"]),
        "minutes": seconds / 60,
        "probes": probes,
    }
    with (chosen.output / _ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a run: k-NN top-1 at the start, its lowest, after a third, at the end, the best; and dips."""
    head = f"{'run':28} {'start':>6} {'lowest':>6} {'third':>6} {'end':>6} {'best':>6} {'steps':>7} {'min':>6}"
    lines = [head, "-" * len(head)]
    for row in rows:
        dip = row["start"] - row["lowest"]
        remark = f"  dips {dip:.1f} points" if dip > _DIP else ""
        values = " ".join(f"{row[key]:6.1f}" for key in ("start", "lowest", "third", "end", "best"))
        lines.append(f"{row['name']:28} {values} {row['steps']:7,} {row['minutes']:6.1f}{remark}")
    starts = [row["start"] for row in rows if not row["name"].startswith("scratch")]
    if starts:
        lines.append(f"{'frozen start':28} {starts[0]:6.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
