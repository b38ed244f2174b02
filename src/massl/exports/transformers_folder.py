"""A folder for `transformers.AutoModel` and `AutoImageProcessor`, written for one image size.

A plain ViT becomes a ViTModel; layer scale or registers make it a Dinov2Model or Dinov2WithRegistersModel. The keys are
those of published weights, which transformers 4 and 5 both read.
"""

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

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
from massl.nn.transformer.plain import PlainBlock, has_plain_attention

_SNIPPET = """import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

model = AutoModel.from_pretrained("{folder}").eval()
processor = AutoImageProcessor.from_pretrained("{folder}")
inputs = processor(Image.open("{image}").convert("RGB"), return_tensors="pt")
with torch.no_grad():
    features = model(**inputs).pooler_output  # the class token; last_hidden_state holds all tokens"""


def require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ExportError(
            "transformers is not installed, and every export is checked by opening it; install it with: pip install "
            "'massl[hf]', or choose --to timm"
        )


def write_transformers(job: ExportJob, folder: Path) -> Written:
    require_transformers()
    model = _suitable(job)
    is_dinov2 = _is_dinov2(model)
    if is_dinov2 and job.size[0] != job.size[1]:
        raise ExportError(
            "transformers' DINOv2, which has layer scale and registers, cannot hold position embeddings for "
            f"{job.size[0]} x {job.size[1]} px; choose a square --image_size, or --to timm, onnx or torchhub"
        )
    write_weights(folder / "model.safetensors", _tensors(job, model, is_dinov2=is_dinov2))
    write_json(folder / "config.json", _config(job, model, is_dinov2=is_dinov2))
    write_json(folder / "preprocessor_config.json", job.preparation.for_transformers())
    with _quiet(), opening("transformers"):
        opened = _open(folder)
    difference = check_features(job, lambda images: opened(images).pooler_output, [job.size], tolerance=1e-5)
    sizes = _sizes(job, opened, is_dinov2=is_dinov2)
    return Written(library="transformers", snippet=_SNIPPET, sizes=sizes, difference=difference)


def _open(folder: Path) -> Any:
    from transformers import AutoModel

    opened, report = AutoModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    wrong = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if wrong:
        raise ExportError(f"transformers does not take the weights as they are ({wrong}); choose --to timm")
    return opened.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers shows a bar for reading a file."""
    from transformers.utils import logging as transformers_logging

    of_transformers: Any = transformers_logging
    level, has_bars = of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled()
    of_transformers.set_verbosity(logging.ERROR)
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        of_transformers.set_verbosity(level)
        if has_bars:
            of_transformers.enable_progress_bar()


def _sizes(job: ExportJob, opened: Any, *, is_dinov2: bool) -> str:
    height, width = job.size
    text = f"The folder is written for {height} x {width} px: there, features equal those of massl. "
    again = "Export again with `--image_size` for another size; folders for ONNX and torch.hub take all sizes."
    if height != width:
        return text + f"transformers takes no other size from a grid that is not square. {again}"
    options = {} if is_dinov2 else {"interpolate_pos_encoding": True}
    other = job.other_size()
    percent = 100 * relative_difference(job, lambda images: opened(images, **options).pooler_output, other)
    how = "by itself" if is_dinov2 else "with `interpolate_pos_encoding=True`"
    return (
        text + f"For other sizes transformers ({how}) resamples the position embeddings by its own rule, not by that "
        f"of training: at {other[0]} x {other[1]} px features differ by {percent:.2g} %. {again}"
    )


# ---- which models --------------------------------------------------------------------------------------------------


def _suitable(job: ExportJob) -> VisionTransformer:
    model = job.backbone.model
    reason = _why_not(model)
    if reason is not None:
        others = "torchhub or --to onnx" if job.has_small_stem else "timm, --to onnx or --to torchhub"
        raise ExportError(
            f"transformers has no model that computes {job.architecture} exactly: {reason}. Choose --to {others}"
        )
    assert isinstance(model, VisionTransformer)
    return model


def _why_not(model: nn.Module) -> str | None:
    if not isinstance(model, VisionTransformer):
        return "it is no plain vision transformer"
    if model.cls_token is None or model.pos_embed is None:
        return "it has no class token or no position embeddings"
    extras = (model.norm_pre, model.fc_norm, model.patch_drop, model.patch_embed.norm)
    if not all(isinstance(part, nn.Identity) for part in extras):
        return "it has a further norm or drops patches"
    if not isinstance(model.patch_embed.proj, nn.Conv2d) or not isinstance(model.norm, nn.LayerNorm):
        return "its patch embedding or its last norm is another one"
    first: PlainBlock = model.blocks[0]
    eps, heads = first.norm1.eps, first.attn.num_heads
    return next((reason for block in model.blocks if (reason := _why_not_block(block, eps, heads)) is not None), None)


def _why_not_block(block: PlainBlock, eps: float, heads: int) -> str | None:
    if not has_plain_attention(block):
        return "its blocks are not timm's plain ones"
    mlp = block.mlp
    if type(mlp) is not Mlp or not isinstance(mlp.norm, nn.Identity) or _activation(mlp.act) is None:
        return "its blocks have another MLP than Linear, GELU, Linear"
    norms = (block.norm1, block.norm2)
    if not all(isinstance(norm, nn.LayerNorm) and norm.eps == eps and norm.bias is not None for norm in norms):
        return "its norms are not plain LayerNorm"
    if block.attn.num_heads != heads or block.attn.num_heads * block.attn.head_dim != mlp.fc1.in_features:
        return "its attention has another width than its tokens"
    return None


def _activation(module: nn.Module) -> str | None:
    if not isinstance(module, nn.GELU):
        return None
    return {"none": "gelu", "tanh": "gelu_pytorch_tanh"}.get(module.approximate)


def _is_dinov2(model: VisionTransformer) -> bool:
    scales = [part for block in model.blocks for part in (block.ls1, block.ls2)]
    return model.reg_token is not None or any(not isinstance(part, nn.Identity) for part in scales)


# ---- config and weights --------------------------------------------------------------------------------------------


def _config(job: ExportJob, model: VisionTransformer, *, is_dinov2: bool) -> dict[str, Any]:
    block: PlainBlock = model.blocks[0]
    height, width = job.size
    config = {
        "hidden_size": model.embed_dim,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": block.attn.num_heads,
        "hidden_act": _activation(block.mlp.act),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": block.norm1.eps,
        "image_size": height if height == width else [height, width],
        "patch_size": job.backbone.patch_size,
        "num_channels": 3,
        "qkv_bias": block.attn.qkv.bias is not None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    hidden = block.mlp.fc1.out_features
    if not is_dinov2:  # a pooler that changes nothing: the class token
        own = {"model_type": "vit", "architectures": ["ViTModel"], "intermediate_size": hidden}
        return {**own, **config, "pooler_act": "linear", "pooler_output_size": model.embed_dim}
    if hidden % model.embed_dim:
        raise ExportError("transformers' DINOv2 needs an MLP of whole widths; choose --to timm, onnx or torchhub")
    has_registers = model.reg_token is not None
    kind, name = ("dinov2_with_registers", "Dinov2WithRegistersModel") if has_registers else ("dinov2", "Dinov2Model")
    registers = {"num_register_tokens": model.reg_token.shape[1]} if model.reg_token is not None else {}
    return {"model_type": kind, "architectures": [name], "mlp_ratio": hidden // model.embed_dim, **registers, **config}


def _tensors(job: ExportJob, model: VisionTransformer, *, is_dinov2: bool) -> dict[str, Tensor]:
    positions = job.positions()
    registers: Tensor | None = model.reg_token
    assert positions is not None
    assert model.cls_token is not None
    num_registers = 0 if registers is None else registers.shape[1]
    if model.no_embed_class:
        positions = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
    elif registers is not None:  # timm adds positions to registers, too
        registers = registers + positions[:, 1 : 1 + num_registers]
        positions = torch.cat([positions[:, :1], positions[:, 1 + num_registers :]], dim=1)
    projection: Any = model.patch_embed.proj
    named = {
        "embeddings.cls_token": model.cls_token,
        "embeddings.position_embeddings": positions,
        "embeddings.patch_embeddings.projection.weight": projection.weight,
        "embeddings.patch_embeddings.projection.bias": _bias(projection),
        "layernorm.weight": model.norm.weight,
        "layernorm.bias": model.norm.bias,
    }
    if is_dinov2:
        named["embeddings.mask_token"] = torch.zeros(1, model.embed_dim)
    else:
        named |= {"pooler.dense.weight": torch.eye(model.embed_dim), "pooler.dense.bias": torch.zeros(model.embed_dim)}
    if registers is not None:
        named["embeddings.register_tokens"] = registers
    for number, block in enumerate(model.blocks):
        entries = _block_tensors(block, is_dinov2=is_dinov2)
        named |= {f"encoder.layer.{number}.{name}": tensor for name, tensor in entries.items()}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}


def _block_tensors(block: PlainBlock, *, is_dinov2: bool) -> dict[str, Tensor]:
    norms = ("norm1", "norm2") if is_dinov2 else ("layernorm_before", "layernorm_after")
    layers = ("mlp.fc1", "mlp.fc2") if is_dinov2 else ("intermediate.dense", "output.dense")
    width = block.attn.proj.out_features
    parts = dict(zip(("query", "key", "value"), block.attn.qkv.weight.split(width), strict=True))
    named = {f"attention.attention.{part}.weight": weight for part, weight in parts.items()}
    if block.attn.qkv.bias is not None:
        biases = zip(parts, block.attn.qkv.bias.split(width), strict=True)
        named |= {f"attention.attention.{part}.bias": bias for part, bias in biases}
    modules = zip(
        ("attention.output.dense", *layers, *norms),
        (block.attn.proj, block.mlp.fc1, block.mlp.fc2, block.norm1, block.norm2),
        strict=True,
    )
    for name, module in modules:
        named |= {f"{name}.weight": module.weight, f"{name}.bias": _bias(module)}
    if is_dinov2:
        for number, scale in ((1, block.ls1), (2, block.ls2)):
            has_scale = not isinstance(scale, nn.Identity)
            named[f"layer_scale{number}.lambda1"] = scale.gamma if has_scale else torch.ones(width)
    return named


def _bias(module: Any) -> Tensor:
    bias: Tensor | None = module.bias
    return torch.zeros(len(module.weight)) if bias is None else bias
