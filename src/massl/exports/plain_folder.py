"""massl's own backbone file with preprocess.json: for massl, and for programs that read tensors with timm's names."""

from pathlib import Path

import timm
from safetensors.torch import load_file

from massl.exports.job import ExportError, ExportJob, Written, check_features, opening, write_json
from massl.weights.io import BACKBONE_FILE, backbone_bytes

_SNIPPET = """import safetensors.torch
import timm

model = timm.create_model("{architecture}", **{options}).eval()
model.load_state_dict(safetensors.torch.load_file("{folder}/backbone.safetensors"))"""

_MASSL_SNIPPET = """import massl

model, transform = massl.load_backbone("{folder}/backbone.safetensors")"""


def write_safetensors(job: ExportJob, folder: Path) -> Written:
    model = job.model
    if job.size[0] != job.size[1] and job.backbone.position_resampling is not None:
        raise ExportError("backbone.safetensors holds one number as its size; give a square one, or choose --to timm")
    content = backbone_bytes(
        job.backbone.model,
        timm_arguments=job.backbone.timm_arguments,
        mean=model.mean,
        std=model.std,
        image_size=job.size[0] if job.size[0] == job.size[1] else model.image_size,
        crop_ratio=model.crop_ratio,
        origin=model.imported,
    )
    (folder / BACKBONE_FILE).write_bytes(content)
    write_json(folder / "preprocess.json", job.preparation.as_plain())
    text = "massl opens the file for every size, and other programs by timm's names of the tensors."
    own, is_for_timm = _own_size(job), not job.has_small_stem  # otherwise the card opens it with massl
    if job.backbone.position_resampling is not None:
        is_for_timm = own == job.size
        text += (
            f" timm's model of them takes images of {own[0]} x {own[1]} px. For another size timm resamples position "
            "embeddings by its own rule, which gives other features: export with --to timm for it."
        )
    difference = 0.0
    if not job.has_small_stem:
        options = job.timm_options()
        with opening("timm"):
            opened = timm.create_model(job.architecture, **options).eval()
            opened.load_state_dict(load_file(folder / BACKBONE_FILE))
        difference = check_features(job, opened, [own], tolerance=1e-5)
    if not is_for_timm:
        return Written(library="massl", snippet=_MASSL_SNIPPET, sizes=text, difference=difference)
    snippet = _SNIPPET.replace("{architecture}", job.architecture).replace("{options}", repr(options))
    return Written(library="timm", snippet=snippet, sizes=text, difference=difference)


def _own_size(job: ExportJob) -> tuple[int, int]:
    """The size that a timm model of the same options is built for."""
    if not job.backbone.is_transformer:
        return job.size
    height, width = job.backbone.model.patch_embed.img_size  # type: ignore[union-attr, misc]
    return height, width
