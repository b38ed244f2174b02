"""`massl evaluate`: numbers that are right, kept, found again, told apart; and errors that say what to do."""

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import massl
from massl.commands.evaluate.jobs import digest_of_images
from massl.config import MasslError, RecipeError
from massl.data.sources import open_source
from massl.evaluations.base import EvaluationData
from massl.evaluations.results import read_rows
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import backbone_bytes

NUM_TRAIN, NUM_TEST, NUM_CLASSES = 40, 25, 4
SIDE = 16  # of the images, which is what the model sees


def _stripes(num_images: int, *, seed: int) -> np.ndarray:  # [N, 16, 16, 3]
    """Four kinds of stripes in so much noise that no classifier is always right."""
    generator = np.random.default_rng(seed)
    kinds = np.arange(num_images) % NUM_CLASSES
    waves = np.sin(np.arange(SIDE)[None, None, :, None] * (0.6 + 0.25 * kinds[:, None, None, None]))
    return (128 + 30 * waves + generator.normal(0, 50, (num_images, SIDE, SIDE, 3))).clip(0, 255).astype(np.uint8)


def _save(path: Path, num_images: int, *, seed: int, labels: Any = None) -> Path:
    chosen = np.arange(num_images) % NUM_CLASSES if labels is None else labels
    np.savez(path, images=_stripes(num_images, seed=seed), labels=chosen)
    return path


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("images") / "train.npz", NUM_TRAIN, seed=1)


@pytest.fixture(scope="module")
def test(train: Path) -> Path:
    return _save(train.with_name("test.npz"), NUM_TEST, seed=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, recipe: Path, train: Path) -> Path:
    """A run of two steps: a transformer of two blocks for images of 16 px."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    massl.pretrain(
        recipe=recipe, data=train, output=folder, overrides={"trainer.max_steps": 2, "probes.every_epochs": 0}
    )
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def evaluate(massl_here: Any, run: Path, train: Path, test: Path, output: Path) -> Callable[..., Any]:
    """evaluate("knn", "--option", "value"): of the run, on the two archives; `model` and `images` replace them."""

    def command(
        protocols: str,
        *options: str | Path,
        model: str | Path = run,
        images: tuple[str | Path, str | Path] = (train, test),
    ) -> Any:
        given = ["--protocol", *protocols.split(), "--train", images[0], "--test", images[1], "--output", output]
        return massl_here("evaluate", model, *given, *options)

    return command


def _rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def _settings(output: Path) -> list[str]:
    return [row["setting"] for row in _rows(output) if row["metric"] == "top1"]


def _assert_measured(answer: Any) -> None:
    assert answer.status == 0, answer.text
    assert "measured before" not in answer.text


def _assert_refused(answer: Any, *expected: str, status: int = 1) -> None:
    assert "Traceback" not in answer.text
    assert answer.status == status, answer.text
    for text in expected:
        assert text in answer.text
    errors = [line for line in answer.error.splitlines() if line.startswith("massl: error: ")]
    assert len(errors) == 1  # all of it on one line, the last
    assert answer.error.splitlines()[-1] == errors[0]


# Results


def test_protocols_leave_rows_a_table_and_features_that_they_share(
    evaluate: Any, run: Path, test: Path, output: Path
) -> None:
    answer = evaluate("knn logreg clustering", "--name", "Stripes")
    _assert_measured(answer)
    rows = _rows(output)
    assert [row["protocol"] for row in rows] == ["knn"] * 4 + ["logreg"] + ["clustering"] * 3
    fingerprints = {row["weights"] for row in rows}
    assert len(fingerprints) == 1
    for row in rows:
        assert row["data"] == "Stripes"
        assert row["num_samples"] == NUM_TEST
        assert row["seconds"] > 0
        assert row["model"] == str(run)
        assert row["architecture"] == "vit_tiny_patch16_224"
        assert row["precision"] == "fp32"
    assert {row["metric"] for row in rows if row["protocol"] != "clustering"} == {"top1"}  # no top5 of four classes
    assert {row["metric"] for row in rows if row["protocol"] == "clustering"} == {"NMI", "AMI", "ARI"}
    table = (output / "results.md").read_text()
    for row in rows:
        assert f"| {row['setting']} | {row['metric']} | {row['value']:.2f} | {NUM_TEST} |" in table
        assert (
            f"{row['protocol']} Stripes {row['setting']} {row['metric']} {row['value']:.2f} {NUM_TEST}" in answer.text
        )
    assert f"weights {fingerprints.pop()}, fp32" in answer.text
    # knn and logreg look at the same features of two sources; clustering resizes with another filter.
    assert len(list((output / "features").rglob("*.safetensors"))) == 4


def test_knn_accuracy_is_that_of_features_computed_by_hand(
    evaluate: Any, run: Path, train: Path, test: Path, output: Path
) -> None:
    _assert_measured(evaluate("knn", "--crop_ratio", "1", "--knn.ks", "3"))
    model, _ = massl.load_backbone(run)
    mean, std = (torch.tensor(model.default_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))  # type: ignore[index, operator]
    features, labels = [], []
    for archive in (train, test):
        arrays = np.load(archive)
        images = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2).double() / 255
        with torch.inference_mode():
            rows = model(((images - mean) / std).float()).double().numpy()
        features.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        labels.append(arrays["labels"])
    num_right = 0
    for row, label in zip(features[1], labels[1], strict=True):
        similarities = features[0] @ row
        votes = np.zeros(NUM_CLASSES)
        for neighbour in np.argsort(-similarities)[:3]:
            votes[labels[0][neighbour]] += np.exp(similarities[neighbour] / 0.07)
        num_right += int(votes.argmax() == label)
    assert 5 < num_right < NUM_TEST  # neither chance nor all
    found = [row["value"] for row in _rows(output) if row["metric"] == "top1"]
    assert found == pytest.approx([100 * num_right / NUM_TEST])


def test_same_command_again_measures_nothing_until_it_is_asked_to(evaluate: Any, output: Path) -> None:
    _assert_measured(evaluate("knn logreg"))
    before = (output / "results.jsonl").read_bytes()
    answer = evaluate("knn logreg")
    assert answer.status == 0
    assert answer.text.count("measured before") == 2
    assert "k=10" in answer.output  # the table is shown all the same
    assert (output / "results.jsonl").read_bytes() == before

    content = [json.loads(line) for line in before.splitlines()]
    for row in content:
        row["value"] = 1.25  # what an older measurement may have said
    (output / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    answer = evaluate("knn logreg", "--again", "True")
    _assert_measured(answer)
    assert len(_rows(output)) == 2 * len(content)
    for table in (answer.output, (output / "results.md").read_text()):
        assert "1.25" not in table
        assert sum("k=10 " in line and "top1" in line for line in table.splitlines()) == 1


def test_changed_settings_are_measured_anew_beside_the_others(evaluate: Any, output: Path) -> None:
    _assert_measured(evaluate("knn", "--knn.ks", "10"))
    answer = evaluate("knn", "--knn.ks", "5")
    _assert_measured(answer)
    assert _settings(output) == ["k=10", "k=5"]
    assert "k=5" in answer.output
    assert "k=10" not in answer.output  # the screen shows what was asked for, the file everything
    assert "k=10" in (output / "results.md").read_text()
    _assert_measured(evaluate("knn", "--knn.ks", "5", "--knn.temperature", "0.5"))
    assert _settings(output) == ["k=10", "k=5", "k=5, temperature 0.5"]
    assert (output / "results.md").read_text().count("| k=5 | top1 |") == 1
    again = evaluate("knn", "--knn.ks", "5")
    assert "measured before" in again.error
    assert "temperature" not in again.output


def test_other_training_images_under_the_same_name_stand_beside_the_first(
    evaluate: Any, train: Path, output: Path, tmp_path: Path
) -> None:
    few, test = _save(tmp_path / "few.npz", NUM_CLASSES, seed=8), _save(tmp_path / "test.npz", NUM_TEST, seed=9)
    for images in (train, few):
        _assert_measured(evaluate("knn", "--knn.ks", "1", images=(images, test)))
    table = (output / "results.md").read_text()
    assert table.count("| k=1 | top1 |") == 2
    assert f"(train: {few}" in table
    answer = evaluate("knn", "--knn.ks", "1", images=(train, test))
    assert "measured before" in answer.error
    first, _ = (row["value"] for row in _rows(output) if row["metric"] == "top1")
    assert f"{first:.2f}" in answer.output


def test_training_images_as_test_images_are_called_what_they_are(evaluate: Any, train: Path, output: Path) -> None:
    answer = evaluate("knn", "--knn.ks", "1", images=(train, train))
    assert "the training images are the test images" in answer.text
    assert _settings(output) == ["k=1, test images seen in pre-training, tested on the training images"]


@pytest.mark.parametrize(
    ("trained_on", "hold_out", "tested_on", "is_seen"),
    [
        ("photos/train", 0.0, "photos/train", True),
        ("folder:photos/train?labels=none", 0.0, "photos/train", True),
        ("photos/train", 0.2, "photos/train", True),  # most of them
        ("photos", 0.0, "photos/test", True),  # a folder that holds them
        ("photos/train", 0.0, "photos/test", False),
    ],
)
def test_test_images_that_the_run_was_trained_on_are_told_and_remarked(
    massl_here: Any,
    recipe: Path,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained_on: str,
    hold_out: float,
    tested_on: str,
    is_seen: bool,
) -> None:
    """Those that only the classifier learns from, --train, are usually the run's; this is not told."""
    monkeypatch.chdir(tmp_path)
    for part, seed in (("train", 1), ("test", 2)):
        for number, image in enumerate(_stripes(NUM_TRAIN, seed=seed)):
            folder = tmp_path / "photos" / part / f"class{number % NUM_CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
    short = {"trainer.max_steps": 1, "probes.every_epochs": 0, "data.hold_out": hold_out}
    massl.pretrain(recipe=recipe, data=trained_on, output="run", overrides=short)
    given = ("--protocol", "knn", "--knn.ks", "1", "--train", "photos/train", "--test", tested_on, "--output", output)
    for _ in range(2):  # also where it was measured before
        answer = massl_here("evaluate", "run", *given)
        assert answer.status == 0, answer.text
        assert answer.error.count("caution: the run was trained on test images") == is_seen
    assert ["seen in pre-training" in setting for setting in _settings(output)] == [is_seen]


def test_a_crop_ratio_is_not_named_where_it_plays_no_part(evaluate: Any, output: Path) -> None:
    evaluate("correspondence", "--crop_ratio", "1", "--correspondence.num_figures", "0")
    assert not any("crop ratio" in row["setting"] for row in _rows(output))
    evaluate("knn", "--crop_ratio", "1", "--knn.ks", "1")
    assert any("crop ratio 1" in row["setting"] for row in _rows(output))


def test_changed_images_are_measured_anew(evaluate: Any, train: Path, output: Path, tmp_path: Path) -> None:
    images = _save(tmp_path / "mine.npz", NUM_TEST, seed=3)
    _assert_measured(evaluate("knn", images=(train, images)))
    _save(images, NUM_TEST, seed=3, labels=np.arange(NUM_TEST)[::-1] % NUM_CLASSES)
    _assert_measured(evaluate("knn", images=(train, images)))
    rows = _rows(output)
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert {row["run"] for row in first} != {row["run"] for row in second}
    assert [row["value"] for row in first] != [row["value"] for row in second]


def _copied(root: Path, *, keeps_times: bool) -> None:
    """The same files in other inodes: `cp -p`, or a checkout."""
    shutil.copytree(root, root.with_name("copy"), copy_function=shutil.copy2 if keeps_times else shutil.copyfile)
    shutil.rmtree(root)
    root.with_name("copy").rename(root)


TOUCHED: dict[str, Callable[[Path], object]] = {
    "chmod": lambda root: [file.chmod(0o640) for file in root.rglob("*.png")],
    "cp -p": lambda root: _copied(root, keeps_times=True),
    "checkout": lambda root: _copied(root, keeps_times=False),
}


@pytest.mark.parametrize("how", TOUCHED)
def test_images_that_were_only_touched_or_copied_are_measured_again_into_the_same_line(
    evaluate: Any, make_folder: Any, output: Path, how: str
) -> None:
    """Measured again: only the time of change, which chmod sets too, tells of a file that was rewritten."""
    photos = make_folder("photos", 24, classes=4)
    _assert_measured(evaluate("knn", "--knn.ks", "1", images=(photos, photos)))
    time.sleep(0.02)  # the system's clock for files ticks every 4 ms
    TOUCHED[how](photos)
    _assert_measured(evaluate("knn", "--knn.ks", "1", images=(photos, photos)))
    assert len({row["run"] for row in _rows(output)}) == 2
    assert (output / "results.md").read_text().count("| k=1") == 1


def test_uncompressed_images_of_equal_names_and_sizes_are_told_apart(
    evaluate: Any, output: Path, tmp_path: Path
) -> None:
    for seed in (1, 2):
        for number, image in enumerate(_stripes(NUM_TEST, seed=seed)):
            folder = tmp_path / f"{seed}" / f"class{number % NUM_CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.bmp")
    for seed in (1, 2):
        images = tmp_path / "1", tmp_path / f"{seed}"
        _assert_measured(evaluate("knn", "--knn.ks", "1", "--name", "mine", images=images))
    assert "(train: " in (output / "results.md").read_text()


def test_results_of_older_versions_are_found_and_replaced(evaluate: Any, make_folder: Any, output: Path) -> None:
    """They name the images by a digest of times and inodes too."""
    photos = make_folder("photos", 24, classes=4)
    _assert_measured(evaluate("knn", "--knn.ks", "1", images=(photos, photos)))
    source = open_source(photos)
    old = digest_of_images(EvaluationData(name="", train=source, test=source, output=output))
    rows = [{**row, "images": old} for row in _rows(output)]
    (output / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = evaluate("knn", "--knn.ks", "1", images=(photos, photos))
    assert "measured before" in again.error
    _assert_measured(evaluate("knn", "--knn.ks", "1", "--again", "True", images=(photos, photos)))
    assert (output / "results.md").read_text().count("| k=1") == 1


def test_weights_are_told_apart_and_found_by_folder_or_file(
    evaluate: Any, run: Path, output: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(run / "backbone.safetensors", copy)
    _assert_measured(evaluate("knn", model=copy))
    answer = evaluate("knn", model=copy / "backbone.safetensors")
    assert "measured before" in answer.text  # the same weights
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=SIDE, patch_size=4, timm_options=options)
    backbone = build_backbone(settings, seed=0)
    content = backbone_bytes(
        backbone.model, timm_arguments=backbone.timm_arguments, mean=(0.5,) * 3, std=(0.25,) * 3, image_size=16
    )
    (copy / "backbone.safetensors").write_bytes(content)
    answer = evaluate("knn", model=copy / "backbone.safetensors")
    _assert_measured(answer)
    assert f"backbone {copy / 'backbone.safetensors'}" in answer.text
    weights = [row["weights"] for row in _rows(output)]
    assert len(set(weights)) == 2
    assert weights[0] not in answer.output  # the table shows the model that was asked for
    assert weights[-1] in answer.output


def test_timm_name_stands_for_random_weights_and_says_so(evaluate: Any, output: Path) -> None:
    answer = evaluate("knn", "--image_size", "32", model="vit_tiny_patch16_224")
    _assert_measured(answer)
    assert "random weights" in answer.text
    assert {row["model"] for row in _rows(output)} == {"vit_tiny_patch16_224"}
    assert {row["architecture"] for row in _rows(output)} == {"ViT-Ti/16"}


def test_python_call_gives_the_rows(run: Path, train: Path, test: Path, output: Path) -> None:
    result = massl.evaluate(
        run, protocol="knn", train=train, test=test, output=output, overrides={"knn.ks": [3], "device": "cpu"}
    )
    assert result.folder == output
    assert [(str(row.setting), row.metric, row.num_samples) for row in result.rows] == [
        ("k=3", "top1", NUM_TEST),
    ]
    assert [row.value for row in result.rows] == [row["value"] for row in _rows(output)]
    assert not result.failed
    assert not result.missing
    with pytest.raises(RecipeError, match=r"knn\.k\b.*'ks'"):
        massl.evaluate(run, protocol="knn", train=train, test=test, output=output, overrides={"knn.k": 3})
    with pytest.raises(MasslError, match=r"knn needs test\b"):
        massl.evaluate(run, protocol="knn", train=train, output=output)


def test_features_are_kept_where_asked_and_shared(
    evaluate: Any, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _assert_measured(evaluate("knn", "--cache", "none"))
    assert sorted(path.name for path in output.iterdir()) == ["results.jsonl", "results.md"]
    assert list(tmp_path.iterdir()) == [output]  # nor is there a folder of that name
    shared = tmp_path / "shared"
    _assert_measured(evaluate("knn", "--cache", shared, "--again", "True"))
    kept = {path: path.stat().st_mtime_ns for path in shared.rglob("*.safetensors")}
    assert len(kept) == 2
    contents = {path: path.read_bytes() for path in kept}
    for path, content in contents.items():  # a second evaluation reads these: it finds that they are damaged
        path.write_bytes(content[:-4])
    answer = evaluate("knn", "--cache", shared, "--output", tmp_path / "other")
    _assert_measured(answer)
    assert all(f"{path} is damaged" in answer.text for path in kept)
    assert {path: path.read_bytes() for path in kept} == contents
    values, others = ([row["value"] for row in _rows(folder)] for folder in (output, tmp_path / "other"))
    assert values[: len(others)] == others
    kept = {path: path.stat().st_mtime_ns for path in shared.rglob("*.safetensors")}
    _assert_measured(evaluate("logreg", "--cache", shared, "--output", tmp_path / "third"))
    assert {path: path.stat().st_mtime_ns for path in shared.rglob("*.safetensors")} == kept


def test_what_is_not_as_published_stands_beside_what_is(evaluate: Any, output: Path) -> None:
    choices = [
        ["--feature", "pooled"],
        ["--image_size", "24"],
        ["--crop_ratio", "1"],
        ["--crop_ratio", "0.5", "--image_size", "8"],
    ]
    for options in [[], *choices]:
        _assert_measured(evaluate("knn", "--knn.ks", "3", *options))
    names = ["k=3", "k=3, feature pooled", "k=3, 24 px", "k=3, crop ratio 1", "k=3, crop ratio 0.5, 8 px"]
    assert _settings(output) == names
    table = (output / "results.md").read_text()
    assert all(f"| {name} | top1 |" in table for name in names)


def test_linear_probe_leaves_its_head_in_the_folder_of_the_data(evaluate: Any, output: Path) -> None:
    options = ["--linear.epochs", "2", "--linear.base_rates", "0.1", "1", "--feature", "cls", "--name", "my stripes"]
    _assert_measured(evaluate("linear", *options))
    assert (output / "my_stripes" / "linear_head.safetensors").is_file()
    published = [setting for setting in _settings(output) if setting.startswith("best over rates and epochs")]
    assert published
    assert all(
        "2 epochs" in setting and "feature cls" in setting and "as published" not in setting for setting in published
    )


def test_demo_of_the_documentation_runs(massl_here: Any, output: Path, tmp_path: Path) -> None:
    options: dict[str, int | float | bool | str] = {"embed_dim": 8, "depth": 1, "num_heads": 1}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=16, patch_size=16, timm_options=options)
    backbone = build_backbone(settings, seed=0)
    content = backbone_bytes(
        backbone.model, timm_arguments=backbone.timm_arguments, mean=(0.5,) * 3, std=(0.25,) * 3, image_size=16
    )
    (tmp_path / "backbone.safetensors").write_bytes(content)
    answer = massl_here(
        "evaluate", tmp_path, "--protocol", "knn", "--train", "demo:train", "--test", "demo:test", "--output", output
    )
    _assert_measured(answer)
    assert {(row["data"], row["num_samples"]) for row in _rows(output)} == {("demo:test", 2000)}
    assert all(row["value"] > 20 for row in _rows(output))  # ten classes: more than chance even so


# Failures among several


def test_one_failing_protocol_leaves_the_results_of_the_others(evaluate: Any, output: Path) -> None:
    answer = evaluate("knn linear logreg")  # the probe wants four blocks, of which the model has two
    assert answer.status == 1
    assert "Traceback" not in answer.text
    assert [row["protocol"] for row in _rows(output)] == ["knn"] * 4 + ["logreg"]
    shown = answer.output.splitlines()
    failures = [number for number, line in enumerate(shown) if line.startswith("failed: linear on ")]
    assert len(failures) == 1
    assert "blocks" in shown[failures[0]]
    assert failures[0] > max(number for number, line in enumerate(shown) if "logreg" in line and "top1" in line)


def test_a_single_failing_protocol_is_an_error(evaluate: Any, output: Path) -> None:
    _assert_refused(evaluate("linear"), "blocks")
    assert not (output / "results.jsonl").exists()


# What is asked for


def test_unknown_protocol_is_refused_with_a_suggestion(evaluate: Any) -> None:
    _assert_refused(evaluate("logrge"), "'logrge'", "Did you mean 'logreg'", status=2)


def test_it_must_be_said_what_to_measure_on_what(massl_here: Any, run: Path, train: Path, output: Path) -> None:
    def refused(options: list[str | Path], *expected: str, status: int = 2) -> None:
        _assert_refused(massl_here("evaluate", run, "--output", output, *options), *expected, status=status)

    known = ["--data", "Pets", "--data_root", output]
    refused([], "protocol", "suite")
    refused(["--protocol", "knn", "--suite", "paper", "--data_root", output], "protocol", "suite")
    refused(["--suite", "paper"], "data_root")
    refused(["--protocol", "knn", "--data", "Pets"], "data_root")
    refused(["--protocol", "knn", *known, "--train", train], "data", "train")
    refused(["--protocol", "knn", *known, "--name", "Mine"], "data", "name")
    refused(["--suite", "paper", "--data_root", output, "--train", train], "suite", "train")
    refused(["--suite", "paper", *known], "suite", "data")
    refused(["--protocol", "knn"], "knn", "--train", status=1)
    refused(["--protocol", "knn", "--train", train], "knn", "--test", status=1)
    refused(["--protocol", "retrieval", "--train", train], "retrieval", "--folder", status=1)
    assert not output.exists()


def test_impossible_values_are_refused_with_the_name_of_the_option(evaluate: Any) -> None:
    _assert_refused(evaluate("knn", "--knn.temperature", "0"), "knn", "temperature", "0.0", status=2)
    _assert_refused(evaluate("knn", "--crop_ratio", "1.5"), "crop_ratio", status=2)
    _assert_refused(evaluate("knn", "--feature", "clss"), "'clss'", "Did you mean 'cls'")


def test_unknown_and_missing_data_sets_are_named(massl_here: Any, run: Path, output: Path, tmp_path: Path) -> None:
    given = ["evaluate", run, "--protocol", "knn", "--data_root", tmp_path, "--output", output, "--data"]
    _assert_refused(massl_here(*given, "CIFAR-11"), "'CIFAR-11'", "Did you mean 'CIFAR-10'", "ImageNet")
    _assert_refused(massl_here(*given, "pets"), "Pets", f"{tmp_path}/oxford-iiit-pet", "download=True")


def test_suite_without_data_says_what_is_missing(massl_here: Any, run: Path, output: Path, tmp_path: Path) -> None:
    answer = massl_here("evaluate", run, "--suite", "paper", "--data_root", tmp_path, "--output", output)
    assert answer.status == 1, answer.text
    assert "measured 0, missing 26, failed 0" in answer.output
    assert "knn on Pets" in answer.output
    assert "retrieval on ROxford5k" in answer.output


# Models


def test_what_is_no_model_is_refused_with_the_three_things_that_are(evaluate: Any, tmp_path: Path) -> None:
    expected = ["run", "weights file", "timm.list_models()"]
    _assert_refused(evaluate("knn", model=tmp_path / "nowhere"), *expected)
    _assert_refused(evaluate("knn", model="vit_smal_patch16_224"), "Did you mean 'vit_small_patch16_224'", *expected)
    _assert_refused(evaluate("knn", model=tmp_path), f"{tmp_path}/backbone.safetensors")


def test_network_without_class_token_is_judged_by_its_pooled_features(evaluate: Any, output: Path) -> None:
    size = ["--image_size", "32"]
    _assert_measured(evaluate("knn", *size, model="resnet18"))
    assert _settings(output)[0] == "k=10, feature pooled, 32 px"
    assert "measured before" in evaluate("knn", *size, "--feature", "pooled", model="resnet18").text
    _assert_refused(evaluate("knn", *size, "--feature", "cls", model="resnet18"), "class token", "--feature pooled")


def test_size_that_is_no_multiple_of_the_patch_is_refused(evaluate: Any) -> None:
    _assert_refused(evaluate("knn", "--image_size", "18"), "image_size 18", "16 or 20")


class _Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickles_that_would_run_code_are_refused(
    evaluate: Any, massl_here: Any, run: Path, output: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.pth"
    torch.save({"state_dict": _Malicious(tmp_path / "run by weights")}, weights)
    _assert_refused(evaluate("knn", model=weights), str(weights))
    folder = tmp_path / "roxford5k"
    (folder / "jpg").mkdir(parents=True)
    (folder / "gnd_roxford5k.pkl").write_bytes(pickle.dumps(_Malicious(tmp_path / "run by truth")))
    answer = massl_here("evaluate", run, "--protocol", "retrieval", "--folder", folder, "--output", output)
    _assert_refused(answer, "gnd_roxford5k.pkl")
    assert not list(tmp_path.glob("run by*"))


# Images


def test_classes_that_do_not_agree_are_refused(evaluate: Any, train: Path, test: Path, tmp_path: Path) -> None:
    fewer = _save(tmp_path / "fewer.npz", NUM_TEST, seed=2, labels=np.arange(NUM_TEST) % 3)
    _assert_refused(evaluate("knn", images=(train, fewer)), f"{train} has 4 classes", f"{fewer} has 3")
    gap = _save(tmp_path / "gap.npz", NUM_TRAIN, seed=1, labels=np.arange(NUM_TRAIN) % 2 * 3)
    for protocol in ("knn", "logreg", "linear"):
        answer = evaluate(protocol, "--feature", "cls", images=(gap, test))
        _assert_refused(answer, str(gap), "(1, 2)")


def test_images_without_labels_are_refused_where_labels_are_needed(evaluate: Any, make_folder: Any, test: Path) -> None:
    photos = make_folder("photos", 6)
    for protocol in ("knn", "logreg"):
        _assert_refused(evaluate(protocol, images=(photos, test)), "photos has no labels")
    _assert_refused(evaluate("clustering", images=(test, photos)), "photos has no labels")
    _assert_refused(evaluate("knn", images=(test.with_name("nowhere"), test)), "nowhere")


def test_few_images_that_cannot_be_read_are_named_and_left_out_and_many_are_refused(
    evaluate: Any, make_folder: Any, output: Path
) -> None:
    photos = make_folder("photos", 24, classes=2)

    def break_image(number: int) -> None:
        path = photos / "class1" / f"{number:03d}.png"
        path.write_bytes(path.read_bytes()[:200])

    break_image(3)
    answer = evaluate("knn", images=(photos, photos))
    _assert_measured(answer)
    assert "skipped an unreadable image: class1/003.png: " in answer.error
    rows = read_rows(output / "results.jsonl")
    assert all("1 unreadable image left out" in row.setting.remarks and row.num_samples == 23 for row in rows)
    break_image(5)  # 8 %
    _assert_refused(evaluate("knn", images=(photos, photos)), "class1/003.png", "5%")


def _landmarks(folder: Path) -> Path:
    """Six images; each of two queries should find one of them."""
    (folder / "jpg").mkdir(parents=True)
    names = [f"image{number}" for number in range(6)]
    for name, image in zip([*names, "query0", "query1"], _stripes(8, seed=4), strict=True):
        Image.fromarray(image).resize((40, 40)).save(folder / "jpg" / f"{name}.jpg")
    answers = [{"bbx": [0, 0, 20, 20], "easy": [number], "hard": [number + 2], "junk": []} for number in range(2)]
    truth = {"imlist": names, "qimlist": ["query0", "query1"], "gnd": answers}
    (folder / "gnd_roxford5k.pkl").write_bytes(pickle.dumps(truth, protocol=2))
    return folder


def test_landmarks_are_found_under_their_name_in_results(
    massl_here: Any, run: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        "evaluate",
        run,
        "--protocol",
        "retrieval",
        "--folder",
        _landmarks(tmp_path / "roxford5k"),
        "--output",
        output,
    ]
    answer = massl_here(*given)
    _assert_measured(answer)
    assert {(row["data"], row["num_samples"]) for row in _rows(output)} == {("ROxford5k", 2)}
    # the folder is called otherwise, and the table shows them all the same
    assert "ROxford5k medium mAP" in answer.text
    assert "ROxford5k medium mAP" in massl_here(*given).text
    monkeypatch.chdir(tmp_path / "roxford5k")
    overrides = {"folder": "."}  # the same place
    num_before = len(_rows(output))
    assert (
        len(massl.evaluate(run, protocol="retrieval", output=output, overrides=overrides).rows)
        == num_before
        == len(_rows(output))
    )


def test_missing_folder_and_damaged_ground_truth_are_refused(
    massl_here: Any, run: Path, output: Path, tmp_path: Path
) -> None:
    answer = massl_here(
        "evaluate", run, "--protocol", "retrieval", "--folder", tmp_path / "nowhere", "--output", output
    )
    _assert_refused(answer, "retrieval", f"{tmp_path}/nowhere", "--folder")
    truth = _landmarks(tmp_path / "roxford5k") / "gnd_roxford5k.pkl"
    truth.write_bytes(truth.read_bytes()[:-30])
    answer = massl_here("evaluate", run, "--protocol", "retrieval", "--folder", truth.parent, "--output", output)
    _assert_refused(answer, str(truth), "revisitop")


# Output


def test_output_where_nothing_can_be_written_is_refused_before_the_work(
    evaluate: Any, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    _assert_refused(evaluate("knn", "--output", tmp_path / "file" / "out"), f"{tmp_path}/file/out", "--output")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # permissions do not stop an administrator
    _assert_refused(evaluate("knn"), str(output), "permissions")
    assert not list(output.iterdir())


def test_damaged_line_of_the_results_is_named_and_half_a_last_line_is_not(evaluate: Any, output: Path) -> None:
    _assert_measured(evaluate("knn"))
    path = output / "results.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-30])  # a crash in the middle of a line
    _assert_measured(evaluate("logreg"))
    assert len(_rows(output)) == 3 + 1
    path.write_text("half a li\n" + whole)
    answer = evaluate("knn")
    assert answer.status == 0, answer.text
    assert "line 1 of results.jsonl is no result" in answer.text
    assert path.read_text() == "half a li\n" + whole


@pytest.mark.parametrize("name", ["results.jsonl", "results.rejected.jsonl"])
def test_results_that_are_a_link_are_refused_before_anything_is_measured(
    evaluate: Any, output: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "notes.txt").write_text("own")
    output.mkdir()
    (output / name).symlink_to(tmp_path / "notes.txt")
    answer = evaluate("knn")
    _assert_refused(answer, str(output / name), "is a link")
    assert "numbers in" not in answer.text
    assert (tmp_path / "notes.txt").read_text() == "own"


def test_full_disk_is_an_error_without_a_traceback(
    server: Any, run: Path, train: Path, test: Path, output: Path
) -> None:
    given = ["--protocol", "knn", "--train", train, "--test", test, "--output", output]
    answer = server.run("evaluate", run, *given, limit_file_size=[1000])
    assert answer.status == 1
    assert "Traceback" not in answer.text
    assert "massl: error: " in answer.text
    assert server.run("evaluate", run, *given).status == 0
    assert len(_rows(output)) == 4
