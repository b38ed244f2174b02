"""A new run that starts from the weights of another run."""

from collections.abc import Callable
from pathlib import Path

from massl.config import RecipeError
from massl.methods.base import Method
from massl.training.checkpoint import CheckpointStore, fits
from massl.training.loss_watch import in_short, not_finite


def load_start(method: Method, run: Path, *, warn: Callable[[str], None]) -> tuple[int, list[str]]:
    """Load the weights of a run's newest checkpoint; returns its step and the parts that do not fit.

    A part is a module's own tensors: it is loaded whole or not at all. The backbones must fit; heads and memory of
    another shape keep their initial values.
    """
    state = CheckpointStore(run / "checkpoints", keep_last=1).load_latest(warn, like={"step": 0, "method": {}})
    if state is None:
        raise RecipeError(f"--start_from {run} has no checkpoint; name the --output of a run of massl pretrain")
    saved, own = state["method"], method.state_dict()
    unfit = sorted({_part(name) for name, value in own.items() if not fits(saved.get(name), value)})
    backbones = [f"{name}." for name, module in method.named_modules() if module in method.backbones()]
    missing = [part for part in unfit if f"{part}.".startswith(tuple(backbones))]
    if missing:
        raise RecipeError(
            f"the backbone of --start_from {run} does not fit this recipe ({missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}); use the same method.name, backbone.name, "
            "backbone.image_size and other values of backbone, or another --output to start from other weights"
        )
    method.load_state_dict({name: value if _part(name) in unfit else saved[name] for name, value in own.items()})
    if names := list(not_finite(method)):
        raise RecipeError(
            f"the weights of --start_from {run} are not finite ({in_short(names)}); name another run, or move its "
            f"checkpoint of step {state['step']} elsewhere to start from the one before"
        )
    return int(state["step"]), unfit


def _part(name: str) -> str:
    return name.rpartition(".")[0]
