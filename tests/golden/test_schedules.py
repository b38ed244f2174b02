"""Schedules against the authors' `cosine_scheduler` (README.md says how the values were made)."""

import json
from pathlib import Path
from typing import Any

import pytest

from massl.methods.base import TeacherSettings
from massl.training.optimizers import OptimizerSettings
from massl.training.schedules import Schedules

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "schedules.json").read_text())


def schedules(*, learning_rate: str) -> Schedules:
    """Those of the recorded arguments; a batch of 256 leaves the learning rate as it is."""
    rate, decay = GOLDEN[learning_rate]["arguments"], GOLDEN["weight_decay"]["arguments"]
    momentum, temperature = GOLDEN["momentum"]["arguments"], GOLDEN["teacher_temperature"]["arguments"]
    assert momentum["final_value"] == 1.0
    return Schedules(
        optimizer=OptimizerSettings(
            learning_rate=rate["base_value"],
            min_learning_rate=rate["final_value"],
            warmup_epochs=rate.get("warmup_epochs", 0),
            weight_decay=decay["base_value"],
            weight_decay_end=decay["final_value"],
        ),
        ramps=TeacherSettings(
            momentum=momentum["base_value"],
            temperature_start=temperature["start_warmup_value"],
            temperature=temperature["base_value"],
            temperature_warmup_epochs=temperature["warmup_epochs"],
        ).ramps(),
        batch_size=256,
        epochs=rate["epochs"],
        steps_per_epoch=rate["niter_per_ep"],
    )


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "momentum", "teacher_temperature"])
def test_every_value_of_every_step_is_that_of_the_authors_code(name: str) -> None:
    values = [getattr(schedules(learning_rate="learning_rate").at(step), name) for step in range(35)]
    assert values == pytest.approx(GOLDEN[name]["values"], rel=1e-12, abs=1e-15)


def test_without_warm_up_the_learning_rate_is_that_of_the_authors_code() -> None:
    plan = schedules(learning_rate="learning_rate_without_warmup")
    assert [plan.at(step).learning_rate for step in range(35)] == pytest.approx(
        GOLDEN["learning_rate_without_warmup"]["values"], rel=1e-12
    )


def test_the_run_is_as_long_as_theirs_and_counts_its_epochs() -> None:
    plan = schedules(learning_rate="learning_rate")
    assert plan.num_steps == len(GOLDEN["momentum"]["values"]) == 35
    assert [plan.at(step).epoch for step in (0, 6, 7, 34)] == [0, 0, 1, 4]
