import io
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from massl import keyed_random
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.order import EpochOrder
from massl.data.sources import open_source
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError, EncodedImage, ImageSource


class ListedFiles:
    """Files in memory, a different size and colour each; some are broken, some have vanished. The label of image i is
    10 * i.
    """

    name = "listed"
    pixels = None
    class_names: tuple[str, ...] | None = None

    def __init__(
        self, num_images: int, *, broken: frozenset[int] = frozenset(), vanished: frozenset[int] = frozenset()
    ) -> None:
        self.num_images, self.broken, self.vanished = num_images, broken, vanished
        self.reading_threads: set[str] = set()
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.num_images

    def read(self, index: int) -> EncodedImage:
        self.reading_threads.add(threading.current_thread().name)
        self.reads.append(index)
        if index in self.vanished:
            raise FileNotFoundError(2, "No such file or directory")
        buffer = io.BytesIO()
        Image.new("RGB", (1 + index % 4, 1 + index % 3), (index, 255 - index, 7)).save(buffer, "PNG")
        data = buffer.getvalue()
        return EncodedImage(
            data=data[:20] if index in self.broken else data, label=self.label_of(index), key=self.key_of(index)
        )

    def label_of(self, index: int) -> int | None:
        return 10 * index

    def key_of(self, index: int) -> str:
        return f"file-{index}"


@contextmanager
def loading(
    source: ImageSource,
    order_at: Callable[[int], Tensor],
    *,
    num_workers: int = 2,
    on_skip: Callable[[str], None] = print,
    max_side: int = 64,
) -> Iterator[Loader]:
    loader = Loader(source, order_at=order_at, seed=5, num_workers=num_workers, max_side=max_side, on_skip=on_skip)
    with closing(loader):
        yield loader


def equal(first: ImageBatch, second: ImageBatch) -> bool:
    same_images = all(
        torch.equal(getattr(first.images, name), getattr(second.images, name))
        for name in ("pixels", "offsets", "sizes")
    )
    return same_images and torch.equal(first.indices, second.indices) and torch.equal(first.labels, second.labels)


def image_of(batch: ImageBatch, position: int) -> Tensor:  # -> [3, H, W]
    start, (height, width) = int(batch.images.offsets[position]), batch.images.sizes[position].tolist()
    return batch.images.pixels[start : start + 3 * height * width].view(3, height, width)


def all_at_once(num_images: int) -> Callable[[int], Tensor]:
    return lambda _: torch.arange(num_images)


def test_images_lie_one_after_another_each_in_its_own_size() -> None:
    with loading(ListedFiles(12), all_at_once(12)) as loader:
        batch = loader.at(0)
    sizes = [[1 + index % 3, 1 + index % 4] for index in range(12)]
    assert batch.images.sizes.tolist() == sizes
    assert batch.images.offsets.tolist() == [
        sum(3 * height * width for height, width in sizes[:index]) for index in range(12)
    ]
    assert batch.images.pixels.shape == (sum(3 * height * width for height, width in sizes),)
    assert batch.indices.tolist() == list(range(12))
    assert batch.labels.tolist() == [10 * index for index in range(12)]
    for index, (height, width) in enumerate(sizes):
        colour = torch.tensor([index, 255 - index, 7], dtype=torch.uint8)
        assert torch.equal(image_of(batch, index), colour[:, None, None].expand(3, height, width))


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_loader_that_starts_at_a_later_step_continues_bit_for_bit(num_workers: int) -> None:
    source, order = ListedFiles(21, broken=frozenset({4})), EpochOrder(21, 5, seed=1)
    with loading(source, order.at, num_workers=0) as fresh:
        whole_run = [fresh.at(step) for step in range(10)]
    with loading(source, EpochOrder(21, 5, seed=1).at, num_workers=num_workers) as resumed:
        assert all(equal(resumed.at(step), whole_run[step]) for step in range(6, 10))
        assert all(equal(resumed.at(step), whole_run[step]) for step in (3, 9, 3, 0))  # any step, in any order


def test_replacements_are_drawn_by_key_and_the_same_for_any_number_of_workers() -> None:
    broken = frozenset({3, 17, 30})
    batches = []
    for num_workers in (0, 1, 4):
        with loading(ListedFiles(100, broken=broken), all_at_once(100), num_workers=num_workers) as loader:
            batches.append(loader.at(0))
    assert all(equal(batch, batches[0]) for batch in batches[1:])
    for image in broken:
        replacement = int(keyed_random.integers(5, "replacement", image, 0, upper=100))
        assert replacement not in broken
        assert batches[0].indices[image] == image
        assert batches[0].labels[image] == 10 * replacement
        assert image_of(batches[0], image)[0, 0, 0] == replacement


def test_an_unreadable_replacement_is_replaced_by_the_next() -> None:
    first = int(keyed_random.integers(5, "replacement", 3, 0, upper=100))
    second = int(keyed_random.integers(5, "replacement", 3, 1, upper=100))
    assert len({3, first, second}) == 3
    with loading(ListedFiles(100, broken=frozenset({3, first})), all_at_once(100)) as loader:
        assert loader.at(0).labels[3] == 10 * second


def test_each_unreadable_image_is_named_once_with_its_reason() -> None:
    messages: list[str] = []
    source = ListedFiles(100, broken=frozenset({1}), vanished=frozenset({2}))
    with loading(source, all_at_once(100), on_skip=messages.append) as loader:
        for step in range(3):
            loader.at(step)
    assert sorted(message.split(":")[0] for message in messages) == ["file-1", "file-2"]
    assert "file-2: No such file or directory" in messages


def test_an_image_that_vanishes_later_is_named_then() -> None:
    messages: list[str] = []
    source = ListedFiles(40)
    with loading(source, all_at_once(40), num_workers=0, on_skip=messages.append) as loader:
        loader.at(0)
        source.vanished = frozenset({7})
        loader.at(1)
    assert messages == ["file-7: No such file or directory"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_than_five_percent_unreadable_images_stop_the_run(num_workers: int) -> None:
    messages: list[str] = []
    source = ListedFiles(200, broken=frozenset(range(0, 60, 10)))  # 6 of the first 100, 3 % of all
    with loading(
        source, lambda step: torch.arange(50 * step, 50 * step + 50), num_workers=num_workers, on_skip=messages.append
    ) as loader:
        loader.at(0)  # 10 % so far, but fewer than 100 images tried
        assert len(messages) == 5
        with pytest.raises(
            DataError, match=r"6 of 1\d\d images tried in listed cannot be read.*file-0: .*file-10: .*file-20: "
        ) as raised:
            loader.at(1)
    assert "file-30" not in str(raised.value)


def test_exactly_five_percent_unreadable_images_are_borne() -> None:
    with loading(ListedFiles(100, broken=frozenset(range(5))), all_at_once(100)) as loader:
        loader.at(0)


def test_a_small_source_is_judged_once_all_of_it_was_tried() -> None:
    with loading(ListedFiles(10, broken=frozenset({0})), lambda step: torch.arange(5 * step, 5 * step + 5)) as loader:
        loader.at(0)
        with pytest.raises(DataError, match="1 of 10"):
            loader.at(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_source_without_a_readable_image_stops_at_once(num_workers: int) -> None:
    source = ListedFiles(1000, broken=frozenset(range(1000)))
    with (
        loading(source, lambda step: torch.arange(2), num_workers=num_workers) as loader,
        pytest.raises(DataError, match="cannot be read"),
    ):
        loader.at(0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unexpected_error_of_a_worker_reaches_the_caller(num_workers: int) -> None:
    class Faulty(ListedFiles):
        def read(self, index: int) -> EncodedImage:
            raise RuntimeError(f"fault at {index}")

    with (
        loading(Faulty(9), lambda step: torch.tensor([7]), num_workers=num_workers) as loader,
        pytest.raises(RuntimeError, match="fault at 7"),
    ):
        loader.at(0)


def test_the_next_steps_are_read_in_the_background() -> None:
    source, third_step_read = ListedFiles(30), threading.Event()

    def order_at(step: int) -> Tensor:
        if step == 2:
            third_step_read.set()
        return torch.arange(10 * step, 10 * step + 10)

    with loading(source, order_at) as loader:
        loader.at(0)
        assert third_step_read.wait(timeout=120)
    assert threading.current_thread().name not in source.reading_threads


def test_steps_asked_in_sequence_are_read_once() -> None:
    source = ListedFiles(100)
    with loading(source, lambda step: torch.arange(4 * step, 4 * step + 4)) as loader:
        for step in range(5):
            loader.at(step)
    assert len(source.reads) == len(set(source.reads))


def test_an_order_that_ends_is_no_error_until_a_step_past_its_end_is_asked_for() -> None:
    batches = [torch.tensor([0, 1]), torch.tensor([2])]
    with loading(ListedFiles(3), batches.__getitem__) as loader:
        assert [len(loader.at(step).indices) for step in range(2)] == [2, 1]
        with pytest.raises(IndexError):
            loader.at(2)


def test_without_workers_images_are_decoded_in_the_calling_thread() -> None:
    source = ListedFiles(4)
    with loading(source, all_at_once(4), num_workers=0) as loader:
        loader.at(0)
    assert source.reading_threads == {threading.current_thread().name}


def test_closing_ends_all_threads_even_with_work_under_way() -> None:
    loader = Loader(ListedFiles(500), order_at=all_at_once(500), seed=0, num_workers=2, max_side=8, on_skip=print)
    loader.at(0)
    loader.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("massl-")]


@pytest.mark.parametrize("shape", [(9, 5, 4), (9, 5, 4, 3)])
@pytest.mark.parametrize("max_side", [8, 3])
def test_cutting_batches_out_of_an_array_equals_decoding_one_by_one(shape: tuple[int, ...], max_side: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    labels = np.array([3, -1, 2, 1, 0, 5, 4, 9, 8])
    fast = ArraySource(name="array", pixels=pixels, labels=labels, class_names=None, key_prefix="x")

    class Slow(ListedFiles):
        def read(self, index: int) -> EncodedImage:
            return fast.read(index)

    order = EpochOrder(9, 4, seed=2)
    with (
        loading(fast, order.at, max_side=max_side) as fast_loader,
        loading(Slow(9), order.at, max_side=max_side) as slow_loader,
    ):
        assert all(equal(fast_loader.at(step), slow_loader.at(step)) for step in range(4))


def test_images_without_a_label_carry_minus_one(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "x.png")
    with loading(open_source(tmp_path), all_at_once(1), num_workers=0) as loader:
        assert loader.at(0).labels.tolist() == [-1]


def test_a_batch_is_cut_and_moved_without_losing_its_parts() -> None:
    with loading(ListedFiles(12), all_at_once(12), num_workers=0) as loader:
        batch = loader.at(0)
    parts = [batch.slice(0, 5), batch.slice(5, 12)]
    for name in ("indices", "labels"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    for position in range(12):
        part, within = (parts[0], position) if position < 5 else (parts[1], position - 5)
        assert torch.equal(image_of(part, within), image_of(batch, position))
    moved = batch.to("meta")
    assert moved.images.pixels.device.type == "meta"
    assert {
        tensor.device.type for tensor in (moved.images.sizes, moved.images.offsets, moved.indices, moved.labels)
    } == {"cpu"}


def test_images_are_named_by_their_keys() -> None:
    with loading(ListedFiles(12), all_at_once(12), num_workers=0) as loader:
        assert loader.image_keys(torch.tensor([3, 1])) == ["file-3", "file-1"]
