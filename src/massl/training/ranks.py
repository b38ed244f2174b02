"""What all processes of a run must share before the first step."""

import contextlib
from collections.abc import Iterator

from massl import distributed
from massl.config import MasslError, RecipeError, Settings, flatten
from massl.data.identity import DataIdentity

# Settings that may differ between machines of one run: where the images are, and how they are read fast.
_OF_A_MACHINE = frozenset({"data.source", "data.num_workers", "data.worker_kind", "data.cache_gib"})


class OtherRankStopped(MasslError, RuntimeError):
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
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text is not None:
            raise OtherRankStopped(f"rank {rank} stopped: {text}")


def require_equal_ranks(recipe: Settings, data: DataIdentity) -> None:
    """Refuse processes that were started with different recipes or see different images."""
    values = {key: value for key, value in flatten(recipe).items() if key not in _OF_A_MACHINE}
    recipes = distributed.gather_objects(values)
    first = recipes[0]
    for rank, other in enumerate(recipes):
        different = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
        if different:
            shown = "; ".join(
                f"{key} is {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}" for key in different
            )
            raise RecipeError(f"the processes have different recipes: {shown}. Start all with the same command.")
    seen = distributed.gather_objects((data.digest, data.num_images, data.source))
    if len({digest for digest, _, _ in seen}) > 1:
        shown = "; ".join(
            f"rank {rank} sees {num_images:,} images in {source} (digest {digest[:8]})"
            for rank, (digest, num_images, source) in enumerate(seen)
        )
        raise RecipeError(f"the processes see different images: {shown}. Give all the same data.source and files.")
