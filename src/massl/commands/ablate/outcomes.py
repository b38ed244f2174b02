"""The result of one run of an ablation: read from its folder, or measured on its backbone by the protocol knn."""

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from massl.commands.ablate.grids import PlannedRun
from massl.commands.evaluate.command import evaluate
from massl.commands.recipe import PretrainRecipe
from massl.config import RecipeError
from massl.data.sources import DataError, ImageSource, label_doubt, open_source
from massl.methods.massl import memory_collapse_signs
from massl.reports.ablation.records import COMPARED_NEIGHBOURS, RunOutcome
from massl.reports.run_reader import read_run
from massl.training.probes import general_collapse_signs

_LEAST_ABOVE_CHANCE = 0.05  # of the way from guessing to perfection: below it, features hardly separate classes


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """How runs are judged: by their own last probe, or by the protocol knn on `train` and `test`."""

    train: str | None
    test: str | None
    num_classes: int
    measured: str  # in words


def choose_yardstick(recipe: PretrainRecipe, *, train: str | None, test: str | None) -> Yardstick:
    """Raises if the images have no labels: runs could not be judged after training."""
    if train is not None and test is not None:
        _labelled(train)
        source, num_classes = _labelled(test)
        measured = f"protocol knn, k={COMPARED_NEIGHBOURS}, the {len(source):,} images of {test} among {train}"
        return Yardstick(train=train, test=test, num_classes=num_classes, measured=measured)
    probes = recipe.probes
    if probes.every_epochs == 0:
        raise RecipeError(
            "probes.every_epochs is 0, so nothing would be measured; raise it, or give labelled images by --train and "
            "--test"
        )
    database, num_classes = _labelled(probes.database or recipe.data.source)
    if not probes.database and not probes.queries and (doubt := label_doubt(database)):
        raise DataError(
            f"{recipe.data.source}: {doubt} may be no classes, so probes measure no k-NN on them; name the images as "
            "folder:PATH?labels=folders if they are, or give labelled images by --train and --test"
        )
    # without queries of their own, half of the database is held out
    num_queries = len(open_source(probes.queries)) if probes.queries else len(database) // 2
    measured = f"last probe, k={probes.num_neighbours}, {min(probes.max_queries, num_queries):,} images"
    return Yardstick(train=None, test=None, num_classes=num_classes, measured=measured)


def _labelled(uri: str) -> tuple[ImageSource, int]:
    """The images, and their number of classes."""
    source = open_source(uri)
    if source.class_names is None:
        raise DataError(
            f"{uri} has no labels, which k-NN needs; give labelled images by --train and --test (e.g. class folders)"
        )
    return source, len(source.class_names)


def planned_outcome(run: PlannedRun) -> RunOutcome:
    """A run without results yet."""
    return RunOutcome(
        value=run.value,
        strategy=run.strategy,
        num_rows=run.memory.num_rows,
        block_size=run.memory.block_size,
        seed=run.seed,
        folder=str(run.folder),
    )


def finished_outcome(run: PlannedRun, yardstick: Yardstick, *, results: Path) -> RunOutcome:
    """The numbers of a run; those of the protocol knn are written to the folder `results`."""
    outcome = replace(planned_outcome(run), state="finished")
    trained = read_run(run.folder)
    if trained.probes:  # images without labels have no k-NN
        outcome = replace(
            outcome,
            knn_start=trained.first.knn_top1,
            knn_last=trained.last.knn_top1,
            images_per_second=trained.images_per_second,
        )
    if yardstick.train is not None and yardstick.test is not None:
        outcome = replace(outcome, evaluated=_evaluated(run, yardstick.train, yardstick.test, results))
    probed = [row for row in trained.rows if "effective_rank" in row]
    if not probed:
        return outcome
    last = probed[-1]
    outcome = replace(outcome, effective_rank=last["effective_rank"])
    if last["epoch"] <= max(1.0, run.recipe.trainer.epochs / 10):  # so early, healthy runs look collapsed too
        return outcome
    signs = (
        *general_collapse_signs(dict(last)),
        *memory_collapse_signs(last, block_size=run.memory.block_size),
        *_near_chance(outcome.accuracy, yardstick.num_classes),
    )
    return replace(outcome, collapse_signs=signs)


def _evaluated(run: PlannedRun, train: str, test: str, results: Path) -> dict[int, float]:
    """Number of neighbours -> accuracy by the protocol knn, with the crop of the run's probes."""
    overrides = {
        "crop_ratio": run.recipe.probes.crop_ratio,
        "device": run.recipe.trainer.device,
        "num_workers": run.recipe.data.num_workers,
        "worker_kind": run.recipe.data.worker_kind,
        "cache": "none",
    }
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the ablation's own table
        rows = evaluate(run.folder, output=results, protocol="knn", train=train, test=test, overrides=overrides).rows
    return {row.setting.k: row.value for row in rows if row.metric == "top1" and row.setting.k is not None}


def _near_chance(accuracy: float | None, num_classes: int) -> list[str]:
    chance = 100.0 / num_classes
    if accuracy is None or accuracy - chance >= _LEAST_ABOVE_CHANCE * (100.0 - chance):
        return []
    return [f"k-NN accuracy {accuracy:.1f} % is near that of guessing ({chance:.1f} %)"]
