"""Finds the backbone in a checkpoint of another project, and the timm model that it fits.

Projects differ in the entry of the file, the prefix of the keys, and the other tensors in the file; this module
resolves these. transformer_keys.py and convnet_keys.py know the networks, huggingface_keys.py other names for them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from timm.models import is_model_in_modules
from torch import Tensor

from massl.nn.positions import RESAMPLING_RULE, ResamplingRule
from massl.weights.convnet_keys import as_convnext, as_resnet, is_convnext, is_resnet
from massl.weights.facts import WeightsError, for_message
from massl.weights.huggingface_keys import has_hub_keys, with_timm_keys
from massl.weights.transformer_keys import NAME_IT, Network, as_dinov3, as_transformer, is_dinov3, is_transformer

KNOWN_LAYOUTS = (
    "a training checkpoint of MaSSL, DINO, iBOT or DINOv2 ({'teacher': {'backbone.*'}}; the teacher is taken)",
    "a checkpoint of MoCo ({'state_dict': {'module.encoder_q.*'}}) or MoCo-v3 ({'state_dict': "
    "{'module.base_encoder.*'}})",
    "a backbone of iBOT or SwAV ({'state_dict': {...}})",
    "a checkpoint of MAE, DeiT or ConvNeXt ({'model': {...}})",
    "the flat state dict of a DINO, DINOv2 or DINOv3 backbone, of timm's VisionTransformer, DINOv3, ConvNeXt or "
    "ResNet, or of torchvision's ResNet or ConvNeXt",
    "a folder or file of transformers: ViT, ViT-MAE, DINOv2, DINOv3, ConvNeXt",
)
_ENTRIES = ("teacher", "state_dict", "model")  # the weights are in the first of these, else the file itself
# of a backbone's keys, after any `module.` of distributed training
_PREFIXES = ("base_encoder.", "encoder_q.", "backbone.")
# not part of the backbone
_OTHER_PARTS = (
    *("head.", "fc.", "masked_embed", "mask_token", "decoder_", "predictor.", "momentum_encoder."),
    *("encoder_k.", "queue", "projection_head.", "prototypes", "dino_head.", "ibot_head."),
)
_KEPT = "head.norm."  # the last norm of timm's ConvNeXt
_TRAINED_BY = {"memory_bank": "MaSSL", "ibot_loss": "iBOT", "dino_loss": "DINO"}  # entry beside the teacher -> method
_PARTS = {"base_encoder.": "base encoder of the MoCo-v3 checkpoint", "encoder_q.": "encoder of the MoCo checkpoint"}


@dataclass(frozen=True, kw_only=True)
class ForeignBackbone:
    """The backbone in a file of another project."""

    network: Network
    part: str  # of the file: "teacher of the DINO checkpoint"


def backbone_of(
    checkpoint: Any,
    *,
    origin: str,
    num_heads: int | None = None,
    timm_name: str | None = None,
    position_resampling: ResamplingRule | None = None,
) -> ForeignBackbone:
    """The backbone in a file, under timm's keys; unknown entries raise an error.

    `num_heads` if it is not the usual number for the width. `timm_name` names the model where the tensors do not tell.
    `position_resampling` replaces the authors' rule.
    """
    entry, weights = _weights_of(checkpoint, origin=origin)
    weights = _without("module.", weights, origin=origin)
    is_of_hub = has_hub_keys(weights)
    if is_of_hub:
        weights = with_timm_keys(weights, origin=origin)
    prefix = next((candidate for candidate in _PREFIXES if any(key.startswith(candidate) for key in weights)), "")
    unexpected = [key for key in weights if not key.startswith((prefix, *_OTHER_PARTS))]
    if unexpected:
        names = _some(sorted(unexpected))
        raise WeightsError(f"{origin} holds unexpected entries beside {prefix}*: {names}. {_known()}")
    tensors = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
    tensors = {
        key: tensor for key, tensor in tensors.items() if key.startswith(_KEPT) or not key.startswith(_OTHER_PARTS)
    }
    is_mocov3 = prefix == "base_encoder."
    network = _network_of(tensors, num_heads, timm_name, is_mocov3=is_mocov3, origin=origin)
    part = "transformers model" if is_of_hub else _part_of(checkpoint, entry, prefix, weights)
    return ForeignBackbone(network=_with_rule(network, position_resampling), part=part)


def _network_of(
    tensors: dict[str, Tensor], num_heads: int | None, timm_name: str | None, *, is_mocov3: bool, origin: str
) -> Network:
    named = network = None
    if timm_name is not None:
        arguments: dict[str, Any] = {"model_name": timm_name, "num_classes": 0}
        if num_heads is not None:
            arguments["num_heads"] = num_heads
        named = Network(tensors=tensors, timm_arguments=arguments, summary=timm_name)
        is_own_layout = is_model_in_modules(timm_name, ["beit", "eva"]) and "blocks.0.gamma_1" in tensors
        if is_own_layout and "dinov3" not in timm_name:  # BEiT and rotating ViTs need no other names
            return named
    if num_heads is not None and (is_resnet(tensors) or is_convnext(tensors)):
        raise WeightsError(f"{origin} holds a convolutional network, which has no attention heads; omit --num_heads")
    if is_resnet(tensors):
        network = as_resnet(tensors, origin=origin, is_named=named is not None)
    elif is_convnext(tensors):
        network = as_convnext(tensors, origin=origin, is_named=named is not None)
    elif is_dinov3(tensors):
        network = as_dinov3(tensors, num_heads=num_heads, origin=origin)
    elif is_transformer(tensors) or named is None:
        if not is_transformer(tensors, partly=True):
            raise WeightsError(
                f"{origin} holds no known network: its entries are {_some(tensors)}. {_known()}. {NAME_IT}"
            )
        is_named = named is not None
        network = as_transformer(tensors, num_heads=num_heads, is_mocov3=is_mocov3, is_named=is_named, origin=origin)
    if named is None or network is None:
        found = named or network
        assert found is not None
        return found
    kept = {key: value for key, value in network.timm_arguments.items() if key in ("img_size", "position_resampling")}
    pool = {"global_pool": "token"} if is_dinov3(tensors) else {}
    return network._replace(timm_arguments={**named.timm_arguments, **kept, **pool}, summary=named.summary)


def _with_rule(network: Network, rule: ResamplingRule | None) -> Network:
    if rule is None:
        return network
    if "pos_embed" not in network.tensors:
        raise WeightsError(f"{network.summary} has no position embeddings to resample; omit --position_resampling")
    arguments = {key: value for key, value in network.timm_arguments.items() if key != "position_resampling"}
    chosen = {} if rule == RESAMPLING_RULE else {"position_resampling": rule}
    return network._replace(timm_arguments={**arguments, **chosen})


def _part_of(checkpoint: Mapping[str, Any], entry: str | None, prefix: str, weights: Iterable[str]) -> str:
    if prefix in _PARTS:
        return _PARTS[prefix]
    if entry == "teacher":
        method = next((f"{method} " for sign, method in _TRAINED_BY.items() if sign in checkpoint), "")
        return f"teacher of the {method}checkpoint"
    if any(key.startswith("decoder_") for key in weights):
        return "encoder of the MAE checkpoint"
    if any(key.startswith("prototypes") for key in weights):
        return "backbone of the SwAV checkpoint"
    return "backbone of" if entry is None else f"backbone under {entry!r} of"


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


def _some(keys: Iterable[str]) -> str:
    shown = [for_message(key) for key in keys]
    return ", ".join(shown[:5]) + (" ..." if len(shown) > 5 else "")


def _known() -> str:
    return "Known: " + "; ".join(KNOWN_LAYOUTS)
