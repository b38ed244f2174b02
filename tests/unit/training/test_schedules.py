from dataclasses import replace
from typing import Any

import pytest

from massl.methods.base import StepHyper, TeacherSettings
from massl.training.init_settings import InitSettings
from massl.training.optimizers import OptimizerSettings
from massl.training.schedules import Schedules, cosine, warm_up


def schedules(
    *, epochs: int = 10, warmup_epochs: float = 0.0, temperature_warmup_epochs: float = 2.0, batch_size: int = 512
) -> Schedules:
    return Schedules(
        optimizer=OptimizerSettings(learning_rate=5e-4, min_learning_rate=1e-6, warmup_epochs=warmup_epochs),
        ramps=TeacherSettings(momentum=0.9, temperature_warmup_epochs=temperature_warmup_epochs).ramps(),
        batch_size=batch_size,
        epochs=epochs,
        steps_per_epoch=100,
    )


def test_every_value_starts_where_the_settings_say() -> None:
    assert schedules().at(0) == StepHyper(
        step=0,
        epoch=0,
        learning_rate=pytest.approx(1e-3),
        weight_decay=pytest.approx(0.04),
        own={"momentum": pytest.approx(0.9), "teacher_temperature": 0.04},
    )


def test_every_value_ends_just_short_of_its_end() -> None:
    last = schedules().at(999)
    assert 1e-6 < last.learning_rate < 1.01e-6
    assert 0.3999 < last.weight_decay < 0.4
    assert 0.999999 < last.momentum < 1.0
    assert last.teacher_temperature == 0.07
    assert last.epoch == 9


def test_halfway_a_cosine_is_in_the_middle() -> None:
    assert cosine(50, start=1.0, end=3.0, num_steps=100) == pytest.approx(2.0)
    assert schedules().at(500).momentum == pytest.approx(0.95)


def test_the_learning_rate_is_scaled_by_the_batch_and_its_end_is_not() -> None:
    small, large = schedules(batch_size=256), schedules(batch_size=1024)
    assert large.at(0).learning_rate == pytest.approx(4 * small.at(0).learning_rate) == pytest.approx(2e-3)
    assert large.at(999).learning_rate < 1.02e-6


def test_a_warm_up_rises_linearly_from_zero_and_reaches_the_peak() -> None:
    plan = schedules(warmup_epochs=2)
    rates = [plan.at(step).learning_rate for step in range(203)]
    assert rates[0] == 0.0
    assert rates[199] == rates[200] == pytest.approx(1e-3)  # the authors' convention: the peak occurs twice
    assert rates[:200] == pytest.approx([1e-3 * step / 199 for step in range(200)])
    assert rates[201] < rates[200]


def test_the_teacher_temperature_rises_per_step_and_then_stays() -> None:
    plan = schedules(temperature_warmup_epochs=2)
    assert plan.at(100).teacher_temperature == pytest.approx(0.04 + 0.03 * 100 / 199)
    assert (
        plan.at(199).teacher_temperature
        == plan.at(200).teacher_temperature
        == plan.at(900).teacher_temperature
        == pytest.approx(0.07)
    )
    assert schedules(temperature_warmup_epochs=0).at(0).teacher_temperature == 0.07


@pytest.mark.parametrize("warmup_epochs", [10.0, 11.0, 1e6])
def test_a_warm_up_as_long_as_the_run_or_longer_never_crashes(warmup_epochs: float) -> None:
    plan = schedules(warmup_epochs=warmup_epochs, temperature_warmup_epochs=warmup_epochs)
    values = [plan.at(step) for step in range(plan.num_steps)]
    assert all(
        0.0 <= hyper.learning_rate <= 1e-3 * (1 + 1e-12) and 0.04 <= hyper.teacher_temperature <= 0.07
        for hyper in values
    )


def test_a_warm_up_of_a_single_step_starts_at_its_start() -> None:
    assert warm_up(0, start=0.0, end=1.0, num_steps=1) == 0.0
    assert schedules(warmup_epochs=0.01).at(0).learning_rate == 0.0
    assert schedules(warmup_epochs=0.01).at(1).learning_rate == pytest.approx(1e-3)


def resolved(given: InitSettings, **facts: Any) -> InitSettings:
    known: dict[str, Any] = {
        "weights": "a",
        "has_head": False,
        "is_transformer": True,
        "keeps_statistics": False,
        "epochs": 10,
    }
    return given.resolved(**{**known, **facts})


def continued(**init: object) -> Schedules:
    given = InitSettings.model_validate({"head_epochs": 1.5, "learning_rate_factor": 0.2, **init})
    return replace(schedules(), init=resolved(given, has_head=given.part == "all"))


def test_the_head_learns_first_at_the_full_rate_and_the_backbone_warms_up_to_a_lower_one() -> None:
    own = continued()
    assert own.num_head_steps == 150
    assert [own.at(step).trains_backbone for step in (0, 149, 150)] == [False, False, True]
    assert 0.0 < own.at(0).learning_rate < 1e-3
    assert own.at(149).learning_rate == pytest.approx(1e-3)
    assert own.at(150).learning_rate == 0.0  # AdamW's averages of the backbone are empty
    rates = [own.at(step).learning_rate for step in range(150, 1000)]
    assert max(rates) == pytest.approx(2e-4)
    assert rates[-1] == pytest.approx(1e-6, rel=0.02)
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_weight_decay_and_momentum_run_over_both_phases() -> None:
    for step in (0, 150, 999):
        assert continued().at(step).weight_decay == schedules().at(step).weight_decay
        assert continued().at(step).momentum == schedules().at(step).momentum


def test_a_head_that_is_taken_has_its_temperature_warm_up_behind_it() -> None:
    assert continued().at(0).teacher_temperature == 0.04
    assert continued(part="all").at(0).teacher_temperature == 0.07


def test_without_weights_the_other_values_have_no_effect() -> None:
    given = InitSettings(part="all", head_epochs=2.0, layer_decay=0.5, learning_rate_factor=0.1)
    for step in (0, 50, 999):
        assert replace(schedules(), init=given).at(step) == schedules().at(step)


@pytest.mark.parametrize(("epochs", "head_epochs"), [(4, 0.4), (300, 10.0)])
def test_a_new_head_gets_a_tenth_of_the_run_and_at_most_ten_epochs(epochs: int, head_epochs: float) -> None:
    new = resolved(InitSettings(), epochs=epochs)
    assert (new.part, new.head_epochs, new.fill_memory) == ("backbone", pytest.approx(head_epochs), True)
    taken = resolved(InitSettings(), has_head=True, epochs=epochs)
    assert (taken.part, taken.head_epochs, taken.fill_memory) == ("all", 0.0, None)


def test_only_transformers_of_other_recipes_learn_at_lower_rates() -> None:
    for has_head, is_transformer, expected in (
        (False, True, (0.75, 0.2)),
        (False, False, (1, 1)),
        (True, True, (1, 1)),
    ):
        found = resolved(InitSettings(), has_head=has_head, is_transformer=is_transformer)
        assert (found.layer_decay, found.learning_rate_factor) == expected
    given = resolved(InitSettings(layer_decay=0.9, learning_rate_factor=0.5), has_head=True)
    assert (given.layer_decay, given.learning_rate_factor) == (0.9, 0.5)
