"""The pre-training recipe: all parts' settings together. `commands.recipes` finds and reads the files.

A recipe file may say what changes with the method, so that one word on the command line is enough:

    method: {name: massl, ...}
    with_method:
      dino: {method: {prototypes: {num_prototypes: 4096}}, optimizer: {warmup_epochs: 2}}

With `method.name` dino, the section `method` is replaced by the one given there; the other sections are merged.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from massl.commands.recipes import for_method, method_of, read_recipe, recipe_path
from massl.config import RecipeError, Settings, closest, dotted, merge, parse_yaml, validate
from massl.data.settings import DataSettings
from massl.data.views import ViewSettings
from massl.methods import METHODS, AnyMethodSettings
from massl.methods.massl import MaSSLSettings
from massl.nn.backbone import BackboneSettings
from massl.training.init_settings import InitSettings
from massl.training.optimizers import OptimizerSettings
from massl.training.probes import ProbeSettings
from massl.training.settings import TrainerSettings


class PretrainRecipe(Settings):
    """Everything that decides the outcome of a pre-training run."""

    data: DataSettings = DataSettings()
    views: ViewSettings = ViewSettings()
    backbone: BackboneSettings = BackboneSettings()
    method: AnyMethodSettings = MaSSLSettings()
    init: InitSettings = InitSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    trainer: TrainerSettings = TrainerSettings()
    probes: ProbeSettings = ProbeSettings()

    @model_validator(mode="before")
    @classmethod
    def _method_is_massl_unless_named(cls, values: Any) -> Any:
        method = values.get("method") if isinstance(values, Mapping) else None
        return {**values, "method": {"name": "massl", **method}} if isinstance(method, Mapping) else values


def load_recipe(name_or_file: str | Path, overrides: Mapping[str, Any] | None = None) -> PretrainRecipe:
    """A shipped recipe by name, or a YAML file, with dotted overrides such as {"trainer.epochs": 20}."""
    name = str(name_or_file)
    return validate(PretrainRecipe, _values_of(recipe_path(name), overrides or {}), origin=f"recipe {name}")


def _values_of(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = read_recipe(path)
    unknown = [method for method in values.get("with_method") or {} if method not in METHODS]
    if unknown:
        raise RecipeError(
            f"{path}: with_method names {unknown[0]!r}, which is no method.{closest(str(unknown[0]), METHODS)}"
        )
    own = method_of(values)
    chosen = dotted(overrides, PretrainRecipe).get("method.name", own)
    if chosen not in METHODS:
        raise RecipeError(f"no method {chosen!r}; there are {', '.join(METHODS)}.{closest(str(chosen), METHODS)}")
    if chosen != own:
        values = for_method(values, chosen)
    values.pop("with_method", None)
    return merge(_probed_on_own_images(values, overrides), overrides, PretrainRecipe)


def _probed_on_own_images(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Other images than the bundled demo's are not probed on the demo's: the probe then takes the training images."""
    changes, own = dotted(overrides, PretrainRecipe), str((values.get("data") or {}).get("source", ""))
    probes = values.get("probes") or {}
    if own.startswith("demo:") and changes.get("data.source", own) != own and probes.get("database") == own:
        values["probes"] = {key: value for key, value in probes.items() if key not in ("database", "queries")}
    return values


class TrainingImages(Settings):
    """The images of commands that train by recipes."""

    source: str = Field("", description="images to train on, as in pretrain; default: those of each recipe")


def parse_set_options(items: Iterable[str]) -> dict[str, Any]:
    """ "trainer.epochs=40" -> {"trainer.epochs": 40}; values are read as YAML, as in a recipe."""
    overrides: dict[str, Any] = {}
    for item in items:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise RecipeError(f"--set {item}: expected KEY=VALUE, e.g. trainer.epochs=40")
        if key in overrides:
            raise RecipeError(f"--set {key} is given twice")
        overrides[key] = parse_yaml(text, origin=f"the value of --set {item}")
    return dotted(overrides, PretrainRecipe)


def as_set_options(overrides: Mapping[str, Any]) -> list[str]:
    """The inverse of `parse_set_options`; JSON is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
