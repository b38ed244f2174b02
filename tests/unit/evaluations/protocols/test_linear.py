import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from safetensors import safe_open
from torch import Tensor, nn

from massl import keyed_random
from massl.config import RecipeError, validate
from massl.data.evaluation.views import CentreView, RandomCropView
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import EvaluationError, Measurement
from massl.evaluations.protocols import linear, linear_training
from massl.evaluations.protocols.linear import (
    LinearSettings,
    held_out_of,
    load_head,
    measure_linear,
    prepare_probe,
    train_heads,
)
from massl.nn.backbone import Backbone
from massl.nn.token_readout import UnsuitableModel
from massl.weights.models import LoadedModel, model_fingerprint

NUM_CLASSES = 3
PUBLISHED, LAST = "best over rates and epochs (as published)", "last epoch, best over rates"
BEST = "best over rates and epochs"  # beside remarks "(as published)" is left out
HONEST, HONEST_LAST = "rate chosen on held-out images", "last epoch, rate chosen on held-out images"
QUICK = LinearSettings(epochs=6, batch_size=16, base_rates=(0.001, 0.1, 3.0), crops="centre", held_out=0.25)
REMARK = ", centre crops, 6 epochs"


def tiny_model(*, seed: int = 0, embed_dim: int = 24, name: str = "vit_tiny_patch16_224") -> LoadedModel:
    options: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": embed_dim, "depth": 4, "num_heads": 2}
    if not name.startswith("vit"):
        options = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(name, num_classes=0, **options).eval()
    arguments = {"model_name": name, "num_classes": 0, **options}
    return LoadedModel(
        backbone=Backbone(model, timm_arguments=arguments),
        name="tiny",
        origin="random weights",
        fingerprint=model_fingerprint(model, arguments=arguments),
        image_size=16,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )


def pictures(num_images: int, *, seed: int, noise: float = 20.0, labelled: bool = True) -> ArraySource:
    """Image i is mostly red, green or blue, which is its label."""
    generator = np.random.default_rng(seed)
    pixels = generator.normal(60, noise, size=(num_images, 20, 18, 3))
    labels = np.arange(num_images) % NUM_CLASSES
    pixels[np.arange(num_images), :, :, labels] += 90
    return ArraySource(
        name=f"pictures {seed}",
        pixels=pixels.clip(0, 255).astype(np.uint8),
        labels=labels if labelled else None,
        class_names=("red", "green", "blue") if labelled else None,
        key_prefix="picture",
    )


def extractor_of(model: LoadedModel | None = None, **changes: Any) -> Extractor:
    settings = ExtractionSettings(batch_size=7, num_workers=0)
    given = {
        "model": model or tiny_model(),
        "settings": settings,
        "device": torch.device("cpu"),
        "cache": None,
        **changes,
    }
    return Extractor(**given)


def data_in(folder: Path, **parts: Any) -> EvaluationData:
    given = {"train": pictures(40, seed=1), "test": pictures(30, seed=2), **parts}
    return EvaluationData(name="Pictures", output=folder, **given)


def values(measurements: list[Measurement]) -> dict[str, float]:
    assert {measurement.metric for measurement in measurements} == {"top1"}
    return {str(measurement.setting): measurement.value for measurement in measurements}


class Stopped(Exception):
    pass


def stop_after(num_images: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if what.startswith("linear heads") and done > num_images:
            raise Stopped

    return progress


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_the_published_sweep_is_the_default() -> None:
    settings = LinearSettings()
    expected = [digit * 10.0**exponent for exponent in range(-4, 1) for digit in range(1, 10)]
    assert settings.base_rates == pytest.approx(expected)
    assert (len(settings.base_rates), settings.epochs, settings.batch_size, settings.crops) == (45, 100, 1024, "fresh")
    assert settings.remarks == ()


def test_a_separable_set_is_learned_by_some_rates_and_all_numbers_are_named(tmp_path: Path) -> None:
    measurements = list(measure_linear(extractor_of(), data_in(tmp_path), QUICK))
    assert values(measurements)[BEST + REMARK] == 100.0
    assert list(values(measurements)) == [name + REMARK for name in (BEST, LAST, HONEST, HONEST_LAST)]
    assert {(measurement.data, measurement.num_samples) for measurement in measurements} == {("Pictures", 30)}
    curves = json.loads((tmp_path / "linear_curve.json").read_text())
    test = np.array(curves["test_top1"])
    assert test.shape == np.array(curves["held_out_top1"]).shape == (6, 3)
    assert test.min() < test.max()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linear_curve.json", "linear_head.safetensors"]


def test_each_number_is_the_one_its_name_says(tmp_path: Path) -> None:
    noisy = data_in(tmp_path, train=pictures(40, seed=1, noise=250.0), test=pictures(60, seed=2, noise=250.0))
    found = values(list(measure_linear(extractor_of(), noisy, QUICK)))
    curves = json.loads((tmp_path / "linear_curve.json").read_text())
    test, held_out = np.array(curves["test_top1"]), np.array(curves["held_out_top1"])
    assert found[BEST + REMARK] == test.max()
    assert found[LAST + REMARK] == test[-1].max()
    epoch, rate = np.unravel_index(held_out.argmax(), held_out.shape)
    assert found[HONEST + REMARK] == test[epoch, rate] < test.max()
    assert found[HONEST_LAST + REMARK] == test[-1, held_out[-1].argmax()]
    chosen = curves["chosen"]
    assert chosen[HONEST] == {"base_rate": QUICK.base_rates[rate], "epoch": epoch + 1}
    best_epoch, best_rate = np.unravel_index(test.argmax(), test.shape)
    assert chosen[PUBLISHED] == {"base_rate": QUICK.base_rates[best_rate], "epoch": best_epoch + 1}


def test_without_held_out_images_only_the_choices_on_the_test_set_are_left(tmp_path: Path) -> None:
    settings = QUICK.model_copy(update={"held_out": 0.0})
    assert list(values(list(measure_linear(extractor_of(), data_in(tmp_path), settings)))) == [
        BEST + REMARK,
        LAST + REMARK,
    ]


def test_the_saved_head_classifies_as_the_published_number_says(tmp_path: Path) -> None:
    extractor, data = extractor_of(), data_in(tmp_path, test=pictures(60, seed=2, noise=250.0))
    found = values(list(measure_linear(extractor, data, QUICK)))
    head = load_head(tmp_path / "linear_head.safetensors")
    test = extractor.features(pictures(60, seed=2, noise=250.0), view=CentreView(size=16), feature="cls_last4")
    predicted = (test.rows @ head.weights.T + head.bias).argmax(dim=1)
    top1 = 100.0 * float((predicted == test.labels).double().mean())
    assert top1 == pytest.approx(found[BEST + REMARK])
    assert 40.0 < top1 < 100.0
    assert head.class_names == ("red", "green", "blue")
    assert (head.feature, head.backbone) == ("cls_last4", extractor.model.fingerprint)
    with safe_open(tmp_path / "linear_head.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["view_size"], float(metadata["top1"])) == ("16", top1)
    assert 1 <= int(metadata["epoch"]) <= 6
    assert float(metadata["base_rate"]) in QUICK.base_rates


# ---- against an independent truth ------------------------------------------------------------------------------------


def trained_by_pytorch(
    rows: Callable[[int], Tensor], labels: Tensor, settings: LinearSettings, *, rate_index: int, kept: Tensor
) -> list[nn.Linear]:
    """One head after each epoch by autograd, torch.optim.SGD and PyTorch's cosine schedule, on the kept images of each
    batch.
    """
    dim = rows(0).shape[1]
    linear = nn.Linear(dim, NUM_CLASSES)
    key = (settings.seed, "linear head", rate_index, torch.arange(NUM_CLASSES)[:, None], torch.arange(dim))
    with torch.no_grad():
        linear.weight.copy_(0.01 * keyed_random.normal(*key))
        linear.bias.zero_()
    rate = settings.base_rates[rate_index] * settings.batch_size / 256
    optimizer = torch.optim.SGD(linear.parameters(), lr=rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs, eta_min=0)
    after_epochs = []
    for epoch in range(settings.epochs):
        for batch in torch.split(
            keyed_random.permutation(len(labels), settings.seed, "linear order", epoch), settings.batch_size
        ):
            seen = batch[kept[batch]]
            optimizer.zero_grad()
            nn.functional.cross_entropy(linear(rows(epoch)[seen]), labels[seen]).backward()
            optimizer.step()
        schedule.step()
        after_epochs.append(copy.deepcopy(linear))
    return after_epochs


def accuracy(linear: nn.Linear, features: Any) -> float:
    return 100.0 * float((linear(features.rows).argmax(dim=1) == features.labels).double().mean())


@pytest.mark.parametrize("crops", ["fresh", "cached", "centre"])
def test_a_sweep_ends_where_pytorch_ends(crops: str, tmp_path: Path) -> None:
    settings = QUICK.model_copy(update={"crops": crops, "epochs": 3, "num_cached_crops": 2, "base_rates": (0.01, 0.5)})
    data = data_in(tmp_path, train=pictures(40, seed=1, noise=200.0), test=pictures(60, seed=2, noise=200.0))
    extractor = extractor_of()
    probe = prepare_probe(extractor, data, settings)
    held_out = held_out_of(probe, data.train)
    trained = train_heads(probe, data.train, held_out=held_out)
    assert held_out is not None
    assert int(held_out.excluded.sum()) == len(held_out.features) == 10

    @cache
    def rows(epoch: int) -> Tensor:
        views = {"fresh": epoch, "cached": epoch % 2}
        view = CentreView(size=16) if crops == "centre" else RandomCropView(size=16, seed=0, epoch=views[crops])
        return extractor.features(data.train, view=view, feature="cls_last4").rows

    labels = torch.arange(40) % NUM_CLASSES
    everything = torch.ones(40, dtype=torch.bool)
    for rate_index in range(2):
        with_all, without = (
            trained_by_pytorch(rows, labels, settings, rate_index=rate_index, kept=kept)
            for kept in (everything, ~held_out.excluded)
        )
        for epoch in range(3):
            assert float(trained.test_top1[epoch, rate_index]) == pytest.approx(accuracy(with_all[epoch], probe.test))
            assert float(trained.held_out_top1[epoch, rate_index]) == pytest.approx(
                accuracy(without[epoch], held_out.features)
            )
        for head in trained.chosen.values():  # whatever chose it, the head that is reported has seen all images
            if head.rate_index == rate_index:
                torch.testing.assert_close(head.weights, with_all[head.epoch].weight.detach(), atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(head.bias, with_all[head.epoch].bias.detach(), atol=1e-5, rtol=1e-4)
    assert set(trained.chosen) == {PUBLISHED, HONEST}


def test_fresh_crops_are_others_in_every_epoch_and_the_same_in_every_run() -> None:
    extractor, source = extractor_of(), pictures(12, seed=1)
    crops = linear_training.FreshCrops(
        extractor=extractor, source=source, labels=torch.arange(12) % 3, feature="cls", seed=0
    )
    batches = list(torch.split(torch.randperm(12, generator=torch.Generator().manual_seed(0)), 8))
    first, again, next_epoch = ([rows.clone() for rows in crops.batches(epoch, batches)] for epoch in (0, 0, 1))
    assert [len(rows) for rows in first] == [8, 4]
    assert all(torch.equal(rows, other) for rows, other in zip(first, again, strict=True))
    assert not any(torch.allclose(rows, other, atol=1e-3) for rows, other in zip(first, next_epoch, strict=True))
    kept = extractor.features(source, view=RandomCropView(size=16, seed=0, epoch=1), feature="cls")
    torch.testing.assert_close(torch.cat(next_epoch), kept.rows[torch.cat(batches)], atol=1e-5, rtol=1e-4)


def test_processes_share_every_batch_and_together_have_all_of_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    crops = linear_training.FreshCrops(
        extractor=extractor_of(), source=pictures(12, seed=1), labels=torch.arange(12) % 3, feature="cls", seed=0
    )
    batches = list(torch.split(torch.randperm(12, generator=torch.Generator().manual_seed(0)), 7))
    alone = [rows.clone() for rows in crops.batches(0, batches)]
    monkeypatch.setattr(linear_training.distributed, "world_size", lambda: 3)
    shares: list[list[Tensor]] = []  # of each process: what it brings of each batch
    for rank in range(3):
        brought: list[Tensor] = []
        monkeypatch.setattr(linear_training.distributed, "rank", lambda rank=rank: rank)

        def gather(rows: Tensor, brought: list[Tensor] = brought) -> Tensor:
            if rows.is_floating_point():  # not the messages by which processes fail together
                brought.append(rows)
            return rows

        monkeypatch.setattr(linear_training.distributed, "gather_rows", gather)
        list(crops.batches(0, batches))
        shares.append(brought)
    for number, rows in enumerate(alone):
        assert {len(share[number]) for share in shares} == {-(-len(rows) // 3)}  # equal shares, as gathering needs them
        torch.testing.assert_close(
            torch.cat([share[number] for share in shares])[: len(rows)], rows, atol=1e-5, rtol=1e-4
        )
    monkeypatch.setattr(linear_training.distributed, "gather_rows", lambda rows: torch.cat([rows] * 3))
    assert [len(rows) for rows in crops.batches(0, batches)] == [7, 5]  # what was repeated is dropped


def test_no_more_images_are_held_out_than_are_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MAX_HELD_OUT", 4)
    data = data_in(tmp_path)
    held_out = held_out_of(prepare_probe(extractor_of(), data, QUICK), data.train)
    assert held_out is not None
    assert len(held_out.features) == 4


def test_validation_images_choose_the_rate_where_they_are_given(tmp_path: Path) -> None:
    data = data_in(tmp_path, validation=pictures(24, seed=3, noise=250.0))
    probe = prepare_probe(extractor_of(), data, QUICK)
    held_out = held_out_of(probe, data.train)
    assert held_out is probe.validation
    assert held_out is not None
    assert held_out.excluded is None
    trained = train_heads(probe, data.train, held_out=held_out)
    last = trained.chosen[HONEST]
    predicted = (held_out.features.rows @ last.weights.T + last.bias).argmax(dim=1)
    own_top1 = 100.0 * float((predicted == held_out.features.labels).double().mean())
    # the heads themselves are scored on it: there is no second set
    assert own_top1 == pytest.approx(float(trained.held_out_top1.max()))


@pytest.mark.gpu
@pytest.mark.parametrize("crops", ["fresh", "cached"])
def test_a_gpu_finds_the_curves_of_the_cpu(crops: str, tmp_path: Path) -> None:
    settings = QUICK.model_copy(update={"crops": crops})
    list(measure_linear(extractor_of(), data_in(tmp_path / "cpu"), settings))
    model = tiny_model()
    model.backbone.cuda()
    list(measure_linear(extractor_of(model, device=torch.device("cuda")), data_in(tmp_path / "gpu"), settings))
    curves, others = (json.loads((tmp_path / device / "linear_curve.json").read_text()) for device in ("cpu", "gpu"))
    for name in ("test_top1", "held_out_top1"):
        torch.testing.assert_close(
            torch.tensor(curves[name]), torch.tensor(others[name]), atol=10.1, rtol=0
        )  # an image or two of 10 and 30


# ---- stopping and continuing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("crops", ["fresh", "centre"])
def test_a_sweep_that_was_stopped_continues_bit_for_bit(
    crops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_training, "_SECONDS_BETWEEN_SAVES", 0.0)
    settings = QUICK.model_copy(update={"crops": crops, "epochs": 4})
    parts = {"train": pictures(40, seed=1, noise=250.0), "test": pictures(60, seed=2, noise=250.0)}
    whole = list(measure_linear(extractor_of(), data_in(tmp_path / "whole", **parts), settings))
    stopped = data_in(tmp_path / "stopped", **parts)
    for num_images in (0, 50, 90):  # in epochs 1, 2 and 3 of 40 images
        with pytest.raises(Stopped):
            list(measure_linear(extractor_of(progress=stop_after(num_images)), stopped, settings))
    (file,) = stopped.output.iterdir()
    assert file.name.startswith("linear_")
    done: list[int] = []
    continued = extractor_of(
        progress=lambda what, now, total: done.append(now) if what.startswith("linear heads") else None
    )
    assert list(measure_linear(continued, stopped, settings)) == whole
    assert done[0] == 2 * 40 + 16
    assert done[-1] == 4 * 40
    curves, others = ((folder / "linear_curve.json").read_text() for folder in (tmp_path / "whole", stopped.output))
    assert curves == others
    head, other = (load_head(folder / "linear_head.safetensors") for folder in (tmp_path / "whole", stopped.output))
    assert torch.equal(head.weights, other.weights)
    assert torch.equal(head.bias, other.bias)
    assert not file.exists()


def test_a_finished_training_is_not_repeated_until_it_is_forgotten(tmp_path: Path) -> None:
    data = data_in(tmp_path)
    probe = prepare_probe(extractor_of(), data, QUICK)
    first = train_heads(probe, data.train, held_out=None)
    again = train_heads(replace(probe, extractor=extractor_of(progress=stop_after(-1))), data.train, held_out=None)
    assert torch.equal(first.test_top1, again.test_top1)
    assert torch.equal(first.chosen[PUBLISHED].weights, again.chosen[PUBLISHED].weights)
    other = QUICK.model_copy(update={"seed": 1})
    with pytest.raises(Stopped):  # what was kept is of other settings
        train_heads(
            replace(probe, extractor=extractor_of(progress=stop_after(-1)), settings=other), data.train, held_out=None
        )


@pytest.mark.parametrize("damage", ["cut short", "changed", "no heads"])
def test_damaged_heads_are_trained_again_and_said_so(tmp_path: Path, damage: str) -> None:
    data, lines = data_in(tmp_path), list[str]()
    probe = prepare_probe(extractor_of(say=lines.append), data, QUICK)
    trained = train_heads(probe, data.train, held_out=None)
    content = trained.file.read_bytes()
    other = safetensors.torch.save({"test_correct": torch.zeros(3, 3)}, {"chosen": "{}"})
    trained.file.write_bytes(
        {"cut short": content[:-5], "changed": content[:-5] + b"\1" + content[-4:], "no heads": other}[damage]
    )
    again = train_heads(probe, data.train, held_out=None)
    assert len(lines) == 1
    assert f"{trained.file} is damaged" in lines[0]
    assert torch.equal(again.chosen[PUBLISHED].weights, trained.chosen[PUBLISHED].weights)
    assert trained.file.read_bytes() == content


def test_a_changed_head_is_refused(tmp_path: Path) -> None:
    data = data_in(tmp_path)
    list(measure_linear(extractor_of(), data, QUICK))
    path = data.output / "linear_head.safetensors"
    path.write_bytes(path.read_bytes()[:-5] + b"\1" + path.read_bytes()[-4:])
    with pytest.raises(EvaluationError, match=rf"{path} .*digest"):
        load_head(path)


# ---- features, labels, errors ----------------------------------------------------------------------------------------


def test_wide_transformers_are_probed_on_class_and_patch_tokens_and_another_feature_is_named(tmp_path: Path) -> None:
    data = data_in(tmp_path)
    assert prepare_probe(extractor_of(tiny_model(embed_dim=392)), data, QUICK).feature == "cls_mean"
    other = prepare_probe(extractor_of(feature="cls_mean"), data, QUICK)
    assert (other.feature, str(other.setting("x"))) == ("cls_mean", f"x, feature cls_mean{REMARK}")
    with pytest.raises(UnsuitableModel, match="--feature pooled"):
        prepare_probe(extractor_of(tiny_model(name="resnet10t")), data, QUICK)
    pooled = extractor_of(tiny_model(name="resnet10t"), feature="pooled")
    assert BEST + ", feature pooled" + REMARK in values(list(measure_linear(pooled, data, QUICK)))


def test_cached_crops_are_named_in_results() -> None:
    assert LinearSettings(crops="cached").remarks == ("4 cached crops",)


@pytest.mark.parametrize("crops", ["fresh", "centre"])
def test_images_without_labels_are_refused(crops: str, tmp_path: Path) -> None:
    settings = QUICK.model_copy(update={"crops": crops})
    with pytest.raises(DataError, match="pictures 1 has no labels"):
        list(measure_linear(extractor_of(), data_in(tmp_path, train=pictures(40, seed=1, labelled=False)), settings))
    gaps = pictures(40, seed=1)
    gaps.labels[5] = -1
    with pytest.raises(DataError, match="1 of 40 images of pictures 1 have no label"):
        list(
            measure_linear(extractor_of(), data_in(tmp_path, train=gaps), settings.model_copy(update={"held_out": 0.0}))
        )


def test_rates_that_are_not_positive_are_refused() -> None:
    with pytest.raises(RecipeError, match="base_rates: learning rates must be positive"):
        validate(LinearSettings, {"base_rates": [0.1, 0.0]}, origin="here")


def test_heads_that_all_overflow_stop_the_work(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="all linear heads on pictures 1 have overflowed in epoch"):
        list(measure_linear(extractor_of(), data_in(tmp_path), QUICK.model_copy(update={"base_rates": (1e38,)})))


def test_what_is_no_head_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"there is no linear head at"):
        load_head(tmp_path / "linear_head.safetensors")
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(EvaluationError, match="is no linear head of massl"):
        load_head(tmp_path / "other")
