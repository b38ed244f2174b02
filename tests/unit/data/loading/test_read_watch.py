import threading
import time

import pytest

from massl.data.loading import read_watch
from massl.data.loading.decode import UnreadableImage
from massl.data.loading.image_reader import ImageReader
from massl.data.sources.base import EncodedImage


class Stuck:
    """Image 1 is on a drive that is gone."""

    name, pixels, class_names = "photos", None, None

    def __init__(self) -> None:
        self.answers = threading.Event()

    def __len__(self) -> int:
        return 3

    def label_of(self, index: int) -> int | None:
        return None

    def key_of(self, index: int) -> str:
        return f"{index}.jpg"

    def read(self, index: int) -> EncodedImage:
        if index == 1:
            self.answers.wait()
        raise FileNotFoundError(2, "No such file")


def test_a_read_that_does_not_return_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read_watch, "_WARN_SECONDS", 0.02)
    monkeypatch.setattr(read_watch, "_watcher", None)  # another one was started with 60 s
    source = Stuck()
    reader = ImageReader(source, seed=0, max_side=99)  # type: ignore[arg-type]
    for index in (0, 2):
        with pytest.raises(UnreadableImage):
            reader.read(index)

    def read() -> None:
        with pytest.raises(UnreadableImage):
            reader.read(1)

    thread = threading.Thread(target=read)
    thread.start()
    said, deadline = "", time.monotonic() + 120
    while "1.jpg" not in said and time.monotonic() < deadline:
        time.sleep(0.05)
        said += capfd.readouterr().err
    time.sleep(0.1)
    said += capfd.readouterr().err
    assert said.count("has been reading 1.jpg of photos") == 1
    assert "0.jpg" not in said
    source.answers.set()
    thread.join()
    assert not read_watch._reading
