"""Training methods: one file per method, `base` for what the trainer sees of them, and the table of all methods.

A method knows networks and losses (`nn`, `ops`), never the trainer, data sources or files.
"""

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field

from massl.methods.base import Method, MethodSettings
from massl.methods.carp import CARP, CARPSettings
from massl.methods.dino import DINO, DINOSettings
from massl.methods.ibot import IBOT, IBOTSettings
from massl.methods.mae import MAE, MAESettings
from massl.methods.massl import MaSSL, MaSSLSettings
from massl.methods.mocov3 import MoCoV3, MoCoV3Settings
from massl.methods.nnclr import NNCLR, NNCLRSettings
from massl.methods.supervised import Supervised, SupervisedSettings
from massl.nn.backbone import BackboneSettings


class MethodEntry(NamedTuple):
    method: Callable[..., Method]
    settings: type[MethodSettings]


# What `method.name` of a recipe can be.
METHODS = {
    "massl": MethodEntry(MaSSL, MaSSLSettings),
    "dino": MethodEntry(DINO, DINOSettings),
    "ibot": MethodEntry(IBOT, IBOTSettings),
    "mae": MethodEntry(MAE, MAESettings),
    "mocov3": MethodEntry(MoCoV3, MoCoV3Settings),
    "nnclr": MethodEntry(NNCLR, NNCLRSettings),
    "carp": MethodEntry(CARP, CARPSettings),
    "supervised": MethodEntry(Supervised, SupervisedSettings),
}

if TYPE_CHECKING:
    AnyMethodSettings = MethodSettings
else:  # the union of all settings in the table; `name` tells them apart
    AnyMethodSettings = Annotated[
        functools.reduce(operator.or_, (entry.settings for entry in METHODS.values())), Field(discriminator="name")
    ]


def build_method(settings: MethodSettings, backbone: BackboneSettings, *, seed: int) -> Method:
    return METHODS[settings.name].method(settings, backbone, seed=seed)
