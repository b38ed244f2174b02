"""Make the bundled demo images from Fashion-MNIST: python scripts/make_demo_data.py FOLDER_OF_IDX_GZ OUTPUT.npz

Takes the first 800 training and 200 test images of each class in the order of the official files, so the result is
always the same. Debian's package dataset-fashion-mnist installs the four files in /usr/share/datasets/fashion-mnist.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_CLASSES = 10


def read_idx(path: Path) -> NDArray[np.uint8]:
    """LeCun's idx format: two zeros, type 8 (unsigned bytes), number of dimensions, big-endian sizes, data."""
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    num_dimensions = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=num_dimensions, offset=4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)


# [N] -> [10 * num_per_class]
def first_of_each_class(labels: NDArray[np.uint8], *, num_per_class: int) -> NDArray[np.intp]:
    chosen = [np.flatnonzero(labels == label)[:num_per_class] for label in range(NUM_CLASSES)]
    return np.sort(np.concatenate(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds train-images-idx3-ubyte.gz and the three other files")
    parser.add_argument("output", type=Path, help="the .npz archive to write")
    arguments = parser.parse_args()
    arrays = {}
    for split, prefix, num_per_class in (("train", "train", 800), ("test", "t10k", 200)):
        labels = read_idx(arguments.folder / f"{prefix}-labels-idx1-ubyte.gz")
        chosen = first_of_each_class(labels, num_per_class=num_per_class)
        arrays[f"{split}_images"] = read_idx(arguments.folder / f"{prefix}-images-idx3-ubyte.gz")[chosen]
        arrays[f"{split}_labels"] = labels[chosen]
    np.savez_compressed(arguments.output, allow_pickle=False, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
