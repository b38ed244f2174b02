"""Two processes write the files that one process writes, each its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import backbone_bytes


@pytest.mark.slow
def test_two_processes_write_what_one_does_and_fail_together(start_ranks: Any, massl_here: Any, tmp_path: Path) -> None:
    options: dict[str, int | float | bool | str] = {"embed_dim": 256, "depth": 1, "num_heads": 2}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=16, patch_size=1, timm_options=options)
    backbone = build_backbone(settings, seed=0)
    facts: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "image_size": 16}
    model = tmp_path / "backbone.safetensors"
    model.write_bytes(backbone_bytes(backbone.model, timm_arguments=backbone.timm_arguments, **facts))
    pixels = np.random.default_rng(0).integers(0, 256, (35, 16, 16, 3)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels)

    def given(out: str, *more: str) -> list[str | Path]:
        words = [
            "--feature",
            "patches",
            "--file_mib",
            "1",
            "--batch_size",
            "3",
            "--num_workers",
            "1",
            "--device",
            "cpu",
        ]
        return ["embed", model, "--data", tmp_path / "images.npz", "--output", tmp_path / out, *words, *more]

    def contents(folder: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((tmp_path / folder).iterdir())}

    answers = [process.wait() for process in start_ranks(2, *given("two"))]
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert not answers[1].text  # only the first process talks
    assert massl_here(*given("one")).status == 0
    assert len(contents("one")) == 5 + 1  # one process has three files to write, the other two
    assert contents("two") == contents("one")
    (tmp_path / "two" / "patches-00003.safetensors").write_bytes(b"")
    answers = [process.wait() for process in start_ranks(2, *given("two"))]
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert contents("two") == contents("one")
    answers = [process.wait() for process in start_ranks(2, *given("two", "--crop_ratio", "0.5"))]
    assert [answer.status for answer in answers] == [1, 1]
    assert "made with crop ratio" in answers[0].text
