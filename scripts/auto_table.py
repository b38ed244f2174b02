"""Write what `auto` chooses for images of some numbers and sizes on some devices into docs/auto.md.

    python scripts/auto_table.py

tests/unit/planning/test_choice.py fails if the table there is not the one of the rules.
"""

from pathlib import Path

from massl.planning.choice import choose
from massl.planning.facts import DeviceFacts, ImageFacts
from massl.planning.memory import computed_gib

PAGE = Path(__file__).parents[1] / "docs" / "auto.md"
BEGIN, END = "<!-- scripts/auto_table.py: begin -->\n", "<!-- scripts/auto_table.py: end -->\n"
IMAGES = (3_000, 30_000, 300_000, 3_000_000)
SIDES = (32, 64, 1000)
DEVICES = (("cpu", 16), ("cuda", 8), ("cuda", 24), ("cuda", 80))


def images_of(num_images: int, side: int) -> ImageFacts:
    return ImageFacts(num_images=num_images, sizes=((side, side),), num_sampled=1)


def device_of(kind: str, gib: float) -> DeviceFacts:
    host = 16 if kind == "cpu" else 128
    cores = 4 if kind == "cpu" else 16
    return DeviceFacts(kind=kind, name=kind, memory_gib=gib, num_cores=cores, host_gib=host)  # type: ignore[arg-type]


def row_of(num_images: int, side: int, kind: str, gib: float) -> str:
    values = choose(images_of(num_images, side), device_of(kind, gib), {}).values
    family, _, size = values["backbone.name"].partition("_")  # vit_small_patch16_224 or resnet10t
    vit = f"ViT-{size.partition('_')[0].capitalize()}/{values.get('backbone.patch_size')}"
    local = f" + {values['views.num_local']} x {values['views.local_size']}" if values["views.num_local"] else ""
    parts = values["trainer.accumulation_steps"]
    cells = [
        f"{num_images:,}",
        str(side),
        "CPU" if kind == "cpu" else f"{gib:.0f} GiB",
        vit if family == "vit" else family,
        f"2 x {values['views.global_size']}{local}",
        f"{values['trainer.batch_size']}{f' in {parts} parts' if parts > 1 else ''}",
        str(values["trainer.epochs"]),
        f"{values['method.memory.num_rows']:,} / {values['method.memory.block_size']:,}",
        f"{values['method.teacher.momentum']:g}",
        f"{values['method.teacher.temperature']:g}",
        "yes" if values["method.head.batch_norm"] else "no",
        f"{values['method.instance_weight']:g}",
        f"{computed_gib(values, device_kind=kind):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Sides on one GPU, then devices for photographs."""
    head = ("images", "side", "device", "network", "views, px", "batch", "epochs", "K / N_b", "momentum", "temperature")
    head = (*head, "batch norm", "instance weight", "GiB by count")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [row_of(number, side, "cuda", 24) for number in IMAGES for side in SIDES]
    others = [device for device in DEVICES if device != ("cuda", 24)]
    lines += [row_of(number, 1000, *device) for number in (3_000, 300_000, 3_000_000) for device in others]
    return "\n".join(lines) + "\n"


def page_with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
