"""The rules of `auto`: one table, interpolated between what was measured and what the paper reports.

A column belongs to a number of images; a row is a setting with its reason and the measurement behind it. Between two
columns a setting follows the logarithm of the number of images; outside, the nearest column holds. To change what
`auto` chooses, change a number here. docs/auto.md shows the result (`python scripts/auto_table.py` writes it).
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

# What each column rests on: a guess below what was measured, `demo-vit` and `massl-imagenette`, `massl-tiny`, the
# paper's ViT-S/16, and beyond the paper its ViT-B/16.
IMAGES: Final = (1_000, 8_000, 35_000, 1_281_167, 5_000_000)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting over the numbers of images."""

    values: tuple[Any, ...]  # one for each column
    between: Literal["log", "linear", "nearest"]  # how values between two columns are found
    reason: str  # with few images
    with_many: str = ""  # the reason where the paper's columns are nearer; "": the same
    measured: str  # the page with the measurement, or "the paper", or "not measured"


_PAGES = ("tiny-imagenet-100", "imagenette", "cifar10", "lightly-cifar10", "auto")
_TINY, _NETTE, _CIFAR, _RESNET, _AUTO = (f"docs/results/{name}.md" for name in _PAGES)

TABLE: Final = {
    "epochs": Row(
        values=(400, 200, 100, 100, 100),
        between="log",
        reason="few images need more passes: the number of steps is what holds small runs back",
        with_many="the length of the paper's ablations; the paper's best runs are 4 to 8 times as long",
        measured=f"{_NETTE}, {_TINY}: k-NN still rises at the end of every run; 100: the paper's ablations",
    ),
    "batch_size": Row(
        values=(128, 128, 128, 1024, 1024),
        between="log",
        reason="small batches give small sets more steps",
        with_many="the paper's batch is 1,024; fewer images get a smaller one",
        measured=f"128: {_TINY}; 1,024: the paper",
    ),
    "memory_rows": Row(  # at most; never more than a quarter of the images
        values=(4_096, 4_096, 4_096, 65_536, 65_536),
        between="log",
        reason="a memory that is replaced quickly holds no stale embeddings",
        with_many="the paper's 65,536 for a million images, less for fewer",
        measured=f"4,096: {_TINY}; 65,536: the paper",
    ),
    "num_local": Row(
        values=(0, 0, 0, 10, 10),
        between="nearest",
        reason="in short runs two large crops learn more in the same time than two large and several small ones",
        with_many="with many images the paper's small crops pay off",
        measured=f"0: {_TINY}, {_NETTE}; 10: the paper",
    ),
    "horizon_of_two_views": Row(  # images after which the teacher has forgotten a student: batch / (1 - momentum)
        values=(2_560, 2_560, 2_560, 128_000, 256_000),
        between="log",
        reason="a short run needs a teacher that follows quickly",
        with_many="the paper's teacher follows slowly",
        measured=f"{_TINY}: momentum 0.95 at batch 128, 0.9 at 256; {_RESNET}: 0.8 at batch 512",
    ),
    "horizon_of_many_views": Row(
        values=(12_800, 12_800, 12_800, 128_000, 256_000),
        between="log",
        reason="with small crops the teacher must follow more slowly",
        with_many="the paper's teacher follows slowly",
        measured=f"{_TINY}: momentum 0.98 at batch 256; the paper: 0.992 and, ViT-B, 0.996 at batch 1,024",
    ),
    "temperature": Row(
        values=(0.04, 0.04, 0.04, 0.07, 0.07),
        between="linear",
        reason="a short run needs a sharp teacher to the end",
        with_many="the paper's teacher gets softer, up to 0.07",
        measured=f"0.04: {_TINY}; 0.07: the paper",
    ),
    "temperature_warmup_share": Row(  # of the epochs
        values=(0.0, 0.0, 0.0, 0.3, 0.3),
        between="linear",
        reason="the teacher gets softer while it learns",
        measured="0.3: the paper's ablations, 30 of 100 epochs",
    ),
    "instance_weight": Row(
        values=(0.5, 0.5, 0.5, 0.0, 0.0),
        between="nearest",
        reason="half of the loss tells the images of a batch apart (not in the paper): with few images it helps",
        with_many="the paper's loss",
        measured=f"0.5: {_TINY} (19.6 -> 24.1 % k-NN), {_CIFAR}, docs/results/demo.md; 0: the paper",
    ),
    "batch_norm": Row(
        values=(True, True, True, False, False),
        between="nearest",
        reason="batch norm in the head makes small runs learn faster",
        with_many="the paper's head has none, and long runs learn without",
        measured=f"True: {_TINY} (`demo-vit`: 74.8 -> 77.5 % k-NN); False: the paper",
    ),
    "learning_rate": Row(  # for a batch of 256; scaled linearly with the batch
        values=(7e-4, 7e-4, 7e-4, 5e-4, 7.5e-4),
        between="log",
        reason="a small batch takes a little more than its share",
        with_many="the paper's",
        measured=f"7e-4: {_TINY}, at batch 128; 5e-4 and 7.5e-4: the paper",
    ),
    "warmup_share": Row(  # of the epochs
        values=(0.1, 0.1, 0.1, 0.0, 0.025),
        between="linear",
        reason="the learning rate rises first, so that the first steps do no harm",
        measured=f"0.1: {_NETTE}, {_TINY}; 0: the paper's ViT-S; 0.025: its ViT-B",
    ),
    "network": Row(  # of NETWORKS, at most
        values=("resnet18", "resnet18", "resnet18", "small", "base"),
        between="nearest",
        reason="larger networks pay off with more images",
        measured=f"resnet18: {_AUTO}; small and base: the paper",
    ),
    "largest_view": Row(
        values=(112, 112, 112, 224, 224),
        between="nearest",
        reason="112 px with patches of 8 cost as much as 224 px with patches of 16, and fewer pixels to decode",
        with_many="the paper's size",
        measured=f"112: {_NETTE}; 224: the paper",
    ),
}


REDUCTION: Final = 32  # by ResNets, ConvNeXts and EfficientNets; by a ResNet with a small stem 8
LEAST_MAP: Final = {"cpu": 1.75, "cuda": 3.5}  # side of the last map: 56 and 112 px; smaller images are enlarged


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """A network, and the settings that follow from it instead of from the number of images."""

    name: str  # timm's
    kind: str  # in words
    reason: str = ""
    reduction: int = 0  # of a view's side, to that of the last map; 0: views of any size suit it
    options: Mapping[str, Any] = field(default_factory=dict)  # other values of the recipe
    basis: str = "from massl's own runs with this network"  # of these options
    origin: str = "from massl's own runs with this network"  # of its architecture
    instead: str = ""  # the ViT for those who want patches
    measured: str = ""  # the page with the measurement, or "the paper"


_EVEN_BLUR: Final = {  # both large views alike
    "views.first_global_blur_probability": 0.5,
    "views.second_global_blur_probability": 0.5,
    "views.blur_sigma": [0.1, 1.0],
    "views.solarise_probability": 0.0,
}
_OF_RESNET18: Final = {
    "backbone.drop_path_rate": 0.0,
    "views.global_scale": [0.2, 1.0],
    "optimizer.weight_decay": 0.05,
    "optimizer.weight_decay_end": 0.05,
    "optimizer.clip_norm": 0.0,
}
NETWORKS: Final = {  # in order of size
    "slim": NetworkRow(
        name="resnet10t",
        kind="a small ResNet",
        reason="in the same minutes it learns far more than a ViT",
        reduction=REDUCTION,
        options={
            "backbone.timm_options": {"stem_width": 8, "channels": [32, 64, 128, 256], "zero_init_last": False},
            "backbone.drop_path_rate": 0.0,
            **_EVEN_BLUR,
            "optimizer.learning_rate": 6e-3,
            "optimizer.weight_decay": 0.01,
            "optimizer.weight_decay_end": 0.01,
        },
        instead="tiny",
        measured=f"{_AUTO}, docs/results/demo.md",
    ),
    "resnet18 of thumbnails": NetworkRow(
        name="resnet18",
        kind="a ResNet",
        reason="in the same minutes it learns far more than a ViT",
        options={**_OF_RESNET18, "backbone.stem": "small", "optimizer.learning_rate": 1e-3},
        instead="tiny",
        measured=f"{_RESNET}: 68.7 % after 30 epochs, 85.5 after 200; a ViT {_CIFAR}: 65.0 after 60",
    ),
    "resnet18": NetworkRow(
        name="resnet18",
        kind="a ResNet",
        reason="a step takes less than half as long as that of a ViT that sees as much",
        reduction=REDUCTION,
        options={**_OF_RESNET18, **_EVEN_BLUR, "optimizer.learning_rate": 3e-3},
        instead="small",
        measured=_AUTO,
    ),
    "tiny": NetworkRow(name="vit_tiny_patch16_224", kind="a ViT", measured=_CIFAR),
    "small": NetworkRow(name="vit_small_patch16_224", kind="a ViT", measured=f"{_NETTE}, {_TINY}, the paper"),
    "base": NetworkRow(name="vit_base_patch16_224", kind="a ViT", measured="the paper"),
}
OF_VITS: Final = {"backbone.patch_size", "backbone.image_size"}  # who sets one of them wants a ViT


@dataclass(frozen=True, kw_only=True)
class ViewRow:
    """How images whose shorter side has at least `side` pixels are seen."""

    side: int
    patch: int
    local_size: int
    max_side: int  # files are reduced to this while they are decoded
    blur_sigma: float  # 0: no blur, no solarisation; 2 px at 224 px in the paper
    global_scale: tuple[float, float] = (0.32, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.32)
    crop_ratio: float = 1.0  # of evaluations; the border of small images counts
    network: str = "base"  # the largest that suits
    drop_path: float = 0.1


_THUMBNAIL: Final[dict[str, Any]] = {  # massl-cifar and, of the network, massl-cifar-resnet18
    "blur_sigma": 0.0,
    "global_scale": (0.4, 1.0),
    "local_scale": (0.1, 0.4),
    "network": "resnet18 of thumbnails",
    "drop_path": 0.0,
}
VIEWS: Final = (
    ViewRow(side=16, patch=4, local_size=8, max_side=48, **_THUMBNAIL),  # not measured
    ViewRow(side=28, patch=4, local_size=16, max_side=80, **_THUMBNAIL),  # not measured
    ViewRow(side=32, patch=4, local_size=16, max_side=96, **_THUMBNAIL),  # massl-cifar
    ViewRow(side=48, patch=8, local_size=24, max_side=144, blur_sigma=0.4),  # not measured
    ViewRow(side=64, patch=8, local_size=32, max_side=192, blur_sigma=0.6),  # massl-tiny
    ViewRow(side=96, patch=8, local_size=40, max_side=288, blur_sigma=0.9),  # not measured
    ViewRow(side=112, patch=8, local_size=48, max_side=320, blur_sigma=1.0, crop_ratio=0.875),
    ViewRow(side=160, patch=16, local_size=64, max_side=480, blur_sigma=1.4, crop_ratio=0.875),
    ViewRow(side=224, patch=16, local_size=96, max_side=640, blur_sigma=2.0, crop_ratio=0.875),
)  # 112: massl-imagenette; 160: not measured; 224: the paper


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """What a device with at least `gib` of memory can do in a reasonable time."""

    kind: Literal["cpu", "cuda"]
    gib: float
    network: str  # the largest
    view: int  # the largest, in pixels
    batch_size: int  # the largest
    head: tuple[int, int]  # hidden and output dimension
    epochs: float = 1.0  # share of the table's
    most_images: int = 2**62  # with more, the column of so many holds: a run of few steps is a small run


DEVICES: Final = (
    DeviceRow(
        kind="cpu", gib=0, network="slim", view=64, batch_size=128, head=(512, 128), epochs=0.25, most_images=35_000
    ),  # as demo
    DeviceRow(kind="cuda", gib=0, network="tiny", view=112, batch_size=1024, head=(2048, 256)),  # not measured
    DeviceRow(kind="cuda", gib=6, network="small", view=224, batch_size=1024, head=(2048, 256)),
    DeviceRow(kind="cuda", gib=70, network="base", view=224, batch_size=1024, head=(2048, 256)),
)

EPOCHS_OF_LONG_RUNS: Final = 100  # a run that sees fewer images is chosen like a whole run on fewer
LEAST_IMAGES: Final = 32
FEW_IMAGES: Final = 1_000  # below, published weights are advised; nothing here was measured with so few
PUBLISHED: Final = "vit_small_patch14_reg4_dinov2.lvd142m"
SMALLEST_BATCH: Final = 16
LEAST_STEPS_PER_EPOCH: Final = 4  # a smaller set gets a smaller batch
MEMORY_SHARE: Final = 4  # the memory holds at most one in so many images; it has as many blocks
SMALLEST_BLOCK: Final = 4
MOMENTUM: Final = (0.5, 0.9995)  # smallest and largest
PROBES_PER_RUN: Final = 10
LOGS_PER_RUN: Final = 50
MOST_LOG_STEPS: Final = 50
CHECKPOINT_STEPS: Final = 1000
DEVICE_SHARE: Final = 0.8  # of the GPU's memory that a plan may use by count
CACHE_SHARE: Final = 0.4  # of the host's memory that decoded images may take
MOST_WORKERS: Final = 16  # docs/performance.md#feeding
CORES_FOR_PROCESSES: Final = 9  # threads keep about 8 cores busy, docs/performance.md#feeding
CORES_FOR_CPU_DECODER: Final = 6  # with fewer, nvJPEG decodes photographs on the GPU, docs/performance.md#feeding
PHOTOGRAPH_SIDE: Final = 224  # below, decoding costs little


def at(setting: str, num_images: int) -> Any:
    """The value of a row for a number of images."""
    row = TABLE[setting]
    number = bisect_right(IMAGES, num_images)
    if number == 0 or number == len(IMAGES):
        return row.values[min(number, len(IMAGES) - 1)]
    low, high = row.values[number - 1], row.values[number]
    share = math.log(num_images / IMAGES[number - 1]) / math.log(IMAGES[number] / IMAGES[number - 1])
    if low == high or row.between == "nearest":
        return low if share < 0.5 else high
    if row.between == "log":
        return low * (high / low) ** share
    return low + (high - low) * share


def because(setting: str, num_images: int) -> str:
    """Why a row has its value."""
    row, middle = TABLE[setting], math.sqrt(IMAGES[2] * IMAGES[3])
    return row.with_many if row.with_many and num_images >= middle else row.reason


def view_row(side: int) -> ViewRow:
    """The row of the largest views that a side allows; the smallest for tiny images."""
    return next((row for row in reversed(VIEWS) if row.side <= side), VIEWS[0])


def device_row(kind: str, gib: float) -> DeviceRow:
    return next(row for row in reversed(DEVICES) if row.kind == kind and row.gib <= gib)
