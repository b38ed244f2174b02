"""Linear probe as in iBOT (Zhou et al., 2022): one linear classifier per learning rate, 45 of them, on frozen features.

The published number is the best over all rates and epochs on the test images: too good by what that choice gains. Other
numbers choose the rate, or rate and epoch, on images that are not test images.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from massl import distributed
from massl.config import changed
from massl.data.evaluation.subsets import split_off
from massl.data.evaluation.views import EvaluationView, RandomCropView
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
from massl.evaluations.protocols.linear_training import (
    PUBLISHED,
    FreshCrops,
    HeldOut,
    Sweep,
    SweepSettings,
    TrainedHeads,
    TrainingRows,
    kept_crops,
)
from massl.files import write_atomically
from massl.weights.tensor_files import read_tensors, write_tensors

HEAD_FILE = "linear_head.safetensors"
_CURVE_FILE = "linear_curve.json"
MAX_HELD_OUT = 50_000
_WIDEST_FOR_LAST4 = 384  # wider transformers are read as class token and mean patch token


class LinearSettings(SweepSettings):
    crops: Literal["fresh", "cached", "centre"] = Field(
        "fresh",
        description="training views. fresh: new random crops every epoch, as published; cached: a few random crops per "
        "image, extracted once, so that minutes replace hours; centre: the evaluation view, extracted once",
    )
    num_cached_crops: int = Field(4, gt=0, description="crops per image if cached; ImageNet needs 7.9 GB for each")
    held_out: float = Field(
        0.05, ge=0, lt=1, description="share of training images, at most 50,000, for choosing a rate honestly; 0: none"
    )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Deviations from the published settings that results must name."""
        crops = {"fresh": "", "cached": f"{self.num_cached_crops} cached crops", "centre": "centre crops"}[self.crops]
        is_usual = self.epochs == type(self).model_fields["epochs"].default
        return tuple(filter(None, (crops, "" if is_usual else f"{self.epochs} epochs")))


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """Features and settings shared by all trainings of one evaluation."""

    extractor: Extractor
    settings: LinearSettings
    feature: str
    num_classes: int
    test: LabelledFeatures
    test_key: str
    validation: HeldOut | None
    output: Path

    @property
    def allow_tf32(self) -> bool:
        """Heads use TF32 if the features are bfloat16."""
        return self.extractor.settings.precision == "bf16"

    @property
    def feature_remarks(self) -> tuple[str, ...]:
        return () if self.feature == _usual_feature(self.extractor) else (f"feature {self.feature}",)

    def setting(self, selection: str, *, prefix: str = "", remarks: tuple[str, ...] = ()) -> Setting:
        """How results name the accuracy of a head chosen by `selection`."""
        name, _, note = selection.partition(" (")
        remarks = (*remarks, *self.feature_remarks, *self.settings.remarks)
        return Setting(name=prefix + name, note=note.removesuffix(")"), remarks=remarks)


def _usual_feature(extractor: Extractor) -> str:
    """The feature that iBOT probes: of four blocks for a ViT-S, of the last one for wider transformers."""
    return "cls_last4" if extractor.model.backbone.dim <= _WIDEST_FOR_LAST4 else "cls_mean"


def prepare_probe(extractor: Extractor, data: EvaluationData, settings: LinearSettings) -> LinearProbe:
    """Check the data and extract the features of test and validation images."""
    assert data.train is not None
    assert data.test is not None
    num_classes = require_same_classes(data.train, data.test)
    feature = extractor.chosen_feature(_usual_feature(extractor))
    validation = None
    if data.validation is not None:
        require_same_classes(data.train, data.validation)
        validation = held_out_images(extractor, data.validation, feature=feature, excluded=None)
    return LinearProbe(
        extractor=extractor,
        settings=settings,
        feature=feature,
        num_classes=num_classes,
        test=extractor.features(data.test, view=extractor.centre_view(), feature=feature),
        test_key=extractor.cache_key(data.test, extractor.centre_view(), feature),
        validation=validation,
        output=data.output,
    )


def held_out_images(extractor: Extractor, source: ImageSource, *, feature: str, excluded: Tensor | None) -> HeldOut:
    """Features of images for choosing a rate."""
    view = extractor.centre_view()
    features = extractor.features(source, view=view, feature=feature)
    return HeldOut(features=features, excluded=excluded, key=extractor.cache_key(source, view, feature))


def held_out_of(probe: LinearProbe, train: ImageSource) -> HeldOut | None:
    """The validation images, or else some of the training images; None if `held_out` is 0."""
    fraction = min(probe.settings.held_out, MAX_HELD_OUT / len(train))
    if probe.validation is not None or round(fraction * len(train)) == 0:
        return probe.validation
    _, chosen = split_off(len(train), fraction=fraction, key=(probe.settings.seed, "held out"))
    excluded = torch.zeros(len(train), dtype=torch.bool)
    excluded[chosen] = True
    source = SubsetSource(train, chosen, name=f"held-out images of {train.name}")
    return held_out_images(probe.extractor, source, feature=probe.feature, excluded=excluded)


def train_heads(probe: LinearProbe, train: ImageSource, *, held_out: HeldOut | None) -> TrainedHeads:
    """Train one head per rate on the images of `train`; a stopped training continues.

    The outcome stays in its file until `forget`, so that a protocol of many trainings does not repeat finished ones.
    """
    extractor = probe.extractor
    sweep = Sweep(
        _training_rows(probe, train),
        test=probe.test,
        held_out=held_out,
        num_classes=probe.num_classes,
        settings=probe.settings,
        device=extractor.device,
        allow_tf32=probe.allow_tf32,
        file=probe.output / f"linear_{_training_key(probe, train, held_out)}.safetensors",
        say=extractor.say,
    )
    return sweep.run(lambda done, total: extractor.progress(f"linear heads on {train.name}", done, total))


def forget(trained: Iterable[TrainedHeads]) -> None:
    """Delete the files of trainings."""
    if distributed.is_main():
        for heads in trained:
            heads.file.unlink(missing_ok=True)


def _training_rows(probe: LinearProbe, train: ImageSource) -> TrainingRows:
    extractor, settings, feature = probe.extractor, probe.settings, probe.feature
    if settings.crops == "fresh":
        labels = required_labels(train)
        return FreshCrops(extractor=extractor, source=train, labels=labels, feature=feature, seed=settings.seed)
    views: list[EvaluationView] = [extractor.centre_view()]
    if settings.crops == "cached":
        size, num_crops = extractor.model.image_size, min(settings.num_cached_crops, settings.epochs)
        views = [RandomCropView(size=size, seed=settings.seed, epoch=number) for number in range(num_crops)]
    crops = [extractor.features(train, view=view, feature=feature) for view in views]
    return kept_crops(crops, device=extractor.device)


def _training_key(probe: LinearProbe, train: ImageSource, held_out: HeldOut | None) -> str:
    """Digest of all that decides a training."""
    parts = {
        "train": probe.extractor.cache_key(train, probe.extractor.centre_view(), probe.feature),
        "test": probe.test_key,
        "held_out": None if held_out is None else [held_out.key, held_out.excluded is not None],
        "settings": probe.settings.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


# ---- the protocol ----------------------------------------------------------------------------------------------------


def measure_linear(extractor: Extractor, data: EvaluationData, settings: LinearSettings) -> Iterator[Measurement]:
    """Top-1 accuracy by each way of choosing a head; saves the published head and all curves in the output folder."""
    assert data.train is not None
    probe = prepare_probe(extractor, data, settings)
    trained = train_heads(probe, data.train, held_out=held_out_of(probe, data.train))
    if distributed.is_main():
        save_head(data.output / HEAD_FILE, trained, probe, class_names=data.train.class_names or ())
        _write_curves(data.output / _CURVE_FILE, trained)
    for selection, value in trained.top1().items():
        setting = probe.setting(selection)
        yield Measurement(data=data.name, setting=setting, metric="top1", value=value, num_samples=len(probe.test))
    forget([trained])


def _write_curves(path: Path, trained: TrainedHeads) -> None:
    """Accuracies in percent (one inner list per epoch, one number per base rate) and the chosen heads, as JSON."""
    curves = {
        "base_rates": trained.base_rates,
        "test_top1": trained.test_top1.tolist(),
        "held_out_top1": None if trained.held_out_top1 is None else trained.held_out_top1.tolist(),
        "chosen": {
            selection: {"base_rate": trained.base_rates[head.rate_index], "epoch": head.epoch + 1}
            for selection, head in trained.chosen.items()
        },
    }
    write_atomically(path, json.dumps(curves, indent=1))


@dataclass(frozen=True, kw_only=True)
class SavedHead:
    """A classifier, and the features it was trained on."""

    weights: Tensor  # [C, D]
    bias: Tensor  # [C]
    feature: str
    class_names: tuple[str, ...]
    backbone: str  # fingerprint of the model whose features it was trained on
    view_size: int  # pixels of the images it was trained on
    remarks: tuple[str, ...]  # deviations from the published training: "epochs 10"


def save_head(path: Path, trained: TrainedHeads, probe: LinearProbe, *, class_names: tuple[str, ...]) -> None:
    """The head of the published number as safetensors, with its origin as metadata."""
    head, model = trained.chosen[PUBLISHED], probe.extractor.model
    remarks = (*changed(probe.settings, besides=("seed", "held_out")), *probe.feature_remarks)
    metadata = {
        "format": "pt",
        "feature": probe.feature,
        "view_size": str(model.image_size),
        "class_names": json.dumps(class_names),
        "base_rate": repr(trained.base_rates[head.rate_index]),
        "epoch": str(head.epoch + 1),
        "top1": repr(trained.top1()[PUBLISHED]),
        "backbone": model.fingerprint,
        "remark": "".join(f", {remark}" for remark in remarks),
    }
    write_tensors(path, {"weight": head.weights, "bias": head.bias}, metadata)


def load_head(path: Path) -> SavedHead:
    """A head saved by a linear probe."""
    if not path.is_file():
        raise EvaluationError(
            f"there is no linear head at {path}; the linear protocol writes {HEAD_FILE}: run it first"
        )
    try:
        tensors, metadata = read_tensors(path)
        return SavedHead(
            weights=tensors["weight"],
            bias=tensors["bias"],
            feature=metadata["feature"],
            class_names=tuple(json.loads(metadata["class_names"])),
            backbone=metadata["backbone"],
            view_size=int(metadata["view_size"]),
            remarks=tuple(metadata["remark"].split(", ")[1:]),  # ", epochs 10" or ""
        )
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        problem = f"{path} is no linear head of massl ({error})"
        raise EvaluationError(f"{problem}; the linear protocol writes {HEAD_FILE}") from None


PROTOCOL = ProtocolEntry(
    measure=measure_linear,
    settings_type=LinearSettings,
    needs=("train", "test"),
    summary="linear probe by SGD, 45 learning rates at once",
    unremarked=frozenset({"crops", "num_cached_crops", "epochs"}),
)
