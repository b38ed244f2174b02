"""The pre-training recipe: all parts' settings together, and where recipes are found.

A recipe file may say what changes with the method, so that one word on the command line is enough:

    method: {name: massl, ...}
    with_method:
      dino: {method: {prototypes: {num_prototypes: 4096}}, optimizer: {warmup_epochs: 2}}

With `method.name` dino the section `method` is replaced by the one given there, the others are merged over the file's
own.
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import model_validator

from massl.config import RecipeError, Settings, closest, merge, overlay, read_yaml, validate
from massl.data.settings import DataSettings
from massl.data.views import ViewSettings
from massl.methods import SETTINGS, AnyMethodSettings
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
    """Recipe name -> file, of those that come with the package."""
    folder = Path(str(resources.files("massl") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_header(path: Path) -> str:
    """The comment a recipe file opens with: command, hardware, expected hours and score."""
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
    unknown = [method for method in variants if method not in SETTINGS]
    if unknown:
        raise RecipeError(
            f"{path}: with_method names {unknown[0]!r}, which is no method.{closest(str(unknown[0]), SETTINGS)}"
        )
    own = (values.get("method") or {}).get("name", "massl")
    chosen = overrides.get("method.name", own)
    if chosen not in SETTINGS:
        raise RecipeError(f"no method {chosen!r}; there are {', '.join(SETTINGS)}.{closest(str(chosen), SETTINGS)}")
    if chosen != own:
        values["method"] = {}
        values = overlay(values, variants.get(chosen, {}))
        values["method"]["name"] = chosen
    return merge(values, overrides)
