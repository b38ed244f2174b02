"""Multi-crop augmentation: random crops, colour jitter, blur and normalisation on the device that holds the pixels.

A view is a function of (seed, epoch, image, view): it does not depend on the worker, batch size or batch position.
"""

import math
from dataclasses import dataclass, fields
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from massl.config import Settings
from massl.keyed_random import bits
from massl.ops import image_ops

_CACHED_FLOATS = 1 << 20  # views coloured at once on the CPU: 4 MiB, which fits its cache
_NUM_TRIES = 10  # random crops before falling back to the centre, as in torchvision


class ViewSettings(Settings):
    """The views of one image; defaults as in MaSSL (2 x 224 + 10 x 96, colour and blur as in BYOL and DINO)."""

    num_global: int = Field(2, ge=1, description="large crops per image")
    num_local: int = Field(10, ge=0, description="small crops per image")
    global_size: int = Field(224, ge=1, description="side of a global view in pixels")
    local_size: int = Field(96, ge=1, description="side of a local view in pixels")
    global_scale: tuple[float, float] = Field((0.32, 1.0), description="range of a global crop's share of the area")
    local_scale: tuple[float, float] = Field((0.05, 0.32), description="range of a local crop's share of the area")
    aspect_ratio: tuple[float, float] = Field((3 / 4, 4 / 3), description="range of a crop's width / height")
    flip_probability: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    jitter_probability: float = Field(0.8, ge=0, le=1, description="probability of colour jitter")
    brightness: float = Field(0.4, ge=0, description="jitter: factor drawn from 1 - x to 1 + x")
    contrast: float = Field(0.4, ge=0, description="jitter: factor drawn from 1 - x to 1 + x")
    saturation: float = Field(0.2, ge=0, description="jitter: factor drawn from 1 - x to 1 + x")
    hue: float = Field(0.1, ge=0, le=0.5, description="jitter: shift of the hue drawn from -x to x, in turns")
    grey_probability: float = Field(0.2, ge=0, le=1, description="probability of conversion to grey")
    global_jitter_probability: float | None = Field(
        None, ge=0, le=1, description="jitter of global views; default: jitter_probability"
    )
    global_grey_probability: float | None = Field(
        None, ge=0, le=1, description="grey global views; default: grey_probability"
    )
    first_global_blur_probability: float = Field(1.0, ge=0, le=1, description="blur of the first global view")
    second_global_blur_probability: float = Field(0.1, ge=0, le=1, description="blur of each further global view")
    local_blur_probability: float = Field(0.5, ge=0, le=1, description="blur of a local view")
    blur_sigma: tuple[float, float] = Field((0.1, 2.0), description="range of the blur's sigma in pixels")
    solarise_probability: float = Field(0.2, ge=0, le=1, description="solarisation of global views but the first")
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="subtracted from RGB values in [0, 1]")
    std: tuple[float, float, float] = Field((0.229, 0.224, 0.225), description="RGB values are then divided by it")

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> Self:
        largest_allowed = {"global_scale": 1.0, "local_scale": 1.0, "aspect_ratio": math.inf, "blur_sigma": math.inf}
        for name, largest in largest_allowed.items():
            low, high = getattr(self, name)
            if not 0 < low <= high <= largest:
                bound = "" if largest == math.inf else f" <= {largest:g}"
                raise ValueError(f"{name} is [{low}, {high}]; it needs 0 < smallest <= largest{bound}")
        if min(self.std) <= 0:
            raise ValueError(f"std is {list(self.std)}; all three must be positive")
        return self

    @property
    def num_views(self) -> int:
        return self.num_global + self.num_local


@dataclass(frozen=True, kw_only=True)
class ViewBatch:
    """All normalised views of a batch, with the indices of its images."""

    global_views: Tensor  # [G, B, 3, H, W]
    local_views: Tensor | None  # [L, B, 3, h, w]
    image_indices: Tensor  # [B] int64 on the CPU: keys of per-image randomness (drop path, masks)
    labels: Tensor | None = None  # [B] int64, -1 where unlabelled; for supervised training

    @property
    def num_views(self) -> int:
        return sum(group.shape[0] for group in self.groups())

    def groups(self) -> list[Tensor]:
        """Views grouped by size, global ones first."""
        return [self.global_views] if self.local_views is None else [self.global_views, self.local_views]


@dataclass(frozen=True, kw_only=True)
class ViewParameters:
    """The random parameters of each view of each image, global views first; all on the CPU."""

    boxes: Tensor  # [V, B, 4] int64: top, left, height, width
    flipped: Tensor  # [V, B] bool, as are the other choices
    jittered: Tensor
    jitter_factors: Tensor  # [V, B, 4] float32, columns as in image_ops.JITTER_OPERATIONS
    jitter_order: Tensor  # [V, B, 4] int64: which operation comes first, second ...
    greyed: Tensor
    blurred: Tensor
    blur_sigmas: Tensor  # [V, B] float32
    solarised: Tensor

    def of_views(self, views: slice) -> "ViewParameters":
        return ViewParameters(**{field.name: getattr(self, field.name)[views] for field in fields(self)})

    def flattened(self) -> "ViewParameters":
        """Views and images in one dimension: [V * B, ...]."""
        return ViewParameters(**{field.name: getattr(self, field.name).flatten(0, 1) for field in fields(self)})


def draw_parameters(settings: ViewSettings, sizes: Tensor, indices: Tensor, *, seed: int, epoch: int) -> ViewParameters:
    """Draw for images of `sizes` [B, 2] (height, width) and dataset indices [B], both int64 on the CPU."""
    jitter_and_grey = [settings.jitter_probability, settings.grey_probability]
    in_global = [settings.global_jitter_probability, settings.global_grey_probability]
    colours = [own if own is not None else common for own, common in zip(in_global, jitter_and_grey, strict=True)]
    first = [*colours, settings.first_global_blur_probability, 0.0]
    further = [*colours, settings.second_global_blur_probability, settings.solarise_probability]
    local = [*jitter_and_grey, settings.local_blur_probability, 0.0]
    per_view = torch.tensor([first, *[further] * (settings.num_global - 1), *[local] * settings.num_local])
    jitter_probability, grey_probability, blur_probability, solarise_probability = per_view.T[:, :, None]  # each [V, 1]

    def draw(purpose: str, num_draws: int) -> Tensor:  # -> [num_draws, V, B] float64 in [0, 1)
        views, pairs = torch.arange(settings.num_views)[:, None, None], torch.arange(num_draws // 2)
        words = bits(seed, purpose, epoch, indices[:, None], views, pairs).movedim(-1, 0)
        # two numbers per key: hashing is most of the cost
        return torch.cat([words >> 31, words & 0x7FFFFFFF]) * 2.0**-31

    flip, jitter, grey, blur, sigma, solarise, *changes = draw("view looks", 14)
    strengths, turns = torch.split(torch.stack(changes, dim=-1), 4, dim=-1)  # each [V, B, 4]
    spreads = (settings.brightness, settings.contrast, settings.saturation)
    lowest = torch.tensor([*(max(0.0, 1 - spread) for spread in spreads), -settings.hue])
    highest = torch.tensor([*(1 + spread for spread in spreads), settings.hue])
    low_sigma, high_sigma = settings.blur_sigma
    return ViewParameters(
        boxes=_crop_boxes(settings, sizes, draw("view crops", 2 * _NUM_TRIES + 2)),
        flipped=flip < settings.flip_probability,
        jittered=jitter < jitter_probability,
        jitter_factors=(lowest + strengths * (highest - lowest)).float(),
        jitter_order=turns.argsort(-1),
        greyed=grey < grey_probability,
        blurred=blur < blur_probability,
        blur_sigmas=(low_sigma + sigma * (high_sigma - low_sigma)).float(),
        solarised=solarise < solarise_probability,
    )


# [B, 2], [2 * tries + 2, V, B] -> [V, B, 4]
def _crop_boxes(settings: ViewSettings, sizes: Tensor, draws: Tensor) -> Tensor:
    """Random resized crops as in torchvision: the first try that fits, else the largest central crop."""
    image_height, image_width = sizes.double().unbind(1)
    scales = [settings.global_scale] * settings.num_global + [settings.local_scale] * settings.num_local
    low_scale, high_scale = torch.tensor(scales, dtype=torch.float64).T[:, :, None]  # each [V, 1]
    low_ratio, high_ratio = settings.aspect_ratio
    area_draws, ratio_draws, offset_draws = torch.split(draws, [_NUM_TRIES, _NUM_TRIES, 2])
    areas = image_height * image_width * (low_scale + area_draws * (high_scale - low_scale))
    ratios = low_ratio * (high_ratio / low_ratio) ** ratio_draws
    heights, widths = torch.sqrt(areas / ratios).round(), torch.sqrt(areas * ratios).round()
    fits = (heights > 0) & (heights <= image_height) & (widths > 0) & (widths <= image_width)
    first_fit = fits.byte().argmax(0, keepdim=True)
    fallback_height = torch.minimum(image_height, (image_width / low_ratio).round())
    fallback_width = torch.minimum(image_width, (image_height * high_ratio).round())
    fitted = fits.any(0)
    height = torch.where(fitted, heights.gather(0, first_fit)[0], fallback_height)
    width = torch.where(fitted, widths.gather(0, first_fit)[0], fallback_width)
    room = torch.stack([image_height - height, image_width - width])
    top, left = torch.where(fitted, (offset_draws * (room + 1)).floor(), (room / 2).floor())
    return torch.stack([top, left, height, width], dim=-1).long()


def make_views(
    images: image_ops.RaggedImages,
    indices: Tensor,
    settings: ViewSettings,
    *,
    seed: int,
    epoch: int,
    dtype: torch.dtype = torch.float32,
) -> ViewBatch:
    """All views of a batch, on the device of its pixels, rounded to `dtype` at the end; `indices` [B] on the CPU."""
    parameters = draw_parameters(settings, images.sizes, indices, seed=seed, epoch=epoch)
    groups = [(settings.global_size, parameters.of_views(slice(settings.num_global)))]
    if settings.num_local:
        groups.append((settings.local_size, parameters.of_views(slice(settings.num_global, None))))
    render = _render_by_kernels if images.pixels.is_cuda else _render
    global_views, *local_views = render(images, groups, settings, dtype)
    local = local_views[0] if local_views else None
    return ViewBatch(global_views=global_views, local_views=local, image_indices=indices)


_Groups = list[tuple[int, ViewParameters]]  # views of one size each


def _render(
    images: image_ops.RaggedImages, groups: _Groups, settings: ViewSettings, dtype: torch.dtype
) -> list[Tensor]:
    """The plain reference: [V, B, 3, size, size] for each group, coloured a few at a time, which stay in the cache."""
    finished = []
    for size, parameters in groups:
        views = image_ops.crop_resize(images, parameters.boxes, size=size, flip=parameters.flipped).flatten(0, 1)
        group = torch.empty_like(views, dtype=dtype)
        drawn = parameters.flattened()
        num_at_once = max(1, _CACHED_FLOATS // views[0].numel())
        for start in range(0, len(views), num_at_once):
            some = slice(start, start + num_at_once)
            group[some] = image_ops.normalise(_look(views[some], drawn.of_views(some)), settings.mean, settings.std)
        finished.append(group.view(*parameters.flipped.shape, 3, size, size))
    return finished


def _look(views: Tensor, drawn: ViewParameters) -> Tensor:  # [N, 3, size, size]
    """Jitter, grey, blur and solarise in place; `drawn` has one dimension for all views."""
    image_ops.update_rows(views, drawn.jittered, image_ops.colour_jitter, drawn.jitter_factors, drawn.jitter_order)
    image_ops.update_rows(views, drawn.greyed, image_ops.grey)
    image_ops.update_rows(views, drawn.blurred, image_ops.gaussian_blur, drawn.blur_sigmas)
    image_ops.update_rows(views, drawn.solarised, image_ops.solarise)
    return views


def _render_by_kernels(
    images: image_ops.RaggedImages, groups: _Groups, settings: ViewSettings, dtype: torch.dtype
) -> list[Tensor]:
    """`_render` on a GPU: one copy to the device and three launches per group instead of about 2,000."""
    from massl.ops.kernels import photometric, resample  # imported here: needs Triton, which only GPU builds have

    blur_by_kernel = photometric.can_blur(settings.blur_sigma[1])
    tables = []
    for size, drawn in groups:
        sigmas = torch.where(drawn.blurred & blur_by_kernel, drawn.blur_sigmas, 0.0)
        parameters = resample.pack_photometric(
            drawn.jitter_factors.view(-1, 4),
            drawn.jitter_order.view(-1, 4),
            jittered=drawn.jittered.view(-1),
            greyed=drawn.greyed.view(-1),
            solarised=drawn.solarised.view(-1),
            sigmas=sigmas.view(-1),
        )
        sources = torch.arange(len(images)).repeat(len(drawn.boxes))
        axes = image_ops.crop_axes(drawn.boxes, size=size, flip=drawn.flipped)
        tables.append(resample.pack_jobs(images, sources, *axes, parameters))
    jobs = image_ops.to_device(torch.cat(tables), images.pixels.device)
    finished = []
    for (size, drawn), group_jobs in zip(groups, torch.split(jobs, [len(table) for table in tables]), strict=True):
        views = resample.resample(images.pixels, group_jobs, size=size)
        photometric.colour_in_place(views, group_jobs)
        if not blur_by_kernel:
            image_ops.update_rows(views, drawn.blurred.view(-1), image_ops.gaussian_blur, drawn.blur_sigmas.view(-1))
        views = photometric.finish(views, group_jobs, mean=settings.mean, std=settings.std, dtype=dtype)
        finished.append(views.view(*drawn.flipped.shape, 3, size, size))
    return finished
