"""A folder for ONNX Runtime: model.onnx and preprocess.json.

Batch, height and width are variable where position embeddings follow DINO's rule or there are none; models with timm's
rule or with rotations (DINOv3) are written for one size.
"""

import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from massl.exports.hubconf import resampled_positions
from massl.exports.job import ExportError, ExportJob, Features, Written, check_features, takes_size, write_json
from massl.nn.backbone import Backbone
from massl.nn.transformer.plain import embed_patches
from massl.nn.transformer.tokens import normed_tokens

_OPSET = 18
_LARGEST_FILE = 1 << 30  # bytes of weights; protocol buffers end at 2 GiB, so larger models get a second file
_SNIPPET = """import json
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession("{folder}/model.onnx")
prepare = json.loads(Path("{folder}/preprocess.json").read_text())
image = Image.open("{image}").convert("RGB")
height, width = prepare["size"]
if prepare["resize_shorter_side"] is None:
    image = image.resize((width, height), Image.Resampling.BICUBIC)
else:
    side, shorter = prepare["resize_shorter_side"], min(image.size)
    image = image.resize([side * length // shorter for length in image.size], Image.Resampling.BICUBIC)
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    image = image.crop((left, top, left + width, top + height))
pixels = (np.asarray(image, dtype=np.float32) * prepare["scale"] - prepare["mean"]) / prepare["std"]
images = pixels.astype(np.float32).transpose(2, 0, 1)[None]
features = session.run(["features"], {"images": images})[0]"""


def require_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"--to onnx needs {', '.join(missing)}; install them with: pip install 'massl[onnx]'")


class _Network(nn.Module):
    """Images -> features, and patch tokens if there are any."""

    def __init__(self, backbone: Backbone, *, any_size: bool) -> None:
        super().__init__()
        self.backbone, self.any_size = backbone, any_size

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:  # [B, 3, H, W] -> [B, D], [B, N, D]
        model: Any = self.backbone.model
        if not (self.backbone.is_transformer and self.any_size):
            tokens = self.backbone(images)
            return (tokens.pooled,) if tokens.patches is None else (tokens.pooled, tokens.patches)
        grid = model.patch_embed.proj(images)
        patches = model.patch_embed.norm(grid.flatten(2).transpose(1, 2))
        num_prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        resampled = resampled_positions(model.pos_embed[:, num_prefix:], *grid.shape[-2:])
        positions = torch.cat([model.pos_embed[:, :num_prefix], resampled], dim=1)
        stream = model.norm_pre(embed_patches(model, patches, positions))
        for block in model.blocks:
            stream = block(stream)
        found = normed_tokens(model, stream)
        assert found.patches is not None
        return found.pooled, found.patches


def write_onnx(job: ExportJob, folder: Path) -> Written:
    require_onnx()
    is_transformer = job.backbone.is_transformer
    takes_size(job, job.size)  # caches the positions of this size: those made while torch traces are no real tensors
    takes_all = takes_size(job, job.other_size()) and takes_size(job, _oblong(job))
    any_size = job.backbone.position_resampling == "dino" if is_transformer else takes_all
    file = folder / "model.onnx"
    _write_graph(job, file, any_size=any_size)
    write_json(folder / "preprocess.json", job.preparation.as_plain())
    sizes = [job.size, *([job.other_size(), _oblong(job)] if any_size else [])]
    difference = check_features(job, _runtime(file), sizes, tolerance=1e-4)
    outputs = "`features` [batch, dim]" + (" and `patch_tokens` [batch, patches, dim]" if is_transformer else "")
    height, width = job.size
    text = (
        "batch, height and width are variable; position embeddings are resampled as in training"
        if any_size
        else f"the batch is variable, images are {height} x {width} px, because positions or windows of this model "
        "follow from the size; export again with `--image_size` for another size"
    )
    remark = f"Input `images` [batch, 3, height, width], outputs {outputs}; opset {_OPSET}; {text}."
    return Written(library="onnx", snippet=_SNIPPET, sizes=remark, difference=difference)


def _oblong(job: ExportJob) -> tuple[int, int]:
    step = job.patch or 32
    return 2 * step, 3 * step


@torch.inference_mode(False)
def _write_graph(job: ExportJob, file: Path, *, any_size: bool) -> None:
    size = (3 * (job.patch or 32), 5 * (job.patch or 32)) if any_size else job.size  # unequal, so that none is fixed
    example = torch.zeros(2, 3, *size)
    dimensions = {0: "batch", **({2: "height", 3: "width"} if any_size else {})}
    names = ["features", *(["patch_tokens"] if job.backbone.is_transformer else [])]
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _Network(job.backbone, any_size=any_size).eval(),
                (example,),
                input_names=["images"],
                output_names=names,
                dynamic_shapes={"images": dimensions},
                opset_version=_OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # torch.export raises its own kinds of errors for each thing it cannot trace
        reason = str(error).strip().partition("\n")[0][:200]
        raise ExportError(
            f"torch.onnx cannot export {job.architecture} ({reason}); choose --to timm or --to torchhub"
        ) from error
    assert program is not None
    _forget_origins(program.model.graph)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in job.tensors().values())
    program.save(file, external_data=num_bytes > _LARGEST_FILE)


def _forget_origins(graph: Any) -> None:
    """Remove the exporter's notes: they hold source lines with the paths of this machine."""
    for thing in (graph, *graph.all_nodes(), *graph.inputs, *graph.initializers.values()):
        thing.metadata_props.clear()
        for value in getattr(thing, "outputs", ()):
            value.metadata_props.clear()


def _runtime(file: Path) -> Features:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def features(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["features"], {"images": images.numpy()})[0])

    return features


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints its steps, and logs and warns of its own parts."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
