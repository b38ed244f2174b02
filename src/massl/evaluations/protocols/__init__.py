"""The table of protocols: what `massl evaluate --protocol` can name."""

from massl.evaluations.base import ProtocolEntry
from massl.evaluations.protocols.attention import AttentionSettings, measure_attention
from massl.evaluations.protocols.backgrounds import BackgroundsSettings, measure_backgrounds
from massl.evaluations.protocols.clustering import ClusteringSettings, measure_clustering
from massl.evaluations.protocols.copy_detection import CopyDetectionSettings, measure_copy_detection
from massl.evaluations.protocols.correspondence import CorrespondenceSettings, measure_correspondence
from massl.evaluations.protocols.davis import DavisSettings, measure_davis
from massl.evaluations.protocols.knn import KnnSettings, measure_knn
from massl.evaluations.protocols.linear import LinearSettings, measure_linear
from massl.evaluations.protocols.logreg import LogisticSettings, measure_logreg
from massl.evaluations.protocols.long_tail import LongTailSettings, measure_long_tail
from massl.evaluations.protocols.low_shot import LowShotSettings, measure_low_shot
from massl.evaluations.protocols.retrieval import RetrievalSettings, measure_retrieval

_PAIR, _FOLDER = ("train", "test"), ("folder",)
_PENALTY = frozenset({"penalty", "penalty_per_sample", "normalise", "max_iterations"})
_SWEEP = frozenset({"crops", "num_cached_crops", "epochs"})
_SHARES = frozenset({"ks", "fractions", "lists", "scorers", "per_class", "per_class_scorers"})
_TAIL = frozenset({"make", "largest", "smallest"})
_DRAWN = frozenset({"radii", "cosine", "num_points", "points_model", "num_figures"})

PROTOCOLS: dict[str, ProtocolEntry] = {
    "knn": ProtocolEntry(
        measure_knn, KnnSettings, _PAIR, "weighted k-nearest-neighbour classification", frozenset({"ks"})
    ),
    "logreg": ProtocolEntry(
        measure_logreg, LogisticSettings, _PAIR, "logistic regression on frozen features", _PENALTY
    ),
    "linear": ProtocolEntry(
        measure_linear, LinearSettings, _PAIR, "linear probe by SGD, 45 learning rates at once", _SWEEP
    ),
    "low-shot": ProtocolEntry(
        measure_low_shot,
        LowShotSettings,
        _PAIR,
        "classifiers from 1 %, 10 % or a few images per class",
        _SWEEP | _PENALTY | _SHARES,
    ),
    "long-tail": ProtocolEntry(
        measure_long_tail, LongTailSettings, _PAIR, "linear probe on unbalanced classes", _SWEEP | _TAIL
    ),
    "retrieval": ProtocolEntry(
        measure_retrieval,
        RetrievalSettings,
        _FOLDER,
        "landmark retrieval, ROxford5k and RParis6k",
        frozenset({"crop_queries"}),
        sees_centre=False,
    ),
    "copy-detection": ProtocolEntry(
        measure_copy_detection, CopyDetectionSettings, _FOLDER, "Copydays, strong", sees_centre=False
    ),
    "backgrounds": ProtocolEntry(
        measure_backgrounds,
        BackgroundsSettings,
        _FOLDER,
        "ImageNet-9, robustness to backgrounds",
        frozenset({"head"}),
        sees_centre=False,
    ),
    "clustering": ProtocolEntry(
        measure_clustering, ClusteringSettings, _PAIR, "k-means against labels: NMI, AMI, ARI", frozenset({"ks"})
    ),
    "attention": ProtocolEntry(
        measure_attention,
        AttentionSettings,
        ("test",),
        "self-attention of the class token, with figures",
        frozenset({"num_figures"}),
        sees_centre=False,
    ),
    "correspondence": ProtocolEntry(
        measure_correspondence,
        CorrespondenceSettings,
        ("test",),
        "matching patches of two views, with figures",
        _DRAWN,
        sees_centre=False,
    ),
    "davis": ProtocolEntry(
        measure_davis,
        DavisSettings,
        _FOLDER,
        "DAVIS-2017 video segmentation, not in the paper",
        frozenset({"save_masks"}),
        sees_centre=False,
    ),
}
