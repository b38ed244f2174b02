import pytest

from massl.methods.base import StepHyper, TeacherSettings
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
