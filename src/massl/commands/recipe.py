"""The pre-training recipe: all parts' settings together, and where recipes are found.

A recipe file may say what changes with the method, so that one word on the command line is enough:

    method: {name: massl, ...}
    with_method:
      dino: {method: {prototypes: {num_prototypes: 4096}}, optimizer: {warmup_epochs: 2}}

With `method.name` dino, the section `method` is replaced by the one given there; the other sections are merged.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from massl.config import RecipeError, Settings, closest, merge, overlay, read_yaml, validate
from massl.data.settings import DataSettings
from massl.data.views import ViewSettings
from massl.methods import METHODS, AnyMethodSettings
from massl.methods.massl import MaSSLSettings
from massl.nn.backbone import BackboneSettings
from massl.training.optimizers import OptimizerSettings
from massl.training.probes import ProbeSettings
from massl.training.trainer import TrainerSettings


class PretrainRecipe(Settings):
    """Everything that decides the outcome of a pre-training run."""

    data: DataSettings = DataSettings()
    views: ViewSettings = ViewSettings()
    backbone: BackboneSettings = BackboneSettings()
    method: AnyMethodSettings = MaSSLSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    trainer: TrainerSettings = TrainerSettings()
    probes: ProbeSettings = ProbeSettings()

    @model_validator(mode="before")
    @classmethod
    def _method_is_massl_unless_named(cls, values: Any) -> Any:
        method = values.get("method") if isinstance(values, Mapping) else None
        return {**values, "method": {"name": "massl", **method}} if isinstance(method, Mapping) else values


def shipped_recipes() -> dict[str, Path]:
    """Recipe name -> file, for the recipes that come with the package."""
    folder = Path(str(resources.files("massl") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_header(path: Path) -> str:
    """The opening comment of a recipe file: command, hardware, expected hours and score."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return "\n".join(lines)


def load_recipe(name_or_file: str | Path, overrides: Mapping[str, Any] | None = None) -> PretrainRecipe:
    """A shipped recipe by name, or a YAML file, with dotted overrides such as {"trainer.epochs": 20}."""
    name = str(name_or_file)
    shipped = shipped_recipes()
    path = shipped.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(
            f"no recipe {name!r}: neither shipped ({', '.join(shipped)}) nor a file.{closest(name, shipped)}"
        )
    return validate(PretrainRecipe, _values_of(path, overrides or {}), origin=f"recipe {name}")


def _values_of(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = read_yaml(path)
    variants = values.pop("with_method", None) or {}
    if not isinstance(variants, Mapping) or not all(isinstance(variant, Mapping) for variant in variants.values()):
        raise RecipeError(
            f"{path}: with_method holds one section for each method, e.g. with_method: {{dino: {{optimizer: ...}}}}"
        )
    unknown = [method for method in variants if method not in METHODS]
    if unknown:
        raise RecipeError(
            f"{path}: with_method names {unknown[0]!r}, which is no method.{closest(str(unknown[0]), METHODS)}"
        )
    own = (values.get("method") or {}).get("name", "massl")
    chosen = overrides.get("method.name", own)
    if chosen not in METHODS:
        raise RecipeError(f"no method {chosen!r}; there are {', '.join(METHODS)}.{closest(str(chosen), METHODS)}")
    if chosen != own:
        values["method"] = {}
        values = overlay(values, variants.get(chosen, {}))
        values["method"]["name"] = chosen
    return merge(values, overrides)


class TrainingImages(Settings):
    """The option --data.source of commands that train by recipes."""

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
        try:
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {item}: the value is not valid YAML: {error}") from None
    return overrides


def as_set_options(overrides: Mapping[str, Any]) -> list[str]:
    """The inverse of `parse_set_options`; JSON is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]


def main(arguments: Sequence[str]) -> int:
    """`massl recipes`: the header of each shipped recipe."""
    if arguments:
        about = "Lists the recipes that come with massl: name, then command, hardware and expected result."
        print(f"usage: massl recipes\n\n{about}")
        return 0 if arguments[0] in ("-h", "--help") else 2
    for name, path in shipped_recipes().items():
        print(name, *(f"    {line}" for line in recipe_header(path).splitlines()), sep="\n", end="\n\n")
    return 0
