import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from massl.config import RecipeError
from massl.data.views import ViewBatch, ViewSettings
from massl.methods import supervised
from massl.methods.base import StepHyper, TrainingPlan, combine
from massl.methods.supervised import Supervised, SupervisedSettings
from massl.nn.backbone import BackboneSettings
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep

PLAIN = {"mixup_alpha": 0.0, "cutmix_alpha": 0.0, "erasing_probability": 0.0, "label_smoothing": 0.0}


def hyper(step: int | Tensor = 3) -> StepHyper:
    return StepHyper(step=step, epoch=0, learning_rate=0.01, weight_decay=0.1, own={})


def tiny_method(*, seed: int = 0, drop_path_rate: float = 0.0, **changes: float) -> Supervised:
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=8, patch_size=4, drop_path_rate=drop_path_rate, timm_options=options
    )
    method = Supervised(SupervisedSettings.model_validate({"num_classes": 5, **changes}), backbone, seed=seed)
    with torch.no_grad():  # as after some training: images differ
        for position, parameter in enumerate(method.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(position)))
    return method.train()


def views(num_images: int = 6, *, num_views: int = 2, labels: list[int] | None = None) -> ViewBatch:
    generator = torch.Generator().manual_seed(0)
    return ViewBatch(
        global_views=torch.randn(num_views, num_images, 3, 8, 8, generator=generator),
        local_views=None,
        image_indices=torch.arange(100, 100 + num_images),
        labels=torch.arange(num_images) % 5 if labels is None else torch.tensor(labels),
    )


def part(batch: ViewBatch, images: slice) -> ViewBatch:
    assert batch.labels is not None
    return ViewBatch(
        global_views=batch.global_views[:, images],
        local_views=None,
        image_indices=batch.image_indices[images],
        labels=batch.labels[images],
    )


def seen_images(method: Supervised, batch: ViewBatch, step: int = 3) -> Tensor:
    """What enters the network, [G * B, 3, H, W]."""
    seen: list[Tensor] = []
    handle = method.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].flatten(0, 1)))
    method(batch, hyper(step))
    handle.remove()
    return seen[0]


def test_without_mixing_the_loss_is_the_cross_entropy_of_every_view() -> None:
    method, batch = tiny_method(**{**PLAIN, "label_smoothing": 0.1}), views()
    assert batch.labels is not None
    with torch.no_grad():
        logits = [method.encoder.head(method.encoder.backbone(view).pooled) for view in batch.global_views]
        expected = torch.stack([cross_entropy(rows, batch.labels, label_smoothing=0.1) for rows in logits]).mean()
        output = method(batch, hyper())
    torch.testing.assert_close(output.loss, expected)
    right = torch.stack([rows.argmax(dim=1) == batch.labels for rows in logits]).float().mean()
    assert output.metrics["train_top1"].item() == pytest.approx(100 * right.item())
    assert output.metrics["labelled_share"] == 1


@pytest.mark.parametrize("cutmix_probability", [0.0, 1.0])
def test_images_and_targets_are_mixed_by_the_same_share(cutmix_probability: float) -> None:
    changes = {**PLAIN, "mixup_alpha": 0.8, "cutmix_alpha": 1.0, "cutmix_probability": cutmix_probability}
    method, batch = tiny_method(**changes), views()
    assert batch.labels is not None
    images = batch.global_views.flatten(0, 1)
    step, mixture = next(
        (step, each) for step in range(20) if 0.2 < (each := method._mixture(images, hyper(step))).share < 0.8
    )
    mixed = images * mixture.pixel_shares + images.flip(0) * (1 - mixture.pixel_shares)
    torch.testing.assert_close(seen_images(method, batch, step), mixed)
    labels = batch.labels.repeat(2)
    logits = method.encoder.head(method.encoder.backbone(mixed).pooled)
    expected = mixture.share * cross_entropy(logits, labels) + (1 - mixture.share) * cross_entropy(
        logits, labels.flip(0)
    )
    output = method(batch, hyper(step))
    torch.testing.assert_close(output.loss, expected)
    hits = [(logits.argmax(dim=1) == each).float().mean().item() for each in (labels, labels.flip(0))]
    share = mixture.share.item()
    assert output.metrics["train_top1"].item() == pytest.approx(
        100 * (share * hits[0] + (1 - share) * hits[1]), abs=1e-3
    )


def test_the_mixture_is_new_each_step_and_the_same_for_any_part_of_the_batch() -> None:
    method, batch = tiny_method(), views()
    images = batch.global_views.flatten(0, 1)
    shares = {method._mixture(images, hyper(step)).share.item() for step in range(10)}
    assert len(shares) > 7  # two cuts may be of the same size
    assert torch.equal(
        method._mixture(images[:2], hyper()).share, method._mixture(images, hyper(torch.tensor(3))).share
    )
    assert tiny_method(seed=1)._mixture(images, hyper()).share != method._mixture(images, hyper()).share


def test_erasing_is_keyed_by_step_image_and_view() -> None:
    method, batch = tiny_method(**{**PLAIN, "erasing_probability": 1.0}), views(8)
    images = batch.global_views.flatten(0, 1)
    erased = seen_images(method, batch)
    changed = (erased != images).any(dim=1)
    assert changed.any(dim=(1, 2)).float().mean() > 0.9
    assert len({tuple(image.flatten().tolist()) for image in changed}) > 10  # 16 rectangles in images of 8 x 8
    halves = seen_images(method, part(batch, slice(4, 8)))
    assert torch.equal(halves, erased.reshape(2, 8, 3, 8, 8)[:, 4:].flatten(0, 1))
    assert not torch.equal((seen_images(method, batch, step=4) != images).any(dim=1), changed)
    assert torch.equal(seen_images(tiny_method(**PLAIN), batch), images)


def test_the_forward_pass_changes_nothing_and_the_same_step_has_the_same_loss() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    before = {key: value.clone() for key, value in method.state_dict().items()}
    first, second = method(batch, hyper()), method(batch, hyper())
    assert torch.equal(first.loss, second.loss)
    assert first.loss != method(batch, hyper(4)).loss
    method.after_step(first, hyper())
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())


def test_gradients_reach_every_parameter() -> None:
    method = tiny_method()
    method(views(), hyper()).loss.backward()
    assert [
        name
        for name, parameter in method.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().max() > 0
    ] == []


def test_without_mixing_the_parts_of_a_batch_have_the_loss_of_the_whole() -> None:
    method, batch = (
        tiny_method(drop_path_rate=0.3, mixup_alpha=0.0, cutmix_alpha=0.0),
        views(labels=[0, 1, 2, 3, -1, 4]),
    )
    parts = combine([method(part(batch, images), hyper()) for images in (slice(0, 3), slice(3, 6))])
    whole = method(batch, hyper())
    torch.testing.assert_close(parts.loss, whole.loss.detach())
    assert whole.metrics["labelled_share"].item() == pytest.approx(5 / 6)


def test_images_without_a_label_add_nothing_and_count_in_no_accuracy() -> None:
    method = tiny_method(**PLAIN)
    with torch.no_grad():
        # of the first views: half of the hits, or all
        predicted = method.encoder([views().global_views])[0].argmax(dim=1).tolist()
    batch, labelled = views(labels=[predicted[0], -1, predicted[2], -1, -1, -1]), torch.tensor([0, 2])
    some = method(batch, hyper())
    only = method(
        ViewBatch(
            global_views=batch.global_views[:, labelled],
            local_views=None,
            image_indices=batch.image_indices[labelled],
            labels=torch.tensor([predicted[0], predicted[2]]),
        ),
        hyper(),
    )
    torch.testing.assert_close(some.loss, only.loss / 3)
    torch.testing.assert_close(some.metrics["train_top1"], only.metrics["train_top1"])
    assert only.metrics["train_top1"] >= 50
    none = method(views(labels=[-1] * 6), hyper())
    assert none.loss == 0
    assert none.metrics["train_top1"] == 0


@pytest.mark.parametrize("label", [5, 7])
def test_a_label_beyond_the_classes_is_named(label: int) -> None:
    with pytest.raises(RecipeError, match=rf"label {label}.*method\.num_classes is 5.*{label + 1} or more"):
        tiny_method()(views(labels=[0, 1, label, 2, 3, 4]), hyper())


def test_a_first_batch_without_any_label_is_refused_and_views_without_labels_are_too() -> None:
    with pytest.raises(RecipeError, match="none of 6 images has a label"):
        tiny_method()(views(labels=[-1] * 6), hyper(0))
    bare = ViewBatch(global_views=views().global_views, local_views=None, image_indices=torch.arange(6))
    with pytest.raises(RecipeError, match="needs labels"):
        tiny_method()(bare, hyper())


def test_where_labels_are_not_on_the_host_a_wrong_one_makes_the_loss_not_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Supervised, "_refuse_wrong_labels", lambda *arguments, **options: None)
    method = tiny_method()
    assert method(views(labels=[0, 1, 5, 2, 3, 4]), hyper()).loss.isnan()
    assert method(views(labels=[0, 1, -1, 2, 3, 4]), hyper()).loss.isfinite()


def test_stopping_and_loading_continues_bit_for_bit() -> None:
    def step_of(method: Supervised) -> TrainingStep:
        optimizer = build_optimizer(method, OptimizerSettings(decayed="layers", clip_norm=0.0))
        return TrainingStep(method=method, parallel=method, optimizer=optimizer, bf16=False, device=torch.device("cpu"))

    straight, stopped, resumed = (tiny_method(drop_path_rate=0.3) for _ in range(3))
    with torch.no_grad():
        resumed.encoder.head.bias.add_(1.0)  # all that matters must come from the state
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
    exact = method(batch, hyper()).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = method(batch, hyper())
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert output.loss.item() != exact.item()


def test_drop_path_is_used_in_training_alone() -> None:
    method, batch = tiny_method(drop_path_rate=0.6, **PLAIN), views()
    dropped = method(batch, hyper()).loss.item()
    assert method.eval()(batch, hyper()).loss.item() != pytest.approx(dropped, rel=1e-4)


def test_weights_depend_on_the_seed_alone_and_the_classifier_starts_small() -> None:
    def fresh(seed: int) -> dict[str, Tensor]:
        backbone = BackboneSettings(name="vit_tiny_patch16_224", image_size=8, patch_size=4, timm_options={"depth": 1})
        return Supervised(SupervisedSettings(), backbone, seed=seed).state_dict()

    torch.manual_seed(1)
    first = fresh(4)
    torch.manual_seed(2)
    second = fresh(4)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert not torch.equal(fresh(5)["encoder.head.weight"], first["encoder.head.weight"])
    assert first["encoder.head.weight"].shape == (1000, 192)
    assert first["encoder.head.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert not first["encoder.head.bias"].any()


def test_the_trained_backbone_is_the_one_to_evaluate() -> None:
    method = tiny_method()
    assert method.backbone_to_evaluate() is method.encoder.backbone
    assert method.min_global_views == 1


def test_cautions_name_unused_views_and_partners_in_parts() -> None:
    def cautions(method: Supervised, **plan: Any) -> list[str]:
        whole = {
            "num_images": 100,
            "batch_size": 4,
            "num_parts": 1,
            "views": ViewSettings(num_global=3, num_local=0),
            **plan,
        }
        return method.cautions(TrainingPlan(**whole))

    assert cautions(tiny_method()) == []
    assert "set views.num_local to 0" in cautions(tiny_method(), views=ViewSettings(num_local=2))[0]
    assert "partners of mixup and CutMix from each of the 2 parts" in cautions(tiny_method(), num_parts=2)[0]
    assert cautions(tiny_method(**PLAIN), num_parts=2) == []


def test_all_labels_are_looked_at_before_training() -> None:
    def cautions(*labels: int) -> list[str]:
        views = ViewSettings(num_global=1, num_local=0)
        return tiny_method().cautions(
            TrainingPlan(num_images=3, batch_size=3, num_parts=1, views=views, labels=lambda: torch.tensor(labels))
        )

    assert cautions(0, 4, 2) == []
    (caution,) = cautions(0, -1, 2)
    assert "1 of 3 images have no label" in caution
    with pytest.raises(RecipeError, match=r"label 5.*method\.num_classes is 5"):
        cautions(0, 5, 2)
    with pytest.raises(RecipeError, match="none of 3 images has a label"):
        cautions(-1, -1, -1)


def test_a_loss_of_guessing_and_a_step_without_labels_are_signs_of_trouble() -> None:
    method = tiny_method()
    guessing = math.log(5)
    assert method.collapse_signs({"loss": 0.9 * guessing, "labelled_share": 1.0}) == []
    assert "guessing (ln 5 = 1.609)" in method.collapse_signs({"loss": guessing, "labelled_share": 1.0})[0]
    assert method.collapse_signs({"loss": 0.5 * guessing, "labelled_share": 0.5}) != []
    assert method.collapse_signs({"loss": 0.0, "labelled_share": 0.0}) == [
        "none of the images of this step has a label"
    ]


def test_settings_without_either_alpha_mix_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "draw_mixture", None)
    assert tiny_method(**PLAIN)(views(), hyper()).loss.isfinite()
