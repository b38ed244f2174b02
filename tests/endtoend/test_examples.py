"""The scripts in examples/ run to their end on a few images."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.reliability.world import tiny_images

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package"),
    [("plain_pytorch.py", "torch"), ("lightning_loop.py", "lightning"), ("lightly_loop.py", "lightly")],
)
def test_a_loop_of_your_own_learns_and_says_so(script: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder = tmp_path / "photos" / "all"
    folder.mkdir(parents=True)
    for number, pixels in enumerate(tiny_images(16)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    command = [sys.executable, str(EXAMPLES / script), str(tmp_path / "photos"), "--epochs", "1", "--batch_size", "8"]
    command += ["--image_size", "32", "--memory", "16", "--workers", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout + done.stderr
