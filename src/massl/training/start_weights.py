"""A new run that starts from existing weights: those of another run, or a backbone."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from massl.config import RecipeError
from massl.data.views import ViewSettings
from massl.methods.base import Method
from massl.nn.backbone import Backbone
from massl.nn.memory import MemoryBank
from massl.training.checkpoint import CheckpointStore, fits, load_checkpoint
from massl.training.loss_watch import in_short, not_finite


def load_run(method: Method, weights: Path, *, warn: Callable[[str], None]) -> tuple[int, list[str]]:
    """Load all of a run's newest checkpoint, or of a given one; returns its step and the parts that do not fit.

    A part is a module's own tensors: it is loaded whole or not at all. The backbones must fit; heads and memory of
    another shape keep their initial values.
    """
    state = _checkpoint(weights, warn)
    saved, own = state["method"], method.state_dict()
    unfit = sorted({_part(name) for name, value in own.items() if not fits(saved.get(name), value)})
    backbones = [f"{name}." for name, module in method.named_modules() if module in method.backbones()]
    missing = [part for part in unfit if f"{part}.".startswith(tuple(backbones))]
    if missing:
        raise RecipeError(
            f"the backbone of --init {weights} does not fit this recipe ({missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}); use the same method.name, or "
            "--init.part backbone"
        )
    method.load_state_dict({name: value if _part(name) in unfit else saved[name] for name, value in own.items()})
    _require_finite(method, f"{weights}, step {state['step']}")
    return int(state["step"]), unfit


def has_new_memory(method: Method, unfit: Collection[str]) -> bool:
    """Whether a memory is among the parts that did not fit."""
    return any(isinstance(module, MemoryBank) and name in unfit for name, module in method.named_modules())


def _checkpoint(weights: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    like: dict[str, Any] = {"step": 0, "method": {}}
    if weights.is_file():
        state = load_checkpoint(weights)
        if not all(isinstance(state.get(key), type(value)) for key, value in like.items()):
            raise RecipeError(f"--init {weights} is no checkpoint of massl pretrain")
        return state
    found = CheckpointStore(weights / "checkpoints", keep_last=1).load_latest(warn, like=like)
    if found is None:
        raise RecipeError(f"--init {weights} has no checkpoint; name the --output of a run of massl pretrain")
    return found


def _part(name: str) -> str:
    return name.rpartition(".")[0]


def load_backbone_weights(method: Method, backbone: Backbone, *, views: ViewSettings, origin: str) -> None:
    """Every backbone of the method, student and teacher, gets these weights; positions stay as they are."""
    weights = backbone.model.state_dict()
    for own in method.backbones():
        wanted = own.model.state_dict()
        odd = [name for name, value in wanted.items() if not fits(weights.get(name), value)]
        if odd or weights.keys() != wanted.keys():
            odd = odd or sorted(weights.keys() - wanted.keys())
            raise RecipeError(f"the weights of --init {origin} do not fit {own.model_name} ({in_short(odd)})")
        own.model.load_state_dict(weights)
    _require_finite(method, origin)
    _require_same_features(method.backbone_to_evaluate(), backbone, size=views.global_size, origin=origin)


def _require_finite(method: Method, origin: str) -> None:
    if names := list(not_finite(method)):
        raise RecipeError(f"the weights of --init {origin} are not finite ({in_short(names)}); name other weights")


@torch.no_grad()
def _require_same_features(own: Backbone, given: Backbone, *, size: int, origin: str) -> None:
    """What tensors do not show, an activation for example, must be the same too."""
    device = next(own.parameters()).device
    image = torch.linspace(-2.0, 2.0, 3 * size * size).reshape(1, 3, size, size)
    was_training = own.training
    features = own.eval()(image.to(device)).pooled.float().cpu()
    own.train(was_training)
    expected = given.cpu().eval()(image).pooled.float()
    if not torch.allclose(features, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise RecipeError(
            f"{own.model_name} as this recipe builds it computes other features than --init {origin}; give the folder "
            "or file that massl import made of it"
        )


def memory_of(method: Method) -> MemoryBank | None:
    return next((module for module in method.modules() if isinstance(module, MemoryBank)), None)
