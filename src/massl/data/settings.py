"""The settings of a recipe's `data:` section."""

from pydantic import Field

from massl.config import Settings


class DataSettings(Settings):
    """Where the images come from and how they are read."""

    source: str = Field("", description="Folder, .npz archive or URI: demo:train, folder:PATH?labels=none, torchvision:CIFAR10?root=DIR")
    max_side: int = Field(1024, gt=0, description="Images whose longer side exceeds this many pixels are reduced to it while decoding")
    num_workers: int = Field(4, ge=0, description="Threads that read and decode images; 0 decodes in the training thread")
