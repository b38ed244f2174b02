from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from massl import cli
from tests.reliability import processes
from tests.reliability.processes import Answer, ForkServer
from tests.reliability.world import TINY_RECIPE, RunReader, tiny_images


@pytest.fixture(scope="session")
def server() -> ForkServer:
    return processes.server()


@pytest.fixture(autouse=True)
def end_processes() -> Iterator[None]:
    """A test that fails leaves no process that takes the processor from the others."""
    yield
    processes.end_all()


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML recipe as small as it gets: 6 steps an epoch on the images below, 24 steps in all."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY_RECIPE))
    return path


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 labelled images as an array."""
    path = tmp_path_factory.mktemp("archive") / "images.npz"
    np.savez(path, images=tiny_images(48), labels=np.arange(48) % 4)
    return path


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_folder("photos", 48, classes=4): PNG files, in class folders if `classes` is given."""

    def make(name: str, num_images: int, *, classes: int = 0) -> Path:
        root = tmp_path / name
        root.mkdir()
        for number, image in enumerate(tiny_images(num_images)):
            folder = root / f"class{number % classes}" if classes else root
            folder.mkdir(exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:03d}.png")
        return root

    return make


@pytest.fixture
def massl_here(capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """massl_here("pretrain", ...): the command line in this process."""

    def run(*arguments: str | Path) -> Answer:
        capfd.readouterr()
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit_request:
            status = exit_request.code if isinstance(exit_request.code, int) else 1
        output, error = capfd.readouterr()
        return Answer(status, output, error)

    return run


@pytest.fixture(scope="session")
def runs() -> RunReader:
    return RunReader()
