import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from massl import distributed
from massl.commands.recipe import PretrainRecipe
from massl.config import RecipeError, merge, validate
from massl.data.loading.loader import Loader
from massl.data.order import EpochOrder
from massl.data.sources.array import ArraySource
from massl.data.views import ViewBatch
from massl.methods.base import StepHyper, StepOutput
from massl.methods.massl import MaSSL
from massl.training import checkpoint_times, probes
from massl.training.bad_steps import TrainingStopped
from massl.training.checkpoint import load_checkpoint
from massl.training.metrics_log import TIMING_KEYS, read_metrics
from massl.training.probes import Probe
from massl.training.progress import ProgressDisplay
from massl.training.run_folder import RunFolder
from massl.training.schedules import Schedules
from massl.training.settings import TrainerSettings
from massl.training.stop_request import StepAbandoned
from massl.training.trainer import FitResult, Trainer
from massl.weights.io import BACKBONE_FILE

SOURCE = ArraySource(
    name="noise",
    pixels=np.random.default_rng(0).integers(0, 256, (26, 10, 10, 3), dtype=np.uint8),
    labels=np.arange(26) % 2,
    class_names=("even", "odd"),
    key_prefix="noise",
)
RECIPE: dict[str, Any] = {
    "data": {"num_workers": 0},
    "views": {"global_size": 8, "local_size": 4, "num_local": 1},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "image_size": 8,
        "patch_size": 4,
        "drop_path_rate": 0.3,
        "timm_options": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    },
    "method": {"head": {"hidden_dim": 16, "out_dim": 8}, "memory": {"num_rows": 24, "block_size": 8}},
    "optimizer": {"learning_rate": 0.01},
    "trainer": {"epochs": 2, "batch_size": 8, "precision": "fp32", "device": "cpu", "log_every_steps": 1},
    "probes": {"every_epochs": 1, "num_neighbours": 3},
}  # three steps an epoch, six in all


class Faulty(MaSSL):
    """Does at one step what must never happen, or asks to stop after it."""

    at_step, fault = 4, "loss"

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        output = super().forward(views, hyper)
        if hyper.step != self.at_step or self.fault == "signal":
            return output
        # A loss of 0 / 0, or a finite loss whose gradient is not.
        bad = output.loss * float("nan") if self.fault == "loss" else output.loss + 0.0 * torch.sqrt(0.0 * output.loss)
        return StepOutput(loss=bad, metrics=output.metrics, carry=output.carry)

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        super().after_step(output, hyper)
        if hyper.step == self.at_step and self.fault == "signal":
            signal.raise_signal(signal.SIGTERM)


def trainer(output: Path, *, method_type: type[MaSSL] = MaSSL, **changes: Any) -> Trainer:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    recipe = validate(PretrainRecipe, merge(RECIPE, dotted, PretrainRecipe), origin="test")
    settings = recipe.trainer
    order = EpochOrder(num_images=len(SOURCE), batch_size=settings.batch_size, seed=settings.seed)
    folder = RunFolder(output, recipe)
    output.mkdir(parents=True, exist_ok=True)
    probe = Probe(
        recipe.probes,
        data=recipe.data,
        views=recipe.views,
        training_source=SOURCE,
        seed=0,
        device=torch.device("cpu"),
        on_skip=print,
    )
    return Trainer(
        settings,
        method=method_type(recipe.method, recipe.backbone, seed=settings.seed),
        loader=Loader(SOURCE, order_at=order.at, seed=0, num_workers=0, max_side=64, on_skip=print),
        views=recipe.views,
        schedules=Schedules(
            optimizer=recipe.optimizer,
            ramps=recipe.method.ramps(),
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            steps_per_epoch=order.steps_per_epoch,
        ),
        probe=probe,
        crop_ratio=recipe.probes.crop_ratio,
        folder=folder,
        device=torch.device("cpu"),
    )


def fit(output: Path, **changes: Any) -> FitResult:
    return trainer(output, **changes).fit()


def checkpoint(output: Path, step: int) -> dict[str, Any]:
    return load_checkpoint(output / "checkpoints" / f"step_{step:09d}.pt")


def rows_without_timing(output: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if key not in TIMING_KEYS}
        for row in read_metrics(output / "metrics.jsonl")
    ]


def assert_equal(first: Any, second: Any, where: str = "checkpoint") -> None:
    """Plain values and tensors, bit for bit."""
    assert type(first) is type(second), where
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_equal(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for position, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal(one, other, f"{where}.{position}")
    else:
        assert first == second, where


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("straight")
    assert fit(output) == FitResult(step=6, finished=True, signal_number=None)
    return output


def test_a_run_logs_every_step_and_leaves_a_checkpoint_and_a_backbone(straight_run: Path) -> None:
    rows = read_metrics(straight_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["epoch"] for row in rows] == [0, 0, 0, 1, 1, 1, 2]
    assert [row["step"] for row in rows if "knn_top1" in row] == [0, 3, 6]
    # the row of step 0 is the first batch, before training
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
    assert checkpoint(straight_run, 6)["step"] == 6
    assert (straight_run / "backbone.safetensors").is_file()


def test_the_checkpoint_holds_the_networks_the_memory_and_the_optimiser(straight_run: Path) -> None:
    state = checkpoint(straight_run, 6)
    assert {key.split(".")[0] for key in state["method"]} == {"student", "teacher", "memory"}
    assert int(state["method"]["memory.cursor"]) == 6 * 8 % 24
    assert len(state["optimizer"]["state"]) == sum(key.startswith("student.") for key in state["method"])


@pytest.mark.parametrize("stops", [(2,), (3,), (1, 4)])
def test_a_run_that_was_stopped_and_continued_is_the_same_bit_for_bit(
    straight_run: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    for max_steps in stops:
        assert fit(tmp_path, trainer__max_steps=max_steps).step == max_steps
    assert fit(tmp_path).step == 6
    assert_equal(checkpoint(tmp_path, 6), checkpoint(straight_run, 6))
    expected = rows_without_timing(straight_run)
    # A run that ends at a step probes there, so that row says more, and that probe counts as one that did not rise;
    # what else both say is the same.
    for row, wanted in zip(rows_without_timing(tmp_path), expected, strict=True):
        assert {**row, "flat_probes": wanted.get("flat_probes")}.items() >= wanted.items()
    assert (tmp_path / "best.safetensors").read_bytes() == (straight_run / "best.safetensors").read_bytes()


def test_a_run_with_a_held_teacher_continues_bit_for_bit(tmp_path: Path) -> None:
    held = {"method__teacher__entropy": 1.0}
    assert fit(tmp_path / "straight", **held).step == 6
    fit(tmp_path / "stopped", trainer__max_steps=3, **held)
    fit(tmp_path / "stopped", **held)
    state = checkpoint(tmp_path / "straight", 6)
    assert "held_temperature.logarithm" in state["method"]
    assert_equal(checkpoint(tmp_path / "stopped", 6), state)


def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint_to_go_on_from(
    straight_run: Path, tmp_path: Path
) -> None:
    class Interrupted(Faulty):
        at_step, fault = 1, "signal"

    assert fit(tmp_path, method_type=Interrupted) == FitResult(step=2, finished=False, signal_number=signal.SIGTERM)
    assert fit(tmp_path) == FitResult(step=6, finished=True, signal_number=None)
    assert_equal(checkpoint(tmp_path, 6), checkpoint(straight_run, 6))


class Counting(MaSSL):
    """Has a buffer that forward passes change, as the running averages of batch norm in a ResNet."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        self.num_passes += 1
        return super().forward(views, hyper)


class StoppedInPart(Counting):
    """Asks to stop in the first part of step 3."""

    at_pass = 2 + 2 * 3 + 1  # two parts a batch, the one before training too

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        output = super().forward(views, hyper)
        if self.num_passes == self.at_pass:
            signal.raise_signal(signal.SIGINT)
        return output


def test_a_signal_between_parts_abandons_the_step_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"trainer__accumulation_steps": 2}
    fit(tmp_path / "straight", method_type=Counting, **changes)
    stopped = fit(tmp_path / "stopped", method_type=StoppedInPart, **changes)
    assert stopped == FitResult(step=3, finished=False, signal_number=signal.SIGINT)
    assert "stopping after this part of the step" in capsys.readouterr().err
    assert int(checkpoint(tmp_path / "stopped", 3)["method"]["num_passes"]) == 2 + 2 * 3
    assert fit(tmp_path / "stopped", method_type=Counting, **changes).finished
    assert_equal(checkpoint(tmp_path / "stopped", 6), checkpoint(tmp_path / "straight", 6))
    assert rows_without_timing(tmp_path / "stopped") == rows_without_timing(tmp_path / "straight")


def test_a_signal_before_the_first_step_saves_nothing_and_the_run_begins_anew(tmp_path: Path) -> None:
    class StoppedAtStart(StoppedInPart):
        at_pass = 1

    changes = {"trainer__accumulation_steps": 2}
    stopped = fit(tmp_path / "stopped", method_type=StoppedAtStart, **changes)
    assert stopped == FitResult(step=0, finished=False, signal_number=signal.SIGINT)
    assert not (tmp_path / "stopped" / "checkpoints").exists()
    fit(tmp_path / "straight", method_type=Counting, **changes)
    assert fit(tmp_path / "stopped", method_type=Counting, **changes).finished
    assert_equal(checkpoint(tmp_path / "stopped", 6), checkpoint(tmp_path / "straight", 6))


def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven images at once: the 13 queries and the 13 images of the database are two batches each."""
    monkeypatch.setattr(probes, "_CPU_CHUNK_PIXELS", 7 * 8 * 8)


class StoppedInProbe(MaSSL):
    """Asks to stop while the images of a probe go through the network."""

    at_probe = 0  # the first probe is made before training

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.num_passes = 0
        self.backbone_to_evaluate().register_forward_hook(self._count)

    def _count(self, backbone: nn.Module, *_: Any) -> None:
        if not backbone.training:
            self.num_passes += 1
            # Two batches of queries, seen twice, and two of the database.
            if self.num_passes == 6 * self.at_probe + 1:
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("at_probe", "step"), [(0, 0), (1, 3), (2, 6)])
def test_a_signal_in_a_probe_ends_it_between_batches_and_the_probe_is_made_on_continuing(
    at_probe: int, step: int, straight_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Stopped(StoppedInProbe):
        pass

    Stopped.at_probe = at_probe
    small_batches(monkeypatch)
    run = trainer(tmp_path, method_type=Stopped)
    assert run.fit() == FitResult(step=step, finished=False, signal_number=signal.SIGINT)
    assert run.method.num_passes == 6 * at_probe + 2, "the rest of the probe was made after the signal"
    assert "stopping after this batch of the probe" in capsys.readouterr().err
    assert run.store.steps() == ([step] if step else [])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(step))
    monkeypatch.undo()

    assert fit(tmp_path) == FitResult(step=6, finished=True, signal_number=None)
    assert_equal(checkpoint(tmp_path, 6), checkpoint(straight_run, 6))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(7))
    monkeypatch.setattr(MaSSL, "after_step", None)
    assert fit(tmp_path) == FitResult(step=6, finished=True, signal_number=None)  # nothing is left to do


def test_rows_of_a_run_stopped_in_a_probe_are_those_of_a_straight_run(
    straight_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(StoppedInProbe):
        at_probe = 1

    small_batches(monkeypatch)
    fit(tmp_path / "straight")
    assert fit(tmp_path / "stopped", method_type=Stopped).step == 3
    fit(tmp_path / "stopped")
    assert rows_without_timing(tmp_path / "stopped") == rows_without_timing(tmp_path / "straight")


def test_several_processes_leave_a_step_between_its_parts_and_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"trainer__accumulation_steps": 2, "probes__every_epochs": 100}
    fit(tmp_path / "straight", **changes)
    run = trainer(tmp_path / "stopped", **changes)
    answers = iter([0] * 12 + [signal.SIGUSR1])
    monkeypatch.setattr(run.stop, "agreed", lambda now=False: next(answers))
    stopped = run.fit()
    assert (stopped.finished, stopped.signal_number) == (False, signal.SIGUSR1)
    assert run.store.steps() == [stopped.step]
    assert fit(tmp_path / "stopped", **changes).finished
    assert_equal(checkpoint(tmp_path / "stopped", 6), checkpoint(tmp_path / "straight", 6))


def test_several_processes_leave_a_probe_when_one_of_them_received_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "start_largest", lambda numbers, device: lambda: [signal.SIGTERM, 0])
    with pytest.raises(StepAbandoned) as raised:
        run._write_row({"step": 3.0}, run.schedules.at(2), probe=True)
    assert (raised.value.step, raised.value.signal_number) == (3, signal.SIGTERM)
    assert run.stop.received is None  # it was another one


def test_every_step_and_part_is_shown_not_only_logged_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []
    monkeypatch.setattr(ProgressDisplay, "advance", lambda self, steps, loss: shown.append(steps))
    fit(tmp_path, trainer__accumulation_steps=2, trainer__log_every_steps=100, trainer__max_steps=2)
    assert shown[2:] == [0.0, 0.5, 1, 1.0, 1.5, 2]  # the first two are of the batch before training


class Slow(MaSSL):
    """Takes four minutes a step by the clock of the checkpoints; killed at one step, it saves nothing more."""

    now, killed_at = 0.0, -1

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        if hyper.step == self.killed_at:
            raise MemoryError
        super().after_step(output, hyper)
        Slow.now += 240.0


@pytest.mark.parametrize(("minutes", "steps"), [(10, [3, 6]), (5, [2, 4, 6]), (0, [6])])
def test_a_slow_run_saves_after_some_minutes(
    minutes: float, steps: list[int], straight_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_times, "time", SimpleNamespace(monotonic=lambda: Slow.now))
    options = {"trainer__checkpoint_every_minutes": minutes, "trainer__keep_checkpoints": 9}
    run = trainer(tmp_path, method_type=Slow, **options)
    run.fit()
    assert run.store.steps() == steps
    assert_equal(checkpoint(tmp_path, 6), checkpoint(straight_run, 6))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_slow_run_that_is_killed_continues_bit_for_bit_from_its_last_minutes(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Slow):
        killed_at = 5

    monkeypatch.setattr(checkpoint_times, "time", SimpleNamespace(monotonic=lambda: Slow.now))
    changes = {"trainer__accumulation_steps": parts}
    fit(tmp_path / "straight", **changes)
    killed = trainer(tmp_path / "killed", method_type=Killed, trainer__checkpoint_every_minutes=15, **changes)
    with pytest.raises(MemoryError):
        killed.fit()
    assert killed.store.steps() == [4]
    assert fit(tmp_path / "killed", **changes).finished
    assert_equal(checkpoint(tmp_path / "killed", 6), checkpoint(tmp_path / "straight", 6))
    assert rows_without_timing(tmp_path / "killed") == rows_without_timing(tmp_path / "straight")


def test_a_finished_run_does_nothing_when_started_again(straight_run: Path) -> None:
    before = {path: path.read_bytes() for path in straight_run.rglob("*") if path.is_file()}
    assert fit(straight_run) == FitResult(step=6, finished=True, signal_number=None)
    assert {path: path.read_bytes() for path in straight_run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("what", ["weight", "memory", "recipe"])
def test_a_newest_checkpoint_that_lacks_an_entry_is_left_for_the_one_before(
    straight_run: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, trainer__checkpoint_every_steps=1, trainer__max_steps=4)
    newest = tmp_path / "checkpoints" / "step_000000004.pt"
    state = load_checkpoint(newest)
    entries = state if what == "recipe" else state["method"]
    del entries[next(key for key in entries if what in key)]
    torch.save(state, newest)
    fit(tmp_path, trainer__checkpoint_every_steps=1)
    assert f"{newest} lacks" in "".join(capsys.readouterr().err.split("\n"))
    assert_equal(checkpoint(tmp_path, 6), checkpoint(straight_run, 6))


@pytest.mark.parametrize("damage", ["missing", "empty", "changed"])
def test_a_damaged_backbone_is_written_anew_when_the_run_is_started_again(
    straight_run: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(straight_run, tmp_path, dirs_exist_ok=True)
    path = tmp_path / BACKBONE_FILE
    content = path.read_bytes()
    path.write_bytes({"missing": b"", "empty": b"", "changed": content[:-1] + b"\7"}[damage])
    if damage == "missing":
        path.unlink()
    assert fit(tmp_path).finished
    assert path.read_bytes() == content


def test_a_continued_run_writes_the_same_bytes(straight_run: Path, tmp_path: Path) -> None:
    fit(tmp_path, trainer__max_steps=3)
    fit(tmp_path)
    for name in ("checkpoints/step_000000006.pt", BACKBONE_FILE):
        assert (tmp_path / name).read_bytes() == (straight_run / name).read_bytes(), name


def test_batches_in_parts_train_the_same_networks(straight_run: Path, tmp_path: Path) -> None:
    fit(tmp_path, trainer__accumulation_steps=2)
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == pytest.approx(
        [row["loss"] for row in read_metrics(straight_run / "metrics.jsonl")], rel=1e-4
    )
    memory, expected = (checkpoint(folder, 6)["method"]["memory.rows"] for folder in (tmp_path, straight_run))
    torch.testing.assert_close(memory, expected, rtol=0, atol=1e-3)


def test_activation_checkpointing_trains_the_same_networks_bit_for_bit(straight_run: Path, tmp_path: Path) -> None:
    fit(tmp_path, trainer__activation_checkpointing=True)
    assert_equal(checkpoint(tmp_path, 6), checkpoint(straight_run, 6))


def test_a_checkpoint_of_another_recipe_is_refused(straight_run: Path, tmp_path: Path) -> None:
    fit(tmp_path, trainer__max_steps=1)
    with pytest.raises(
        RecipeError,
        match=r"optimizer\.learning_rate was 0\.01, now 0\.02.*--output",
    ):
        fit(tmp_path, optimizer__learning_rate=0.02)


def test_a_batch_that_cannot_be_split_evenly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r"trainer\.batch_size 8.*multiple of 3",
    ):
        trainer(tmp_path, trainer__accumulation_steps=3)


def test_checkpoints_come_as_often_as_asked_and_milestones_stay(tmp_path: Path) -> None:
    fit(tmp_path, trainer__checkpoint_every_steps=1, trainer__keep_checkpoints=1, trainer__milestone_every_epochs=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_000000003.pt",
        "step_000000006.pt",
    ]


def test_a_loss_that_is_no_number_stops_the_run_and_names_its_images(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingStopped,
        match=r"loss of step 4 is nan.*checkpoint, step 3,",
    ):
        fit(tmp_path, method_type=Faulty, trainer__checkpoint_every_steps=3)
    named = json.loads((tmp_path / "nonfinite_step_4_rank_0.json").read_text())
    order = EpochOrder(num_images=len(SOURCE), batch_size=8, seed=0)
    assert named == {
        "step": 4,
        "origin": "the first that is not finite is the loss",
        "images": [f"noise/{index}" for index in order.at(4).tolist()],
    }
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000000003.pt"]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("at_step", [3, 5], ids=["between probes", "before a probe"])
def test_a_gradient_that_is_no_number_stops_the_run_before_broken_weights_are_saved(
    tmp_path: Path, at_step: int
) -> None:
    class BrokenGradient(Faulty):
        fault = "gradient"

    BrokenGradient.at_step = at_step
    with pytest.raises(TrainingStopped, match=f"checkpoint, step {at_step},"):
        fit(tmp_path, method_type=BrokenGradient, trainer__checkpoint_every_steps=1, trainer__keep_checkpoints=9)
    assert max(path.name for path in (tmp_path / "checkpoints").iterdir()) == f"step_{at_step:09d}.pt"


def test_a_run_has_at_least_one_step() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        TrainerSettings(max_steps=0)


class FrozenAtFirst(MaSSL):
    """The head's last layer stands still in the first epoch."""

    def frozen(self, hyper: StepHyper) -> list[nn.Parameter]:
        return [self.student.head.mlp[-1].weight] if hyper.epoch < 1 else []


def test_what_a_method_freezes_stands_still_for_its_epochs_and_is_then_trained_from_a_fresh_start(
    tmp_path: Path,
) -> None:
    run = trainer(tmp_path, method_type=FrozenAtFirst, trainer__checkpoint_every_steps=1)
    frozen = run.method.student.head.mlp[-1].weight  # type: ignore[union-attr,index]
    start, steps_per_epoch = frozen.detach().clone(), run.schedules.steps_per_epoch
    seen = []
    run.method.register_forward_pre_hook(lambda *_: seen.append(torch.equal(frozen, start)))
    run.fit()
    assert len(seen) == 1 + run.end_step == 7  # the first forward is that of the row of step 0
    assert seen == [True] * (2 + steps_per_epoch) + [False] * (run.end_step - steps_per_epoch - 1)
    # AdamW's bias correction starts with it
    assert int(run.optimizer.state[frozen]["step"]) == run.end_step - steps_per_epoch


def test_views_carry_the_labels_of_their_images(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    images = run.loader.at(0)
    assert torch.equal(run._make_views(images, epoch=0).labels, images.labels)
    run.loader.close()


def test_the_first_row_is_made_of_the_same_parts_as_every_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, trainer__accumulation_steps=2)
    sizes = []
    run.method.register_forward_pre_hook(lambda _, given: sizes.append(given[0].global_views.shape[1]))
    run.fit()
    assert sizes == [4] * 2 * (1 + run.end_step)


class Sluggish(MaSSL):
    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return []

    def slow_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return [f"at step {metrics['step']}"]


def test_warnings_stay_in_the_run_folder_once_each_however_often_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "general_collapse_signs", lambda metrics: [])
    for output, stops in ((tmp_path / "straight", ()), (tmp_path / "stopped", (5,))):
        for max_steps in (*stops, None):
            # a probe at each step
            fit(output, method_type=Sluggish, trainer__max_steps=max_steps, probes__every_epochs=1 / 3)
        rows = [json.loads(line) for line in (output / "warnings.jsonl").read_text().splitlines()]
        # The first epoch, of three steps, is too early to judge.
        assert rows == [
            {"step": step, "warning": f"training may hardly progress: at step {step}. See docs/troubleshooting.md."}
            for step in (4, 5, 6)
        ]


def test_cautions_before_training_stay_in_the_run_folder_once_each(tmp_path: Path) -> None:
    cautions = ["the memory is larger than the data set", "batch norm in parts"]
    for max_steps in (2, 4):
        trainer(tmp_path, trainer__max_steps=max_steps).fit(cautions=cautions[: max_steps // 2])
    rows = [json.loads(line) for line in (tmp_path / "warnings.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["warning"] in cautions]
    assert found == [{"step": 0, "warning": cautions[0]}, {"step": 2, "warning": cautions[1]}]


def test_only_the_main_process_writes_warnings_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    fit(tmp_path, method_type=Sluggish)
    assert not (tmp_path / "warnings.jsonl").exists()


def test_the_backbone_is_first_written_after_the_first_checkpoint_and_later_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a backbone without a checkpoint tells that the checkpoints were lost, whenever a run is killed."""
    written = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (written.append(to.name), replace(self, to))[1])
    fit(tmp_path, trainer__max_steps=2, trainer__checkpoint_every_steps=1)
    assert [name for name in written if name.startswith(("step_", "backbone"))] == [
        "step_000000001.pt",
        "backbone.safetensors",
        "backbone.safetensors",
        "step_000000002.pt",
    ]
