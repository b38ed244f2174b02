"""Opening a model on a device to compute features: settings and set-up shared by all commands that take a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from rich.console import Console

from massl import distributed
from massl.commands.arguments import ModelName
from massl.commands.console import message_console, print_line, progress_on
from massl.commands.device import Device, choose_device, host_threads_for
from massl.data.evaluation.views import whole_patches
from massl.data.settings import checked_range, read_rules
from massl.data.sources.rules import MAX_FILE_MIB, MAX_MEGAPIXELS, PixelRanges, ReadRules
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.named_features import FEATURE_LINES, own_name
from massl.nn.token_readout import patch_size, require_size
from massl.training.data_record import DataRecord
from massl.weights.models import open_model


class ModelSettings(ExtractionSettings):
    """How the model is opened and fed, for all commands that take one."""

    model: ModelName
    feature: str | None = Field(None, description=f"read this instead of what the protocol names:{FEATURE_LINES}")
    which: Literal["last", "best"] = Field(
        "last", description="weights of a run's folder: after its last step, or of its best probe (best.safetensors)"
    )
    image_size: int | None = Field(
        None, gt=0, description="side of the views in pixels; default: that of the images it was trained on"
    )
    crop_ratio: float | None = Field(
        None,
        gt=0,
        le=1,
        description="centre crop / shorter side; default: that of a run's probes, else the published 224 / 256",
    )
    num_heads: int | None = Field(
        None, gt=0, description="attention heads of a weights file whose layout does not tell (MoCo-v3: 12)"
    )
    pretrained: bool | None = Field(
        None,
        description="of timm names: load timm's weights; default: where the name has a tag, as in "
        "vit_small_patch16_224.dino",
    )
    device: Device = Field("auto", description="auto: a GPU where there is one")
    pixel_range: tuple[float, float] | None = Field(
        None,
        description="values of black and white in images of more than 8 bits; default: those of the model's run, the "
        "file's bit depth, or sampled",
    )
    max_file_mib: int = Field(MAX_FILE_MIB, gt=0, description="larger image files are left out as unreadable")
    max_megapixels: int = Field(MAX_MEGAPIXELS, gt=0, description="images with more are left out as unreadable")

    @field_validator("feature")
    @classmethod
    def _under_its_own_name(cls, feature: str | None) -> str | None:
        return feature and own_name(feature)

    @field_validator("pixel_range")
    @classmethod
    def _is_a_range(cls, pixel_range: tuple[float, float] | None) -> tuple[float, float] | None:
        return checked_range(pixel_range)

    def rules(self) -> ReadRules:
        """How images are read: as stated, or as the model's run read them."""
        return read_rules(self.pixel_range, self.max_file_mib, self.max_megapixels, ranges_of_run(self.model))


def record_of_run(model: str) -> DataRecord | None:
    """What a run recorded of the images it was trained on; None if the model is no run, or an older one."""
    path = Path(model).expanduser()
    folder = path.parent if path.is_file() else path  # a file counts only beside the recipe of its run
    record = DataRecord(folder)
    return record if (folder / "recipe.yaml").is_file() and record.exists else None


def ranges_of_run(model: str) -> PixelRanges | None:
    """The range that a run recorded of its images with more than 8 bits; None if it had none."""
    record = record_of_run(model)
    return record.ranges if record is not None and record.ranges.key else None


@contextmanager
def model_on_device(settings: ModelSettings, *, cache: Path | None) -> Iterator[tuple[Extractor, Console]]:
    """The model, ready to extract features, and the console for messages. `cache`: folder that keeps features."""
    device = choose_device(settings.device, option="device")
    distributed.start(device.type)
    console = message_console(quiet=not distributed.is_main())
    with host_threads_for(device), progress_on(console) as progress:
        model = open_model(
            settings.model, num_heads=settings.num_heads, pretrained=settings.pretrained, which=settings.which
        )
        # The size it was trained at need not be a multiple of the patch.
        if settings.image_size is not None and settings.image_size != model.image_size:
            size = whole_patches(settings.image_size, patch_size(model.backbone), option="image_size")
            require_size(model.backbone, size)
            model = replace(model, image_size=size)
        crop_ratio = model.crop_ratio if settings.crop_ratio is None else settings.crop_ratio
        model.backbone.to(device)
        seen = f"{model.image_size} px, crop ratio {crop_ratio:g}"
        about = f"{model.kind}, {seen}, {settings.precision}, {device}"
        print_line(console, f"{model.name}: {model.origin}; {about}")
        if settings.pretrained is None and model.origin.startswith("random weights"):
            told = f"{model.name} names an architecture; published weights have a tag, as in vit_small_patch16_224.dino"
            print_line(
                console, f"caution: {told}. --pretrained False says that random weights are meant", style="yellow"
            )
        yield (
            Extractor(
                model=model,
                settings=ExtractionSettings(**{key: getattr(settings, key) for key in ExtractionSettings.model_fields}),
                device=device,
                cache=cache,
                feature=settings.feature,
                crop_ratio=crop_ratio,
                progress=progress,
                say=lambda message: print_line(console, message, style="yellow"),
            ),
            console,
        )
    # Not after an error: stopping the process group waits for the other processes, which may wait for this one.
    distributed.stop()
