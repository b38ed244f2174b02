"""massl: Learning from Memory (MaSSL) for your own images.

import massl
massl.pretrain(recipe="massl-vits16", data="photos/", output="runs/photos")
model = massl.load_backbone("runs/photos")    # a timm model
massl.evaluate("runs/photos", protocol="knn", train="photos/", test="others/", output="results")
massl.embed("runs/photos", data="photos/", out="features.parquet")
"""

from massl.commands.embed import embed
from massl.commands.evaluate.command import evaluate
from massl.commands.pretrain import pretrain
from massl.weights.io import load_backbone

__all__ = ["embed", "evaluate", "load_backbone", "pretrain"]
