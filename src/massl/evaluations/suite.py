"""Every evaluation of the paper, cheap ones first: what is measured on which data, and what a user lacks for it."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from massl.evaluations.base import EvaluationData
from massl.evaluations.datasets import PARTS, missing_data, open_data


@dataclass(frozen=True, kw_only=True)
class SuiteEntry:
    """A protocol on a data set."""

    protocol: str
    data: str  # a name in the table of data sets
    parts: tuple[str, ...] = PARTS  # of the data that the protocol looks at
    settings: Mapping[str, Any] = field(default_factory=dict)  # where they are not the protocol's defaults
    # data set whose list is needed -> the list, for the setting `lists`
    lists: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, str] | None = None  # protocol and data of the entry whose outcome this one needs


@dataclass(frozen=True, kw_only=True)
class SuiteItem:
    """An entry of the suite under a certain data root: ready, or with a message that says what is missing."""

    protocol: str
    data_name: str
    settings: dict[str, Any]  # overrides of the protocol's settings
    missing: str | None  # expected paths and how to get what belongs there; None: ready
    after: tuple[str, str] | None  # (protocol, data_name) of the item that must be done before
    data_root: Path
    parts: tuple[str, ...]

    def open(self, output: Path, *, warn: Callable[[str], None] = warnings.warn) -> EvaluationData:
        """Its images; `warn` is told where there are not as many as published."""
        return open_data(self.data_name, self.data_root, output=output, parts=self.parts, warn=warn)


def _each(protocol: str, *names: str) -> tuple[SuiteEntry, ...]:
    return tuple(SuiteEntry(protocol=protocol, data=name) for name in names)


# By the images that go through the backbone: hundreds, thousands, and last the hundred epochs of linear probes on
# ImageNet.
PAPER_SUITE: tuple[SuiteEntry, ...] = (
    *_each("copy-detection", "Copydays"),
    SuiteEntry(protocol="attention", data="ImageNet", parts=("test",)),
    SuiteEntry(protocol="correspondence", data="ImageNet", parts=("test",)),
    *_each("knn", "Flowers", "Pets", "Aircraft", "STL-10", "Cars", "GTSRB", "Country211", "Food101"),
    *_each("logreg", "DTD", "Pets", "Aircraft", "Cars", "GTSRB", "CIFAR-100"),
    *_each("retrieval", "ROxford5k", "RParis6k"),
    # The published numbers of ViTs fit 47 clusters, DTD's number of classes; the protocol itself adds CIFAR-10's ten.
    SuiteEntry(protocol="clustering", data="CIFAR-10", settings={"ks": (47,)}),
    *_each("clustering", "ImageNet-1%"),
    *_each("knn", "ImageNet"),
    SuiteEntry(
        protocol="low-shot",
        data="ImageNet",
        lists={"ImageNet-1%": "imagenet_lists/1percent.txt", "ImageNet-10%": "imagenet_lists/10percent.txt"},
    ),
    *_each("long-tail", "ImageNet-LT"),
    *_each("linear", "ImageNet"),
    SuiteEntry(protocol="backgrounds", data="ImageNet-9", after=("linear", "ImageNet")),
)


def plan_suite(data_root: Path, *, has_head: bool = False) -> list[SuiteItem]:
    """All items in the order in which they are to be done. Looks for files, opens none.

    `has_head` says that a head for ImageNet is at hand, so that ImageNet-9 can be judged without training one.
    """
    items: list[SuiteItem] = []
    for entry in PAPER_SUITE:
        missing = _missing(entry, data_root)
        before = next((item for item in items if (item.protocol, item.data_name) == entry.after), None)
        if missing is None and before is not None and before.missing is not None and not has_head:
            missing = f"needs what {before.protocol} on {before.data_name} leaves behind. {before.missing}"
        settings = dict(entry.settings)
        if entry.lists:
            settings["lists"] = tuple(str(data_root.expanduser() / path) for path in entry.lists.values())
        items.append(
            SuiteItem(
                protocol=entry.protocol,
                data_name=entry.data,
                settings=settings,
                missing=missing,
                after=entry.after,
                data_root=data_root,
                parts=entry.parts,
            )
        )
    return items


def _missing(entry: SuiteEntry, data_root: Path) -> str | None:
    missing = missing_data(entry.data, data_root, parts=entry.parts)
    if missing is not None:
        return missing
    messages = [missing_data(name, data_root, parts=entry.parts) for name in entry.lists]
    return " ".join(message for message in messages if message is not None) or None
