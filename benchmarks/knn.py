"""Nearest neighbours at the size of ImageNet-1k: every validation image against every training image.

    python benchmarks/knn.py

Random unit rows. A few queries are checked in float64: the program fails if a similarity is wrong, or if a true
neighbour is missed by more than rounding explains.
"""

import argparse
from collections.abc import Sequence

import ours
import torch
from measure import Case, announce, benchmark_device, emit, print_table, timed_steps
from torch import Tensor

TOLERANCE = 1e-3  # of a cosine similarity; bfloat16 operands of 768 dimensions round by 1e-4
_CHUNK_ROWS = 65_536  # of float64: 384 MiB at 768 dimensions


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="Cosine top-k of many queries against a large database.")
    parser.add_argument("--queries", default=50_000, type=int)
    parser.add_argument("--rows", default=1_281_167, type=int, help="rows of the database")
    parser.add_argument("--dim", default=768, type=int)
    parser.add_argument("--neighbours", default=200, type=int, help="k")
    parser.add_argument("--checked", default=16, type=int, help="queries compared with float64")
    parser.add_argument("--repetitions", default=3, type=int, help="timed runs, after one warm-up run")
    chosen = parser.parse_args(arguments)
    device = benchmark_device()
    announce(ours.environment(device))
    queries = ours.unit_rows(chosen.queries, chosen.dim, device=device, seed=0)
    database = ours.unit_rows(chosen.rows, chosen.dim, device=device, seed=1)
    found: list[tuple[Tensor, Tensor]] = []

    def search(_: int) -> None:
        found[:] = [ours.nearest(queries, database, chosen.neighbours)]

    timing = timed_steps(search, num_warmup=1, num_timed=chosen.repetitions, device=device)
    similarities, rows = (part[: chosen.checked] for part in found[0])
    agreement = check(queries[: chosen.checked], database, similarities, rows)
    label = f"knn {chosen.queries} queries x {chosen.rows} rows x {chosen.dim}, k={chosen.neighbours}"
    extras = {"seconds": round(timing.median_milliseconds / 1e3, 3), **agreement}
    case = emit(timing.case(label, num_images=chosen.queries, extras=extras, steady_memory=True))
    print_table([case], extra_columns=list(extras))
    return [case]


# [C, D], [M, D], [C, k], [C, k]
def check(queries: Tensor, database: Tensor, similarities: Tensor, rows: Tensor) -> dict[str, float]:
    """Share of the true neighbours found, and largest error of a similarity; exits if they are wrong."""
    # [C, M]
    truth = torch.cat([queries.double() @ chunk.double().T for chunk in torch.split(database, _CHUNK_ROWS)], dim=1)
    best = torch.topk(truth, rows.shape[1], dim=1)
    off = float((truth.gather(1, rows) - similarities.double()).abs().max())
    # how much worse a returned row is than the k-th best
    missed = float((best.values[:, -1:] - truth.gather(1, rows)).max())
    is_found = (rows[:, :, None] == best.indices[:, None, :]).any(dim=1)
    has_twins = bool((rows.sort(dim=1).values.diff(dim=1) == 0).any())
    if off > TOLERANCE or missed > TOLERANCE or has_twins:
        raise SystemExit(
            f"wrong neighbours: similarities off by {off:.2g}, worse than the k-th by {missed:.2g}, "
            f"duplicate rows: {has_twins}"
        )
    return {"recall": round(float(is_found.double().mean()), 5), "largest_error": float(f"{off:.2g}")}


if __name__ == "__main__":
    main()
