"""The linear probe: many heads trained on one stream of features, against a single head on the same stream.

    python benchmarks/probe.py

A step computes the features of a batch (streamed, as published) or reads them from memory (cached), then does one SGD
step of all heads.
"""

import argparse
from collections.abc import Sequence

import ours
import torch
from arguments import add_repetition_arguments
from measure import Case, announce, benchmark_device, emit, free_memory, print_table, timed_steps


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="Linear heads trained at once on features of one backbone.")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm vision transformer")
    parser.add_argument("--feature", default="cls_last4")
    parser.add_argument(
        "--heads", default=[1, 45, 90], nargs="+", type=int, help="90: with the set that selects a rate"
    )
    parser.add_argument("--classes", default=1000, type=int)
    parser.add_argument("--batch", default=1024, type=int)
    parser.add_argument("--size", default=224, type=int, help="side of a view in pixels")
    parser.add_argument("--precision", default=["bf16", "fp32"], nargs="+", choices=("bf16", "fp32"))
    add_repetition_arguments(parser, num_warmup=5, num_timed=20)
    chosen = parser.parse_args(arguments)
    device = benchmark_device()
    announce(ours.environment(device))
    backbone = ours.evaluated_backbone(chosen.model, device=device)
    cases = []
    for precision in chosen.precision:
        for streamed in (True, False):
            first: Case | None = None
            for num_heads in chosen.heads:
                case = measure(backbone, chosen, num_heads, precision, streamed, device, first)
                first = first or case
                cases.append(case)
    print_table(cases, extra_columns=["times_first"])
    return cases


def measure(
    backbone: ours.Backbone,
    chosen: argparse.Namespace,
    num_heads: int,
    precision: str,
    streamed: bool,
    device: torch.device,
    first: Case | None,
) -> Case:
    free_memory()
    generator = torch.Generator(device).manual_seed(0)
    views = torch.randn(chosen.batch, 3, chosen.size, chosen.size, device=device, generator=generator)
    labels = torch.randint(0, chosen.classes, (chosen.batch,), device=device, generator=generator)
    rows = ours.features(backbone, views, chosen.feature, precision).clone()  # type: ignore[arg-type]
    step_heads = ours.probe_step(
        num_heads, num_classes=chosen.classes, dim=rows.shape[1], allow_tf32=precision == "bf16", device=device
    )

    def step(_: int) -> None:
        step_heads(ours.features(backbone, views, chosen.feature, precision) if streamed else rows, labels)  # type: ignore[arg-type]

    timing = timed_steps(step, num_warmup=chosen.warmup, num_timed=chosen.timed, device=device)
    source = "streamed" if streamed else "cached"
    relative = 1.0 if first is None else timing.median_milliseconds / first.milliseconds
    label = f"probe {source} {precision} {num_heads} heads x {chosen.classes} classes N={chosen.batch}"
    return emit(
        timing.case(label, num_images=chosen.batch, extras={"times_first": round(relative, 3)}, steady_memory=True)
    )


if __name__ == "__main__":
    main()
