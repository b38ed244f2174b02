"""A short trial of a recipe: steady speed, probes, and device memory. Used by plan, pretrain --minutes and compare.

The parts are those of a run, without its folder. Compiling, recording and the first steps are not timed. With a cache
of decoded images the first pass over them is slower than the later ones, so both are measured.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from massl import distributed
from massl.data.loading.cache import ImageCache
from massl.data.loading.gpu_decode import jpeg_decoder
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.order import EpochOrder
from massl.data.settings import DataSettings
from massl.data.sources import ImageSource
from massl.data.views import ViewSettings
from massl.methods import build_method
from massl.methods.base import MethodSettings
from massl.nn.backbone import BackboneSettings
from massl.planning.costs import Memory, Speed
from massl.training.execution import choose_execution
from massl.training.graphed_step import GraphedStep
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.probes import Probe, ProbeSettings
from massl.training.schedules import Schedules
from massl.training.settings import TrainerSettings
from massl.training.step import TrainingStep
from massl.training.view_maker import ViewMaker

_WARM_UP = {"cuda": 6, "cpu": 1}  # steps: a GPU runs three ordinary ones, records one and replays it
_SECONDS = {"cuda": 8.0, "cpu": 2.0}  # of one timed pass, about
_MOST_STEPS = {"cuda": 200, "cpu": 40}
_FEWEST_STEPS = {"cuda": 20, "cpu": 3}
# Seconds; on a CPU slower steps are timed on a part of the batch, in proportion to its images: ViT-Ti at 64 px takes
# 32, 25, 24 and 24 ms of a core for each of 8, 32, 64 and 128 images.
_SLOW_STEP = 0.7
_SMALLEST_PART = 8  # images
_BATCHES_AHEAD = 3  # that the loader keeps on the device while a step runs
_MEMORY_STEPS = 5  # enough to record a step and replay it once
_PROBE_IMAGES = {"cuda": 2048, "cpu": 32}


class TrialRecipe(Protocol):
    """The sections of a recipe."""

    @property
    def data(self) -> DataSettings: ...
    @property
    def views(self) -> ViewSettings: ...
    @property
    def backbone(self) -> BackboneSettings: ...
    @property
    def method(self) -> MethodSettings: ...
    @property
    def optimizer(self) -> OptimizerSettings: ...
    @property
    def trainer(self) -> TrainerSettings: ...
    @property
    def probes(self) -> ProbeSettings: ...


class _Steps:
    """The updates of a recipe, for batches of any size, without a run folder."""

    def __init__(self, recipe: TrialRecipe, *, device: torch.device) -> None:
        settings, bf16 = recipe.trainer, recipe.trainer.precision == "bf16"
        method = build_method(recipe.method, recipe.backbone, seed=settings.seed)
        method.check_views(recipe.views, name=recipe.method.name)
        self.method = method.to(device).train()
        self.method.set_activation_checkpointing(settings.activation_checkpointing)
        execution = choose_execution(
            self.method,
            kernels=settings.kernels,
            bf16=bf16,
            float32_stream=settings.residual == "fp32",
            cuda_graph=settings.cuda_graph,
            device=device,
        )
        optimizer = build_optimizer(self.method, recipe.optimizer)
        step = TrainingStep(method=self.method, parallel=self.method, optimizer=optimizer, bf16=bf16, device=device)
        self._step = GraphedStep(step) if execution.cuda_graph else step
        self._make_views = ViewMaker(recipe.views, seed=settings.seed, bf16=bf16, device=device)
        schedules = Schedules(
            optimizer=recipe.optimizer,
            ramps=recipe.method.ramps(),
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            steps_per_epoch=2,
        )
        # the middle of a run: what is frozen only at first is trained
        self.hyper = schedules.at(schedules.num_steps // 2)

    def __call__(self, images: ImageBatch, *, num_parts: int = 1) -> Tensor:
        size = len(images.indices) // num_parts
        views = (self._make_views(images.slice(part * size, (part + 1) * size), epoch=0) for part in range(num_parts))
        return self._step(views, self.hyper, num_parts=num_parts).loss


def measure_speed(recipe: TrialRecipe, source: ImageSource, device: torch.device, *, cached_share: float) -> Speed:
    """`cached_share`: of the images that fit data.cache_gib, so that later passes do not decode them."""
    kind, full, taken = device.type, recipe.trainer.batch_size, _taken(device)
    steps = _Steps(recipe, device=device)
    batch_size = full if kind == "cuda" else _batch_to_time(steps, recipe, source, device)
    num_parts = recipe.trainer.accumulation_steps if batch_size == full else 1

    def update(images: ImageBatch) -> None:
        steps(images, num_parts=num_parts)

    order = EpochOrder(len(source), batch_size=batch_size, seed=recipe.trainer.seed)
    images = _first_batch(recipe, source, device, batch_size)
    for _ in range(_WARM_UP[kind]):
        update(images)
    cache = ImageCache(max_gib=recipe.data.cache_gib) if cached_share > 0 else None
    first_pass, num_steps = _seconds_per_image(update, recipe, source, order.at, device, cache=cache)
    later = first_pass
    if cache is not None:  # the same images again, as a later epoch would meet them
        in_turn = order.steps_per_epoch if order.steps_per_epoch < num_steps else num_steps
        from_cache, _ = _seconds_per_image(
            update, recipe, source, lambda step: order.at(step % in_turn), device, cache=cache
        )
        # a cached image is never slower: if it looks so, other programs took the cores
        later = cached_share * min(from_cache, first_pass) + (1 - cached_share) * first_pass
    probe, num_probed = _time_probe(recipe, source, steps, device, cache)
    memory = None if taken is None else _peak_since(taken, device)
    return Speed(first_pass=first_pass, later=later, probe=probe, num_probed=num_probed, memory=memory)


def _taken(device: torch.device) -> Memory | None:
    """What others of this process hold on the GPU; the peak starts anew."""
    release_gpu(device)
    if device.type != "cuda":
        return None
    numbers = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return Memory(allocated=numbers[0] / 2**30, reserved=numbers[1] / 2**30)


def _peak_since(before: Memory, device: torch.device) -> Memory:
    numbers = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return Memory(allocated=numbers[0] / 2**30 - before.allocated, reserved=numbers[1] / 2**30 - before.reserved)


def measure_memory(recipe: TrialRecipe, source: ImageSource, device: torch.device) -> Memory:
    """The peak at the recipe's batch size, extrapolated from an eighth and a quarter of it; a GPU only."""
    parts, share = recipe.trainer.accumulation_steps, recipe.trainer.batch_size // distributed.world_size()
    wanted = share // parts
    sizes = [max(2, wanted // 8), max(4, wanted // 4)]
    peaks = [_peak(recipe, source, size, device) for size in sizes]
    if sizes[-1] >= wanted:
        return peaks[-1]

    def extrapolated(low: float, high: float) -> float:
        return low + (high - low) * (wanted - sizes[0]) / (sizes[1] - sizes[0])

    return Memory(
        allocated=extrapolated(peaks[0].allocated, peaks[1].allocated),
        reserved=extrapolated(peaks[0].reserved, peaks[1].reserved),
        probe=peaks[1].probe,
        probe_extra=peaks[1].probe_extra,
    )


def _peak(recipe: TrialRecipe, source: ImageSource, batch_size: int, device: torch.device) -> Memory:
    release_gpu(device)
    steps = _Steps(recipe, device=device)
    images = _first_batch(recipe, source, device, min(batch_size, len(source)))
    for _ in range(_MEMORY_STEPS):
        steps(images)
    torch.cuda.synchronize(device)
    ahead = _BATCHES_AHEAD * images.images.pixels.nbytes
    allocated = torch.cuda.max_memory_allocated(device) + ahead
    reserved = torch.cuda.max_memory_reserved(device) + ahead
    del images
    torch.cuda.reset_peak_memory_stats(device)
    staying, probe = torch.cuda.memory_allocated(device), 0
    if recipe.probes.every_epochs > 0:
        _probe(recipe, source, device, None, most=_PROBE_IMAGES["cuda"]).measure(steps.method, steps.hyper)
        probe = torch.cuda.max_memory_allocated(device)
    del steps
    release_gpu(device)
    gib = [number / 2**30 for number in (allocated, reserved, probe, max(0, probe - staying))]
    return Memory(allocated=gib[0], reserved=gib[1], probe=gib[2], probe_extra=gib[3])


def release_gpu(device: torch.device) -> None:
    """Give back what a trial took, and forget its peak."""
    gc.collect()  # networks and optimizer refer to each other
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _first_batch(recipe: TrialRecipe, source: ImageSource, device: torch.device, batch_size: int) -> ImageBatch:
    order = EpochOrder(len(source), batch_size=batch_size, seed=recipe.trainer.seed)
    with _open_loader(recipe, source, order.at, device, cache=None, num_workers=0) as loader:
        return loader.at(0)


def _batch_to_time(steps: _Steps, recipe: TrialRecipe, source: ImageSource, device: torch.device) -> int:
    """On a CPU: the batch, or the power of two below it whose step is not slow."""
    full = recipe.trainer.batch_size
    size = min(full, _SMALLEST_PART)
    images, seconds = _first_batch(recipe, source, device, size), list[float]()
    while len(seconds) < 2 or (len(seconds) < 4 and sum(seconds) < 1.0):  # the first one is slower
        start = time.perf_counter()
        steps(images)
        seconds.append(time.perf_counter() - start)
    per_image = min(seconds) / size
    while size * 2 <= full and per_image * size * 2 <= _SLOW_STEP:
        size *= 2
    return full if size * 2 > full else size


def _seconds_per_image(
    update: Callable[[ImageBatch], None],
    recipe: TrialRecipe,
    source: ImageSource,
    order_at: Callable[[int], Tensor],
    device: torch.device,
    *,
    cache: ImageCache | None,
) -> tuple[float, int]:
    """Of steps with a loader beside them, and how many steps were timed.

    The clock starts when the first batch has come: what was loaded ahead is then next to nothing.
    """
    kind, num_images, done = device.type, 0, 0
    with _open_loader(recipe, source, order_at, device, cache=cache, num_workers=recipe.data.num_workers) as loader:
        images = loader.at(0)
        _wait_for(device)
        start = time.perf_counter()
        while done < _MOST_STEPS[kind]:
            if done:
                images = loader.at(done)
            update(images)
            done += 1
            num_images += len(images.indices)
            if done >= _FEWEST_STEPS[kind] and time.perf_counter() - start > _SECONDS[kind]:
                break
        _wait_for(device)
        return (time.perf_counter() - start) / num_images, done


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_probe(
    recipe: TrialRecipe, source: ImageSource, steps: _Steps, device: torch.device, cache: ImageCache | None
) -> tuple[float, int]:
    """Seconds an image takes in a probe, and how many images a probe has; (0, 0) without probes."""
    if recipe.probes.every_epochs == 0:
        return 0.0, 0
    whole = _probe(recipe, source, device, cache)
    part = _probe(recipe, source, device, cache, most=_PROBE_IMAGES[device.type])
    part.measure(steps.method, steps.hyper)  # the first one reads and decodes
    start = time.perf_counter()
    part.measure(steps.method, steps.hyper)
    _wait_for(device)
    return (time.perf_counter() - start) / part.num_images, whole.num_images


def _probe(
    recipe: TrialRecipe, source: ImageSource, device: torch.device, cache: ImageCache | None, *, most: int | None = None
) -> Probe:
    """The probe of the recipe, with at most `most` images of each kind."""
    settings = recipe.probes
    if most is not None:
        fewer = {"max_database": min(most, settings.max_database), "max_queries": min(most, settings.max_queries)}
        settings = settings.model_copy(update=fewer)
    return Probe(
        settings,
        data=recipe.data,
        views=recipe.views,
        training_source=source,
        seed=recipe.trainer.seed,
        device=device,
        cache=cache,
        on_skip=lambda message, name: None,
    )


@contextmanager
def _open_loader(
    recipe: TrialRecipe,
    source: ImageSource,
    order_at: Callable[[int], Tensor],
    device: torch.device,
    *,
    cache: ImageCache | None,
    num_workers: int,
) -> Iterator[Loader]:
    loader = Loader(
        source,
        order_at=order_at,
        seed=recipe.trainer.seed,
        num_workers=num_workers,
        worker_kind=recipe.data.worker_kind,
        max_side=recipe.data.max_side,
        device=device,
        batch_decoder=jpeg_decoder(recipe.data.decoder, device),
        cache=cache,
        on_skip=lambda message: None,
    )
    try:
        yield loader
    finally:
        loader.close()
