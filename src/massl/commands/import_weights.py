"""`massl import`: weights of another project as a folder that every command opens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field, model_validator

from massl.commands.arguments import parse
from massl.commands.console import message_console, print_line, require_writable
from massl.config import MasslError, Settings, UsageError, merge, validate
from massl.data.evaluation.views import MAX_SIDE, whole_patches
from massl.files import making_folder
from massl.nn.positions import ResamplingRule
from massl.nn.token_readout import patch_size, require_size
from massl.weights.io import BACKBONE_FILE, backbone_bytes
from massl.weights.models import LoadedModel, open_foreign

DESCRIPTION = """Write the backbone of another project's checkpoint as a folder that every command opens.

massl import dinov2_vits14_reg4_pretrain.pth --output models/dinov2
massl embed models/dinov2 --data photos/ --output features.npz"""

_RULES = {
    "dino": "bicubic by (n + 0.1) / n_old without antialias, as in DINO",
    "timm": "bicubic to the exact size with antialias, as in timm",
}


class ImportSettings(Settings):
    """The file to read, the folder to write, and what the file does not tell."""

    file: Annotated[
        tyro.conf.Positional[str],
        Field(
            description="weights or checkpoint (.pth .pt .bin .safetensors) of DINO, DINOv2, DINOv3, iBOT, MaSSL, "
            "MoCo, SwAV, MAE, DeiT, ConvNeXt, torchvision (ResNets, ConvNeXt) or timm; or a folder of transformers or "
            "timm"
        ),
    ]
    output: str = Field(description="folder to write; it must not exist")
    num_heads: int | None = Field(None, gt=0, description="attention heads, if they are not usual for the width")
    backbone: str | None = Field(
        None,
        description="timm's name of the model, where the tensors do not tell; with a tag (resnet50.a1_in1k) mean and "
        "std are those of timm's weights",
    )
    image_size: int | None = Field(
        None, gt=0, le=MAX_SIDE, description="side of the images it is used with; default: that of its training"
    )
    mean: tuple[float, float, float] | None = Field(
        None, description="of its images; default: what the folder says, else ImageNet's"
    )
    std: tuple[float, float, float] | None = Field(
        None, description="of its images; default: what the folder says, else ImageNet's"
    )
    position_resampling: ResamplingRule | None = Field(
        None,
        description="how position embeddings get other sizes; default: as its authors do. "
        + "; ".join(f"{name}: {what}" for name, what in _RULES.items()),
    )

    @model_validator(mode="after")
    def _colours_vary(self) -> "ImportSettings":
        if min(self.std or (1,)) <= 0:
            raise ValueError(f"std is {self.std}; give three numbers above 0")
        return self


def main(arguments: Sequence[str]) -> int:
    run_import(parse(ImportSettings, "import", DESCRIPTION, arguments))
    return 0


def import_weights(file: str | Path, *, output: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Write the backbone of another project's checkpoint as a new folder, which everything here opens.

    `overrides` sets any other option of `massl import --help`, e.g. {"num_heads": 12}. Returns the folder.
    """
    values = {"file": str(file), "output": str(output)}
    return run_import(validate(ImportSettings, merge(values, overrides or {}, ImportSettings), origin="import"))


def run_import(settings: ImportSettings) -> Path:
    """Write the backbone of `settings.file` as `backbone.safetensors` in the new folder; returns the folder."""
    file, folder = (Path(name).expanduser() for name in (settings.file, settings.output))
    if folder.exists() or folder.is_symlink():
        raise MasslError(f"{folder} exists; move it away or choose another --output")
    if not file.exists():
        raise UsageError(f"{file} is no file or folder; give weights of another project")
    if file.is_dir() and not any((file / name).exists() for name in ("config.json", BACKBONE_FILE)):
        raise UsageError(f"{file} holds no config.json; give a weights file, or a folder that transformers wrote")
    require_writable(folder.parent)
    model = open_foreign(
        file,
        num_heads=settings.num_heads,
        timm_name=settings.backbone,
        position_resampling=settings.position_resampling,
    )
    backbone = model.backbone
    size = settings.image_size or model.image_size
    if size != model.image_size:
        whole_patches(size, patch_size(backbone), option="image_size")
        require_size(backbone, size)
    mean, std = settings.mean or model.mean, settings.std or model.std
    about: dict[str, Any] = {"timm_arguments": backbone.timm_arguments, "mean": mean, "std": std}
    origin = model.origin.replace(str(file), file.name)  # where it lay is no matter of those who get the folder
    content = backbone_bytes(backbone.model, image_size=size, crop_ratio=model.crop_ratio, origin=origin, **about)
    try:
        with making_folder(folder) as unfinished:
            (unfinished / BACKBONE_FILE).write_bytes(content)
    except OSError as error:
        raise MasslError(f"cannot write {folder} ({error}); make room or choose another --output") from error
    console = message_console()
    for line in (origin, _images_line(model, size, mean, std), f"{folder}: {len(content) / 2**20:,.1f} MiB"):
        print_line(console, line)
    return folder


def _images_line(model: LoadedModel, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    """How images are prepared, and what happens at other sizes."""
    rule = model.backbone.position_resampling
    positions = "no position embeddings to resample" if rule is None else f"positions at other sizes: {_RULES[rule]}"
    colours = f"mean {', '.join(f'{value:g}' for value in mean)}, std {', '.join(f'{value:g}' for value in std)}"
    return f"images: {size} px, {colours}; {positions}"
