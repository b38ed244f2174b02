"""The scripts that make data for the result pages."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from massl.data.sources import open_source
from scripts import cifar10_arrays


def test_sprites_of_cifar10_become_arrays_that_massl_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    parts = {**dict.fromkeys(cifar10_arrays.SPRITES["train"], pixels[:2]), "test_batch.png": pixels[10:]}
    for name, images in parts.items():
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(tmp_path / name)
    for part, num_images in (("train", 10), ("test", 2)):
        (tmp_path / f"{part}_lables.json").write_text(json.dumps(list(range(num_images))))
    monkeypatch.setattr(sys, "argv", ["cifar10_arrays.py", str(tmp_path), str(tmp_path / "arrays")])
    cifar10_arrays.main()
    train, test = (open_source(str(tmp_path / "arrays" / f"{part}.npz")) for part in ("train", "test"))
    assert (len(train), len(test)) == (10, 2)
    assert test.pixels is not None
    assert np.array_equal(np.asarray(test.pixels), pixels[10:])
    (tmp_path / "test_lables.json").write_text("[1]")
    with pytest.raises(SystemExit, match="2 images but 1 labels of test"):
        cifar10_arrays.main()
