"""Two processes, each with half of the images, measure what one process measures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from massl.evaluations.results import read_rows
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import backbone_bytes

NUM_TRAIN, NUM_TEST, NUM_CLASSES = 41, 27, 3  # odd: the last process repeats an image, which must not count


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a transformer of four blocks for images of 16 px."""
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 4, "num_heads": 2}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=16, patch_size=8, timm_options=options)
    backbone = build_backbone(settings, seed=0)
    path = tmp_path_factory.mktemp("model") / "backbone.safetensors"
    path.write_bytes(
        backbone_bytes(
            backbone.model, timm_arguments=backbone.timm_arguments, mean=(0.5,) * 3, std=(0.25,) * 3, image_size=16
        )
    )
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Stripes of three kinds, in noise."""
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name, number in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        labels = np.arange(number) % NUM_CLASSES
        waves = np.sin(np.arange(20)[None, None, :, None] * (0.4 + 0.3 * labels[:, None, None, None]))
        pixels = 128 + 40 * waves + generator.normal(0, 50, (number, 20, 20, 3))
        np.savez(folder / f"{name}.npz", images=pixels.clip(0, 255).astype(np.uint8), labels=labels)
    return folder / "train.npz", folder / "test.npz"


@pytest.fixture
def options(model: Path, images: tuple[Path, Path]) -> Any:
    """Arguments of an evaluation, with batches that divide neither the images nor a process's share of them."""

    def make(output: Path, *more: str | Path, test: Path = images[1]) -> list[str | Path]:
        probe = [
            "--linear.epochs",
            "3",
            "--linear.base_rates",
            "0.01",
            "0.1",
            "1",
            "--linear.batch_size",
            "16",
            "--linear.held_out",
            "0.2",
        ]
        given = [
            "--protocol",
            "knn",
            "linear",
            "--train",
            images[0],
            "--test",
            test,
            "--output",
            output,
            "--device",
            "cpu",
        ]
        return [
            "evaluate",
            model,
            *given,
            "--knn.ks",
            "3",
            "10",
            "--batch_size",
            "8",
            "--num_workers",
            "1",
            *probe,
            *more,
        ]

    return make


def _rows(output: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "created")} for row in rows]


def _assert_same_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for row, expected_row in zip(found, expected, strict=True):
        assert {**row, "value": None} == {**expected_row, "value": None}
        assert row["value"] == pytest.approx(expected_row["value"], abs=1e-9)  # shares of whole images


def test_two_processes_measure_what_one_does(start_ranks: Any, massl_here: Any, options: Any, tmp_path: Path) -> None:
    processes = start_ranks(2, *options(tmp_path / "two"))
    alone = massl_here(*options(tmp_path / "one"))  # meanwhile
    assert alone.status == 0, alone.text
    answers = [process.wait() for process in processes]
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    rows = _rows(tmp_path / "two")
    assert {(row["protocol"], row["num_samples"]) for row in rows} == {("knn", NUM_TEST), ("linear", NUM_TEST)}
    assert len({row["value"] for row in rows}) > 2
    _assert_same_rows(rows, _rows(tmp_path / "one"))  # and each of them once
    assert answers[0].text.count("knn on ") == 1
    assert not answers[1].text  # only the first process talks
    left = [
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        for folder in (tmp_path / "one", tmp_path / "two")
    ]
    assert left[0] == left[1]


def test_one_process_and_two_find_each_other_s_results(
    start_ranks: Any, massl_here: Any, options: Any, tmp_path: Path
) -> None:
    assert massl_here(*options(tmp_path / "out", "--linear.crops", "centre")).status == 0
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    answers = [process.wait() for process in start_ranks(2, *options(tmp_path / "out", "--linear.crops", "centre"))]
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert answers[0].text.count("measured before") == 2
    assert not answers[1].text
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_failure_ends_all_processes_and_keeps_what_was_measured(
    start_ranks: Any, options: Any, images: Any, tmp_path: Path
) -> None:
    more = ["--feature", "cls", "--linear.crops", "centre"]
    processes = start_ranks(
        2, *options(tmp_path / "two", *more, "--protocol", "knn", "retrieval", "logreg", "--folder", tmp_path)
    )
    answers = [process.wait() for process in processes]
    # What fails in one process may be under way in the other: going on would mix the features of two protocols.
    assert [answer.status for answer in answers] == [1, 1]
    assert "massl: error: retrieval on " in answers[0].text
    assert "Traceback" not in answers[0].text + answers[1].text
    assert {row["protocol"] for row in _rows(tmp_path / "two")} == {"knn"}


def test_protocol_that_no_process_can_do_leaves_the_others(start_ranks: Any, images: Any, tmp_path: Path) -> None:
    given = [
        "--protocol",
        "attention",
        "knn",
        "--train",
        images[0],
        "--test",
        images[1],
        "--output",
        tmp_path / "two",
        "--device",
        "cpu",
    ]
    answers = [
        process.wait()
        for process in start_ranks(2, "evaluate", "resnet18", "--feature", "pooled", "--image_size", "32", *given)
    ]
    assert [answer.status for answer in answers] == [1, 1]
    assert answers[0].text.count("failed: attention on ") == 1
    assert {row["protocol"] for row in _rows(tmp_path / "two")} == {"knn"}


def test_image_that_only_one_process_cannot_read_is_left_out_by_both(
    start_ranks: Any, massl_here: Any, options: Any, images: Any, tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    for number, picture in enumerate(np.load(images[1])["images"]):
        folder = photos / str(number % NUM_CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number:02d}.png")
    last = photos / str(NUM_CLASSES - 1) / f"{NUM_TEST - 1}.png"  # in the share of the second process
    last.write_bytes(last.read_bytes()[:100])
    answers = [process.wait() for process in start_ranks(2, *options(tmp_path / "two", test=photos))]
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert last.name in answers[0].text
    assert massl_here(*options(tmp_path / "one", test=photos)).status == 0
    two, one = (read_rows(tmp_path / name / "results.jsonl") for name in ("two", "one"))
    assert [(row.setting, row.metric, row.num_samples) for row in two] == [
        (row.setting, row.metric, row.num_samples) for row in one
    ]
    assert {row.num_samples for row in two} == {NUM_TEST - 1}


def test_two_processes_write_one_file_of_features(
    start_ranks: Any, massl_here: Any, model: Path, images: Any, tmp_path: Path
) -> None:
    given = ["embed", model, "--data", images[0], "--batch_size", "8", "--device", "cpu", "--output"]
    answers = [process.wait() for process in start_ranks(2, *given, tmp_path / "two.npz")]
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert massl_here(*given, tmp_path / "one.npz").status == 0
    with np.load(tmp_path / "two.npz") as two, np.load(tmp_path / "one.npz") as one:
        assert two["features"].shape == (NUM_TRAIN, 16)
        np.testing.assert_allclose(two["features"], one["features"], atol=1e-5)
        assert two["keys"].tolist() == one["keys"].tolist()
        assert two["labels"].tolist() == one["labels"].tolist()
