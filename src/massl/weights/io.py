"""Backbone files: safetensors with timm's keys, and the arguments that build the model in the metadata.

Files of other projects are opened here too; key_maps.py interprets their entries.
"""

import argparse
import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from massl.config import RecipeError
from massl.data.evaluation.views import PUBLISHED_CROP_RATIO, whole_patches
from massl.digests import DIGEST_KEY, DamagedFile, check_zip, is_zip
from massl.nn.any_size import for_any_size, for_one_size
from massl.nn.positions import resampling_rule
from massl.nn.timm_models import MAX_ELEMENTS, create_timm_model
from massl.weights.facts import BackboneFacts, WeightsError, for_message, read_facts
from massl.weights.file_kinds import other_kind
from massl.weights.tensor_files import read_tensors, tensor_bytes
from massl.weights.transform import ImageTransform

BACKBONE_FILE, BEST_FILE = "backbone.safetensors", "best.safetensors"
_MORE_ELEMENTS = 2**24  # beside its weights, a model makes indices and positions: 64 MiB in float32
_SHOWN = 20  # names in a message
_ADVICE_FOR_DAMAGE = (
    "Copy it again. For the backbone of a run, give its command `massl pretrain` again: it writes the file anew from "
    f"the newest checkpoint. If you changed the file yourself, leave the entry {DIGEST_KEY} out of its metadata"
)


@dataclass(frozen=True, kw_only=True)
class BackboneContent(BackboneFacts):
    """The content of a file written by massl."""

    tensors: dict[str, Tensor]  # under timm's keys
    num_bytes: int  # of the file


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
    origin: str | None = None,
) -> bytes:
    """The file content for a timm model: always the same for the same model. `origin` is that of imported weights."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    facts = {
        "timm": {key: value for key, value in timm_arguments.items() if key != "position_resampling"},
        "mean": mean,
        "std": std,
        "image_size": image_size,
        "crop_ratio": crop_ratio,
        "position_resampling": resampling_rule(model),
    }
    metadata = {"format": "pt", **{name: json.dumps(fact) for name, fact in facts.items()}}
    if origin is not None:
        metadata["origin"] = for_message(origin)
    return tensor_bytes(tensors, metadata)


def load_backbone(
    run: str | Path, *, image_size: int | None = None, which: Literal["last", "best"] = "last"
) -> LoadedBackbone:
    """The trained teacher backbone of a run (its folder or .safetensors file), and the transform of its images.

    The model is a timm model in eval mode, the transform turns an image (path, Pillow image or uint8 array [H, W, 3])
    into its input [3, S, S], as `massl embed` does. S is the size of the training images, or `image_size`; the model is
    then a plain one for this size. Otherwise vision transformers accept any multiple of the patch.
    `which`: the weights after the last step, or those of the run's best probe.
    """
    if image_size is not None and image_size < 1:
        raise WeightsError(f"image_size is {image_size}; give the side of the images in pixels")
    path = backbone_path(run, which=which)
    content = backbone_content(path, *read_safetensors(path))
    if content is None:
        raise WeightsError(f"{path} was not written by massl: it does not name its timm model")
    arguments = dict(content.timm_arguments)
    dynamic = {"dynamic_img_size": True} if "pos_embed" in content.tensors else {}
    model = described_model({**arguments, **dynamic}, origin=str(path), num_bytes=content.num_bytes)
    load_strictly(model, content.tensors, origin=str(path))
    size = image_size or trained_size(model, content, path)
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


def trained_size(model: nn.Module, content: BackboneContent, path: Path) -> int:
    """Side of the training images: as the file says, else what the model was built for."""
    size = content.image_size or own_image_size(model)
    if isinstance(model, VisionTransformer | Eva) and size < model.patch_embed.patch_size[0]:
        patch = model.patch_embed.patch_size[0]
        raise WeightsError(
            f"the metadata of {path} are damaged: image_size {size} is less than its patch of {patch} px"
        )
    return size


def own_image_size(model: nn.Module) -> int:
    """Side of the images that the model was built for."""
    if isinstance(model, VisionTransformer | Eva) and model.patch_embed.grid_size is not None:
        return int(model.patch_embed.grid_size[0] * model.patch_embed.patch_size[0])
    config: Any = model.default_cfg
    return int(config["input_size"][-1])


def backbone_path(run: str | Path, *, which: Literal["last", "best"] = "last") -> Path:
    """The last or best backbone of a run's folder, or the file itself; raises if it does not exist."""
    path = Path(run).expanduser()
    if which == "best":
        if not (path / BEST_FILE).is_file():
            raise WeightsError(
                f"{path / BEST_FILE} does not exist; runs without probes and of older versions have no best weights. "
                "For the last ones, omit which"
            )
        return path / BEST_FILE
    if which != "last":
        raise WeightsError(f"which is {which!r}; give 'last' or 'best'")
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
        return read_tensors(path)
    except DamagedFile as error:
        raise WeightsError(f"cannot read {path}: {error}. {_ADVICE_FOR_DAMAGE}") from error
    except (SafetensorError, OSError) as error:
        kind = other_kind(path)
        raise WeightsError(f"cannot read {path}: {f'it is {kind}' if kind else for_message(str(error))}") from error


def is_readable(path: Path) -> bool:
    """Whether a .safetensors file exists and is intact."""
    try:
        read_safetensors(path)
    except WeightsError:
        return False
    return True


def backbone_content(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> BackboneContent | None:
    """The content of a file written by massl; None for other files."""
    facts = read_facts(path, metadata)
    if facts is None:
        return None
    return BackboneContent(tensors=tensors, num_bytes=path.stat().st_size, **vars(facts))


def described_model(timm_arguments: Mapping[str, Any], *, origin: str, num_bytes: int) -> nn.Module:
    """The model that a file of so many bytes describes, which is no larger than its weights; random weights, seed 0."""
    try:
        max_elements = min(MAX_ELEMENTS, num_bytes + _MORE_ELEMENTS)
        return create_timm_model(timm_arguments, max_elements=max_elements, prefix="its timm option ")
    except RecipeError as error:
        raise WeightsError(f"{origin} describes a model that cannot be built: {error}") from error


def read_pickled(path: Path) -> Any:
    """The content of a torch.save file: only tensors, plain values and argparse.Namespace; no code is executed."""
    try:
        if is_zip(path):
            check_zip(path)
        # full checkpoints of DINO, iBOT and MaSSL contain the Namespace of their command line
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: unreadable files raise anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for other files torch.load may raise anything: KeyError, EOFError, struct.error ...
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused is not None:
            name = for_message(refused[1])
            raise WeightsError(
                f"{path} holds a Python object ({name}), and opening it could run foreign code. If you trust the "
                "file, save only its weights: torch.save(state_dict, ...) or safetensors"
            ) from error
        if isinstance(error, OSError) and not isinstance(error, DamagedFile):
            raise WeightsError(f"cannot read {path}: {for_message(str(error))}") from error
        if (kind := other_kind(path)) is not None:
            raise WeightsError(f"cannot read {path}: it is {kind}") from error
        reason = f" ({error})" if isinstance(error, DamagedFile) else ""
        raise WeightsError(
            f"cannot read {path}{reason}: it is damaged, incomplete or not a PyTorch checkpoint; download it again"
        ) from error


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], *, origin: str) -> None:
    """Fill every tensor of the model, or raise with all missing and unexpected ones: nothing stays random."""
    wanted = model.state_dict()
    other_shape = [key for key in wanted if key in tensors and tensors[key].shape != wanted[key].shape]
    other_kind = [key for key in wanted if key in tensors and not _converts(tensors[key], wanted[key].dtype)]
    problems = [
        *_named("missing", wanted.keys() - tensors.keys()),
        *_named("unexpected", tensors.keys() - wanted.keys()),
        *(f"{key} has the shape {[*tensors[key].shape]} instead of {[*wanted[key].shape]}" for key in other_shape),
        *(f"{key} is {_kind(tensors[key])} instead of plain {wanted[key].dtype}" for key in other_kind),
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightsError(f"the weights of {origin} do not fit the model: {'; '.join(problems[:_SHOWN])}{more}")
    model.load_state_dict(dict(tensors), strict=True)
    broken = [key for key, tensor in wanted.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise WeightsError(
            f"the weights of {origin} are broken{_named(':', broken)[0]} holds values that are not finite (NaN or "
            "infinite); take an earlier checkpoint or another file"
        )


def _converts(tensor: Tensor, wanted: torch.dtype) -> bool:
    same_kind = tensor.dtype == wanted or (tensor.dtype.is_floating_point and wanted.is_floating_point)
    return same_kind and _kind(tensor) == str(tensor.dtype)


def _kind(tensor: Tensor) -> str:
    """The dtype; for a sparse tensor or a shape without values also its layout or device."""
    layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype}{layout}{' without values' if tensor.is_meta else ''}"


def _named(problem: str, keys: Collection[str]) -> list[str]:
    shown = map(for_message, sorted(keys)[:_SHOWN])
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return [f"{problem} {', '.join(shown)}{more}"] if keys else []
