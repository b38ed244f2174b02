"""Feature extraction from images on the device: the network alone, and with the evaluation's resize and crop.

    python benchmarks/features.py

The share of the card counts the network's forward arithmetic, all tokens through all blocks. The program fails if the
cosine between 16-bit and float32 features of the same image is below 0.999.
"""

import argparse
from collections.abc import Sequence

import ours
import torch
from arguments import add_repetition_arguments
from measure import Case, announce, benchmark_device, emit, free_memory, matrix_rate, print_table, remark, timed_steps
from shapes import forward_flop, transformer_shape
from torch.nn.functional import cosine_similarity

LOWEST_COSINE = 0.999


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="Feature extraction of vision transformers.")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm vision transformer")
    parser.add_argument("--batch", default=[1024], nargs="+", type=int, help="images at once")
    parser.add_argument("--size", default=224, type=int, help="side of a view in pixels")
    parser.add_argument(
        "--stored", default=[375, 500], nargs=2, type=int, metavar=("HEIGHT", "WIDTH"), help="size of stored images"
    )
    parser.add_argument("--feature", default=["cls", "cls_last4", "cls_mean"], nargs="+")
    parser.add_argument("--float32-batch", default=256, type=int, help="images at once in float32")
    add_repetition_arguments(parser, num_warmup=5, num_timed=20)
    chosen = parser.parse_args(arguments)
    device = benchmark_device()
    announce(ours.environment(device))
    backbone = ours.evaluated_backbone(chosen.model, device=device)
    check_agreement(backbone, chosen, device)
    rate = matrix_rate(device)
    cases = [
        measure(backbone, chosen, feature, batch, "bf16", rate, device)
        for feature in chosen.feature
        for batch in chosen.batch
    ]
    cases.append(measure(backbone, chosen, chosen.feature[0], chosen.batch[0], "bf16", rate, device, from_pixels=True))
    cases.append(measure(backbone, chosen, chosen.feature[0], chosen.float32_batch, "fp32", rate, device))
    print_table(cases, extra_columns=["percent_of_matrix_rate", "percent_of_matrix_rate_needed"])
    return cases


def check_agreement(backbone: ours.Backbone, chosen: argparse.Namespace, device: torch.device) -> None:
    views = torch.randn(
        64, 3, chosen.size, chosen.size, device=device, generator=torch.Generator(device).manual_seed(1)
    )
    for feature in chosen.feature:
        exact, fast = (ours.features(backbone, views, feature, precision) for precision in ("fp32", "bf16"))
        lowest = float(cosine_similarity(exact, fast, dim=1).min())
        remark(f"# {feature}: lowest cosine between float32 and 16-bit features of 64 images {lowest:.6f}")
        if lowest < LOWEST_COSINE:
            raise SystemExit(f"features {feature} in 16 bits are off: cosine {lowest:.5f}")


def measure(
    backbone: ours.Backbone,
    chosen: argparse.Namespace,
    feature: str,
    batch: int,
    precision: str,
    rate: float,
    device: torch.device,
    *,
    from_pixels: bool = False,
) -> Case:
    free_memory()
    views = torch.randn(
        batch, 3, chosen.size, chosen.size, device=device, generator=torch.Generator(device).manual_seed(0)
    )
    stored = ours.stored_images(
        batch if from_pixels else 1, height=chosen.stored[0], width=chosen.stored[1], device=device
    )

    def step(_: int) -> None:
        seen = ours.centre_views(stored, size=chosen.size) if from_pixels else views
        ours.features(backbone, seen, feature, precision)  # type: ignore[arg-type]

    timing = timed_steps(step, num_warmup=chosen.warmup, num_timed=chosen.timed, device=device)
    label = f"{chosen.model} {feature} {precision} N={batch}{' from stored pixels' if from_pixels else ''}"
    return emit(
        timing.case(
            label, num_images=batch, extras=shares(chosen, batch, timing.median_milliseconds, rate), steady_memory=True
        )
    )


def shares(chosen: argparse.Namespace, batch: int, milliseconds: float, rate: float) -> dict[str, float | str | None]:
    shape = transformer_shape(chosen.model)
    if shape is None:
        return {}
    num_tokens = shape.num_tokens(chosen.size)

    def percent(flop: float) -> float:
        return round(100 * batch * flop / (milliseconds * 1e-3) / (rate * 1e12), 1)

    return {
        "gflop_per_image": round(forward_flop(shape, num_tokens) / 1e9, 2),
        "matrix_tflops": round(rate, 1),
        "percent_of_matrix_rate": percent(forward_flop(shape, num_tokens)),
        "percent_of_matrix_rate_needed": percent(forward_flop(shape, num_tokens, class_token_only_at_the_end=True)),
    }


if __name__ == "__main__":
    main()
