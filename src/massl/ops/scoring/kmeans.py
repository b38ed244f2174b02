"""Spherical k-means, as in faiss: centroids of unit length, points of any length, similarity by inner product.

Each step maximises sum_i max_k <x_i, c_k> over assignments or over unit centroids, so the objective never falls. Sums
over sorted rows instead of atomic additions make the clusters reproducible on a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from massl import keyed_random
from massl.ops.scoring.finite import require_finite

_CHUNK_ELEMENTS = 1 << 26  # similarities in work at once: 256 MiB
_SPLIT_CHANGE = 1.0 / 1024.0  # relative change of each coordinate that tells a copied centroid from its original


@dataclass(frozen=True, kw_only=True)
class Clusters:
    centroids: Tensor  # [K, D] of unit length
    objectives: tuple[float, ...]  # mean similarity of points to their centroids after each assignment


def spherical_kmeans(
    rows: Tensor, *, num_clusters: int, num_iterations: int = 100, num_restarts: int = 10, key: keyed_random.Key
) -> Clusters:  # [N, D]
    """The best of several runs from different random points."""
    if not 0 < num_clusters <= len(rows):
        raise ValueError(f"{num_clusters} clusters requested of {len(rows)} points")
    require_finite(rows, name="the points")
    # drawn on the CPU: the same points on any device
    starts = (keyed_random.permutation(len(rows), (key, restart))[:num_clusters] for restart in range(num_restarts))
    runs = (_one_run(rows, rows[start.to(rows.device)], num_iterations=num_iterations) for start in starts)
    return max(runs, key=lambda clusters: clusters.objectives[-1])


# [N, D], [K, D] -> similarities [N], clusters [N]
def assign(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The centroid with the largest inner product for each row; the first of several."""
    found = [(chunk @ centroids.T).max(dim=1) for chunk in torch.split(rows, max(1, _CHUNK_ELEMENTS // len(centroids)))]
    return torch.cat([best.values for best in found]), torch.cat([best.indices for best in found])


def _one_run(rows: Tensor, first_centroids: Tensor, *, num_iterations: int) -> Clusters:
    centroids = normalize(first_centroids, dim=1)
    similarities, clusters = assign(rows, centroids)
    objectives = [float(similarities.double().mean())]
    for _ in range(num_iterations):
        centroids = _updated(centroids, rows, clusters)
        similarities, new_clusters = assign(rows, centroids)
        objectives.append(float(similarities.double().mean()))
        if torch.equal(clusters, new_clusters):
            break
        clusters = new_clusters
    return Clusters(centroids=centroids, objectives=tuple(objectives))


def _updated(centroids: Tensor, rows: Tensor, clusters: Tensor) -> Tensor:  # [K, D], [N, D], [N] -> [K, D]
    """Normalised sums of the clusters' rows.

    The n-th empty cluster becomes a slightly changed copy of the n-th largest one, and so takes part of its points.
    faiss draws the large cluster at random and changes both copies; keeping the original, no point can lose.
    """
    sums, counts = cluster_sums(rows, clusters, num_clusters=len(centroids))
    updated = torch.where(counts[:, None] > 0, normalize(sums, dim=1), centroids)
    by_size = torch.argsort(counts, descending=True, stable=True)
    partner = torch.empty_like(by_size).scatter_(0, by_size, by_size.flip(0))  # smallest with largest
    signs = 1.0 - 2.0 * (torch.arange(rows.shape[1], device=rows.device) % 2)
    copies = normalize(updated[partner] * (1.0 + _SPLIT_CHANGE * signs), dim=1)
    return torch.where(((counts == 0) & (counts[partner] > 1))[:, None], copies, updated)


# [N, D], [N] -> [K, D], [K]
def cluster_sums(rows: Tensor, clusters: Tensor, *, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Sum and number of the rows of each cluster, added in row order."""
    sorted_clusters, by_cluster = torch.sort(clusters, stable=True)
    ends = torch.searchsorted(sorted_clusters, torch.arange(num_clusters, device=rows.device), right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    # unsafe: skips a check that synchronises
    return torch.segment_reduce(rows[by_cluster], "sum", lengths=counts, axis=0, unsafe=True), counts
