"""What a user gets from pip: the wheel holds every file, and the demo runs from it in an environment without extras."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
# What only the extras install, and the massl of this environment: absent from the new one.
ABSENT = {"hypothesis", "massl", "mkdocs", "mkdocstrings", "mypy", "pyarrow", "pytest", "selenium", "xdist"}


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the checkout, where Python finds no massl but the installed one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def wheel(place: Path) -> Path:
    """Built without a network, from a copy: setuptools leaves files beside the sources."""
    copy = place / "checkout"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run(*command, "--wheel-dir", place, copy, folder=place)
    (built,) = place.glob("massl-*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, place: Path) -> Path:
    """The bin folder of a new environment: the wheel, and the packages of this one that massl depends on."""
    environment = place / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, folder=place)
    (packages,) = environment.glob("lib/python*/site-packages")
    for found in {path for kind in ("purelib", "platlib") for path in Path(sysconfig.get_path(kind)).iterdir()}:
        is_absent = re.split(r"\W", found.name)[0] in ABSENT
        if not (is_absent or found.suffix == ".pth" or found.name.startswith("__editable__")):
            (packages / found.name).symlink_to(found)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", wheel, folder=place)
    return environment / "bin"


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "massl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("massl/")}
    assert {Path(name).suffix for name in expected} >= {".py", ".yaml", ".npz", ".toml", ".j2", ".css", ".js", ".txt"}
    assert packed == expected


def test_the_demo_runs_from_the_wheel_and_ends_with_its_page(programs: Path, place: Path) -> None:
    where = run(programs / "python", "-c", "import massl; print(massl.__file__)", folder=place).stdout.strip()
    assert Path(where).is_relative_to(programs.parent)
    ended = run(programs / "massl", "demo", "--steps", "5", "--output", "run", folder=place)
    last = ended.stdout.splitlines()[-1]
    page = Path(unquote(urlsplit(last).path))
    assert page == place / "run" / "report.html"
    assert "k-NN" in page.read_text()
    assert "knn" in ended.stdout  # the table of results; messages are on standard error
    assert "finished: 5 of" in ended.stderr
    assert (place / "run" / "results" / "results.jsonl").exists()
