"""Low-shot classification: the scorers of other protocols on 1 %, 10 % or a few images per class of the training set.

With a few images per class none can be held out. There the honest choice of a rate uses training images outside all
draws: more labels than the setting's name says, but none of the test set, on which the published choice is made.
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from massl import keyed_random
from massl.config import Settings
from massl.data.evaluation.subset_lists import read_name_list
from massl.data.evaluation.subsets import balanced_choice, fraction_choice
from massl.data.sources.base import ImageSource
from massl.data.sources.subset import SubsetSource
from massl.evaluations.base import (
    EvaluationData,
    LabelledFeatures,
    ProtocolEntry,
    require_same_classes,
    required_labels,
)
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
    prepare_probe,
    train_heads,
)
from massl.evaluations.protocols.linear import PROTOCOL as LINEAR
from massl.evaluations.protocols.linear_training import PUBLISHED, HeldOut, TrainedHeads
from massl.evaluations.protocols.logreg import PROTOCOL as LOGREG
from massl.evaluations.protocols.logreg import LogisticSettings, score_logistic

Scorer = Literal["knn", "logreg", "linear"]


class LowShotSettings(Settings):
    fractions: tuple[float, ...] = Field((0.01, 0.1), description="drawn shares of each class; not used with lists")
    lists: tuple[str, ...] = Field((), description="files that name the images of a share: SimCLR's 1percent.txt ...")
    scorers: tuple[Scorer, ...] = Field(("knn", "logreg", "linear"), description="classifiers learned from each share")
    per_class: tuple[int, ...] = Field((1, 2, 4), description="numbers of images per class, each drawn several times")
    draws: int = Field(5, gt=0, description="draws of a few images per class, for mean and sample deviation")
    per_class_scorers: tuple[Scorer, ...] = Field(("linear",), description="classifiers for a few images per class")
    seed: int = Field(0, ge=0, le=keyed_random.MAX_SEED, description="of the draws")
    knn: KnnSettings = KnnSettings()
    logreg: LogisticSettings = LogisticSettings()
    linear: LinearSettings = LinearSettings()


class Score(NamedTuple):
    """A test accuracy as the results name it."""

    setting: Setting
    top1: float  # percent


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What the scorers of all subsets share."""

    extractor: Extractor
    settings: LowShotSettings
    num_classes: int
    num_test: int
    test: LabelledFeatures | None  # class tokens, for knn and logreg
    probe: LinearProbe | None  # for linear


def measure_low_shot(extractor: Extractor, data: EvaluationData, settings: LowShotSettings) -> Iterator[Measurement]:
    """Top-1 accuracy from each share, and its mean and deviation over draws of a few images per class."""
    assert data.train is not None
    labels = required_labels(data.train)
    shares, draws = _shares(data.train, labels, settings), _few_per_class(labels, settings)
    bench = _prepare(extractor, data, settings)
    finished: list[TrainedHeads] = []

    def measurement(score: Score) -> Measurement:
        setting, value = score
        return Measurement(data=data.name, setting=setting, metric="top1", value=value, num_samples=bench.num_test)

    for name, indices in shares.items():
        subset = SubsetSource(data.train, indices, name=f"{name} of {data.train.name}")
        yield from map(measurement, _scores_of_class_tokens(bench, subset, name, settings.scorers))
        if bench.probe is not None and "linear" in settings.scorers:
            finished.append(train_heads(bench.probe, subset, held_out=held_out_of(bench.probe, subset)))
            yield from map(measurement, _linear_scores(bench, finished[-1], name, is_few=False))
    held_out = _held_out_of_rest(bench, data.train, [indices for few in draws.values() for indices in few])
    for num_per_class, few in draws.items():
        name = f"{num_per_class} per class"
        scores = []
        for number, indices in enumerate(few, start=1):
            subset = SubsetSource(data.train, indices, name=f"{name} of {data.train.name}, draw {number}")
            scores.append(list(_scores_of_class_tokens(bench, subset, name, settings.per_class_scorers)))
            if bench.probe is not None and "linear" in settings.per_class_scorers:
                finished.append(train_heads(bench.probe, subset, held_out=held_out))
                scores[-1] += _linear_scores(bench, finished[-1], name, is_few=True)
        yield from map(measurement, _over_draws(scores))
    forget(finished)


def _prepare(extractor: Extractor, data: EvaluationData, settings: LowShotSettings) -> _Bench:
    assert data.train is not None
    assert data.test is not None
    num_classes = require_same_classes(data.train, data.test)
    wanted = {*settings.scorers, *settings.per_class_scorers}
    test = None
    if wanted & {"knn", "logreg"}:
        test = extractor.features(data.test, view=extractor.centre_view(), feature="cls")
    probe = prepare_probe(extractor, data, settings.linear) if "linear" in wanted else None
    return _Bench(
        extractor=extractor, settings=settings, num_classes=num_classes, num_test=len(data.test), test=test, probe=probe
    )


# ---- subsets ---------------------------------------------------------------------------------------------------------


def _shares(train: ImageSource, labels: Tensor, settings: LowShotSettings) -> dict[str, Tensor]:
    """Each share's name and its images."""
    shares = [(share_name(file), read_name_list(file.expanduser(), train)) for file in map(Path, settings.lists)]
    for fraction in () if settings.lists else settings.fractions:
        drawn = fraction_choice(labels, fraction=fraction, key=(settings.seed, "share"))
        shares.append((f"{100 * fraction:g}% (drawn)", drawn))
    named = dict(shares)
    if len(named) < len(shares):
        raise EvaluationError(f"lists and fractions must differ in name: {', '.join(name for name, _ in shares)}")
    return named


def share_name(file: Path) -> str:
    """1% for 1percent.txt; other files by their own name."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)percent", file.stem)
    return file.stem if share is None else f"{share[1]}%"


def _few_per_class(labels: Tensor, settings: LowShotSettings) -> dict[int, list[Tensor]]:
    """Number per class -> the images of each draw. A draw of 2 per class is part of the same draw of 4."""
    return {
        num_per_class: [
            balanced_choice(labels, num_per_class=num_per_class, key=(settings.seed, "few per class", draw))
            for draw in range(settings.draws)
        ]
        for num_per_class in (settings.per_class if settings.per_class_scorers else ())
    }


def _held_out_of_rest(bench: _Bench, train: ImageSource, drawn: Sequence[Tensor]) -> HeldOut | None:
    """The validation images, or else some of the training images outside all draws."""
    if bench.probe is None or "linear" not in bench.settings.per_class_scorers or not drawn:
        return None
    if bench.probe.validation is not None:
        return bench.probe.validation
    in_no_draw = torch.ones(len(train), dtype=torch.bool)
    in_no_draw[torch.cat(list(drawn))] = False
    rest = in_no_draw.nonzero().flatten()
    num_wanted = min(round(bench.probe.settings.held_out * len(train)), MAX_HELD_OUT)
    order = keyed_random.permutation(len(rest), bench.settings.seed, "images in no draw")
    chosen = rest[order[:num_wanted]].sort().values
    if len(chosen) == 0:
        return None
    source = SubsetSource(train, chosen, name=f"other images of {train.name}")
    return held_out_images(bench.extractor, source, feature=bench.probe.feature, excluded=None)


# ---- scores ----------------------------------------------------------------------------------------------------------


def _linear_scores(bench: _Bench, trained: TrainedHeads, name: str, *, is_few: bool) -> Iterator[Score]:
    assert bench.probe is not None
    for selection, top1 in trained.top1().items():
        if is_few and bench.probe.validation is None:
            selection = selection.replace("held-out images", "other training images")
        # with a few images per class the published choice of a head is not named
        how = "" if is_few and selection == PUBLISHED else f" {selection}"
        yield Score(bench.probe.setting(how, prefix=f"{name} linear"), top1)


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
        logits, setting = score_logistic(
            rows,
            labels,
            test_rows,
            num_classes=bench.num_classes,
            settings=bench.settings.logreg,
            prefix=f"{name} logreg ",
        )
        yield Score(setting, top_accuracy(logits, test_labels, num_best=1))


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
