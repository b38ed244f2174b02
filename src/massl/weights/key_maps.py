"""Converts checkpoints of other projects to state dicts of timm's VisionTransformer.

DINO, iBOT, MaSSL, MoCo-v3, MAE, DeiT and timm name the tensors of a backbone alike. They differ in the entry of the
file, the prefix of the keys, and the other tensors in the file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from massl.weights.facts import WeightsError, for_message

KNOWN_LAYOUTS = (
    "a training checkpoint of MaSSL, DINO or iBOT ({'teacher': {'backbone.*'}}; the teacher is taken)",
    "a checkpoint of MoCo-v3 ({'state_dict': {'module.base_encoder.*'}})",
    "a backbone of iBOT ({'state_dict': {...}})",
    "a checkpoint of MAE or DeiT ({'model': {...}})",
    "the flat state dict of a DINO backbone or of timm's VisionTransformer",
)
_ENTRIES = ("teacher", "state_dict", "model")  # the weights are in the first of these, else the file itself
_PREFIXES = ("base_encoder.", "backbone.")  # of a backbone's keys, after any `module.` of distributed training
# not part of the backbone
_OTHER_PARTS = ("head.", "fc.", "masked_embed", "mask_token", "decoder_", "predictor.", "momentum_encoder.")
_TRAINED_BY = {"memory_bank": "MaSSL", "ibot_loss": "iBOT", "dino_loss": "DINO"}  # entry beside the teacher -> method
_RENAMED = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}  # iBOT's layer scale -> timm's
_REFUSED = {  # part of a key -> the kind of network it belongs to
    r"^layer\d\.\d+\.": "a ResNet",
    r"^(reg_token|register_tokens)$": "a transformer with register tokens",
    r"^dist_token$": "a distilled transformer with two class tokens",
    r"^patch_embed\.proj\.\d": "a transformer with a convolutional stem",
    r"\.attn\.[qk]_norm\.": "a transformer that normalises queries and keys",
}
# the architecture follows from their shapes
_ESSENTIAL = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
_NUM_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16}  # width -> attention heads: 64 channels each
# https://github.com/facebookresearch/moco-v3: its ViT-S has 12 heads, of 32 channels each
_NUM_HEADS_MOCOV3 = {**_NUM_HEADS, 384: 12}
_TIMM_NAMES = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}  # else ViT-B


@dataclass(frozen=True, kw_only=True)
class ForeignBackbone:
    """The backbone in a file of another project."""

    tensors: dict[str, Tensor]  # under timm's keys
    part: str  # of the file: "teacher of the DINO checkpoint"
    is_mocov3: bool


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The architecture of a vision transformer: the shapes of its tensors, and the number of heads."""

    dim: int
    depth: int
    num_heads: int
    patch_size: int
    grid_side: int  # patches per side of the position embeddings
    mlp_ratio: float
    has_layer_scale: bool

    @property
    def image_size(self) -> int:
        return self.grid_side * self.patch_size

    def timm_arguments(self) -> dict[str, Any]:
        """Arguments that build the empty model. timm's norms have eps 1e-6, as in all projects here."""
        arguments = {
            "model_name": _TIMM_NAMES.get(self.dim, "vit_base_patch16_224"),
            "num_classes": 0,
            "img_size": self.image_size,
            "patch_size": self.patch_size,
            "embed_dim": self.dim,
            "depth": self.depth,
            "num_heads": self.num_heads,
            "mlp_ratio": self.mlp_ratio,
        }
        return {**arguments, "init_values": 1.0} if self.has_layer_scale else arguments

    def __str__(self) -> str:
        blocks = f"width {self.dim}, {self.depth} blocks, {self.num_heads} heads"
        return f"{blocks}, patch {self.patch_size}, image {self.image_size}"


def backbone_of(checkpoint: Any, *, origin: str) -> ForeignBackbone:
    """The backbone's tensors in a file, under timm's keys; unknown entries raise an error."""
    entry, weights = _weights_of(checkpoint, origin=origin)
    weights = _without("module.", weights, origin=origin)
    prefix = next((candidate for candidate in _PREFIXES if any(key.startswith(candidate) for key in weights)), "")
    unexpected = [key for key in weights if not key.startswith((prefix, *_OTHER_PARTS))]
    if unexpected:
        names = _some(sorted(unexpected))
        raise WeightsError(f"{origin} holds unexpected entries beside {prefix}*: {names}. {_known()}")
    tensors = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
    tensors = {_timm_key(key): tensor for key, tensor in tensors.items() if not key.startswith(_OTHER_PARTS)}
    _refuse_other_networks(tensors, origin=origin)
    is_mocov3 = prefix == "base_encoder."
    if is_mocov3:
        part = "base encoder of the MoCo-v3 checkpoint"
    elif entry == "teacher":
        method = next((f"{method} " for sign, method in _TRAINED_BY.items() if sign in checkpoint), "")
        part = f"teacher of the {method}checkpoint"
    elif any(key.startswith("decoder_") for key in weights):
        part = "encoder of the MAE checkpoint"
    else:
        part = "backbone of" if entry is None else f"backbone under {entry!r} of"
    return ForeignBackbone(tensors=tensors, part=part, is_mocov3=is_mocov3)


def _weights_of(checkpoint: Any, *, origin: str) -> tuple[str | None, dict[str, Tensor]]:
    """The entry of the file with the state dict (None: the file itself), and the state dict."""
    if not isinstance(checkpoint, Mapping):
        raise WeightsError(f"{origin} holds a {type(checkpoint).__name__} instead of a state dict. {_known()}")
    if {"method", "recipe", "optimizer"} <= checkpoint.keys():
        raise WeightsError(f"{origin} is a training checkpoint of massl; give the folder of the run instead")
    entry = next((candidate for candidate in _ENTRIES if candidate in checkpoint), None)
    weights = checkpoint if entry is None else checkpoint[entry]
    where = origin if entry is None else f"the entry {entry!r} of {origin}"
    if not isinstance(weights, Mapping) or not weights:
        raise WeightsError(f"{where} holds no weights. {_known()}")
    others = [str(key) for key, value in weights.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if others:
        raise WeightsError(f"{where} is no state dict: {_some(others)} are no tensors. {_known()}")
    return entry, dict(weights)


def _without(prefix: str, weights: Mapping[str, Tensor], *, origin: str) -> dict[str, Tensor]:
    stripped = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
    if len(stripped) != len(weights):
        raise WeightsError(f"{origin} holds some weights twice, with and without {prefix!r}; save only the one to use")
    return stripped


def _timm_key(key: str) -> str:
    block, _, last = key.rpartition(".")
    return f"{block}.{_RENAMED[last]}" if last in _RENAMED else key


def _refuse_other_networks(tensors: Mapping[str, Tensor], *, origin: str) -> None:
    for pattern, network in _REFUSED.items():
        found = [key for key in tensors if re.search(pattern, key)]
        if found:
            raise WeightsError(
                f"{origin} is {network} ({_some(found)}), but massl reads only plain vision transformers from other "
                "projects. If timm has this model, give its name there"
            )
    present = [key for key in _ESSENTIAL if key in tensors]
    if not present:
        raise WeightsError(f"{origin} holds no known vision transformer: its entries are {_some(tensors)}. {_known()}")
    if len(present) < len(_ESSENTIAL):
        missing = [key for key in _ESSENTIAL if key not in tensors]
        raise WeightsError(f"the weights of {origin} are incomplete: missing {', '.join(missing)}")


def shape_of(backbone: ForeignBackbone, *, num_heads: int | None, origin: str) -> TransformerShape:
    """The architecture of the tensors; `num_heads` if it is not the usual number for the width."""
    tensors = backbone.tensors
    projection, positions = tensors["patch_embed.proj.weight"], tensors["pos_embed"]
    hidden = tensors["blocks.0.mlp.fc1.weight"]
    is_square = projection.ndim == 4 and projection.shape[1] == 3 and projection.shape[2] == projection.shape[3]
    if not is_square or not projection.numel():
        found = f"patch_embed.proj.weight is {list(projection.shape)}"
        raise WeightsError(f"{origin} takes no square patches of RGB images: {found}")
    dim, patch_size = projection.shape[0], projection.shape[2]
    if positions.ndim != 3 or hidden.ndim != 2 or positions.shape[2] != dim:
        raise WeightsError(f"{origin} is no plain transformer of width {dim}: pos_embed is {list(positions.shape)}")
    grid_side = round((positions.shape[1] - 1) ** 0.5)
    if grid_side < 1 or grid_side**2 != positions.shape[1] - 1:
        found = f"pos_embed of {origin} has {positions.shape[1]} rows"
        raise WeightsError(f"{found}: not one for the class token and a square grid of patches")
    return TransformerShape(
        dim=dim,
        depth=1 + max(int(match[1]) for key in tensors if (match := re.match(r"blocks\.([0-9]{1,9})\.", key))),
        num_heads=_num_heads(dim, num_heads, is_mocov3=backbone.is_mocov3, origin=origin),
        patch_size=patch_size,
        grid_side=grid_side,
        mlp_ratio=hidden.shape[0] / dim,
        has_layer_scale="blocks.0.ls1.gamma" in tensors,
    )


def _num_heads(dim: int, given: int | None, *, is_mocov3: bool, origin: str) -> int:
    num_heads = given if given is not None else (_NUM_HEADS_MOCOV3 if is_mocov3 else _NUM_HEADS).get(dim)
    if num_heads is None:
        raise WeightsError(f"the number of attention heads of {origin} (width {dim}) is unknown; give --num_heads")
    if num_heads < 1 or dim % num_heads:
        raise WeightsError(f"{num_heads} attention heads do not divide the width {dim} of {origin}; change --num_heads")
    return num_heads


def _some(keys: Iterable[str]) -> str:
    shown = [for_message(key) for key in keys]
    return ", ".join(shown[:5]) + (" ..." if len(shown) > 5 else "")


def _known() -> str:
    return "Known: " + "; ".join(KNOWN_LAYOUTS)
