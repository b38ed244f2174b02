from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from massl.nn.timm_models import create_timm_model
from massl.weights.facts import WeightsError
from massl.weights.io import load_strictly
from massl.weights.key_maps import KNOWN_LAYOUTS, backbone_of


def vit_state(**changes: Any) -> dict[str, Tensor]:
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, **changes}
    return create_timm_model({"model_name": "vit_tiny_patch16_224", "num_classes": 0, **arguments}).state_dict()


@settings(max_examples=25)
@given(
    dim=st.sampled_from([8, 24, 40]),
    depth=st.sampled_from([1, 2, 11]),
    patch_size=st.sampled_from([2, 4, 14]),
    grid_side=st.integers(1, 5),
    mlp_ratio=st.sampled_from([1.0, 2.5, 4.0]),
    init_values=st.sampled_from([None, 0.1]),
)
def test_the_shape_of_any_plain_transformer_is_read_from_its_tensors(
    dim: int, depth: int, patch_size: int, grid_side: int, mlp_ratio: float, init_values: float | None
) -> None:
    state = vit_state(
        embed_dim=dim,
        depth=depth,
        patch_size=patch_size,
        img_size=grid_side * patch_size,
        mlp_ratio=mlp_ratio,
        init_values=init_values,
    )
    found = backbone_of(state, num_heads=4, origin="a.pth").network
    expected = {"embed_dim": dim, "depth": depth, "patch_size": patch_size, "img_size": grid_side * patch_size}
    assert {**found.timm_arguments, **expected, "mlp_ratio": mlp_ratio, "num_heads": 4} == found.timm_arguments
    load_strictly(create_timm_model(found.timm_arguments), found.tensors, origin="a.pth")


def test_a_twelve_block_backbone_has_150_tensors_and_is_the_small_transformer_of_timm() -> None:
    with torch.device("meta"):
        state = vit_state(embed_dim=384, depth=12, num_heads=6, img_size=224, patch_size=16)
    found = backbone_of({"state_dict": state}, origin="a.pth").network
    assert len(found.tensors) == 150
    assert found.summary == "ViT-S/16, 12 blocks, 6 heads, 224 px"
    assert found.timm_arguments == {
        "model_name": "vit_small_patch16_224",
        "num_classes": 0,
        "img_size": 224,
        "patch_size": 16,
        "embed_dim": 384,
        "depth": 12,
        "num_heads": 6,
        "mlp_ratio": 4.0,
    }


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ([1, 2], "holds a list instead of a state dict"),
        ({}, "a.pth holds no weights"),
        ({"teacher": {}}, "the entry 'teacher' of a.pth holds no weights"),
        ({"teacher": None, "state_dict": vit_state()}, "the entry 'teacher' of a.pth holds no weights"),
        ({"student": vit_state(), "epoch": 3}, "a.pth is no state dict: student, epoch are no tensors"),
        ({"model": {"weight": 3.0}}, "the entry 'model' of a.pth is no state dict: weight are no tensors"),
        ({"encoder.layer.0.weight": torch.ones(1)}, r"no known network.*encoder\.layer\.0\.weight"),
        ({"teacher": {"head.mlp.0.weight": torch.ones(1)}}, "no known network"),
    ],
)
def test_an_unknown_file_is_answered_with_the_known_layouts(checkpoint: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        backbone_of(checkpoint, origin="a.pth")
    for layout in KNOWN_LAYOUTS:
        assert layout in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "network"),
    [
        ("dist_token", "a distilled transformer"),
        ("patch_embed.proj.0.weight", "a convolutional stem"),
        ("blocks.0.attn.q_norm.weight", "normalises queries and keys"),
    ],
)
def test_networks_that_are_no_plain_transformers_are_refused_in_words(extra: str, network: str) -> None:
    with pytest.raises(WeightsError, match=rf"{network}.*{extra}.*give its name there"):
        backbone_of({"model": {**vit_state(), extra: torch.ones(1)}}, origin="a.pth")


def test_nothing_beside_the_backbone_is_dropped_unless_it_is_known() -> None:
    weights = {f"backbone.{key}": tensor for key, tensor in vit_state().items()}
    with pytest.raises(WeightsError, match=r"unexpected .*adapter\.weight, cls_token"):
        backbone_of(
            {"teacher": {**weights, "cls_token": torch.ones(1), "adapter.weight": torch.ones(1)}}, origin="a.pth"
        )


def test_weights_that_are_there_twice_are_refused() -> None:
    state = vit_state()
    with pytest.raises(WeightsError, match="holds some weights twice"):
        backbone_of({**state, "module.cls_token": state["cls_token"]}, origin="a.pth")


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("pos_embed", (1, 4, 24), "pos_embed of a.pth has 4 rows"),
        ("pos_embed", (1, 1, 24), "pos_embed of a.pth has 1 rows"),
        ("pos_embed", (1, 5, 23), r"no plain transformer of width 24: pos_embed is \[1, 5, 23\]"),
        ("patch_embed.proj.weight", (24, 1, 8, 8), "no square patches of RGB images"),
        ("patch_embed.proj.weight", (24, 3, 8, 4), "no square patches of RGB images"),
        ("patch_embed.proj.weight", (24, 192), "no square patches of RGB images"),
    ],
)
def test_shapes_of_no_plain_transformer_are_refused(key: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        backbone_of({**vit_state(), key: torch.ones(shape)}, num_heads=2, origin="a.pth")
