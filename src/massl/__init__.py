"""massl: Learning from Memory (MaSSL) for your own images.

import massl
massl.pretrain(recipe="massl-vits16", data="photos/", output="runs/photos")
model = massl.load_backbone("runs/photos")    # a timm model
"""

from massl.commands.pretrain import pretrain
from massl.weights.io import load_backbone

__all__ = ["load_backbone", "pretrain"]
