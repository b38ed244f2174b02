"""Classes from folder names: they are said, and no accuracy is shown on names that are probably none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from massl.training.run_folder import RunFolder

ONE_EPOCH = ("--trainer.epochs", "1")


@pytest.fixture
def photos(make_folder: Callable[..., Path]) -> Callable[..., Path]:
    """photos("2019", "2020"): 48 images in folders of these names, which may be nested."""

    def make(*names: str) -> Path:
        root = make_folder("photos", 48, classes=len(names))
        for number, name in enumerate(names):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / f"class{number}").rename(root / name)
        return root

    return make


def test_classes_named_by_years_are_cautioned_and_not_scored(
    photos: Any, recipe: Path, tmp_path: Path, massl_here: Any, runs: Any
) -> None:
    folder = photos("2019", "2020", "2021", "2022")
    words = ("pretrain", "--recipe", recipe, *ONE_EPOCH, "--data.source")
    doubtful = massl_here(*words, folder, "--output", tmp_path / "doubtful")
    assert doubtful.status == 0
    assert doubtful.text.count("4 classes from folder names: 2019, 2020, 2021, 2022;") == 1
    assert doubtful.text.count("caution: ") == 1
    assert not any("knn_top1" in row for row in runs.rows(tmp_path / "doubtful"))
    assert any("effective_rank" in row for row in runs.rows(tmp_path / "doubtful"))
    assert "raw_pixel_knn" not in (tmp_path / "doubtful" / "baseline.json").read_text()
    assert "raw pixels" not in doubtful.text
    chosen = massl_here(*words, f"folder:{folder}?labels=folders", "--output", tmp_path / "chosen")
    assert chosen.status == 0
    assert "caution: " not in chosen.text
    assert any("knn_top1" in row for row in runs.rows(tmp_path / "chosen"))


def test_the_layout_of_the_readme_is_probed_on_its_classes_not_on_its_splits(
    photos: Any, recipe: Path, tmp_path: Path, massl_here: Any, runs: Any
) -> None:
    folder = photos("train/cat", "train/dog", "val/cat", "val/dog")
    run, results = tmp_path / "run", tmp_path / "results"
    trained = massl_here("pretrain", "--recipe", recipe, *ONE_EPOCH, "--data.source", folder, "--output", run)
    assert trained.status == 0
    assert "2 classes from folder names inside train, val: cat, dog;" in trained.text
    assert any("knn_top1" in row for row in runs.rows(run))
    train, test = ("--train", folder / "train"), ("--test", folder / "val")
    judged = massl_here("evaluate", run, "--protocol", "knn", "clustering", *train, *test, "--output", results)
    assert judged.status == 0
    # once for each set, not for each protocol
    assert judged.error.count("2 classes from folder names: cat, dog;") == 2


def test_a_run_that_was_probed_on_splits_before_goes_on_with_them(
    photos: Any, recipe: Path, tmp_path: Path, massl_here: Any, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = photos("train/cat", "train/dog", "val/cat", "val/dog")
    words = ("pretrain", "--recipe", recipe, "--data.source", folder, "--trainer.epochs", "3", "--output")
    with monkeypatch.context() as older:
        older.setattr(RunFolder, "lists_as_before", True)
        assert massl_here(*words, tmp_path / "whole").status == 0
        assert massl_here(*words, tmp_path / "halves", "--trainer.max_steps", "6").status == 0
    for name in ("data.json", "data_files.gz"):  # which older versions did not write
        (tmp_path / "halves" / name).unlink()
    for max_steps in ("12", "100"):
        answer = massl_here(*words, tmp_path / "halves", "--trainer.max_steps", max_steps)
        assert answer.status == 0, answer.text
        assert "classes from folder names" not in answer.text
    probed = [row["knn_top1"] for row in runs.rows(tmp_path / "whole") if "knn_top1" in row]
    assert len(probed) == 4
    assert [row["knn_top1"] for row in runs.rows(tmp_path / "halves") if "knn_top1" in row] == probed
    runs.assert_bitwise_equal(tmp_path / "halves", tmp_path / "whole")
