"""Whole training steps of massl and of the official MaSSL, DINO and iBOT code, in one run on one card.

    python benchmarks/peers.py --massl CHECKOUT --dino CHECKOUT --ibot CHECKOUT --cases vit_small:128 vit_base:64

Each measurement runs in its own process, one at a time: the peers first (`peer_step.py`), then the same methods in
massl (`step.py`) with the same batch, views, rows (or prototypes), block size and drop path. Ratios compare each of our
methods with each peer. Peers run as published (float16 autocast, loss scaling, their own loop). Their peak memory is
that of the steady steps; massl's includes the warm-up, where a CUDA graph allocates its memory.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ours
from arguments import add_repetition_arguments, add_training_arguments
from measure import Case, announce, benchmark_device, case_from, emit, print_table, remark

HERE = Path(__file__).resolve().parent
# a file that identifies the checkout
PROGRAMS = {"massl": "main_massl.py", "dino": "main_dino.py", "ibot": "main_ibot.py"}
REPOSITORIES = {
    "massl": "https://github.com/sthalles/MaSSL",
    "dino": "https://github.com/facebookresearch/dino",
    "ibot": "https://github.com/bytedance/ibot",
}
TIMM_NAMES = {
    "vit_tiny": "vit_tiny_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
}
TIME_LIMIT_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Comparison:
    model: str
    batch_size: int


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    chosen = parse(arguments)
    announce(ours.environment(benchmark_device()))
    checkouts = {peer: getattr(chosen, peer) for peer in PROGRAMS if getattr(chosen, peer) is not None}
    cases: list[Case] = []
    for comparison in chosen.cases:
        peers = {
            peer: measured for peer, path in checkouts.items() if (measured := run_peer(peer, path, comparison, chosen))
        }
        cases += peers.values()
        for method in checkouts:
            for kernels in chosen.kernels:
                our_case = run_ours(method, comparison, kernels, chosen)
                if our_case is not None:
                    cases.append(emit(with_ratios(our_case, peers)))
    print_table(
        cases,
        extra_columns=[
            f"{measure}_{peer}" for peer in checkouts for measure in ("times_as_fast_as", "memory_share_of")
        ],
    )
    return cases


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="massl's training step compared with its peers.")
    for peer, program in PROGRAMS.items():
        parser.add_argument(f"--{peer}", type=Path, help=f"checkout of {REPOSITORIES[peer]}: the folder with {program}")
    parser.add_argument(
        "--cases", nargs="+", type=comparison_argument, metavar="MODEL:BATCH", help="e.g. vit_small:128 vit_base:64"
    )
    parser.add_argument(
        "--quick-cpu",
        action="store_true",
        help="tiny sizes, to try the programs without a GPU; the numbers mean nothing",
    )
    add_training_arguments(parser)
    add_repetition_arguments(parser, num_warmup=5, num_timed=15)
    chosen = parser.parse_args(arguments)
    if all(getattr(chosen, peer) is None for peer in PROGRAMS):
        parser.error(f"no peer given: name a checkout with {' or '.join(f'--{peer} PATH' for peer in PROGRAMS)}")
    for peer, program in PROGRAMS.items():
        path = getattr(chosen, peer)
        if path is not None and not (path / program).is_file():
            parser.error(f"--{peer}: {path} holds no {program}; give a checkout of {REPOSITORIES[peer]}")
    if chosen.quick_cpu:
        chosen.views, chosen.rows, chosen.block, chosen.warmup, chosen.timed = "2x32+2x16", 128, 32, 1, 2
        chosen.cases = chosen.cases or [Comparison(model="vit_tiny", batch_size=4)]
    elif chosen.cases is None:
        chosen.cases = [comparison_argument(text) for text in ("vit_small:64", "vit_small:128", "vit_base:64")]
    return chosen


def comparison_argument(text: str) -> Comparison:
    model, _, batch_size = text.partition(":")
    if model not in TIMM_NAMES or not batch_size.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:BATCH with one of the models {', '.join(TIMM_NAMES)}")
    return Comparison(model=model, batch_size=int(batch_size))


def shared_arguments(comparison: Comparison, chosen: argparse.Namespace) -> list[str]:
    values = {
        "batch": comparison.batch_size,
        "views": chosen.views,
        "rows": chosen.rows,
        "block": chosen.block,
        "drop-path": chosen.drop_path,
        "warmup": chosen.warmup,
        "timed": chosen.timed,
    }
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def run_peer(peer: str, checkout: Path, comparison: Comparison, chosen: argparse.Namespace) -> Case | None:
    command = ["peer_step.py", peer, "--checkout", str(checkout.resolve()), "--model", comparison.model]
    case = run_program([*command, *shared_arguments(comparison, chosen)])
    return (
        None if case is None else emit(replace(case, case=f"{comparison.model} N={comparison.batch_size} peer {peer}"))
    )


def run_ours(method: str, comparison: Comparison, kernels: str, chosen: argparse.Namespace) -> Case | None:
    command = [
        "step.py",
        "--method",
        method,
        "--model",
        TIMM_NAMES[comparison.model],
        "--kernels",
        kernels,
        "--graph" if chosen.graph else "--no-graph",
    ]
    case = run_program([*command, *shared_arguments(comparison, chosen)])
    if case is None:
        return None
    graph = " graph" if case.extras["is_graph"] else ""
    return replace(case, case=f"{comparison.model} N={comparison.batch_size} massl's {method}, {kernels}{graph}")


def run_program(command: Sequence[str]) -> Case | None:
    """Run a program that prints one case. A failing program is reported and skipped."""
    try:
        finished = subprocess.run(
            [sys.executable, str(HERE / command[0]), *command[1:]],
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIME_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        remark(f"{' '.join(command)}: skipped, it took more than {TIME_LIMIT_SECONDS} s")
        return None
    lines = finished.stdout.splitlines()
    if finished.returncode != 0 or len(lines) != 1:
        remark(f"{' '.join(command)}: skipped, it ended with status {finished.returncode} and {len(lines)} results")
        return None
    return case_from(json.loads(lines[0]))


def with_ratios(our_case: Case, peers: dict[str, Case]) -> Case:
    ratios: dict[str, float | str | None] = {}
    for peer, theirs in peers.items():
        ratios[f"times_as_fast_as_{peer}"] = round(our_case.images_per_second / theirs.images_per_second, 3)
        if our_case.peak_gib is not None and theirs.peak_gib:
            ratios[f"memory_share_of_{peer}"] = round(our_case.peak_gib / theirs.peak_gib, 3)
    return replace(our_case, extras={**our_case.extras, **ratios})


if __name__ == "__main__":
    main()
