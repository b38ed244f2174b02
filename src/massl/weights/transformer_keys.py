"""Transformers in checkpoints of other projects -> timm's keys, and the arguments that build the empty model.

DINO, iBOT, MaSSL, MoCo-v3, MAE, DeiT and timm name the tensors of a plain ViT alike. DINOv2 adds layer scale, register
tokens and, in its largest model, SwiGLU; DINOv3 replaces position embeddings by rotations (timm's class `Eva`).
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from massl.weights.facts import WeightsError, for_message

_ESSENTIAL = ("cls_token", "pos_embed", "patch_embed.proj.weight")  # the architecture follows from their shapes
_NUM_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 20, 1536: 24}  # width -> attention heads: 64 channels each
# https://github.com/facebookresearch/moco-v3: its ViT-S has 12 heads, of 32 channels each
_NUM_HEADS_MOCOV3 = {**_NUM_HEADS, 384: 12}
_NUM_HEADS_DINOV3 = {**_NUM_HEADS, 4096: 32}
_LETTERS = {192: ("Ti", 12), 384: ("S", 12), 768: ("B", 12), 1024: ("L", 24)}  # width -> name, usual depth
_LETTERS_DINO = {**_LETTERS, 1280: ("H", 32), 1536: ("g", 40), 4096: ("7B", 40)}
_TIMM_NAMES = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}  # else ViT-B
_SIZES_DINOV2 = {384: "small", 768: "base", 1024: "large"}
NAME_IT = "If it is another network of timm, name it: massl import --backbone NAME"
_ROPE_BASE = 100.0  # of DINOv3; timm's models have no other
_RENAMED = {  # a part of a key -> timm's
    r"^blocks\.\d+\.(?=\d+\.)": "blocks.",  # DINOv2 in training: blocks in chunks
    r"\.gamma_([12])$": r".ls\1.gamma",  # iBOT's layer scale
    r"\.mlp\.w12\.": ".mlp.fc1.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
}
_RENAMED_DINOV3 = {
    r"\.ls([12])\.gamma$": r".gamma_\1",
    r"^storage_tokens$": "reg_token",
    r"\.mlp\.w1\.": ".mlp.fc1_g.",
    r"\.mlp\.w2\.": ".mlp.fc1_x.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
}
_REFUSED = {  # part of a key -> the kind of network it belongs to
    r"^dist_token$": "a distilled transformer with two class tokens",
    r"^patch_embed\.proj\.\d": "a transformer with a convolutional stem",
    r"\.attn\.[qk]_norm\.": "a transformer that normalises queries and keys",
}
# rotations follow from the number of heads; the class norm of small crops and the rest are used in training only
_UNUSED_DINOV3 = r"^(rope_embed\.periods|mask_token|local_cls_norm\..*|projectors\..*|.*\.qkv\.bias_mask)$"


class Network(NamedTuple):
    """A network in a file of another project."""

    tensors: dict[str, Tensor]  # under timm's keys
    timm_arguments: dict[str, Any]  # these build the empty model
    summary: str  # "ViT-S/16, 12 blocks, 6 heads, 224 px"


def is_transformer(tensors: Collection[str], *, partly: bool = False) -> bool:
    """Whether the keys are those of a vision transformer with position embeddings; `partly`: or some of them."""
    return (any if partly else all)(key in tensors for key in _ESSENTIAL)


def is_dinov3(tensors: Collection[str]) -> bool:
    """Whether the keys are those of DINOv3's transformer, official or timm's."""
    is_official = "rope_embed.periods" in tensors or "storage_tokens" in tensors
    return is_official or ("pos_embed" not in tensors and "blocks.0.gamma_1" in tensors and "cls_token" in tensors)


def as_transformer(
    tensors: Mapping[str, Tensor],
    *,
    num_heads: int | None,
    is_mocov3: bool = False,
    is_named: bool = False,
    origin: str,
) -> Network:
    """timm's VisionTransformer with or without registers, layer scale and SwiGLU. `is_named`: the user names it."""
    _refuse_other_transformers(tensors, origin=origin)
    named = _renamed(tensors, _RENAMED, origin=origin)
    fc1, fc2 = (_require(f"blocks.0.mlp.{layer}.weight", named, ndim=2, origin=origin) for layer in ("fc1", "fc2"))
    dim, patch_size = _patches_of(named, origin=origin)
    positions = _require("pos_embed", named, ndim=3, origin=origin)
    if positions.shape[2] != dim:
        raise WeightsError(f"{origin} is no plain transformer of width {dim}: pos_embed is {list(positions.shape)}")
    named = _with_registers_apart(named, origin=origin)
    num_registers = named["reg_token"].shape[1] if "reg_token" in named else 0
    num_rows = named["pos_embed"].shape[1]
    # DeiT-III too; files of its authors name their tensors like a rotating ViT of timm
    may_lack_class = num_registers > 0 or is_named or "blocks.0.ls1.gamma" in tensors
    no_embed_class = may_lack_class and math.isqrt(num_rows) ** 2 == num_rows
    num_patches = num_rows - (0 if no_embed_class else 1 + num_registers)
    grid_side = math.isqrt(max(num_patches, 0))
    if grid_side < 1 or grid_side**2 != num_patches:
        found = f"pos_embed of {origin} has {positions.shape[1]} rows"
        raise WeightsError(f"{found}: not one for the class token and a square grid of patches. {NAME_IT}")
    heads = _num_heads(dim, num_heads, _NUM_HEADS_MOCOV3 if is_mocov3 else _NUM_HEADS, origin=origin)
    is_swiglu = fc1.shape[0] == 2 * fc2.shape[1]
    has_layer_scale = "blocks.0.ls1.gamma" in named
    arguments = {
        "model_name": _timm_name(dim, patch_size, num_registers, is_swiglu=is_swiglu, has_layer_scale=has_layer_scale),
        "num_classes": 0,
        "img_size": grid_side * patch_size,
        "patch_size": patch_size,
        "embed_dim": dim,
        "depth": _depth(named),
        "num_heads": heads,
        "mlp_ratio": _ratio(fc1.shape[0], dim),
    }
    if has_layer_scale:
        arguments["init_values"] = 1.0
    if num_registers or no_embed_class:
        arguments["no_embed_class"] = no_embed_class
    if num_registers:
        arguments["reg_tokens"] = num_registers
        # DINOv2's authors resample by DINO's rule without registers, and by timm's with them (dinov2/hub/backbones.py)
        arguments["position_resampling"] = "timm"
    summary = _summary(_LETTERS if not has_layer_scale else _LETTERS_DINO, arguments)
    extras = (f"{num_registers} registers" if num_registers else "", "SwiGLU" if is_swiglu else "")
    return Network(named, arguments, ", ".join([summary, *filter(None, extras), f"{arguments['img_size']} px"]))


def as_dinov3(tensors: Mapping[str, Tensor], *, num_heads: int | None, origin: str) -> Network:
    """timm's Eva as DINOv3 uses it; its feature is the class token."""
    if found := tensors.keys() & {"blocks.0.attn.relative_position_bias_table", "rope.freqs"}:
        raise WeightsError(f"{origin} is no DINOv3: it holds {found.pop()}. {NAME_IT}")
    named = _renamed(tensors, _RENAMED_DINOV3, origin=origin)
    dim, patch_size = _patches_of(named, origin=origin)
    heads = _num_heads_dinov3(named.get("rope_embed.periods"), dim, num_heads, origin=origin)
    split = _with_split_bias(named, origin=origin)
    named = {key: tensor for key, tensor in split.items() if not re.fullmatch(_UNUSED_DINOV3, key)}
    is_swiglu = "blocks.0.mlp.fc1_g.weight" in named
    hidden = _require("blocks.0.mlp.fc2.weight", named, ndim=2, origin=origin).shape[1]
    has_bias = "blocks.0.attn.q_bias" in named
    name = {768: "base", 1024: "large"}.get(dim, "small") if not is_swiglu else "small_plus"
    arguments = {
        "model_name": f"vit_{name}_patch16_dinov3{'_qkvb' if has_bias else ''}",
        "num_classes": 0,
        "global_pool": "token",
        "patch_size": patch_size,
        "embed_dim": dim,
        "depth": _depth(named),
        "num_heads": heads,
        "mlp_ratio": _ratio(hidden, dim),
        "num_reg_tokens": named["reg_token"].shape[1] if _has_rows(named.get("reg_token")) else 0,
        "qkv_bias": has_bias,
    }
    if is_swiglu:
        arguments["swiglu_align_to"] = 8 if hidden % 8 == 0 else 1
    summary = f"DINOv3 {_summary(_LETTERS_DINO, arguments)}"
    extras = (f"{arguments['num_reg_tokens']} registers", "SwiGLU" if is_swiglu else "", "rotary positions")
    return Network(named, arguments, ", ".join([summary, *filter(None, extras)]))


def _refuse_other_transformers(tensors: Mapping[str, Tensor], *, origin: str) -> None:
    for pattern, network in _REFUSED.items():
        found = [for_message(key) for key in tensors if re.search(pattern, key)]
        if found:
            raise WeightsError(
                f"{origin} is {network} ({', '.join(found[:5])}), which massl does not read from other projects. If "
                "timm has this model, give its name there"
            )
    missing = [key for key in _ESSENTIAL if key not in tensors]
    if missing:
        raise WeightsError(f"the weights of {origin} are incomplete: missing {', '.join(missing)}")


def renamed_key(key: str, names: Mapping[str, str]) -> str:
    """`names`: regular expression -> what takes its place, one after the other."""
    for pattern, name in names.items():
        key = re.sub(pattern, name, key)
    return key


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str], *, origin: str) -> dict[str, Tensor]:
    renamed = {renamed_key(key, names): tensor for key, tensor in tensors.items()}
    if len(renamed) != len(tensors):
        raise WeightsError(f"{origin} holds some weights twice, under two names; save only the ones to use")
    return renamed


def _require(key: str, tensors: Mapping[str, Tensor], *, ndim: int, origin: str) -> Tensor:
    if key not in tensors:
        raise WeightsError(f"the weights of {origin} are incomplete: missing {key}")
    tensor = tensors[key]
    if tensor.ndim != ndim or not tensor.numel():
        raise WeightsError(f"{key} of {origin} has the shape {list(tensor.shape)} instead of {ndim} dimensions")
    return tensor


def _patches_of(tensors: Mapping[str, Tensor], *, origin: str) -> tuple[int, int]:
    """The width of the tokens and the side of a patch."""
    projection = tensors.get("patch_embed.proj.weight", torch.empty(0))
    is_square = projection.ndim == 4 and projection.shape[1] == 3 and projection.shape[2] == projection.shape[3]
    if not is_square or not projection.numel():
        found = f"patch_embed.proj.weight is {list(projection.shape)}"
        raise WeightsError(f"{origin} takes no square patches of RGB images: {found}")
    return projection.shape[0], projection.shape[2]


def is_plain(tensor: Tensor) -> bool:
    """Whether it can be computed with: real numbers, not sparse, not a shape without values."""
    is_odd = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta
    return tensor.dtype.is_floating_point and not is_odd


def _has_rows(tensor: Tensor | None) -> bool:
    return tensor is not None and is_plain(tensor) and tensor.ndim == 3 and tensor.shape[1] > 0


def _with_registers_apart(tensors: dict[str, Tensor], *, origin: str) -> dict[str, Tensor]:
    """DINOv2 adds a position to the class token but not to registers; timm's model adds it to neither, so it is added
    here.
    """
    if "reg_token" in tensors and not _has_rows(tensors["reg_token"]):
        raise WeightsError(f"reg_token of {origin} has the shape {list(tensors['reg_token'].shape)}")
    registers = tensors.get("register_tokens")
    if registers is None:
        return tensors
    positions, token = tensors["pos_embed"], tensors["cls_token"]
    is_token = is_plain(token) and token.shape == (1, 1, positions.shape[2])
    if not _has_rows(registers) or not _has_rows(positions) or not is_token:
        raise WeightsError(f"register_tokens of {origin} has the shape {list(registers.shape)}, beside its class token")
    others = {key: tensor for key, tensor in tensors.items() if key != "register_tokens"}
    moved = {"cls_token": token + positions[:, :1], "pos_embed": positions[:, 1:], "reg_token": registers}
    return {**others, **moved}


def _with_split_bias(tensors: Mapping[str, Tensor], *, origin: str) -> dict[str, Tensor]:
    """timm keeps the biases of queries and values apart; that of keys is masked out in DINOv3."""
    split = {}
    for key, tensor in tensors.items():
        if not key.endswith(".attn.qkv.bias"):
            split[key] = tensor
            continue
        mask = tensors.get(f"{key}_mask", torch.ones(()))
        if (
            not is_plain(tensor)
            or not is_plain(mask)
            or tensor.ndim != 1
            or len(tensor) % 3
            or mask.shape not in ((), tensor.shape)
        ):
            raise WeightsError(f"{for_message(key)} of {origin} has the shape {list(tensor.shape)}")
        query, keys, value = (tensor * mask).chunk(3)
        if not bool((keys == 0).all()):
            raise WeightsError(f"{for_message(key)} of {origin} has a bias of keys, unlike DINOv3. {NAME_IT}")
        split |= {key.replace("qkv.bias", "q_bias"): query, key.replace("qkv.bias", "v_bias"): value}
    return split


def _num_heads_dinov3(periods: Tensor | None, dim: int, given: int | None, *, origin: str) -> int:
    """From the periods of the rotations, a quarter as many as a head has channels; timm's files do not have them."""
    if periods is None:
        return _num_heads(dim, given, _NUM_HEADS_DINOV3, origin=origin)
    if not is_plain(periods) or periods.ndim != 1 or not len(periods) or dim % (4 * len(periods)):
        raise WeightsError(f"rope_embed.periods of {origin} has the shape {list(periods.shape)}, with width {dim}")
    num_heads = dim // (4 * len(periods))
    if given is not None and given != num_heads:
        raise WeightsError(f"{origin} has {num_heads} attention heads, not {given}; omit --num_heads")
    expected = _ROPE_BASE ** (torch.arange(len(periods)) / len(periods))
    if not torch.allclose(periods.float(), expected, rtol=0.01):  # the published files hold them in bfloat16
        raise WeightsError(f"the rotations of {origin} have other periods than DINOv3's, of base {_ROPE_BASE:g}")
    return num_heads


def _num_heads(dim: int, given: int | None, usual: Mapping[int, int], *, origin: str) -> int:
    num_heads = given if given is not None else usual.get(dim)
    if num_heads is None:
        raise WeightsError(f"the number of attention heads of {origin} (width {dim}) is unknown; give --num_heads")
    if num_heads < 1 or dim % num_heads:
        raise WeightsError(f"{num_heads} attention heads do not divide the width {dim} of {origin}; change --num_heads")
    return num_heads


def _depth(tensors: Collection[str]) -> int:
    return 1 + max(int(match[1]) for key in tensors if (match := re.match(r"blocks\.([0-9]{1,9})\.", key)))


def _ratio(hidden: int, dim: int) -> float:
    """`hidden` / `dim`, so that timm's int(dim * ratio) is `hidden` again in spite of rounding."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf)


def _timm_name(dim: int, patch_size: int, num_registers: int, *, is_swiglu: bool, has_layer_scale: bool) -> str:
    """timm's norms have eps 1e-6, as in all projects here."""
    registers = "_reg4" if num_registers else ""
    if is_swiglu:
        return f"vit_giant_patch14{registers}_dinov2"
    if num_registers or (has_layer_scale and patch_size == 14):
        return f"vit_{_SIZES_DINOV2.get(dim, 'base')}_patch14{registers}_dinov2"
    return _TIMM_NAMES.get(dim, "vit_base_patch16_224")


def _summary(letters: Mapping[int, tuple[str, int]], arguments: Mapping[str, Any]) -> str:
    dim, depth, patch_size = (arguments[key] for key in ("embed_dim", "depth", "patch_size"))
    letter, usual_depth = letters.get(dim, ("", 0))
    shape = f"ViT-{letter}/{patch_size}" if depth == usual_depth else f"ViT of width {dim}, patch {patch_size}"
    return f"{shape}, {depth} blocks, {arguments['num_heads']} heads"
