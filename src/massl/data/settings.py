"""The settings of a recipe's `data:` section."""

from typing import Literal

from pydantic import Field, model_validator

from massl.config import Settings


class DataSettings(Settings):
    """Where the images come from and how they are read."""

    source: str = Field(
        "", description="Folder, .npz archive or URI: demo:train, folder:PATH?labels=none, torchvision:CIFAR10?root=DIR"
    )
    max_side: int = Field(1024, gt=0, description="Images with a longer side are reduced to this many pixels")
    num_workers: int = Field(4, ge=0, description="Threads or processes that decode images; 0: the training thread")
    worker_kind: Literal["threads", "processes"] = Field(
        "threads", description="Processes are faster for photographs on more than 8 cores; they start in a few seconds"
    )
    decoder: Literal["cpu", "gpu"] = Field(
        "cpu", description="Decoder of plain JPEGs; gpu: nvJPEG, whose pixels differ by about one grey level"
    )
    # excluded: a permission for one command, not a part of the recipe that a run keeps
    accept_changes: bool = Field(
        False, exclude=True, description="Continue a run although its images have changed; recorded in data.json"
    )
    cache_gib: float = Field(
        0.0, ge=0.0, description="GiB of decoded images to keep in memory, per process (one process per GPU); 0: none"
    )

    @model_validator(mode="after")
    def _gpu_decoder_needs_threads(self) -> "DataSettings":
        if self.worker_kind == "processes" and self.decoder == "gpu":
            raise ValueError("worker_kind processes cannot be combined with decoder gpu; choose worker_kind threads")
        return self
