"""Opens a model to evaluate by name: a run of massl, a weights file, or a timm model."""

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from timm.layers.patch_embed import PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from massl.config import RecipeError
from massl.data.evaluation.views import PUBLISHED_CROP_RATIO
from massl.nn.backbone import Backbone
from massl.nn.positions import ResamplingRule
from massl.nn.timm_models import create_timm_model
from massl.weights.facts import WeightsError, for_message
from massl.weights.huggingface_folder import ForeignFile, follows_timms_rule, read_hub_folder
from massl.weights.io import (
    BackboneContent,
    backbone_content,
    backbone_path,
    describe_images,
    described_model,
    load_strictly,
    own_image_size,
    read_pickled,
    read_safetensors,
    trained_size,
)
from massl.weights.key_maps import backbone_of

_PUBLISHED_IMAGE_SIZE = 224
_NOT_OF_TIMM = ("model_name", "num_classes", "position_resampling")  # `timm.create_model` has no option of this name
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A backbone in eval mode, with what evaluations need to know about it."""

    backbone: Backbone
    name: str  # as the user gave it
    origin: str  # what was loaded: "teacher of runs/a", "timm weights ...", "random weights"
    fingerprint: str  # of architecture and weights: equal exactly if features are
    image_size: int  # side of the images it was trained on
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop_ratio: float = PUBLISHED_CROP_RATIO  # centre crop / shorter side of the images; of a run: that of its probes
    imported: str | None = None  # what `massl import` found, if it wrote the file
    is_own: bool = False  # trained by massl

    @property
    def architecture(self) -> str:
        """The kind, with the size of its images if that is unusual: for comparison with published figures."""
        if not self.kind.startswith("ViT-") or (size := own_image_size(self.backbone.model)) == _PUBLISHED_IMAGE_SIZE:
            return self.kind
        return f"{self.kind} at {size} px"

    @property
    def kind(self) -> str:
        """`ViT-S/16` and the like; timm's name for other models."""
        model = self.backbone.model
        if isinstance(model, VisionTransformer):
            size = {384: "S", 768: "B", 192: "Ti", 1024: "L"}.get(model.embed_dim)
            if size is not None and len(model.blocks) == (24 if size == "L" else 12):
                registers = "" if model.reg_token is None else f" with {model.reg_token.shape[1]} registers"
                return f"ViT-{size}/{model.patch_embed.patch_size[0]}{registers}"
        return str(self.backbone.timm_arguments["model_name"])


def model_fingerprint(model: nn.Module, *, arguments: dict[str, object]) -> str:
    """Digest of all that decides a model's output: its arguments and weights."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def open_model(
    name: str | Path,
    *,
    num_heads: int | None = None,
    pretrained: bool | None = None,
    which: Literal["last", "best"] = "last",
) -> LoadedModel:
    """The folder of a massl run, a weights file (massl's or another project's), or a timm model.

    `num_heads` is for timm models and files of other projects, which do not contain it. `pretrained` is for timm
    models: whether to load published weights; default: if the name has a tag, as in `vit_small_patch16_224.dino`.
    `which`: the last or best weights of a run's folder.
    """
    if which != "last":
        name = backbone_path(name, which=which)
    if num_heads is not None and num_heads < 1:
        raise WeightsError(f"a model cannot have {num_heads} attention heads; give 1 or more")
    path = Path(name).expanduser()
    if not path.exists():
        return _open_timm(str(name), num_heads=num_heads, pretrained=pretrained)
    if pretrained is False:
        raise WeightsError(f"{path} holds weights; for random ones (pretrained=False) give the name of a timm model")
    found = _read(path)
    if isinstance(found, BackboneContent):
        return _open_own(str(name), path, found, num_heads=num_heads)
    return _open_foreign(str(name), found, num_heads=num_heads)


def open_foreign(
    path: Path,
    *,
    num_heads: int | None = None,
    timm_name: str | None = None,
    position_resampling: ResamplingRule | None = None,
) -> LoadedModel:
    """The backbone in a weights file of another project or a folder of transformers.

    `timm_name` names its model where the tensors do not tell; with a tag, mean and deviation of the colours are those
    of timm's weights. `position_resampling` replaces the authors' rule.
    """
    if timm_name is not None:
        _require_timm_name(timm_name)
    found = _read(path)
    if isinstance(found, BackboneContent):
        raise WeightsError(f"{path} is a backbone of massl already; every command opens it as it is")
    return _open_foreign(
        str(path), found, num_heads=num_heads, timm_name=timm_name, position_resampling=position_resampling
    )


def _read(path: Path) -> BackboneContent | ForeignFile:
    """The content of a run's folder, of a weights file, or of a folder of transformers."""
    from_hub = read_hub_folder(path)
    if from_hub is not None:
        return from_hub
    file = backbone_path(path)
    if file.suffix != ".safetensors":
        return ForeignFile(path=file, checkpoint=read_pickled(file), num_bytes=file.stat().st_size)
    tensors, metadata = read_safetensors(file)
    own = backbone_content(file, tensors, metadata)
    return own or ForeignFile(path=file, checkpoint=tensors, num_bytes=file.stat().st_size)


def _open_own(name: str, path: Path, content: BackboneContent, *, num_heads: int | None) -> LoadedModel:
    backbone = _described_backbone(content.timm_arguments, origin=str(path), num_bytes=content.num_bytes)
    own = _num_heads(backbone.model) or "no"
    if num_heads not in (None, own):
        raise WeightsError(f"{path} was written by massl with {own} attention heads, not {num_heads}; omit num_heads")
    load_strictly(backbone.model, content.tensors, origin=str(path))
    size = trained_size(backbone.model, content, path)
    describe_images(backbone.model, content, image_size=size)
    origin = f"teacher of {path}" if path.is_dir() else f"backbone {path}"
    imported = None if content.origin is None else for_message(content.origin)
    if imported is not None:
        origin = f"imported {imported}"
    model = _loaded(backbone, name=name, origin=origin, mean=content.mean, std=content.std)
    return replace(model, image_size=size, crop_ratio=content.crop_ratio, imported=imported, is_own=imported is None)


def _open_foreign(
    name: str,
    file: ForeignFile,
    *,
    num_heads: int | None,
    timm_name: str | None = None,
    position_resampling: ResamplingRule | None = None,
) -> LoadedModel:
    if num_heads is not None and file.num_heads not in (None, num_heads):
        raise WeightsError(f"{file.path} has {file.num_heads} attention heads, not {num_heads}; omit --num_heads")
    architecture, _, tag = (timm_name or file.timm_name or "").partition(".")
    found = backbone_of(
        file.checkpoint,
        origin=str(file.path),
        num_heads=num_heads or file.num_heads,
        timm_name=architecture or None,
        position_resampling=position_resampling or file.position_resampling,
    )
    network = found.network
    arguments = {**network.timm_arguments, **file.timm_options}
    backbone = _described_backbone(arguments, origin=str(file.path), num_bytes=file.num_bytes)
    load_strictly(backbone.model, _without_classifier(network.tensors, backbone.model), origin=str(file.path))
    origin = f"{found.part} {file.path} ({network.summary})"
    if "MoCo-v3" in found.part and network.timm_arguments.get("embed_dim") == 384 and num_heads is None:
        origin += "; MoCo-v3's ViT-S has 12 heads where others have 6"
    config: Any = timm.get_pretrained_cfg(timm_name) if timm_name and tag else None
    mean, std = file.mean or _IMAGENET_MEAN, file.std or _IMAGENET_STD
    if config:
        mean, std = tuple(config.mean), tuple(config.std)
    model = _loaded(backbone, name=name, origin=origin, mean=mean, std=std)
    return replace(model, crop_ratio=file.crop_ratio or model.crop_ratio)


def _without_classifier(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    config: Any = model.default_cfg
    named = config.get("classifier") or ()
    dropped = tuple(f"{part}." for part in ((named,) if isinstance(named, str) else named))
    wanted = model.state_dict()
    return {key: tensor for key, tensor in tensors.items() if key in wanted or not key.startswith(dropped)}


def _open_timm(name: str, *, num_heads: int | None, pretrained: bool | None) -> LoadedModel:
    _require_timm_name(name)
    architecture, _, tag = name.partition(".")
    arguments: dict[str, Any] = {"model_name": name, "num_classes": 0}
    if num_heads is not None:
        arguments["num_heads"] = num_heads
    is_published = pretrained if pretrained is not None else bool(tag)
    backbone = _empty_backbone(arguments, create_timm_model)
    config: Any = backbone.model.default_cfg
    tag = str(config["tag"]) if is_published else ""
    if is_published and backbone.position_resampling is not None and follows_timms_rule(architecture, tag):
        backbone = _empty_backbone({**arguments, "position_resampling": "timm"}, create_timm_model)
    backbone = _with_class_token(backbone)
    origin = f"random weights (timm's {name}, seed 0)"
    if is_published:
        _load_published(backbone)
        origin = f"timm weights {architecture}.{tag}"
    return _loaded(backbone, name=name, origin=origin, mean=tuple(config["mean"]), std=tuple(config["std"]))


def _with_class_token(backbone: Backbone) -> Backbone:
    """DINOv3's feature is the class token; timm's model of it averages the patch tokens by default."""
    model = backbone.model
    if not isinstance(model, Eva) or not backbone.is_transformer or model.cls_token is None:
        return backbone
    if model.global_pool == "token" or not isinstance(model.fc_norm, nn.Identity):
        return backbone
    return _empty_backbone({**backbone.timm_arguments, "global_pool": "token"}, create_timm_model)


def _require_timm_name(name: str) -> None:
    architecture, _, tag = name.partition(".")
    architectures = timm.list_models()  # without timm's deprecated names with the tag inside: vit_small_..._dino
    if architecture in architectures:
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
        if tag and tag not in tags:
            have = f"its weights are {', '.join(tags)}" if tags else "it has none"
            raise WeightsError(f"timm has no weights {tag!r} for {architecture}; {have}")
        return
    close = difflib.get_close_matches(name, [*architectures, *timm.list_pretrained()], n=3, cutoff=0.5)
    raise WeightsError(
        f"{name!r} is no model: neither an existing folder or file nor a timm model."
        + (f" Did you mean {' or '.join(map(repr, close))}?" if close else "")
        + " Give the folder of a massl run, a weights file (.safetensors .pth .pt .bin), or a name of "
        "`timm.list_models()`, with a tag such as vit_small_patch16_224.dino for published weights"
    )


def _load_published(backbone: Backbone) -> None:
    """Fill a timm model with its published weights.

    The classifier is dropped here: timm itself, if it builds a model without one, accepts incomplete weights.
    """
    options = {key: value for key, value in backbone.timm_arguments.items() if key not in _NOT_OF_TIMM}
    name = backbone.timm_arguments["model_name"]
    try:
        with torch.random.fork_rng(devices=[]):
            published = timm.create_model(name, pretrained=True, **options)
    except Exception as error:  # without a network, each client and version raises its own errors
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise WeightsError(
            f"timm cannot load the weights of {name} ({reason}). Without a network, download them elsewhere and give "
            "the file, or copy Hugging Face's cache (HF_HOME) here"
        ) from error
    tensors = published.state_dict()
    wanted = backbone.model.state_dict()
    load_strictly(backbone.model, {key: tensors[key] for key in wanted if key in tensors}, origin=f"timm's {name}")


def _described_backbone(timm_arguments: Mapping[str, Any], *, origin: str, num_bytes: int) -> Backbone:
    """The model that a file describes; errors name the file."""
    try:
        return _empty_backbone(timm_arguments, partial(described_model, origin=origin, num_bytes=num_bytes))
    except RecipeError as error:
        raise WeightsError(f"{origin} cannot be evaluated: {error}") from error


def _empty_backbone(timm_arguments: Mapping[str, Any], build: Callable[[Mapping[str, Any]], nn.Module]) -> Backbone:
    """The model with random weights (seed 0); raises if it cannot be evaluated."""
    arguments = dict(timm_arguments)
    model = build(arguments)
    if isinstance(model, VisionTransformer) and model.cls_token is not None and model.global_pool != "token":
        arguments["global_pool"] = "token"  # the protocols read the class token
        model = build(arguments)
    if isinstance(model, Eva) and model.global_pool == "token" and not model.dynamic_img_size:
        model = build(arguments := {**arguments, "dynamic_img_size": True})  # for patch tokens, and images of any size
    name = arguments["model_name"]
    if isinstance(model, VisionTransformer) and not isinstance(model.patch_embed, PatchEmbed):
        raise WeightsError(f"{name} has a convolutional stem instead of plain patches; choose another model")
    if getattr(model, "head_hidden_size", None) is None:
        raise WeightsError(f"timm does not give the number of features of {name}; choose another model")
    return Backbone(model, timm_arguments=arguments)


def _loaded(
    backbone: Backbone, *, name: str, origin: str, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> LoadedModel:
    return LoadedModel(
        backbone=backbone.eval().requires_grad_(False),
        name=name,
        origin=origin,
        fingerprint=model_fingerprint(backbone.model, arguments=backbone.timm_arguments),
        image_size=own_image_size(backbone.model),
        mean=mean,
        std=std,
    )


def _num_heads(model: nn.Module) -> int | None:
    if not isinstance(model, VisionTransformer | Eva):
        return None
    first_block: Any = model.blocks[0]
    return int(first_block.attn.num_heads)
