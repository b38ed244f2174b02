"""kill -9 at any moment of a run; the same command again ends bit for bit as if nothing had happened."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from tests.reliability.frame import Case, Crash, Lost, Wrong, fault_class, made_once
from tests.reliability.processes import Answer, server
from tests.reliability.world import TINY_RECIPE, RunReader, num_lines, tiny_images

NUM_STEPS = 12  # 48 images, 2 epochs; checkpoints every 2 steps, probes every 6
_CALLS = (
    ("os:fsync", 12),  # while a file is written
    ("os:replace", 12),  # before and after it takes the place of the old one
    ("massl.training.optimizers:clip_each_gradient", NUM_STEPS),
    ("massl.training.checkpoint:CheckpointStore.save", NUM_STEPS // 2),  # after the last: before the last backbone
    ("massl.training.checkpoint:CheckpointStore.path", 10),  # while old ones are dropped
    ("massl.training.probes:knn_accuracy", 3),
    ("massl.nn.memory:MemoryBank.enqueue", NUM_STEPS),  # between weights and memory
    ("massl.training.metrics_log:MetricsLog.write", NUM_STEPS),
)
_KINDS = ("half a checkpoint", "call", "outside", "event", "half a metrics line", "call", "outside", "event")


@fault_class("kills, images read by threads", kind="processes", quick=2, more=8)
def kill_with_threads(case: Case) -> None:
    _kill_and_continue(case, "threads")


@fault_class("kills, images read by processes", kind="processes", quick=1, more=2)
def kill_with_processes(case: Case) -> None:
    _kill_and_continue(case, "processes")


def _kill_and_continue(case: Case, worker_kind: str) -> None:
    reference, run = kill_reference(), case.folder / "run"
    command = kill_command(reference.parent, run, worker_kind)
    for kill in range(1 + int(case.random.random() < 0.25)):  # one run in four is killed again
        kind = _KINDS[(case.number + kill) % len(_KINDS)]
        answer = _run_killed(case, kind, command, run, reference)
        if answer.status not in (0, -signal.SIGKILL):  # 0: it ended before the moment came
            raise Crash(f"status {answer.status}: {answer.text[-500:]}")
        if not server().started[-1].group_ends():
            raise Wrong("worker processes outlive the run that was killed")
    saved, known = _newest_step(run), num_lines(run / "metrics.jsonl")
    process = server().start(*command)
    with case.recovery():
        process.wait_until(lambda: num_lines(run / "metrics.jsonl") > known)
    answer = process.wait()
    if answer.status != 0:
        raise Crash(f"status {answer.status}: {answer.text[-500:]}")
    continued = re.search(r"continuing at step (\d+)", answer.text)
    if saved and saved < NUM_STEPS and (continued is None or int(continued[1]) != saved):
        raise Lost(f"a checkpoint of step {saved} was there; massl said: {answer.text[:500]}")
    RunReader().assert_bitwise_equal(run, reference)
    assert not list(run.rglob("*.partial")), "half a file was left"


def _run_killed(case: Case, kind: str, command: list[str | Path], run: Path, reference: Path) -> Answer:
    """Run until a moment that the case draws, and kill."""
    random = case.random
    if kind == "outside":  # whatever the process is doing
        process, wanted = server().start(*command), int(random.integers(NUM_STEPS))
        process.wait_until(lambda: num_lines(run / "metrics.jsonl") >= wanted)
        time.sleep(float(random.uniform(0, 0.1)))
        process.kill()
        return process.wait()
    hooks: dict[str, list[Any]] = {}
    if kind == "event":  # a call or return drawn from all of the run, start-up and checkpoints too
        num_events = int((reference.parent / "num_events").read_text())
        hooks["kill_at_event"] = [int(random.integers(num_events))]
    elif kind == "call":
        target, num_calls = _CALLS[random.integers(len(_CALLS))]
        moment = ("before", "after")[random.integers(2)]
        hooks["kill_at_call"] = [target, int(random.integers(1, num_calls + 1)), moment]
    elif kind == "half a checkpoint":
        hooks["kill_in_half_a_checkpoint"] = [int(random.integers(1, NUM_STEPS // 2 + 1))]
    else:
        hooks["kill_in_half_a_metrics_line"] = [int(random.integers(1, NUM_STEPS + 1))]
    return server().run(*command, **hooks)


def _newest_step(run: Path) -> int:
    return max((int(path.stem.rpartition("_")[2]) for path in (run / "checkpoints").glob("step_*.pt")), default=0)


def kill_command(world: Path, run: Path, worker_kind: str) -> list[str | Path]:
    return ["pretrain", "--recipe", world / "recipe.yaml", "--output", run, "--data.worker_kind", worker_kind]


def kill_reference() -> Path:
    """A run that was never killed, on PNG files, one of them damaged: threads, decoding and a stand-in take part."""
    return made_once("kills", _make_reference) / "run"


def _make_reference(folder: Path) -> None:
    photos = folder.with_suffix("") / "photos"  # the name that it has later is in the recipe
    (folder / "photos").mkdir()
    for number, pixels in enumerate(tiny_images(48)):
        Image.fromarray(pixels).save(folder / "photos" / f"{number:03d}.png")
    damaged = folder / "photos" / "005.png"
    damaged.write_bytes(damaged.read_bytes()[:300])
    recipe = TINY_RECIPE | {
        "data": TINY_RECIPE["data"] | {"source": str(photos)},
        "trainer": TINY_RECIPE["trainer"] | {"epochs": 2, "checkpoint_every_steps": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [*kill_command(folder, folder / "run", "threads"), "--data.source", folder / "photos"]
    answer = server().run(*command, count_events=[str(folder / "num_events")])
    assert answer.status == 0, answer.text
