"""How the benchmarks of speed and memory call massl: if the library's interface changes, only this file does."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from shapes import ViewShapes
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from massl.data.evaluation.views import CentreView
from massl.data.loading.gpu_decode import jpeg_decoder
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.order import EpochOrder
from massl.data.sources import open_source
from massl.data.views import ViewBatch, ViewSettings, make_views
from massl.evaluations.feature_cache import read_rows as read_rows
from massl.evaluations.feature_cache import write_rows as write_rows
from massl.evaluations.named_features import read_feature
from massl.methods import METHODS, build_method
from massl.methods.base import MethodSettings
from massl.methods.massl import MaSSLSettings
from massl.nn import ema
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.memory import MemoryBank, MemorySettings
from massl.ops import kernel_fit
from massl.ops.image_ops import RaggedImages, normalise
from massl.ops.memory_attention import memory_loss
from massl.ops.scoring.kmeans import spherical_kmeans
from massl.ops.scoring.linear_heads import matrix_products, new_heads, sgd_step_
from massl.ops.scoring.neighbours import cosine_topk
from massl.training import optimizers, step_guard
from massl.training.checkpoint import CheckpointStore, load_checkpoint
from massl.training.environment import describe_environment
from massl.training.optimizers import OptimizerSettings
from massl.training.run_folder import RunFolder
from massl.training.schedules import Schedules
from massl.training.settings import TrainerSettings
from massl.training.trainer import Trainer
from massl.weights.tensor_files import read_tensors as read_tensors
from massl.weights.tensor_files import write_tensors as write_tensors

METHOD_NAMES = tuple(METHODS)
KERNELS = ("fused", "compiled", "plain")  # trainer.kernels
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.07
_SEED = 0
_MAX_IMAGE_SIDE = 1024  # pixels, the recipes' default


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What is trained in a benchmark."""

    method: str  # one of METHOD_NAMES
    model: str  # a timm name
    batch_size: int
    views: ViewShapes
    num_rows: int  # K: of the memory; prototypes where there is none
    block_size: int  # N_b
    drop_path: float
    kernels: str  # one of KERNELS
    graph: bool
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.method} {self.model} N={self.batch_size} {self.kernels}{' graph' if self.graph else ''}"


class Training:
    """A real trainer whose steps are run one by one, without its loop, logs, probes and checkpoints."""

    def __init__(self, spec: StepSpec) -> None:
        shapes = spec.views
        local_size = {"local_size": shapes.local_size} if shapes.num_local else {}
        views = ViewSettings(
            num_global=shapes.num_global, global_size=shapes.global_size, num_local=shapes.num_local, **local_size
        )
        precision = "bf16" if spec.device.type == "cuda" else "fp32"
        choices = {"precision": precision, "kernels": spec.kernels, "cuda_graph": spec.graph}
        settings = TrainerSettings.model_validate({"batch_size": spec.batch_size, **choices})
        method_settings = _method_settings(spec)
        backbone = BackboneSettings(name=spec.model, drop_path_rate=spec.drop_path)
        method = build_method(method_settings, backbone, seed=_SEED)
        # long schedules: rates and temperatures are those of an early step of a real run
        self._schedules = Schedules(
            optimizer=OptimizerSettings(),
            ramps=method_settings.ramps(),
            batch_size=spec.batch_size,
            epochs=settings.epochs,
            steps_per_epoch=10_000,
        )
        self._trainer = Trainer(
            settings,
            method=method,
            loader=_NO_LOADER,
            views=views,
            schedules=self._schedules,
            probe=None,
            folder=RunFolder(Path(os.devnull), settings),  # nothing is written
            crop_ratio=1.0,
            device=spec.device,
        )

    @property
    def networks(self) -> str:
        """What computes the networks, and the reason if it is not what was requested."""
        return self._trainer.execution.networks

    @property
    def is_graph(self) -> bool:
        return self._trainer.execution.cuda_graph

    def on_views(self, views: ViewBatch, number: int) -> None:
        """One whole update from existing views."""
        self._trainer.step(iter([views]), self._schedules.at(number), num_parts=1)

    def on_images(self, images: ImageBatch, number: int) -> None:
        """One whole update from decoded images, exactly as in the trainer's loop."""
        self._trainer._update(images, self._schedules.at(number))

    def views_of(self, images: ImageBatch, number: int) -> ViewBatch:
        """The views that `on_images` would train on."""
        return self._trainer._make_views(images, epoch=self._schedules.at(number).epoch)


def _method_settings(spec: StepSpec) -> MethodSettings:
    if spec.method == "massl":
        return MaSSLSettings(memory=MemorySettings(num_rows=spec.num_rows, block_size=spec.block_size))
    settings = METHODS[spec.method].settings
    prototypes = {"prototypes": {"num_prototypes": spec.num_rows}}
    return settings.model_validate(prototypes if "prototypes" in settings.model_fields else {})


_NO_LOADER: Any = None  # only the trainer's own loop uses its loader


def synthetic_views(spec: StepSpec) -> ViewBatch:
    """Random normal pixels, like normalised views and in their dtype; zeros would let the card clock higher."""
    generator = torch.Generator(spec.device).manual_seed(_SEED)
    dtype = torch.bfloat16 if spec.device.type == "cuda" else torch.float32

    def pixels(num_views: int, size: int) -> Tensor:
        return torch.randn(num_views, spec.batch_size, 3, size, size, device=spec.device, generator=generator).to(dtype)

    return ViewBatch(
        global_views=pixels(spec.views.num_global, spec.views.global_size),
        local_views=pixels(spec.views.num_local, spec.views.local_size) if spec.views.num_local else None,
        image_indices=torch.arange(spec.batch_size),
        labels=torch.arange(spec.batch_size) % 10,
    )


def smooth_images(num_images: int, *, height: int, width: int, device: torch.device) -> RaggedImages:
    """Noise of 20 grey levels on smooth colours."""
    generator = torch.Generator().manual_seed(_SEED)
    colours = 235 * torch.rand(num_images, 3, 12, 16, generator=generator)
    noise = torch.randint(0, 20, (3, height, width), generator=generator)
    smooth = (interpolate(colour[None], size=(height, width), mode="bilinear")[0] for colour in colours)
    return RaggedImages.from_list([(image + noise).byte() for image in smooth]).to(device)


def view_step(images: RaggedImages, shapes: ViewShapes) -> Callable[[int], ViewBatch]:
    """All views of the images, drawn anew at each step."""
    local_size = {"local_size": shapes.local_size} if shapes.num_local else {}
    settings = ViewSettings(
        num_global=shapes.num_global, global_size=shapes.global_size, num_local=shapes.num_local, **local_size
    )
    indices = torch.arange(len(images))
    return lambda number: make_views(images, indices, settings, seed=_SEED, epoch=number)


def memory_loss_step(student: Tensor, teacher: Tensor, *, num_rows: int, block_size: int) -> Callable[[int], object]:
    """Memory blocks, loss and gradient, as in the method; inputs [V, N, D] and [T, N, D]."""
    with torch.device(student.device):  # draw the initial rows there: a million of them take 2 GiB of keys
        memory = MemoryBank(num_rows, student.shape[-1], seed=_SEED)
    dtype = torch.bfloat16 if student.device.type == "cuda" else torch.float32

    def step(number: int) -> None:
        loss = memory_loss(
            student,
            teacher,
            memory.random_blocks(block_size, (_SEED, number), dtype),
            student_temperature=STUDENT_TEMPERATURE,
            teacher_temperature=TEACHER_TEMPERATURE,
            operand_dtype=dtype,
        )
        torch.autograd.grad(loss, student)

    return step


def unit_rows(*shape: int, device: torch.device, seed: int) -> Tensor:
    return normalize(torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed)), dim=-1)


# [Q, D], [M, D] -> [Q, k], [Q, k]
def nearest(queries: Tensor, database: Tensor, num_neighbours: int) -> tuple[Tensor, Tensor]:
    return cosine_topk(queries, database, num_neighbours=num_neighbours)


DECODERS: tuple[Literal["cpu", "gpu"], ...] = ("cpu", "gpu")  # data.decoder
WorkerKind = Literal["threads", "processes"]
WORKER_KINDS: tuple[WorkerKind, ...] = ("threads", "processes")  # data.worker_kind
OpenLoader = AbstractContextManager[Callable[[int], ImageBatch]]


@contextmanager
def open_loader(
    folder: Path,
    *,
    batch_size: int,
    num_workers: int,
    worker_kind: WorkerKind,
    decoder: Literal["cpu", "gpu"],
    device: torch.device,
) -> Iterator[Callable[[int], ImageBatch]]:
    """Gives at(step): the decoded images of a step; the next steps are read ahead."""
    source = open_source(folder)
    if device.type == "cuda":
        torch.set_num_threads(1)  # as massl.pretrain does with a GPU

    def refuse(message: str) -> None:
        raise SystemExit(f"an image cannot be read: {message}")

    loader = Loader(
        source,
        order_at=EpochOrder(len(source), batch_size, _SEED).at,
        seed=_SEED,
        num_workers=num_workers,
        worker_kind=worker_kind,
        max_side=_MAX_IMAGE_SIDE,
        device=device if device.type == "cuda" else None,
        batch_decoder=jpeg_decoder(decoder, device),
        on_skip=refuse,
    )
    try:
        yield loader.at
    finally:
        loader.close()


def environment(device: torch.device) -> dict[str, object]:
    """Card, versions and commit."""
    found = describe_environment(device)
    return {
        "device": found["device"],
        "torch": torch.__version__,
        "python": found["python"],
        "massl commit": found["massl_commit"],
    }


# ---- evaluations -----------------------------------------------------------------------------------------------------


def evaluated_backbone(model: str, *, device: torch.device) -> Backbone:
    """Random weights as large as trained ones: newly initialised blocks barely change the residual stream."""
    backbone = build_backbone(BackboneSettings(name=model), seed=_SEED).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(_SEED)
    for parameter in backbone.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return backbone.to(device)


# [B, 3, H, W] -> [B, D]
def features(backbone: Backbone, views: Tensor, feature: str, precision: Literal["fp32", "bf16"]) -> Tensor:
    with torch.inference_mode():
        return read_feature(backbone, views, feature, precision=precision)


def centre_views(images: RaggedImages, *, size: int) -> Tensor:  # -> [B, 3, size, size], normalised
    settings = ViewSettings()
    (views,) = CentreView(size=size).apply(images, torch.arange(len(images)))
    return normalise(views, settings.mean, settings.std)


def stored_images(num_images: int, *, height: int, width: int, device: torch.device) -> RaggedImages:
    generator = torch.Generator(device).manual_seed(_SEED)
    num_pixels = 3 * height * width
    return RaggedImages(
        pixels=torch.randint(0, 256, (num_images * num_pixels,), dtype=torch.uint8, device=device, generator=generator),
        offsets=torch.arange(num_images) * num_pixels,
        sizes=torch.tensor([height, width]).expand(num_images, 2).contiguous(),
    )


def probe_step(
    num_heads: int, *, num_classes: int, dim: int, allow_tf32: bool, device: torch.device
) -> Callable[[Tensor, Tensor], None]:
    """One SGD step of `num_heads` linear classifiers on a batch of features and labels."""
    heads = new_heads(
        0.01 * torch.randn(num_heads, num_classes, dim, generator=torch.Generator().manual_seed(_SEED)).to(device)
    )
    rates = torch.logspace(-4, 0, num_heads, device=device)

    def step(rows: Tensor, labels: Tensor) -> None:
        with matrix_products(allow_tf32=allow_tf32):
            sgd_step_(heads, rows, labels, rates=rates)

    return step


def clusters(rows: Tensor, *, num_clusters: int, num_iterations: int, num_restarts: int) -> float:
    """The final objective of k-means."""
    return spherical_kmeans(
        rows,
        num_clusters=num_clusters,
        num_iterations=num_iterations,
        num_restarts=num_restarts,
        key=("benchmark", _SEED),
    ).objectives[-1]


@contextmanager
def update_by(name: Literal["kernels", "torch"]) -> Iterator[None]:
    """Whether steps inside update weights and teacher by massl's kernels or by torch's fused and foreach functions."""
    before = kernel_fit.fits_update_kernels

    def never(_: object) -> bool:
        return False

    chosen = before if name == "kernels" else never
    ema.fits_update_kernels = optimizers.fits_update_kernels = step_guard.fits_update_kernels = chosen
    try:
        yield
    finally:
        ema.fits_update_kernels = optimizers.fits_update_kernels = step_guard.fits_update_kernels = before


def untrained_weights(model: str) -> dict[str, Tensor]:
    """The weights of a timm model under its own keys."""
    return dict(build_backbone(BackboneSettings(name=model), seed=_SEED).model.state_dict())


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint into the folder of `path`, under the name of its step."""
    CheckpointStore(path.parent, keep_last=1).save(state["step"], state, milestone_every=0)


def load_checkpoint_file(path: Path) -> dict[str, Any]:
    return load_checkpoint(path)
