"""Low-shot classification: the scorers of other protocols on 1 %, 10 % or a few images per class of the training set.

Where a few images of each class are all there is to learn from, none can be spared: holding one out of one per class
would leave the class without any. A rate is then chosen honestly on other images of the training set, which no draw
holds. That uses more labels than the name of the setting says, but none of the test set; the published choice uses
those of the test set itself.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from massl import keyed_random
from massl.config import Settings
from massl.data.evaluation.subset_lists import read_name_list
from massl.data.evaluation.subsets import balanced_choice, fraction_choice
from massl.data.sources.base import ImageSource
from massl.data.sources.subset import SubsetSource
from massl.evaluations.base import EvaluationData, LabelledFeatures, ProtocolEntry, require_labels, require_same_classes
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import EvaluationError, Measurement, Setting
from massl.evaluations.protocols.knn import KnnSettings, knn_scores, settings_of_ks, top_accuracy
from massl.evaluations.protocols.linear import (
    MAX_HELD_OUT,
    LinearProbe,
    LinearSettings,
    forget,
    held_out_images,
    held_out_of,
    labels_of,
    prepare_probe,
    train_heads,
)
from massl.evaluations.protocols.linear import PROTOCOL as LINEAR
from massl.evaluations.protocols.linear_training import PUBLISHED, HeldOut, TrainedHeads
from massl.evaluations.protocols.logreg import PROTOCOL as LOGREG
from massl.evaluations.protocols.logreg import LogisticSettings, fit_logistic, logistic_scores

Scorer = Literal["knn", "logreg", "linear"]


class LowShotSettings(Settings):
    fractions: tuple[float, ...] = Field(
        (0.01, 0.1), description="shares of every class, drawn once by key; not used where lists are given"
    )
    lists: tuple[str, ...] = Field(
        (), description="files that name the images of a share, such as SimCLR's 1percent.txt and 10percent.txt"
    )
    scorers: tuple[Scorer, ...] = Field(("knn", "logreg", "linear"), description="classifiers learned from each share")
    per_class: tuple[int, ...] = Field((1, 2, 4), description="numbers of images per class, each drawn several times")
    draws: int = Field(
        5,
        gt=0,
        description="independent draws of a few images per class, over which mean and sample deviation are taken",
    )
    per_class_scorers: tuple[Scorer, ...] = Field(
        ("linear",), description="classifiers learned from a few images per class"
    )
    seed: int = Field(0, ge=0, description="of the draws")
    knn: KnnSettings = KnnSettings()
    logreg: LogisticSettings = LogisticSettings()
    linear: LinearSettings = LinearSettings()


class Score(NamedTuple):
    """A test accuracy as the results name it."""

    setting: Setting
    top1: float  # percent


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What all subsets are scored with."""

    extractor: Extractor
    settings: LowShotSettings
    num_classes: int
    num_test: int
    test: LabelledFeatures | None  # class tokens, where a scorer asks for them
    probe: LinearProbe | None  # where a scorer asks for it


def _by_name(shares: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, indices in shares:
        if name in named:
            raise EvaluationError(f"two lists or fractions are both called {name!r}; rename a list's file")
        named[name] = indices
    return named


def measure_low_shot(extractor: Extractor, data: EvaluationData, settings: LowShotSettings) -> Iterator[Measurement]:
    """Top-1 accuracy from each share, and its mean and deviation over draws of a few images per class."""
    assert data.train is not None
    labels = labels_of(data.train)
    # before hours of work on some
    shares, draws = _by_name(_shares(data.train, labels, settings)), _few_per_class(labels, settings)
    bench = _prepare(extractor, data, settings)
    finished: list[TrainedHeads] = []

    def measurement(score: Score) -> Measurement:
        setting, value = score
        return Measurement(data=data.name, setting=setting, metric="top1", value=value, num_samples=bench.num_test)

    for name, indices in shares.items():
        subset = SubsetSource(data.train, indices, name=f"{name} of {data.train.name}")
        yield from map(measurement, _share_scores(bench, subset, name, finished))
    held_out = _held_out_of_rest(bench, data.train, [indices for few in draws.values() for indices in few])
    for num_per_class, few in draws.items():
        name = f"{num_per_class} per class"
        sources = [
            SubsetSource(data.train, indices, name=f"{name} of {data.train.name}, draw {i}")
            for i, indices in enumerate(few, 1)
        ]
        draws_of_scores = [list(_few_shot_scores(bench, source, name, held_out, finished)) for source in sources]
        yield from map(measurement, _over_draws(draws_of_scores))
    forget(finished)


def _prepare(extractor: Extractor, data: EvaluationData, settings: LowShotSettings) -> _Bench:
    assert data.train is not None
    assert data.test is not None
    num_classes = require_same_classes(data.train, data.test)
    wanted = {*settings.scorers, *settings.per_class_scorers}
    test = None
    if wanted & {"knn", "logreg"}:
        test = extractor.features(data.test, view=extractor.centre_view(), feature="cls")
        require_labels(test)
    probe = prepare_probe(extractor, data, settings.linear) if "linear" in wanted else None
    return _Bench(
        extractor=extractor, settings=settings, num_classes=num_classes, num_test=len(data.test), test=test, probe=probe
    )


# ---- subsets ---------------------------------------------------------------------------------------------------------


def _shares(train: ImageSource, labels: Tensor, settings: LowShotSettings) -> Iterator[tuple[str, Tensor]]:
    """Each share's name and its images."""
    for file in map(Path, settings.lists):
        yield share_name(file), read_name_list(file.expanduser(), train)
    for fraction in () if settings.lists else settings.fractions:
        yield f"{100 * fraction:g}% (drawn)", fraction_choice(labels, fraction=fraction, key=(settings.seed, "share"))


def share_name(file: Path) -> str:
    """ "1%" for 1percent.txt; other files by their own name."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)percent", file.stem)
    return file.stem if share is None else f"{share[1]}%"


def _few_per_class(labels: Tensor, settings: LowShotSettings) -> dict[int, list[Tensor]]:
    """The images of every draw, by their number per class; the images of a draw of 2 per class are among those of the
    same draw of 4.
    """
    return {
        num_per_class: [
            balanced_choice(labels, num_per_class=num_per_class, key=(settings.seed, "few per class", draw))
            for draw in range(settings.draws)
        ]
        for num_per_class in (settings.per_class if settings.per_class_scorers else ())
    }


def _held_out_of_rest(bench: _Bench, train: ImageSource, drawn: Sequence[Tensor]) -> HeldOut | None:
    """The validation images where there are some, else some of the training images that are in no draw."""
    if bench.probe is None or "linear" not in bench.settings.per_class_scorers or not drawn:
        return None
    if bench.probe.validation is not None:
        return bench.probe.validation
    in_no_draw = torch.ones(len(train), dtype=torch.bool)
    in_no_draw[torch.cat(list(drawn))] = False
    rest = in_no_draw.nonzero().flatten()
    num_wanted = min(round(bench.probe.settings.held_out * len(train)), MAX_HELD_OUT)
    chosen = (
        rest[keyed_random.permutation(len(rest), bench.settings.seed, "images in no draw")[:num_wanted]].sort().values
    )
    if len(chosen) == 0:
        return None
    source = SubsetSource(train, chosen, name=f"other images of {train.name}")
    return held_out_images(bench.extractor, source, feature=bench.probe.feature, excluded=None)


# ---- scores ----------------------------------------------------------------------------------------------------------


def _share_scores(bench: _Bench, subset: ImageSource, name: str, finished: list[TrainedHeads]) -> Iterator[Score]:
    """Scores of a share, part of which is held out to choose a rate."""
    scorers = bench.settings.scorers
    yield from _scores_of_class_tokens(bench, subset, name, scorers)
    if "linear" in scorers:
        assert bench.probe is not None
        trained = train_heads(bench.probe, subset, held_out=held_out_of(bench.probe, subset))
        finished.append(trained)
        for selection, top1 in trained.top1().items():
            yield Score(bench.probe.setting(selection, prefix=f"{name} linear "), top1)


def _few_shot_scores(
    bench: _Bench, subset: ImageSource, name: str, held_out: HeldOut | None, finished: list[TrainedHeads]
) -> Iterator[Score]:
    """Scores of a few images per class, all of which are learned from; the published choice of a head goes without
    saying.
    """
    scorers = bench.settings.per_class_scorers
    yield from _scores_of_class_tokens(bench, subset, name, scorers)
    if "linear" in scorers:
        assert bench.probe is not None
        trained = train_heads(bench.probe, subset, held_out=held_out)
        finished.append(trained)
        for selection, top1 in trained.top1().items():
            if bench.probe.validation is None:
                selection = selection.replace("held-out images", "other training images")
            how = "" if selection == PUBLISHED else f" {selection}"
            yield Score(bench.probe.setting(f"{name} linear{how}"), top1)


def _scores_of_class_tokens(
    bench: _Bench, subset: ImageSource, name: str, scorers: Sequence[Scorer]
) -> Iterator[Score]:
    if bench.test is None or not {"knn", "logreg"} & set(scorers):
        return
    device = bench.extractor.device
    train = bench.extractor.features(subset, view=bench.extractor.centre_view(), feature="cls")
    rows, labels, test_rows, test_labels = (
        tensor.to(device) for tensor in (train.rows, train.labels, bench.test.rows, bench.test.labels)
    )
    if "knn" in scorers:
        knn = bench.settings.knn
        by_k = settings_of_ks(knn.ks, num_train=len(rows), name=f"{name} knn")
        class_scores = knn_scores(
            rows, labels, test_rows, num_classes=bench.num_classes, ks=tuple(by_k), temperature=knn.temperature
        )
        top1 = {k: top_accuracy(k_scores, test_labels, num_best=1) for k, k_scores in class_scores.items()}
        yield from (Score(by_k[k], value) for k, value in top1.items())
        yield Score(Setting(name=f"{name} knn best k"), max(top1.values()))
    if "logreg" in scorers:
        yield _logistic_score(bench, name, rows, labels, test_rows, test_labels)


def _logistic_score(
    bench: _Bench, name: str, rows: Tensor, labels: Tensor, test_rows: Tensor, test_labels: Tensor
) -> Score:
    settings = bench.settings.logreg
    if settings.normalise:
        rows, test_rows = normalize(rows, dim=1), normalize(test_rows, dim=1)
    fit = fit_logistic(
        rows,
        labels,
        num_classes=bench.num_classes,
        penalty=settings.penalty_for(len(rows)),
        max_iterations=settings.max_iterations,
        tolerance=settings.tolerance,
    )
    top1 = top_accuracy(logistic_scores(test_rows, fit.weights), test_labels, num_best=1)
    note = "" if fit.converged else "not converged"
    return Score(Setting(name=f"{name} logreg {settings.label}", note=note), top1)


def _over_draws(draws: list[list[Score]]) -> Iterator[Score]:
    """Mean and, of at least two draws, sample deviation of each score; "not converged" if one draw is not."""
    for scores in zip(*draws, strict=True):
        assert len({score.setting.name for score in scores}) == 1
        values = [score.top1 for score in scores]
        setting = replace(scores[0].setting, note=max(score.setting.note for score in scores))
        yield Score(replace(setting, statistic="mean"), statistics.fmean(values))
        if len(values) > 1:
            yield Score(replace(setting, statistic="deviation"), statistics.stdev(values))


PROTOCOL = ProtocolEntry(
    measure=measure_low_shot,
    settings_type=LowShotSettings,
    needs=("train", "test"),
    summary="classifiers from 1 %, 10 % or a few images per class",
    unremarked=LINEAR.unremarked
    | LOGREG.unremarked
    | {"ks", "fractions", "lists", "scorers", "per_class", "per_class_scorers"},
)
