import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import massl
from massl.commands import memory_check, plan
from massl.commands import pretrain as command
from massl.commands.ablate import command as ablate
from massl.config import MasslError
from massl.data.sources.base import DataError
from massl.training.run_folder import RunFolderError
from massl.training.trainer import Trainer
from tests.reliability.world import TINY_RECIPE, tiny_images


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "images.npz"
    np.savez(path, images=tiny_images(48), labels=np.arange(48) % 4)
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(TINY_RECIPE))
    return path


class Built(Exception):
    """The long work has begun."""


def test_what_is_known_is_printed_before_the_networks_are_built(
    recipe: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise Built

    monkeypatch.setattr(command, "build_method", build)
    with pytest.raises(Built):
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run")
    said = capsys.readouterr().err
    words = [
        "a new run in",
        str(tmp_path / "run"),
        f"reading {archive}",
        "48 images",
        "batch 8",
        "building the networks",
    ]
    assert [word for word in words if word not in said] == []
    assert said.index("reading") < said.index("48 images") < said.index("building the networks")


def test_images_are_announced_before_they_are_listed(
    recipe: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def listing(*_: Any, **__: Any) -> None:
        raise Built

    monkeypatch.setattr(command, "open_images", listing)
    with pytest.raises(Built):
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run")
    assert f"reading {archive}" in capsys.readouterr().err


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("output", ["run", "new/folders/run"])
@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ({"trainer.batch_size": 256}, DataError),
        ({"views.local_size": 2}, MasslError),  # less than a patch
        ({"trainer.accumulation_steps": 3}, MasslError),  # batches of 8 cannot be split
        ({"probes.every_epochs": 1, "probes.queries": "no/such/folder"}, MasslError),
    ],
)
def test_a_refused_start_leaves_nothing(
    recipe: Path, archive: Path, tmp_path: Path, overrides: dict[str, Any], error: type[Exception], output: str
) -> None:
    before = left(tmp_path)
    with pytest.raises(error):
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / output, overrides=overrides)
    assert left(tmp_path) == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(error):
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "empty", overrides=overrides)
    assert left(tmp_path / "empty") == []


def test_a_start_from_a_folder_without_weights_leaves_nothing(recipe: Path, archive: Path, tmp_path: Path) -> None:
    with pytest.raises(MasslError, match="is no model"):
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", init=tmp_path / "none")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("every_epochs", [0, 1])
def test_images_that_cannot_be_read_leave_nothing_and_may_be_repaired(
    recipe: Path, tmp_path: Path, every_epochs: int
) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(48):
        (tmp_path / "photos" / f"{number:02d}.png").write_bytes(b"no image")
    Image.fromarray(tiny_images(1)[0]).save(tmp_path / "photos" / "47.png")
    before = left(tmp_path)
    # workers that read ahead would meet the images before the first row is written
    short = {"trainer.max_steps": 1, "probes.every_epochs": every_epochs, "data.num_workers": 0}
    given: dict[str, Any] = {"recipe": recipe, "data": tmp_path / "photos", "overrides": short}
    with pytest.raises(DataError, match="cannot be read"):
        massl.pretrain(**given, output=tmp_path / "run")
    assert left(tmp_path) == before
    for number, image in enumerate(tiny_images(48)):
        Image.fromarray(image).save(tmp_path / "photos" / f"{number:02d}.png")
    assert massl.pretrain(**given, output=tmp_path / "run").finished


def test_images_that_are_lost_after_some_steps_leave_the_run(
    recipe: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_images(trainer: Trainer, done: int) -> None:
        raise DataError("all images are gone")

    monkeypatch.setattr(Trainer, "save", lose_images)
    short = {"trainer.max_steps": 2, "trainer.log_every_steps": 1, "probes.every_epochs": 0}
    with pytest.raises(DataError, match="all images are gone"):
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides=short)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_start_that_is_refused_leaves_a_run_as_it_was(recipe: Path, archive: Path, tmp_path: Path) -> None:
    short = {"trainer.max_steps": 1, "probes.every_epochs": 0}
    massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides=short)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"}
    with pytest.raises(RunFolderError):
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides={"trainer.epochs": 99})
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_cautions_before_training_are_kept_with_the_run(recipe: Path, archive: Path, tmp_path: Path) -> None:
    short = {"trainer.max_steps": 1, "probes.every_epochs": 0, "method.memory.num_rows": 64}
    massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides=short)
    rows = [json.loads(line) for line in (tmp_path / "run" / "warnings.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0]
    assert "method.memory.num_rows = 64" in rows[0]["warning"]


def test_too_little_memory_is_warned_of_and_kept_once(
    recipe: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (1, 2):
        monkeypatch.setattr(memory_check, "free_memory_gib", lambda device, free=steps: free / 1e6)
        short = {"trainer.max_steps": steps, "probes.every_epochs": 0}
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides=short)
        assert capsys.readouterr().err.count("warning: a step of this run needs about") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "warnings.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "a step of this run needs about" in row["warning"]] == [0]


@pytest.mark.parametrize(
    ("source", "hold_out"), [("{0}", 0.0), ("{0}", 0.2), ("folder:{0}?labels=none", 0.0), ("{0}/../link", 0.0)]
)
def test_an_unreadable_file_counts_once_though_training_and_probe_meet_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, hold_out: float
) -> None:
    for number, image in enumerate(tiny_images(64)):
        folder = tmp_path / "photos" / "train" / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:03d}.png")
    (tmp_path / "photos" / "train" / "class0" / "000.png").write_bytes(b"")
    probed = {
        "probes.database": str(tmp_path / "photos" / "train"),
        "probes.queries": str(tmp_path / "photos" / "train"),
    }
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    short = {"trainer.max_steps": 8, "probes.max_queries": 64, "data.num_workers": 0, **probed}
    short["data.hold_out"] = hold_out
    data = source.format(tmp_path / "photos")
    massl.pretrain(recipe=recipe, data=data, output=tmp_path / "run", overrides=short)
    said = capsys.readouterr().err
    assert said.count("skipped an unreadable image") == 1
    assert "skipped 1 unreadable image in all" in said


def test_a_size_that_is_no_multiple_of_the_patch_is_seen_by_all_commands(
    recipe: Path, archive: Path, tmp_path: Path
) -> None:
    odd = {"trainer.max_steps": 1, "probes.every_epochs": 0, "views.global_size": 18}
    run = massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides=odd).folder
    assert (
        "views.global_size is no multiple of the patch of 4 px: 2 of 18 px at" in (run / "warnings.jsonl").read_text()
    )
    massl.export(run, to="safetensors", output=tmp_path / "exported")
    own = massl.embed(run, data=archive, overrides={"device": "cpu"}).features
    assert np.array_equal(massl.embed(run, data=archive, overrides={"image_size": 18, "device": "cpu"}).features, own)
    with pytest.raises(DataError, match="image_size 19"):
        massl.embed(run, data=archive, overrides={"image_size": 19, "device": "cpu"})
    massl.report([run], output=tmp_path / "report.html", device="cpu")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no multiple of the model" not in page
    assert 'id="correspondence"' in page


def test_only_images_named_by_the_user_are_downloaded(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    class MNIST:
        def __init__(self, root: str, download: bool = False) -> None:
            asked.append(download)
            raise RuntimeError("no files")

    monkeypatch.setattr("torchvision.datasets.MNIST", MNIST)
    uri, output = "torchvision:MNIST?root=mnist&download=true", str(tmp_path / "run")
    other = tmp_path / "strange.yaml"
    other.write_text(json.dumps({"base": str(recipe), "data": {"source": uri}}))
    (tmp_path / "of_a_stranger").mkdir()
    shutil.copy(other, tmp_path / "of_a_stranger" / "recipe.yaml")
    with pytest.raises(DataError, match="not followed"):
        massl.pretrain(recipe=other, output=output)
    with pytest.raises(DataError, match="not followed"):
        command.main(["--recipe", str(other), "--output", output])
    for named in (["--recipe", str(other)], ["--init", str(tmp_path / "of_a_stranger")]):
        with pytest.raises(DataError, match="not followed"):
            plan.main(named)
    assert asked == [False, False, False, False]
    asked.clear()
    with pytest.raises(DataError):
        plan.main([uri, "--recipe", str(recipe)])
    with pytest.raises(DataError):
        massl.pretrain(recipe=recipe, data=uri, output=output)
    with pytest.raises(DataError):
        massl.pretrain(recipe=other, overrides={"data": {"source": uri}}, output=output)
    for option in ("--data", "--data.source"):
        with pytest.raises(DataError):
            command.main(["--recipe", str(recipe), option, uri, "--output", output])
    assert asked == [True] * 5
    images = ["--recipe", str(recipe), "--data", "demo:train"]
    for option in ("--probes.database", "--probes.queries"):
        with pytest.raises(DataError):
            command.main([*images, option, uri, "--output", output])
    with pytest.raises(DataError):
        ablate.main(["block-size", *images, "--train", uri, "--test", uri, "--output", output])
    assert asked[5:] == [True, True, True]
