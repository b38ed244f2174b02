"""Settings tried one after another, scored on images held out of training; the test images are read by a second call.

    python benchmarks/tune.py try --settings settings.yaml --data train.npz --epochs 10 --output tuning
    python benchmarks/tune.py final --output tuning --name m98 --data train.npz --test test.npz --epochs 30 --seeds 0 1

`try` trains every setting on nine tenths of the training images (--hold_out 0.1), the same for all, and classifies the
other tenth by k-NN. It has no option for test images. With --minutes instead of --epochs a setting trains for as many
epochs as fit, found by a short trial. A row is appended to tuning/tried.jsonl after each run, and tuning/tried.md is
the table of everything tried. `final` trains one setting on all training images and classifies the test images, once a
seed: in the same folder it refuses a second setting of the same recipe. The settings are a YAML list:

    - {name: m98, recipe: massl-tiny, set: {views.num_local: 6, method.teacher.momentum: 0.98}, predicted: 19.5}
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from massl.commands.pretrain import pretrain
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.commands.recipes import shipped_recipes
from massl.commands.timing import epochs_lasting, images_per_epoch, shortened_warm_ups, steady_speed, training_images
from massl.config import MasslError
from massl.data.sources import held_out, open_source
from massl.files import write_atomically

_TRIED, _TABLE, _FINAL = "tried.jsonl", "tried.md", "final.jsonl"
_KEYS = {"name", "recipe", "set", "predicted"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Try settings on held-out training images, then test one of them.")
    commands = parser.add_subparsers(dest="command", required=True)
    trying = commands.add_parser("try", help="train settings and score them on images held out of training")
    trying.add_argument("--settings", required=True, type=Path, help="YAML list of name, recipe, set and predicted")
    trying.add_argument("--data", required=True, help="the training images, labelled")
    add_length(trying)
    trying.add_argument("--hold_out", default=0.1, type=float, help="share of the training images to score on")
    trying.add_argument("--probes", default=2, type=int, help="probes at equal distances; the last is the score")
    trying.add_argument("--seeds", default=[0], type=int, nargs="+", help="of each setting")
    trying.add_argument("--output", required=True, type=Path)
    trying.add_argument("--budget", default=math.inf, type=float, help="start no setting after this many seconds")
    final = commands.add_parser("final", help="score one setting on the test images")
    final.add_argument("--output", required=True, type=Path, help="the folder of try")
    final.add_argument("--name", required=True, help="the setting that won, or a recipe as it is")
    final.add_argument("--data", required=True, help="the training images, labelled; all of them are trained on")
    final.add_argument("--test", required=True, help="labelled images to classify, read by nothing else here")
    add_length(final)
    final.add_argument("--seeds", default=[0], type=int, nargs="+")
    chosen = parser.parse_args(arguments)
    try:
        try_settings(chosen) if chosen.command == "try" else test_winner(chosen)
    except MasslError as error:
        raise SystemExit(f"tune.py: {error}") from None


def add_length(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=int)
    length.add_argument("--minutes", type=float, help="of training, probes not counted")


def try_settings(chosen: argparse.Namespace) -> None:
    settings = read_settings(chosen.settings)
    chosen.output.mkdir(parents=True, exist_ok=True)
    rows = tried(chosen.output)
    done = {row["run"] for row in rows}
    started = time.monotonic()
    num_held = len(held_out(open_source(chosen.data), chosen.hold_out)[1])
    for seed, setting in itertools.product(chosen.seeds, settings):
        run = f"{setting['name']}-{length_name(chosen)}-s{seed}"
        if run in done:
            continue
        if time.monotonic() - started > chosen.budget:
            print(f"not tried, the budget is spent: {run}", flush=True)
            continue
        rows.append(one_try(setting, run, chosen, num_held, seed=seed))
        with (chosen.output / _TRIED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        write_atomically(chosen.output / _TABLE, table(rows))
        print(json.dumps(rows[-1]), flush=True)


def one_try(
    setting: Mapping[str, Any], run: str, chosen: argparse.Namespace, num_held: int, *, seed: int
) -> dict[str, Any]:
    """Train one setting; its row, also if it fails."""
    overrides = {
        "data.source": chosen.data,
        "data.hold_out": chosen.hold_out,
        "probes.database": "",
        "probes.queries": "",
        "probes.max_queries": 10**9,
        "probes.max_database": 10**9,
        "trainer.checkpoint_every_steps": 10**9,
    }
    row: dict[str, Any] = {"run": run, "setting": setting["name"], "recipe": setting["recipe"]}
    row |= {"set": setting.get("set", {}), "predicted": setting.get("predicted")}
    row |= {"seed": seed, "held_out": num_held}
    folder = chosen.output / "runs" / run
    try:
        if (folder / "recipe.yaml").exists():  # an interrupted run goes on
            recipe = load_recipe(folder / "recipe.yaml")
        else:
            overrides = with_length(setting, overrides, chosen, seed=seed)
            every_epochs = overrides["trainer.epochs"] / chosen.probes
            recipe = load_recipe(setting["recipe"], {**overrides, "probes.every_epochs": every_epochs})
        row |= {"epochs": recipe.trainer.epochs} | ({"minutes": chosen.minutes} if chosen.minutes else {})
        before = time.monotonic()
        result = pretrain(recipe=recipe, output=folder)
    except MasslError as error:
        return {**row, "failed": str(error)}
    if not result.finished:
        raise SystemExit(f"tune.py: {run} was interrupted; the same command goes on with it")
    probes = [metrics for metrics in result.metrics if "knn_top1" in metrics]
    top1 = probes[-1]["knn_top1"]
    row |= {"knn": {str(int(probe["epoch"])): round(probe["knn_top1"], 2) for probe in probes}}  # in percent
    row |= {"standard_error": round(math.sqrt(top1 * (100 - top1) / num_held), 2)}
    row |= {"effective_rank": round(probes[-1]["effective_rank"], 1)}
    row |= costs(result.metrics, time.monotonic() - before)
    if "teacher_temperature" in result.metrics[-1]:
        row |= {"teacher_temperature": round(result.metrics[-1]["teacher_temperature"], 4)}
    return row


def length_name(chosen: argparse.Namespace) -> str:
    return f"e{chosen.epochs}" if chosen.minutes is None else f"m{chosen.minutes:g}"


def with_length(
    setting: Mapping[str, Any], overrides: Mapping[str, Any], chosen: argparse.Namespace, *, seed: int
) -> dict[str, Any]:
    """The setting's overrides and `overrides`, with epochs, seed and, for --minutes, shorter warm-ups."""
    changes = setting.get("set", {})
    together = {**changes, **overrides, "trainer.seed": seed}
    if chosen.minutes is None:
        return {**together, "trainer.epochs": chosen.epochs}
    recipe = load_recipe(setting["recipe"], together)
    source = training_images(recipe)
    speed = steady_speed(recipe, source)
    epochs, _ = epochs_lasting(chosen.minutes, speed, num_images=images_per_epoch(recipe, len(source)))
    return {**together, "trainer.epochs": epochs, **shortened_warm_ups(recipe, epochs=epochs, given=changes)}


def test_winner(chosen: argparse.Namespace) -> None:
    """Train one setting on all training images; its k-NN accuracy on the test images goes to final.jsonl."""
    setting, num_tried = tried_setting(chosen.name, tried(chosen.output))
    record = chosen.output / _FINAL
    tested = rows_of(record)
    for row in tested:
        if row["recipe"] == setting["recipe"] and row["setting"] != chosen.name:
            raise MasslError(
                f"{record} holds the test of {row['setting']}: the test images are read for one setting of a recipe"
            )
    only_trained = {"data.source": chosen.data, "probes.every_epochs": 0}
    runs, name = chosen.output / "runs", f"{chosen.name}-final-{length_name(chosen)}"
    for seed in chosen.seeds:
        run = f"{name}-s{seed}"
        if run in {row["run"] for row in tested}:
            continue
        begun = sorted(runs.glob(f"{name}-s*/recipe.yaml"))  # all seeds train as long as the first; see --minutes
        base = begun[0] if begun else setting["recipe"]
        overrides = {} if begun else with_length(setting, only_trained, chosen, seed=seed)
        recipe = load_recipe(base, {**overrides, "trainer.seed": seed})
        row = {"setting": chosen.name, "recipe": setting["recipe"], "run": run, "num_tried": num_tried}
        row |= {"set": setting["set"], "seed": seed}
        row |= one_test(recipe, runs / run, data=chosen.data, test=chosen.test)
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def tried_setting(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], int]:
    """The setting with this name and how many of its recipe were tried; a recipe as it is needs no trial."""
    settings = {row["setting"]: row for row in rows}
    if name not in settings and name not in shipped_recipes():
        raise MasslError(f"{name} was not tried and is no recipe; tried were {', '.join(settings)}")
    setting = settings.get(name, {"setting": name, "recipe": name, "set": {}})
    return setting, sum(row["recipe"] == setting["recipe"] for row in settings.values())


def one_test(recipe: PretrainRecipe, folder: Path, *, data: str, test: str) -> dict[str, Any]:
    """Train, then classify the test images by k-NN; the score and what the run took."""
    from massl.commands.evaluate.command import evaluate

    before = time.monotonic()
    trained = pretrain(recipe=recipe, output=folder)
    seconds = time.monotonic() - before
    if not trained.finished:
        raise SystemExit(f"tune.py: {folder.name} was interrupted; the same command goes on with it")
    probes = recipe.probes
    scored = {"crop_ratio": probes.crop_ratio, "knn.ks": [probes.num_neighbours], "knn.temperature": probes.temperature}
    result = evaluate(folder, protocol="knn", train=data, test=test, output=folder / "test", overrides=scored)
    top1 = next(row.value for row in result.rows if row.metric == "top1")
    return {"epochs": recipe.trainer.epochs, "top1": top1} | costs(trained.metrics, seconds)


def costs(metrics: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """Median speed, peak memory of the GPU (None on a CPU), and the seconds of the whole run."""
    speeds = sorted(row["images_per_second"] for row in metrics if row["images_per_second"] > 0)
    peak = max((row["peak_memory_gib"] for row in metrics if "peak_memory_gib" in row), default=None)
    return {"images_per_second": speeds[len(speeds) // 2], "peak_gib": peak, "seconds": round(seconds, 1)}


def read_settings(path: Path) -> list[dict[str, Any]]:
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(settings, list) or not all(isinstance(entry, dict) for entry in settings):
        raise MasslError(f"{path} is not a list of settings")
    for entry in settings:
        if unknown := entry.keys() - _KEYS:
            raise MasslError(f"{path}: {entry.get('name')}: unknown {', '.join(sorted(unknown))}")
        if named := [key for key in entry.get("set", {}) if key.startswith(("data.", "probes."))]:
            raise MasslError(f"{path}: {entry.get('name')}: {named[0]} is the same for all settings; leave it out")
        if missing := {"name", "recipe"} - entry.keys():
            raise MasslError(f"{path}: a setting without {' and '.join(sorted(missing))}")
    names = [entry["name"] for entry in settings]
    if len(set(names)) < len(names):
        raise MasslError(f"{path}: two settings have the same name")
    return settings


def tried(folder: Path) -> list[dict[str, Any]]:
    return rows_of(folder / _TRIED)


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Everything tried, best first within each length."""
    lines = [
        f"{len(rows)} runs, scored on images held out of training. SE: standard error of the last column of k-NN.",
        "",
        "| setting | epochs | seed | predicted | k-NN in % | SE | rank | images/s | changes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (_length(row), -max(row.get("knn", {"": 0.0}).values()))):
        changes = ", ".join(f"{key}={value}" for key, value in row["set"].items())
        length = row.get("epochs", "") if "minutes" not in row else f"{row['epochs']} in {row['minutes']:g} min"
        start = f"| {row['setting']} | {length} | {row['seed']} | {row['predicted'] or ''} "
        if "failed" in row:
            lines.append(f"{start}| failed: {row['failed']} | | | | {row['recipe']}: {changes} |")
            continue
        scores = " ".join(f"{top1:.1f}" for top1 in row["knn"].values())
        rest = f"{row['standard_error']:.1f} | {row['effective_rank']} | {row['images_per_second']:,.0f}"
        lines.append(f"{start}| {scores} | {rest} | {row['recipe']}: {changes} |")
    return "\n".join([*lines, *_means(rows)]) + "\n"


def _means(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each setting that has several seeds of one length."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "failed" not in row:
            groups.setdefault((row["setting"], *_length(row)), []).append(row)
    several = {key: group for key, group in groups.items() if len(group) > 1}
    lines = [
        "",
        "| setting | seeds | mean k-NN in %, standard error of the mean | images/s | GiB |",
        "|---|---|---|---|---|",
    ]
    for (name, *_), group in several.items():
        scores = [[*row["knn"].values()][-1] for row in group]
        error = statistics.stdev(scores) / math.sqrt(len(scores))
        speed = statistics.median(row["images_per_second"] for row in group)
        gib = max((row["peak_gib"] for row in group if row.get("peak_gib")), default=None)
        told = "" if gib is None else f"{gib:.1f}"
        lines.append(
            f"| {name} | {len(group)} | {statistics.fmean(scores):.1f} ± {error:.1f} | {speed:,.0f} | {told} |"
        )
    return lines if several else []


def _length(row: Mapping[str, Any]) -> tuple[bool, float]:
    return "minutes" in row, row.get("minutes", row.get("epochs", 0))


if __name__ == "__main__":
    main()
