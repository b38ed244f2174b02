"""Files that evaluations and pictures write: a link in their place is replaced, what it leads to stays."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from massl.commands import demo, picture_files
from massl.commands.evaluate import command
from massl.config import MasslError
from massl.evaluations.measurement import Setting
from massl.evaluations.protocols import attention, davis
from massl.evaluations.results import ResultRow

ROW = ResultRow(
    protocol="knn",
    data="Pets",
    setting=Setting(k=20),
    metric="top1",
    value=91.25,
    num_samples=3669,
    seconds=1.5,
    weights="0123",
    model="run",
    architecture="ViT-S/16",
    precision="fp32",
    run="fedc",
    train="trainval",
    images="0011",
)
PICTURE = Image.new("RGB", (4, 3), "red")
WRITERS: dict[str, Callable[[Path], object]] = {
    "results.md": lambda folder: command._write_table([ROW], folder),
    "sheet.png": lambda folder: picture_files.save_picture(PICTURE, folder / "sheet.png"),
    "mask.png": lambda folder: davis._save(folder / "mask.png", PICTURE),
    "strip.png": lambda folder: attention.save_picture(folder / "strip.png", torch.zeros((3, 4, 3), dtype=torch.uint8)),
    "figures.json": lambda folder: attention.save_captions(folder, [], model="run"),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, is_there: bool) -> None:
    own, folder = tmp_path / "notes.txt", tmp_path / "theirs"
    folder.mkdir()
    if is_there:
        own.write_text("own")
    (folder / name).symlink_to(own)
    WRITERS[name](folder)
    assert (own.read_text() if own.exists() else None) == ("own" if is_there else None)
    assert not (folder / name).is_symlink()
    assert [path.name for path in folder.iterdir()] == [name]
    if name.endswith(".png"):
        with Image.open(folder / name) as picture:
            assert (picture.format, picture.size) == ("PNG", (4, 3))


def test_the_demo_writes_no_results_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("massl.commands.pretrain.pretrain", lambda **_: pytest.fail("trained"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results").symlink_to(tmp_path / "mine")
    with pytest.raises(MasslError, match="results is a link"):
        demo.main(["--output", str(tmp_path / "run")])
