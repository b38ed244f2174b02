"""Spherical k-means at the size of an evaluation: 1000 clusters of 50,000 rows with 768 dimensions.

    python benchmarks/kmeans.py

The rows scatter around random centres, one per cluster, so that there are clusters to find.
"""

import argparse
from collections.abc import Sequence

import ours
import torch
from measure import Case, announce, benchmark_device, emit, print_table, timed_steps


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="k-means of features.")
    parser.add_argument("--rows", default=50_000, type=int)
    parser.add_argument("--dim", default=768, type=int)
    parser.add_argument("--clusters", default=1000, type=int)
    parser.add_argument("--iterations", default=100, type=int, help="at most, of each restart")
    parser.add_argument("--restarts", default=10, type=int)
    parser.add_argument("--repetitions", default=2, type=int, help="timed runs, after one warm-up run")
    chosen = parser.parse_args(arguments)
    device = benchmark_device()
    announce(ours.environment(device))
    generator = torch.Generator(device).manual_seed(0)
    centres = torch.randn(chosen.clusters, chosen.dim, device=device, generator=generator)
    members = torch.randint(0, chosen.clusters, (chosen.rows,), device=device, generator=generator)
    rows = centres[members] + 2.0 * torch.randn(chosen.rows, chosen.dim, device=device, generator=generator)
    objectives: list[float] = []

    def step(_: int) -> None:
        sizes = {"num_clusters": chosen.clusters, "num_iterations": chosen.iterations, "num_restarts": chosen.restarts}
        objectives.append(ours.clusters(rows, **sizes))

    timing = timed_steps(step, num_warmup=1, num_timed=chosen.repetitions, device=device)
    if len(set(objectives)) != 1:
        raise SystemExit(f"repeated runs gave different clusters: {objectives}")
    label = f"k-means {chosen.clusters} x {chosen.rows} x {chosen.dim}, {chosen.restarts} restarts"
    extras = {"seconds": round(timing.median_milliseconds / 1e3, 3), "objective": round(objectives[0], 4)}
    case = emit(timing.case(label, num_images=chosen.rows, extras=extras, steady_memory=True))
    print_table([case], extra_columns=["seconds", "objective"])
    return [case]


if __name__ == "__main__":
    main()
