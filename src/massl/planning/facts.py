"""What is known before a run: the images, from a keyed sample of their headers, and the machine."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from massl import keyed_random
from massl.data.keys import stored_key
from massl.data.loading.decode import UnreadableImage, decode, image_size
from massl.data.sources import ImageSource, label_doubt

NUM_SAMPLED = 256
_NUM_THREADS = 4
_UNLIMITED = 2**60  # cgroups write the largest number they have


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What a keyed sample says about a source."""

    num_images: int
    sizes: tuple[tuple[int, int], ...]  # height, width of the sampled images that have a header
    num_sampled: int
    unreadable: tuple[str, ...] = ()  # key and reason of sampled images without a header
    num_classes: int = 0  # 0: no labels, or doubtful ones
    is_array: bool = False  # pixels in memory: nothing to decode
    num_probed: int = 0  # further images, which only the probes read

    @property
    def side(self) -> int:
        """The median of the shorter sides."""
        return int(statistics.median(min(size) for size in self.sizes))

    @property
    def typical_size(self) -> str:
        height, width = (int(statistics.median(size[axis] for size in self.sizes)) for axis in (0, 1))
        return f"{width} x {height} px"

    def decoded_bytes(self, max_side: int) -> float:
        """Of one decoded image on average, its longer side reduced to `max_side`."""
        shrunk = [3 * height * width * min(1.0, max_side / max(height, width)) ** 2 for height, width in self.sizes]
        return statistics.fmean(shrunk)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The machine, as one process of the run sees it."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_gib: float  # of the GPU; on a CPU that of the host
    num_cores: int  # for this process
    host_gib: float  # for this process
    num_processes: int = 1
    has_bf16: bool = True  # matrix products in bfloat16, from Ampere on


def look_at_images(source: ImageSource) -> ImageFacts:
    """Read the headers of a few hundred images, always the same ones."""
    order = keyed_random.permutation(len(source), 0, "header sample")[:NUM_SAMPLED].tolist()

    def size_or_reason(index: int) -> tuple[int, int] | str:
        try:
            return image_size(source.read(index))
        except UnreadableImage as error:
            return f"{stored_key(source.key_of(index))}: {error}"
        except OSError as error:
            return f"{stored_key(source.key_of(index))}: {error.strerror or error}"

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = list(pool.map(size_or_reason, order))
    sizes = tuple(size for size in found if not isinstance(size, str))
    return ImageFacts(
        num_images=len(source),
        sizes=sizes or ((224, 224),),  # training will name the unreadable images
        num_sampled=len(order),
        unreadable=tuple(reason for reason in found if isinstance(reason, str)),
        num_classes=0 if label_doubt(source) else len(source.class_names or ()),
        is_array=source.pixels is not None,
    )


def find_unreadable(source: ImageSource, *, max_side: int, seconds: float) -> tuple[int, list[str]]:
    """Decode sampled images for some seconds: how many were tried, and key and reason of those that fail."""
    order = keyed_random.permutation(len(source), 0, "header sample")[:NUM_SAMPLED].tolist()
    end = time.monotonic() + seconds

    def problem(index: int) -> str | None:
        if time.monotonic() > end:
            return None
        tried.append(index)
        with contextlib.suppress(MemoryError):
            try:
                decode(source.read(index), max_side=max_side)
            except UnreadableImage as error:
                return f"{stored_key(source.key_of(index))}: {error}"
            except OSError as error:
                return f"{stored_key(source.key_of(index))}: {error.strerror or error}"
        return None

    tried: list[int] = []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        problems = list(filter(None, pool.map(problem, order)))
    return len(tried), problems


def look_at_device(device: torch.device) -> DeviceFacts:
    """Totals, not what happens to be free: all processes of a run must choose the same."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", str(num_processes)))
    host_gib = host_memory_gib() / on_this_machine
    is_gpu = device.type == "cuda"
    return DeviceFacts(
        kind="cuda" if is_gpu else "cpu",
        name=torch.cuda.get_device_name(device) if is_gpu else "CPU",
        memory_gib=torch.cuda.get_device_properties(device).total_memory / 2**30 if is_gpu else host_gib,
        num_cores=max(1, _usable_cores() // on_this_machine),
        host_gib=host_gib,
        num_processes=num_processes,
        has_bf16=is_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
    )


def _usable_cores() -> int:
    """Those that this process may use, where the system tells (Linux)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_share(*, seconds: float = 0.2) -> float:
    """Share of all cores that other programs use while this process sleeps; 0 where Linux does not tell."""

    def ticks() -> tuple[int, int]:  # idle, all
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return numbers[3] + numbers[4], sum(numbers)

    try:
        idle_before, all_before = ticks()
        time.sleep(seconds)
        idle, total = ticks()
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - (idle - idle_before) / max(1, total - all_before)


def host_memory_gib() -> float:
    """The memory of this machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _container_bytes("memory.max", "memory/memory.limit_in_bytes")) / 2**30


def free_memory_gib(device: torch.device, *, read: Callable[[], str] | None = None) -> float:
    """What this process could still take: of the GPU, or of the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free) / 2**30
    try:
        lines = (read or Path("/proc/meminfo").read_text)().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return host_memory_gib()
    return min(available / 2**30, host_memory_gib())


def _container_bytes(*files: str) -> int:
    for name in files:
        with contextlib.suppress(OSError, ValueError):
            return min(_UNLIMITED, int((Path("/sys/fs/cgroup") / name).read_text()))
    return _UNLIMITED
