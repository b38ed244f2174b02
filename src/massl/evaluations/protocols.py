"""The table of protocols: what `massl evaluate --protocol` can name."""

from massl.evaluations.attention import AttentionSettings, measure_attention
from massl.evaluations.backgrounds import BackgroundsSettings, measure_backgrounds
from massl.evaluations.base import ProtocolEntry
from massl.evaluations.clustering import ClusteringSettings, measure_clustering
from massl.evaluations.copy_detection import CopyDetectionSettings, measure_copy_detection
from massl.evaluations.correspondence import CorrespondenceSettings, measure_correspondence
from massl.evaluations.davis import DavisSettings, measure_davis
from massl.evaluations.knn import KnnSettings, measure_knn
from massl.evaluations.linear import LinearSettings, measure_linear
from massl.evaluations.logreg import LogisticSettings, measure_logreg
from massl.evaluations.long_tail import LongTailSettings, measure_long_tail
from massl.evaluations.low_shot import LowShotSettings, measure_low_shot
from massl.evaluations.retrieval import RetrievalSettings, measure_retrieval

_PAIR = ("train", "test")

PROTOCOLS: dict[str, ProtocolEntry] = {
    "knn": ProtocolEntry(measure_knn, KnnSettings, _PAIR, "weighted k-nearest-neighbour classification"),
    "logreg": ProtocolEntry(measure_logreg, LogisticSettings, _PAIR, "logistic regression on frozen features"),
    "linear": ProtocolEntry(measure_linear, LinearSettings, _PAIR, "linear probe by SGD, 45 learning rates at once"),
    "low-shot": ProtocolEntry(measure_low_shot, LowShotSettings, _PAIR, "classifiers from 1 %, 10 % or a few images per class"),
    "long-tail": ProtocolEntry(measure_long_tail, LongTailSettings, _PAIR, "linear probe on unbalanced classes"),
    "retrieval": ProtocolEntry(measure_retrieval, RetrievalSettings, ("folder",), "landmark retrieval, ROxford5k and RParis6k"),
    "copy-detection": ProtocolEntry(measure_copy_detection, CopyDetectionSettings, ("folder",), "Copydays, strong"),
    "backgrounds": ProtocolEntry(measure_backgrounds, BackgroundsSettings, ("folder",), "ImageNet-9, robustness to backgrounds"),
    "clustering": ProtocolEntry(measure_clustering, ClusteringSettings, _PAIR, "k-means against labels: NMI, AMI, ARI"),
    "attention": ProtocolEntry(measure_attention, AttentionSettings, ("test",), "self-attention of the class token, with figures"),
    "correspondence": ProtocolEntry(
        measure_correspondence, CorrespondenceSettings, ("test",), "matching patches of two views, with figures"
    ),
    "davis": ProtocolEntry(measure_davis, DavisSettings, ("folder",), "DAVIS-2017 video segmentation by propagation; not in the paper"),
}
