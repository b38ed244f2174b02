from collections import Counter
from pathlib import Path

import pytest

from massl.config import validate
from massl.evaluations.datasets import DATASETS
from massl.evaluations.protocols import PROTOCOLS
from massl.evaluations.suite import PAPER_SUITE, SuiteItem, plan_suite


def items_by_name(items: list[SuiteItem]) -> dict[tuple[str, str], SuiteItem]:
    return {(item.protocol, item.data_name): item for item in items}


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
    for item in plan_suite(tmp_path):
        validate(PROTOCOLS[item.protocol].settings_type, item.settings, origin=item.protocol)
    items = items_by_name(plan_suite(tmp_path))
    assert items["low-shot", "ImageNet"].settings == {
        "lists": (f"{tmp_path}/imagenet_lists/1percent.txt", f"{tmp_path}/imagenet_lists/10percent.txt")
    }
    assert items["clustering", "CIFAR-10"].settings == {"ks": (47,)}
    assert items["knn", "Pets"].settings == {}


def test_expensive_items_come_last_and_each_after_what_it_needs(tmp_path: Path) -> None:
    order = [(item.protocol, item.data_name) for item in plan_suite(tmp_path)]
    assert order.index(("knn", "ImageNet")) > max(order.index(("knn", name)) for name in ("Food101", "Pets"))
    assert order[-2:] == [("linear", "ImageNet"), ("backgrounds", "ImageNet-9")]
    for position, item in enumerate(plan_suite(tmp_path)):
        assert item.after is None or item.after in order[:position]
    assert items_by_name(plan_suite(tmp_path))["backgrounds", "ImageNet-9"].after == ("linear", "ImageNet")


def test_without_data_everything_is_missing_and_says_so(tmp_path: Path) -> None:
    items = plan_suite(tmp_path / "nothing")
    assert len(items) == len(PAPER_SUITE)
    for item in items:
        assert item.missing is not None
        assert f"{tmp_path}/nothing/" in item.missing
        assert "To get it: " in item.missing


def test_an_item_is_ready_when_its_own_files_are_there(tmp_path: Path) -> None:
    touch(tmp_path, "copydays/original/200000.jpg", "copydays/strong/200001.jpg", "imagenet/val/n01440764/a.JPEG")
    ready = {pair for pair, item in items_by_name(plan_suite(tmp_path)).items() if item.missing is None}
    assert ready == {("copy-detection", "Copydays"), ("attention", "ImageNet"), ("correspondence", "ImageNet")}


def test_low_shot_needs_both_lists(tmp_path: Path) -> None:
    touch(tmp_path, "imagenet/train/n01440764/a.JPEG", "imagenet/val/n01440764/a.JPEG", "imagenet_lists/1percent.txt")
    items = items_by_name(plan_suite(tmp_path))
    missing = items["low-shot", "ImageNet"].missing
    assert missing is not None
    assert "expected " + str(tmp_path / "imagenet_lists" / "10percent.txt") in missing
    assert str(tmp_path / "imagenet_lists" / "1percent.txt") not in missing
    assert items["knn", "ImageNet"].missing is None
    assert items["clustering", "ImageNet-1%"].missing is None
    touch(tmp_path, "imagenet_lists/10percent.txt")
    assert items_by_name(plan_suite(tmp_path))["low-shot", "ImageNet"].missing is None


def test_backgrounds_need_imagenet_for_their_head_unless_there_is_one(tmp_path: Path) -> None:
    touch(tmp_path, *BACKGROUND_FILES)
    missing = items_by_name(plan_suite(tmp_path))["backgrounds", "ImageNet-9"].missing
    assert missing is not None
    assert missing.startswith("needs what linear on ImageNet leaves behind. ImageNet is missing")
    assert items_by_name(plan_suite(tmp_path, has_head=True))["backgrounds", "ImageNet-9"].missing is None
    touch(tmp_path, "imagenet/train/n01440764/a.JPEG", "imagenet/val/n01440764/a.JPEG")
    assert items_by_name(plan_suite(tmp_path))["backgrounds", "ImageNet-9"].missing is None


def test_an_item_opens_its_data_with_a_folder_for_its_output(tmp_path: Path) -> None:
    touch(tmp_path, "copydays/original/200000.jpg", "copydays/strong/200001.jpg")
    item = items_by_name(plan_suite(tmp_path))["copy-detection", "Copydays"]
    remarks: list[str] = []
    data = item.open(tmp_path / "out", warn=remarks.append)
    assert (data.name, data.folder, data.output) == ("Copydays", tmp_path / "copydays", tmp_path / "out")
    assert remarks[0] == "copydays/original/*.jpg has 1 images, published protocol has 157"
