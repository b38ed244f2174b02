"""What a sample says about images, and what is known of the machine."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from massl.data.sources import open_source
from massl.planning.facts import busy_share, find_unreadable, free_memory_gib, look_at_device, look_at_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        place = tmp_path / "photos" / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(place / f"{number}.{'jpg' if number % 2 else 'png'}")
    (tmp_path / "photos" / "class0" / "no-header.jpg").write_bytes(b"nothing")
    buffer = io.BytesIO()
    Image.effect_noise((40, 30), 80).save(buffer, "JPEG")
    (tmp_path / "photos" / "class1" / "cut.jpg").write_bytes(buffer.getvalue()[:-200])
    return tmp_path / "photos"


def test_sizes_classes_and_files_without_a_header_are_found(folder: Path) -> None:
    facts = look_at_images(open_source(folder))
    assert (facts.num_images, facts.num_sampled, facts.num_classes) == (14, 14, 3)
    assert (facts.side, facts.typical_size) == (30, "40 x 30 px")
    assert len(facts.unreadable) == 1
    assert "no-header.jpg" in facts.unreadable[0]
    assert facts.decoded_bytes(max_side=40) == 40 * 30 * 3
    assert facts.decoded_bytes(max_side=20) == 20 * 15 * 3


def test_a_sample_is_decoded_to_find_what_headers_do_not_show(folder: Path) -> None:
    num_tried, problems = find_unreadable(open_source(folder), max_side=64, seconds=60)
    assert num_tried == 14
    assert {problem.partition(":")[0] for problem in problems} == {"class0/no-header.jpg", "class1/cut.jpg"}


def test_a_large_set_is_sampled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((400, 9, 8, 3), dtype=np.uint8))
    facts = look_at_images(open_source(tmp_path / "a.npz"))
    assert (facts.num_images, facts.num_sampled, facts.side, facts.is_array) == (400, 256, 8, True)


def test_processes_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = look_at_device(torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared = look_at_device(torch.device("cpu"))
    assert (alone.num_processes, shared.num_processes) == (1, 4)
    assert shared.host_gib == pytest.approx(alone.host_gib / 2)


def test_free_memory_is_what_the_system_says_is_available() -> None:
    meminfo = "MemTotal: 9999 kB\nMemAvailable: 1048576 kB\n"
    assert free_memory_gib(torch.device("cpu"), read=lambda: meminfo) == 1.0
    assert free_memory_gib(torch.device("cpu"), read=lambda: "odd") > 0


def test_what_other_programs_use_is_a_share_and_0_where_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["cpu  10 0 10 80 0 0 0 0 0 0\ncpu0 1", "cpu  40 0 20 130 10 0 0 0 0 0\ncpu0 1"])
    monkeypatch.setattr(Path, "read_text", lambda path: next(said))
    assert busy_share(seconds=0) == pytest.approx(0.4)
    monkeypatch.setattr(Path, "read_text", lambda path: "")
    assert busy_share(seconds=0) == 0
