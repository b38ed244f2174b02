from collections import Counter
from pathlib import Path

import pytest

from massl.config import validate
from massl.evaluations.datasets import DATASETS
from massl.evaluations.protocols import PROTOCOLS
from massl.evaluations.suite import PAPER_SUITE, SuiteEntry, plan_suite


def missing_by_name(data_root: Path, *, has_head: bool = False) -> dict[tuple[str, str], str | None]:
    return {(entry.protocol, entry.data): missing for entry, missing in plan_suite(data_root, has_head=has_head)}


def planned(data_root: Path) -> dict[tuple[str, str], SuiteEntry]:
    return {(entry.protocol, entry.data): entry for entry, _ in plan_suite(data_root)}


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


BACKGROUND_FILES = [
    f"imagenet9/{variant}/val/00_dog/a.JPEG"
    for variant in ("original", "only_fg", "mixed_same", "mixed_rand", "mixed_next", "no_fg", "only_bg_b", "only_bg_t")
]


def test_the_suite_holds_every_evaluation_of_the_paper_once() -> None:
    pairs = [(entry.protocol, entry.data) for entry in PAPER_SUITE]
    assert len(set(pairs)) == len(pairs)
    assert {protocol for protocol, _ in pairs} == PROTOCOLS.keys() - {"davis"}  # an extra that the paper does not have

    def sets_of(protocol: str) -> set[str]:
        return {data for of_protocol, data in pairs if of_protocol == protocol}

    transfer = {"Pets", "Flowers", "Aircraft", "Cars", "Country211", "Food101", "STL-10", "GTSRB"}
    assert sets_of("knn") == transfer | {"ImageNet"}
    assert sets_of("logreg") == {"DTD", "CIFAR-100", "GTSRB", "Cars", "Aircraft", "Pets"}
    assert sets_of("retrieval") == {"ROxford5k", "RParis6k"}
    assert sets_of("clustering") == {"ImageNet-1%", "CIFAR-10"}
    single = {"copy-detection": "Copydays", "backgrounds": "ImageNet-9", "long-tail": "ImageNet-LT"}
    on_imagenet = dict.fromkeys(("linear", "low-shot", "attention", "correspondence"), "ImageNet")
    assert all(sets_of(protocol) == {data} for protocol, data in (single | on_imagenet).items())
    assert Counter(protocol for protocol, _ in pairs).total() == 9 + 6 + 2 + 2 + 3 + 4


@pytest.mark.parametrize("entry", PAPER_SUITE, ids=lambda entry: f"{entry.protocol}-{entry.data}")
def test_the_parts_are_those_the_protocol_needs(entry: object) -> None:
    assert isinstance(entry, type(PAPER_SUITE[0]))
    opened = {part for part in DATASETS[entry.data].parts if part in entry.parts}
    assert opened - {"validation"} == set(PROTOCOLS[entry.protocol].needs)


def test_all_settings_are_understood_by_their_protocols(tmp_path: Path) -> None:
    entries = planned(tmp_path)
    for entry in entries.values():
        validate(PROTOCOLS[entry.protocol].settings_type, entry.settings, origin=entry.protocol)
    assert entries["low-shot", "ImageNet"].settings == {
        "lists": (f"{tmp_path}/imagenet_lists/1percent.txt", f"{tmp_path}/imagenet_lists/10percent.txt")
    }
    assert entries["clustering", "CIFAR-10"].settings == {"ks": (47,)}
    assert entries["knn", "Pets"].settings == {}


def test_expensive_items_come_last_and_each_after_what_it_needs(tmp_path: Path) -> None:
    entries = planned(tmp_path)
    order = list(entries)
    assert order.index(("knn", "ImageNet")) > max(order.index(("knn", name)) for name in ("Food101", "Pets"))
    assert order[-2:] == [("linear", "ImageNet"), ("backgrounds", "ImageNet-9")]
    for position, entry in enumerate(entries.values()):
        assert entry.after is None or entry.after in order[:position]
    assert entries["backgrounds", "ImageNet-9"].after == ("linear", "ImageNet")


def test_without_data_everything_is_missing_and_says_so(tmp_path: Path) -> None:
    found = missing_by_name(tmp_path / "nothing")
    assert len(found) == len(PAPER_SUITE)
    for missing in found.values():
        assert missing is not None
        assert f"{tmp_path}/nothing/" in missing
        assert "To get it: " in missing


def test_an_entry_is_ready_when_its_own_files_are_there(tmp_path: Path) -> None:
    touch(tmp_path, "copydays/original/200000.jpg", "copydays/strong/200001.jpg", "imagenet/val/n01440764/a.JPEG")
    ready = {pair for pair, missing in missing_by_name(tmp_path).items() if missing is None}
    assert ready == {("copy-detection", "Copydays"), ("attention", "ImageNet"), ("correspondence", "ImageNet")}


def test_low_shot_needs_both_lists(tmp_path: Path) -> None:
    touch(tmp_path, "imagenet/train/n01440764/a.JPEG", "imagenet/val/n01440764/a.JPEG", "imagenet_lists/1percent.txt")
    found = missing_by_name(tmp_path)
    missing = found["low-shot", "ImageNet"]
    assert missing is not None
    assert "expected " + str(tmp_path / "imagenet_lists" / "10percent.txt") in missing
    assert str(tmp_path / "imagenet_lists" / "1percent.txt") not in missing
    assert found["knn", "ImageNet"] is None
    assert found["clustering", "ImageNet-1%"] is None
    touch(tmp_path, "imagenet_lists/10percent.txt")
    assert missing_by_name(tmp_path)["low-shot", "ImageNet"] is None


def test_backgrounds_need_imagenet_for_their_head_unless_there_is_one(tmp_path: Path) -> None:
    touch(tmp_path, *BACKGROUND_FILES)
    missing = missing_by_name(tmp_path)["backgrounds", "ImageNet-9"]
    assert missing is not None
    assert missing.startswith("needs the outcome of linear on ImageNet. ImageNet is missing")
    assert missing_by_name(tmp_path, has_head=True)["backgrounds", "ImageNet-9"] is None
    touch(tmp_path, "imagenet/train/n01440764/a.JPEG", "imagenet/val/n01440764/a.JPEG")
    assert missing_by_name(tmp_path)["backgrounds", "ImageNet-9"] is None
