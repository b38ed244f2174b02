"""ImageNet-9: does a classifier see the object or its background? (Xiao et al., 2021, "Noise or Signal")

A head of the linear probe classifies images of nine groups of ImageNet's classes, with backgrounds removed or
exchanged. It chooses among all 1000 classes; one that belongs to no group is wrong.
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

NUM_IMAGENET_CLASSES = 1000
# Group -> its classes, by their place among the sorted names of ImageNet's classes. Groups stand in the order of the
# release's folders.
CLASSES_OF_GROUPS: dict[str, str] = {
    "dog": "151-170 173-268",
    "bird": "7-24 87-100 127-146",
    "wheeled vehicle": "407-408 428 436 444 468 511 547 555 561 565 569 573 586 603 609 612 627 656 661 665 670-671 675 690 705 717 734 "
    "751 757 791 802-803 817 820 829 847 864 866-867 870 880",
    "reptile": "33-68",
    "carnivore": "269-280 286-299 356-362 387-388",
    "insect": "300-326",
    "musical instrument": "401-402 420 432 486 494 513 541 546 558 566 577 579 593-594 641-642 683-684 687 699 776 822 875 881 889",
    "primate": "365-384",
    "fish": "0-6 389-397",
}


class BackgroundsSettings(Settings):
    head: str = Field(
        "",
        description=f"head of a linear probe on ImageNet with this model; default: OUTPUT/ImageNet/{HEAD_FILE}, left by linear on ImageNet",
    )


def group_of_classes() -> Tensor:  # -> [1000] int64
    """The group of every class of ImageNet, -1 for those that belong to none."""
    groups = torch.full((NUM_IMAGENET_CLASSES,), -1)
    for number, ranges in enumerate(CLASSES_OF_GROUPS.values()):
        for first_and_last in ranges.split():
            first, _, last = first_and_last.partition("-")
            groups[int(first) : int(last or first) + 1] = number
    return groups


def measure_backgrounds(
    extractor: Extractor, data: EvaluationData, settings: BackgroundsSettings
) -> Iterator[Measurement]:
    """Top-1 accuracy among the nine groups for each variant that is there, and what an exchanged background costs
    (BG-GAP).
    """
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
    """The variants of the release that are there. Images are taken as they are stored: published scores do not turn
    them by EXIF.
    """
    present = [variant for variant in BACKGROUNDS if (folder / variant / "val").is_dir()]
    if not present:
        raise DataError(
            f"{folder} holds no variant of ImageNet-9; expected {', '.join(BACKGROUNDS)}, each with its class folders in `val`, "
            "as they are in the release archive"
        )
    sources = {
        variant: FolderSource(
            folder / variant / "val", name=f"{variant} of {folder}", labels="folders", orientation="stored"
        )
        for variant in present
    }
    for source in sources.values():
        assert source.class_names is not None
        if len(source.class_names) != len(CLASSES_OF_GROUPS):
            raise DataError(
                f"{source.name} has {len(source.class_names)} class folders with images instead of {len(CLASSES_OF_GROUPS)}; "
                "unpack the release archive again"
            )
    return sources


def _require_fitting(head: SavedHead, extractor: Extractor) -> None:
    """The head was trained on ImageNet with this model and this feature."""
    if len(head.class_names) != NUM_IMAGENET_CLASSES:
        raise EvaluationError(
            f"the linear head knows {len(head.class_names)} classes; ImageNet-9 needs one of ImageNet's {NUM_IMAGENET_CLASSES}: "
            "run the linear protocol on ImageNet, or give such a head"
        )
    if head.backbone != extractor.model.fingerprint:
        raise EvaluationError(
            f"the linear head was trained on features of another model than {extractor.model.name}; run the linear protocol with this one"
        )
    if head.view_size != extractor.model.image_size:
        raise EvaluationError(
            f"the linear head was trained on images of {head.view_size} px, the model is asked for {extractor.model.image_size}; "
            f"give --image_size {head.view_size} or train a head at this size"
        )
    chosen = extractor.chosen_feature(head.feature)
    if chosen != head.feature:
        raise EvaluationError(
            f"the linear head was trained on the feature {head.feature}; leave --feature {chosen} out"
        )


PROTOCOL = ProtocolEntry(
    measure=measure_backgrounds,
    settings_type=BackgroundsSettings,
    needs=("folder",),
    summary="ImageNet-9, robustness to backgrounds",
    unremarked=frozenset({"head"}),
    uses_centre_crop=False,
)
