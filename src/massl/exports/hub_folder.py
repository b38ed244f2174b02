"""A folder for `torch.hub.load(..., source="local")`: weights, config and a hubconf.py, without massl."""

import shutil
from pathlib import Path
from typing import Any

import torch

from massl.exports import hubconf
from massl.exports.job import ExportJob, Written, check_features, opening, write_json, write_weights

_SNIPPET = """import torch
from PIL import Image

model = torch.hub.load("{folder}", "backbone", source="local")
transform = torch.hub.load("{folder}", "transform", source="local")
image = transform(Image.open("{image}").convert("RGB"))
with torch.no_grad():
    features = model(image[None])"""


def write_torchhub(job: ExportJob, folder: Path) -> Written:
    write_weights(folder / "model.safetensors", job.tensors())
    config = {
        "architecture": job.architecture,
        "model_args": job.timm_options(),
        "stem": "small" if job.has_small_stem else "",
        "position_resampling": job.backbone.position_resampling,
        "is_transformer": job.backbone.is_transformer,
        "transform": job.preparation.for_timm(),
    }
    write_json(folder / "config.json", config)
    shutil.copyfile(hubconf.__file__, folder / "hubconf.py")
    hub: Any = torch.hub
    with opening("torch.hub"):
        opened = hub.load(str(folder), "backbone", source="local")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    sizes = [job.size, job.other_size()] if job.backbone.is_transformer else [job.size]
    if job.backbone.is_transformer:
        side = job.backbone.patch_size
        sizes.append((2 * side, 3 * side))
    difference = check_features(job, opened, sizes, tolerance=1e-5)
    text = (
        "The model takes images of any size of at least one patch; pixels beyond the last whole patch are ignored. "
        "hubconf.py resamples position embeddings as in training."
        if job.backbone.is_transformer
        else "The model takes the sizes that timm's network takes."
    )
    return Written(library="pytorch", snippet=_SNIPPET, sizes=text, difference=difference)
