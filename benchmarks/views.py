"""How many images a second are cropped, resized and augmented, without a network.

    python benchmarks/views.py --images 375x500 768x1024 --views 2x64+4x32 2x224+10x96 --batch 32

Images are noise on smooth colours, already decoded, and stay where the views are made: on the GPU if there is one. On
the CPU the number of threads matters: set OMP_NUM_THREADS.
"""

import argparse
import re
from collections.abc import Sequence

import ours
import torch
from arguments import PAPER_VIEWS, add_repetition_arguments, views_argument
from measure import Case, announce, benchmark_device, emit, free_memory, print_table, timed_steps
from shapes import parse_views


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="The speed of making views from decoded images.")
    sizes = ["375x500", "768x1024"]
    parser.add_argument("--images", nargs="+", default=sizes, type=size_argument, help="height x width in pixels")
    parser.add_argument("--views", nargs="+", default=["2x64+4x32", PAPER_VIEWS], type=views_argument)
    parser.add_argument("--batch", default=32, type=int, help="images per step")
    add_repetition_arguments(parser, num_warmup=1, num_timed=5)
    chosen = parser.parse_args(arguments)
    device = benchmark_device()
    announce(ours.environment(device))
    cases = []
    for size in chosen.images:
        height, width = map(int, size.split("x"))
        images = ours.smooth_images(chosen.batch, height=height, width=width, device=device)
        for views in chosen.views:
            step = ours.view_step(images, parse_views(views))
            timing = timed_steps(step, num_warmup=chosen.warmup, num_timed=chosen.timed, device=device)
            extras = {"threads": torch.get_num_threads() if device.type == "cpu" else None}
            name = f"views {views} of {size} N={chosen.batch}"
            cases.append(emit(timing.case(name, num_images=chosen.batch, extras=extras, steady_memory=True)))
        free_memory()
    print_table(cases, extra_columns=["threads"])
    return cases


def size_argument(text: str) -> str:
    if re.fullmatch(r"[1-9]\d*x[1-9]\d*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no image size; expected HEIGHTxWIDTH, e.g. 375x500")
    return text


if __name__ == "__main__":
    main()
