import pytest
import torch
from torch import Tensor, nn

from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.token_readout import (
    UnsuitableModel,
    class_attention,
    has_class_token,
    last_layers,
    patch_size,
    require_class_token,
    require_patches,
)

OPTIONS: dict[str, int | float | bool | str] = {"embed_dim": 24, "depth": 3, "num_heads": 3}
PLAIN = BackboneSettings(name="vit_tiny_patch16_224", image_size=32, patch_size=8, timm_options=OPTIONS)
REGISTERS = BackboneSettings(name="vit_small_patch14_reg4_dinov2", image_size=28, timm_options=OPTIONS)
DINOV3 = BackboneSettings(
    name="vit_small_patch16_dinov3_qkvb", image_size=32, timm_options={**OPTIONS, "global_pool": "token"}
)
NO_CLASS_TOKEN = BackboneSettings(name="vit_little_patch16_reg4_gap_256", image_size=32, timm_options=OPTIONS)


def backbone_of(settings: BackboneSettings) -> Backbone:
    """With weights large enough that attention is far from even."""
    backbone = build_backbone(settings, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return backbone


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def softmax_inside_timm(backbone: Backbone, batch: Tensor) -> Tensor:  # -> [B, heads, tokens, tokens]
    """What timm's own attention of the last block multiplies the values with, caught on its way through the dropout."""
    caught: list[Tensor] = []
    attention = backbone.model.blocks[-1].attn
    attention.fused_attn = False
    hook = attention.attn_drop.register_forward_hook(lambda module, inputs, output: caught.append(inputs[0]))
    backbone(batch)
    hook.remove()
    attention.fused_attn = True
    return caught[0]


@pytest.mark.parametrize(
    "settings", [PLAIN, REGISTERS, DINOV3], ids=["class token", "class and register tokens", "rotations"]
)
@pytest.mark.parametrize(
    ("height", "width"), [(0, 0), (56, 112), (112, 56), (61, 45)], ids=["own size", "wide", "high", "no multiple"]
)
@torch.no_grad()
def test_class_attention_is_the_softmax_of_the_last_block(settings: BackboneSettings, height: int, width: int) -> None:
    backbone = backbone_of(settings)
    batch = images(2, 3, height or settings.image_size or 0, width or settings.image_size or 0)
    expected = softmax_inside_timm(backbone, batch)
    maps = class_attention(backbone, batch)
    side = patch_size(backbone) or 0
    assert maps.shape == (2, 3, batch.shape[2] // side, batch.shape[3] // side)
    num_prefix = backbone.model.num_prefix_tokens
    torch.testing.assert_close(maps.flatten(2), expected[:, :, 0, num_prefix:], rtol=1e-4, atol=1e-7)
    assert maps.flatten(2).std(dim=2).min() > 1e-3  # or any mistake would pass
    torch.testing.assert_close(
        maps.sum(dim=(2, 3)) + expected[:, :, 0, :num_prefix].sum(dim=2), torch.ones(2, 3), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_class_attention_follows_from_queries_and_keys_alone() -> None:
    backbone, batch = backbone_of(PLAIN), images(2, 3, 32, 32)
    caught: list[Tensor] = []
    hook = backbone.model.blocks[-1].attn.qkv.register_forward_hook(
        lambda module, inputs, output: caught.append(output)
    )
    backbone(batch)
    hook.remove()
    query, key, _ = caught[0].double().chunk(3, dim=2)  # [B, tokens, heads * 8] each
    maps = class_attention(backbone, batch)
    for image in range(2):
        for head in range(3):
            part = slice(8 * head, 8 * head + 8)
            logits = torch.tensor([float(query[image, 0, part] @ row) / 8**0.5 for row in key[image, :, part]])
            torch.testing.assert_close(maps[image, head].flatten(), logits.softmax(dim=0)[1:], rtol=1e-4, atol=1e-7)


@torch.no_grad()
def test_logits_stay_in_float32_where_the_network_runs_in_bfloat16() -> None:
    backbone, batch = backbone_of(PLAIN), images(2, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = class_attention(backbone, batch)
    assert maps.dtype == torch.float32
    # Rounded to bfloat16, no more than 256 different values could lie in an octave; in float32 all are different.
    assert len(maps.unique()) == maps.numel()
    torch.testing.assert_close(maps, class_attention(backbone, batch), rtol=0.3, atol=0.02)


@pytest.mark.parametrize(
    "settings",
    [PLAIN, REGISTERS, NO_CLASS_TOKEN, DINOV3],
    ids=["class token", "registers", "mean of patches", "rotations"],
)
@torch.no_grad()
def test_layers_are_those_of_timm_through_the_final_norm(settings: BackboneSettings) -> None:
    backbone = backbone_of(settings)
    batch = images(2, 3, settings.image_size or 0, settings.image_size or 0)
    layers = last_layers(backbone, batch, num_layers=3)
    theirs = backbone.model.forward_intermediates(
        batch, indices=3, norm=True, return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
    )
    for layer, (patches, prefix) in zip(layers, theirs, strict=True):
        torch.testing.assert_close(layer.patches, patches, rtol=1e-4, atol=1e-5)
        if has_class_token(backbone):
            torch.testing.assert_close(layer.pooled, prefix[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layers[-1].pooled, backbone(batch).pooled)


def test_patches_and_class_tokens_are_known_and_asked_for_by_name() -> None:
    plain, gap = build_backbone(PLAIN, seed=0), build_backbone(NO_CLASS_TOKEN, seed=0)
    assert (patch_size(plain), patch_size(gap), has_class_token(plain), has_class_token(gap)) == (8, 16, True, False)
    assert require_patches(gap, purpose="a test") == 16
    assert require_class_token(plain, purpose="a test") is plain.model
    with pytest.raises(UnsuitableModel, match="a test needs a class token, which vit_little"):
        require_class_token(gap, purpose="a test")
    with pytest.raises(UnsuitableModel, match=r"class token.*vit_little_patch16_reg4_gap_256"):
        class_attention(gap, torch.zeros(1, 3, 32, 32))
    with pytest.raises(UnsuitableModel, match="4 of 3"):
        last_layers(plain, torch.zeros(1, 3, 32, 32), num_layers=4)


class _Network(nn.Module):
    """No transformer."""

    head_hidden_size = 3

    def forward(self, batch: Tensor) -> Tensor:
        return batch.mean(dim=(2, 3))


def test_networks_without_patches_are_refused_with_advice() -> None:
    backbone = Backbone(_Network(), timm_arguments={"model_name": "resnet0"})
    assert patch_size(backbone) is None
    with pytest.raises(UnsuitableModel, match="a map needs patch tokens, which resnet0"):
        require_patches(backbone, purpose="a map")
    with pytest.raises(UnsuitableModel, match=r"last 2 blocks.*resnet0"):
        last_layers(backbone, torch.zeros(1, 3, 8, 8), num_layers=2)
    assert last_layers(backbone, torch.ones(1, 3, 8, 8), num_layers=1)[0].pooled.tolist() == [[1.0, 1.0, 1.0]]


def test_attention_of_another_make_is_refused() -> None:
    backbone = build_backbone(PLAIN.model_copy(update={"timm_options": {**OPTIONS, "qk_norm": True}}), seed=0)
    with pytest.raises(UnsuitableModel, match="not timm's plain one"):
        class_attention(backbone, torch.zeros(1, 3, 32, 32))
