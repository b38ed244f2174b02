"""The fused transformer against the backbone's plain path; on a CPU the kernels run in Triton's interpreter."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.transformer.fused import class_features
from massl.nn.transformer.plain import KernelOptions, why_not_fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY: dict[str, int | float | bool | str] = {"embed_dim": 32, "depth": 3, "num_heads": 2}
KEYS = torch.arange(5)


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a float32 convolution, the plain patch embedding, is otherwise one of 10-bit operands."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def backbone_of(drop_path_rate: float = 0.5, **options: int | float | bool | str) -> Backbone:
    """A small transformer whose biases and norms are not what they start as."""
    settings = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=16, patch_size=4, timm_options={**TINY, **options}
    )
    backbone = build_backbone(settings, seed=0, drop_path_rate=drop_path_rate)
    with torch.no_grad():
        for seed, parameter in enumerate(backbone.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return backbone.to(DEVICE).train()


def view_groups() -> list[Tensor]:
    """Five views of two sizes; the smaller ones have pixels that fill no patch."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 3, 16, 16, generator=generator).to(DEVICE),
        torch.randn(3, 3, 8, 10, generator=generator).to(DEVICE),
    ]


def with_gradients(backbone: Backbone, features: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    names, parameters = zip(*backbone.named_parameters(), strict=True)
    gradients = torch.autograd.grad((features * weights).sum(), parameters)
    return {"features": features.detach(), **dict(zip(names, gradients, strict=True))}


def fused(backbone: Backbone, sample_keys: Tensor | None, *, memory_lean: bool = False) -> Tensor:
    scales = backbone._scales(sample_keys)
    dtype = torch.float32
    return class_features(backbone.model, view_groups(), scales, KernelOptions(dtype, dtype, memory_lean))  # type: ignore[arg-type]


@pytest.mark.kernel
@pytest.mark.usefixtures("norm_gradients_in_large_steps")
@pytest.mark.parametrize(
    ("options", "sample_keys", "memory_lean"),
    [
        ({"reg_tokens": 1, "no_embed_class": True, "init_values": 0.5}, KEYS, True),
        ({}, KEYS, False),
        ({"init_values": 1e-5}, None, False),
        ({"reg_tokens": 1}, None, False),
    ],
    ids=[
        "register token, layer scale, stochastic depth, memory lean",
        "stochastic depth",
        "layer scale",
        "register token with a position",
    ],
)
def test_features_and_gradients_are_those_of_the_plain_path(
    options: dict[str, int | float | bool | str], sample_keys: Tensor | None, memory_lean: bool
) -> None:
    backbone = backbone_of(**options)
    keys = None if sample_keys is None else sample_keys.to(DEVICE)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    ours = with_gradients(backbone, fused(backbone, keys, memory_lean=memory_lean))
    after = backbone.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())

    truth = with_gradients(backbone, backbone.pooled(view_groups(), keys))
    for name, value in truth.items():
        assert (ours[name] - value).norm() < 1e-5 * value.norm(), name
    key_groups = (None, None) if keys is None else (keys[:2], keys[2:])
    whole = torch.cat([backbone(views, part).pooled for views, part in zip(view_groups(), key_groups, strict=True)])
    torch.testing.assert_close(ours["features"], whole.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.usefixtures("norm_gradients_in_large_steps")
@pytest.mark.parametrize("memory_lean", [True, False])
def test_products_in_16_bits_with_a_float32_stream_are_near_the_plain_path(memory_lean: bool) -> None:
    """float16: the interpreter multiplies bfloat16 numbers as if they were integers."""
    backbone = backbone_of()
    keys, half, full = KEYS.to(DEVICE), torch.float16, torch.float32
    with torch.autocast(DEVICE.type, dtype=half):
        scales = backbone._scales(keys)
        features = class_features(backbone.model, view_groups(), scales, KernelOptions(half, full, memory_lean))  # type: ignore[arg-type]
    ours = with_gradients(backbone, features)
    truth = with_gradients(backbone, backbone.pooled(view_groups(), keys))
    for name, value in truth.items():
        assert ours[name].dtype == torch.float32, name
        assert (ours[name] - value).norm() < 1e-2 * value.norm(), name


def test_stochastic_depth_drops_branches_of_some_views_and_not_of_others() -> None:
    """Otherwise the test above would compare nothing."""
    backbone = backbone_of()
    scales = backbone._scales(KEYS.to(DEVICE))
    assert scales is not None
    assert scales.shape == (4, 5)  # timm makes no drop path for the first block
    assert (scales == 0).any()
    assert (scales[-1] == 2.0).any()


@pytest.mark.kernel
def test_without_a_gradient_the_features_are_the_same_and_remember_nothing() -> None:
    """As the teacher is computed."""
    backbone = backbone_of().requires_grad_(False)
    features = fused(backbone, None)
    assert not features.requires_grad
    torch.testing.assert_close(features, backbone.pooled(view_groups()), rtol=1e-5, atol=1e-5)


def transformer(**options: Any) -> nn.Module:
    arguments = {"img_size": 16, "patch_size": 4, "num_classes": 0, **TINY, **options}
    return timm.create_model("vit_tiny_patch16_224", **arguments)


@pytest.mark.parametrize(
    "options",
    [{}, {"reg_tokens": 1, "no_embed_class": True}, {"drop_path_rate": 0.5}, {"num_heads": 1}, {"init_values": 1e-5}],
)
def test_a_plain_vision_transformer_is_fused(options: dict[str, Any]) -> None:
    assert why_not_fused(transformer(**options)) is None
    backbone = Backbone(transformer(**options), timm_arguments={})
    assert backbone.use_fused_kernels() is None
    assert backbone.fused_kernels


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"class_token": False, "global_pool": "avg"}, "no class token or an extra norm"),
        ({"pre_norm": True}, "no class token or an extra norm"),
        ({"global_pool": "avg", "fc_norm": True}, "no class token or an extra norm"),
        ({"pre_norm": True, "qk_norm": True}, "no class token or an extra norm"),
        ({"patch_drop_rate": 0.5}, "drops tokens or has a single block"),
        ({"pos_drop_rate": 0.5}, "drops tokens or has a single block"),
        ({"depth": 1}, "drops tokens or has a single block"),
        ({"qk_norm": True}, "not timm's plain pre-norm blocks"),
        ({"attn_drop_rate": 0.1}, "not timm's plain pre-norm blocks"),
        ({"act_layer": "relu"}, "another MLP"),
        ({"act_layer": "gelu_tanh"}, "another MLP"),
        ({"scale_mlp_norm": True}, "further norms"),
        ({"proj_drop_rate": 0.1}, "dropout"),
        ({"qkv_bias": False}, "without bias"),
        ({"embed_dim": 48}, "heads have 24 dimensions; the kernels know 16, 32, 64"),
        ({"embed_dim": 16}, "heads have 8 dimensions"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split(";")[0],
)
def test_other_transformers_are_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    found = why_not_fused(transformer(**options))
    assert found is not None
    assert reason in found


def test_networks_that_are_no_plain_transformers_are_refused_and_stay_as_they_are() -> None:
    backbone = build_backbone(BackboneSettings(name="resnet18"), seed=0)
    assert backbone.use_fused_kernels() == "the backbone is no vision transformer"
    assert not backbone.fused_kernels
    assert why_not_fused(timm.create_model("vit_small_patch16_dinov3", embed_dim=32, num_heads=2, depth=2)) == (
        "its blocks rotate queries and keys"
    )
    swiglu = timm.create_model("vit_giant_patch14_dinov2", img_size=28, embed_dim=32, num_heads=2, depth=2)
    assert why_not_fused(swiglu) == "its blocks have a SwiGLU MLP"
    hybrid = transformer()
    hybrid.patch_embed.proj = nn.Conv2d(3, 32, 4, stride=2)
    assert why_not_fused(hybrid) == "the patch embedding is not a plain convolution"
    other_norm = transformer()
    other_norm.blocks[1].norm1 = nn.RMSNorm(32)
    assert why_not_fused(other_norm) == "its norms are not plain LayerNorm"


@pytest.mark.gpu
@pytest.mark.parametrize("memory_lean", [False, True])
def test_on_a_gpu_pooled_uses_the_kernels_in_16_bits_and_is_as_near_to_float32_as_autocast(memory_lean: bool) -> None:
    backbone = backbone_of()
    keys = KEYS.to(DEVICE)
    exact = with_gradients(backbone, backbone.pooled(view_groups(), keys))
    backbone.set_activation_checkpointing(memory_lean)

    def in_16_bits() -> dict[str, Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            features = backbone.pooled(view_groups(), keys)
        return with_gradients(backbone, features.float())

    def error(results: dict[str, Tensor]) -> float:
        """Relative norm over the gradients of all parameters."""
        names = [name for name in exact if name != "features"]
        difference = torch.cat([(results[name] - exact[name]).flatten() for name in names])
        return float(difference.norm() / torch.cat([exact[name].flatten() for name in names]).norm())

    by_autocast = in_16_bits()
    assert backbone.use_fused_kernels() is None
    by_kernels = in_16_bits()
    assert not torch.equal(by_kernels["features"], by_autocast["features"])  # the kernels were taken
    assert (by_kernels["features"] - exact["features"]).norm() < 0.02 * exact["features"].norm()
    assert (by_kernels["features"] - by_autocast["features"]).norm() < 0.02 * exact["features"].norm()
    assert error(by_kernels) < 0.03
    assert error(by_kernels) < 2.5 * error(by_autocast)  # the kernels keep the stream in 16 bits too
    # In float32 the kernels are not used: the plain path as before, but for checkpointing, which changes no bit.
    assert torch.equal(backbone.pooled(view_groups(), keys), exact["features"])
