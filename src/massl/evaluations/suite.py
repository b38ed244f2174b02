"""Every evaluation of the paper, cheap ones first, and which of them lack files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from massl.evaluations.datasets import PARTS, missing_data


@dataclass(frozen=True, kw_only=True)
class SuiteEntry:
    """A protocol on a data set."""

    protocol: str
    data: str  # a name in the table of data sets
    parts: tuple[str, ...] = PARTS  # of the data set that the protocol reads
    settings: Mapping[str, Any] = field(default_factory=dict)  # other than the protocol's defaults
    lists: Mapping[str, str] = field(default_factory=dict)  # data set -> its list below the data root, for `lists`
    after: tuple[str, str] | None = None  # protocol and data of the entry whose outcome this one needs


def _each(protocol: str, *names: str) -> tuple[SuiteEntry, ...]:
    return tuple(SuiteEntry(protocol=protocol, data=name) for name in names)


# By the number of images that go through the backbone; the hundred epochs of linear probes on ImageNet come last.
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


def plan_suite(data_root: Path, *, has_head: bool = False) -> list[tuple[SuiteEntry, str | None]]:
    """All entries in their order, each with a message about missing files, or None if it is ready. Opens no file.

    `has_head`: a linear head for ImageNet exists, so that ImageNet-9 can be judged without training one.
    """
    messages: dict[tuple[str, str], str | None] = {}
    planned = []
    for entry in PAPER_SUITE:
        missing = missing_data(entry.data, data_root, parts=entry.parts)
        if missing is None:
            of_lists = [missing_data(name, data_root, parts=entry.parts) for name in entry.lists]
            missing = " ".join(filter(None, of_lists)) or None
        needed = None if entry.after is None or has_head else messages[entry.after]
        if missing is None and entry.after is not None and needed is not None:
            missing = f"needs the outcome of {' on '.join(entry.after)}. {needed}"
        messages[entry.protocol, entry.data] = missing
        if entry.lists:
            lists = tuple(str(data_root.expanduser() / path) for path in entry.lists.values())
            entry = replace(entry, settings={**entry.settings, "lists": lists})
        planned.append((entry, missing))
    return planned
