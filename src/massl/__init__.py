"""massl: Learning from Memory (MaSSL) for your own images.

import massl
massl.pretrain(recipe="massl-vits16", data="photos/", output="runs/photos")
model, transform = massl.load_backbone("runs/photos")    # a timm model, and how to prepare its images
massl.evaluate("runs/photos", protocol="knn", train="photos/", test="others/", output="results")
massl.embed("runs/photos", data="photos/", output="features.parquet")

The functions mirror the commands of `massl --help`. Each is imported when it is first used, so `import massl` takes
milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massl.commands.ablate.command import ablate
    from massl.commands.compare.command import compare
    from massl.commands.embed import embed
    from massl.commands.evaluate.command import evaluate
    from massl.commands.pretrain import pretrain
    from massl.commands.report.command import report
    from massl.commands.visualize import visualize
    from massl.weights.io import load_backbone

__all__ = ["ablate", "compare", "embed", "evaluate", "load_backbone", "pretrain", "report", "visualize"]

_HOMES = {
    "ablate": "massl.commands.ablate.command",
    "compare": "massl.commands.compare.command",
    "embed": "massl.commands.embed",
    "evaluate": "massl.commands.evaluate.command",
    "load_backbone": "massl.weights.io",
    "pretrain": "massl.commands.pretrain",
    "report": "massl.commands.report.command",
    "visualize": "massl.commands.visualize",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'massl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
