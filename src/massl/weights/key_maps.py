"""What the checkpoints of the field look like, and how each becomes a state dict of timm's VisionTransformer.

The backbones of DINO, iBOT, MaSSL, MoCo-v3, MAE, DeiT and timm name their tensors alike; what differs is where in the
file they are, what is put before their names, and what lies beside them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from massl.weights.io import WeightsError

KNOWN_LAYOUTS = (
    "a training checkpoint of MaSSL, DINO or iBOT ({'teacher': {'backbone.*'}}; the teacher is taken)",
    "a checkpoint of MoCo-v3 ({'state_dict': {'module.base_encoder.*'}})",
    "a backbone of iBOT ({'state_dict': {...}})",
    "a checkpoint of MAE or DeiT ({'model': {...}})",
    "the flat state dict of a DINO backbone or of timm's VisionTransformer",
)
# where a file holds the weights: the first of these, else the file itself
_ENTRIES = ("teacher", "state_dict", "model")
_PREFIXES = ("base_encoder.", "backbone.")  # before a backbone's keys, after any `module.` of distributed training
# no part of the backbone
_OTHER_PARTS = ("head.", "fc.", "masked_embed", "mask_token", "decoder_", "predictor.", "momentum_encoder.")
_TRAINED_BY = {"memory_bank": "MaSSL", "ibot_loss": "iBOT", "dino_loss": "DINO"}  # entry beside the teacher -> method
_RENAMED = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}  # iBOT's layer scale -> timm's
_REFUSED = {  # part of a key -> what a network with it is
    r"^layer\d\.\d+\.": "a ResNet",
    r"^(reg_token|register_tokens)$": "a transformer with register tokens",
    r"^dist_token$": "a distilled transformer with two class tokens",
    r"^patch_embed\.proj\.\d": "a transformer with a convolutional stem",
    r"\.attn\.[qk]_norm\.": "a transformer that normalises queries and keys",
}
# their shapes tell the architecture
_ESSENTIAL = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
_NUM_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16}  # width -> attention heads: 64 channels each
# https://github.com/facebookresearch/moco-v3: its ViT-S has 12 heads, of 32 channels each
_NUM_HEADS_MOCOV3 = {**_NUM_HEADS, 384: 12}
_TIMM_NAMES = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}  # else ViT-B


@dataclass(frozen=True, kw_only=True)
class ForeignBackbone:
    """The backbone in a file of another project."""

    tensors: dict[str, Tensor]  # under timm's keys
    part: str  # of the file, in words: "teacher of the DINO checkpoint"
    is_mocov3: bool


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """What the shapes of a vision transformer's tensors tell, and the number of heads, which they do not."""

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
        """What builds the empty model. timm's norms have eps 1e-6, as those of all projects here."""
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
        return f"width {self.dim}, {self.depth} blocks, {self.num_heads} heads, patch {self.patch_size}, image {self.image_size}"


def backbone_of(checkpoint: Any, *, origin: str) -> ForeignBackbone:
    """The backbone's tensors in the content of a file, under timm's keys, and nothing else; anything unknown is an
    error.
    """
    entry, weights = _weights_of(checkpoint, origin=origin)
    weights = _without("module.", weights, origin=origin)
    prefix = next((candidate for candidate in _PREFIXES if any(key.startswith(candidate) for key in weights)), "")
    unexpected = [key for key in weights if not key.startswith((prefix, *_OTHER_PARTS))]
    if unexpected:
        raise WeightsError(
            f"{origin} holds unexpected entries beside {prefix}*: {', '.join(sorted(unexpected))}. {_known()}"
        )
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
    """The state dict in a file, and the entry it is under."""
    if not isinstance(checkpoint, Mapping):
        raise WeightsError(f"{origin} holds a {type(checkpoint).__name__} instead of a state dict. {_known()}")
    if {"method", "recipe", "optimizer"} <= checkpoint.keys():
        raise WeightsError(
            f"{origin} is a training checkpoint of massl; give the folder of the run instead, whose backbone is a file there"
        )
    entry = next((candidate for candidate in _ENTRIES if candidate in checkpoint), None)
    weights = checkpoint if entry is None else checkpoint[entry]
    where = origin if entry is None else f"the entry {entry!r} of {origin}"
    if not isinstance(weights, Mapping) or not weights:
        raise WeightsError(f"{where} holds no weights. {_known()}")
    strange = [str(key) for key, value in weights.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if strange:
        raise WeightsError(f"{where} is no state dict: {_some(strange)} are no tensors. {_known()}")
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
                f"{origin} is {network} ({_some(found)}); of other projects' files massl reads plain vision transformers. "
                "If timm has this model, give its name there"
            )
    present = [key for key in _ESSENTIAL if key in tensors]
    if not present:
        raise WeightsError(
            f"{origin} holds no vision transformer that massl knows: its entries are {_some(tensors)}. {_known()}"
        )
    if len(present) < len(_ESSENTIAL):
        missing = [key for key in _ESSENTIAL if key not in tensors]
        raise WeightsError(f"the weights of {origin} are incomplete: missing {', '.join(missing)}")


def shape_of(backbone: ForeignBackbone, *, num_heads: int | None, origin: str) -> TransformerShape:
    """The architecture the tensors belong to; `num_heads` where the usual number for the width is wrong or unknown."""
    tensors = backbone.tensors
    projection, positions, hidden = (
        tensors[key] for key in ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight")
    )
    if projection.ndim != 4 or projection.shape[1] != 3 or projection.shape[2] != projection.shape[3]:
        raise WeightsError(
            f"{origin} takes no square patches of RGB images: patch_embed.proj.weight is {list(projection.shape)}"
        )
    dim, patch_size = projection.shape[0], projection.shape[2]
    if positions.ndim != 3 or hidden.ndim != 2 or positions.shape[2] != dim:
        raise WeightsError(f"{origin} is no plain transformer of width {dim}: pos_embed is {list(positions.shape)}")
    grid_side = round((positions.shape[1] - 1) ** 0.5)
    if grid_side < 1 or grid_side**2 != positions.shape[1] - 1:
        raise WeightsError(
            f"pos_embed of {origin} has {positions.shape[1]} rows: not one for the class token and a square grid of patches"
        )
    return TransformerShape(
        dim=dim,
        depth=1 + max(int(match[1]) for key in tensors if (match := re.match(r"blocks\.(\d+)\.", key))),
        num_heads=_num_heads(dim, num_heads, is_mocov3=backbone.is_mocov3, origin=origin),
        patch_size=patch_size,
        grid_side=grid_side,
        mlp_ratio=hidden.shape[0] / dim,
        has_layer_scale="blocks.0.ls1.gamma" in tensors,
    )


def _num_heads(dim: int, given: int | None, *, is_mocov3: bool, origin: str) -> int:
    num_heads = given if given is not None else (_NUM_HEADS_MOCOV3 if is_mocov3 else _NUM_HEADS).get(dim)
    if num_heads is None:
        raise WeightsError(
            f"{origin} has width {dim}, for which no number of attention heads is usual, and the file does not tell it; give --num_heads"
        )
    if num_heads < 1 or dim % num_heads:
        raise WeightsError(
            f"{num_heads} attention heads cannot share the width {dim} of {origin}; give another --num_heads"
        )
    return num_heads


def _some(keys: Iterable[str]) -> str:
    shown = list(keys)
    return ", ".join(shown[:5]) + (" ..." if len(shown) > 5 else "")


def _known() -> str:
    return "Known: " + "; ".join(KNOWN_LAYOUTS)
