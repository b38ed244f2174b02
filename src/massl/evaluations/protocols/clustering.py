"""Agreement of k-means clusters with classes: NMI, AMI and ARI of spherical k-means, as in CARP."""

from collections.abc import Iterator

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from massl import keyed_random
from massl.config import Settings
from massl.evaluations.base import EvaluationData, ProtocolEntry, required_labels
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import EvaluationError, Measurement, Setting
from massl.ops.scoring.finite import require_finite
from massl.ops.scoring.kmeans import assign, spherical_kmeans

# Published numbers of clusters other than the number of classes: NMI and AMI of ViTs on CIFAR-10 fit 47, not 10.
_PUBLISHED_KS = {"CIFAR-10": {47: "as published for ViTs"}}
_CHUNK_ROWS = 65_536


class ClusteringSettings(Settings):
    ks: tuple[PositiveInt, ...] = Field((), description="numbers of clusters besides the number of classes")
    num_iterations: int = Field(100, gt=0, description="most iterations of one run of k-means")
    num_restarts: int = Field(10, gt=0, description="runs of k-means from other points, of which the best is kept")
    subsample_per_centroid: int = Field(256, ge=0, description="most random training images per cluster; 0: all")
    seed: int = Field(
        1234,
        ge=-keyed_random.MAX_SEED,
        le=keyed_random.MAX_SEED,
        description="decides the chosen images and the first centroids",
    )


def train_statistics(rows: Tensor) -> tuple[Tensor, Tensor]:  # [N, D] -> mean [D], scale [D], float64
    """Mean and population deviation of each dimension; the scale of a constant dimension is 1, as in scikit-learn."""
    chunks = torch.split(rows, _CHUNK_ROWS)
    mean = torch.stack([chunk.double().sum(dim=0) for chunk in chunks]).sum(dim=0) / len(rows)
    squares = torch.stack([(chunk.double() - mean).square().sum(dim=0) for chunk in chunks]).sum(dim=0)
    deviation = (squares / len(rows)).sqrt()
    # exactly 0 where all are equal: float64 holds such sums without rounding
    return mean, torch.where(deviation > 0.0, deviation, 1.0)


def standardised(rows: Tensor, mean: Tensor, scale: Tensor) -> Tensor:  # [N, D], [D], [D] -> [N, D]
    return (rows - mean.to(rows.dtype)) / scale.to(rows.dtype)


# [N, D], [Q, D] -> [Q]
def cluster(train: Tensor, test: Tensor, *, num_clusters: int, settings: ClusteringSettings) -> Tensor:
    """The cluster of each test row, for clusters found among the training rows."""
    if num_clusters > len(train):
        raise EvaluationError(f"{num_clusters} clusters among {len(train)} images; lower --clustering.ks")
    require_finite(test, name="the test features")
    num_points = num_clusters * settings.subsample_per_centroid
    points = train
    if 0 < num_points < len(train):
        chosen = keyed_random.permutation(len(train), settings.seed, "k-means points")[:num_points].sort().values
        points = train[chosen.to(train.device)]
    clusters = spherical_kmeans(
        points,
        num_clusters=num_clusters,
        num_iterations=settings.num_iterations,
        num_restarts=settings.num_restarts,
        key=(settings.seed, "k-means"),
    )
    return assign(test, clusters.centroids)[1]


def agreement(labels: Tensor, clusters: Tensor) -> dict[str, float]:  # [Q], [Q] -> percent
    """Normalised and adjusted mutual information (arithmetic means) and adjusted Rand index."""
    from sklearn import metrics  # here: slow to import

    pair = labels.cpu().numpy(), clusters.cpu().numpy()
    return {
        "NMI": 100.0 * float(metrics.normalized_mutual_info_score(*pair)),
        "AMI": 100.0 * float(metrics.adjusted_mutual_info_score(*pair)),
        "ARI": 100.0 * float(metrics.adjusted_rand_score(*pair)),
    }


def cluster_numbers(data_name: str, *, num_classes: int, ks: tuple[int, ...]) -> dict[int, Setting]:
    """How many clusters to look for -> the setting in the results, each number once."""
    notes = {num_classes: "classes", **_PUBLISHED_KS.get(data_name, {})}
    return {k: Setting(k=k, note=notes.get(k, "")) for k in dict.fromkeys((*notes, *ks))}


def measure_clustering(
    extractor: Extractor, data: EvaluationData, settings: ClusteringSettings
) -> Iterator[Measurement]:
    """Agreement of clusters with classes on the test images; labels of training images are not used."""
    assert data.train is not None
    assert data.test is not None
    labels = required_labels(data.test)
    view = extractor.centre_view(filter="bilinear")
    train, test = (extractor.features(source, view=view, feature="cls") for source in (data.train, data.test))
    train_rows, test_rows = (features.rows.to(extractor.device) for features in (train, test))
    mean, scale = train_statistics(train_rows)
    train_rows, test_rows = (standardised(rows, mean, scale) for rows in (train_rows, test_rows))
    num_classes = len(data.test.class_names or ())
    for num_clusters, setting in cluster_numbers(data.name, num_classes=num_classes, ks=settings.ks).items():
        found = cluster(train_rows, test_rows, num_clusters=num_clusters, settings=settings)
        for metric, value in agreement(labels, found).items():
            yield Measurement(data=data.name, setting=setting, metric=metric, value=value, num_samples=len(test))


PROTOCOL = ProtocolEntry(
    measure=measure_clustering,
    settings_type=ClusteringSettings,
    needs=("train", "test"),
    summary="k-means against labels: NMI, AMI, ARI",
    unremarked=frozenset({"ks"}),
)
