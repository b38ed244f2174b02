"""Video object segmentation on DAVIS-2017 (Pont-Tuset et al., 2017), as in DINO: similarities of patch tokens propagate
the mask of the first frame, without training.

Frames are normalised as the model demands; DINO's script divides red by 0.228 instead of 0.229, with no effect on
scores.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from massl import distributed
from massl.config import Settings
from massl.data.evaluation.views import picture_of, whole_patches
from massl.data.sources.base import DataError
from massl.data.sources.files import FileListSource
from massl.evaluations.base import EvaluationData, ProtocolEntry, require_finite
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import Measurement, Setting
from massl.files import replacing
from massl.nn.token_readout import last_layers, require_patches
from massl.ops.image_ops import RaggedImages
from massl.ops.scoring.label_propagation import (
    contour_accuracy,
    label_map,
    propagate_labels,
    region_similarity,
    resize_nearest,
)

_PUBLISHED_SHORT_SIDE, _PUBLISHED_MULTIPLE, _PUBLISHED_IMAGE_SIZE = 480, 64, 224
_VOID: Final = 255  # in annotations: pixels that are not judged
NAMES: Final = ("davis", "davis2017", "davis-2017")  # folders called DAVIS-2017 in results


class DavisSettings(Settings):
    short_side: int | None = Field(None, gt=0, description="shorter side of frames; default: 480 * image size / 224")
    num_context: int = Field(7, ge=0, description="preceding frames that labels are taken from, besides the first")
    radius: int = Field(12, gt=0, description="labels come from at most so many patches away")
    num_neighbours: int = Field(5, gt=0, description="patches whose labels are averaged")
    temperature: float = Field(0.1, gt=0, description="a patch at cosine s weighs exp(s / temperature)")
    save_masks: bool = Field(False, description="save PNG masks in OUTPUT/davis, for the benchmark's own program")


@dataclass(frozen=True, kw_only=True)
class FrameView:
    """Shorter side to `short_side`, the longer to a multiple; bilinear without antialias, as OpenCV resizes."""

    short_side: int
    multiple: int

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        longer = max(1, self.short_side * max(height, width) // min(height, width) // self.multiple) * self.multiple
        return (longer, self.short_side) if height > width else (self.short_side, longer)

    def apply(self, images: RaggedImages, indices: Tensor) -> list[Tensor]:
        frames = [picture_of(images, number)[None] for number in range(len(images))]
        if len({frame.shape for frame in frames}) == 1:
            return [self._resized(torch.cat(frames))]
        return [self._resized(frame) for frame in frames]

    def _resized(self, frames: Tensor) -> Tensor:  # uint8 [B, 3, H, W] -> [B, 3, h, w] in [0, 1]
        size = self.size_of(frames.shape[2], frames.shape[3])
        return interpolate(frames.float(), size=size, mode="bilinear").round() / 255  # rounded to 8 bits, as OpenCV


@dataclass(frozen=True, kw_only=True)
class Video:
    """Frames and annotations of the same names below the root of DAVIS."""

    name: str
    root: Path
    frames: tuple[str, ...]  # sorted names without extension

    @property
    def images(self) -> FileListSource:
        folder = self.root / "JPEGImages" / "480p" / self.name
        return FileListSource(folder, [f"{frame}.jpg" for frame in self.frames], name=self.name)

    def annotation(self, frame: str) -> Image.Image:
        path = self.root / "Annotations" / "480p" / self.name / f"{frame}.png"
        try:
            with Image.open(path, formats=("PNG",)) as picture:
                picture.load()
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"{path} cannot be read ({error}); unpack DAVIS-2017 again") from None
        if picture.mode not in ("P", "L"):
            raise DataError(f"{path} is of mode {picture.mode}; expected object numbers (P or L), as in DAVIS")
        return picture

    def objects(self, frame: str) -> Tensor:  # -> uint8 [H, W]
        return torch.from_numpy(np.array(self.annotation(frame)))


def measure_davis(extractor: Extractor, data: EvaluationData, settings: DavisSettings) -> Iterator[Measurement]:
    """Region similarity J, contour accuracy F and their mean, averaged over the objects of all validation videos."""
    assert data.folder is not None
    videos = _videos(data.folder)
    name = "DAVIS-2017" if (data.name or data.folder.resolve().name).lower() in NAMES else data.name
    scores = []
    for number, video in enumerate(videos):
        masks = follow(extractor, video, settings)
        scores.append(_score(video, masks, output=data.output if settings.save_masks else None))
        extractor.progress(f"videos of {name}", number + 1, len(videos))
    regions, contours = (100.0 * torch.cat(scores).mean(dim=0)).tolist()
    num_objects = sum(map(len, scores))
    for metric, value in (("J&F", (regions + contours) / 2), ("J", regions), ("F", contours)):
        yield Measurement(data=name, setting=Setting(name="val"), metric=metric, value=value, num_samples=num_objects)


def follow(extractor: Extractor, video: Video, settings: DavisSettings) -> Iterator[Tensor]:  # -> uint8 [H, W] each
    """The mask of each frame after the first, at the size of the annotation, on the extractor's device."""
    first_mask = video.objects(video.frames[0]).to(extractor.device)
    num_classes = _num_objects(first_mask, video) + 1
    patch = require_patches(extractor.model.backbone, purpose="video segmentation")
    first: tuple[Tensor, Tensor] | None = None
    # patch tokens [N, D] and their soft labels [N, C]
    recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=settings.num_context)
    for tokens, grid in _patch_tokens(extractor, video, _view(extractor, settings)):
        if first is None:
            classes = resize_nearest(torch.where(first_mask == _VOID, 0, first_mask).long(), grid).flatten()
            first = tokens, one_hot(classes, num_classes).float()
            continue
        if len(tokens) != len(first[0]):
            raise DataError(f"the frames of {video.name} differ in size; unpack DAVIS-2017 again")
        context_tokens, context_labels = (torch.stack(parts) for parts in zip(first, *recent, strict=True))
        labels = propagate_labels(
            tokens,
            context_tokens,
            context_labels,
            grid=grid,
            radius=settings.radius,
            num_neighbours=settings.num_neighbours,
            temperature=settings.temperature,
        )
        recent.append((tokens, labels))
        classes = label_map(labels.T.reshape(num_classes, *grid), scale=patch)
        yield resize_nearest(classes, (first_mask.shape[0], first_mask.shape[1])).to(torch.uint8)


def _view(extractor: Extractor, settings: DavisSettings) -> FrameView:
    model = extractor.model
    patch = require_patches(model.backbone, purpose="video segmentation")
    short_side = _PUBLISHED_SHORT_SIDE * model.image_size / _PUBLISHED_IMAGE_SIZE
    if settings.short_side is not None:
        short_side = whole_patches(settings.short_side, patch, option="--davis.short_side")
    published = (short_side, _PUBLISHED_MULTIPLE * short_side / _PUBLISHED_SHORT_SIDE)
    in_patches = [max(1, round(pixels / patch)) * patch for pixels in published]
    return FrameView(short_side=in_patches[0], multiple=in_patches[1])


def _patch_tokens(extractor: Extractor, video: Video, view: FrameView) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """[N, D] float32 of each frame, and the grid's height and width."""
    images, patch = video.images, require_patches(extractor.model.backbone, purpose="video segmentation")
    # Images larger than the model's own come in smaller batches, which hold about the same number of tokens.
    share = min(1.0, (extractor.model.image_size / view.short_side) ** 2 / 2)
    batch_size = max(1, int(extractor.settings.batch_size * share))
    for batch in extractor.views(images, list(torch.split(torch.arange(len(images)), batch_size)), view=view):
        for frames in batch.groups:
            with extractor.inference():
                patches = last_layers(extractor.model.backbone, frames, num_layers=1)[0].patches
            assert patches is not None
            require_finite(patches, name=video.name)
            for tokens in patches.float():
                yield tokens, (frames.shape[2] // patch, frames.shape[3] // patch)


def _score(video: Video, masks: Iterator[Tensor], *, output: Path | None) -> Tensor:  # -> [num objects, 2]: J and F
    """Means over all frames but the first, whose mask is given, and the last, as in the benchmark."""
    given = video.annotation(video.frames[0])
    num_objects = _num_objects(video.objects(video.frames[0]), video)
    if output is not None:
        _save(output / "davis" / video.name / f"{video.frames[0]}.png", given)
    scores = []
    for frame, mask in zip(video.frames[1:], masks, strict=True):
        if output is not None:
            _save(output / "davis" / video.name / f"{frame}.png", _as_picture(mask, given))
        if frame == video.frames[-1]:
            continue
        truth = video.objects(frame).to(mask.device)
        if truth.shape != mask.shape:
            sizes = f"{tuple(truth.shape)} at {frame}, {tuple(mask.shape)} at first"
            raise DataError(f"annotations of {video.name} differ in size: {sizes}")
        numbers = torch.arange(1, num_objects + 1, device=mask.device)[:, None, None]
        judged = truth != _VOID
        found, true = (mask == numbers) & judged, truth == numbers
        scores.append(torch.stack([region_similarity(found, true), contour_accuracy(found, true)], dim=1))
    return torch.stack(scores).mean(dim=0).cpu()


def _as_picture(mask: Tensor, given: Image.Image) -> Image.Image:
    """In the colours of the given annotation."""
    picture, palette = Image.fromarray(mask.cpu().numpy()), given.getpalette()
    if palette is not None:
        picture.putpalette(palette)
    return picture


def _save(path: Path, picture: Image.Image) -> None:
    if distributed.is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            picture.save(partial, format="PNG")


def _num_objects(first_mask: Tensor, video: Video) -> int:
    num_objects = int(torch.where(first_mask == _VOID, 0, first_mask).amax())
    if num_objects == 0:
        raise DataError(f"the annotation of the first frame of {video.name} marks no object")
    return num_objects


def _videos(root: Path) -> list[Video]:
    listed = root / "ImageSets" / "2017" / "val.txt"
    if not listed.is_file():
        expected = "expected the folder of DAVIS-2017 (trainval, 480p) with ImageSets, JPEGImages and Annotations"
        raise DataError(f"{listed} does not exist; {expected}")
    videos = []
    for name in listed.read_text(encoding="utf-8").split():
        folder = root / "JPEGImages" / "480p" / name
        frames = tuple(sorted(file.stem for file in folder.glob("*.jpg")))
        if len(frames) < 3:
            raise DataError(f"{folder} holds {len(frames)} frames instead of at least 3; unpack DAVIS-2017 again")
        videos.append(Video(name=name, root=root, frames=frames))
    if not videos:
        raise DataError(f"{listed} names no video; unpack DAVIS-2017 again")
    return videos


PROTOCOL = ProtocolEntry(
    measure=measure_davis,
    settings_type=DavisSettings,
    needs=("folder",),
    summary="DAVIS-2017 video segmentation, not in the paper",
    unremarked=frozenset({"save_masks"}),
    uses_centre_crop=False,
)
