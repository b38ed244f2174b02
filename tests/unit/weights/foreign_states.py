"""Small random state dicts with the key names that other projects write; widths are tiny, names are real."""

import math

import torch
from torch import Tensor

State = dict[str, Tensor]


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> State:
    """Every number random, so that none can be lost unseen; variances above 0."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        scale = 1.0 if len(shape) < 2 else 1.0 / math.sqrt(math.prod(shape[1:]))
        state[key] = 0.5 + values.abs() if key.endswith("running_var") else values * scale
    return state


def layer(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _dino_block(name: str, dim: int) -> dict[str, tuple[int, ...]]:
    return {
        **layer(f"{name}.norm1", dim),
        **layer(f"{name}.attn.qkv", 3 * dim, dim),
        **layer(f"{name}.attn.proj", dim, dim),
        f"{name}.ls1.gamma": (dim,),
        **layer(f"{name}.norm2", dim),
        f"{name}.ls2.gamma": (dim,),
    }


def dinov2(*, dim: int = 24, depth: int = 2, side: int = 4, num_registers: int = 0, swiglu: bool = False) -> State:
    """As dinov2_vits14_pretrain.pth and dinov2_vits14_reg4_pretrain.pth; `swiglu`: as dinov2_vitg14_pretrain.pth."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, 1 + side**2, dim),
        **({"register_tokens": (1, num_registers, dim)} if num_registers else {}),
        "mask_token": (1, dim),
        **layer("patch_embed.proj", dim, 3, 14, 14),
    }
    for number in range(depth):
        name = f"blocks.{number}"
        shapes |= _dino_block(name, dim)
        if swiglu:
            shapes |= {**layer(f"{name}.mlp.w12", 2 * 56, dim), **layer(f"{name}.mlp.w3", dim, 56)}
        else:
            shapes |= {**layer(f"{name}.mlp.fc1", 4 * dim, dim), **layer(f"{name}.mlp.fc2", dim, 4 * dim)}
    return drawn({**shapes, **layer("norm", dim)})


def dinov3(*, dim: int = 32, depth: int = 2, num_heads: int = 2, swiglu: bool = False, bias: bool = True) -> State:
    """As dinov3_vits16_pretrain_lvd1689m.pth; `swiglu`: as dinov3_vits16plus."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, dim),
        "storage_tokens": (1, 4, dim),
        "mask_token": (1, dim),
        **layer("patch_embed.proj", dim, 3, 16, 16),
    }
    for number in range(depth):
        name = f"blocks.{number}"
        shapes |= _dino_block(name, dim)
        if not bias:
            del shapes[f"{name}.attn.qkv.bias"]
        if swiglu:
            shapes |= {**layer(f"{name}.mlp.w1", 56, dim), **layer(f"{name}.mlp.w2", 56, dim)}
            shapes |= layer(f"{name}.mlp.w3", dim, 56)
        else:
            shapes |= {**layer(f"{name}.mlp.fc1", 4 * dim, dim), **layer(f"{name}.mlp.fc2", dim, 4 * dim)}
    state = drawn({**shapes, **layer("norm", dim), **layer("local_cls_norm", dim)})
    num_periods = dim // num_heads // 4
    state["rope_embed.periods"] = (100.0 ** (torch.arange(num_periods) / num_periods)).bfloat16().float()
    for number in range(depth if bias else 0):
        state[f"blocks.{number}.attn.qkv.bias_mask"] = torch.ones(3 * dim)
        state[f"blocks.{number}.attn.qkv.bias_mask"][dim : 2 * dim] = 0
    return state


def in_transformers(*, dim: int = 24, depth: int = 2, dinov3: bool = False) -> State:
    """As model.safetensors of facebook/dinov2-with-registers-small; `dinov3`: of facebook/dinov3-vits16plus."""
    stem = "embeddings.patch_embeddings" if dinov3 else "embeddings.patch_embeddings.projection"
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, dim),
        "embeddings.mask_token": (1, dim),
        "embeddings.register_tokens": (1, 4, dim),
        **({} if dinov3 else {"embeddings.position_embeddings": (1, 17, dim)}),
        **layer(stem, dim, 3, 14, 14),
    }
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    if not dinov3:
        parts = ("attention.query", "attention.key", "attention.value", "output.dense")
    up, down = (("gate_proj", "up_proj"), "down_proj") if dinov3 else (("fc1",), "fc2")
    for number in range(depth):
        name = f"layer.{number}" if dinov3 else f"encoder.layer.{number}"
        for part in parts:
            shapes |= layer(f"{name}.attention.{part}", dim, dim)
        for place in (1, 2):
            shapes |= {**layer(f"{name}.norm{place}", dim), f"{name}.layer_scale{place}.lambda1": (dim,)}
        for part in up:
            shapes |= layer(f"{name}.mlp.{part}", 4 * dim, dim)
        shapes |= layer(f"{name}.mlp.{down}", dim, 4 * dim)
        if dinov3:
            del shapes[f"{name}.attention.k_proj.bias"]
    return drawn({**shapes, **layer("norm" if dinov3 else "layernorm", dim)})


def convnext(*, v2: bool = False, dinov3: bool = False) -> State:
    """As convnextv2_atto_1k_224_ema.pt (`v2`), dinov3_convnext_tiny_pretrain_lvd1689m.pth, convnext_tiny_1k_224.pth."""
    dims, depths = (40, 80, 160, 320), (2, 2, 6, 2)
    shapes = {**layer("downsample_layers.0.0", 40, 3, 4, 4), **layer("downsample_layers.0.1", 40)}
    for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
        if stage:
            shapes |= layer(f"downsample_layers.{stage}.0", dims[stage - 1])
            shapes |= layer(f"downsample_layers.{stage}.1", dim, dims[stage - 1], 2, 2)
        for number in range(depth):
            name = f"stages.{stage}.{number}"
            shapes |= {**layer(f"{name}.dwconv", dim, 1, 7, 7), **layer(f"{name}.norm", dim)}
            shapes |= {**layer(f"{name}.pwconv1", 4 * dim, dim), **layer(f"{name}.pwconv2", dim, 4 * dim)}
            if v2:
                shapes |= {f"{name}.grn.gamma": (1, 1, 1, 4 * dim), f"{name}.grn.beta": (1, 1, 1, 4 * dim)}
            else:
                shapes[f"{name}.gamma"] = (dim,)
    state = drawn({**shapes, **layer("norm", 320)})
    if dinov3:
        state |= {"norms.3.weight": state["norm.weight"], "norms.3.bias": state["norm.bias"]}
    else:
        state |= drawn(layer("head", 1000, 320))
    return state


def resnet(*, bottleneck: bool = False, groups: int = 1, group_width: int = 64, counters: bool = True) -> State:
    """As torchvision's resnet18 and resnet50 (`bottleneck`); `counters`: as saved since PyTorch 0.4.1."""
    depths, growth = ((3, 4, 6, 3), 4) if bottleneck else ((2, 2, 2, 2), 1)
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7), **_batch_norm("bn1", 64)}
    before = 64
    for stage, depth in enumerate(depths):
        dim = 64 * 2**stage
        inner = group_width * groups * 2**stage if bottleneck else dim
        for number in range(depth):
            name = f"layer{stage + 1}.{number}"
            sizes = [(inner, before, 1, 1), (inner, inner // groups, 3, 3), (dim * growth, inner, 1, 1)]
            if not bottleneck:
                sizes = [(dim, before, 3, 3), (dim, dim, 3, 3)]
            for place, size in enumerate(sizes, start=1):
                shapes |= {f"{name}.conv{place}.weight": size, **_batch_norm(f"{name}.bn{place}", size[0])}
            if number == 0 and before != dim * growth:
                shapes |= {f"{name}.downsample.0.weight": (dim * growth, before, 1, 1)}
                shapes |= _batch_norm(f"{name}.downsample.1", dim * growth)
            before = dim * growth
    state = drawn({**shapes, **layer("fc", 1000, before)})
    norms = [key.removesuffix("running_var") for key in state if key.endswith("running_var")]
    return state | ({f"{norm}num_batches_tracked": torch.tensor(7) for norm in norms} if counters else {})


def _batch_norm(name: str, dim: int) -> dict[str, tuple[int, ...]]:
    return {**layer(name, dim), f"{name}.running_mean": (dim,), f"{name}.running_var": (dim,)}


def under(prefix: str, state: State) -> State:
    return {f"{prefix}{key}": tensor for key, tensor in state.items()}


def without_classifier(state: State) -> State:
    return {key: tensor for key, tensor in state.items() if not key.startswith(("fc.", "head."))}
