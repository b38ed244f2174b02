import pickle
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from massl.data.loading.loader import ImageBatch, Loader
from massl.data.sources import open_source
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.subset import SubsetSource, UnreadableImages, held_out


@pytest.fixture(scope="module")
def array() -> ArraySource:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    labels = np.array([0, 2, -1, 1, 2, 0])
    return ArraySource(name="array", pixels=pixels, labels=labels, class_names=("a", "b", "c"), key_prefix="x")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    for index in range(12):
        pixels = np.random.default_rng(index).integers(0, 256, (9 + index, 20 - index, 3), dtype=np.uint8)
        path = root / ("cats" if index < 5 else "dogs") / f"{index:02d}.{'jpg' if index % 2 else 'png'}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def all_of(source: ImageSource, *, num_workers: int, worker_kind: str) -> ImageBatch:
    loader = Loader(
        source,
        order_at=lambda step: torch.arange(len(source)),
        seed=0,
        num_workers=num_workers,
        worker_kind="processes" if worker_kind == "processes" else "threads",
        max_side=64,
        prefetch_steps=1,
        on_skip=pytest.fail,
    )
    with closing(loader):
        return loader.at(0)


def image_of(batch: ImageBatch, position: int) -> Tensor:  # -> [3, H, W]
    start, (height, width) = int(batch.images.offsets[position]), batch.images.sizes[position].tolist()
    return batch.images.pixels[start : start + 3 * height * width].view(3, height, width)


def test_a_subset_gives_the_chosen_images_with_their_labels_and_keys(array: ArraySource) -> None:
    subset = SubsetSource(array, torch.tensor([4, 2, 4, 0]), name="some")
    assert len(subset) == 4
    assert [subset.label_of(index) for index in range(4)] == [2, None, 2, 0]
    assert [subset.key_of(index) for index in range(4)] == ["x/4", "x/2", "x/4", "x/0"]
    assert (subset.name, subset.class_names) == ("some", ("a", "b", "c"))
    image = subset.read(1)
    assert isinstance(image.data, np.ndarray)
    assert np.array_equal(image.data, array.pixels[2])
    assert (image.key, image.label) == ("x/2", None)
    assert subset.pixels is not None
    assert np.array_equal(subset.pixels, array.pixels[[4, 2, 4, 0]])
    assert not subset.pixels.flags.writeable


@pytest.mark.parametrize(("num_workers", "worker_kind"), [(0, "threads"), (2, "threads"), (1, "processes")])
def test_a_subset_is_loaded_by_any_kind_of_worker(photographs: Path, num_workers: int, worker_kind: str) -> None:
    whole = open_source(photographs)
    indices = torch.tensor([11, 3, 0, 7])
    subset = SubsetSource(SubsetSource(whole, torch.arange(11, -1, -1), name="reversed"), 11 - indices, name="some")
    assert subset.pixels is None
    batch = all_of(subset, num_workers=num_workers, worker_kind=worker_kind)
    expected = all_of(whole, num_workers=0, worker_kind="threads")
    for position, index in enumerate(indices.tolist()):
        assert torch.equal(image_of(batch, position), image_of(expected, index))
    assert batch.labels.tolist() == [1, 0, 0, 1]
    assert batch.indices.tolist() == [0, 1, 2, 3]


def test_a_subset_of_an_array_is_cut_out_of_it(array: ArraySource) -> None:
    batch = all_of(SubsetSource(array, torch.tensor([5, 1]), name="some"), num_workers=1, worker_kind="processes")
    assert torch.equal(batch.images.pixels.view(2, 3, 5, 4), torch.from_numpy(array.pixels[[5, 1]]).permute(0, 3, 1, 2))
    assert batch.labels.tolist() == [0, 2]


def test_a_subset_survives_pickling(photographs: Path) -> None:
    subset = SubsetSource(open_source(photographs), torch.tensor([3, 8]), name="some")
    again = pickle.loads(pickle.dumps(subset))
    assert [again.read(index) for index in range(2)] == [subset.read(index) for index in range(2)]


def test_the_fingerprint_changes_with_the_source_and_with_the_choice(photographs: Path, array: ArraySource) -> None:
    choices = [torch.tensor(numbers) for numbers in ([0, 1], [1, 0], [0, 2], [0, 1, 2])]
    prints = {
        SubsetSource(source, choice, name="x").fingerprint()
        for source in (open_source(photographs), array)
        for choice in choices
    }
    assert len(prints) == 8
    assert SubsetSource(array, choices[0], name="another name").fingerprint() in prints
    assert SubsetSource(array, choices[0].int(), name="x").fingerprint() in prints


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor([0, 6]), "image 6 of array, which has 6"),
        (torch.tensor([-1, 0]), "image -1 of array"),
        (torch.tensor([], dtype=torch.int64), "no image of array"),
        (torch.tensor([0.0]), "integers"),
        (torch.tensor([True] * 6), "integers"),
        (torch.tensor([[0]]), "integers"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(array: ArraySource, indices: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        SubsetSource(array, indices, name="some")


def test_a_subset_without_labels_has_none_anywhere(array: ArraySource) -> None:
    chosen = torch.tensor([0, 1, 3])
    subset = SubsetSource(array, chosen, name="x", labelled=False)
    assert subset.class_names is None
    assert [subset.label_of(index) for index in range(3)] == [None] * 3
    assert subset.read(1).label is None
    assert subset.fingerprint() != SubsetSource(array, chosen, name="x").fingerprint()


def test_unreadable_images_are_taken_out_of_every_source_that_has_them(array: ArraySource) -> None:
    outer = SubsetSource(array, torch.tensor([5, 3, 1]), name="outer")
    inner = SubsetSource(outer, torch.tensor([2, 0]), name="inner")  # images 1 and 5
    error = UnreadableImages(inner, {1: "empty"})
    assert isinstance(error, DataError)
    assert error.messages == ["x/5: empty"]

    def left(source: ImageSource) -> list[str]:
        rest = error.without(source)
        assert rest.name == source.name
        return [rest.key_of(index) for index in range(len(rest))]

    assert left(array) == ["x/0", "x/1", "x/2", "x/3", "x/4"]
    assert left(outer) == ["x/3", "x/1"]
    assert left(inner) == ["x/1"]
    others = SubsetSource(array, torch.tensor([0, 2]), name="others")
    assert error.without(others) is others
    stranger = ArraySource(name="s", pixels=array.pixels, labels=None, class_names=None, key_prefix="x")
    assert error.without(stranger) is stranger


def numbered(num_images: int) -> ArraySource:
    pixels = np.zeros((num_images, 2, 2, 3), dtype=np.uint8)
    return ArraySource(name="numbers", pixels=pixels, labels=None, class_names=None, key_prefix="x")


def test_held_out_images_are_a_share_that_no_training_image_is_in() -> None:
    source = numbered(30)
    training, held = held_out(source, 0.1)
    assert (len(training), len(held)) == (27, 3)
    keys = [[part.key_of(index) for index in range(len(part))] for part in (training, held)]
    assert sorted(keys[0] + keys[1]) == sorted(source.key_of(index) for index in range(30))
    assert keys == [[part.key_of(index) for index in range(len(part))] for part in held_out(source, 0.1)]


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_share_that_leaves_nothing_is_refused(share: float) -> None:
    with pytest.raises(DataError, match=r"data\.hold_out"):
        held_out(numbered(10), share)
