"""The methods a recipe can name."""

from collections.abc import Callable
from typing import Any

from massl.methods.base import Method
from massl.methods.massl import MaSSL, MaSSLSettings

METHODS: dict[str, Callable[..., Method]] = {
    "massl": MaSSL,
}

SETTINGS: dict[str, type[Any]] = {
    "massl": MaSSLSettings,
}

AnyMethodSettings = MaSSLSettings
