from collections import Counter

import numpy as np
import pytest

from massl.data.sources import open_source
from massl.data.sources.base import DataError


@pytest.mark.parametrize(("split", "num_per_class"), [("train", 800), ("test", 200)])
def test_the_demo_holds_equally_many_images_of_ten_classes(split: str, num_per_class: int) -> None:
    source = open_source(f"demo:{split}")
    counts = Counter(source.label_of(index) for index in range(len(source)))
    assert counts == dict.fromkeys(range(10), num_per_class)
    assert source.class_names is not None
    assert len(source.class_names) == 10
    assert source.read(0).key == f"{split}/0"


def test_train_and_test_share_no_image() -> None:
    train, test = open_source("demo:train").pixels, open_source("demo:test").pixels
    assert train is not None
    assert test is not None
    assert train.shape[1:] == test.shape[1:] == (28, 28)
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}


def test_opening_twice_shares_one_read_only_array() -> None:
    first, second = open_source("demo:train").pixels, open_source("demo:train").pixels
    assert first is not None
    assert first is second
    with pytest.raises(ValueError, match="read-only"):
        first[0] = np.uint8(0)


def test_an_unknown_split_is_answered_with_the_nearest() -> None:
    with pytest.raises(DataError, match="Did you mean 'train'"):
        open_source("demo:trian")


def test_each_split_has_its_own_lasting_fingerprint() -> None:
    train, test = open_source("demo:train"), open_source("demo:test")
    assert train.fingerprint() == open_source("demo:train").fingerprint() != test.fingerprint()
