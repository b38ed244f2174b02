from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from massl.config import RecipeError
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone, refuse_published_weights
from massl.nn.transformer.plain import class_token_of_last_block, has_plain_attention

TINY = BackboneSettings(
    name="vit_tiny_patch16_224", image_size=32, patch_size=8, timm_options={"embed_dim": 24, "depth": 3, "num_heads": 2}
)


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def plain_timm(backbone: Backbone) -> torch.nn.Module:
    """The same weights in a model that timm alone has built."""
    arguments = {key: value for key, value in backbone.timm_arguments.items() if key != "position_resampling"}
    model = timm.create_model(arguments.pop("model_name"), **arguments)
    model.load_state_dict(backbone.model.state_dict())
    return model.eval()


@pytest.mark.parametrize(
    "settings",
    [
        TINY,
        BackboneSettings(
            name="vit_small_patch14_reg4_dinov2",
            image_size=28,
            timm_options={"embed_dim": 24, "depth": 2, "num_heads": 2},
        ),
        BackboneSettings(
            name="vit_little_patch16_reg4_gap_256",
            image_size=32,
            timm_options={"embed_dim": 24, "depth": 2, "num_heads": 2},
        ),
        BackboneSettings(
            name="vit_small_plus_patch16_dinov3_qkvb",
            image_size=48,
            timm_options={"embed_dim": 24, "depth": 2, "num_heads": 2, "global_pool": "token"},
        ),
        BackboneSettings(
            name="vit_small_patch16_dinov3",
            image_size=48,
            timm_options={"embed_dim": 24, "depth": 2, "num_heads": 2},
        ),
    ],
    ids=["class token", "class and register tokens", "mean of patches", "DINOv3", "DINOv3, mean of patches"],
)
def test_at_their_own_size_transformers_give_the_features_of_timm(settings: BackboneSettings) -> None:
    backbone = build_backbone(settings, seed=0).eval()
    model, batch = plain_timm(backbone), images(2, 3, settings.image_size or 0, settings.image_size or 0)
    tokens = backbone(batch)
    torch.testing.assert_close(tokens.pooled, model(batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        tokens.patches, model.forward_features(batch)[:, model.num_prefix_tokens :], rtol=1e-5, atol=1e-6
    )
    assert tokens.pooled.shape == (2, backbone.dim)


@pytest.mark.parametrize(("name", "millions"), [("vit_small_patch16_224", 21.67), ("vit_base_patch16_224", 85.80)])
def test_the_backbones_of_the_paper_have_as_many_parameters_as_the_authors(name: str, millions: float) -> None:
    with torch.device("meta"):
        backbone = build_backbone(BackboneSettings(name=name), seed=0)
    assert sum(parameter.numel() for parameter in backbone.parameters()) == pytest.approx(millions * 1e6, abs=5e3)


@pytest.mark.parametrize(
    ("height", "width", "num_patches"), [(8, 8, 1), (16, 16, 4), (40, 24, 15), (39, 30, 12), (64, 32, 32)]
)
def test_a_transformer_takes_images_of_any_size_and_leaves_out_what_fills_no_patch(
    height: int, width: int, num_patches: int
) -> None:
    backbone = build_backbone(TINY, seed=0)
    batch = images(2, 3, height, width)
    tokens = backbone(batch)
    assert tokens.patches is not None
    assert tokens.patches.shape == (2, num_patches, 24)
    cropped = backbone(batch[:, :, : height - height % 8, : width - width % 8])
    assert torch.equal(cropped.pooled, tokens.pooled)


def test_positions_of_other_sizes_are_resampled_as_dino_does_and_not_as_timm_does() -> None:
    settings = TINY.model_copy(update={"timm_options": {**TINY.timm_options, "dynamic_img_size": True}})
    backbone = build_backbone(settings, seed=0).eval()
    batch = images(2, 3, 16, 16)
    difference = (backbone(batch).pooled - plain_timm(backbone)(batch)).abs().max()
    assert 1e-5 < difference < 0.1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_small_patch14_reg4_dinov2", {"dynamic_img_size": True, "position_resampling": "timm"}),
        ("vit_small_patch14_dinov2", {"dynamic_img_size": True, "position_resampling": "timm"}),
        ("vit_small_patch16_dinov3", {"global_pool": "token"}),
    ],
)
@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (5, 3)])
def test_by_timms_rule_or_with_rotations_other_sizes_give_the_features_of_timm(
    name: str, options: dict[str, int | float | bool | str], rows: int, columns: int
) -> None:
    side = 56 if "14" in name else 64
    settings = BackboneSettings(name=name, image_size=side, timm_options={**SMALL, **options})
    backbone = shaken(build_backbone(settings, seed=0)).eval()
    batch = images(2, 3, rows * side // 4, columns * side // 4)
    torch.testing.assert_close(backbone(batch).pooled, plain_timm(backbone)(batch), rtol=1e-5, atol=1e-5)
    uncut = torch.nn.functional.pad(batch, (0, 5, 0, 9))  # what fills no patch is ignored
    assert torch.equal(backbone(uncut).pooled, backbone(batch).pooled)


def test_an_unknown_rule_for_positions_is_refused() -> None:
    with pytest.raises(RecipeError, match="position_resampling is 'mae'; give one of dino, timm"):
        build_backbone(
            TINY.model_copy(update={"timm_options": {**TINY.timm_options, "position_resampling": "mae"}}), seed=0
        )


def test_visible_patches_of_dinov3_keep_the_rotations_of_their_places() -> None:
    backbone = shaken(build_backbone(NETWORKS["DINOv3"], seed=0)).eval()
    batch, every = images(2, 3, 48, 32), torch.arange(6).expand(2, -1)
    tokens = backbone(batch)
    torch.testing.assert_close(backbone.visible(batch, every)[:, 5:], tokens.patches, rtol=1e-5, atol=1e-5)
    order = torch.tensor([[5, 0, 3, 1, 2, 4], [1, 0, 2, 5, 4, 3]])
    moved = backbone.visible(batch, order)[:, 5:]
    assert tokens.patches is not None
    expected = tokens.patches.gather(1, order[..., None].expand_as(tokens.patches))
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-5)


def test_other_networks_give_their_pooled_features() -> None:
    backbone = build_backbone(BackboneSettings(name="resnet18", drop_path_rate=0.0), seed=0).eval()
    batch = images(2, 3, 40, 32)
    tokens = backbone(batch)
    assert tokens.patches is None
    assert tokens.pooled.shape == (2, 512)
    assert backbone.dim == 512
    torch.testing.assert_close(tokens.pooled, plain_timm(backbone)(batch))
    with pytest.raises(RecipeError, match=r"trainer\.activation_checkpointing needs"):
        backbone.set_activation_checkpointing(True)
    backbone.set_activation_checkpointing(False)


def test_transformers_whose_features_timm_would_pool_otherwise_are_refused() -> None:
    with pytest.raises(RecipeError, match="pools its patch tokens"):
        build_backbone(TINY.model_copy(update={"timm_options": {**TINY.timm_options, "global_pool": "avg"}}), seed=0)
    with pytest.raises(RecipeError, match="distilled"):
        build_backbone(
            BackboneSettings(
                name="deit_tiny_distilled_patch16_224", timm_options={"embed_dim": 24, "depth": 1, "num_heads": 2}
            ),
            seed=0,
        )


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'vit_small_patch16_224'"):
        build_backbone(BackboneSettings(name="vit_smal_patch16_224"), seed=0)


def test_arguments_that_timm_does_not_take_are_refused_with_its_reason() -> None:
    with pytest.raises(
        RecipeError, match=r'timm cannot build resnet18 with \{"num_classes": 0, "img_size": 64\}: .*img_size'
    ):
        build_backbone(BackboneSettings(name="resnet18", image_size=64), seed=0)


def test_the_weights_depend_on_the_seed_alone_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    first = build_backbone(TINY, seed=5).state_dict()
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    second, other = build_backbone(TINY, seed=5).state_dict(), build_backbone(TINY, seed=6).state_dict()
    for key, value in first.items():
        assert torch.equal(second[key], value), key
    for key in ("cls_token", "pos_embed", "blocks.0.attn.qkv.weight"):
        assert not torch.equal(other[f"model.{key}"], first[f"model.{key}"]), key


def test_drop_path_does_not_change_the_weights() -> None:
    without, with_drop_path = (build_backbone(TINY, seed=5, drop_path_rate=rate).state_dict() for rate in (0.0, 0.5))
    assert without.keys() == with_drop_path.keys()
    assert all(torch.equal(without[key], with_drop_path[key]) for key in without)


def test_the_class_token_starts_as_wide_as_the_position_embeddings() -> None:
    backbone = build_backbone(BackboneSettings(name="vit_small_patch16_224", timm_options={"depth": 1}), seed=0)
    assert backbone.model.cls_token.std().item() == pytest.approx(0.02, rel=0.15)
    assert backbone.model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)


def test_stochastic_depth_happens_only_with_keys_and_rises_over_depth() -> None:
    backbone = build_backbone(TINY, seed=0, drop_path_rate=0.5).train()
    # timm makes none for the first block
    assert sorted({layer.drop_probability for layer in backbone._drop_paths}) == [0.25, 0.5]
    batch, keys = images(8, 3, 32, 32), torch.arange(8)
    plain = backbone(batch).pooled
    dropped = backbone(batch, keys).pooled
    assert not torch.allclose(dropped, plain, atol=1e-3)
    assert torch.equal(backbone(batch).pooled, plain)  # what an earlier pass has set is forgotten
    assert torch.equal(backbone(batch, keys).pooled, dropped)
    torch.testing.assert_close(backbone(batch[2:5], keys[2:5]).pooled, dropped[2:5])


def test_without_drop_path_keys_change_nothing() -> None:
    backbone, batch = build_backbone(TINY, seed=0), images(2, 3, 32, 32)
    assert torch.equal(backbone(batch, torch.arange(2)).pooled, backbone(batch).pooled)


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.5])
def test_activation_checkpointing_gives_the_same_gradients_bit_for_bit(drop_path_rate: float) -> None:
    """Two passes with different keys before one backward pass: each recomputation must see its own coin flips."""
    gradients = []
    for enabled in (False, True):
        backbone = build_backbone(TINY, seed=0, drop_path_rate=drop_path_rate).train()
        backbone.set_activation_checkpointing(enabled)
        first, second = (
            backbone(images(4, 3, 32, 32), torch.arange(4)),
            backbone(images(4, 3, 16, 16), torch.arange(4, 8)),
        )
        (first.pooled * second.pooled).sum().backward()
        gradients.append([parameter.grad for parameter in backbone.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        assert recomputed is not None
        assert torch.equal(plain, recomputed)


def test_activation_checkpointing_keeps_fewer_tensors_for_the_backward_pass() -> None:
    num_saved = []
    for enabled in (False, True):
        backbone = build_backbone(TINY, seed=0)
        backbone.set_activation_checkpointing(enabled)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(0) or tensor, lambda tensor: tensor
        ):
            backbone(images(2, 3, 32, 32))
        num_saved.append(len(saved))
    assert num_saved[1] < num_saved[0]


SMALL: dict[str, int | float | bool | str] = {"embed_dim": 24, "depth": 2, "num_heads": 2}
NETWORKS = {
    "class token": TINY,
    "layer scale and registers": BackboneSettings(
        name="vit_small_patch14_reg4_dinov2", image_size=28, timm_options=SMALL
    ),
    "norms of queries and keys": TINY.model_copy(update={"timm_options": {**SMALL, "qk_norm": True}}),
    "no bias of queries, keys and values": TINY.model_copy(update={"timm_options": {**SMALL, "qkv_bias": False}}),
    "mean of patches": BackboneSettings(name="vit_little_patch16_reg4_gap_256", image_size=32, timm_options=SMALL),
    "no transformer": BackboneSettings(name="resnet18"),
    "DINOv3": BackboneSettings(
        name="vit_small_plus_patch16_dinov3_qkvb", timm_options={**SMALL, "global_pool": "token"}
    ),
    "ConvNeXt": BackboneSettings(name="test_convnext"),
}


def shaken(backbone: Backbone) -> Backbone:
    """As after some training: biases, norms and layer scales are not what they start as."""
    with torch.no_grad():
        for seed, parameter in enumerate(backbone.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return backbone


def relative_errors(ours: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Against the typical size of a gradient too: that of a key's bias is 0 but for rounding."""
    return [float((a - b).norm() / (b.norm() + 1e-3 * b.numel() ** 0.5)) for a, b in zip(ours, truth, strict=True)]


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
def test_pooled_features_of_views_of_several_sizes_are_those_of_the_forward_pass_gradients_too(
    network: str, with_keys: bool
) -> None:
    backbone = shaken(build_backbone(NETWORKS[network], seed=0, drop_path_rate=0.5)).train()
    if network == "no transformer":
        # batch norm of so few images would blow up rounding; its stochastic depth is switched by the keys alone
        backbone.eval()
    groups = [images(2, 3, 32, 32), images(3, 3, 40, 64), images(2, 3, 33, 47)]
    keys = torch.arange(7) if with_keys else None
    key_groups = torch.split(keys, [2, 3, 2]) if keys is not None else [None] * 3
    expected = torch.cat([backbone(group, part).pooled for group, part in zip(groups, key_groups, strict=True)])
    ours = backbone.pooled(groups, keys)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6 * float(expected.detach().abs().max()) + 1e-6)
    weights, parameters = (
        torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)),
        list(backbone.parameters()),
    )
    gradients, truth = (
        list(torch.autograd.grad((features * weights).sum(), parameters)) for features in (ours, expected)
    )
    assert max(relative_errors(gradients, truth)) < 1e-5
    if with_keys:
        assert not torch.allclose(backbone.pooled(groups), ours, atol=1e-3)  # the keys did something


@pytest.mark.parametrize("network", ["class token", "layer scale and registers", "no bias of queries, keys and values"])
def test_the_class_token_alone_comes_out_of_the_last_block_as_it_does_with_all_others(network: str) -> None:
    backbone = shaken(build_backbone(NETWORKS[network], seed=0, drop_path_rate=0.5))
    block = backbone.model.blocks[-1]
    assert has_plain_attention(block)
    backbone._set_scales(block, torch.tensor([[1.0, 0.0, 2.0]]).expand(len(backbone._drop_paths), -1))
    tokens, weights = (
        images(3, 7, 24).requires_grad_(),
        torch.randn(3, 1, 24, generator=torch.Generator().manual_seed(1)),
    )
    ours, expected = class_token_of_last_block(block, tokens), block(tokens)[:, :1]
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=2e-6)
    inputs = [tokens, *block.parameters()]
    gradients, truth = (list(torch.autograd.grad((first * weights).sum(), inputs)) for first in (ours, expected))
    assert max(relative_errors(gradients, truth)) < 1e-5


def test_the_shortcut_to_the_class_token_is_taken_where_attention_is_plain_and_only_there() -> None:
    """Otherwise the tests above would compare the whole block with itself."""
    for network, is_taken in [("class token", True), ("norms of queries and keys", False), ("mean of patches", False)]:
        backbone = build_backbone(NETWORKS[network], seed=0)
        calls: list[int] = []
        backbone._class_token_of_last_block = lambda block, tokens, calls=calls: (
            calls.append(0) or class_token_of_last_block(block, tokens)
        )
        backbone.pooled([images(2, 3, 32, 32)])
        assert bool(calls) == is_taken, network


def test_activation_checkpointing_leaves_pooled_features_and_gradients_as_they_are_bit_for_bit() -> None:
    results = []
    for enabled in (False, True):
        backbone = build_backbone(TINY, seed=0, drop_path_rate=0.5).train()
        backbone.set_activation_checkpointing(enabled)
        features = backbone.pooled([images(2, 3, 32, 32), images(3, 3, 16, 16)], torch.arange(5))
        results.append([features, *torch.autograd.grad(features.square().sum(), list(backbone.parameters()))])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))


def test_checkpointing_refuses_dropout_whose_mask_it_could_not_repeat() -> None:
    settings = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=16,
        patch_size=8,
        timm_options={"embed_dim": 12, "depth": 1, "num_heads": 2, "proj_drop_rate": 0.2},
    )
    with pytest.raises(RecipeError, match="dropout"):
        build_backbone(settings, seed=0).set_activation_checkpointing(True)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"name": "vit_small_patch16_224.dino"}, r"backbone\.name 'vit_small_patch16_224\.dino'"),
        ({"timm_options": {"pretrained": True}}, r"backbone\.timm_options\.pretrained\b"),
        ({"timm_options": {"checkpoint_path": "x.pth"}}, r"backbone\.timm_options\.checkpoint_path"),
        ({"timm_options": {"pretrained_cfg": "dino"}}, r"backbone\.timm_options\.pretrained_cfg"),
        ({"timm_options": {"model_name": "resnet18.a1_in1k"}}, r"backbone\."),
    ],
)
def test_published_weights_are_refused_as_a_start(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=rf"{key}.*asks for published weights.*give --init"):
        refuse_published_weights(BackboneSettings(**settings))


def test_a_network_without_weights_is_not_refused() -> None:
    refuse_published_weights(
        BackboneSettings(name="resnet18", timm_options={"pretrained": False, "zero_init_last": True})
    )
