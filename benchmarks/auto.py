"""What `massl pretrain photos/` chooses, against a recipe scaled by hand and MoCo-v3; and what `massl plan` foretold.

    python benchmarks/auto.py --data imagenette/train --test imagenette/val --minutes 3 --output auto

Use images that had no part in the rules of `auto`. Three runs train on `--data`, each for `--minutes`: `auto`; the
paper's recipe with the memory and batch that docs/pretrain.md advises; and the MoCo-v3 recipe of the nearest image
size. Each run is scored once, at its end, by k-NN on `--test`; no probe reads these images. Its row also has the memory
and the seconds that `massl plan` foretold, and those of the run. Rows are appended to results.jsonl in the folder
`--output`, where a run that is there already is not repeated; table.md shows all of them.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tune import one_test, rows_of

from massl.commands.plan import RunPlan, plan
from massl.commands.recipe import parse_set_options
from massl.config import MasslError
from massl.data.sources import open_source
from massl.files import write_atomically
from massl.planning.facts import ImageFacts, look_at_images

_ROWS, _TABLE = "results.jsonl", "table.md"
_MOCO = {32: "mocov3-cifar", 64: "mocov3-tiny", 112: "mocov3-imagenette"}  # by the side of their views
_BATCH, _BLOCKS = 256, 4  # docs/pretrain.md, step 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="auto against a recipe scaled by hand and MoCo-v3, for equal minutes.")
    parser.add_argument("--data", required=True, help="labelled images to train on")
    parser.add_argument("--test", required=True, help="labelled images to classify, once for each run")
    parser.add_argument("--name", help="of the images in the table; default: --data")
    parser.add_argument("--minutes", required=True, type=float, help="of training, probes not counted")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    parser.add_argument("--only", nargs="*", default=[], help="words: only runs whose names contain one of them")
    chosen = parser.parse_args(arguments)
    try:
        compare(chosen)
    except MasslError as error:
        raise SystemExit(f"auto.py: {error}") from None


def compare(chosen: argparse.Namespace) -> None:
    chosen.output.mkdir(parents=True, exist_ok=True)
    name, rows = chosen.name or chosen.data, rows_of(chosen.output / _ROWS)
    settings = {**parse_set_options(chosen.set), "trainer.seed": chosen.seed}
    for run, (recipe, own) in contenders(look_at_images(open_source(chosen.data))).items():
        key = {"images": name, "run": run, "seed": chosen.seed, "minutes": chosen.minutes}
        is_done = any(key.items() <= row.items() for row in rows)
        if is_done or (chosen.only and not any(word in run for word in chosen.only)):
            continue
        planned = plan(chosen.data, recipe=recipe, minutes=chosen.minutes, overrides=own | settings)
        folder = chosen.output / "runs" / "-".join([*Path(name).parts[-2:], *run.split(), f"s{chosen.seed}"])
        row = key | foretold(planned) | one_test(planned.recipe, folder, data=chosen.data, test=chosen.test)
        with (chosen.output / _ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        write_atomically(chosen.output / _TABLE, table(rows))
        print(json.dumps(row), flush=True)
    print(table(rows))


def contenders(images: ImageFacts) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Name of a run -> its recipe (None: auto) and the values that a reader of docs/pretrain.md would change."""
    num_rows = 2 ** round(math.log2(max(images.num_images // 4, _BLOCKS)))
    memory = {"method.memory.num_rows": num_rows, "method.memory.block_size": num_rows // _BLOCKS}
    nearest = min(_MOCO, key=lambda side: abs(side - images.side))
    by_hand = {"trainer.batch_size": _BATCH, **memory}
    return {"auto": (None, {}), "by hand": ("massl-vits16", by_hand), "mocov3": (_MOCO[nearest], {})}


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
