"""What auto chooses, with made-up images and devices."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

from massl.commands import auto
from massl.commands.auto import planned_recipe
from massl.commands.recipe import load_recipe
from massl.data.sources import open_source
from massl.nn.backbone import BackboneSettings
from massl.planning import rules
from massl.planning.choice import Plan, choose
from massl.planning.costs import Speed
from massl.planning.facts import DeviceFacts, ImageFacts
from massl.planning.memory import checkpoint_gib, computed_gib
from scripts.auto_table import DEVICES, IMAGES, PAGE, SIDES, device_of, images_of, page_with_table

GPU = device_of("cuda", 24)


def chosen(num_images: int, side: int = 224, device: DeviceFacts = GPU, **given: Any) -> Plan:
    return choose(images_of(num_images, side), device, {key.replace("__", "."): value for key, value in given.items()})


@pytest.mark.parametrize("num_images", [40, 100, *IMAGES])
@pytest.mark.parametrize("side", [*SIDES, 224])
@pytest.mark.parametrize("device", [*DEVICES, ("cuda", 140)], ids=str)
def test_every_choice_is_a_valid_recipe_that_fits(num_images: int, side: int, device: tuple[str, float]) -> None:
    plan = chosen(num_images, side, device_of(*device))
    recipe = planned_recipe(plan)
    views, memory, trainer = recipe.views, recipe.method.memory, recipe.trainer  # type: ignore[attr-defined]
    assert memory.num_rows >= trainer.batch_size
    if device[0] == "cuda" and side < 48:
        assert (recipe.backbone.name, recipe.backbone.stem) == ("resnet18", "small")
    elif recipe.backbone.name == "resnet18":
        assert (recipe.backbone.stem, views.global_size) == ("", 112)
    elif device[0] == "cuda":
        assert views.global_size % recipe.backbone.patch_size == 0  # type: ignore[operator]
        assert recipe.backbone.patch_size <= views.local_size <= views.global_size <= max(side, rules.VIEWS[0].side)  # type: ignore[operator]
        assert recipe.backbone.image_size == views.global_size
    else:
        assert recipe.backbone.name == "resnet10t"
        assert views.local_size <= views.global_size <= 64
    assert trainer.batch_size <= memory.num_rows <= num_images
    assert memory.num_rows % memory.block_size == 0
    assert trainer.batch_size % trainer.accumulation_steps == 0
    assert 0.5 <= recipe.method.teacher.momentum < 1  # type: ignore[attr-defined]
    assert recipe.optimizer.warmup_epochs < trainer.epochs
    needed = computed_gib(plan.values, device_kind=device[0])
    assert needed is not None
    assert needed <= rules.DEVICE_SHARE * device[1]
    assert recipe.trainer.precision == ("fp32" if device[0] == "cpu" else "bf16")


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_more_images_never_get_less(device: tuple[str, float]) -> None:
    """Batch, memory, views, images seen and the teacher's horizon grow; the epochs fall."""
    plans = [
        chosen(number, 1000, device_of(*device)).values
        for number in (100, 1_000, 8_000, *range(20_000, 2_000_000, 70_000))
    ]
    for less, more in pairwise(plans):
        for key in ("method.memory.num_rows", "views.global_size", "views.num_local"):
            assert less[key] <= more[key]
        assert less["trainer.epochs"] >= more["trainer.epochs"]
        assert horizon(less) <= horizon(more) * 1.01


def horizon(values: dict[str, Any]) -> float:
    return float(values["trainer.batch_size"]) / (1 - values["method.teacher.momentum"])


def test_measured_recipes_are_met_at_their_own_numbers() -> None:
    tiny = chosen(35_000, 64).values
    assert (tiny["method.memory.num_rows"], tiny["method.memory.block_size"]) == (4_096, 1_024)
    assert (tiny["method.teacher.momentum"], tiny["method.teacher.temperature"]) == (0.95, 0.04)
    assert tiny["method.instance_weight"] == load_recipe("massl-tiny").method.model_dump()["instance_weight"] == 0.5
    assert (tiny["backbone.name"], tiny["views.global_size"], tiny["views.num_local"]) == ("resnet18", 112, 0)
    assert (tiny["trainer.batch_size"], tiny["optimizer.learning_rate"]) == (128, 3e-3)
    vit = chosen(35_000, 64, backbone__patch_size=8).values
    assert (vit["backbone.name"], vit["views.global_size"]) == ("vit_small_patch16_224", 64)
    assert (vit["trainer.batch_size"], vit["optimizer.learning_rate"]) == (128, 7e-4)
    paper = chosen(1_281_167, 375, device_of("cuda", 140)).values
    assert (paper["method.memory.num_rows"], paper["method.memory.block_size"]) == (65_536, 16_384)
    assert (paper["method.teacher.momentum"], paper["method.teacher.temperature"]) == (0.992, 0.07)
    assert (paper["views.num_local"], paper["method.head.batch_norm"]) == (10, False)
    assert (paper["trainer.batch_size"], paper["method.instance_weight"]) == (1024, 0.0)


def test_the_reason_has_the_users_numbers() -> None:
    lines = chosen(17_034).lines()
    (memory,) = [line for line in lines if line.startswith("method.memory.num_rows")]
    assert memory.startswith("method.memory.num_rows 4,096: ")
    assert "a quarter of your 17,034 images" in memory


def test_what_follows_from_a_given_value_changes_with_it() -> None:
    plain, given = chosen(17_034), chosen(17_034, trainer__batch_size=64)
    assert given.values["trainer.batch_size"] == 64
    assert given.reasons["trainer.batch_size"] == "as you asked (auto: 128)"
    assert given.values["method.teacher.momentum"] == 0.975
    assert plain.values["method.teacher.momentum"] == 0.95
    assert chosen(17_034, views__num_local=6).values["method.teacher.momentum"] == 0.99
    assert chosen(17_034, method__memory__num_rows=512).values["method.memory.block_size"] == 128
    assert chosen(17_034, trainer__epochs=10).values["optimizer.warmup_epochs"] == 1.0
    assert chosen(17_034, trainer__seed=7).values["trainer.seed"] == 7


def test_a_small_gpu_gets_a_smaller_batch_or_parts_and_a_given_batch_stays() -> None:
    small = device_of("cuda", 8)
    assert chosen(10_000, 500, device_of("cuda", 6), backbone__patch_size=8).values["trainer.batch_size"] == 64
    many = chosen(1_281_167, 500, small).values
    assert (many["trainer.batch_size"], many["method.head.batch_norm"]) == (1024, False)
    assert many["trainer.accumulation_steps"] > 1
    given = chosen(10_000, 500, small, trainer__batch_size=256, backbone__patch_size=8).values
    assert (given["trainer.batch_size"], given["trainer.activation_checkpointing"]) == (256, True)


@pytest.mark.parametrize("num_processes", [2, 3, 6, 8])
def test_several_processes_get_equal_shares_of_a_batch(num_processes: int) -> None:
    device = DeviceFacts(kind="cuda", name="", memory_gib=24, num_cores=4, host_gib=32, num_processes=num_processes)
    trainer = planned_recipe(chosen(1_281_167, 500, device)).trainer
    assert trainer.batch_size % (num_processes * trainer.accumulation_steps) == 0
    assert 512 <= trainer.batch_size <= 1024


def test_images_are_cached_if_the_host_has_room_and_arrays_never() -> None:
    assert chosen(10_000, 500).values["data.cache_gib"] == pytest.approx(3.1, abs=0.2)
    assert chosen(3_000_000, 500).values["data.cache_gib"] == pytest.approx(rules.CACHE_SHARE * 128, abs=0.1)
    array = ImageFacts(num_images=10_000, sizes=((64, 64),), num_sampled=1, is_array=True)
    assert choose(array, GPU, {}).values["data.cache_gib"] == 0
    assert any("decoded, less than 0.1 GiB" in reason for reason in chosen(100, 64).reasons.values())


def test_published_weights_are_advised_for_few_images_unless_they_are_used() -> None:
    recipe = planned_recipe(chosen(999, 64))
    for num_images, has_start, is_advised in ((999, False, True), (999, True, False), (1000, False, False)):
        facts, plan = images_of(num_images, 64), chosen(num_images, 64)
        found = auto.Resolved(recipe=recipe, plan=plan, images=facts, has_start=has_start)
        assert (".lvd142m" in found.explanation) is is_advised


def test_the_images_of_the_probes_have_room_in_the_cache(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        for number in range(100):
            Image.new("RGB", (1000, 1000)).save(tmp_path / name / f"{number}.jpg")
    train, test = str(tmp_path / "train"), str(tmp_path / "test")
    few, held, other = (
        auto.plan_images(open_source(train), {"data.source": train, "data.max_side": 1000, **given}, device=GPU)[1]
        for given in ({}, {"data.hold_out": 0.5}, {"probes.database": train, "probes.queries": test})
    )
    assert few.values["data.cache_gib"] == 0.3  # 100 of 3 MB, in tenths
    for plan in (held, other):  # the source of a run leaves out what is held
        assert plan.values["data.cache_gib"] == 0.6


@pytest.mark.parametrize("name", rules.TABLE)
def test_rows_hold_at_their_columns_and_lie_between_them(name: str) -> None:
    row = rules.TABLE[name]
    assert len(row.values) == len(rules.IMAGES)
    assert [rules.at(name, number) for number in rules.IMAGES] == list(row.values)
    assert rules.at(name, 1) == row.values[0]
    assert rules.at(name, 10**9) == row.values[-1]
    if row.between != "nearest":
        low, high = sorted(row.values[2:4])
        assert low <= rules.at(name, 200_000) <= high
    for page in (word.strip(":;,()") for word in row.measured.split()):
        assert not page.startswith("docs/") or (PAGE.parents[1] / page.partition("#")[0]).is_file(), page


def test_the_page_shows_what_the_rules_choose() -> None:
    text = PAGE.read_text()
    assert page_with_table(text) == text, "run python scripts/auto_table.py"


# GiB of training alone, docs/performance.md, docs/results: ViT-S/16 N=128, ViT-B/16 N=64, massl-tiny, massl-imagenette
@pytest.mark.parametrize(
    ("network", "batch", "views", "patch", "rows", "measured"),
    [
        ("small", 128, (2, 224, 10, 96), 16, 65_536, 9.8),
        ("base", 64, (2, 224, 10, 96), 16, 65_536, 10.8),
        ("small", 256, (2, 64, 0, 32), 8, 4_096, 4.2),
        ("small", 256, (2, 64, 6, 32), 8, 4_096, 6.1),
        ("small", 256, (2, 112, 0, 48), 8, 4_096, 10.6),
    ],
)
def test_the_count_agrees_with_the_measured_memory(
    network: str, batch: int, views: tuple[int, int, int, int], patch: int, rows: int, measured: float
) -> None:
    values = {
        "backbone.name": f"vit_{network}_patch16_224",
        "backbone.patch_size": patch,
        "trainer.batch_size": batch,
        "trainer.precision": "bf16",
        "method.memory.num_rows": rows,
    }
    keys = ("views.num_global", "views.global_size", "views.num_local", "views.local_size")
    counted = computed_gib({**values, **dict(zip(keys, views, strict=True))}, device_kind="cuda")
    assert counted == pytest.approx(measured, rel=0.15)


def test_the_memory_of_other_networks_is_counted_from_what_autograd_keeps() -> None:
    values = {
        "backbone.name": "resnet18",
        "views.num_global": 2,
        "views.num_local": 0,
        "views.global_size": 64,
        "views.local_size": 32,
        "trainer.precision": "fp32",
    }
    sizes = [computed_gib({**values, "trainer.batch_size": size}, device_kind="cpu") for size in (256, 512)]
    assert sizes[0] is not None
    assert sizes[1] is not None
    network, kept = timm.create_model("resnet18", num_classes=0), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = network(torch.rand(2, 3, 64, 64))
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    real = sum(size for address, size in kept.items() if address not in weights) / 2**30
    assert features.shape == (2, 512)
    # 256 images more, two views each; their pixels are counted apart
    assert sizes[1] - sizes[0] == pytest.approx(1.35 * 256 * real, rel=0.05)
    one = computed_gib({**values, "trainer.batch_size": 1}, device_kind="cpu")
    assert one == pytest.approx(1.0 + 20 * 11.2e6 / 2**30 + 20 * (512 * 2048 + 2048**2) / 2**30, rel=0.1)


def test_the_memory_of_an_unknown_network_is_not_counted() -> None:
    values = {"backbone.name": "resnet18a", "views.num_global": 2, "views.num_local": 0, "views.global_size": 64}
    values |= {"views.local_size": 32, "trainer.precision": "fp32", "trainer.batch_size": 8}
    assert computed_gib(values, device_kind="cpu") is None
    assert checkpoint_gib(values) is None


def test_a_cpu_gets_a_small_resnet_with_the_settings_it_was_measured_with() -> None:
    plan, demo = chosen(8_000, 28, device_of("cpu", 16)), load_recipe("demo")
    recipe = planned_recipe(plan)
    assert recipe.backbone == demo.backbone
    assert recipe.views.global_size == demo.views.global_size
    assert recipe.optimizer.learning_rate == demo.optimizer.learning_rate
    assert recipe.optimizer.weight_decay_end == demo.optimizer.weight_decay_end
    assert "from massl's own runs with this network" in plan.reasons["optimizer.learning_rate"]
    vit = chosen(8_000, 28, device_of("cpu", 16), backbone__name="vit_tiny_patch16_224")
    assert "(auto: resnet10t)" in vit.reasons["backbone.name"]
    assert (vit.values["backbone.patch_size"], vit.values["optimizer.learning_rate"]) == (4, 7e-4)
    assert "backbone.timm_options" not in vit.values
    assert (
        chosen(8_000, 28, device_of("cpu", 16), backbone__patch_size=7).values["backbone.name"]
        == vit.values["backbone.name"]
    )
    assert chosen(8_000, 28, device_of("cpu", 16), backbone__patch_size=None).values["backbone.name"] == "resnet10t"


def test_thumbnails_on_a_gpu_get_the_network_of_the_public_table() -> None:
    plan, measured = chosen(35_000, 32), load_recipe("massl-cifar-resnet18")
    recipe = planned_recipe(plan)
    assert (recipe.backbone, recipe.views.global_scale) == (measured.backbone, measured.views.global_scale)
    for key in ("learning_rate", "weight_decay", "weight_decay_end", "clip_norm"):
        assert getattr(recipe.optimizer, key) == getattr(measured.optimizer, key)
    measured_horizon = measured.trainer.batch_size / (1 - measured.method.model_dump()["teacher"]["momentum"])
    assert horizon(plan.values) == pytest.approx(measured_horizon)


def test_the_views_of_weights_to_start_from_have_as_many_of_their_patches() -> None:
    options = {"backbone.patch_size": 14, "backbone.image_size": 518, "backbone.stem": "", "backbone.timm_options": {}}
    start = rules.NetworkRow(name="vit_small_patch14_reg4_dinov2", kind="", options=options, origin="from --init A")
    for side, device, expected in ((1000, GPU, 196), (32, GPU, 112), (1000, device_of("cpu", 16), 112)):
        plan = choose(images_of(10_000, side), device, {}, start=start)
        assert plan.values["views.global_size"] == expected
        assert planned_recipe(plan).backbone.name == start.name
        assert plan.values["backbone.image_size"] == 518
        assert "backbone.name vit_small_patch14_reg4_dinov2: from --init A" in plan.lines()
        assert "views.blur_sigma" not in start.options
        assert plan.values["optimizer.learning_rate"] == pytest.approx(7e-4)
    many = choose(images_of(2_000_000, 500), GPU, {}, start=start).values
    assert (many["views.global_size"], many["views.num_local"], many["views.local_size"]) == (196, 10, 84)


@pytest.mark.parametrize(("device", "expected"), [(GPU, 112), (device_of("cpu", 16), 56)], ids=["gpu", "cpu"])
def test_small_images_are_enlarged_for_a_network_whose_last_map_would_be_a_single_cell(
    device: DeviceFacts, expected: int
) -> None:
    for stem, size in (("", expected), ("small", 32)):
        options = {"backbone.patch_size": None, "backbone.stem": stem}
        plan = chosen(10_000, 32, device, backbone__name="resnet50", **options)
        assert plan.values["views.global_size"] == size
        assert ("this network needs larger ones" in plan.reasons["views.global_size"]) == (size > 32)
    assert chosen(10_000, 500, device, backbone__name="resnet50").values["views.global_size"] >= expected


def test_a_short_run_on_many_images_is_chosen_like_a_run_on_fewer() -> None:
    whole, short = chosen(300_000, 500), chosen(300_000, 500, trainer__epochs=5)
    assert (whole.values["backbone.name"], whole.values["views.num_local"]) == ("vit_small_patch16_224", 10)
    assert (short.values["backbone.name"], short.values["views.num_local"]) == ("resnet18", 0)
    assert short.num_images == 15_000
    assert "300,000 images in so short a run" in short.reasons["backbone.name"]
    assert short.reasons["trainer.epochs"] == "as you asked (auto: 100)"
    for key in ("views.num_local", "method.instance_weight", "method.head.batch_norm", "trainer.batch_size"):
        assert short.values[key] == chosen(15_000, 500).values[key]
        assert chosen(300_000, 500, trainer__epochs=200).values[key] == whole.values[key]


def test_a_resnet_that_is_named_gets_the_settings_of_resnet18() -> None:
    for side, row, size in ((500, "resnet18", 112), (32, "resnet18 of thumbnails", 32)):
        plan = chosen(10_000, side, backbone__name="resnet50")
        assert planned_recipe(plan).backbone.name == "resnet50"
        assert plan.values["views.global_size"] == size
        assert plan.values["optimizer.learning_rate"] == rules.NETWORKS[row].options["optimizer.learning_rate"]
        assert "from massl's own runs with ResNet-18" in plan.reasons["optimizer.learning_rate"]
    assert chosen(10_000, 500, backbone__name="convnext_tiny").values["optimizer.learning_rate"] == pytest.approx(7e-4)


@pytest.mark.parametrize("patch", [7, 14, 16])
def test_views_are_whole_patches_of_a_given_size(patch: int) -> None:
    for number in (5_000, 2_000_000):
        values = chosen(number, 500, backbone__patch_size=patch).values
        assert values["views.global_size"] % patch == values["views.local_size"] % patch == 0


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_dinov3", "vit_small_patch14_reg4_dinov2", "deit_tiny_patch16_224", "convnext_atto"]
)
def test_networks_of_any_kind_are_counted_at_any_size(name: str) -> None:
    values = {"backbone.name": name, "views.num_global": 2, "views.num_local": 4, "views.global_size": 64}
    values |= {"views.local_size": 32, "trainer.precision": "fp32", "trainer.batch_size": 8}
    counted = computed_gib(values, device_kind="cpu")
    assert counted is not None
    assert 1 < counted < 4


def test_a_cpu_trains_many_images_as_a_small_run() -> None:
    many, few = (chosen(number, 1000, device_of("cpu", 16)).values for number in (1_000_000, 35_000))
    for key in ("views.num_local", "method.teacher.momentum", "method.head.batch_norm", "method.memory.num_rows"):
        assert many[key] == few[key]


@pytest.mark.parametrize(("stem", "network"), [("", "resnet18"), ("small", "resnet18 of thumbnails")])
def test_weights_to_start_from_get_the_settings_measured_with_their_network(
    stem: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "network_of", lambda init: BackboneSettings(name="resnet18", stem=stem))
    _, plan = auto.plan_images(open_source("demo:train"), {}, device=GPU, init="A")
    assert planned_recipe(plan).backbone.stem == stem
    assert plan.values["views.global_size"] == (28 if stem else 112)
    assert plan.values["optimizer.learning_rate"] == rules.NETWORKS[network].options["optimizer.learning_rate"]


def test_minutes_that_are_few_for_the_images_are_planned_as_a_short_run_and_stay_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[str] = []
    epochs = iter([5, 90])  # the smaller network is faster: as a number of epochs that alone would be a long run

    def trial(recipe: Any, *_: Any) -> tuple[Speed, int, str]:
        timed.append(recipe.backbone.name)
        return Speed(first_pass=1.0, later=1.0), next(epochs), "they fill 30 minutes"

    monkeypatch.setattr(auto, "training_images", lambda recipe, may_download: range(300_000))
    monkeypatch.setattr(auto, "look_at_images", lambda source: images_of(300_000, 500))
    monkeypatch.setattr(auto, "look_at_device", lambda device: GPU)
    monkeypatch.setattr(auto, "_trial", trial)
    found = auto.resolve(None, data="photos", overrides={}, minutes=30, quiet=True)
    assert timed == ["vit_small_patch16_224", "resnet18"]
    assert (found.recipe.backbone.name, found.recipe.trainer.epochs) == ("resnet18", 90)
    assert found.plan is not None
    assert found.plan.reasons["trainer.epochs"] == "they fill 30 minutes"
