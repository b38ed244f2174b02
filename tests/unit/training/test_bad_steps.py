"""Numbers that are not finite: noticed in their step, named, never in the weights, left out where that is allowed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from massl.data.views import ViewBatch
from massl.methods.base import StepHyper, StepOutput
from massl.methods.massl import MaSSL
from massl.training.bad_steps import TrainingStopped
from massl.training.metrics_log import read_metrics
from tests.unit.training.test_trainer import assert_equal, checkpoint, fit, rows_without_timing, trainer

FC1 = "student.backbone.model.blocks.1.mlp.fc1"
PLACES = {
    "output": f"the output of {FC1}",
    "gradient": f"that of the output of {FC1}",
    "weight": f"{FC1}.weight",
    "teacher": "the output of teacher.backbone.model.blocks.0.attn",
    "loss": "the loss",
    "buffer": "memory.rows",
}


class Broken(MaSSL):
    """Has a number that is not finite at one step (or at some), in one place."""

    at_steps: tuple[int, ...] = (4,)
    place, value = "output", math.nan

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        self._is_bad = int(hyper.step) in self.at_steps
        handles = []
        if self._is_bad and self.place in ("output", "gradient", "teacher"):
            name = "teacher.backbone.model.blocks.0.attn" if self.place == "teacher" else FC1
            handles.append(self.get_submodule(name).register_forward_hook(self._spoil, prepend=True))
        if self._is_bad and self.place in ("weight", "buffer"):
            with torch.no_grad():
                (self.get_parameter(f"{FC1}.weight") if self.place == "weight" else self.memory.rows)[0, 0] = self.value
        output = super().forward(views, hyper)
        for handle in handles:
            handle.remove()
        if self._is_bad and self.place == "loss":
            return StepOutput(loss=output.loss + self.value, metrics=output.metrics, carry=output.carry)
        return output

    def _spoil(self, module: object, given: object, output: Tensor) -> Tensor:
        if self.place == "gradient":
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * self.value)
            return output
        return output * self.value


def broken(place: str, *steps: int, value: float = math.nan) -> type[Broken]:
    return type("Broken", (Broken,), {"place": place, "at_steps": steps or (4,), "value": value})


def skips_in(run: Path) -> list[str]:
    """The warnings about steps that were left out."""
    return [line for line in (run / "warnings.jsonl").read_text().splitlines() if "step is left out" in line]


@pytest.mark.parametrize(("place", "value"), [*((place, math.nan) for place in PLACES), ("output", math.inf)])
def test_the_run_stops_in_that_step_and_names_the_place(tmp_path: Path, place: str, value: float) -> None:
    with pytest.raises(TrainingStopped) as caught:
        fit(tmp_path, method_type=broken(place, value=value), trainer__checkpoint_every_steps=2)
    message = str(caught.value)
    assert "step 4" in message
    assert PLACES[place] in message
    assert "checkpoint, step 4, is untouched" in message
    assert "--trainer.skip_bad_steps 1" in message
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert PLACES[place] in json.loads((tmp_path / "nonfinite_step_4_rank_0.json").read_text())["origin"]


@pytest.mark.parametrize(
    ("place", "changes"),
    [("output", {}), ("gradient", {"trainer__accumulation_steps": 2}), ("loss", {"optimizer__name": "sgd"})],
    ids=str,
)
def test_a_step_that_is_left_out_changes_nothing_but_the_step_number(
    tmp_path: Path, place: str, changes: dict[str, Any]
) -> None:
    run = trainer(tmp_path, method_type=broken(place), trainer__skip_bad_steps=1, **changes)
    states: dict[int, dict[str, Any]] = {}
    update = run._update

    def watched(images: Any, hyper: StepHyper) -> StepOutput:
        def copied() -> dict[str, Any]:
            state = {"method": run.method.state_dict(), "optimizer": run.optimizer.portable_state()}
            return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)

        before = copied()
        output = update(images, hyper)
        states[int(hyper.step)] = {"before": before, "after": copied()}
        return output

    run._update = watched  # type: ignore[method-assign]
    assert run.fit().finished
    assert_equal(states[4]["before"], states[4]["after"])
    with pytest.raises(AssertionError):
        assert_equal(states[5]["before"], states[5]["after"])
    assert ["1 of at most 1" in warning for warning in skips_in(tmp_path)] == [True]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("skipped_steps") for row in rows] == [None] * 5 + [1, 1]
    assert checkpoint(tmp_path, 6)["skipped_steps"] == [4]


@pytest.mark.parametrize("stops", [(3,), (2, 5)], ids=str)
def test_a_run_that_leaves_steps_out_is_continued_bit_for_bit(tmp_path: Path, stops: tuple[int, ...]) -> None:
    faulty = {"method_type": broken("output", 2, 4), "trainer__skip_bad_steps": 2}
    fit(tmp_path / "straight", **faulty)
    for max_steps in (*stops, None):
        fit(tmp_path / "stopped", trainer__max_steps=max_steps, **faulty)
    assert_equal(checkpoint(tmp_path / "stopped", 6), checkpoint(tmp_path / "straight", 6))
    straight, stopped = (rows_without_timing(tmp_path / name) for name in ("straight", "stopped"))
    for row, wanted in zip(stopped, straight, strict=True):  # the probe at max_steps counts as one that did not rise
        assert {**row, "flat_probes": wanted.get("flat_probes")}.items() >= wanted.items()
    straight_skips, skips = (skips_in(tmp_path / name) for name in ("straight", "stopped"))
    assert [skip.replace("straight", "stopped") for skip in straight_skips] == skips
    assert len(skips) == 2


def test_one_more_than_allowed_ends_the_run_also_across_restarts_and_more_may_be_allowed_then(tmp_path: Path) -> None:
    faulty = {"method_type": broken("output", 1, 3), "trainer__checkpoint_every_steps": 1}
    fit(tmp_path, trainer__max_steps=2, trainer__skip_bad_steps=1, **faulty)
    with pytest.raises(TrainingStopped, match=r"skip_bad_steps 2 "):
        fit(tmp_path, trainer__skip_bad_steps=1, **faulty)
    assert fit(tmp_path, trainer__skip_bad_steps=2, **faulty).finished
    assert checkpoint(tmp_path, 6)["skipped_steps"] == [1, 3]


def test_the_first_batch_may_be_left_out_too(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match="loss of step 0"):
        fit(tmp_path / "stops", method_type=broken("output", 0))
    assert fit(tmp_path / "goes on", method_type=broken("output", 0), trainer__skip_bad_steps=1).finished
    rows = read_metrics(tmp_path / "goes on" / "metrics.jsonl")
    assert ["loss" in row for row in rows] == [False, False, True, True, True, True, True]


def test_without_bad_steps_the_option_changes_nothing(tmp_path: Path) -> None:
    for name, skip in (("none", 0), ("some", 3)):
        fit(tmp_path / name, trainer__skip_bad_steps=skip)
    assert_equal(checkpoint(tmp_path / "none", 6), checkpoint(tmp_path / "some", 6))
    assert rows_without_timing(tmp_path / "none") == rows_without_timing(tmp_path / "some")


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path, trainer__checkpoint_every_steps=2)
    after_step = run.method.after_step

    def spoiled(output: StepOutput, hyper: StepHyper) -> None:
        after_step(output, hyper)
        if hyper.step == 3:
            with torch.no_grad():
                next(run.method.teacher.parameters()).view(-1)[0] = math.inf  # type: ignore[union-attr,operator]

    run.method.after_step = spoiled  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match=r"teacher\..*checkpoint, step 2,"):
        run.fit()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000000002.pt"]


def test_blocks_of_one_row_train_without_an_error_and_learn_nothing(tmp_path: Path) -> None:
    assert fit(tmp_path, method__memory__block_size=1, trainer__batch_size=26).finished  # larger than the memory, too
    losses = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses == pytest.approx([0.0] * len(losses), abs=1e-6)
