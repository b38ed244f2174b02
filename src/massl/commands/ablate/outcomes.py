"""What came of a run of an ablation: read from its folder, and measured on its backbone where images are named for
that.
"""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from massl.commands.ablate.grids import PlannedRun
from massl.commands.evaluate.command import evaluate
from massl.commands.recipe import PretrainRecipe
from massl.config import RecipeError
from massl.data.sources import DataError, ImageSource, open_source
from massl.methods import METHODS
from massl.reports.ablation.records import COMPARED_NEIGHBOURS, RunOutcome
from massl.reports.run_reader import read_run
from massl.training.probes import general_collapse_signs

_LEAST_ABOVE_CHANCE = 0.05  # of the way from guessing to perfection: below that features hardly tell classes apart


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """How runs are judged: by their own last probe, or by the protocol knn on images named for it."""

    train: str | None
    test: str | None
    num_classes: int
    measured: str  # in words


def choose_yardstick(recipe: PretrainRecipe, *, train: str | None, test: str | None) -> Yardstick:
    """Refuses images without labels: nothing could be said about the runs after they were trained."""
    if train is not None and test is not None:
        _labelled(train)
        source = _labelled(test)
        measured = f"protocol knn, k={COMPARED_NEIGHBOURS}, the {len(source):,} images of {test} among {train}"
        return Yardstick(train=train, test=test, num_classes=_num_classes(source), measured=measured)
    probes = recipe.probes
    if probes.every_epochs == 0:
        raise RecipeError(
            "probes.every_epochs is 0, so nothing would be measured; raise it, or name labelled images by --train and --test"
        )
    database = _labelled(probes.database or recipe.data.source)
    # queries are held out of the database
    num_there = len(open_source(probes.queries)) if probes.queries else len(database) // 2
    measured = f"last probe, k={probes.num_neighbours}, {min(probes.max_queries, num_there):,} images"
    return Yardstick(train=None, test=None, num_classes=_num_classes(database), measured=measured)


def _labelled(uri: str) -> ImageSource:
    source = open_source(uri)
    if source.class_names is None:
        raise DataError(
            f"{uri} has no labels, which k-NN needs; name labelled images by --train and --test (class folders, for example)"
        )
    return source


def _num_classes(source: ImageSource) -> int:
    assert source.class_names is not None
    return len(source.class_names)


def planned_outcome(run: PlannedRun) -> RunOutcome:
    """Of a run that has not ended."""
    return RunOutcome(
        value=run.value,
        strategy=run.strategy,
        num_rows=run.memory.num_rows,
        block_size=run.memory.block_size,
        seed=run.seed,
        folder=str(run.folder),
    )


def finished_outcome(run: PlannedRun, yardstick: Yardstick, *, results: Path) -> RunOutcome:
    """The numbers of a run; those of the protocol knn are kept in the folder `results`."""
    outcome = replace(planned_outcome(run), state="finished")
    read = read_run(run.folder)
    if read.probes:  # images without labels have no k-NN
        outcome = replace(
            outcome,
            knn_start=read.first.knn_top1,
            knn_last=read.last.knn_top1,
            images_per_second=read.images_per_second,
        )
    if yardstick.train is not None and yardstick.test is not None:
        outcome = replace(outcome, evaluated=_evaluated(run, yardstick.train, yardstick.test, results))
    probed = [row for row in read.rows if "effective_rank" in row]
    if probed:
        outcome = replace(outcome, effective_rank=probed[-1]["effective_rank"])
    # so early healthy runs look collapsed too
    if not probed or probed[-1]["epoch"] <= max(1.0, run.recipe.trainer.epochs / 10):
        return outcome
    signs = (*_signs_of(run.recipe, probed[-1]), *_near_chance(outcome.accuracy, yardstick.num_classes))
    return replace(outcome, collapse_signs=signs)


def _evaluated(run: PlannedRun, train: str, test: str, results: Path) -> dict[int, float]:
    """Number of neighbours -> accuracy by the protocol knn, of images cut as the run's probes cut theirs."""
    overrides = {
        "crop_ratio": run.recipe.probes.crop_ratio,
        "device": run.recipe.trainer.device,
        "num_workers": run.recipe.data.num_workers,
        "worker_kind": run.recipe.data.worker_kind,
        "cache": "none",
    }
    with contextlib.redirect_stdout(sys.stderr):  # on stdout stands the ablation's own table alone
        rows = evaluate(run.folder, output=results, protocol="knn", train=train, test=test, overrides=overrides).rows
    return {row.setting.k: row.value for row in rows if row.metric == "top1" and row.setting.k is not None}


def _signs_of(recipe: PretrainRecipe, row: Mapping[str, float]) -> list[str]:
    """What the run itself warned of at its end; the method is built for its opinion alone."""
    method = METHODS[recipe.method.name](recipe.method, recipe.backbone, seed=recipe.trainer.seed)
    return [*general_collapse_signs(dict(row)), *method.collapse_signs(row)]


def _near_chance(accuracy: float | None, num_classes: int) -> list[str]:
    chance = 100.0 / num_classes
    if accuracy is None or accuracy - chance >= _LEAST_ABOVE_CHANCE * (100.0 - chance):
        return []
    return [f"k-NN accuracy {accuracy:.1f} % is near that of guessing ({chance:.1f} %)"]
