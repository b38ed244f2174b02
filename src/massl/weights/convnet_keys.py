"""ConvNeXts and ResNets in checkpoints of other projects -> timm's keys, and the arguments of the empty model.

The authors' ConvNeXt (also DINOv3's) and torchvision's name their tensors in their own ways. ResNets are named alike
everywhere: torchvision, timm, MoCo, SwAV, DINO.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from massl.weights.facts import WeightsError
from massl.weights.transformer_keys import Network, is_plain, renamed_key

Depths = tuple[int, ...]
_CONVNEXTS: dict[tuple[int, Depths], str] = {  # width and blocks of the stages -> size; v2 adds response norms
    (40, (2, 2, 6, 2)): "atto",
    (48, (2, 2, 6, 2)): "femto",
    (64, (2, 2, 6, 2)): "pico",
    (80, (2, 2, 8, 2)): "nano",
    (96, (3, 3, 9, 3)): "tiny",
    (96, (3, 3, 27, 3)): "small",
    (128, (3, 3, 27, 3)): "base",
    (192, (3, 3, 27, 3)): "large",
    (256, (3, 3, 27, 3)): "xlarge",  # v1 only
    (352, (3, 3, 27, 3)): "huge",  # v2 only
}
_ONLY_IN = {"xlarge": "convnext", "huge": "convnextv2"}
_AUTHORS_SIGN, _TORCHVISION_SIGN = "downsample_layers.0.0.weight", "features.1.0.layer_scale"
_AUTHORS = {  # key -> timm's
    r"^downsample_layers\.0\.": "stem.",
    r"^downsample_layers\.(\d+)\.": r"stages.\1.downsample.",
    r"^stages\.(\d+)\.(?=\d+\.)": r"stages.\1.blocks.",
    r"\.dwconv\.": ".conv_dw.",
    r"\.pwconv([12])\.": r".mlp.fc\1.",
    r"\.grn\.gamma$": ".mlp.grn.weight",
    r"\.grn\.beta$": ".mlp.grn.bias",
    r"^norm\.": "head.norm.",
}
_TORCHVISION = {
    r"^features\.0\.": "stem.",
    **{rf"^features\.{2 * stage}\.": f"stages.{stage}.downsample." for stage in (1, 2, 3)},
    **{rf"^features\.{2 * stage + 1}\.": f"stages.{stage}.blocks." for stage in (0, 1, 2, 3)},
    r"\.block\.0\.": ".conv_dw.",
    r"\.block\.2\.": ".norm.",
    r"\.block\.3\.": ".mlp.fc1.",
    r"\.block\.5\.": ".mlp.fc2.",
    r"\.layer_scale$": ".gamma",
    r"^classifier\.0\.": "head.norm.",
    r"^classifier\.2\.": "head.fc.",
}
_RESNETS: dict[tuple[bool, Depths], str] = {  # whether blocks are bottlenecks, blocks of the stages -> timm's name
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "resnet34",
    (True, (2, 2, 2, 2)): "resnet26",
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "resnet101",
    (True, (3, 8, 36, 3)): "resnet152",
}
_PIXELS = "224 px"


def is_convnext(tensors: Collection[str]) -> bool:
    """Whether the keys are those of a ConvNeXt: the authors', torchvision's or timm's."""
    return any(sign in tensors for sign in (_AUTHORS_SIGN, _TORCHVISION_SIGN, "stages.0.blocks.0.conv_dw.weight"))


def as_convnext(tensors: Mapping[str, Tensor], *, origin: str, is_named: bool) -> Network:
    """timm's ConvNeXt. `is_named`: the user names the model, so its size need not be known here."""
    named = tensors
    if _AUTHORS_SIGN in tensors:
        # `norms` are the same norm once more (DINOv3); `projectors` of distillation
        own = {key: tensor for key, tensor in tensors.items() if not key.startswith(("norms.", "projectors."))}
        named = {renamed_key(key, _AUTHORS): tensor for key, tensor in own.items()}
    elif _TORCHVISION_SIGN in tensors:
        named = {renamed_key(key, _TORCHVISION): tensor for key, tensor in tensors.items()}
    # response norms are [1, 1, 1, C] in the authors' files, scales [C, 1, 1] in torchvision's
    named = {
        key: _flat(tensor) if re.search(r"\.mlp\.grn\.|\.gamma$", key) else tensor for key, tensor in named.items()
    }
    named = {key: tensor for key, tensor in named.items() if not key.startswith("head.fc.")}
    stem = named.get("stem.0.weight", torch.empty(0))
    width = stem.shape[0] if stem.ndim == 4 else 0
    depths = _depths(named, r"stages\.([0-3])\.blocks\.([0-9]{1,4})\.")
    size = _CONVNEXTS.get((width, depths), "")
    family = "convnextv2" if "stages.0.blocks.0.mlp.grn.weight" in named else "convnext"
    if not is_named and (not size or _ONLY_IN.get(size, family) != family):
        raise WeightsError(_unknown("ConvNeXt", f"width {width}, {depths} blocks", origin=origin))
    # a linear layer and a convolution of 1 pixel are the same; timm's small models have convolutions
    as_convolutions = named.get("stages.0.blocks.0.mlp.fc1.weight", torch.empty(0)).ndim == 4
    arguments: dict[str, Any] = {"model_name": f"{family}_{size}", "num_classes": 0, "conv_mlp": as_convolutions}
    version = "-V2" if family == "convnextv2" else ""
    return Network(dict(named), arguments, f"ConvNeXt{version}-{size.capitalize()}, {depths} blocks, {_PIXELS}")


def is_resnet(tensors: Collection[str]) -> bool:
    """Whether the keys are those of a ResNet."""
    return any(re.match(r"layer1\.0\.", key) for key in tensors)


def as_resnet(tensors: Mapping[str, Tensor], *, origin: str, is_named: bool) -> Network:
    """timm's ResNet, also wide and with groups (ResNeXt)."""
    # older files of PyTorch lack these counters, which nothing here reads
    norms = [key.removesuffix("running_var") for key in tensors if key.endswith(".running_var")]
    counters = {f"{norm}num_batches_tracked": torch.zeros((), dtype=torch.int64) for norm in norms}
    named = {**counters, **tensors}
    depths = _depths(named, r"layer([1-4])\.([0-9]{1,4})\.")
    is_bottleneck = "layer1.0.conv3.weight" in named
    first = list(named["conv1.weight"].shape) if "conv1.weight" in named else "of another name"
    name = _RESNETS.get((is_bottleneck, depths), "")
    if not is_named and (not name or first != [64, 3, 7, 7]):
        raise WeightsError(_unknown("ResNet", f"first convolution {first}, {depths} blocks", origin=origin))
    arguments: dict[str, Any] = {"model_name": name, "num_classes": 0}
    kind = name.replace("resnet", "ResNet-")
    if is_bottleneck:
        shapes = [named[key].shape for key in ("layer1.0.conv1.weight", "layer1.0.conv2.weight") if key in named]
        if [len(shape) for shape in shapes] != [4, 4] or not shapes[1][1]:
            raise WeightsError(f"the weights of {origin} are incomplete: layer1.0 is no bottleneck of a ResNet")
        width, group_width = shapes[0][0], shapes[1][1]
        num_groups = width // group_width
        if (num_groups, group_width) != (1, 64):
            arguments |= {"cardinality": num_groups, "base_width": group_width}
            kind += f" with {num_groups} groups of {group_width}" if num_groups > 1 else f" of width {group_width}"
    return Network(named, arguments, f"{kind}, {depths} blocks, {_PIXELS}")


def _flat(tensor: Tensor) -> Tensor:
    """One that has a single long side as a vector; others as they are."""
    return tensor.flatten() if is_plain(tensor) and max(tensor.shape, default=0) == tensor.numel() else tensor


def _depths(tensors: Collection[str], pattern: str) -> Depths:
    """Blocks of each stage."""
    found = [match.groups() for key in tensors if (match := re.match(pattern, key))]
    stages = sorted({stage for stage, _ in found})
    return tuple(1 + max(int(block) for of_stage, block in found if of_stage == stage) for stage in stages)


def _unknown(kind: str, found: str, *, origin: str) -> str:
    sizes = sorted(set(_CONVNEXTS.values()) if kind == "ConvNeXt" else set(_RESNETS.values()))
    return (
        f"{origin} is a {kind} of no size that is known from its shapes ({found}; known: {', '.join(sizes)}). If timm "
        "has it, name it: massl import --backbone NAME"
    )
