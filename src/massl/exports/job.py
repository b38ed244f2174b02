"""What is exported: a trained backbone, the image size it is written for, and how its images are prepared."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from massl.config import MasslError
from massl.data.evaluation.views import CentreView, whole_patches
from massl.data.sources.demo import open_demo
from massl.nn.backbone import Backbone
from massl.nn.positions import model_positions
from massl.nn.transformer.tokens import is_transformer
from massl.ops.image_ops import RaggedImages, normalise
from massl.weights.models import LoadedModel

Features = Callable[[Tensor], Tensor]  # [B, 3, H, W] -> [B, D]
_NOT_OF_TIMM = ("model_name", "num_classes", "stem", "pretrained", "position_resampling")
_NUM_CHECKED = 4  # images of the check
_MAX_RESIZED = 2**16  # pixels of a side before the centre crop


class ExportError(MasslError, ValueError):
    """A model cannot be exported in this way; the message names another one."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How an image becomes the input of the network."""

    size: tuple[int, int]  # height, width
    resized: int | None  # shorter side before the centre crop; None: the whole image is resized to `size`
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def for_timm(self) -> dict[str, Any]:
        """The entries of timm's `pretrained_cfg`, which `create_transform` takes, too."""
        crop = 1.0 if self.resized is None else self.size[0] / self.resized
        if self.resized is not None and math.floor(self.size[0] / crop) != self.resized:  # as timm computes it
            crop = math.nextafter(crop, 0.0)
        return {
            "input_size": [3, *self.size],
            "interpolation": "bicubic",
            "crop_pct": crop,
            "crop_mode": "squash" if self.resized is None else "center",
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def for_transformers(self) -> dict[str, Any]:
        """preprocessor_config.json of transformers: of its processors, BiT's resizes, then crops."""
        height, width = self.size
        whole = {"height": height, "width": width}
        return {
            "image_processor_type": "BitImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": whole if self.resized is None else {"shortest_edge": self.resized},
            "resample": 3,  # Pillow's number of bicubic
            "do_center_crop": self.resized is not None,
            "crop_size": whole,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }

    def as_plain(self) -> dict[str, Any]:
        """preprocess.json, for programs of the user's own."""
        return {
            "channels": "RGB",
            "resize_shorter_side": self.resized,
            "interpolation": "bicubic",
            "antialias": True,
            "size": list(self.size),
            "crop": "none" if self.resized is None else "center",
            "scale": 1 / 255,
            "mean": list(self.mean),
            "std": list(self.std),
            "layout": "NCHW",
            "dtype": "float32",
        }


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """A backbone, and the size of the images that its folder is written for."""

    model: LoadedModel
    size: tuple[int, int]  # height, width

    @property
    def backbone(self) -> Backbone:
        return self.model.backbone

    @property
    def architecture(self) -> str:
        """timm's name, without the tag of published weights."""
        return self.backbone.model_name.partition(".")[0]

    @property
    def has_small_stem(self) -> bool:
        return self.backbone.timm_arguments.get("stem") == "small"

    @property
    def patch(self) -> int | None:
        return self.backbone.patch_size if self.backbone.is_transformer else None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at the export's size."""
        side = self.backbone.patch_size
        return self.size[0] // side, self.size[1] // side

    @property
    def preparation(self) -> Preparation:
        height, width = self.size
        resized = round(height / self.model.crop_ratio) if height == width else None
        return Preparation(size=self.size, resized=resized, mean=self.model.mean, std=self.model.std)

    def timm_options(self) -> dict[str, Any]:
        """The arguments of timm.create_model beside the name, as they were in training."""
        arguments = self.backbone.timm_arguments
        options = {key: value for key, value in arguments.items() if key not in _NOT_OF_TIMM and value is not None}
        return {"num_classes": 0, **options}

    def tensors(self) -> dict[str, Tensor]:
        """The weights under timm's names."""
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self.backbone.model.state_dict().items()}

    def positions(self) -> Tensor | None:  # [1, prefix + patches, D]
        """Position embeddings at the export's size, by the rule of training; None: the model has none."""
        model = self.backbone.model
        return model_positions(model, *self.grid) if is_transformer(model) else None

    def other_size(self) -> tuple[int, int]:
        """A smaller or larger square size: what happens there is tested."""
        step = self.patch or 32
        half = max(self.size) // 2 // step * step
        return (half, half) if half >= 2 * step else (2 * max(self.size), 2 * max(self.size))

    def inputs(self, size: tuple[int, int]) -> Tensor:  # -> [B, 3, *size]
        """Some bundled photographs, prepared for the network."""
        photos = torch.from_numpy(open_demo("test", name="demo:test").pixels[:_NUM_CHECKED].copy())  # [B, H, W]
        images = RaggedImages.from_list([photo.expand(3, -1, -1) for photo in photos])
        (square,) = CentreView(size=max(size), crop_ratio=1.0).apply(images, torch.zeros(_NUM_CHECKED))
        top, left = (square.shape[2] - size[0]) // 2, (square.shape[3] - size[1]) // 2
        return normalise(square[:, :, top : top + size[0], left : left + size[1]], self.model.mean, self.model.std)


def chosen_size(model: LoadedModel, image_size: str) -> tuple[int, int]:
    """Height and width from "96" or "96x160"; the training size if nothing is given."""
    if model.image_size > _MAX_RESIZED * model.crop_ratio:
        raise ExportError(
            f"{model.name} has the crop ratio {model.crop_ratio:g}: libraries would enlarge images to more than "
            f"{_MAX_RESIZED:,} px before they crop; such a model cannot be exported"
        )
    if not image_size:
        return model.image_size, model.image_size
    parts = image_size.lower().split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and 0 < int(part) <= 8192 for part in parts):
        raise ExportError(f"--image_size is {image_size!r}; give pixels, as in 96, or height x width, as in 96x160")
    patch = model.backbone.patch_size if model.backbone.is_transformer else None
    height, width = (whole_patches(int(part), patch, option="--image_size") for part in (parts[0], parts[-1]))
    return height, width


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a writer made of a job, for the model card."""

    library: str  # as the Hub names it
    snippet: str  # Python that opens the folder, with {folder} for its name and {image} for a photograph
    sizes: str  # which image sizes it takes, in words
    difference: float  # largest one between its features and ours


@torch.inference_mode()
def check_features(job: ExportJob, opened: Features, sizes: Sequence[tuple[int, int]], *, tolerance: float) -> float:
    """Largest difference between the opened folder's features and ours; an error if it is more than rounding."""
    largest = 0.0
    for size in sizes:
        images = job.inputs(size)
        if not takes_size(job, size):
            raise ExportError(f"{job.architecture} takes no images of {size[0]} x {size[1]} px; omit --image_size")
        ours, theirs = job.backbone(images).pooled, opened(images)
        difference = float((ours - theirs).abs().max()) if theirs.shape == ours.shape else math.inf
        if not difference <= tolerance * max(1.0, float(ours.abs().max())):
            raise ExportError(
                f"the exported model gives other features at {size[0]} x {size[1]} px (largest difference "
                f"{difference:.2g}), so nothing was written. Choose another --to, and please report this model"
            )
        largest = max(largest, difference)
    return largest


@torch.inference_mode()
def takes_size(job: ExportJob, size: tuple[int, int]) -> bool:
    """Whether the network itself takes images of this size; Swin, for example, takes one size only."""
    try:
        job.backbone(job.inputs(size))
    except Exception:  # each architecture raises its own errors
        return False
    return True


@contextmanager
def opening(library: str) -> Iterator[None]:
    """An error of a library while it opens the folder is told as a reason for another way."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # each library raises its own errors
        reason = str(error).strip().partition("\n")[0][:200]
        raise ExportError(f"{library} does not open this model ({reason}); choose another --to") from error


@torch.inference_mode()
def relative_difference(job: ExportJob, opened: Features, size: tuple[int, int]) -> float:
    """How far the opened folder's features are from ours at a size it was not written for: |a - b| / |b|."""
    images = job.inputs(size)
    ours = job.backbone(images).pooled
    return float((opened(images) - ours).norm() / ours.norm())


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    path.write_bytes(content)  # safetensors itself writes files that only their owner can read
