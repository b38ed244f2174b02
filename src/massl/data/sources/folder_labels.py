"""Classes from folder names: which folders are taken as classes, and when that is doubtful."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Literal

LabelRule = Literal["auto", "none", "folders"]

_SPLIT_NAMES: Final = frozenset(
    {
        *("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval", "holdout"),
        *("unlabeled", "unlabelled"),
    }
)
_ONLY_NUMBERS: Final = re.compile(r"\d+([-_. ]\d+)*")  # 2019, 07, 2019-07-31
_NUM_SHOWN: Final = 5


@dataclass(frozen=True, kw_only=True)
class FolderLabels:
    """The classes of a folder source."""

    class_names: tuple[str, ...] | None  # None: no labels
    labels: tuple[int, ...] = ()  # of each folder with images; empty without labels
    doubt: str = ""  # why the classes may be none
    remarks: tuple[str, ...] = ()  # what was decided, for the user


def find_labels(
    folders: Sequence[str], num_images: Sequence[int], rule: LabelRule, *, path: str, as_before: bool = False
) -> FolderLabels:
    """The classes of folders with images (paths relative to the root, "" for the root itself).

    "folders": the folders directly below the root. "auto": the same if there are two or more that hold all images; of
    folders named train, val or test the folders inside them. `path` is for messages; `as_before`: without a word or a
    doubt, and with train and val as classes.
    """
    tops = [folder.partition("/")[0] for folder in folders]
    if rule == "none" or "" in tops or (rule == "auto" and len(set(tops)) < 2):
        return FolderLabels(class_names=None)
    if rule == "folders" or as_before:
        return _labels_of(tops)
    names, inside = tops, ""
    splits = ", ".join(dict.fromkeys(tops))
    if all(top.lower() in _SPLIT_NAMES for top in tops):
        names = [folder.split("/")[1] if "/" in folder else "" for folder in folders]
        if "" in names or len(set(names)) < 2:
            kept = f"{splits} are taken as splits, not as classes, so the images have no labels"
            return FolderLabels(class_names=None, remarks=(f"{kept}; folder:{path}?labels=folders takes them",))
        inside = f" inside {splits}"
    found = _labels_of(names)
    assert found.class_names is not None
    remark = (
        f"{len(found.class_names)} classes from folder names{inside}: {_first_few(found.class_names)}; "
        f"folder:{path}?labels=none ignores them"
    )
    doubt = _doubt(found, num_images)
    chosen = f"folder:{path}/{tops[0] if inside else ''}".rstrip("/")
    caution = (
        f"caution: {doubt}, which may be no classes; pretrain and report show no k-NN accuracy on them unless the "
        f"images are named as {chosen}?labels=folders"
    )
    return replace(found, doubt=doubt, remarks=(remark, caution) if doubt else (remark,))


def _labels_of(names: Sequence[str]) -> FolderLabels:
    """One class for each name, in alphabetical order."""
    class_names = tuple(sorted(set(names)))
    label_of_class = {class_name: label for label, class_name in enumerate(class_names)}
    return FolderLabels(class_names=class_names, labels=tuple(label_of_class[name] for name in names))


def _doubt(found: FolderLabels, num_images: Sequence[int]) -> str:
    """Why these are probably no classes; "" if nothing speaks against it."""
    assert found.class_names is not None
    if all(_ONLY_NUMBERS.fullmatch(name) for name in found.class_names):
        return "folders named by numbers only"
    images_of_class: Counter[int] = Counter()
    for label, num in zip(found.labels, num_images, strict=True):
        images_of_class[label] += num
    num_classes, total = len(found.class_names), sum(num_images)
    if median(images_of_class.values()) < 2 or 2 * num_classes > total:
        return f"{num_classes} folders for {total} images"
    return ""


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_SHOWN]) + (", ..." if len(names) > _NUM_SHOWN else "")
