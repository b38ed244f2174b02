"""massl: Learning from Memory (MaSSL) for your own images.

import massl
massl.pretrain("photos/", output="runs/photos")
model, transform = massl.load_backbone("runs/photos")    # a timm model, and how to prepare its images
massl.evaluate("runs/photos", protocol="knn", train="photos/", test="others/", output="results")
massl.embed("runs/photos", data="photos/", output="features.npz")
massl.export("runs/photos", to="transformers", output="photos-vit")

The functions mirror the commands of `massl --help`. Each is imported when it is first used, so `import massl` takes
milliseconds.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massl.commands.ablate.command import ablate
    from massl.commands.compare.command import compare
    from massl.commands.embed import embed
    from massl.commands.evaluate.command import evaluate
    from massl.commands.export import export
    from massl.commands.import_weights import import_weights
    from massl.commands.plan import plan
    from massl.commands.pretrain import pretrain
    from massl.commands.report.command import report
    from massl.commands.visualize import visualize
    from massl.weights.io import load_backbone

    __version__: str

__all__ = [
    "ablate",
    "compare",
    "embed",
    "evaluate",
    "export",
    "import_weights",
    "load_backbone",
    "plan",
    "pretrain",
    "report",
    "visualize",
]

_HOMES = {
    "ablate": "massl.commands.ablate.command",
    "compare": "massl.commands.compare.command",
    "embed": "massl.commands.embed",
    "evaluate": "massl.commands.evaluate.command",
    "export": "massl.commands.export",
    "import_weights": "massl.commands.import_weights",
    "load_backbone": "massl.weights.io",
    "plan": "massl.commands.plan",
    "pretrain": "massl.commands.pretrain",
    "report": "massl.commands.report.command",
    "visualize": "massl.commands.visualize",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("massl.version").version()
    if name not in _HOMES:
        raise AttributeError(f"module 'massl' has no attribute {name!r}")
    return _with_python_words(getattr(import_module(_HOMES[name]), name))


def _with_python_words(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; its errors name arguments where the command's errors name options."""
    from massl.commands.python_words import in_python
    from massl.config import MasslError

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except MasslError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return call


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
