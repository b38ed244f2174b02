"""The settings of a recipe's `data:` section."""

from typing import Literal

from pydantic import Field, model_validator

from massl.config import Settings


class DataSettings(Settings):
    """Where the images come from and how they are read."""

    source: str = Field(
        "", description="Folder, .npz archive or URI: demo:train, folder:PATH?labels=none, torchvision:CIFAR10?root=DIR"
    )
    max_side: int = Field(
        1024, gt=0, description="Images whose longer side exceeds this many pixels are reduced to it while decoding"
    )
    num_workers: int = Field(
        4, ge=0, description="Threads or processes that read and decode images; 0 decodes in the training thread"
    )
    worker_kind: Literal["threads", "processes"] = Field(
        "threads",
        description="What the workers are; processes: for photographs on many cores; each starts in a few seconds",
    )
    decoder: Literal["cpu", "gpu"] = Field(
        "cpu",
        description="What decodes plain JPEGs; gpu: nvJPEG, whose pixels differ from the CPU's by about a grey level, more at colour edges",
    )
    cache_gib: float = Field(
        0.0,
        ge=0.0,
        description="Keep decoded images in memory, up to this many GiB in each process (one process per GPU); 0: none",
    )

    @model_validator(mode="after")
    def _gpu_decoder_needs_threads(self) -> "DataSettings":
        if self.worker_kind == "processes" and self.decoder == "gpu":
            raise ValueError(
                "worker_kind processes and decoder gpu do not go together; choose one (threads serve the GPU decoder, they only read files)"
            )
        return self
