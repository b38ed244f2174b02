"""Time of a whole training step with massl's update kernels, and with torch's fused AdamW, foreach clipping and EMA.

    python benchmarks/update.py --model vit_small_patch16_224 --batch 128

Both trainings live in one process and take turns, so that they meet the same clock of the card. What the kernels save
is the difference of the medians.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Literal

import ours
from arguments import add_repetition_arguments, add_training_arguments, step_spec
from measure import Case, announce, benchmark_device, emit, print_table, remark, timed_steps

UPDATES: tuple[Literal["kernels", "torch"], ...] = ("kernels", "torch")


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="A training step with massl's update kernels and with torch's.")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm model name")
    parser.add_argument("--batch", default=128, type=int, help="images per step")
    parser.add_argument("--rounds", default=8, type=int, help="turns of each")
    add_training_arguments(parser)
    add_repetition_arguments(parser, num_warmup=10, num_timed=30)
    chosen = parser.parse_args(arguments)
    device = benchmark_device()
    announce(ours.environment(device))
    spec = step_spec(chosen, batch_size=chosen.batch, kernels=chosen.kernels[0], device=device)
    trainings, views = {update: ours.Training(spec) for update in UPDATES}, ours.synthetic_views(spec)
    found: dict[str, list[float]] = {update: [] for update in UPDATES}
    for _ in range(chosen.rounds):
        for update, training in trainings.items():
            with ours.update_by(update):
                timing = timed_steps(
                    lambda number, training=training: training.on_views(views, number),
                    num_warmup=chosen.warmup,
                    num_timed=chosen.timed,
                    device=device,
                )
            found[update].append(timing.median_milliseconds)
    medians = {update: statistics.median(times) for update, times in found.items()}
    cases = [
        emit(
            Case(
                case=f"update by {update} {spec.name}",
                images_per_second=1e3 * spec.batch_size / milliseconds,
                peak_gib=None,  # the two share a process
                milliseconds=milliseconds,
                extras={"rounds": " ".join(f"{time:.3f}" for time in found[update])},
            )
        )
        for update, milliseconds in medians.items()
    ]
    print_table(cases)
    remark(f"massl's kernels save {medians['torch'] - medians['kernels']:.3f} ms a step")
    return cases


if __name__ == "__main__":
    main()
