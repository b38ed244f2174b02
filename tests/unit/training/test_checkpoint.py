import errno
import os
import pickle
import re
import resource
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from massl.files import replacing, write_atomically
from massl.training.checkpoint import CheckpointError, CheckpointStore, fits, load_checkpoint


def state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "method": {"weight": torch.full((1000,), float(step))},
        "optimizer": {"state": {}, "betas": (0.9, 0.999)},
    }


def store_with(folder: Path, *steps: int, keep_last: int = 2, milestone_every: int = 0) -> CheckpointStore:
    store = CheckpointStore(folder / "checkpoints", keep_last)
    for step in steps:
        store.save(step, state(step), milestone_every=milestone_every)
    return store


def no_warning(message: str) -> None:
    raise AssertionError(message)


class Evil:
    """Unpickled, it would leave a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    loaded = store_with(tmp_path, 7).load_latest(no_warning)
    assert loaded is not None
    assert loaded["step"] == 7
    assert torch.equal(loaded["method"]["weight"], torch.full((1000,), 7.0))
    assert loaded["optimizer"] == {"state": {}, "betas": (0.9, 0.999)}


def test_a_folder_without_checkpoints_gives_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "nowhere", 2).load_latest(no_warning) is None
    assert CheckpointStore(tmp_path, 2).load_latest(no_warning) is None


def test_the_last_few_and_the_milestones_are_kept(tmp_path: Path) -> None:
    assert store_with(tmp_path / "last", 1, 2, 3, 4, 5).steps() == [4, 5]
    assert store_with(tmp_path / "one", 1, 2, keep_last=1).steps() == [2]
    assert store_with(tmp_path / "milestones", *range(5, 41, 5), milestone_every=20).steps() == [20, 35, 40]


def test_steps_are_ordered_by_number_and_other_files_are_left_alone(tmp_path: Path) -> None:
    store = store_with(tmp_path, 9, 10, 100_000_001, keep_last=3)
    (store.folder / "notes.txt").write_text("mine")
    (store.folder / "step_5.pt").write_text("not ours")
    store.save(100_000_002, state(100_000_002), milestone_every=0)
    assert store.steps() == [10, 100_000_001, 100_000_002]
    assert {"notes.txt", "step_5.pt"} <= {path.name for path in store.folder.iterdir()}


def test_a_writer_that_fails_midway_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def fail() -> None:
        with replacing(target) as partial:
            partial.write_bytes(b"half of the new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_target_is_replaced_only_when_everything_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, events = tmp_path / "file", list[str]()
    target.write_bytes(b"old")
    fsync, replace = os.fsync, Path.replace

    def spy_fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            assert os.path.samestat(os.fstat(descriptor), tmp_path.stat())
            assert target.read_bytes() == b"new"
            events.append("fsync of the folder")
        else:
            assert os.fstat(descriptor).st_size == 3  # flushed before
            events.append("fsync")
        fsync(descriptor)

    def spy_replace(path: Path, other: Path) -> Path:
        events.append("replace")
        assert target.read_bytes() == b"old"
        return replace(path, other)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    write_atomically(target, b"new")
    assert events == ["fsync", "replace", "fsync of the folder"]
    assert target.read_bytes() == b"new"


def test_a_full_disk_is_reported_with_what_is_intact(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            CheckpointError,
            match=r"step_000000020\.pt: .*step 10 is intact",
        ):
            store.save(20, {"weight": torch.zeros(1_000_000)}, milestone_every=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in store.folder.iterdir()] == ["step_000000010.pt"]
    loaded = store.load_latest(no_warning)
    assert loaded is not None
    assert loaded["step"] == 10


def test_a_disk_that_refuses_the_flush_is_reported_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match=r"No space left on device.*No earlier checkpoint"):
        store_with(tmp_path, 10)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_nothing_old_is_dropped_before_the_new_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with(tmp_path, 10, 20)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(CheckpointError, match="step 20 is intact"):
        store.save(30, state(30), milestone_every=0)
    assert store.steps() == [10, 20]


@pytest.mark.parametrize("damage", ["empty", "cut short", "garbage", "a block of zeros", "other letters"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    store = store_with(tmp_path, 10, 20)
    path = store.path(20)
    content = path.read_bytes()
    # amid the weights: the file's structure is intact
    zeros_at = content.index(torch.full((1000,), 20.0).numpy().tobytes()) + 512
    path.write_bytes(
        {
            "empty": b"",
            "cut short": content[: len(content) // 2],
            "garbage": b"garbage" * 100,
            "a block of zeros": content[:zeros_at] + bytes(512) + content[zeros_at + 512 :],
            "other letters": content.replace(b"betas", b"be\xffas"),
        }[damage]
    )
    warnings: list[str] = []
    loaded = store.load_latest(warnings.append)
    assert loaded is not None
    assert loaded["step"] == 10
    assert len(warnings) == 1
    assert f"cannot read the checkpoint {path}" in warnings[0]


def test_when_no_checkpoint_can_be_read_the_run_does_not_start_anew_silently(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20)
    for step in store.steps():
        store.path(step).write_bytes(b"")
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        store.load_latest(warnings.append)
    assert len(warnings) == 2


@pytest.mark.parametrize("kind", ["torch file", "bare pickle"])
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, kind: str) -> None:
    path, trace = tmp_path / "evil.pt", tmp_path / "trace"
    if kind == "torch file":
        torch.save({"step": 1, "method": Evil(trace)}, path)
    else:
        path.write_bytes(pickle.dumps({"step": 1, "method": Evil(trace)}, protocol=2))
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        load_checkpoint(path)
    assert not trace.exists()
    torch.load(path, weights_only=False) if kind == "torch file" else pickle.loads(path.read_bytes())
    assert trace.exists()  # the file was as evil as it should be


def test_tensors_come_back_on_the_cpu_and_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    store = store_with(tmp_path, 3)
    assert load_checkpoint(store.path(3))["method"]["weight"].device.type == "cpu"
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        load_checkpoint(store.path(4))


LIKE = {"step": 0, "method": {"weight": torch.zeros(1000)}, "optimizer": {"state": {}, "betas": ()}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": None}, "method"),
        ({"step": None}, "step"),
        ({"step": "20"}, "step"),
        ({"method": {}}, "method.weight"),
        ({"method": {"weight": torch.zeros(3)}}, r"method.weight of shape \[1000\]"),
        ({"optimizer": {"state": {}}}, "optimizer.betas"),
    ],
)
def test_a_newest_checkpoint_that_lacks_something_is_reported_and_the_one_before_is_taken(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    store = store_with(tmp_path, 10)
    content = {key: value for key, value in {**state(20), **changes}.items() if value is not None}
    store.save(20, content, milestone_every=0)
    warnings: list[str] = []
    loaded = store.load_latest(warnings.append, like=LIKE)
    assert loaded is not None
    assert loaded["step"] == 10
    assert len(warnings) == 1
    assert re.search(rf"{store.path(20)} lacks {named}.*step 10", warnings[0])


def test_a_checkpoint_under_the_name_of_another_is_reported(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20)
    store.path(20).write_bytes(store.path(10).read_bytes())
    warnings: list[str] = []
    loaded = store.load_latest(warnings.append, like=LIKE)
    assert loaded is not None
    assert loaded["step"] == 10
    assert f"{store.path(20)} is a copy" in warnings[0]


def test_a_checkpoint_that_is_no_dictionary_is_skipped_too(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10)
    torch.save([1, 2], store.path(20))
    warnings: list[str] = []
    loaded = store.load_latest(warnings.append, like=LIKE)
    assert loaded is not None
    assert loaded["step"] == 10


def test_if_no_checkpoint_can_be_used_none_is_deleted(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20)
    contents = {}
    for step, damage in ((10, b"\1"), (20, b"")):
        store.path(step).write_bytes(store.path(step).read_bytes()[:-1] + damage)
        contents[step] = store.path(step).read_bytes()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* nothing was deleted"):
        store.load_latest(lambda message: None, like=LIKE)
    assert {step: store.path(step).read_bytes() for step in store.steps()} == contents


def test_a_bit_that_torch_takes_for_a_folder_is_noticed(tmp_path: Path) -> None:
    """With this bit torch.load returns whatever is in memory."""
    store = store_with(tmp_path, 10, 20)
    path = store.path(20)
    content = bytearray(path.read_bytes())
    entry = content.index(b"archive/data/0", content.index(b"PK\1\2")) - 46
    content[entry + 38] |= 0x10
    path.write_bytes(content)
    warnings: list[str] = []
    loaded = store.load_latest(warnings.append)
    assert loaded is not None
    assert loaded["step"] == 10
    assert str(path) in warnings[0]


def test_checkpoints_without_a_digest_are_read_and_their_damage_is_noticed(tmp_path: Path) -> None:
    """As written by older versions."""
    store = store_with(tmp_path, 10)
    with store.path(20).open("wb") as file:
        torch.save(state(20), file)
    loaded = store.load_latest(no_warning)
    assert loaded is not None
    assert loaded["step"] == 20
    content = store.path(20).read_bytes()
    at = content.index(torch.full((1000,), 20.0).numpy().tobytes())
    store.path(20).write_bytes(content[:at] + b"\1" + content[at + 1 :])
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(store.path(20))


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (store_with(tmp_path / name, 7).path(7).read_bytes() for name in ("a", "b"))
    assert first == second
    loaded = load_checkpoint(tmp_path / "a" / "checkpoints" / "step_000000007.pt")
    again = CheckpointStore(tmp_path / "c", 2).save(7, loaded, milestone_every=0)
    assert again.read_bytes() == first


def test_the_checkpoint_just_written_is_not_deleted_for_a_damaged_later_one(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 30, keep_last=1, milestone_every=10)
    store.path(30).write_bytes(b"damaged")
    store.save(25, state(25), milestone_every=10)
    assert store.steps() == [10, 25, 30]
    store.save(35, state(35), milestone_every=10)
    assert store.steps() == [10, 30, 35]


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_checkpoint_that_is_no_file_is_reported_and_the_one_before_is_taken(tmp_path: Path, kind: str) -> None:
    store = store_with(tmp_path, 10)
    (os.mkfifo if kind == "fifo" else os.mkdir)(store.path(20))
    warnings: list[str] = []
    loaded = store.load_latest(warnings.append)
    assert loaded is not None
    assert loaded["step"] == 10
    assert re.search(rf"{store.path(20)}.*not a file.*step 10", warnings[0])


def test_a_folder_with_the_name_of_an_old_checkpoint_is_left_alone(tmp_path: Path) -> None:
    store = store_with(tmp_path, keep_last=1)
    store.path(10).mkdir(parents=True)
    store.save(20, state(20), milestone_every=0)
    assert store.path(10).is_dir()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(1000, dtype=torch.bool),
        torch.zeros(1000, dtype=torch.float64),
        torch.zeros(1000, device="meta"),
    ],
)
def test_a_tensor_of_another_type_is_lacking(tmp_path: Path, wrong: torch.Tensor) -> None:
    store = store_with(tmp_path, 10)
    store.save(20, {**state(20), "method": {"weight": wrong}}, milestone_every=0)
    warnings: list[str] = []
    loaded = store.load_latest(warnings.append, like=state(0))
    assert loaded is not None
    assert loaded["step"] == 10
    assert "method.weight" in warnings[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"unprobed": "x"},
        {"unprobed": {"step": "1"}},
        {"unprobed": {"step": 1, "loss": 10**400}},
        {"unprobed": {}},
        {"skipped_steps": 5},
        {"skipped_steps": ["x"]},
    ],
)
def test_entries_that_only_some_checkpoints_have_are_checked_too(tmp_path: Path, wrong: dict[str, Any]) -> None:
    store = store_with(tmp_path, 10)
    store.save(20, {**state(20), **wrong}, milestone_every=0)
    warnings: list[str] = []
    loaded = store.load_latest(warnings.append, like=state(0))
    assert loaded is not None
    assert loaded["step"] == 10
    assert next(iter(wrong)) in warnings[0]
    good = {"unprobed": {"step": 30, "loss": 0.5}, "skipped_steps": [4, 7]}
    store.save(30, {**state(30), **good}, milestone_every=0)
    assert (store.load_latest(no_warning, like=state(0)) or {})["skipped_steps"] == [4, 7]


def test_only_an_error_of_the_disk_asks_whether_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="exists") as caught:
        store_with(tmp_path, 1)
    assert "disk full" not in str(caught.value)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "checkpoints").unlink()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="Is the disk full"):
        store_with(tmp_path, 1)


def test_a_sparse_tensor_is_no_plain_one() -> None:
    assert fits(torch.ones(3), torch.zeros(3))
    assert not fits(torch.ones(3).to_sparse(), torch.zeros(3))
