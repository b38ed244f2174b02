"""The scripts in examples/ run to their end on a few images."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from PIL import Image

from tests.reliability.world import tiny_images

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package"),
    [("plain_pytorch.py", "torch"), ("lightning_loop.py", "lightning"), ("lightly_loop.py", "lightly")],
)
@pytest.mark.parametrize("nesting", ["", "all", "2024/spring"])
def test_a_loop_of_your_own_learns_and_says_so(script: str, package: str, nesting: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder = tmp_path / "photos" / nesting
    folder.mkdir(parents=True)
    for number, pixels in enumerate(tiny_images(16)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "notes.txt").touch()
    command = [sys.executable, str(EXAMPLES / script), str(tmp_path / "photos"), "--epochs", "1", "--batch_size", "8"]
    command += ["--image_size", "32", "--memory", "16", "--workers", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout + done.stderr


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, pixels in enumerate(tiny_images(64)):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    matplotlib.use("Agg")
    cells = json.loads((EXAMPLES / "own_images.ipynb").read_text())["cells"]
    scripts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for script in scripts:
        exec(script, names)  # as a notebook does: one namespace
        names["OVERRIDES"] = {"trainer.epochs": 2, "trainer.device": "cpu"}
    assert (tmp_path / "runs" / "photos" / "backbone.safetensors").is_file()
    assert len(names["names"]) == 3  # type: ignore[arg-type]
