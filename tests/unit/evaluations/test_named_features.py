from typing import Any, Literal

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import cosine_similarity, interpolate

from massl.evaluations.named_features import FEATURES, generalised_mean, own_name, read_feature, read_patches
from massl.nn.backbone import Backbone
from massl.nn.token_readout import UnsuitableModel

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 0}


def make(name: str = "vit_tiny_patch16_224", **arguments: Any) -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name, **arguments)
        for parameter in model.parameters():  # timm starts class tokens, biases and norms where errors would not show
            parameter.data += 0.1 * torch.randn_like(parameter)
    return Backbone(model.eval(), timm_arguments={"model_name": name, **arguments})


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return make(**VIT)


def pictures(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def read(backbone: Backbone, images: Tensor, feature: str, precision: Literal["fp32", "bf16"] = "fp32") -> Tensor:
    return read_feature(backbone, images, feature, precision=precision)


@torch.inference_mode()
def tokens_by_timm(backbone: Backbone, images: Tensor) -> Tensor:  # [B, 1 + N, D]
    assert isinstance(backbone.model, VisionTransformer)
    return backbone.model.forward_features(images)


def by_dino_positions(patches: tuple[int, int], **arguments: Any) -> Backbone:
    """A model made for another grid, with the positions of `make(**arguments)` resampled as DINO writes it."""
    small = make(**arguments).model
    assert isinstance(small, VisionTransformer)
    assert small.pos_embed is not None
    height, width = patches
    side = arguments["img_size"] // arguments["patch_size"]
    grid = small.pos_embed[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    if (height, width) != (side, side):
        grid = interpolate(grid, scale_factor=((height + 0.1) / side, (width + 0.1) / side), mode="bicubic")
    size = (height * arguments["patch_size"], width * arguments["patch_size"])
    large = make(**{**arguments, "img_size": size}).model
    positions = torch.cat([small.pos_embed[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
    large.load_state_dict({**small.state_dict(), "pos_embed": positions})
    return Backbone(large, timm_arguments=arguments)


def test_the_class_token_is_that_of_timm(backbone: Backbone) -> None:
    images = pictures(3, 3, 32, 32)
    torch.testing.assert_close(
        read(backbone, images, "cls"), tokens_by_timm(backbone, images)[:, 0], rtol=1e-4, atol=1e-5
    )


def test_the_class_tokens_of_the_last_four_blocks_are_those_of_timm_oldest_first() -> None:
    backbone, images = make(**{**VIT, "depth": 5}), pictures(3, 3, 32, 32)
    assert isinstance(backbone.model, VisionTransformer)
    with torch.inference_mode():
        layers = backbone.model.get_intermediate_layers(images, n=4, return_prefix_tokens=True, norm=True)
    expected = torch.cat([prefix[:, 0] for _, prefix in layers], dim=1)
    found = read(backbone, images, "cls_last4")
    assert found.shape == (3, 4 * 32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_mean_of_the_patches_stands_behind_the_class_token(backbone: Backbone) -> None:
    images = pictures(3, 3, 32, 32)
    tokens = tokens_by_timm(backbone, images)
    expected = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
    torch.testing.assert_close(read(backbone, images, "cls_mean"), expected, rtol=1e-4, atol=1e-5)


def test_registers_are_no_patches() -> None:
    backbone, images = make(**VIT, reg_tokens=3), pictures(2, 3, 32, 32)
    tokens = tokens_by_timm(backbone, images)
    assert tokens.shape[1] == 1 + 3 + 16
    expected = torch.cat([tokens[:, 0], tokens[:, 4:].mean(dim=1)], dim=1)
    torch.testing.assert_close(read(backbone, images, "cls_mean"), expected, rtol=1e-4, atol=1e-5)


def test_the_generalised_mean_of_the_patches_is_the_fourth_root_of_the_mean_fourth_power(backbone: Backbone) -> None:
    images = pictures(3, 3, 32, 32)
    tokens = tokens_by_timm(backbone, images).double().numpy()
    assert (tokens[:, 1:] < 0).any(), "negative values count as next to nothing; without any this would not be seen"
    pooled = np.mean(np.maximum(tokens[:, 1:], 1e-6) ** 4, axis=1) ** 0.25
    expected = torch.from_numpy(np.concatenate([tokens[:, 0], pooled], axis=1)).float()
    torch.testing.assert_close(read(backbone, images, "cls_gem"), expected, rtol=1e-4, atol=1e-5)


def test_the_generalised_mean_of_known_numbers() -> None:
    patches = torch.tensor([[[1.0, -3.0, 2.0], [3.0, -1.0, 2.0]]])
    torch.testing.assert_close(generalised_mean(patches), torch.tensor([[41.0**0.25, 1e-6, 2.0]]))
    torch.testing.assert_close(generalised_mean(patches, exponent=1.0)[0, 0], torch.tensor(2.0))


def test_several_scales_are_the_mean_over_three_sizes_of_the_image(backbone: Backbone) -> None:
    images = pictures(2, 3, 64, 64)
    expected = torch.zeros(2, 32)
    for scale, size in ((1.0, 64), (2**-0.5, 45), (0.5, 32)):
        scaled = images if scale == 1.0 else interpolate(images, scale_factor=scale, mode="bilinear")
        assert scaled.shape[-1] == size
        side = size // 8
        expected += (
            tokens_by_timm(by_dino_positions((side, side), **VIT), scaled[:, :, : 8 * side, : 8 * side])[:, 0] / 3
        )
    torch.testing.assert_close(read(backbone, images, "cls_multiscale"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("height", "width"), [(48, 48), (24, 56), (16, 32), (32, 40)])
@pytest.mark.parametrize("feature", ["cls", "cls_mean"])
def test_images_of_another_size_get_positions_by_the_rule_of_dino(
    backbone: Backbone, height: int, width: int, feature: str
) -> None:
    images = pictures(2, 3, height, width)
    tokens = tokens_by_timm(by_dino_positions((height // 8, width // 8), **VIT), images)
    expected = tokens[:, 0] if feature == "cls" else torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
    torch.testing.assert_close(read(backbone, images, feature), expected, rtol=1e-4, atol=1e-4)


def test_pixels_beyond_the_last_whole_patch_are_left_out(backbone: Backbone) -> None:
    images = pictures(2, 3, 45, 38)
    for feature in FEATURES:
        if feature != "cls_multiscale":
            torch.testing.assert_close(read(backbone, images, feature), read(backbone, images[:, :, :40, :32], feature))


def test_pooled_features_of_a_convolutional_network_are_its_own() -> None:
    backbone, images = make("resnet18", num_classes=0), pictures(2, 3, 64, 48)
    with torch.inference_mode():
        expected = backbone.model(images)
    found = read(backbone, images, "pooled")
    assert found.shape == (2, 512)
    torch.testing.assert_close(found, expected)


def test_pooled_features_of_a_transformer_without_class_token_are_its_own() -> None:
    backbone, images = make(**VIT, class_token=False, global_pool="avg"), pictures(2, 3, 32, 32)
    with torch.inference_mode():
        expected = backbone.model(images)
    torch.testing.assert_close(read(backbone, images, "pooled"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feature", sorted(set(FEATURES) - {"pooled"}))
def test_features_of_a_class_token_are_refused_where_there_is_none(feature: str) -> None:
    for backbone, name in (
        (make("resnet18", num_classes=0), "resnet18"),
        (make(**VIT, class_token=False, global_pool="avg"), "vit_tiny_patch16_224"),
    ):
        with pytest.raises(
            UnsuitableModel,
            match=rf"the feature '{feature}' needs a class token, which {name} does not.*--feature pooled",
        ):
            read(backbone, pictures(1, 3, 32, 32), feature)


def test_four_blocks_of_a_transformer_with_two_are_refused() -> None:
    with pytest.raises(UnsuitableModel, match=r"4 of 2.*--feature"):
        read(make(**{**VIT, "depth": 2}), pictures(1, 3, 32, 32), "cls_last4")


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_narrow_numbers_give_nearly_the_same_features_in_float32(backbone: Backbone, feature: str) -> None:
    images = pictures(4, 3, 64, 64)
    wide, narrow = read(backbone, images, feature), read(backbone, images, feature, "bf16")
    assert wide.dtype == narrow.dtype == torch.float32
    assert not torch.equal(wide, narrow), "computed in float32 all the same"
    assert float(cosine_similarity(wide, narrow).min()) > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_a_gpu_gives_the_features_of_the_cpu_in_both_precisions(feature: str) -> None:
    arguments = {**VIT, "embed_dim": 128}
    backbone, images = make(**arguments), pictures(4, 3, 64, 64)
    expected = read(backbone, images, feature)
    on_gpu = make(**arguments).cuda()
    for precision, least in (("fp32", 0.99999), ("bf16", 0.99)):
        found = read(on_gpu, images.cuda(), feature, precision)  # type: ignore[arg-type]
        assert float(cosine_similarity(found.cpu(), expected).min()) > least


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_every_feature_says_what_it_is(feature: str) -> None:
    assert FEATURES[feature].summary


@pytest.mark.parametrize("num_registers", [0, 3])
def test_patches_are_timm_s_tokens_without_class_token_and_registers_on_their_grid(num_registers: int) -> None:
    backbone = make(**VIT, reg_tokens=num_registers, dynamic_img_size=True)
    images = pictures(2, 3, 32, 32)
    with torch.inference_mode():
        found = read_patches(backbone, images, precision="fp32")
    expected = tokens_by_timm(backbone, images)[:, 1 + num_registers :]
    assert found.shape == (2, 4, 4, 32)
    torch.testing.assert_close(found.flatten(1, 2), expected, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        assert read_patches(backbone, pictures(1, 3, 24, 40), precision="fp32").shape == (1, 3, 5, 32)


def test_networks_without_patches_have_no_patch_features() -> None:
    with pytest.raises(UnsuitableModel, match="the feature 'patches' needs patch tokens, which resnet18 does not have"):
        read_patches(make("resnet18", num_classes=0), pictures(1, 3, 32, 32), precision="fp32")


def test_features_have_one_name_and_other_names_lead_to_it() -> None:
    assert (own_name("last4"), own_name("cls_patch_mean")) == ("cls_last4", "cls_mean")
    assert all(own_name(feature) == feature for feature in FEATURES)
