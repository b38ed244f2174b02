import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors import safe_open
from torch import Tensor

from massl.digests import DIGEST_TO_COME, DamagedFile, check_digest, seal_safetensors_file
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.patch_files import whole_shard, write_shard

SHAPE = (2, 3, 5)
ABOUT = {"weights": "abc", "crop_ratio": "0.875", "file": "patches-00000.safetensors"}


def rows(num: int) -> Tensor:
    return torch.randn(num, *SHAPE, generator=torch.Generator().manual_seed(0)).half()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Seven images in three batches; two of them are left out."""
    path = tmp_path / "patches-00000.safetensors"
    batches = [(rows(5)[:2], [1]), (rows(5)[2:3], []), (rows(5)[3:], [6])]
    assert write_shard(path, batches, shape=SHAPE, num_images=7, about=ABOUT) == [1, 6]
    return path


def check(path: Path, **changes: str) -> list[int]:
    return whole_shard(path, shape=SHAPE, images=range(7), about={**ABOUT, **changes})


def test_safetensors_reads_what_was_written_batch_by_batch(shard: Path) -> None:
    found = safetensors.numpy.load_file(shard)
    assert list(found) == ["patches"]
    assert found["patches"].dtype == np.float16
    assert np.array_equal(found["patches"], rows(5).numpy())
    with safe_open(shard, framework="pt") as file:
        assert torch.equal(file.get_slice("patches")[3], rows(5)[3])
        assert file.metadata()["weights"] == "abc"
    assert check_digest(shard)
    assert check(shard) == [1, 6]
    assert [path.name for path in shard.parent.iterdir()] == [shard.name]


def test_a_header_may_name_every_image_as_left_out(tmp_path: Path) -> None:
    numbers = [10**9 + number for number in range(3000)]
    path = tmp_path / "patches-00000.safetensors"
    batches = [(torch.empty(0, *SHAPE).half(), numbers)]
    write_shard(path, batches, shape=SHAPE, num_images=3000, about={"data": "犬" * 100})
    images = range(10**9, 10**9 + 3000)
    assert whole_shard(path, shape=SHAPE, images=images, about={"data": "犬" * 100}) == numbers


@pytest.mark.parametrize("place", [20, 200, 4096, 4100, -1])
def test_a_changed_byte_is_found(shard: Path, place: int) -> None:
    content = bytearray(shard.read_bytes())
    content[place] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedFile):
        check(shard)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 4096, 4200])
def test_a_file_that_was_cut_is_found(shard: Path, num_bytes: int) -> None:
    os.truncate(shard, num_bytes)
    with pytest.raises(DamagedFile):
        check(shard)


def test_headers_of_endless_size_and_garbage_are_damage(shard: Path) -> None:
    for content in (struct.pack("<Q", 2**62), struct.pack("<Q", 20 << 20) + b"{" * 100, b"no safetensors at all"):
        shard.write_bytes(content)
        with pytest.raises(DamagedFile):
            check(shard)


def test_sealed_files_of_odd_content_are_computed_again(shard: Path) -> None:
    for left_out, shape in (("x y", (5, *SHAPE)), ("1 1", (5, *SHAPE)), ("1 6", (5, 3, 2, 5)), ("1", (5, *SHAPE))):
        metadata = {**ABOUT, "left_out": left_out, **DIGEST_TO_COME}
        safetensors.numpy.save_file({"patches": np.zeros(shape, dtype=np.float16)}, shard, metadata)
        seal_safetensors_file(shard)
        with pytest.raises(DamagedFile, match=r"it holds|other images"):
            check(shard)


def test_files_of_another_command_or_program_are_refused_not_replaced(shard: Path) -> None:
    with pytest.raises(EvaluationError, match=r"made with crop ratio '0.875', not '1.0'; move its folder away"):
        check(shard, crop_ratio="1.0")
    shard.write_bytes(safetensors.numpy.save({"patches": np.zeros((7, *SHAPE), dtype=np.float16)}))
    with pytest.raises(EvaluationError, match="was not written by massl embed"):
        check(shard)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(EvaluationError, match="is no file"):
        check(shard)


def test_an_interrupted_write_leaves_the_old_file_or_none(shard: Path) -> None:
    def broken() -> object:
        yield rows(5), []
        raise KeyboardInterrupt

    before = shard.read_bytes()
    for path in (shard, shard.with_name("patches-00001.safetensors")):
        with pytest.raises(KeyboardInterrupt):
            write_shard(path, broken(), shape=SHAPE, num_images=7, about=ABOUT)  # type: ignore[arg-type]
    assert shard.read_bytes() == before
    assert [path.name for path in shard.parent.iterdir()] == [shard.name]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EvaluationError, match=r"cannot write .*choose another --output"):
        write_shard(tmp_path / "file" / "a.safetensors", [(rows(1), [])], shape=SHAPE, num_images=1, about={})


@pytest.mark.parametrize("numbers", ["7", "1 1", "9" * 5000, "-1", "x"])
def test_a_file_that_leaves_out_other_images_than_its_own_is_computed_again(tmp_path: Path, numbers: str) -> None:
    path = tmp_path / "patches-00000.safetensors"
    left_out = numbers.split()
    about = {**ABOUT, "left_out": numbers, **DIGEST_TO_COME}
    safetensors.numpy.save_file({"patches": rows(7 - len(left_out)).numpy()}, path, about)
    seal_safetensors_file(path)
    with pytest.raises(DamagedFile, match="other images than its own"):
        check(path)


def test_a_file_without_end_is_not_hashed(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(shard, 1 << 40)
    monkeypatch.setattr("massl.evaluations.patch_files.check_digest", lambda path: pytest.fail("hashed"))
    with pytest.raises(DamagedFile, match="longer than its images need"):
        check(shard)
