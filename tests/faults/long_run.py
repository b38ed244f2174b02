"""Runs of many steps: memory, open files and threads do not grow."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from PIL import Image

from massl.commands.recipe import PretrainRecipe
from massl.config import merge
from tests.reliability.frame import Case, Crash, Wrong, fault_class, made_once, memory_mib
from tests.reliability.processes import Process, server
from tests.reliability.world import TINY_RECIPE, num_lines, tiny_images

_TINIEST = {
    "views": {"num_local": 0, "global_size": 8},
    "backbone": {"image_size": 8, "timm_options": {"embed_dim": 16, "depth": 1, "num_heads": 2}},
    "trainer": {"epochs": 1_000_000, "batch_size": 4, "checkpoint_every_steps": 5, "log_every_steps": 1},
    "probes": {"every_epochs": 2},
}
_SECONDS = 600.0
_NUM_IMAGES = 16  # 4 steps an epoch
_MIB_MORE, _FILES_MORE, _THREADS_MORE = 16, 4, 4  # the second half of a run may have this much more than the first


class _Use(NamedTuple):
    mib: float
    files: int
    threads: int


@fault_class("long runs", kind="processes", seconds=_SECONDS, quick=1, more=2)
def long_run(case: Case) -> None:
    """Case 1 takes 1,500 steps and 300 checkpoints, the others 120 steps, with other ways to read images."""
    num_steps = 1500 if case.number == 1 else 120
    workers = case.pick([("threads", "2"), ("threads", "0"), ("processes", "1"), ("threads", "1")])
    world, run = made_once("long runs", _make_world), case.folder / "run"
    options = [
        "--trainer.max_steps",
        str(num_steps),
        "--data.worker_kind",
        workers[0],
        "--data.num_workers",
        workers[1],
    ]
    options += ["--data.cache_gib", str(case.random.choice(["0", "0.1"])), "--trainer.seed", str(case.number)]
    process = server().start("pretrain", "--recipe", world / "recipe.yaml", "--output", run, *options)
    uses: list[tuple[int, _Use]] = []

    def sample() -> bool:
        use = _use_of(process)
        if use is not None:
            uses.append((num_lines(run / "metrics.jsonl"), use))
        return False

    process.wait_until(sample, seconds=_SECONDS)
    answer = process.wait()
    if answer.status != 0:
        raise Crash(f"status {answer.status}: {answer.text[-500:]}")
    assert num_lines(run / "metrics.jsonl") == num_steps + 1
    early = [use for step, use in uses if num_steps // 4 <= step < num_steps // 2]
    late = [use for step, use in uses if num_steps // 2 <= step < num_steps]
    assert early, "too few samples"
    assert late, "too few samples"
    _compare(early, late)


def _use_of(process: Process) -> _Use | None:
    """None if the process is gone."""
    with contextlib.suppress(OSError):
        place = Path(f"/proc/{process.pid}")
        num_files, num_threads = (sum(1 for _ in (place / name).iterdir()) for name in ("fd", "task"))
        return _Use(memory_mib(process.pid, "VmRSS"), num_files, num_threads)
    return None


def _compare(early: Sequence[_Use], late: Sequence[_Use]) -> None:
    for name, allowed in zip(_Use._fields, (_MIB_MORE, _FILES_MORE, _THREADS_MORE), strict=True):
        before, after = (max(getattr(use, name) for use in uses) for uses in (early, late))
        if after > before + allowed:
            raise Wrong(f"{name} grew from {before:.0f} to {after:.0f}")


def _make_world(folder: Path) -> None:
    (folder / "photos").mkdir()
    for number, pixels in enumerate(tiny_images(_NUM_IMAGES)):
        Image.fromarray(pixels).save(folder / "photos" / f"{number:02d}.png")
    recipe = merge(TINY_RECIPE, _TINIEST, PretrainRecipe)
    recipe["data"]["source"] = str(folder.with_suffix("") / "photos")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
