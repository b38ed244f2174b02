"""A folder for `transformers.AutoModel` and `AutoImageProcessor`, written for one image size.

A plain ViT becomes a ViTModel; layer scale or registers make it a Dinov2Model or Dinov2WithRegistersModel. The keys are
those of published weights, which transformers 4 and 5 both read. Other networks become a TimmWrapperModel, which builds
them with timm.
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
from massl.exports.timm_folder import described
from massl.nn.transformer.plain import PlainBlock, has_plain_attention

_SNIPPET = """import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

model = AutoModel.from_pretrained("{folder}").eval()
processor = AutoImageProcessor.from_pretrained("{folder}")
inputs = processor(Image.open("{image}").convert("RGB"), return_tensors="pt")
with torch.no_grad():
    features = model(**inputs).pooler_output  # one vector an image; last_hidden_state holds all tokens or positions"""
_WRAPPER = {"model_type": "timm_wrapper", "architectures": ["TimmWrapperModel"], "do_pooling": True}


def require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ExportError(
            "transformers is not installed, and every export is checked by opening it; install it with: pip install "
            "'massl[hf]', or choose --to timm"
        )


def write_transformers(job: ExportJob, folder: Path) -> Written:
    require_transformers()
    model = job.backbone.model
    if not isinstance(model, VisionTransformer) or not _is_plain(model):
        return _write_wrapper(job, folder)
    is_dinov2 = _is_dinov2(model)
    if is_dinov2 and not _dinov2_holds(job, model):
        return _write_wrapper(job, folder)
    write_weights(folder / "model.safetensors", _tensors(job, model, is_dinov2=is_dinov2))
    write_json(folder / "config.json", _config(job, model, is_dinov2=is_dinov2))
    write_json(folder / "preprocessor_config.json", job.preparation.for_transformers())
    with _quiet(), opening("transformers"):
        opened = _open(folder)
    difference = check_features(job, lambda images: opened(images).pooler_output, [job.size], tolerance=1e-5)
    sizes = _sizes(job, opened, is_dinov2=is_dinov2)
    return Written(library="transformers", snippet=_SNIPPET, sizes=sizes, difference=difference)


def _write_wrapper(job: ExportJob, folder: Path) -> Written:
    """What timm reads, and the name of the class of transformers that hands it to timm."""
    config, tensors = described(job)
    config["model_args"] = {key: value for key, value in config["model_args"].items() if key != "num_classes"}
    write_weights(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", _WRAPPER | config)
    write_json(folder / "preprocessor_config.json", job.preparation.for_transformers())
    with _quiet(), opening("transformers"):
        opened = _open(folder)
    difference = check_features(job, lambda images: opened(images).pooler_output, [job.size], tolerance=1e-5)
    height, width = job.size
    sizes = (
        f"The folder is written for {height} x {width} px, and transformers needs timm to open it. Export again with "
        "`--image_size` for another size; folders for torch.hub take all sizes."
    )
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


def _is_plain(model: VisionTransformer) -> bool:
    """Whether a ViTModel or a Dinov2Model computes it exactly."""
    if model.cls_token is None or model.pos_embed is None:
        return False
    extras = (model.norm_pre, model.fc_norm, model.patch_drop, model.patch_embed.norm)
    if not all(isinstance(part, nn.Identity) for part in extras):
        return False
    if not isinstance(model.patch_embed.proj, nn.Conv2d) or not isinstance(model.norm, nn.LayerNorm):
        return False
    first: PlainBlock = model.blocks[0]
    eps, heads = first.norm1.eps, first.attn.num_heads
    return all(_is_plain_block(block, eps, heads) for block in model.blocks)


def _is_plain_block(block: PlainBlock, eps: float, heads: int) -> bool:
    if not has_plain_attention(block):
        return False
    mlp = block.mlp
    if type(mlp) is not Mlp or not isinstance(mlp.norm, nn.Identity) or _activation(mlp.act) is None:
        return False
    norms = (block.norm1, block.norm2)
    if not all(isinstance(norm, nn.LayerNorm) and norm.eps == eps and norm.bias is not None for norm in norms):
        return False
    return bool(block.attn.num_heads == heads and heads * block.attn.head_dim == mlp.fc1.in_features)


def _activation(module: nn.Module) -> str | None:
    if not isinstance(module, nn.GELU):
        return None
    return {"none": "gelu", "tanh": "gelu_pytorch_tanh"}.get(module.approximate)


def _is_dinov2(model: VisionTransformer) -> bool:
    scales = [part for block in model.blocks for part in (block.ls1, block.ls2)]
    return model.reg_token is not None or any(not isinstance(part, nn.Identity) for part in scales)


def _dinov2_holds(job: ExportJob, model: VisionTransformer) -> bool:
    """transformers' DINOv2 has square grids of positions, and an MLP of whole widths."""
    block: PlainBlock = model.blocks[0]
    return job.size[0] == job.size[1] and int(block.mlp.fc1.out_features) % model.embed_dim == 0


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
