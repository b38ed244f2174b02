"""Command-line arguments that several benchmarks share."""

import argparse

import torch
from ours import KERNELS, StepSpec
from shapes import parse_views

PAPER_VIEWS = "2x224+10x96"
PAPER_ROWS, PAPER_BLOCK = 65_536, 16_384


def views_argument(text: str) -> str:
    """Check the value here, so that a wrong one is an argument error."""
    try:
        return str(parse_views(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--views", default=PAPER_VIEWS, type=views_argument, help="number x pixels of global + local views"
    )
    parser.add_argument("--rows", default=PAPER_ROWS, type=int, help="K: rows of the memory")
    parser.add_argument("--block", default=PAPER_BLOCK, type=int, help="N_b: rows per block")
    parser.add_argument(
        "--kernels", nargs="+", default=["fused"], choices=KERNELS, help="how the networks are computed"
    )
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=True, help="record the step as CUDA graphs (GPU)"
    )
    parser.add_argument("--drop-path", default=0.1, type=float, help="stochastic depth of the student")


def add_repetition_arguments(parser: argparse.ArgumentParser, *, num_warmup: int, num_timed: int) -> None:
    parser.add_argument("--warmup", default=num_warmup, type=int, help="steps before the clock starts")
    parser.add_argument("--timed", default=num_timed, type=int, help="timed steps")


def step_spec(chosen: argparse.Namespace, *, batch_size: int, kernels: str, device: torch.device) -> StepSpec:
    return StepSpec(
        method=getattr(chosen, "method", "massl"),
        model=chosen.model,
        batch_size=batch_size,
        views=parse_views(chosen.views),
        num_rows=chosen.rows,
        block_size=chosen.block,
        drop_path=chosen.drop_path,
        kernels=kernels,
        graph=chosen.graph and device.type == "cuda",
        device=device,
    )
