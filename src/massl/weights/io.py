"""Backbone files: safetensors with timm's keys, and the arguments that build the model in the metadata.

Files of other projects are opened here too; key_maps.py interprets their entries.
"""

import argparse
import json
import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from massl.config import MasslError
from massl.data.evaluation.views import PUBLISHED_CROP_RATIO, whole_patches
from massl.nn.any_size import for_any_size, for_one_size
from massl.nn.backbone import create_timm_model
from massl.nn.positions import RESAMPLING_RULE
from massl.weights.transform import ImageTransform

BACKBONE_FILE = "backbone.safetensors"


class WeightsError(MasslError, ValueError):
    """A weights file is missing or unsuitable; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class BackboneContent:
    """The content of a file written by massl."""

    tensors: dict[str, Tensor]  # under timm's keys
    timm_arguments: dict[str, Any]  # these build the empty model
    mean: tuple[float, float, float]  # of the training images
    std: tuple[float, float, float]
    image_size: int | None  # side of the training views; None in older files
    crop_ratio: float  # centre crop / shorter side of the run's probes; older files: the published one


class LoadedBackbone(NamedTuple):
    model: nn.Module  # a timm model in eval mode
    transform: ImageTransform  # an image -> its input [3, S, S]


def backbone_bytes(
    model: nn.Module,
    *,
    timm_arguments: Mapping[str, Any],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    image_size: int,
    crop_ratio: float = PUBLISHED_CROP_RATIO,
) -> bytes:
    """The file content for a timm model: always the same for the same model."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    facts = {
        "timm": dict(timm_arguments),
        "mean": mean,
        "std": std,
        "image_size": image_size,
        "crop_ratio": crop_ratio,
        "position_resampling": RESAMPLING_RULE,
    }
    metadata = {"format": "pt", **{name: json.dumps(fact) for name, fact in facts.items()}}
    return _with_sorted_metadata(safetensors.torch.save(tensors, metadata))


def _with_sorted_metadata(content: bytes) -> bytes:
    """safetensors writes the metadata in a random order."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[end:]


def load_backbone(run: str | Path, *, image_size: int | None = None) -> LoadedBackbone:
    """The trained teacher backbone of a run (its folder or .safetensors file), and the transform of its images.

    The model is a timm model in eval mode, the transform turns an image (path, Pillow image or uint8 array [H, W, 3])
    into its input [3, S, S], as `massl embed` does. S is the size of the training images, or `image_size`; the model is
    then a plain one for this size. Otherwise vision transformers accept any multiple of the patch.
    """
    if image_size is not None and image_size < 1:
        raise WeightsError(f"image_size is {image_size}; give the side of the images in pixels")
    path = backbone_path(run)
    content = backbone_content(path, *read_safetensors(path))
    if content is None:
        raise WeightsError(f"{path} was not written by massl: it does not name its timm model")
    arguments = dict(content.timm_arguments)
    model = create_timm_model({**arguments, "dynamic_img_size": True} if "pos_embed" in content.tensors else arguments)
    load_strictly(model, content.tensors, origin=str(path))
    size = image_size or content.image_size or own_image_size(model)
    if image_size is not None and isinstance(model, VisionTransformer):
        whole_patches(image_size, int(model.patch_embed.patch_size[0]), option="image_size")
        model = for_one_size(model, arguments, image_size)
    else:
        model = for_any_size(model)
    describe_images(model, content, image_size=size)
    transform = ImageTransform(image_size=size, crop_ratio=content.crop_ratio, mean=content.mean, std=content.std)
    return LoadedBackbone(model.eval(), transform)


def describe_images(model: nn.Module, content: BackboneContent, *, image_size: int) -> None:
    """Store how images are prepared where timm keeps it for its published weights."""
    config: Any = model.default_cfg
    config.update(
        input_size=(3, image_size, image_size),
        crop_pct=content.crop_ratio,
        mean=content.mean,
        std=content.std,
        interpolation="bicubic",
    )


def own_image_size(model: nn.Module) -> int:
    """Side of the images that the model was built for."""
    if isinstance(model, VisionTransformer) and model.patch_embed.grid_size is not None:
        return int(model.patch_embed.grid_size[0] * model.patch_embed.patch_size[0])
    config: Any = model.default_cfg
    return int(config["input_size"][-1])


def backbone_path(run: str | Path) -> Path:
    """The backbone file of a run's folder, or the file itself; raises if it does not exist."""
    path = Path(run).expanduser()
    if path.is_dir():
        path = path / BACKBONE_FILE
    if not path.is_file():
        raise WeightsError(
            f"{path} does not exist; give the folder of a massl run that has saved a checkpoint, or its {BACKBONE_FILE}"
        )
    return path


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a .safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return safetensors.torch.load_file(path), metadata
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error


def backbone_content(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> BackboneContent | None:
    """The content of a file written by massl; None for other files."""
    if "timm" not in metadata:
        return None
    try:
        timm_arguments, mean, std = (json.loads(metadata[key]) for key in ("timm", "mean", "std"))
        image_size = json.loads(metadata.get("image_size", "null"))
        crop_ratio = json.loads(metadata.get("crop_ratio", str(PUBLISHED_CROP_RATIO)))
        rule = json.loads(metadata.get("position_resampling", f'"{RESAMPLING_RULE}"'))
    except (KeyError, ValueError) as error:
        raise WeightsError(f"the metadata of {path} are damaged ({error!r}); write the file again") from error
    if rule != RESAMPLING_RULE:
        raise WeightsError(
            f"{path} resamples position embeddings by the rule {rule!r}, which this version of massl does not have; "
            "install a newer one"
        )
    return BackboneContent(
        tensors=tensors,
        timm_arguments=timm_arguments,
        mean=tuple(mean),
        std=tuple(std),
        image_size=image_size,
        crop_ratio=crop_ratio,
    )


def read_pickled(path: Path) -> Any:
    """The content of a torch.save file: only tensors, plain values and argparse.Namespace; no code is executed."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not verify check sums: zeros would load silently
            if damaged is not None:
                raise OSError(f"{damaged} is damaged")
        # full checkpoints of DINO, iBOT and MaSSL contain the Namespace of their command line
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: unreadable files raise anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for other files torch.load may raise anything: KeyError, EOFError, struct.error ...
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused is not None:
            raise WeightsError(
                f"{path} holds a Python object ({refused[1]}), and opening it could run foreign code. If you trust the "
                "file, save only its weights: torch.save(state_dict, ...) or safetensors"
            ) from error
        lines = [line for line in str(error).splitlines() if line and "documentation of torch.load" not in line]
        raise WeightsError(
            f"cannot read {path}: {type(error).__name__} {lines[-1] if lines else ''}. It is damaged, incomplete or "
            "not a PyTorch checkpoint; download it again"
        ) from error


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], *, origin: str) -> None:
    """Fill every tensor of the model, or raise with all missing and unexpected ones: nothing stays random."""
    wanted = model.state_dict()
    other_shape = [key for key in wanted if key in tensors and tensors[key].shape != wanted[key].shape]
    problems = [
        *_named("missing", wanted.keys() - tensors.keys()),
        *_named("unexpected", tensors.keys() - wanted.keys()),
        *(f"{key} has the shape {[*tensors[key].shape]} instead of {[*wanted[key].shape]}" for key in other_shape),
    ]
    if problems:
        raise WeightsError(f"the weights of {origin} do not fit the model: {'; '.join(problems)}")
    model.load_state_dict(dict(tensors), strict=True)


def _named(problem: str, keys: Collection[str]) -> list[str]:
    return [f"{problem} {', '.join(sorted(keys))}"] if keys else []
