"""Images of more than 8 bits: one range for a source, kept with the run and used by later commands."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import massl
from massl.config import MasslError
from tests.reliability.world import TINY_RECIPE, difference, newest_checkpoint, tiny_images

SHORT = {"trainer.max_steps": 2, "trainer.checkpoint_every_steps": 1, "probes.every_epochs": 0}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY_RECIPE))
    return tmp_path / "tiny.yaml"


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """12 bits in files of 16; no image alone shows the range."""
    (tmp_path / "scans").mkdir()
    for number, image in enumerate(tiny_images(24)):
        values = image[..., 0].astype(np.uint16) * (16 if number else 1)
        Image.fromarray(values).save(tmp_path / f"scans/{number:02d}.png")
    return tmp_path / "scans"


@pytest.mark.slow
def test_a_run_says_and_keeps_the_range_and_other_commands_take_it(
    scans: Path, recipe: Path, tmp_path: Path, massl_here: Any
) -> None:
    options = [word for key, value in SHORT.items() for word in (f"--{key}", str(value))]
    run = tmp_path / "run"
    answer = massl_here("pretrain", "--recipe", recipe, "--data", scans, "--output", run, *options)
    assert answer.status == 0, answer.text
    assert "4,095" in answer.text
    assert json.loads((run / "data.json").read_text())["pixel_ranges"] == {"integers": [0, 4095]}
    dark = tmp_path / "dark"
    dark.mkdir()
    Image.open(scans / "00.png").save(dark / "a.png")  # alone it would be read as 8 bits
    kept, stated, alone = (
        massl.embed(model, data=dark, overrides=overrides).features
        for model, overrides in (
            (run, {}),
            (_copy_without_record(run), {"pixel_range": [0, 4095]}),
            (_copy_without_record(run), {}),
        )
    )
    assert np.array_equal(kept, stated)
    assert not np.array_equal(kept, alone)
    with pytest.raises(MasslError, match=r"data\.pixel_range"):
        massl.pretrain(output=run, overrides={"data.pixel_range": [0, 65535]})


def _copy_without_record(run: Path) -> Path:
    folder = run.with_name("exported")
    folder.mkdir(exist_ok=True)
    (folder / "backbone.safetensors").write_bytes((run / "backbone.safetensors").read_bytes())
    return folder


@pytest.mark.slow
def test_a_run_that_began_before_goes_on_bit_for_bit(scans: Path, recipe: Path, tmp_path: Path) -> None:
    """Its data.json has no ranges: each image is scaled as it was then."""
    runs = [tmp_path / name for name in ("stopped", "whole")]
    for run, num_steps in zip(runs, (1, 3), strict=True):
        # a new run with the old reading: begin, forget the range, and train again from step 0
        massl.pretrain(recipe=recipe, data=scans, output=run, overrides={**SHORT, "trainer.max_steps": 1})
        for file in (*run.glob("checkpoints/*"), run / "metrics.jsonl", run / "backbone.safetensors"):
            file.unlink()
        record = json.loads((run / "data.json").read_text())
        assert record.pop("pixel_ranges") == {"integers": [0, 4095]}
        (run / "data.json").write_text(json.dumps({**record, "digest": _digest_before(scans)}))
        massl.pretrain(output=run, overrides={"trainer.max_steps": num_steps})
    assert json.loads((runs[0] / "data.json").read_text())["pixel_ranges"] == {"of_each_image": True}
    massl.pretrain(output=runs[0], overrides={"trainer.max_steps": 3})
    assert difference(newest_checkpoint(runs[0])["method"], newest_checkpoint(runs[1])["method"], "method") is None


def _digest_before(scans: Path) -> str:
    from massl.data.identity import identify
    from massl.data.sources import open_source

    return identify(open_source(scans)).digest


def test_a_range_that_cannot_be_known_is_asked_for_before_training(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "ct").mkdir()
    for number in range(3):
        Image.fromarray(np.full((20, 20), 300 * number - 400, dtype=np.int32)).save(tmp_path / f"ct/{number}.tif")
    with pytest.raises(MasslError, match=r"-400 to 200.*pixel_range"):
        massl.pretrain(recipe=recipe, data=tmp_path / "ct", output=tmp_path / "run", overrides=SHORT)
    assert not (tmp_path / "run" / "checkpoints").exists()
