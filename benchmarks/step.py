"""Speed and memory of one whole training step of any method, on synthetic views already on the device.

    python benchmarks/step.py --method massl --model vit_small_patch16_224 --batch 64 128 256 --kernels fused plain

A step is what the trainer does between two batches: student and teacher forward, memory loss, backward, clipping,
AdamW, teacher and memory. Its arithmetic (`shapes.step_flop_per_image`) over its time is printed as a share of the
card's own bfloat16 matrix rate.
"""

import argparse
from collections.abc import Sequence

import ours
from arguments import add_repetition_arguments, add_training_arguments, step_spec
from measure import (
    Case,
    announce,
    benchmark_device,
    emit,
    free_memory,
    matrix_rate,
    print_table,
    remark,
    survives_lack_of_memory,
    timed_steps,
)
from shapes import step_flop_per_image, transformer_shape


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="Speed and memory of massl's whole training step.")
    parser.add_argument("--method", default="massl", choices=ours.METHOD_NAMES, help="the method to train")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm model name")
    parser.add_argument("--batch", nargs="+", default=[64, 128, 256], type=int, help="images per step")
    add_training_arguments(parser)
    add_repetition_arguments(parser, num_warmup=10, num_timed=30)
    chosen = parser.parse_args(arguments)
    device = benchmark_device()
    announce(ours.environment(device))
    card_tflops = matrix_rate(device)
    remark(f"# bfloat16 matrix product: {card_tflops:.3g} TFLOP/s")
    cases = []
    for batch_size in chosen.batch:
        for kernels in chosen.kernels:
            spec = step_spec(chosen, batch_size=batch_size, kernels=kernels, device=device)
            with survives_lack_of_memory(spec.name):
                cases.append(emit(measure_step(spec, card_tflops, num_warmup=chosen.warmup, num_timed=chosen.timed)))
            free_memory()
    print_table(cases, extra_columns=["gflop_per_image", "percent_of_matrix_rate"])
    return cases


def measure_step(spec: ours.StepSpec, card_tflops: float, *, num_warmup: int, num_timed: int) -> Case:
    training, views = ours.Training(spec), ours.synthetic_views(spec)
    if training.networks != spec.kernels:
        remark(f"{spec.name}: the networks are {training.networks}")
    timing = timed_steps(
        lambda number: training.on_views(views, number), num_warmup=num_warmup, num_timed=num_timed, device=spec.device
    )
    images_per_second = 1e3 * spec.batch_size / timing.median_milliseconds
    extras: dict[str, float | str | None] = {
        "views": str(spec.views),
        "rows": spec.num_rows,
        "block": spec.block_size,
        "networks": training.networks,
        "is_graph": training.is_graph,
    }
    return timing.case(
        spec.name, num_images=spec.batch_size, extras=extras | arithmetic(spec, images_per_second, card_tflops)
    )


def arithmetic(spec: ours.StepSpec, images_per_second: float, card_tflops: float) -> dict[str, float]:
    """Shares of the matrix rate by two counts: all tokens in all blocks, and only what the class token depends on."""
    network = transformer_shape(spec.model)
    found = {"matrix_tflops": round(card_tflops, 3)}
    if network is None:
        return found
    counts = {"": step_flop_per_image(network, spec.views)}
    counts["_needed"] = step_flop_per_image(network, spec.views, class_token_only_at_the_end=True)
    for suffix, flop in counts.items():
        found[f"gflop_per_image{suffix}"] = round(flop / 1e9, 3)
        found[f"percent_of_matrix_rate{suffix}"] = round(100.0 * flop * images_per_second / (card_tflops * 1e12), 2)
    return found


if __name__ == "__main__":
    main()
