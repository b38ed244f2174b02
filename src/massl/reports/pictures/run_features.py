"""A run as the pictures of a report see it: its backbone, some images, their features and neighbours."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from massl.config import MasslError
from massl.data.sources.base import ImageSource
from massl.data.sources.subset import UnreadableImages
from massl.evaluations.base import labels_of_images
from massl.evaluations.features import Extractor
from massl.ops.scoring.neighbours import weighted_vote
from massl.reports.pictures.neighbours import Neighbours, find_neighbours


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Images to draw (queries), and images to search for their neighbours (database)."""

    queries: ImageSource
    database: ImageSource
    is_own: bool  # the database begins with the queries, so an image must not find itself

    @property
    def database_in_words(self) -> str:
        if self.is_own:
            return f"{len(self.database) - 1:,} other images"
        return f"{len(self.database):,} images of {self.database.name}"


@dataclass(frozen=True, kw_only=True)
class RunFeatures:
    """Features are computed when first needed."""

    extractor: Extractor
    sample: Sample
    num_neighbours: int  # of the k-NN classifier
    temperature: float  # of its votes

    @cached_property
    def database_rows(self) -> Tensor:  # [M, D]
        return self._rows_of(self.sample.database)

    @cached_property
    def query_rows(self) -> Tensor:  # [Q, D]
        queries = self.sample.queries
        return self.database_rows[: len(queries)] if self.sample.is_own else self._rows_of(queries)

    def _rows_of(self, source: ImageSource) -> Tensor:
        return self.extractor.features(source, view=self.extractor.centre_view(), feature="pooled").rows

    def require_readable(self) -> None:
        """Compute all features. Raises UnreadableImages; other failures are left to the pictures that meet them."""
        try:
            _ = self.query_rows, self.database_rows
        except UnreadableImages:
            raise
        except (MasslError, OSError, torch.OutOfMemoryError):
            return

    @cached_property
    def neighbours(self) -> Neighbours:
        """As many of every query as the classifier uses."""
        return find_neighbours(
            self.query_rows,
            self.database_rows,
            num_neighbours=self.num_neighbours,
            own_rows=torch.arange(len(self.query_rows)) if self.sample.is_own else None,
            name=self.sample.database.name,
        )

    @cached_property
    def predictions(self) -> list[int]:
        """The class that the neighbours of each query vote for; empty without labels."""
        class_names = self.sample.database.class_names
        if class_names is None:
            return []
        labels = labels_of_images(self.sample.database)[self.neighbours.indices]
        votes = weighted_vote(
            self.neighbours.similarities, labels, num_classes=len(class_names), temperature=self.temperature
        )
        return [int(label) for label in votes.argmax(dim=1)]

    @cached_property
    def labels(self) -> list[int]:
        """Of the queries; empty without labels."""
        return [] if self.sample.queries.class_names is None else labels_of_images(self.sample.queries).tolist()

    def examples(self, num: int) -> Tensor:  # -> [n], n <= num
        """Indices of the first queries or, with labels, of the first of each class."""
        if not self.labels:
            return torch.arange(min(num, len(self.sample.queries)))
        first_of_class = {label: number for number, label in reversed(list(enumerate(self.labels)))}
        return torch.tensor(sorted(first_of_class.values())[:num])
