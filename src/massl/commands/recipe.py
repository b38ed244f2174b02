"""The pre-training recipe: all parts' settings together, and where recipes are found."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from massl.config import RecipeError, Settings, closest, merge, read_yaml, validate
from massl.data.settings import DataSettings
from massl.data.views import ViewSettings
from massl.methods.massl import MaSSLSettings
from massl.nn.backbone import BackboneSettings
from massl.training.optimizer import OptimizerSettings
from massl.training.probes import ProbeSettings
from massl.training.trainer import TrainerSettings


class PretrainRecipe(Settings):
    """Everything that decides the outcome of a pre-training run."""

    data: DataSettings = DataSettings()
    views: ViewSettings = ViewSettings()
    backbone: BackboneSettings = BackboneSettings()
    method: MaSSLSettings = MaSSLSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    trainer: TrainerSettings = TrainerSettings()
    probes: ProbeSettings = ProbeSettings()


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
        raise RecipeError(f"no recipe {name!r}: neither shipped ({', '.join(shipped)}) nor a file.{closest(name, shipped)}")
    return validate(PretrainRecipe, merge(read_yaml(path), overrides or {}), origin=f"recipe {name}")
