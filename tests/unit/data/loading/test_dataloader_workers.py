import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from massl.data.loading.cache import ImageCache
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.order import EpochOrder
from massl.data.sources import open_source
from massl.data.sources.base import DataError

STEPS = (0, 1, 2, 3, 1, 6)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    for index in range(44):
        size = (20 + 7 * index % 31, 25 + 5 * index % 23, 3)
        pixels = np.random.default_rng(index).integers(0, 256, size, dtype=np.uint8)
        path = root / ("cats" if index < 20 else "dogs") / f"{index:02d}.{'jpg' if index % 2 else 'png'}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
        if index == 5:
            path.write_bytes(path.read_bytes()[:100])
    return root


def content(batch: ImageBatch) -> list[bytes]:
    tensors = (batch.images.pixels, batch.images.offsets, batch.images.sizes, batch.indices, batch.labels)
    return [tensor.numpy().tobytes() for tensor in tensors]


def open_loader(root: Path, kind: str, num_workers: int, skipped: list[str], cache: ImageCache | None = None) -> Loader:
    source = open_source(root)
    return Loader(
        source,
        order_at=EpochOrder(len(source), 40, seed=1).at,
        seed=5,
        num_workers=num_workers,
        worker_kind=kind,  # type: ignore[arg-type]
        max_side=800,
        cache=cache,
        on_skip=skipped.append,
    )


@pytest.mark.parametrize("kind", ["dataloader", "dataloader-batches"])
@pytest.mark.parametrize("cached", [False, True])
def test_batches_equal_those_of_threads_and_processes(photographs: Path, kind: str, cached: bool) -> None:
    found, skipped = [], []
    for worker_kind, num_workers in (("threads", 0), ("processes", 2), (kind, 2)):
        messages: list[str] = []
        cache = ImageCache(max_gib=1) if cached else None
        loader = open_loader(photographs, worker_kind, num_workers, messages, cache)
        found.append([content(loader.at(step)) for step in STEPS])
        loader.close()
        skipped.append(messages)
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert skipped[2] == skipped[0]


def test_a_killed_worker_is_named_and_signals_of_a_scheduler_are_ignored(photographs: Path) -> None:
    loader = open_loader(photographs, "dataloader", 1, [])
    loader.at(0)
    (worker,) = loader._dataloader._chunks._workers  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGTERM)
    loader.at(10)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="num_workers"):
        all(loader.at(step) for step in range(20, 1000))
    loader.close()
