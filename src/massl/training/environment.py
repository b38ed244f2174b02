"""The environment of a run: versions, hardware, command."""

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

import torch

from massl import distributed
from massl.json_lines import read_json

ENVIRONMENT_FILE = "environment.json"
_PACKAGES = ("massl", "torch", "torchvision", "timm", "numpy", "pillow", "safetensors")


def describe_environment(device: torch.device, *, before: Path | None = None) -> dict[str, object]:
    """The content of environment.json; `before`, if it exists, is that of the start that is continued."""
    return {
        "command": sys.argv,
        "first_command": _first_command(before) if before is not None and before.exists() else sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "massl_commit": _commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "num_cpu_threads": torch.get_num_threads(),
        "world_size": distributed.world_size(),
    }


def _first_command(file: Path) -> object:
    """The command that began the run; the last one known in files that do not tell it."""
    try:
        known = read_json(file)
        return known.get("first_command", known["command"])
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return sys.argv


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The git commit if massl runs from its own checkout, else None."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(checkout), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
