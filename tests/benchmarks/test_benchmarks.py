"""The benchmark programs run, at sizes that measure nothing, and print what they promise."""

import importlib
import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import massl
from massl.commands.pretrain import PretrainResult, pretrain
from massl.commands.recipe import load_recipe
from massl.data.sources import open_source
from massl.ops.memory_attention import memory_loss_reference
from massl.planning.costs import Speed
from tests.reliability.world import TINY_RECIPE

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = (
    "auto",
    "continued",
    "features",
    "files",
    "kmeans",
    "knn",
    "loading",
    "loss",
    "peers",
    "probe",
    "shapes",
    "step",
    "tune",
    "update",
    "views",
)
REQUIRED = {"case", "images_per_second", "peak_gib", "milliseconds"}
TINY_TRAINING = ["--model", "vit_tiny_patch16_224", "--views", "2x32+2x16", "--rows", "64", "--block", "16"]
TINY_TRAINING += ["--kernels", "plain", "--warmup", "1", "--timed", "2"]

TINY_FEATURES = ["--model", "vit_tiny_patch16_224", "--batch", "2", "--size", "32", "--warmup", "1", "--timed", "1"]


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, ModuleType]]:
    """Imported as they find each other when run: with their folder on the path. Their short names leave with it."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in PROGRAMS}
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (50 + number, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return folder


def printed_cases(capsys: pytest.CaptureFixture[str]) -> list[dict[str, float | str | None]]:
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for case in cases:
        assert case.keys() >= REQUIRED
        assert case["images_per_second"] > 0
        assert case["milliseconds"] > 0
    return cases


def test_step_prints_one_case_per_batch_size(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    programs["step"].main([*TINY_TRAINING, "--batch", "2", "4"])
    cases = printed_cases(capsys)
    assert [case["case"] for case in cases] == [
        "massl vit_tiny_patch16_224 N=2 plain",
        "massl vit_tiny_patch16_224 N=4 plain",
    ]
    assert all(case["percent_of_matrix_rate"] > case["percent_of_matrix_rate_needed"] > 0 for case in cases)


def test_loss_compares_both_formulations(programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--batch 2 --rows 64 --massl-rows 128 --block 16 --num-views 3 --dim 16 --warmup 1 --timed 2"
    programs["loss"].main(sizes.split())
    names = [case["case"] for case in printed_cases(capsys)]
    assert names == ["loss published N=2 K=64", "loss massl N=2 K=64", "loss massl N=2 K=128"]


def test_published_formulation_is_the_loss_that_massl_computes(programs: dict[str, ModuleType]) -> None:
    ours = programs["loss"].ours
    student, teacher = (
        ours.unit_rows(num_views, 5, 8, device=torch.device("cpu"), seed=num_views) for num_views in (3, 2)
    )
    memory = ours.unit_rows(24, 8, device=torch.device("cpu"), seed=0)
    # one block: its order plays no part
    published = programs["loss"].published_loss(student, teacher, memory.T, block_size=24)
    temperatures = {"student_temperature": ours.STUDENT_TEMPERATURE, "teacher_temperature": ours.TEACHER_TEMPERATURE}
    torch.testing.assert_close(published, memory_loss_reference(student, teacher, memory[None], **temperatures))


def test_files_are_written_and_read_both_ways(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    programs["files"].main(["--model", "vit_tiny_patch16_224", "--rows", "8", "--repetitions", "1"])
    cases = printed_cases(capsys)
    kinds = ("checkpoint", "backbone", "features")
    assert [case["case"] for case in cases] == [f"{verb} {kind}" for kind in kinds for verb in ("write", "read")]
    assert all(case["ratio"] > 0 for case in cases)


def test_knn_checks_what_it_measures(programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    programs["knn"].main(["--queries", "20", "--rows", "300", "--dim", "16", "--neighbours", "5", "--repetitions", "1"])
    (case,) = printed_cases(capsys)
    assert case["recall"] == 1.0


def test_knn_refuses_wrong_neighbours(programs: dict[str, ModuleType]) -> None:
    rows = programs["loss"].ours.unit_rows(50, 16, device=torch.device("cpu"), seed=0)
    truth = rows[:4] @ rows.T
    near, far = torch.topk(truth, 5), torch.topk(truth, 5, largest=False)
    programs["knn"].check(rows[:4], rows, near.values, near.indices)
    for similarities, neighbours in [
        (near.values, far.indices),
        (far.values, far.indices),
        (near.values + 0.01, near.indices),
    ]:
        with pytest.raises(SystemExit, match="wrong neighbours"):
            programs["knn"].check(rows[:4], rows, similarities, neighbours)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_loading_measures_four_parts_and_their_ratio(
    programs: dict[str, ModuleType], photos: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = photos
    if kind == "tar":
        images = tmp_path / "photos.tar"
        with tarfile.open(images, "w") as archive:
            archive.add(photos, "photos")
    programs["loading"].main(
        [*TINY_TRAINING, "--images", str(images), "--files", "6", "--batch", "3", "--workers", "1"]
    )
    cases = printed_cases(capsys)
    assert [str(case["case"])[0] for case in cases] == ["1", "2", "3", "4"]
    assert cases[3]["share_of_compute_only"] == pytest.approx(
        cases[3]["images_per_second"] / cases[2]["images_per_second"], rel=0.01
    )


def test_loading_says_when_there_are_no_images(
    programs: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        programs["loading"].main(["--images", str(tmp_path)])
    assert "holds no JPEG files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no peer given"),
        (["--massl", "nowhere"], "nowhere holds no main_massl.py"),
        (["--dino", "nowhere"], "nowhere holds no main_dino.py"),
        (["--massl", "nowhere", "--cases", "vit_huge:64"], "is not MODEL:BATCH"),
        (["--massl", "nowhere", "--views", "many"], "names no views"),
    ],
)
def test_peers_explains_wrong_arguments(
    programs: dict[str, ModuleType], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        programs["peers"].main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "gflop"),
    [("vit_small_patch16_224", 121.0), ("vit_base_patch16_224", 467.0)],
)
def test_arithmetic_of_a_step_is_that_of_the_papers_setting(
    programs: dict[str, ModuleType], model: str, gflop: float
) -> None:
    shapes = programs["shapes"]
    network, views = shapes.transformer_shape(model), shapes.parse_views("2x224+10x96")
    student_tokens = 2 * network.num_tokens(224) + 10 * network.num_tokens(96)
    assert (student_tokens, 2 * network.num_tokens(224)) == (764, 394)
    counted = shapes.step_flop_per_image(network, views) / 1e9
    assert counted == pytest.approx(gflop, rel=0.005)
    needed = shapes.step_flop_per_image(network, views, class_token_only_at_the_end=True) / 1e9
    assert 0.90 < needed / counted < 0.95  # one block in twelve, less its keys and values


def test_arithmetic_by_hand_for_the_smallest_network(programs: dict[str, ModuleType]) -> None:
    shapes = programs["shapes"]
    network = shapes.TransformerShape(dim=2, depth=1, hidden_dim=3, patch_size=1)
    # 2 tokens. Four projections 2*2*2*2 each = 64, MLP 2*(2*2*2*3) = 48, similarities and weighted values 2*2*2*2 each
    # = 32.
    assert shapes.forward_flop(network, 2) == 144.0
    # One query: 2 projections of 2 tokens = 32 and 2 of one = 16, MLP 24, attention 16.
    assert shapes.forward_flop(network, 2, class_token_only_at_the_end=True) == 88.0
    views = shapes.parse_views("2x1")
    assert shapes.step_flop_per_image(network, views) == (3 * 2 + 2) * 144.0


def test_features_are_checked_and_timed(programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    programs["features"].main(
        [*TINY_FEATURES, "--stored", "40", "50", "--float32-batch", "2", "--feature", "cls", "cls_mean"]
    )
    names = [case["case"].removeprefix("vit_tiny_patch16_224 ") for case in printed_cases(capsys)]
    assert names == ["cls bf16 N=2", "cls_mean bf16 N=2", "cls bf16 N=2 from stored pixels", "cls fp32 N=2"]


def test_features_that_are_off_end_the_program(
    programs: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs["features"], "LOWEST_COSINE", 1.1)
    with pytest.raises(SystemExit, match="are off"):
        programs["features"].main([*TINY_FEATURES, "--feature", "cls"])


def test_the_probe_compares_many_heads_with_one(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = (
        "--model vit_tiny_patch16_224 --batch 4 --size 32 --classes 3 --heads 1 5 --precision fp32 --warmup 1 --timed 1"
    )
    programs["probe"].main(sizes.split())
    cases = printed_cases(capsys)
    assert [case["times_first"] == 1.0 for case in cases] == [True, False, True, False]


def test_kmeans_gives_the_same_clusters_each_time(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    programs["kmeans"].main(
        ["--rows", "60", "--dim", "4", "--clusters", "3", "--iterations", "5", "--restarts", "2", "--repetitions", "2"]
    )
    (case,) = printed_cases(capsys)
    assert case["objective"] > 0


def test_views_are_timed_by_image_size_and_number_of_views(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--images 20x30 40x25 --views 2x16+1x8 1x12 --batch 2 --warmup 1 --timed 1"
    programs["views"].main(sizes.split())
    names = [case["case"] for case in printed_cases(capsys)]
    recipes = ("2x16+1x8", "1x12")
    assert names == [f"views {views} of {size} N=2" for size in ("20x30", "40x25") for views in recipes]


def test_views_refuses_what_is_no_image_size(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        programs["views"].main(["--images", "500"])
    assert "--images" in capsys.readouterr().err


def test_update_times_both_ways_of_updating_in_turns(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    programs["update"].main([*TINY_TRAINING, "--batch", "2", "--rounds", "2"])
    cases = printed_cases(capsys)
    assert [str(case["case"]).split()[2] for case in cases] == ["kernels", "torch"]
    assert all(len(str(case["rounds"]).split()) == 2 for case in cases)


def test_tune_scores_on_held_out_training_images_and_tests_one_setting_of_a_recipe(
    programs: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    for name, num_images in (("train", 60), ("test", 20)):
        labels = np.arange(num_images) % 2
        images = (rng.integers(0, 120, (num_images, 28, 28, 3)) + 120 * labels[:, None, None, None]).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", images=images, labels=labels)
    small = "trainer.batch_size: 16, method.memory.num_rows: 64, method.memory.block_size: 16, views.num_local: 0"
    settings, output = tmp_path / "settings.yaml", tmp_path / "tuning"
    settings.write_text(
        f"- {{name: fast, recipe: demo-vit, predicted: 90, set: {{{small}, method.teacher.momentum: 0.5}}}}\n"
        f"- {{name: held, recipe: demo-vit, set: {{{small}, method.teacher.entropy: 1.0}}}}\n"
        f"- {{name: wrong, recipe: demo-vit, set: {{{small}, method.teacher.entropy: 50}}}}\n"
    )
    data = ["--data", str(tmp_path / "train.npz"), "--output", str(output), "--epochs", "1"]
    programs["tune"].main(["try", "--settings", str(settings), *data])
    programs["tune"].main(["try", "--settings", str(settings), *data])  # trains nothing again
    rows = [json.loads(line) for line in (output / "tried.jsonl").read_text().splitlines()]
    assert [row["setting"] for row in rows] == ["fast", "held", "wrong"]
    assert all(row["held_out"] == 6 for row in rows)
    assert "method.teacher.entropy" in rows[2]["failed"]
    assert "predicted" in (output / "tried.md").read_text()

    test = [*data, "--test", str(tmp_path / "test.npz"), "--name"]
    programs["tune"].main(["final", *test, "held"])
    programs["tune"].main(["final", *test, "held", "--seeds", "0", "1"])  # trains seed 1 only
    rows = [json.loads(line) for line in (output / "final.jsonl").read_text().splitlines()]
    assert [(row["setting"], row["seed"], row["num_tried"]) for row in rows] == [("held", 0, 3), ("held", 1, 3)]
    assert all(0 <= row["top1"] <= 100 and row["images_per_second"] > 0 for row in rows)
    for name in ("fast", "demo-vit"):
        with pytest.raises(SystemExit, match="held"):
            programs["tune"].main(["final", *test, name])
    with pytest.raises(SystemExit, match="not tried and is no recipe"):
        programs["tune"].main(["final", *test, "slow"])

    settings.write_text(f"- {{name: fast, recipe: demo-vit, set: {{{small}}}}}\n")
    monkeypatch.setattr(programs["tune"], "steady_speed", lambda *_: Speed(first_pass=1 / 80, later=1 / 80))
    programs["tune"].main(["try", "--settings", str(settings), *data[:-2], "--minutes", str(2 / 60)])
    row = json.loads((output / "tried.jsonl").read_text().splitlines()[-1])
    assert (row["run"], row["epochs"]) == ("fast-m0.0333333-s0", 3)  # 48 of 54 images an epoch, 80 a second
    assert "3 in 0.0333333 min" in (output / "tried.md").read_text()

    def interrupted(**given: Any) -> PretrainResult:
        return replace(pretrain(**given), finished=False)

    monkeypatch.setattr(programs["tune"], "pretrain", interrupted)
    with pytest.raises(SystemExit, match="interrupted; the same command goes on"):
        programs["tune"].main(["try", "--settings", str(settings), *data, "--seeds", "0", "1"])
    assert json.loads((output / "tried.jsonl").read_text().splitlines()[-1]) == row
    monkeypatch.setattr(programs["tune"], "pretrain", pretrain)
    programs["tune"].main(["try", "--settings", str(settings), *data, "--seeds", "0", "1"])
    assert json.loads((output / "tried.jsonl").read_text().splitlines()[-1])["seed"] == 1
    rows = [json.loads(line) for line in (output / "tried.jsonl").read_text().splitlines()]
    name = rows[-1]["setting"]
    scores = [[*row["knn"].values()][-1] for row in rows if row["setting"] == name and "minutes" not in row]
    assert len(scores) == 2
    mean, error = sum(scores) / 2, abs(scores[0] - scores[1]) / 2
    assert f"| {name} | 2 | {mean:.1f} ± {error:.1f} |" in (output / "tried.md").read_text()

    settings.write_text("- {name: a, recipe: demo-vit, set: {probes.queries: demo:test}}\n")
    with pytest.raises(SystemExit, match=r"probes\.queries"):
        programs["tune"].main(["try", "--settings", str(settings), *data])


def test_auto_is_compared_with_recipes_that_read_the_same_images(
    programs: dict[str, ModuleType], tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (96, 28, 28, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(96) % 2)
    data = str(tmp_path / "images.npz")
    (_, own), *others = programs["auto"].contenders(open_source(data)).values()
    assert own == {}
    by_hand, moco, same = (load_recipe(recipe, changes) for recipe, changes in others)
    assert by_hand.method.model_dump()["memory"] == {"num_rows": 32, "block_size": 8, "random_blocks": True}  # 96 / 4
    assert (by_hand.data, by_hand.probes.every_epochs) == (same.data, 0)
    assert (moco.backbone.patch_size, same.backbone.name, same.backbone.patch_size) == (4, "resnet10t", None)

    small = [
        "--set",
        "views.global_size=32",
        "trainer.batch_size=32",
        "--minutes",
        "0.1",
        "--output",
        tmp_path / "out",
    ]
    given = ["--data", data, "--test", data, "--name", "noise", *small, "--only", "auto", "mocov3 with auto's network"]
    programs["auto"].main([*map(str, given)])
    programs["auto"].main([*map(str, given)])  # trains nothing again
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == ["auto", "mocov3 with auto's network"]
    assert all(row["network"] == "resnet10t at 32 px" and row["plan_seconds"] > 0 for row in rows)
    assert (tmp_path / "out" / "runs" / "noise-mocov3-with-autos-network-s0" / "recipe.yaml").is_file()
    assert "| noise | auto | 0 |" in (tmp_path / "out" / "table.md").read_text()


def test_continued_prints_one_row_a_run(
    programs: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (16, 20, 24, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(16) % 2)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY_RECIPE))
    settings = {"probes.every_epochs": 0, "trainer.max_steps": 2}
    massl.pretrain(tmp_path / "images.npz", recipe=tmp_path / "tiny.yaml", output=tmp_path / "old", overrides=settings)
    given = ["--init", tmp_path / "old", "--data", tmp_path / "images.npz", "--test", tmp_path / "images.npz"]
    given += ["--recipe", tmp_path / "tiny.yaml", "--epochs", 1, "--output", tmp_path / "runs"]
    names = ["continued", "without head first", "scratch", "scratch, 3x"]
    programs["continued"].main([*map(str, given), "--only", *names])
    table = capsys.readouterr().out.strip().split("\n")[-5:]
    assert [line[:28].strip() for line in table] == [*names, "frozen start"]
    assert len((tmp_path / "runs" / "results.jsonl").read_text().splitlines()) == 4
