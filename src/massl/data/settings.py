"""The settings of a recipe's `data:` section."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from massl.config import Settings
from massl.data.sources.rules import MAX_FILE_MIB, MAX_MEGAPIXELS, PixelRanges, ReadRules, require_range


def checked_range(pixel_range: tuple[float, float] | None) -> tuple[float, float] | None:
    if pixel_range is not None:
        require_range(*pixel_range)
    return pixel_range


def read_rules(
    pixel_range: tuple[float, float] | None, max_file_mib: int, max_megapixels: int, known: PixelRanges | None
) -> ReadRules:
    """A stated range comes first, then the known one; without both, the source is sampled."""
    ranges = PixelRanges(stated=pixel_range) if pixel_range is not None else known or PixelRanges()
    return ReadRules(max_file_mib=max_file_mib, max_megapixels=max_megapixels, ranges=ranges)


class DataSettings(Settings):
    """Where the images come from and how they are read."""

    source: str = Field(
        "", description="Folder, .npz archive or URI: demo:train, folder:PATH?labels=none, torchvision:CIFAR10?root=DIR"
    )
    hold_out: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the images kept out of training, the same for all seeds; probes then classify these",
    )
    max_side: int = Field(1024, gt=0, description="Images with a longer side are reduced to this many pixels")
    num_workers: int = Field(4, ge=0, description="Threads or processes that decode images; 0: the training thread")
    worker_kind: Literal["threads", "processes"] = Field(
        "threads", description="Processes are faster for photographs on more than 8 cores; they start in a few seconds"
    )
    decoder: Literal["cpu", "gpu"] = Field(
        "cpu", description="Decoder of plain JPEGs; gpu: nvJPEG, whose pixels differ by about one grey level"
    )
    pixel_range: tuple[float, float] | None = Field(
        None,
        description="Black and white in images of more than 8 bits; default: by the file's bit depth, or a sample",
    )
    max_file_mib: int = Field(MAX_FILE_MIB, gt=0, description="Larger image files are skipped as unreadable")
    max_megapixels: int = Field(MAX_MEGAPIXELS, gt=0, description="Images with more are skipped as unreadable")
    # excluded: a permission for one command, not a part of the recipe that a run keeps
    accept_changes: bool = Field(
        False, exclude=True, description="Continue a run although its images have changed; recorded in data.json"
    )
    cache_gib: float = Field(
        0.0, ge=0.0, description="GiB of decoded images to keep in memory, per process (one process per GPU); 0: none"
    )

    @field_validator("pixel_range")
    @classmethod
    def _is_a_range(cls, pixel_range: tuple[float, float] | None) -> tuple[float, float] | None:
        return checked_range(pixel_range)

    def rules(self, known: PixelRanges | None = None) -> ReadRules:
        """How images are read; `known`: the ranges that a run began with."""
        return read_rules(self.pixel_range, self.max_file_mib, self.max_megapixels, known)

    @model_validator(mode="after")
    def _gpu_decoder_needs_threads(self) -> "DataSettings":
        if self.worker_kind == "processes" and self.decoder == "gpu":
            raise ValueError("worker_kind processes cannot be combined with decoder gpu; choose worker_kind threads")
        return self
