import gzip
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from massl.data.identity import DataIdentity
from massl.data.sources.rules import PixelRanges
from massl.training.data_record import ChangedData, DataRecord


def images(*names: str, source: str = "photos", digest: str | None = None) -> DataIdentity:
    files = b"".join(b"7 %s\0" % name.encode() for name in names)
    return DataIdentity(
        digest=digest or "-".join(names), num_images=len(names), source=source, files=files, as_before=False
    )


def write(folder: Path, now: DataIdentity, *, is_new: bool = False, after_step: int = 0) -> DataRecord:
    record = DataRecord(folder)
    record.write(now, after_step=after_step, is_new=is_new)
    return record


def test_the_images_and_their_names_are_kept(tmp_path: Path) -> None:
    assert not DataRecord(tmp_path).exists
    record = write(tmp_path, images("a", "b"))
    assert json.loads((tmp_path / "data.json").read_text()) == {
        "digest": "a-b",
        "num_images": 2,
        "source": "photos",
        "as_before": False,
        "changes": [],
        "pixel_ranges": {},
    }
    assert gzip.decompress((tmp_path / "data_files.gz").read_bytes()) == b"7 a\x007 b\0"
    assert record.digests() == ["a-b"]
    assert {path.name for path in tmp_path.iterdir()} == set(DataRecord.FILES)


def test_the_same_images_are_accepted_and_nothing_is_written_again(tmp_path: Path) -> None:
    record = write(tmp_path, images("a"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    record.refuse_changes(images("a", source="elsewhere"))
    write(tmp_path, images("a"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    write(tmp_path, images("a", source="elsewhere"))
    assert json.loads((tmp_path / "data.json").read_text())["source"] == "elsewhere"
    assert record.digests() == ["a"]


def test_other_images_are_refused_with_what_changed_and_how_to_go_on(tmp_path: Path) -> None:
    record = write(tmp_path, images("a", "b"))
    with pytest.raises(ChangedData, match=r"photos: 2 added \(c, d\), 1 removed \(b\).*--data\.accept_changes True"):
        record.refuse_changes(images("a", "c", "d"))
    with pytest.raises(ChangedData, match=r"other \(data\.source was photos\): 1 removed"):
        record.refuse_changes(images("a", source="other"))


def test_changed_arrays_are_told_by_their_number(tmp_path: Path) -> None:
    def array(num_images: int, digest: str) -> DataIdentity:
        return DataIdentity(digest=digest, num_images=num_images, source="x.npz", files=b"", as_before=False)

    record = write(tmp_path, array(4, "one"))
    with pytest.raises(ChangedData, match="5 images instead of 4"):
        record.refuse_changes(array(5, "two"))
    with pytest.raises(ChangedData, match="pixels"):
        record.refuse_changes(array(4, "three"))


def test_accepted_changes_are_listed_and_their_checkpoints_known(tmp_path: Path) -> None:
    write(tmp_path, images("a"))
    record = write(tmp_path, images("a", "b"), after_step=12)
    record = write(tmp_path, images("b"), after_step=20)
    assert record.digests() == ["b", "a", "a-b"]
    first, second = json.loads((tmp_path / "data.json").read_text())["changes"]
    assert first == {
        "digest": "a",
        "num_images": 1,
        "source": "photos",
        "change": "photos: 1 added (b)",
        "after_step": 12,
    }
    assert second["after_step"] == 20
    record.refuse_changes(images("b"))


def test_a_run_that_has_not_begun_takes_any_images(tmp_path: Path) -> None:
    write(tmp_path, images("a"))
    assert write(tmp_path, images("b"), is_new=True).digests() == ["b"]
    assert gzip.decompress((tmp_path / "data_files.gz").read_bytes()) == b"7 b\0"


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(ChangedData, match=r"data\.json cannot be read"):
        DataRecord(tmp_path).refuse_changes(images("a"))


def test_ranges_are_kept_and_a_run_without_a_record_of_them_guessed_each_image(tmp_path: Path) -> None:
    ranges = PixelRanges(integers=(0, 4095))
    record = write(tmp_path, replace(images("a"), ranges=ranges))
    assert record.ranges == ranges
    known = json.loads((tmp_path / "data.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps({**known, "pixel_ranges": {"integers": 3}}))
    with pytest.raises(ChangedData, match=r"data\.json"):
        _ = record.ranges
    del known["pixel_ranges"]
    (tmp_path / "data.json").write_text(json.dumps(known))
    assert record.ranges == PixelRanges(of_each_image=True)


RECORD = {"digest": "d", "num_images": 3, "source": "photos", "as_before": False, "changes": []}


@pytest.mark.parametrize(
    "text",
    [
        "7",
        "[" * 9999,
        *(
            json.dumps({**RECORD, **wrong})
            for wrong in (
                {"changes": [1, 2]},
                {"changes": 5},
                {"changes": [{}]},
                {"num_images": "x"},
                {"source": None},
                {"pixel_ranges": {"stated": [0, 10**400]}},
            )
        ),
    ],
)
def test_a_record_with_values_of_other_types_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.json").write_text(text)
    record = DataRecord(tmp_path)
    for use in (record.digests, lambda: record.refuse_changes(images("a")), lambda: record.ranges):
        with pytest.raises(ChangedData, match=r"data\.json cannot be read"):
            use()


def test_a_record_that_is_no_file_or_far_too_large_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_bytes(b" " * (17 << 20) + json.dumps(RECORD).encode())
    with pytest.raises(ChangedData, match=r"data\.json cannot be read"):
        DataRecord(tmp_path).digests()


def test_a_damaged_list_of_files_leaves_the_number_of_images(tmp_path: Path) -> None:
    record = write(tmp_path, images("a", "b"))
    content = bytearray((tmp_path / "data_files.gz").read_bytes())
    content[10] ^= 0xFF  # the first byte of the compressed data
    (tmp_path / "data_files.gz").write_bytes(content)
    with pytest.raises(ChangedData, match="1 images instead of 2"):
        record.refuse_changes(images("c"))


def test_a_list_of_files_that_unpacks_without_end_is_not_unpacked(tmp_path: Path) -> None:
    record = write(tmp_path, images("a", "b"))
    bomb = gzip.compress(bytes(1 << 20)) * 256  # many small members: 256 MiB
    (tmp_path / "data_files.gz").write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(ChangedData, match="1 images instead of 2"):
            record.refuse_changes(images("c"))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
