"""A real browser, and run folders small enough to be written rather than trained."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from massl.commands.recipe import load_recipe
from massl.config import to_yaml
from massl.nn.backbone import build_backbone
from massl.weights.io import backbone_bytes

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
)
SMALL = {
    "views.global_size": 16,
    "views.local_size": 8,
    "backbone.image_size": 16,
    "backbone.patch_size": 4,
    "backbone.timm_options": {"embed_dim": 16, "depth": 2, "num_heads": 2},
}


def _start(temporary: str) -> Any:
    """The browser, or a sentence that says what is missing."""
    program = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        return "needs chromium and chromedriver on the PATH; install chromium and chromium-driver"
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        return "needs selenium: pip install -e '.[dev]'"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver, env=os.environ | {"TMPDIR": temporary}))


@dataclass(frozen=True)
class Browser:
    """What tests ask of the browser."""

    driver: Any

    def open(self, file: Path, *, width: int = 1280, dark: bool = False) -> None:
        """The page, new; messages and requests of pages before it are forgotten."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(file.absolute().as_uri())

    def run(self, script: str, *values: object) -> Any:
        """What a script of the page's returns; `arguments` in it are the values."""
        return self.driver.execute_script(script, *values)

    def press(self, selector: str, key: str | None = None) -> None:
        """Click the first element of a CSS selector, or type a key there."""
        from selenium.webdriver.common.by import By

        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        if key is None:
            element.click()
        else:
            element.send_keys(key)

    def console_errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Addresses of everything that was asked for since `open`."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Skipped where there is none; with MASSL_REQUIRE_BROWSER=1 that is a failure."""
    # Not tmp_path: the name of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # the browser leaves files there
        started = _start(temporary)
        if isinstance(started, str):
            if os.environ.get("MASSL_REQUIRE_BROWSER") == "1":
                pytest.fail(f"MASSL_REQUIRE_BROWSER=1, but this test {started}")
            pytest.skip(started)
        yield Browser(started)
        started.quit()


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of 16 px in three classes."""
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 3
    waves = np.sin(np.arange(16)[None, None, :] * (0.3 + 0.5 * labels[:, None, None]) + np.zeros((1, 16, 1)))
    pixels = 128 + 80 * waves[..., None] + generator.normal(0, 15, (60, 16, 16, 3))
    path = tmp_path_factory.mktemp("images") / "images.npz"
    np.savez(path, images=pixels.clip(0, 255).astype(np.uint8), labels=labels)
    return path


@pytest.fixture(scope="session")
def write_run(images: Path) -> Callable[..., Path]:
    """write_run(folder, {"trainer.epochs": 3}, shift=0.1): a run folder as massl pretrain leaves it, with an untrained
    backbone.
    """

    def write(
        folder: Path, changes: Mapping[str, Any] | None = None, *, shift: float = 0.0, has_backbone: bool = True
    ) -> Path:
        folder.mkdir(parents=True)
        values = {
            "data.source": str(images),
            "probes.database": "",
            "probes.queries": "",
            **SMALL,
            "trainer.epochs": 10,
            **(changes or {}),
        }
        recipe = load_recipe("demo-vit", values)
        (folder / "recipe.yaml").write_text(to_yaml(recipe))
        rows = [_row(epoch, shift) for epoch in range(11)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        environment = {
            "command": ["massl", "pretrain", "--recipe", "demo-vit", "--output", folder.name],
            "python": "3.12.3",
            "packages": {"massl": "0.1.0", "torch": "2.11.0"},
            "device": "NVIDIA H200",
            "world_size": 1,
        }
        (folder / "environment.json").write_text(json.dumps(environment))
        if has_backbone:
            backbone = build_backbone(recipe.backbone, seed=0)
            weights = backbone_bytes(
                backbone.model,
                timm_arguments=backbone.timm_arguments,
                mean=recipe.views.mean,
                std=recipe.views.std,
                image_size=recipe.views.global_size,
            )
            (folder / "backbone.safetensors").write_bytes(weights)
        return folder

    return write


def _row(epoch: int, shift: float) -> dict[str, float]:
    return {
        "step": 10 * epoch,
        "epoch": epoch,
        "loss": 6.0 * math.exp(-epoch / 5) + shift,
        "lr": 1e-3 * epoch / 10,
        "weight_decay": 0.04,
        "images_per_second": 0.0 if epoch == 0 else 1000.0 + 100 * shift,
        "effective_rank": 20.0 + epoch + shift,
        "teacher_entropy": 7.0 - 0.2 * epoch,
        "knn_top1": 30.0 + 4 * epoch - 10 * shift,
    }
