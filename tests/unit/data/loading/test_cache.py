import threading
from contextlib import closing

import numpy as np
import torch

from massl.data.loading.cache import ImageCache
from massl.data.loading.loader import Loader
from massl.data.order import EpochOrder
from massl.data.sources.array import ArraySource
from massl.data.sources.base import EncodedImage, Pixels


class CountingSource:
    """24 raw images of 5 x 4 to 5 x 7 pixels that count how often they are read."""

    name = "counting"
    pixels = None
    class_names: tuple[str, ...] | None = None

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 24

    def read(self, index: int) -> EncodedImage:
        self.reads.append(index)
        pixels: Pixels = np.random.default_rng(index).integers(0, 256, (5, 4 + index % 4, 3), dtype=np.uint8)
        return EncodedImage(data=pixels, label=self.label_of(index), key=self.key_of(index))

    def label_of(self, index: int) -> int | None:
        return None if index == 3 else index

    def key_of(self, index: int) -> str:
        return str(index)


def load_epochs(
    source: CountingSource, cache: ImageCache | None, *, num_workers: int = 2, notes: list[str] | None = None
) -> list[bytes]:
    order = EpochOrder(24, 6, seed=0)
    loader = Loader(
        source,
        order_at=order.at,
        seed=0,
        num_workers=num_workers,
        max_side=64,
        cache=cache,
        on_skip=print,
        on_note=None if notes is None else notes.append,
    )
    with closing(loader):
        batches = [loader.at(step) for step in range(12)]
    fields = [(b.images.pixels, b.images.offsets, b.images.sizes, b.indices, b.labels) for b in batches]
    return [b"".join(tensor.numpy().tobytes() for tensor in tensors) for tensors in fields]


def test_batches_are_the_same_with_any_cache() -> None:
    expected = load_epochs(CountingSource(), None, num_workers=0)
    for max_gib in (1.0, 600 / 2**30, 0.0):
        for num_workers in (0, 3):
            assert load_epochs(CountingSource(), ImageCache(max_gib=max_gib), num_workers=num_workers) == expected


def test_cached_images_are_read_once() -> None:
    source = CountingSource()
    cache = ImageCache(max_gib=1.0)
    load_epochs(source, cache, num_workers=0)
    assert sorted(source.reads) == list(range(24))
    load_epochs(source, cache)  # another loader of the same images, as a probe's
    assert len(source.reads) == 24


def test_a_full_cache_keeps_what_it_has_and_says_so_once() -> None:
    source, notes = CountingSource(), list[str]()
    load_epochs(source, ImageCache(max_gib=600 / 2**30), num_workers=0, notes=notes)
    num_kept = 24 - (len(source.reads) - 24) // 2
    assert 600 / (3 * 5 * 7) - 1 <= num_kept <= 600 / (3 * 5 * 4)
    assert len(notes) == 1
    assert f"full: {num_kept} images" in notes[0]
    assert "the rest of the 24 to train on" in notes[0]


def test_images_in_memory_have_no_use_for_a_cache() -> None:
    notes: list[str] = []
    pixels = np.zeros((4, 3, 3), dtype=np.uint8)
    source = ArraySource(name="array", pixels=pixels, labels=None, class_names=None, key_prefix="x")
    loader = Loader(
        source,
        order_at=lambda _: torch.arange(4),
        seed=0,
        num_workers=0,
        max_side=8,
        cache=ImageCache(max_gib=1.0),
        on_skip=print,
        on_note=notes.append,
    )
    with closing(loader):
        for step in range(2):
            loader.at(step)
    assert len(notes) == 1
    assert "no use" in notes[0]


def test_images_of_different_sources_are_kept_apart() -> None:
    cache = ImageCache(max_gib=1.0)
    image = torch.ones(3, 2, 2, dtype=torch.uint8)
    cache.keep("first", 0, image)
    assert cache.get("second", 0) is None
    assert cache.get("first", 1) is None
    assert torch.equal(torch.as_tensor(cache.get("first", 0)), image)


def test_an_image_is_kept_in_planes_whatever_its_memory() -> None:
    interleaved = torch.arange(60, dtype=torch.uint8).view(4, 5, 3).permute(2, 0, 1)
    kept = ImageCache(max_gib=1.0).keep("s", 0, interleaved)
    assert kept.is_contiguous()
    assert torch.equal(kept, interleaved)


def test_many_threads_never_exceed_the_limit() -> None:
    cache = ImageCache(max_gib=50 * 12 / 2**30)

    def fill(start: int) -> None:
        for index in range(start, start + 40):
            cache.keep("s", index % 100, torch.zeros(3, 2, 2, dtype=torch.uint8))

    threads = [threading.Thread(target=fill, args=(20 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(cache.get("s", index) is not None for index in range(100)) == 50
    assert cache.is_full
