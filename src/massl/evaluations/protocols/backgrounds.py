"""ImageNet-9: does a classifier see the object or its background? (Xiao et al., 2021, "Noise or Signal")

A linear head for ImageNet classifies images of nine groups of classes, with backgrounds removed or exchanged. It
chooses among all 1000 classes; one that belongs to no group is wrong.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from massl.config import Settings
from massl.data.evaluation.views import StoredView
from massl.data.sources.base import DataError
from massl.data.sources.folder import FolderSource
from massl.evaluations.base import EvaluationData, ProtocolEntry
from massl.evaluations.datasets import BACKGROUNDS
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import EvaluationError, Measurement, Setting
from massl.evaluations.protocols.linear import HEAD_FILE, SavedHead, load_head
from massl.ops.scoring.linear_heads import classify

_NUM_IMAGENET_CLASSES = 1000
# Group, in the order of the release's folders -> its classes, as indices of ImageNet's sorted class names.
CLASSES_OF_GROUPS: dict[str, str] = {
    "dog": "151-170 173-268",
    "bird": "7-24 87-100 127-146",
    "wheeled vehicle": "407-408 428 436 444 468 511 547 555 561 565 569 573 586 603 609 612 627 656 661 665 670-671 "
    "675 690 705 717 734 751 757 791 802-803 817 820 829 847 864 866-867 870 880",
    "reptile": "33-68",
    "carnivore": "269-280 286-299 356-362 387-388",
    "insect": "300-326",
    "musical instrument": "401-402 420 432 486 494 513 541 546 558 566 577 579 593-594 641-642 683-684 687 699 776 822 "
    "875 881 889",
    "primate": "365-384",
    "fish": "0-6 389-397",
}


class BackgroundsSettings(Settings):
    head: str = Field(
        "",
        description=f"head of a linear probe on ImageNet with this model; default: OUTPUT/ImageNet/{HEAD_FILE}, left "
        "by linear on ImageNet",
    )


def group_of_classes() -> Tensor:  # -> [1000] int64
    """The group of every class of ImageNet, -1 for none."""
    groups = torch.full((_NUM_IMAGENET_CLASSES,), -1)
    for number, ranges in enumerate(CLASSES_OF_GROUPS.values()):
        for first_and_last in ranges.split():
            first, _, last = first_and_last.partition("-")
            groups[int(first) : int(last or first) + 1] = number
    return groups


def measure_backgrounds(
    extractor: Extractor, data: EvaluationData, settings: BackgroundsSettings
) -> Iterator[Measurement]:
    """Top-1 accuracy among the nine groups for each existing variant, and the cost of another background (BG-GAP)."""
    assert data.folder is not None
    head = load_head(Path(settings.head).expanduser() if settings.head else data.output / HEAD_FILE)
    _require_fitting(head, extractor)
    device = extractor.device
    found: dict[str, Measurement] = {}
    for variant, source in _variants(data.folder).items():
        features = extractor.features(source, view=StoredView(), feature=head.feature)
        classes = classify(head.weights.to(device), head.bias.to(device), features.rows.to(device)).cpu()
        top1 = 100.0 * float((group_of_classes()[classes] == features.labels).double().mean())
        found[variant] = Measurement(
            data=data.name,
            setting=Setting(name=variant, remarks=head.remarks),
            metric="top1",
            value=top1,
            num_samples=len(features),
        )
        yield found[variant]
    if {"mixed_same", "mixed_rand"} <= found.keys():
        gap = found["mixed_same"].value - found["mixed_rand"].value
        yield replace(found["mixed_rand"], setting=Setting(name="BG-GAP", remarks=head.remarks), value=gap)


def _variants(folder: Path) -> dict[str, FolderSource]:
    """The variants that exist. Images are read as stored: published scores ignore the EXIF orientation."""
    present = [variant for variant in BACKGROUNDS if (folder / variant / "val").is_dir()]
    if not present:
        expected = f"expected {', '.join(BACKGROUNDS)}, each with class folders in `val`, as in the release archive"
        raise DataError(f"{folder} holds no variant of ImageNet-9; {expected}")
    sources = {}
    for variant in present:
        name = f"{variant} of {folder}"
        source = FolderSource(folder / variant / "val", name=name, labels="folders", orientation="stored")
        num_folders = len(source.class_names or ())
        if num_folders != len(CLASSES_OF_GROUPS):
            problem = f"{name} has {num_folders} class folders with images instead of {len(CLASSES_OF_GROUPS)}"
            raise DataError(f"{problem}; unpack the release archive again")
        sources[variant] = source
    return sources


def _require_fitting(head: SavedHead, extractor: Extractor) -> None:
    """Raise unless the head was trained on ImageNet with this model and feature."""
    model, chosen, problem = extractor.model, extractor.chosen_feature(head.feature), ""
    if len(head.class_names) != _NUM_IMAGENET_CLASSES:
        problem = f"has {len(head.class_names)} classes; run the linear protocol on ImageNet's {_NUM_IMAGENET_CLASSES}"
    elif head.backbone != model.fingerprint:
        problem = f"was trained with another model than {model.name}; run the linear protocol with this one"
    elif head.view_size != model.image_size:
        problem = (
            f"was trained on images of {head.view_size} px, not {model.image_size}; give --image_size {head.view_size} "
            "or train a head at this size"
        )
    elif chosen != head.feature:
        problem = f"was trained on the feature {head.feature}; leave --feature {chosen} out"
    if problem:
        raise EvaluationError(f"the linear head {problem}")


PROTOCOL = ProtocolEntry(
    measure=measure_backgrounds,
    settings_type=BackgroundsSettings,
    needs=("folder",),
    summary="ImageNet-9, robustness to backgrounds",
    unremarked=frozenset({"head"}),
    uses_centre_crop=False,
)
