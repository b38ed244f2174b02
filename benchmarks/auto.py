"""What `massl pretrain photos/` chooses, against a recipe scaled by hand and MoCo-v3; and what `massl plan` foretold.

    python benchmarks/auto.py --data imagenette/train --test imagenette/val --minutes 3 --output auto

Use images that had no part in the rules of `auto`. Four runs train on `--data`, each for `--minutes`: `auto`; the
paper's recipe with the memory and batch that docs/pretrain.md advises; the MoCo-v3 recipe of the nearest image size;
and the tuned MoCo-v3 recipe with network, views, batch and optimizer of `auto`. All read the images as `auto` does.
Each run is scored once, at its end, by k-NN on `--test`; no probe reads these images, and only `auto` has probes. Its
row also has the memory and the seconds that `massl plan` foretold, and those of the run. Rows are appended to
results.jsonl in the folder `--output`, where a run that is there already is not repeated; table.md shows all of them.
"""

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tune import one_test, rows_of

from massl.commands.auto import plan_images
from massl.commands.plan import RunPlan, plan
from massl.commands.recipe import parse_set_options
from massl.config import MasslError
from massl.data.sources import ImageSource, open_source
from massl.files import write_atomically
from massl.planning.trial import release_gpu

_ROWS, _TABLE = "results.jsonl", "table.md"
_MOCO = {32: "mocov3-cifar", 64: "mocov3-tiny", 112: "mocov3-imagenette"}  # by the side of their views
_TUNED_MOCO = "mocov3-tiny"  # docs/results/tiny-imagenet-100.md
_BATCH, _BLOCKS = 256, 4  # docs/pretrain.md, step 3
RUNS = ("auto", "by hand", "mocov3", "mocov3 with auto's network")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="auto against a recipe scaled by hand and MoCo-v3, for equal minutes.")
    parser.add_argument("--data", required=True, help="labelled images to train on")
    parser.add_argument("--test", required=True, help="labelled images to classify, once for each run")
    parser.add_argument("--name", help="of the images in the table; default: --data")
    parser.add_argument("--minutes", required=True, type=float, help="of training, probes not counted")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    parser.add_argument("--only", nargs="+", default=RUNS, choices=RUNS, metavar="RUN", help=f"of {', '.join(RUNS)}")
    chosen = parser.parse_args(arguments)
    try:
        compare(chosen)
    except MasslError as error:
        raise SystemExit(f"auto.py: {error}") from None


def compare(chosen: argparse.Namespace) -> None:
    chosen.output.mkdir(parents=True, exist_ok=True)
    name, rows = chosen.name or chosen.data, rows_of(chosen.output / _ROWS)
    settings = {**parse_set_options(chosen.set), "trainer.seed": chosen.seed}
    for run, (recipe, own) in contenders(open_source(chosen.data)).items():
        key = {"images": name, "run": run, "seed": chosen.seed, "minutes": chosen.minutes}
        is_done = any(key.items() <= row.items() for row in rows)
        if is_done or run not in chosen.only:
            continue
        planned = plan(chosen.data, recipe=recipe, minutes=chosen.minutes, overrides=own | settings)
        words = re.findall(r"\w+", " ".join([*Path(name).parts[-2:], run.replace("'", "")]))
        folder = chosen.output / "runs" / "-".join([*words, f"s{chosen.seed}"])
        held = held_gib()
        row = key | foretold(planned) | one_test(planned.recipe, folder, data=chosen.data, test=chosen.test)
        row["peak_gib"] = row["peak_gib"] and round(row["peak_gib"] - held, 3)
        with (chosen.output / _ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        write_atomically(chosen.output / _TABLE, table(rows))
        print(json.dumps(row), flush=True)
    print(table(rows))


def contenders(images: ImageSource) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Name of a run -> its recipe (None: auto) and the values that a reader of docs/pretrain.md would change."""
    facts, plan = plan_images(images, {})
    num_rows = 2 ** round(math.log2(max(facts.num_images // 4, _BLOCKS)))
    memory = {"method.memory.num_rows": num_rows, "method.memory.block_size": num_rows // _BLOCKS}
    nearest = min(_MOCO, key=lambda side: abs(side - facts.side))
    common = {"probes.every_epochs": 0.0} | _of(plan.values, "data.")
    same = {"backbone.image_size": None, "backbone.patch_size": None}  # the recipe's are those of a ViT
    same |= _of(plan.values, "backbone.", "views.", "optimizer.", "trainer.batch_size")
    del same["optimizer.warmup_epochs"]  # follows from the minutes
    recipes: list[tuple[str | None, dict[str, Any]]] = [(None, {})]
    recipes += [("massl-vits16", common | {"trainer.batch_size": _BATCH, **memory})]
    recipes += [(_MOCO[nearest], common), (_TUNED_MOCO, common | same)]
    return dict(zip(RUNS, recipes, strict=True))


def _of(values: Mapping[str, Any], *starts: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key.startswith(starts)}


def held_gib() -> float:
    """What earlier runs of this process still hold on the GPU."""
    if not torch.cuda.is_available():
        return 0.0
    release_gpu(torch.device("cuda"))
    return torch.cuda.memory_allocated() / 2**30


def foretold(planned: RunPlan) -> dict[str, Any]:
    recipe = planned.recipe
    return {
        "network": f"{recipe.backbone.name} at {recipe.views.global_size} px",
        "plan_gib": None if planned.memory_gib is None else round(planned.memory_gib, 3),
        "plan_seconds": round(planned.seconds, 1),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a run, grouped by images; what was foretold, as a deviation from what was measured."""
    head = ("images", "run", "seed", "epochs", "network", "k-NN in %", "images/s", "GiB", "GiB foretold", "seconds")
    head = (*head, "seconds foretold")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in sorted(rows, key=lambda row: row["images"]):
        gib = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        values = [row["images"], row["run"], row["seed"], f"{row['epochs']} in {row['minutes']:g} min", row["network"]]
        values += [f"{row['top1']:.1f}", f"{row['images_per_second']:,.0f}", gib]
        values += [_error(row["plan_gib"], row["peak_gib"])]
        values += [f"{row['seconds']:.0f}", _error(row["plan_seconds"], row["seconds"])]
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines) + "\n"


def _error(foretold: float | None, measured: float | None) -> str:
    return f"{foretold / measured - 1:+.0%}" if foretold and measured else ""


if __name__ == "__main__":
    main()
