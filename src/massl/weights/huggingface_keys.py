"""Keys of Hugging Face's `transformers` -> those of timm, which transformer_keys.py and convnet_keys.py read.

ViTModel (also MAE's encoder), Dinov2Model, Dinov2WithRegistersModel, DINOv3ViTModel, DINOv3ConvNextModel, ConvNextModel
and ConvNextV2Model, with or without a head on top. The names are those of published files, which all versions of
transformers write and read.
"""

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from massl.weights.facts import WeightsError, for_message
from massl.weights.transformer_keys import is_plain, renamed_key

# a tensor that the network must have; before it stands the prefix of the whole backbone, "vit." for example
_SIGNS = (
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.weight",
    "stages.0.layers.0.depthwise_conv.weight",
)
_MAX_PREFIX = 40  # signs
_HEADS = ("pooler.", "classifier.", "decoder.")
_RENAMED_VIT = {
    r"^embeddings\.": "",
    r"^position_embeddings$": "pos_embed",
    r"^patch_embeddings\.(projection\.)?": "patch_embed.proj.",
    r"^(encoder\.)?layer\.(?=\d)": "blocks.",
    r"^layernorm\.": "norm.",
    r"\.attention\.(output\.dense|o_proj)\.": ".attn.proj.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"^(blocks\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.layer_scale([12])\.lambda1$": r".ls\1.gamma",
    r"\.mlp\.weights_in\.": ".mlp.fc1.",
    r"\.mlp\.weights_out\.": ".mlp.fc2.",
}
_RENAMED_DINOV3 = {
    **_RENAMED_VIT,
    r"^register_tokens$": "reg_token",
    r"\.ls([12])\.gamma$": r".gamma_\1",
    r"\.mlp\.down_proj\.": ".mlp.fc2.",
}
_GATED = {r"\.mlp\.gate_proj\.": ".mlp.fc1_g.", r"\.mlp\.up_proj\.": ".mlp.fc1_x."}
_NOT_GATED = {r"\.mlp\.up_proj\.": ".mlp.fc1."}
_RENAMED_CONVNEXT = {
    r"^encoder\.": "",
    r"^embeddings\.patch_embeddings\.": "stem.0.",
    r"^embeddings\.layernorm\.": "stem.1.",
    r"^stages\.0\.downsample_layers\.": "stem.",
    r"^(stages\.\d+)\.(downsample_layers|downsampling_layer)\.": r"\1.downsample.",
    r"^(stages\.\d+)\.layers\.": r"\1.blocks.",
    r"\.(depthwise_conv|dwconv)\.": ".conv_dw.",
    r"(?<=\d)\.(layer_norm|layernorm)\.": ".norm.",
    r"\.(pointwise_conv|pwconv)([12])\.": r".mlp.fc\2.",
    r"\.layer_scale_parameter$": ".gamma",
    r"\.grn\.": ".mlp.grn.",
    r"^(layer_norm|layernorm)\.": "head.norm.",
}
_ATTENTION = r"(blocks\.\d{1,9})\.attention\.(?:attention\.)?(query|key|value|[qkv]_proj)\.(weight|bias)"


def has_hub_keys(tensors: Collection[str]) -> bool:
    """Whether the keys are those of a network of transformers."""
    return _prefix(tensors) is not None


def with_timm_keys(tensors: Mapping[str, Tensor], *, origin: str) -> dict[str, Tensor]:
    """The backbone of a file of transformers under timm's keys; heads are left out, other entries keep their names."""
    prefix = _prefix(tensors) or ""
    backbone = {key: tensor for key, tensor in tensors.items() if not key.removeprefix(prefix).startswith(_HEADS)}
    own = {key.removeprefix(prefix): tensor for key, tensor in backbone.items()}
    is_convnext = any(re.match(r"(encoder\.)?stages\.0\.", key) for key in own)
    is_dinov3 = not is_convnext and "embeddings.position_embeddings" not in own
    names = _RENAMED_CONVNEXT if is_convnext else _RENAMED_DINOV3 if is_dinov3 else _RENAMED_VIT
    if is_dinov3:
        names = {**names, **(_GATED if any(".mlp.gate_proj." in key for key in own) else _NOT_GATED)}
    named = {renamed_key(key, names): tensor for key, tensor in own.items()}
    if len(named) != len(backbone):
        raise WeightsError(f"{origin} holds some weights twice, under two names; save only the ones to use")
    if is_dinov3 and named.get("reg_token", torch.ones(1)).numel() == 0:
        del named["reg_token"]  # a model without registers
    return _with_joined_attention(named, is_dinov3=is_dinov3, origin=origin)


def _prefix(tensors: Collection[str]) -> str | None:
    for key in tensors:
        for sign in _SIGNS:
            if key.endswith(sign) and re.fullmatch(rf"(\w{{1,{_MAX_PREFIX}}}\.)?", prefix := key.removesuffix(sign)):
                return prefix
    return None


def _with_joined_attention(tensors: Mapping[str, Tensor], *, is_dinov3: bool, origin: str) -> dict[str, Tensor]:
    """Queries, keys and values are one layer in timm and three in transformers."""
    parts: dict[str, dict[str, Tensor]] = {}  # name of the joined tensor -> q, k, v
    others = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(_ATTENTION, key)
        if match is None:
            others[key] = tensor
        else:
            parts.setdefault(f"{match[1]}.attn.qkv.{match[3]}", {})[match[2][0]] = tensor
    _require_own_memory([tensor for found in parts.values() for tensor in found.values()], origin=origin)
    return others | {
        name: _joined(name, found, may_lack_key=is_dinov3 and name.endswith("bias"), origin=origin)
        for name, found in parts.items()
    }


def _joined(name: str, parts: Mapping[str, Tensor], *, may_lack_key: bool, origin: str) -> Tensor:
    if may_lack_key and "k" not in parts and "q" in parts and is_plain(parts["q"]):
        parts = {**parts, "k": torch.zeros_like(parts["q"])}  # keys of DINOv3 have no bias
    missing = [part for part in "qkv" if part not in parts]
    if missing:
        words = {"q": "queries", "k": "keys", "v": "values"}
        lost = ", ".join(words[part] for part in missing)
        raise WeightsError(f"the weights of {origin} are incomplete: {for_message(name)} lacks those of the {lost}")
    found = [parts[part] for part in "qkv"]
    kinds = {(tensor.dtype, tensor.shape, is_plain(tensor)) for tensor in found}
    if len(kinds) != 1 or not is_plain(found[0]) or found[0].ndim != (2 if name.endswith("weight") else 1):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in found)
        raise WeightsError(f"queries, keys and values of {for_message(name)} of {origin} have the shapes {shapes}")
    return torch.cat(found)


def _require_own_memory(tensors: list[Tensor], *, origin: str) -> None:
    """Joining copies, so a small file must not claim large tensors: one number repeated, or one tensor many times."""
    plain = [tensor for tensor in tensors if is_plain(tensor)]
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in plain}
    if sum(tensor.numel() * tensor.element_size() for tensor in plain) > sum(stored.values()):
        raise WeightsError(f"attention layers of {origin} share their memory; save a copy of each tensor")
