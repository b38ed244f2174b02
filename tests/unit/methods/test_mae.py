import pytest
import torch

from massl.config import RecipeError
from massl.data.views import ViewBatch, ViewSettings
from massl.methods.base import StepHyper, TrainingPlan, combine
from massl.methods.mae import MAE, MAESettings
from massl.nn.backbone import BackboneSettings
from massl.nn.decoder import DecoderSettings
from massl.ops.pixel_targets import cut_patches, hidden_patch_error, normalised_patches
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep

HYPER = StepHyper(step=3, epoch=0, learning_rate=0.01, weight_decay=0.1, own={})


def tiny_method(*, seed: int = 0, drop_path_rate: float = 0.0, **changes: float | bool) -> MAE:
    settings = MAESettings.model_validate({"decoder": DecoderSettings(dim=12, depth=1, num_heads=3), **changes})
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=16, patch_size=4, drop_path_rate=drop_path_rate, timm_options=options
    )
    return MAE(settings, backbone, seed=seed).train()


def views(num_images: int = 4, *, num_views: int = 2, size: int = 16) -> ViewBatch:
    generator = torch.Generator().manual_seed(0)
    return ViewBatch(
        global_views=torch.randn(num_views, num_images, 3, size, size, generator=generator),
        local_views=None,
        image_indices=torch.arange(100, 100 + num_images),
    )


def part(batch: ViewBatch, images: slice) -> ViewBatch:
    return ViewBatch(
        global_views=batch.global_views[:, images], local_views=None, image_indices=batch.image_indices[images]
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_the_loss_asks_for_the_hidden_patches_of_every_view(normalise: bool) -> None:
    method, batch = tiny_method(normalise_targets=normalise), views()
    kept = method.kept_patches(batch, HYPER)
    losses = []
    for view, view_kept in zip(batch.global_views, kept, strict=True):
        predictions = method.decoder(method.backbone.visible(view, view_kept), view_kept, (4, 4))
        patches = cut_patches(view, 4)
        losses.append(hidden_patch_error(predictions, normalised_patches(patches) if normalise else patches, view_kept))
    torch.testing.assert_close(method(batch, HYPER).loss, torch.stack(losses).mean())


def test_what_is_hidden_from_the_backbone_changes_the_targets_alone() -> None:
    method, batch = tiny_method(), views(1, num_views=1)
    kept = method.kept_patches(batch, HYPER)[0]
    hidden = next(number for number in range(16) if number not in kept[0])
    row, column = divmod(hidden, 4)
    changed = batch.global_views.clone()
    changed[0, 0, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] *= 7.0
    seen = [method.backbone.visible(images[0], kept) for images in (batch.global_views, changed)]
    assert torch.equal(*seen)


def test_a_quarter_of_the_patches_stays_visible_and_another_one_for_each_step_image_and_view() -> None:
    method, batch = tiny_method(), views(16)
    kept = method.kept_patches(batch, HYPER)
    assert kept.shape == (2, 16, 4)
    assert all(len(set(row)) == 4 for row in kept.flatten(0, 1).tolist())
    assert len({tuple(sorted(row)) for row in kept.flatten(0, 1).tolist()}) > 25
    later = StepHyper(step=4, epoch=0, learning_rate=0.0, weight_decay=0.0, own={})
    assert not torch.equal(method.kept_patches(batch, later), kept)
    assert not torch.equal(tiny_method(seed=1).kept_patches(batch, HYPER), kept)
    assert torch.equal(method.kept_patches(part(batch, slice(8, 16)), HYPER), kept[:, 8:])
    assert tiny_method(hidden_share=0.5).kept_patches(batch, HYPER).shape[2] == 8


def test_the_forward_pass_changes_nothing_and_the_same_step_has_the_same_loss() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    before = {key: value.clone() for key, value in method.state_dict().items()}
    first, second = method(batch, HYPER), method(batch, HYPER)
    assert torch.equal(first.loss, second.loss)
    method.after_step(first, HYPER)
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())


def test_gradients_reach_everything_but_the_fixed_positions() -> None:
    method = tiny_method()
    method(views(8), HYPER).loss.backward()
    without = [
        name
        for name, parameter in method.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().max() > 0
    ]
    assert without == ["backbone.model.pos_embed"]


def test_the_halves_of_a_batch_have_the_loss_of_the_whole() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views(8)
    halves = [method(part(batch, images), HYPER) for images in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(combine(halves).loss, method(batch, HYPER).loss.detach())


def test_drop_path_is_drawn_anew_each_step_and_not_in_evaluation() -> None:
    method, batch = tiny_method(drop_path_rate=0.6), views()
    dropped = method(batch, HYPER).loss.item()
    assert method.eval()(batch, HYPER).loss.item() != pytest.approx(dropped, rel=1e-4)


def test_stopping_and_loading_continues_bit_for_bit() -> None:
    def step_of(method: MAE) -> TrainingStep:
        optimizer = build_optimizer(method, OptimizerSettings(betas=(0.9, 0.95), clip_norm=0.0))
        return TrainingStep(method=method, parallel=method, optimizer=optimizer, bf16=False, device=torch.device("cpu"))

    def hyper(step: int) -> StepHyper:
        return StepHyper(step=step, epoch=0, learning_rate=0.01, weight_decay=0.1, own={})

    straight, stopped, resumed = (tiny_method(seed=seed, drop_path_rate=0.3) for seed in (0, 0, 0))
    with torch.no_grad():
        resumed.decoder.mask_token.add_(1.0)  # all that matters must come from the state
    steps = [step_of(method) for method in (straight, stopped, resumed)]
    for number in range(4):
        expected = steps[0]([views()], hyper(number), num_parts=1).loss
        if number == 2:
            resumed.load_state_dict(stopped.state_dict())
            steps[2].optimizer.load_portable_state(steps[1].optimizer.portable_state())
        assert torch.equal(steps[1 if number < 2 else 2]([views()], hyper(number), num_parts=1).loss, expected)
    assert all(torch.equal(value, resumed.state_dict()[key]) for key, value in straight.state_dict().items())


def test_under_bf16_autocast_the_loss_is_float32_and_nearly_that_of_float32() -> None:
    method, batch = tiny_method(), views()
    exact = method(batch, HYPER).loss
    rounded = ViewBatch(global_views=batch.global_views.bfloat16(), local_views=None, image_indices=batch.image_indices)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = method(rounded, HYPER)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert output.loss.item() != exact.item()
    output.loss.backward()


def test_views_of_another_size_than_the_position_grid_are_taken() -> None:
    method = tiny_method()
    assert method(views(size=24), HYPER).loss.isfinite()
    assert method(views(size=14), HYPER).loss.isfinite()  # 3 x 3 patches and two pixels left over


def test_a_share_that_hides_everything_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"method\.hidden_share 0\.95.*4 x 4"):
        tiny_method(hidden_share=0.95)(views(), HYPER)


def test_weights_start_as_the_authors_do_and_the_seed_alone_decides_them() -> None:
    torch.manual_seed(1)
    first = tiny_method(seed=4)
    torch.manual_seed(2)
    second = tiny_method(seed=4)
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())
    assert not torch.equal(tiny_method(seed=5).decoder.embed.weight, first.decoder.embed.weight)
    model = first.backbone.model
    for layer, fans in (
        (model.blocks[0].attn.qkv, 16 + 48),
        (first.decoder.predict, 12 + 48),
        (first.decoder.embed, 16 + 12),
    ):
        limit = (6 / fans) ** 0.5
        assert 0.9 * limit < layer.weight.abs().max() <= limit
        assert not layer.bias.any()
    limit = (6 / (48 + 16)) ** 0.5  # the patch embedding as a linear layer from 48 numbers to 16
    assert 0.9 * limit < model.patch_embed.proj.weight.abs().max() <= limit
    for token in (model.cls_token, first.decoder.mask_token):
        assert token.std().item() == pytest.approx(0.02, rel=0.6)
    assert not model.pos_embed.requires_grad


@pytest.mark.parametrize("name", ["resnet10t", "vit_small_patch16_dinov3"])
def test_a_network_without_position_embeddings_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"with position embeddings, which {name} is not; choose .*--init"):
        MAE(MAESettings(), BackboneSettings(name=name, drop_path_rate=0.0), seed=0)


def test_activation_checkpointing_covers_the_decoder_and_changes_no_loss() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    expected = method(batch, HYPER).loss
    method.set_activation_checkpointing(True)
    assert method.decoder.activation_checkpointing
    assert method.backbone.activation_checkpointing
    loss = method(batch, HYPER).loss
    assert torch.equal(loss, expected)
    loss.backward()


def test_the_trained_backbone_is_the_one_to_evaluate_and_local_views_are_cautioned_against() -> None:
    method = tiny_method()
    assert method.backbone_to_evaluate() is method.backbone
    assert method.min_global_views == 1
    plan = TrainingPlan(num_images=10, batch_size=2, num_parts=2, views=ViewSettings(num_global=1, num_local=0))
    assert method.cautions(plan) == []
    (caution,) = method.cautions(
        TrainingPlan(num_images=10, batch_size=2, num_parts=1, views=ViewSettings(num_local=6))
    )
    assert "set views.num_local to 0" in caution


def test_signs_of_life() -> None:
    method = tiny_method()
    assert method.health(torch.ones(5, 16), HYPER)["feature_spread"] == pytest.approx(0.0, abs=1e-3)
    assert method.health(torch.eye(5, 16), HYPER)["feature_spread"] == pytest.approx(0.8**0.5)
    assert method.collapse_signs({"loss": 0.6, "feature_spread": 0.3}) == []
    assert "mean colour" in method.collapse_signs({"loss": 0.999, "feature_spread": 0.3})[0]
    assert "same vector" in method.collapse_signs({"loss": 0.6, "feature_spread": 0.01})[0]
    assert tiny_method(normalise_targets=False).collapse_signs({"loss": 1.5, "feature_spread": 0.3}) == []
