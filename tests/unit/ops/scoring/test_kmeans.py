import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor
from torch.nn.functional import normalize

from massl.ops.scoring import kmeans
from massl.ops.scoring.kmeans import assign, cluster_sums, spherical_kmeans


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(num_clusters: int, *, per_cluster: int, dim: int, noise: float) -> tuple[Tensor, Tensor]:
    labels = torch.arange(num_clusters).repeat_interleave(per_cluster)
    centres = torch.linalg.qr(draw(dim, dim, seed=1))[0][:num_clusters]
    return centres[labels] + noise * draw(len(labels), dim, seed=2), labels


def partition_objective(rows: Tensor, clusters: Tensor | np.ndarray) -> float:
    """Mean inner product of the rows with the best unit centroids of a partition: lengths of the clusters' sums, added
    up.
    """
    labels = np.asarray(clusters)
    sums = [rows[torch.from_numpy(labels == label)].double().sum(dim=0) for label in np.unique(labels)]
    return float(sum(total.norm() for total in sums)) / len(rows)


@pytest.mark.parametrize("seed", range(4))
def test_few_points_are_split_as_well_as_the_best_of_all_partitions(seed: int) -> None:
    rows = draw(8, 2, seed=seed)
    best = max(partition_objective(rows, np.array(labels)) for labels in itertools.product(range(3), repeat=8))
    found = spherical_kmeans(rows, num_clusters=3, num_restarts=20, key=("test",))
    assert found.objectives[-1] == pytest.approx(best, rel=1e-6)


def test_the_objective_is_no_worse_than_that_of_scikit_learn() -> None:
    rows = normalize(planted(6, per_cluster=40, dim=8, noise=0.35)[0], dim=1)
    truth = KMeans(6, n_init=10, random_state=0).fit(rows.numpy()).labels_
    found = spherical_kmeans(rows, num_clusters=6, key=(1234,))
    assert found.objectives[-1] >= partition_objective(rows, truth) - 1e-6
    assert found.objectives[-1] == pytest.approx(partition_objective(rows, assign(rows, found.centroids)[1]), rel=1e-5)


def test_planted_clusters_are_recovered() -> None:
    rows, labels = planted(10, per_cluster=30, dim=16, noise=0.05)
    found = spherical_kmeans(rows, num_clusters=10, key=(1234,))
    assert normalized_mutual_info_score(labels, assign(rows, found.centroids)[1]) == pytest.approx(1.0)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000), st.booleans(), st.data())
@settings(max_examples=60)
def test_the_objective_never_falls_and_centroids_keep_unit_length(
    num_rows: int, dim: int, seed: int, with_copies: bool, data: st.DataObject
) -> None:
    num_clusters = data.draw(st.integers(1, num_rows))
    rows = 3.0 * draw(num_rows, dim, seed=seed)
    if with_copies:  # equal points make clusters without any
        rows = rows[torch.arange(num_rows) % max(1, num_clusters // 2)]
    found = spherical_kmeans(rows, num_clusters=num_clusters, num_restarts=2, num_iterations=20, key=(seed,))
    assert all(after >= before - 1e-5 for before, after in itertools.pairwise(found.objectives))
    torch.testing.assert_close(found.centroids.norm(dim=1), torch.ones(num_clusters))


def test_one_cluster_points_along_the_mean_and_long_points_weigh_more() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    found = spherical_kmeans(rows, num_clusters=1, key=(0,))
    torch.testing.assert_close(found.centroids, torch.tensor([[1.0, 3.0]]) / 10**0.5)
    assert found.objectives[-1] == pytest.approx(10**0.5 / 2)


def test_the_length_of_a_point_does_not_decide_its_cluster() -> None:
    centroids = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    rows = torch.tensor([[2.0, 1.0], [200.0, 100.0], [0.01, 0.02], [5.0, 5.0]])
    assert assign(rows, centroids)[1].tolist() == [0, 0, 1, 0]  # of equal ones the first


def test_with_as_many_clusters_as_points_each_point_has_its_own() -> None:
    rows = draw(7, 3, seed=5)
    found = spherical_kmeans(rows, num_clusters=7, key=(0,))
    assert sorted(assign(rows, found.centroids)[1].tolist()) == list(range(7))
    assert found.objectives[-1] == pytest.approx(float(rows.norm(dim=1).mean()))


def test_more_iterations_stop_when_nothing_changes_any_more() -> None:
    rows, _ = planted(3, per_cluster=10, dim=4, noise=0.01)
    assert len(spherical_kmeans(rows, num_clusters=3, key=(0,)).objectives) < 10
    rows = draw(300, 4, seed=3)
    assert len(spherical_kmeans(rows, num_clusters=20, num_iterations=2, num_restarts=1, key=(0,)).objectives) == 3


def test_more_restarts_are_never_worse_and_the_best_is_kept() -> None:
    rows = draw(200, 5, seed=6)
    finals = [
        spherical_kmeans(rows, num_clusters=12, num_restarts=number, key=(7,)).objectives[-1] for number in (1, 3, 10)
    ]
    assert finals[0] < finals[-1]
    assert finals == sorted(finals)


def test_a_cluster_without_points_takes_part_of_a_large_one() -> None:
    rows, _ = planted(3, per_cluster=20, dim=5, noise=0.2)
    first = torch.stack([rows[0], rows[0], rows[30]])  # the second stays empty: of equal centroids the first is taken
    assert assign(rows, normalize(first, dim=1))[1].unique().tolist() == [0, 2]
    found = kmeans._one_run(rows, first, num_iterations=50)
    assert assign(rows, found.centroids)[1].unique().tolist() == [0, 1, 2]


def test_the_copy_goes_beside_the_largest_cluster_and_leaves_it_alone() -> None:
    rows = torch.tensor([[1.0, 0.1], [1.0, 0.0], [1.0, -0.1], [0.0, 1.0]])
    centroids = kmeans._updated(torch.eye(2)[[0, 1, 1]], rows, torch.tensor([0, 0, 0, 1]))
    torch.testing.assert_close(centroids[:2], torch.eye(2))
    assert float(centroids[2] @ centroids[0]) > 1.0 - 1e-5
    before = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    centroids = kmeans._updated(before, torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([0, 0]))
    torch.testing.assert_close(centroids[0], torch.tensor([0.5, 0.5]).sqrt())
    assert 0.0 < float((centroids[2] - centroids[0]).norm()) < 0.002
    assert torch.equal(centroids[1], before[1])  # no second large cluster to copy: stays where it was


def test_sums_and_counts_are_those_of_a_loop() -> None:
    rows, clusters = draw(30, 4, seed=8), torch.arange(30) ** 2 % 7  # clusters 3, 5, 6 stay empty
    sums, counts = cluster_sums(rows, clusters, num_clusters=9)
    for number in range(9):
        members = [row for row, cluster in zip(rows, clusters, strict=True) if cluster == number]
        assert int(counts[number]) == len(members)
        torch.testing.assert_close(sums[number], sum(members, start=torch.zeros(4)))


def test_the_same_key_gives_the_same_clusters_and_another_key_others() -> None:
    rows = draw(100, 6, seed=9)
    first, second, other = (spherical_kmeans(rows, num_clusters=15, num_restarts=1, key=(key,)) for key in (1, 1, 2))
    assert torch.equal(first.centroids, second.centroids)
    assert first.objectives == second.objectives
    assert not torch.equal(first.centroids, other.centroids)


def test_chunks_do_not_change_the_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, centroids = draw(50, 6, seed=10), normalize(draw(7, 6, seed=11), dim=1)
    whole = assign(rows, centroids)
    monkeypatch.setattr(kmeans, "_CHUNK_ELEMENTS", 30)
    torch.testing.assert_close(assign(rows, centroids), whole)


@pytest.mark.parametrize("num_clusters", [0, 4])
def test_an_impossible_number_of_clusters_is_refused(num_clusters: int) -> None:
    with pytest.raises(ValueError, match=f"{num_clusters} clusters"):
        spherical_kmeans(draw(3, 2, seed=0), num_clusters=num_clusters, key=(0,))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_clusters_every_time() -> None:
    rows = draw(20_000, 64, seed=12).cuda()
    first, second = (spherical_kmeans(rows, num_clusters=100, num_restarts=2, key=(0,)) for _ in range(2))
    assert torch.equal(first.centroids, second.centroids)
    on_cpu = spherical_kmeans(rows.cpu(), num_clusters=100, num_restarts=2, key=(0,))
    assert first.objectives[0] == pytest.approx(on_cpu.objectives[0], rel=1e-6)  # the same first points
