"""What all processes of a run must share before the first step."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import timm
import torch

from massl import distributed
from massl.config import MasslError, RecipeError, Settings, flatten
from massl.data.identity import DataIdentity
from massl.failures import ToldElsewhere
from massl.training.settings import TrainerSettings

# Settings that may differ between machines of one run: where the images are, and how they are read fast.
_OF_A_MACHINE = frozenset({"data.source", "data.num_workers", "data.worker_kind", "data.cache_gib"})


class OtherRankStopped(MasslError, ToldElsewhere, RuntimeError):
    """Another process of the run met an error; the message is its."""


@contextlib.contextmanager
def stop_together() -> Iterator[None]:
    """All processes stop if one raises a MasslError inside; otherwise the others would wait for it in vain."""
    problem: MasslError | None = None
    try:
        yield
    except MasslError as error:
        problem = error
    problems = distributed.gather_objects(None if problem is None else str(problem))
    told_by = next((rank for rank, text in enumerate(problems) if text is not None), None)
    if told_by is None:
        return
    if told_by == distributed.rank() and problem is not None:
        raise problem
    raise OtherRankStopped(f"rank {told_by} stopped: {problems[told_by]}")


def require_equal_ranks(recipe: Settings, data: DataIdentity) -> None:
    """Refuse processes that run different code, were started with different recipes or see different images."""
    values = {key: value for key, value in flatten(recipe).items() if key not in _OF_A_MACHINE}
    seen = data.digest, data.num_images, data.source
    gathered = distributed.gather_objects((_code() if distributed.world_size() > 1 else "", values, seen))
    with stop_together():  # all find the same; one tells it
        _require_equal_code([code for code, _, _ in gathered])
        _require_equal_recipes([values for _, values, _ in gathered])
        _require_equal_images([seen for _, _, seen in gathered])


def require_even_parts(settings: TrainerSettings) -> None:
    """Refuse a batch that processes and accumulation steps cannot share evenly."""
    parts = distributed.world_size() * settings.accumulation_steps
    if settings.batch_size % parts:
        raise RecipeError(
            f"trainer.batch_size {settings.batch_size} cannot be split over {distributed.world_size()} processes x "
            f"{settings.accumulation_steps} accumulation steps; make it a multiple of {parts}"
        )


def require_equal_steps(step: int | None) -> None:
    """Refuse processes that continue from different checkpoints, e.g. because one of them reads a damaged copy."""
    steps = distributed.gather_objects(step)
    with stop_together():
        if len(set(steps)) > 1:
            shown = "; ".join(f"rank {rank} at step {step or 0}" for rank, step in enumerate(steps))
            what = f"the processes would continue from different checkpoints: {shown}"
            raise RecipeError(f"{what}. Give all the same checkpoints folder.")


def _require_equal_code(versions: list[str]) -> None:
    if len(set(versions)) > 1:
        shown = "; ".join(f"rank {rank} runs {version}" for rank, version in enumerate(versions))
        raise MasslError(f"the processes run different code: {shown}. Install the same versions on all machines.")


def _require_equal_recipes(recipes: list[dict[str, object]]) -> None:
    first = recipes[0]
    for rank, other in enumerate(recipes):
        different = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
        if different:
            shown = "; ".join(
                f"{key} is {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}" for key in different
            )
            raise RecipeError(f"the processes have different recipes: {shown}. Start all with the same command.")


def _require_equal_images(seen: list[tuple[str, int, str]]) -> None:
    if len({digest for digest, _, _ in seen}) > 1:
        shown = "; ".join(
            f"rank {rank} sees {num_images:,} images in {source} (digest {digest[:8]})"
            for rank, (digest, num_images, source) in enumerate(seen)
        )
        raise RecipeError(f"the processes see different images: {shown}. Give all the same data.source and files.")


def _code() -> str:
    """What this process computes with: the text of massl itself, which checkouts change without a new version."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return f"massl of digest {digest.hexdigest()[:8]}, torch {torch.__version__}, timm {timm.__version__}"
