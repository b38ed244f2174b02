import pytest

from massl.config import MasslError
from massl.reports.published.data_sets import DATA_SETS, data_set_named, require_known
from massl.reports.published.public import public_tables


@pytest.mark.parametrize(
    ("source", "data"),
    [
        ("torchvision:CIFAR10?root=data", "CIFAR-10"),
        ("torchvision:CIFAR10", "CIFAR-10"),
        ("/data/cifar-10/train.npz", "CIFAR-10"),
        ("cifar10_train.npz", "CIFAR-10"),
        ("/data/cifar-10-test.npz", "CIFAR-10"),
        ("folder:/data/CIFAR_10/train?labels=none", "CIFAR-10"),
        ("folder:/data/cifar10", "CIFAR-10"),
        ("torchvision:CIFAR100?root=data", "CIFAR-100"),
        ("/data/cifar10/cifar100/train", "CIFAR-100"),
        ("/data/imagenette2-160/train", "Imagenette"),
        ("imagenette/val", "Imagenette"),
        ("/data/imagenet-100/train", "ImageNet-100"),
        ("imagenet100.npz", "ImageNet-100"),
        ("imagenet/train", "ImageNet"),
        ("torchvision:ImageNet?root=imagenet-100", "ImageNet"),
        ("/data/ILSVRC2012/train", "ImageNet"),
        ("joined:cifar10_train.npz | torchvision:CIFAR10", "CIFAR-10"),
    ],
)
def test_data_sets_are_known_by_the_names_of_their_sources(source: str, data: str) -> None:
    assert data_set_named(source) == data


@pytest.mark.parametrize(
    "source",
    [
        "photos",
        "train.npz",
        "/home/me/cifar10-project/photos",
        "/data/cifar10/cifar10-corrupted/train.npz",
        "/data/imagenet/imagenet-c/blur",
        "cifar_train.npz",
        "cifar1000/train",
        "joined:cifar10_train.npz|photos",
        "joined:cifar10_train.npz|cifar100_train.npz",
        "",
    ],
)
def test_names_that_only_hold_that_of_a_data_set_do_not_tell(source: str) -> None:
    assert data_set_named(source) is None


@pytest.mark.parametrize(
    ("source", "data"),
    [
        ("demo:train", "Fashion-MNIST"),
        ("torchvision:FashionMNIST?root=data", "FashionMNIST"),
        ("tiny-imagenet-100/train.npz", "Tiny-ImageNet"),
        ("/data/imagenet/tiny-imagenet-200/train", "Tiny-ImageNet"),
        ("imagewoof2-160", "Imagewoof"),
    ],
)
def test_data_sets_of_no_public_table_are_told_apart_from_those(source: str, data: str) -> None:
    assert data_set_named(source) == data
    assert data not in DATA_SETS


def test_the_data_of_every_table_that_is_ranked_by_knn_can_be_named() -> None:
    ranked = {table.rules.data for table in public_tables() if table.columns[0].name == "knn_top1"}
    assert "ImageNet" in ranked
    for data in ranked:
        require_known(data)


def test_other_names_are_refused_with_those_there_are() -> None:
    require_known(None)
    with pytest.raises(
        MasslError, match="no public table is about 'MNIST'; --data_set may be CIFAR-10, CIFAR-100, Imagenette, "
    ):
        require_known("MNIST")
