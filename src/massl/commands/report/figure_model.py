"""What the pictures of a report are made of: the backbone of a run, a keyed choice of its images, their features and
neighbours.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from massl import keyed_random
from massl.commands.model import ModelSettings, model_on_device
from massl.commands.recipe import PretrainRecipe
from massl.commands.visualize import nearest_rows
from massl.config import read_yaml, validate
from massl.data.evaluation.views import CentreView
from massl.data.sources import open_source
from massl.data.sources.base import DataError, ImageSource, Pixels
from massl.data.sources.subset import SubsetSource
from massl.evaluations.base import labels_of_images
from massl.evaluations.features import Extractor
from massl.ops.scoring.neighbours import weighted_vote, without

Device = Literal["auto", "cpu", "cuda"]
_NUM_DATABASE = 4000  # images among which neighbours are looked for: a few seconds of a small network on a CPU


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Images to draw, and those among which their neighbours are looked for."""

    queries: ImageSource
    database: ImageSource
    is_own: bool  # the database begins with the queries, so an image must not find itself


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The nearest images of the database, nearest first."""

    similarities: Tensor  # [Q, k]
    indices: Tensor  # [Q, k] their numbers in the database


@dataclass(frozen=True, kw_only=True)
class FigureSubject:
    """A run as the drawers of pictures see it. Features are computed when the first of them asks."""

    extractor: Extractor
    sample: Sample
    num_neighbours: int  # of the k-NN classifier
    temperature: float  # of its votes

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:  # [Q, D], [M, D]
        queries, database = self.sample.queries, self.sample.database
        rows = self.extractor.features(database, view=self.extractor.centre_view(), feature="pooled").rows
        if self.sample.is_own:
            return rows[: len(queries)], rows
        return self.extractor.features(queries, view=self.extractor.centre_view(), feature="pooled").rows, rows

    @property
    def query_rows(self) -> Tensor:  # [Q, D]
        return self._rows[0]

    @cached_property
    def neighbours(self) -> Neighbours:
        """Of every query, as many as the classifier asks, or all there are."""
        queries, rows = self._rows
        num = min(self.num_neighbours, len(rows) - self.sample.is_own)
        if num < 1:
            raise DataError(f"{self.sample.database.name} holds no other image; neighbours need at least two")
        similarities, indices = nearest_rows(queries, rows, num_neighbours=num + self.sample.is_own)
        if self.sample.is_own:
            itself = indices == torch.arange(len(queries))[:, None]
            similarities, indices = without(similarities, indices, itself, num_neighbours=num)
        return Neighbours(similarities=similarities, indices=indices)

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

    @property
    def labels(self) -> list[int]:
        """Of the queries; empty without labels."""
        return [] if self.sample.queries.class_names is None else labels_of_images(self.sample.queries).tolist()

    def thumbnails(self, source: ImageSource, indices: Tensor, *, max_side: int) -> Pixels:  # [n] -> [n, S, S, 3]
        """The part of each image that the network sees, at most as large as it sees it."""
        view = CentreView(size=min(max_side, self.extractor.model.image_size), crop_ratio=self.extractor.crop_ratio)
        chunks = list(torch.split(indices, self.extractor.settings.batch_size))
        views = [
            group
            for batch in self.extractor.images(source, chunks)
            for group in view.apply(batch.images, batch.indices)
        ]
        pixels: Pixels = np.ascontiguousarray(
            (255 * torch.cat(views)).round().to(torch.uint8).movedim(1, -1).cpu().numpy()
        )
        return pixels

    def examples(self, num: int) -> Tensor:  # -> [n], n <= num
        """Numbers of the first queries, where there are labels the first of each class."""
        if not self.labels:
            return torch.arange(min(num, len(self.sample.queries)))
        first_of_class = {label: number for number, label in reversed(list(enumerate(self.labels)))}
        return torch.tensor(sorted(first_of_class.values())[:num])


@contextmanager
def opened_subject(folder: Path, *, data: str | None, device: Device, num_images: int) -> Iterator[FigureSubject]:
    """The run's backbone on its device, seeing images as its probe does."""
    recipe = validate(PretrainRecipe, read_yaml(folder / "recipe.yaml"), origin=str(folder / "recipe.yaml"))
    sample = choose_sample(recipe, data, num_images=num_images)
    settings = ModelSettings(
        model=str(folder), device=device, image_size=recipe.views.global_size, crop_ratio=recipe.probes.crop_ratio
    )
    with model_on_device(settings, cache=None) as (extractor, _):
        yield FigureSubject(
            extractor=extractor,
            sample=sample,
            num_neighbours=recipe.probes.num_neighbours,
            temperature=recipe.probes.temperature,
        )


def choose_sample(recipe: PretrainRecipe, data: str | None, *, num_images: int) -> Sample:
    """Of `data`, or else what the probe classified and among which; the choice does not depend on the run, so that runs
    can be compared.
    """
    database_name = data or recipe.probes.database or recipe.data.source
    queries_name = data or recipe.probes.queries or database_name
    queries = open_source(queries_name)
    database = queries if database_name == queries_name else open_source(database_name)
    chosen = _subset(queries, num_images)
    if database is queries or database.class_names != queries.class_names:
        return Sample(queries=chosen, database=_subset(queries, max(num_images, _NUM_DATABASE)), is_own=True)
    return Sample(queries=chosen, database=_subset(database, _NUM_DATABASE), is_own=False)


def _subset(source: ImageSource, num: int) -> SubsetSource:
    """The first images of a random order; of a labelled source those with a label."""
    order = iter(keyed_random.permutation(len(source), 0, "figures").tolist())
    if source.class_names is not None:
        order = (index for index in order if source.label_of(index) is not None)
    return SubsetSource(source, torch.tensor(list(itertools.islice(order, num)), dtype=torch.int64), name=source.name)
