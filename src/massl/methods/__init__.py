"""The methods a recipe can name."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from massl.methods.base import Method
from massl.methods.carp import CARP, CARPSettings
from massl.methods.dino import DINO, DINOSettings
from massl.methods.ibot import IBOT, IBOTSettings
from massl.methods.mae import MAE, MAESettings
from massl.methods.massl import MaSSL, MaSSLSettings
from massl.methods.mocov3 import MoCoV3, MoCoV3Settings
from massl.methods.nnclr import NNCLR, NNCLRSettings
from massl.methods.supervised import Supervised, SupervisedSettings

METHODS: dict[str, Callable[..., Method]] = {
    "massl": MaSSL,
    "dino": DINO,
    "ibot": IBOT,
    "mae": MAE,
    "mocov3": MoCoV3,
    "nnclr": NNCLR,
    "carp": CARP,
    "supervised": Supervised,
}

SETTINGS: dict[str, type[Any]] = {
    "massl": MaSSLSettings,
    "dino": DINOSettings,
    "ibot": IBOTSettings,
    "mae": MAESettings,
    "mocov3": MoCoV3Settings,
    "nnclr": NNCLRSettings,
    "carp": CARPSettings,
    "supervised": SupervisedSettings,
}

AnyMethodSettings = Annotated[
    MaSSLSettings
    | DINOSettings
    | IBOTSettings
    | MAESettings
    | MoCoV3Settings
    | NNCLRSettings
    | CARPSettings
    | SupervisedSettings,
    Field(discriminator="name"),
]
