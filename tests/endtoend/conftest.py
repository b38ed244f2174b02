import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from PIL import Image

from massl import cli
from massl.training.checkpoint import CheckpointStore, load_checkpoint
from massl.training.metrics_log import TIMING_KEYS, read_metrics

_DEADLINE_SECONDS = 120.0  # only for a process that hangs

TINY_RECIPE: dict[str, Any] = {
    "data": {"num_workers": 2, "max_side": 64},
    "views": {"num_local": 2, "global_size": 16, "local_size": 8},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "image_size": 16,
        "patch_size": 4,
        "drop_path_rate": 0.1,
        "timm_options": {"embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "method": {
        "teacher": {"momentum": 0.9, "temperature_warmup_epochs": 1},
        "head": {"hidden_dim": 32, "out_dim": 16},
        "memory": {"num_rows": 32, "block_size": 8},
    },
    "optimizer": {"learning_rate": 1e-2},
    "trainer": {
        "epochs": 4,
        "batch_size": 8,
        "precision": "fp32",
        "device": "cpu",
        "log_every_steps": 1,
        "checkpoint_every_steps": 4,
    },
    "probes": {"every_epochs": 1, "max_queries": 16, "num_neighbours": 3},
}


@dataclass(frozen=True)
class Answer:
    status: int
    output: str
    error: str

    @property
    def text(self) -> str:
        """All that a person saw, on one line: messages may be wrapped to the terminal."""
        return " ".join(f"{self.output} {self.error}".replace("│", " ").split())


class Process:
    """A `massl` command that runs beside the test."""

    def __init__(self, server: "ForkServer", pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self._server = server
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._server.ask({"poll": self.pid})["status"]
        return self._status

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds or the process has ended."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while self.poll() is None and not condition():
            if time.monotonic() > deadline:
                os.kill(self.pid, 9)
                pytest.fail(f"massl hangs; it said:\n{self.log.read_text()}")
            time.sleep(0.01)

    def wait(self) -> Answer:
        """Exit status (minus the signal that ended it) and everything it printed."""
        self.wait_until(lambda: False)
        assert self._status is not None
        return Answer(self._status, "", self.log.read_text())


class ForkServer:
    """Client of fork_server.py."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._num_started = 0
        script = Path(__file__).with_name("fork_server.py")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-W", "always::ResourceWarning", str(script)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._started = False

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._started:
            assert json.loads(self._process.stdout.readline()) == {"ready": True}
            self._started = True
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def start(self, *arguments: str | Path, environment: dict[str, str] | None = None, **hooks: list[Any]) -> Process:
        """Start `massl ARGUMENTS` as a process; `hooks` name functions of fork_server.py and their arguments."""
        self._num_started += 1
        log = self._logs / f"{self._num_started}.txt"
        log.touch()
        job = {
            "arguments": [str(argument) for argument in arguments],
            "log": str(log),
            "environment": environment or {},
            "hooks": hooks,
        }
        return Process(self, self.ask(job)["pid"], log)

    def run(self, *arguments: str | Path, **hooks: list[Any]) -> Answer:
        return self.start(*arguments, **hooks).wait()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML recipe as small as it gets: 6 steps an epoch on the images below, 24 steps in all."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY_RECIPE))
    return path


def _images(num_images: int) -> np.ndarray:  # [N, 20, 24, 3]
    """Four kinds of stripes, in noise."""
    generator = np.random.default_rng(0)
    kinds = np.arange(num_images) % 4
    waves = np.sin(np.arange(24)[None, None, :] * (0.4 + 0.5 * kinds[:, None, None]) + np.zeros((1, 20, 1)))
    images = 128 + 80 * waves[..., None] + generator.normal(0, 15, (num_images, 20, 24, 3))
    return images.clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 labelled images as an array."""
    path = tmp_path_factory.mktemp("archive") / "images.npz"
    np.savez(path, images=_images(48), labels=np.arange(48) % 4)
    return path


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_folder("photos", 48, classes=4): PNG files, in class folders if `classes` is given."""

    def make(name: str, num_images: int, *, classes: int = 0) -> Path:
        root = tmp_path / name
        root.mkdir()
        for number, image in enumerate(_images(num_images)):
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


def newest_checkpoint(run: Path) -> dict[str, Any]:
    store = CheckpointStore(run / "checkpoints", keep_last=1)
    return load_checkpoint(store.path(store.steps()[-1]))


def difference(left: Any, right: Any, where: str) -> str | None:
    """The first place where two nested states differ in a single bit."""
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        return None if same else where
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return f"{where}: keys"
        return next((found for key in left if (found := difference(left[key], right[key], f"{where}.{key}"))), None)
    if isinstance(left, Sequence) and not isinstance(left, str):
        if len(left) != len(right):
            return f"{where}: length"
        pairs = enumerate(zip(left, right, strict=True))
        return next((found for number, pair in pairs if (found := difference(*pair, f"{where}[{number}]"))), None)
    return None if left == right else where


def rows_without_time(run: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if key not in TIMING_KEYS}
        for row in read_metrics(run / "metrics.jsonl")
    ]


@dataclass(frozen=True)
class RunReader:
    """What a run left in its folder, and whether two runs left the same."""

    def difference(self, left: Any, right: Any) -> str | None:
        """The first place where two nested states differ in a single bit."""
        return difference(left, right, "")

    def state(self, run: Path) -> dict[str, Any]:
        return newest_checkpoint(run)

    def backbone(self, run: Path) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = safetensors.torch.load_file(run / "backbone.safetensors")
        return weights

    def rows(self, run: Path) -> list[dict[str, float]]:
        return rows_without_time(run)

    def assert_bitwise_equal(self, run: Path, reference: Path) -> None:
        found, expected = newest_checkpoint(run), newest_checkpoint(reference)
        assert {"student", "teacher", "memory"} == {name.partition(".")[0] for name in expected["method"]}
        assert {"memory.rows", "memory.cursor"} <= expected["method"].keys()
        assert expected["optimizer"]["state"]
        assert difference(found, expected, "checkpoint") is None
        assert rows_without_time(run) == rows_without_time(reference)
        assert difference(self.backbone(run), self.backbone(reference), "backbone") is None


@pytest.fixture(scope="session")
def runs() -> RunReader:
    return RunReader()
