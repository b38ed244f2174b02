"""The table of protocols that `massl evaluate --protocol` can name. Each file ends with its protocol's entry."""

from massl.evaluations.base import ProtocolEntry
from massl.evaluations.protocols import (
    attention,
    backgrounds,
    clustering,
    copy_detection,
    correspondence,
    davis,
    knn,
    linear,
    logreg,
    long_tail,
    low_shot,
    retrieval,
)

PROTOCOLS: dict[str, ProtocolEntry] = {
    "knn": knn.PROTOCOL,
    "logreg": logreg.PROTOCOL,
    "linear": linear.PROTOCOL,
    "low-shot": low_shot.PROTOCOL,
    "long-tail": long_tail.PROTOCOL,
    "retrieval": retrieval.PROTOCOL,
    "copy-detection": copy_detection.PROTOCOL,
    "backgrounds": backgrounds.PROTOCOL,
    "clustering": clustering.PROTOCOL,
    "attention": attention.PROTOCOL,
    "correspondence": correspondence.PROTOCOL,
    "davis": davis.PROTOCOL,
}
