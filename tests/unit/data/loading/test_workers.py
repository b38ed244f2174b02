import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from massl import keyed_random
from massl.data.loading import workers
from massl.data.loading.cache import ImageCache
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.order import EpochOrder
from massl.data.sources import open_source
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError, EncodedImage, ImageSource

NUM_IMAGES, BATCH_SIZE = 44, 20
BROKEN, VANISHED = 5, 30


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs and PNGs of different sizes in two classes, one of them large and one broken."""
    root = tmp_path_factory.mktemp("photographs")
    for index in range(NUM_IMAGES):
        height, width = (700, 900) if index == 17 else (20 + 7 * index % 31, 25 + 5 * index % 23)
        picture = Image.fromarray(np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8))
        path = root / ("cats" if index < 20 else "dogs") / f"{index:02d}.{'jpg' if index % 2 else 'png'}"
        path.parent.mkdir(exist_ok=True)
        picture.save(path)
        if index == BROKEN:
            path.write_bytes(path.read_bytes()[:100])
    return root


@contextmanager
def loading(
    source: ImageSource,
    *,
    num_workers: int,
    worker_kind: str = "processes",
    cache: ImageCache | None = None,
    skipped: list[str] | None = None,
) -> Iterator[Loader]:
    loader = Loader(
        source,
        order_at=EpochOrder(len(source), min(BATCH_SIZE, len(source)), seed=1).at,
        seed=5,
        num_workers=num_workers,
        worker_kind="processes" if worker_kind == "processes" else "threads",
        max_side=800,
        cache=cache,
        on_skip=print if skipped is None else skipped.append,
    )
    try:
        yield loader
    finally:
        loader.close()


def content(batch: ImageBatch) -> list[bytes]:
    tensors = (batch.images.pixels, batch.images.offsets, batch.images.sizes, batch.indices, batch.labels)
    return [tensor.numpy().tobytes() for tensor in tensors]


def worker_pids(loader: Loader) -> list[int]:
    assert loader._processes is not None
    chunks = loader._processes._chunks
    return [] if chunks is None else [worker.pid for worker in chunks._workers]  # type: ignore[attr-defined]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_sockets() -> list[str]:
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(file.readlink()))
    return sorted(link for link in links if link.startswith("socket:"))


def shared_memory_of(pids: list[int]) -> list[str]:
    """Files of these processes in /dev/shm, where other programs have theirs."""
    prefixes = tuple(f"torch_{pid}_" for pid in pids)
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefixes)]


def test_batches_equal_those_of_threads_and_closing_leaves_nothing(photographs: Path) -> None:
    batches: list[list[list[bytes]]] = []
    skipped: list[list[str]] = []
    before = open_sockets()
    for num_workers, worker_kind in ((0, "threads"), (2, "threads"), (2, "processes")):
        source = open_source(photographs)
        (photographs / "dogs" / f"{VANISHED}.png").unlink(missing_ok=True)  # after the folder was listed
        skipped.append([])
        with loading(source, num_workers=num_workers, worker_kind=worker_kind, skipped=skipped[-1]) as loader:
            batches.append([content(loader.at(step)) for step in (0, 1, 2, 3, 1, 6)])
            pids = worker_pids(loader) if worker_kind == "processes" else []
        Image.new("RGB", (9, 9)).save(photographs / "dogs" / f"{VANISHED}.png")
    assert batches[1] == batches[0]
    assert batches[2] == batches[0]
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert [sorted(messages) for messages in skipped[1:]] == [sorted(skipped[0])] * 2
    assert len(skipped[0]) == 2
    assert f"dogs/{VANISHED}.png: No such file or directory" in skipped[0]
    assert open_sockets() == before
    assert shared_memory_of([os.getpid(), *pids]) == []


def test_more_workers_than_cores_are_no_reason_to_warn(photographs: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with loading(open_source(photographs), num_workers=len(os.sched_getaffinity(0)) + 1) as loader:
            loader.at(0)
    assert [str(warning.message) for warning in caught] == []


def test_workers_start_when_first_needed_and_are_spared_what_the_cache_holds(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = open_source(photographs), ImageCache(max_gib=1)
    with loading(source, num_workers=0) as loader:
        expected = [content(loader.at(step)) for step in range(8)]
    with loading(source, num_workers=1, cache=cache) as loader:
        assert worker_pids(loader) == []
        assert [content(loader.at(step)) for step in range(8)] == expected
        assert loader._processes is not None
        replaced = int(keyed_random.integers(5, "replacement", BROKEN, 0, upper=NUM_IMAGES))
        assert cache.get(source.name, BROKEN) is None
        assert cache.get(source.name, replaced) is not None
        requested: list[int] = []
        monkeypatch.setattr(
            workers, "_results", lambda chunk, real=workers._results: (requested.extend(chunk[0]), real(chunk))[1]
        )
        assert [content(loader.at(step)) for step in range(8)] == expected
        assert set(requested) == {BROKEN}


def test_batches_continue_when_all_images_are_cached(tmp_path: Path) -> None:
    for index in range(BATCH_SIZE):
        Image.new("RGB", (3, 1 + index)).save(tmp_path / f"{index}.png")
    source = open_source(tmp_path)
    with loading(source, num_workers=0) as loader:
        expected = [content(loader.at(step)) for step in range(6)]
    with loading(source, num_workers=1, cache=ImageCache(max_gib=1)) as loader:
        assert [content(loader.at(step)) for step in range(6)] == expected


def test_a_worker_imports_neither_networks_nor_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would cost each worker three more seconds."""
    source = SOURCE_THAT_FAILS.replace('f"fault at {index}"', '" ".join(__import__("sys").modules)')
    (tmp_path / "source_that_tells.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    import source_that_tells  # type: ignore[import-not-found]

    with (
        loading(source_that_tells.Faulty(str(tmp_path / "image.png")), num_workers=1) as loader,
        pytest.raises(RuntimeError) as raised,
    ):
        loader.at(0)
    imported = str(raised.value).split()
    assert "massl.data.loading.image_reader" in imported
    assert not {"timm", "triton", "torch._dynamo", "torch._inductor", "torchvision"} & set(imported)


SOURCE_THAT_FAILS = """
    from pathlib import Path
    from massl.data.sources.base import EncodedImage

    class Faulty:
        name, pixels, class_names = "faulty", None, None
        def __init__(self, image): self.image = image
        def __len__(self): return 20
        def label_of(self, index): return None
        def key_of(self, index): return str(index)
        def read(self, index):
            if index == 7 and not Path(self.image).with_suffix(".mended").exists():
                raise RuntimeError(f"fault at {index}")
            return EncodedImage(data=Path(self.image).read_bytes(), label=None, key="")
"""


def test_an_error_in_a_worker_reaches_the_caller_and_so_does_a_workers_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "image.png")
    (tmp_path / "source_that_fails.py").write_text(textwrap.dedent(SOURCE_THAT_FAILS))
    monkeypatch.syspath_prepend(tmp_path)  # of this process: the workers look for modules where it does
    import source_that_fails  # type: ignore[import-not-found]

    with loading(source_that_fails.Faulty(str(tmp_path / "image.png")), num_workers=2) as loader:
        with pytest.raises(RuntimeError, match="fault at 7") as raised:
            loader.at(0)
        assert "source_that_fails.py" in str(raised.value)  # where in the worker
        (tmp_path / "image.mended").touch()
        for pid in worker_pids(loader):
            # a scheduler sends it to all; the training process may want to finish its step
            os.kill(pid, signal.SIGTERM)
        assert len(loader.at(10).labels) == 20
        os.kill(worker_pids(loader)[0], signal.SIGKILL)
        with pytest.raises(DataError, match=r"data\.num_workers"):
            all(loader.at(step) for step in range(20, 1000))
        with pytest.raises(DataError, match=r"data\.num_workers"):
            loader.at(2000)


def test_closing_does_not_wait_for_a_worker_whose_read_never_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "image.png")
    source = SOURCE_THAT_FAILS.replace('raise RuntimeError(f"fault at {index}")', "__import__('time').sleep(10**6)")
    (tmp_path / "source_that_hangs.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    import source_that_hangs  # type: ignore[import-not-found]

    with loading(source_that_hangs.Faulty(str(tmp_path / "image.png")), num_workers=1) as loader:
        future = loader._assemblers.submit(loader._load, 0)
        deadline = time.monotonic() + 120
        assert loader._processes is not None
        while loader._processes._chunks is None and time.monotonic() < deadline:
            time.sleep(0.01)
        pids = worker_pids(loader)
        assert not future.done()
    assert not any(map(is_running, pids))


def test_too_little_shared_memory_is_answered_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE_THAT_FAILS.replace('f"fault at {index}"', '"unable to allocate shared memory(shm) for file"')
    (tmp_path / "source_without_memory.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    import source_without_memory  # type: ignore[import-not-found]

    with (
        loading(source_without_memory.Faulty(str(tmp_path / "image.png")), num_workers=1) as loader,
        pytest.raises(DataError, match=r"/dev/shm.*data\.num_workers"),
    ):
        loader.at(0)


def test_a_source_that_cannot_be_sent_is_refused_with_advice(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local:
        name, pixels, class_names = "local", None, None

        def __len__(self) -> int:
            return 4

        def read(self, index: int) -> EncodedImage:
            raise AssertionError

        def label_of(self, index: int) -> int | None:
            return None

        def key_of(self, index: int) -> str:
            return ""

    with (
        loading(Local(), num_workers=1) as loader,
        pytest.raises(DataError, match=r"local.*worker_kind threads"),
    ):
        loader.at(0)
    module = ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    Local.__module__, Local.__qualname__, module.Local = "only_here", "Local", Local  # type: ignore[attr-defined]
    with (
        loading(Local(), num_workers=1) as loader,
        pytest.raises(DataError, match="worker_kind threads"),
    ):
        loader.at(0)


# As a user writes it, without `if __name__ == "__main__"`.
SCRIPT = """
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    print("script runs", flush=True)
    sys.path.insert(0, sys.argv[1])  # massl need not be installed: the workers look for it where the script does
    import torch
    from massl.data.loading.loader import Loader
    from massl.data.sources import open_source
    loader = Loader(open_source(sys.argv[2]), order_at=lambda step: torch.arange(9, 29), seed=0, num_workers=2,
                    worker_kind="processes", max_side=999, on_skip=print)
    loader.at(0)
    try:
        print(*(worker.pid for worker in loader._processes._chunks._workers), flush=True)
        time.sleep(600)
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        loader.at(1)
        print("interrupted", flush=True)
    for step in range(10**9):
        loader.at(step)
"""


def test_a_plain_script_is_run_once_and_no_worker_outlives_it(photographs: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    package = Path(keyed_random.__file__).parents[1]
    temporary = Path(tempfile.mkdtemp())  # not tmp_path: the name of a socket has 107 bytes at most
    process = subprocess.Popen(
        [sys.executable, script, package, photographs],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Python's resource tracker reports what a killed process left behind
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "script runs\n"
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        assert process.stdout.readline() == "interrupted\n"
        process.kill()
        process.wait()
        deadline = time.monotonic() + 120
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_running, pids))
        assert process.stdout.read() == ""
    assert shared_memory_of([process.pid, *pids]) == []
    left = list(temporary.glob("pymp-*"))
    shutil.rmtree(temporary)
    assert len(left) == 1  # that of the process that was killed; the workers' are gone


def test_images_held_as_an_array_need_no_processes() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 5, 4, 3), dtype=np.uint8)
    source = ArraySource(name="array", pixels=pixels, labels=None, class_names=None, key_prefix="x")
    with loading(source, num_workers=2) as loader:
        assert torch.equal(loader.at(0).images.sizes, torch.tensor([[5, 4]]).repeat(9, 1))
        assert loader._processes is None
