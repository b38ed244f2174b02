"""A folder for `timm.create_model("local-dir:...")`, written for one image size."""

from pathlib import Path
from typing import Any

import timm
from torch import Tensor

from massl.exports.job import (
    ExportError,
    ExportJob,
    Written,
    check_features,
    opening,
    relative_difference,
    write_json,
    write_weights,
)

_SNIPPET = """import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
transform = create_transform(**resolve_model_data_config(model))
image = transform(Image.open("{image}").convert("RGB"))
with torch.no_grad():
    features = model(image[None])"""


def write_timm(job: ExportJob, folder: Path) -> Written:
    config, tensors = described(job)
    write_weights(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", config)
    name = f"local-dir:{folder}"
    with opening("timm"):
        opened = timm.create_model(name, pretrained=True).eval()
    difference = check_features(job, opened, [job.size], tolerance=1e-5)
    return Written(library="timm", snippet=_SNIPPET, sizes=_sizes(job, name), difference=difference)


def described(job: ExportJob) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the weights as timm reads them."""
    if job.has_small_stem:
        raise ExportError(
            "timm has no option for the small first layer of this ResNet (backbone.stem small); export it with --to "
            "torchhub or --to onnx"
        )
    tensors, options = job.tensors(), job.timm_options()
    if job.backbone.is_transformer:
        options["img_size"] = list(job.size)
        positions = job.positions()
        tensors |= {} if positions is None else {"pos_embed": positions.detach().cpu()}
    model: Any = job.backbone.model
    config = {
        "architecture": job.architecture,
        "num_classes": 0,
        "num_features": job.backbone.dim,
        "model_args": options,
        "pretrained_cfg": {
            **{key: model.default_cfg[key] for key in ("first_conv", "classifier") if model.default_cfg.get(key)},
            "tag": "massl",
            "custom_load": False,
            "fixed_input_size": job.backbone.is_transformer,
            "num_classes": 0,
            **job.preparation.for_timm(),
        },
    }
    return config, tensors


def _sizes(job: ExportJob, name: str) -> str:
    height, width = job.size
    if job.backbone.position_resampling is None:
        return f"The folder is written for {height} x {width} px. The network has no position embeddings to resample."
    other = job.other_size()
    resampling = timm.create_model(name, pretrained=True, dynamic_img_size=True).eval()
    percent = 100 * relative_difference(job, resampling, other)
    rule = "its own rule, not by that of training" if job.backbone.position_resampling == "dino" else "its own rule"
    return (
        f"The folder is written for {height} x {width} px: there, features equal those of massl. For other sizes timm "
        f"(`dynamic_img_size=True`, or `img_size`) resamples the position embeddings by {rule}: at {other[0]} x "
        f"{other[1]} px features differ by {percent:.2g} %. Export again with `--image_size` for another size; folders "
        "for torch.hub take all sizes."
    )
