"""Checkpoints of other projects with tensors that do not belong together: each layout that massl reads, changed."""

import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.weights import read_weights
from tests.reliability.frame import Case, fault_class
from tests.unit.weights.foreign_states import (
    State,
    convnext,
    dinov2,
    dinov3,
    in_transformers,
    resnet,
    under,
    without_classifier,
)

_STATES: tuple[Callable[[], State], ...] = (
    dinov2,
    lambda: dinov2(num_registers=4),
    lambda: dinov2(swiglu=True),
    dinov3,
    lambda: dinov3(swiglu=True),
    lambda: dinov3(bias=False),
    in_transformers,
    lambda: in_transformers(dinov3=True),
    lambda: thin(convnext()),
    lambda: thin(convnext(v2=True)),
    lambda: thin(resnet()),
    lambda: thin(resnet(bottleneck=True, groups=32, group_width=4)),
)
_WRAPS: tuple[Callable[[State], Any], ...] = (
    lambda state: state,
    lambda state: {"model": state},
    lambda state: {"state_dict": under("module.encoder_q.", state)},
    lambda state: {"state_dict": under("module.base_encoder.", state)},
    lambda state: {"teacher": under("backbone.", without_classifier(state)), "dino_loss": {}},
    lambda state: under("module.", {**without_classifier(state), "prototypes.weight": torch.ones(2, 2)}),
)
_SHAPES = ((), (0,), (1,), (3, 0), (1, 1, 1), (1, 10**6), (24,), (1, 5, 24), (64, 3, 7, 7), (2, 2, 2, 2, 2))
_TYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
_KEYS = (
    *("pos_embed", "cls_token", "reg_token", "register_tokens", "storage_tokens", "rope_embed.periods", "dist_token"),
    *("blocks.0.attn.qkv.bias", "blocks.0.attn.qkv.bias_mask", "blocks.0.gamma_1", "blocks.0.mlp.w12.weight"),
    *("blocks.99999999.norm1.weight", "layer1.0.conv3.weight", "layer4.9999.conv1.weight", "conv1.weight"),
    *("downsample_layers.0.0.weight", "stages.0.blocks.0.conv_dw.weight", "stages.9.0.gamma", "head.norm.weight"),
    *("embeddings.position_embeddings", "encoder.layer.0.attention.attention.key.bias", "layer.9.norm1.weight"),
    *("embeddings.patch_embeddings.weight", "features.1.0.layer_scale", "vit.embeddings.patch_embeddings.weight"),
    *("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "patch_embed.proj.weight", "module.", "\x1b[2J", ""),
)


def thin(state: State) -> State:
    """The same shapes over one number each, so that the file of a large network is small."""
    return {key: tensor.flatten()[0].clone().expand(tensor.shape) for key, tensor in state.items()}


@functools.cache
def _state(number: int) -> State:
    return _STATES[number]()


def saved(checkpoint: Any, *, is_zip: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer, _use_new_zipfile_serialization=is_zip)
    return buffer.getvalue()


@fault_class("weights of other projects with odd tensors", mib=1200, quick=20, more=100)
def odd_tensors(case: Case) -> None:
    state = dict(_state(case.number % len(_STATES)))
    for _ in range(int(case.random.integers(1, 4))):
        _change(state, case)
    wrap = _WRAPS[int(case.random.integers(len(_WRAPS)))] if case.random.random() < 0.5 else _WRAPS[0]
    path = case.folder / "x.pth"
    path.write_bytes(saved(wrap(state), is_zip=case.random.random() < 0.5))
    read_weights(path)


def _change(state: State, case: Case) -> None:
    """One entry is lost, renamed, or gets another tensor."""
    key = str(case.random.choice(sorted(state) or ["x"]))
    tensor = state.pop(key, torch.ones(2))
    match int(case.random.integers(8)):
        case 0:
            pass
        case 1:
            state[str(case.random.choice(_KEYS))] = tensor
        case 2:
            state[key] = torch.ones(()).expand(_SHAPES[int(case.random.integers(len(_SHAPES)))])
        case 3:
            state[key] = tensor.to(_TYPES[int(case.random.integers(len(_TYPES)))])
        case 4:
            state[key] = tensor.transpose(0, -1) if tensor.ndim > 1 else tensor.reshape(-1)[:-1]
        case 5:
            state |= {key: tensor, str(case.random.choice(_KEYS)): _other_tensor(case)}
        case 6:
            state |= {key: tensor, **_state(int(case.random.integers(len(_STATES))))}
        case _:
            state[key] = torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor.to_sparse()


def _other_tensor(case: Case) -> Tensor:
    state = _state(int(case.random.integers(len(_STATES))))
    return state[str(case.random.choice(sorted(state)))]
