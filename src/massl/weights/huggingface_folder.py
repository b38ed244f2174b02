"""A folder of the Hugging Face Hub: config.json and weights, of `transformers` or of timm.

The folder may be a stranger's: files are bounded, values are checked, and nothing in it is executed or downloaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
from torch import Tensor

from massl.data.evaluation.views import MAX_SIDE
from massl.json_lines import read_json
from massl.nn.positions import ResamplingRule
from massl.weights.facts import WeightsError, are_three_numbers, for_message, is_number
from massl.weights.io import BACKBONE_FILE, read_pickled, read_safetensors

Colours = tuple[float, float, float]
_WEIGHTS, _INDEX, _PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
_MAX_PARTS = 100  # files that an index names
_MAX_HEADS = 4096
_EPS = 1e-6  # of norms in timm; configs with 1e-12 belong to weights whose authors have 1e-6 (DINO, MAE, ViT)
_EPS_OF = {  # model_type -> eps of its norms in timm's model
    **dict.fromkeys(("vit", "vit_mae", "dinov2", "dinov2_with_registers"), _EPS),
    **dict.fromkeys(("dinov3_convnext", "convnext", "convnextv2"), _EPS),
    "dinov3_vit": 1e-5,
}
_ACTIVATIONS: dict[str, dict[str, Any]] = {"gelu": {}, "gelu_pytorch_tanh": {"act_layer": "gelu_tanh"}}
_ROPE_THETA = 100.0  # of DINOv3's rotations in timm


@dataclass(frozen=True, kw_only=True)
class ForeignFile:
    """A checkpoint of another project, with what it says beside its tensors."""

    path: Path
    checkpoint: Any
    num_bytes: int
    num_heads: int | None = None
    timm_name: str | None = None  # of the architecture
    timm_options: dict[str, Any] = field(default_factory=dict)  # of the architecture; tensors do not tell them
    position_resampling: ResamplingRule | None = None  # None: the usual rule of such files
    mean: Colours | None = None  # of its images
    std: Colours | None = None
    crop_ratio: float | None = None


def read_hub_folder(path: Path) -> ForeignFile | None:
    """The model in a folder of transformers or timm, or in its model.safetensors; None if `path` is neither."""
    is_folder = path.is_dir()
    folder = path if is_folder else path.parent
    is_named = (is_folder and not (path / BACKBONE_FILE).exists()) or path.name in (_WEIGHTS, _INDEX, _PICKLED)
    if not is_named or not (folder / "config.json").is_file():
        return None
    config = _json_object(folder / "config.json")
    if _kind(config) not in _EPS_OF and "architecture" in config:
        return _of_timm(path, folder, config)
    if not is_folder and _kind(config) not in _EPS_OF:
        return None  # the file may have another layout
    heads, options = _architecture(config, folder)
    tensors, num_bytes = _read_weights(folder)
    return ForeignFile(
        path=path, checkpoint=tensors, num_bytes=num_bytes, num_heads=heads, timm_options=options, **_images(folder)
    )


def _of_timm(path: Path, folder: Path, config: Mapping[str, Any]) -> ForeignFile:
    """What timm's `save_for_hf` writes, and `massl export --to timm`."""
    file, name = folder / "config.json", config["architecture"]
    if not isinstance(name, str) or not timm.is_model(name):
        raise WeightsError(f"{file} names the architecture {_shown(name)!r}, which timm does not have")
    options, published = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    if not isinstance(options, dict) or not isinstance(published, dict):
        raise WeightsError(f"{file} is damaged: expected objects as model_args and pretrained_cfg")
    options = {key: value for key, value in options.items() if key != "num_classes"}
    if isinstance(size := options.get("img_size"), list):
        if len(size) != 2 or size[0] != size[1]:
            raise WeightsError(f"{file} describes images of {_shown(size)} px; massl reads square ones")
        options["img_size"] = size[0]
    mean: Any = published.get("mean")
    std: Any = published.get("std")
    crop: Any = published.get("crop_pct")
    if not are_three_numbers(mean) or not are_three_numbers(std) or min(std) <= 0:
        raise WeightsError(f"{file} is damaged: expected mean, three numbers, and std, three above 0")
    tensors, num_bytes = _read_weights(folder)
    tag = str(published.get("tag", ""))
    is_timms = "pos_embed" in tensors and tag != "massl" and follows_timms_rule(name, tag)
    return ForeignFile(
        path=path,
        checkpoint=tensors,
        num_bytes=num_bytes,
        timm_name=name,
        timm_options=options,
        position_resampling="timm" if is_timms else None,
        mean=(float(mean[0]), float(mean[1]), float(mean[2])),
        std=(float(std[0]), float(std[1]), float(std[2])),
        crop_ratio=float(crop) if is_number(crop) and 0 < crop <= 1 else None,
    )


def follows_timms_rule(architecture: str, tag: str) -> bool:
    """Whether timm's published weights were trained with its rule for positions, not with DINO's."""
    return tag != "dino" and not ("dinov2" in architecture and "_reg" not in architecture)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {for_message(str(error))}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds no JSON object; copy the folder again")
    return content


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", ""))


def _architecture(config: Mapping[str, Any], folder: Path) -> tuple[int | None, dict[str, Any]]:
    """Attention heads and further options of timm's model; refused: what timm's model does not compute."""
    kind, file = _kind(config), folder / "config.json"
    if kind not in _EPS_OF:
        known = ", ".join(sorted(_EPS_OF))
        raise WeightsError(
            f"{file} has the model_type {for_message(kind)!r}; massl reads these of transformers: {known}"
        )
    eps = config.get("layer_norm_eps", _EPS_OF[kind])
    is_usual = is_number(eps) and (eps == _EPS_OF[kind] or 0.0 <= eps < _EPS_OF[kind] == _EPS)
    is_gated = kind == "dinov3_vit" and config.get("use_gated_mlp") is True
    is_swiglu = kind.startswith("dinov2") and config.get("use_swiglu_ffn") is True
    activation = config.get("hidden_act", "gelu")
    options = _options_of(activation, kind, is_gated=is_gated) if not is_swiglu else {}
    heads = config.get("num_attention_heads")
    has_heads = "convnext" not in kind
    size = config.get("image_size")
    theta = config.get("rope_theta", _ROPE_THETA)
    problems = {
        f"layer_norm_eps {_shown(eps)} instead of {_EPS_OF[kind]:g}": not is_usual,
        f"hidden_act {_shown(activation)}": options is None,
        f"num_attention_heads {_shown(heads)}": has_heads and not (type(heads) is int and 0 < heads <= _MAX_HEADS),
        f"image_size {_shown(size)}, which is not square": isinstance(size, list) and len({*map(str, size)}) != 1,
        f"rope_theta {_shown(theta)} instead of {_ROPE_THETA:g}": kind == "dinov3_vit" and theta != _ROPE_THETA,
    }
    wrong = [problem for problem, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise WeightsError(f"{file} describes a model that massl cannot compute: {'; '.join(wrong)}")
    no_bias = {"qkv_bias": False} if config.get("qkv_bias") is False else {}
    return heads if has_heads else None, {**(options or {}), **no_bias}


def _options_of(activation: Any, kind: str, *, is_gated: bool) -> dict[str, Any] | None:
    """None: the activation is another one than timm's."""
    if is_gated or "dinov3" in kind or "convnext" in kind:
        return {} if activation == ("silu" if is_gated else "gelu") else None
    return _ACTIVATIONS.get(activation) if isinstance(activation, str) else None


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], int]:
    """All tensors, and the bytes of the files that hold them."""
    if (folder / _WEIGHTS).is_file():
        files = [folder / _WEIGHTS]
    elif (folder / _INDEX).is_file():
        files = _parts(folder)
    elif (folder / _PICKLED).is_file():
        checkpoint = read_pickled(folder / _PICKLED)
        return checkpoint, (folder / _PICKLED).stat().st_size
    else:
        raise WeightsError(f"{folder} has a config.json but no {_WEIGHTS}, {_INDEX} or {_PICKLED}; copy it whole")
    tensors: dict[str, Tensor] = {}
    for file in files:
        found, _ = read_safetensors(file)
        if twice := tensors.keys() & found.keys():
            raise WeightsError(f"two weights files of {folder} hold {for_message(min(twice))}; copy the folder again")
        tensors |= found
    return tensors, sum(file.stat().st_size for file in files)


def _parts(folder: Path) -> list[Path]:
    """The files that an index names; all lie in the folder."""
    names = _json_object(folder / _INDEX).get("weight_map")
    found = sorted({*map(str, names.values())}) if isinstance(names, dict) else []
    odd = [name for name in found if not re.fullmatch(r"\w[\w.-]{0,199}\.safetensors", name)]
    if odd or not 0 < len(found) <= _MAX_PARTS:
        reason = f"names {for_message(odd[0])!r}" if odd else f"names {len(found)} weights files"
        raise WeightsError(f"{folder / _INDEX} is damaged: it {reason}; copy the folder again")
    missing = [name for name in found if not (folder / name).is_file()]
    if missing:
        raise WeightsError(f"{folder} lacks {missing[0]}, which its index names; copy it whole")
    return [folder / name for name in found]


def _images(folder: Path) -> dict[str, Any]:
    """How images are prepared, as far as massl prepares them alike."""
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        return {}
    config = _json_object(file)
    mean: Any = config.get("image_mean")
    std: Any = config.get("image_std")
    if config.get("do_normalize") is False:
        mean, std = [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]
    if not are_three_numbers(mean) or not are_three_numbers(std) or min(std) <= 0:
        raise WeightsError(f"{file} is damaged: expected image_mean, three numbers, and image_std, three above 0")
    return {"mean": tuple(map(float, mean)), "std": tuple(map(float, std)), "crop_ratio": _crop_ratio(config)}


def _crop_ratio(config: Mapping[str, Any]) -> float | None:
    """Centre crop / shorter side; None where images are not resized and cropped in this way."""
    size, crop = config.get("size"), config.get("crop_size")
    if config.get("do_center_crop") is not True or not isinstance(size, dict) or not isinstance(crop, dict):
        return None
    side, height = size.get("shortest_edge"), crop.get("height")
    if type(side) is not int or type(height) is not int or height != crop.get("width"):
        return None
    return height / side if 0 < height <= side <= MAX_SIDE else None


def _shown(value: Any) -> str:
    return for_message(str(value)[:100])
