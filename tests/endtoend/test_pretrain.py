"""`massl pretrain` from images to run folder."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import massl
from massl.commands.recipe import load_recipe
from massl.data.sources import open_source
from massl.methods.massl import MaSSL
from massl.nn.backbone import Backbone
from massl.ops.image_ops import normalise
from massl.reports.run_reader import read_run
from massl.reports.verdict import verdict

STEP_KEYS = {"step", "epoch", "loss", "lr", "weight_decay", "momentum", "teacher_temperature", "images_per_second"}
CHOICE_KEYS = {"best_step", "flat_probes"}  # not at step 0: random weights are never the best
PROBE_KEYS = {
    "alpha_req",
    "knn_top1",
    "effective_rank",
    "embedding_spread",
    "memory_winner_share",
    "other_view_top1",
    "teacher_entropy",
}


class Unfinished(Exception):
    """A run that should have got to its end."""


@pytest.fixture
def pretrain(recipe: Path, archive: Path, tmp_path: Path) -> Callable[..., Path]:
    """pretrain("name", {"trainer.max_steps": 2}): the tiny recipe, by default without probes, into tmp_path/name."""

    def run(name: str, overrides: dict[str, Any], *, source: Path | str = archive) -> Path:
        result = massl.pretrain(
            recipe=recipe, data=source, output=tmp_path / name, overrides={"probes.every_epochs": 0, **overrides}
        )
        if not result.finished:
            raise Unfinished(result)
        return result.folder

    return run


def test_run_folder_holds_recipe_environment_metrics_and_backbone(
    recipe: Path, archive: Path, runs: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    overrides = {
        "trainer.epochs": 3,
        "trainer.checkpoint_every_steps": 5,
        "trainer.keep_checkpoints": 2,
        "trainer.milestone_every_epochs": 1,
    }
    result = massl.pretrain(recipe=recipe, data=archive, output=run, overrides=overrides)
    assert (result.folder, result.step, result.finished, result.signal_number) == (run, 18, True, None)

    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert environment["world_size"] == 1
    assert len(list((run / "tensorboard").glob("events.out.tfevents.*"))) == 1
    baseline = json.loads((run / "baseline.json").read_text())
    assert baseline.keys() == {"raw_pixel_knn", "num_queries"}
    assert baseline["num_queries"] == 16
    printed = capfd.readouterr().err
    assert f"Raw pixels reach {baseline['raw_pixel_knn']:.1f} %" in printed
    found = verdict(read_run(run))
    assert f"verdict: {found.headline}" in printed
    assert found.next_step.command in printed
    assert found.page in printed

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == result.metrics
    assert [row["step"] for row in rows] == list(range(19))
    assert [row["epoch"] for row in rows] == [step // 6 for step in range(19)]
    for row in rows:
        chosen = CHOICE_KEYS if row["step"] > 0 else set()
        assert row.keys() == STEP_KEYS | (PROBE_KEYS | chosen if row["step"] % 6 == 0 else set())
    assert all(row["images_per_second"] > 0 for row in rows[1:])
    assert rows[0]["loss"] == rows[1]["loss"]  # both of the first batch before any training

    # a finished run that is asked for again keeps the machine that made it
    (run / "environment.json").write_text("elsewhere")
    assert massl.pretrain(recipe=recipe, data=archive, output=run, overrides=overrides).finished
    assert (run / "environment.json").read_text() == "elsewhere"

    # Checkpoints every 5 steps and after each epoch of 6; the last two and those of whole epochs stay.
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step_{step:09d}.pt" for step in (6, 12, 15, 18)
    ]

    again = load_recipe(run / "recipe.yaml")
    assert again == load_recipe(recipe, {**overrides, "data.source": str(archive)})
    second = massl.pretrain(recipe=run / "recipe.yaml", output=tmp_path / "again")
    runs.assert_bitwise_equal(second.folder, run)


def test_saved_backbone_is_the_teacher_as_a_plain_timm_model(pretrain: Any, runs: Any) -> None:
    run = pretrain("run", {"trainer.max_steps": 3})
    model, _ = massl.load_backbone(run)
    saved = runs.state(run)["method"]
    prefix = "teacher.backbone.model."
    teacher = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
    assert runs.difference(dict(model.state_dict()), teacher) is None
    assert not torch.equal(teacher["blocks.1.mlp.fc1.weight"], saved["student.backbone.model.blocks.1.mlp.fc1.weight"])

    pixels = (
        torch.tensor(open_source("demo:test").pixels[:4]).float()[:, None].expand(-1, 3, -1, -1)[..., :16, :16] / 255
    )
    images = normalise(pixels, model.default_cfg["mean"], model.default_cfg["std"])
    with torch.no_grad():
        expected = Backbone(massl.load_backbone(run / "backbone.safetensors").model, timm_arguments={})(images).pooled
        torch.testing.assert_close(model(images), expected, atol=1e-6, rtol=1e-5)
    assert model(torch.zeros(1, 3, 24, 32)).shape == (1, 32)


def test_folder_without_classes_is_probed_without_knn(pretrain: Any, make_folder: Any, runs: Any) -> None:
    run = pretrain("run", {"trainer.max_steps": 6, "probes.every_epochs": 1}, source=make_folder("photos", 48))
    probed = [row for row in runs.rows(run) if "effective_rank" in row]
    assert [row["step"] for row in probed] == [0, 6]
    assert all(PROBE_KEYS - row.keys() == {"knn_top1"} for row in probed)


def test_class_folders_are_split_into_database_and_held_out_queries(
    pretrain: Any, make_folder: Any, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def knn_accuracy(
        queries: torch.Tensor, query_labels: Any, database: torch.Tensor, database_labels: Any, **_: Any
    ) -> float:
        seen.append((len(queries), len(database)))
        assert not bool((torch.cdist(queries, database) == 0).any())  # no query meets itself
        return 50.0

    monkeypatch.setattr("massl.training.probes.knn_accuracy", knn_accuracy)
    photos = make_folder("photos", 40, classes=4)
    run = pretrain("run", {"trainer.max_steps": 1, "probes.every_epochs": 1}, source=photos)
    assert [row["knn_top1"] for row in runs.rows(run)] == [50.0, 50.0]
    assert set(seen) == {(16, 24)}  # probes.max_queries = 16
    seen.clear()
    pretrain("small", {"trainer.max_steps": 1, "probes.every_epochs": 1, "probes.max_queries": 30}, source=photos)
    assert set(seen) == {(20, 20)}  # never more than half


def test_probes_change_nothing(pretrain: Any, runs: Any) -> None:
    often = pretrain("often", {"trainer.max_steps": 8, "probes.every_epochs": 0.17})
    never = pretrain("never", {"trainer.max_steps": 8})
    assert runs.difference(runs.state(often)["method"], runs.state(never)["method"]) is None


def _assert_close_runs(runs: Any, run: Path, reference: Path, *, tolerance: float) -> None:
    losses, expected = ([row["loss"] for row in runs.rows(folder)] for folder in (run, reference))
    assert losses == pytest.approx(expected, abs=tolerance)
    memory, expected_memory = (runs.state(folder)["method"]["memory.rows"] for folder in (run, reference))
    torch.testing.assert_close(memory, expected_memory, atol=tolerance, rtol=0)
    assert runs.state(run)["method"]["memory.cursor"] == runs.state(reference)["method"]["memory.cursor"]


def test_batch_in_four_parts_is_the_same_training_as_in_one(pretrain: Any, runs: Any) -> None:
    overrides = {"backbone.drop_path_rate": 0.3, "trainer.max_steps": 18}
    whole = pretrain("whole", overrides)
    parts = pretrain("parts", {**overrides, "trainer.accumulation_steps": 4})
    _assert_close_runs(runs, parts, whole, tolerance=1e-5)


def test_activation_checkpointing_changes_nothing(pretrain: Any, runs: Any) -> None:
    overrides = {"backbone.drop_path_rate": 0.3, "trainer.max_steps": 12}
    plain = pretrain("plain", overrides)
    recomputed = pretrain("recomputed", {**overrides, "trainer.activation_checkpointing": True})
    _assert_close_runs(runs, recomputed, plain, tolerance=1e-6)


def test_bfloat16_trains_close_to_float32(pretrain: Any, runs: Any) -> None:
    overrides = {"trainer.max_steps": 4}
    full = pretrain("full", overrides)
    half = pretrain("half", {**overrides, "trainer.precision": "bf16"})
    losses, expected = ([row["loss"] for row in runs.rows(folder)] for folder in (half, full))
    assert losses != expected
    assert losses == pytest.approx(expected, abs=0.05)
    assert all(value.dtype != torch.bfloat16 for value in runs.state(half)["method"].values())


# the second has a layer between pooling and features
@pytest.mark.parametrize("name", ["test_resnet", "mobilenetv3_small_050"])
def test_convolutional_backbone_trains(name: str, recipe: Path, archive: Path, runs: Any, tmp_path: Path) -> None:
    settings = {
        "backbone": {"name": name, "image_size": None, "patch_size": None, "timm_options": {}},
        "trainer.max_steps": 2,
        "views.global_size": 32,
        "views.local_size": 24,
    }
    result = massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides=settings)
    assert result.step == 2
    assert torch.isfinite(massl.load_backbone(tmp_path / "run").model(torch.zeros(2, 3, 32, 32))).all()
    saved = runs.state(tmp_path / "run")["method"]
    student, teacher = (saved[f"{network}.head.mlp.0.weight"] for network in ("student", "teacher"))
    assert not torch.equal(student, teacher)


def test_number_of_workers_changes_nothing(pretrain: Any, make_folder: Any, runs: Any) -> None:
    photos = make_folder("photos", 40, classes=2)
    reference = None
    for num_workers in (0, 1, 3):
        run = pretrain(
            f"run{num_workers}",
            {"data.num_workers": num_workers, "trainer.max_steps": 6, "probes.every_epochs": 1},
            source=photos,
        )
        reference = reference or run
        runs.assert_bitwise_equal(run, reference)


def test_seed_decides_the_run(pretrain: Any, runs: Any) -> None:
    first, other = (pretrain(f"seed{seed}", {"trainer.seed": seed, "trainer.max_steps": 1}) for seed in (0, 1))
    assert runs.rows(first)[0]["loss"] != runs.rows(other)[0]["loss"]


def test_overrides_in_python_are_the_flags_of_the_command_line(
    pretrain: Any, massl_here: Any, recipe: Path, archive: Path, tmp_path: Path, runs: Any
) -> None:
    overrides = {
        "trainer.max_steps": 2,
        "optimizer.learning_rate": 0.02,
        "views.global_scale": [0.4, 0.9],
        "method.memory.random_blocks": False,
    }
    from_python = pretrain("python", overrides)
    flags = ["--trainer.max_steps", "2", "--optimizer.learning_rate", "0.02", "--views.global_scale", "0.4", "0.9"]
    flags += ["--method.memory.random_blocks", "False", "--probes.every_epochs", "0"]
    answer = massl_here(
        "pretrain", "--recipe", recipe, "--data.source", archive, "--output", tmp_path / "flags", *flags
    )
    assert answer.status == 0, answer.text
    assert (tmp_path / "flags" / "recipe.yaml").read_text() == (from_python / "recipe.yaml").read_text()
    runs.assert_bitwise_equal(tmp_path / "flags", from_python)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_python_ctrl_c_raises_after_saving_and_sigterm_returns(
    number: signal.Signals, pretrain: Any, runs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = MaSSL.after_step

    def interrupted(self: MaSSL, output: Any, hyper: Any) -> None:
        original(self, output, hyper)
        if hyper.step == 1:
            signal.raise_signal(number)

    with monkeypatch.context() as patched:
        patched.setattr(MaSSL, "after_step", interrupted)
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt, match="step 2") as raised:
                pretrain("run", {"trainer.max_steps": 4})
            result = raised.value.result
        else:
            with pytest.raises(Unfinished) as ended:
                pretrain("run", {"trainer.max_steps": 4})
            result = ended.value.args[0]
    assert (result.step, result.finished, result.signal_number) == (2, False, number)
    assert runs.state(tmp_path / "run")["step"] == 2
    runs.assert_bitwise_equal(pretrain("run", {"trainer.max_steps": 4}), pretrain("other", {"trainer.max_steps": 4}))


def test_recipe_object_is_as_good_as_its_file(
    recipe: Path, archive: Path, pretrain: Any, runs: Any, tmp_path: Path
) -> None:
    from_file = pretrain("file", {"trainer.max_steps": 1})
    chosen = load_recipe(recipe, {"data.source": str(archive), "probes.every_epochs": 0})
    result = massl.pretrain(recipe=chosen, output=tmp_path / "object", overrides={"trainer.max_steps": 1})
    runs.assert_bitwise_equal(result.folder, from_file)


def _collapse_warnings(error: str) -> list[str]:
    return [
        line.removeprefix("warning: training may have collapsed: ")
        for line in error.splitlines()
        if "may have collapsed" in line
    ]


def test_collapse_is_warned_of_once_training_has_settled(pretrain: Any, capfd: pytest.CaptureFixture[str]) -> None:
    # A tiny network that contracts at once: its loss is that of random guessing from the second epoch on.
    pretrain("run", {"trainer.max_steps": 12, "probes.every_epochs": 1})  # probes at 0, 6 (too early to judge) and 12
    loss_warning, *_ = warnings = _collapse_warnings(capfd.readouterr().err)
    assert "ln 8 = 2.079" in loss_warning
    assert "docs/troubleshooting.md" in loss_warning
    assert len(warnings) == len(set(warnings))


def test_an_even_teacher_is_said_to_be_slow_and_warnings_stay_in_the_run_folder(
    pretrain: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        MaSSL, "health", lambda *_: {"embedding_spread": 0.5, "teacher_entropy": 2.0, "memory_winner_share": 0.5}
    )
    run = pretrain("run", {"trainer.max_steps": 12, "probes.every_epochs": 1})
    printed = [
        line.removeprefix("warning: ")
        for line in capfd.readouterr().err.splitlines()
        if line.startswith("warning: training")
    ]
    assert (
        len(
            [
                line
                for line in printed
                if line.startswith("training may hardly progress: the teacher hardly prefers any")
            ]
        )
        == 1
    )
    rows = [json.loads(line) for line in (run / "warnings.jsonl").read_text().splitlines()]
    assert rows == [{"step": 12, "warning": line} for line in printed]


@pytest.mark.parametrize(
    ("sick", "sign"),
    [
        ({"embedding_spread": 0.001}, "all embeddings are nearly the same vector (spread 0.0010 of 1)"),
        ({"teacher_entropy": 0.01}, "the teacher puts all weight on one memory row (entropy 0.010 nats)"),
        ({}, None),
    ],
)
def test_each_sign_of_collapse_is_named_alone(
    sick: dict[str, float],
    sign: str | None,
    pretrain: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    healthy = {"embedding_spread": 0.5, "teacher_entropy": 1.0, "memory_winner_share": 0.5}
    monkeypatch.setattr(MaSSL, "health", lambda *_: healthy | sick)
    pretrain("run", {"trainer.max_steps": 12, "probes.every_epochs": 1})
    others = [warning for warning in _collapse_warnings(capfd.readouterr().err) if not warning.startswith("the loss")]
    assert others == ([] if sign is None else [f"{sign}. See docs/troubleshooting.md."])
