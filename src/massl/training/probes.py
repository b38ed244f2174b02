"""Probes: is it learning? k-NN accuracy and health metrics of the teacher during training."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from massl import distributed, keyed_random
from massl.config import RecipeError, Settings
from massl.data.loading.cache import ImageCache
from massl.data.loading.gpu_decode import jpeg_decoder
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.loading.range_sample import settle_ranges
from massl.data.settings import DataSettings
from massl.data.sources import ImageSource, files_of, home_of, label_doubt, open_source
from massl.data.views import ViewSettings, make_views
from massl.methods.base import Method, StepHyper
from massl.ops.image_ops import centre_view, normalise
from massl.ops.scoring.feature_health import effective_rank, spectrum_decay
from massl.ops.scoring.neighbours import knn_accuracy, knn_accuracy_among_others, own_image_found

_CHUNK_PIXELS = 256 * 224 * 224  # of the images that go through the backbone at once
_CPU_CHUNK_PIXELS = 16 * 224 * 224  # seconds of a small ViT: a probe can be stopped between chunks
_RAW_PIXEL_SIDE = 32
# Effective rank below which features count as collapsed: collapsed runs ended at 1.5, the worst healthy one at 6.6.
_LOWEST_RANK = 1.8


class ProbeSettings(Settings):
    every_epochs: float = Field(
        default=1.0, ge=0.0, description="epochs between probes, besides the first and last step; 0: no probes"
    )
    database: str = Field(default="", description="labelled images for k-NN; default: the training images")
    queries: str = Field(default="", description="labelled images to classify; default: held out of the database")
    max_database: int = Field(default=10_000, gt=0, description="maximum number of database images (random subset)")
    max_queries: int = Field(default=2_000, gt=1, description="maximum number of query images")
    num_neighbours: int = Field(default=20, gt=0, description="k of the k-NN classifier")
    temperature: float = Field(default=0.07, gt=0.0, description="votes are weighted by exp(cosine / temperature)")
    crop_ratio: float = Field(default=0.875, gt=0.0, le=1.0, description="centre crop / shorter side (224 / 256)")


class NonFiniteFeatures(ArithmeticError):
    """The teacher is broken: its features cannot be scored."""


@dataclass(frozen=True)
class _Subset:
    source: ImageSource
    indices: Tensor


class Probe:
    """Extracts teacher features of a fixed set of images and scores them."""

    def __init__(
        self,
        settings: ProbeSettings,
        *,
        data: DataSettings,
        views: ViewSettings,
        training_source: ImageSource,
        held_out: ImageSource | None = None,
        seed: int,
        device: torch.device,
        cache: ImageCache | None = None,
        on_skip: Callable[[str, str], None],  # message, home of the source
        as_before: bool = False,
    ) -> None:
        """`held_out`: images kept out of training, the queries if the settings name no set.

        `as_before`: open the labelled sets as `open_source` does for runs that began before."""
        self.settings = settings
        self._as_before = as_before
        self.views = views
        self._data = data
        self._seed = seed
        self._device = device
        self._cache = cache
        self._on_skip = on_skip
        self._database, self._queries = self._choose(training_source, held_out)
        # Held-out queries come from the same source too, but are never in the database.
        self._may_find_itself = (
            bool(settings.queries) and self._database is not None and _are_same(self._database, self._queries)
        )

    def _open(self, uri: str, default: ImageSource) -> ImageSource:
        if not uri:
            return default
        rules = next((files.rules for files in files_of(default)), self._data.rules())
        source = open_source(uri, as_before=self._as_before, rules=rules)
        settle_ranges(source)
        return source

    def _choose(self, training_source: ImageSource, held_out: ImageSource | None) -> tuple[_Subset | None, _Subset]:
        database = self._open(self.settings.database, training_source)
        default = database if held_out is None or self.settings.database else held_out
        queries = self._open(self.settings.queries, default)
        query_order = keyed_random.permutation(len(queries), self._seed, "probe queries")
        query_subset = _Subset(queries, query_order[: self.settings.max_queries])
        if database.class_names is None or queries.class_names is None or len(database) < 2:
            if self.settings.queries or self.settings.database:
                unlabelled = database if database.class_names is None else queries
                raise RecipeError(
                    f"{unlabelled.name} has no labels; k-NN probes need class folders or a labelled data set"
                )
            return None, query_subset
        # Accuracy on doubtful classes would mislead; sets named for the probe are meant.
        if not self.settings.database and not self.settings.queries and label_doubt(training_source):
            return None, query_subset
        if queries is not database:
            database_order = keyed_random.permutation(len(database), self._seed, "probe database")
        else:
            # Hold the queries out of the database; at most half of a small set.
            num_queries = min(self.settings.max_queries, len(queries) // 2)
            query_subset = _Subset(queries, query_order[:num_queries])
            database_order = query_order[num_queries:]
        return _Subset(database, database_order[: self.settings.max_database]), query_subset

    @property
    def has_labels(self) -> bool:
        """Whether it measures k-NN accuracy."""
        return self._database is not None

    @property
    def num_queries(self) -> int:
        return len(self._queries.indices)

    @property
    def num_images(self) -> int:
        """How many images one probe looks at."""
        return self.num_queries + (0 if self._database is None else len(self._database.indices))

    @torch.no_grad()
    def measure(
        self, method: Method, hyper: StepHyper, *, between_batches: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """k-NN accuracy (if labels exist), measures without labels and the method's health metrics, in float32.

        `between_batches` may raise, to end the probe.
        """
        backbone = method.backbone_to_evaluate()
        was_training = backbone.training
        backbone.eval()
        try:
            return self._measure(method, hyper, between_batches)
        finally:
            backbone.train(was_training)

    def _measure(self, method: Method, hyper: StepHyper, between_batches: Callable[[], None]) -> dict[str, float]:
        backbone = method.backbone_to_evaluate()

        def features_of(batch: ImageBatch) -> Tensor:
            views = centre_view(batch.images, size=self.views.global_size, crop_ratio=self.settings.crop_ratio)
            return backbone(normalise(views, self.views.mean, self.views.std)).pooled.float()  # type: ignore[no-any-return]

        def features_of_both(batch: ImageBatch) -> Tensor:  # -> [B, 2 * D]
            return torch.cat([features_of(batch), backbone(self._other_views(batch)).pooled.float()], dim=1)

        both, query_labels = self._extract(self._queries, features_of_both, between_batches)
        query_features, other_features = (part.contiguous() for part in both.chunk(2, dim=1))
        if not bool(query_features.isfinite().all()):
            raise NonFiniteFeatures("the teacher's features are not finite")
        metrics = {"effective_rank": effective_rank(query_features), **method.health(query_features, hyper)}
        if (decay := spectrum_decay(query_features)) is not None:
            metrics["alpha_req"] = decay
        metrics["other_view_top1"] = own_image_found(other_features, query_features)
        if self._database is not None:
            database_features, database_labels = self._extract(self._database, features_of, between_batches)
            metrics["knn_top1"] = self._knn(query_features, query_labels, database_features, database_labels)
        return metrics

    def _other_views(self, batch: ImageBatch) -> Tensor:  # -> [B, 3, S, S]
        """A random crop of each image in changed colours, the same at every probe, whatever the method's own views."""
        size, mean, std = self.views.global_size, self.views.mean, self.views.std
        settings = ViewSettings(
            num_global=1, num_local=0, global_size=size, first_global_blur_probability=0.1, mean=mean, std=std
        )
        # epoch -1: other crops than those of training
        return make_views(batch.images, batch.indices, settings, seed=self._seed, epoch=-1).global_views[0]

    @torch.no_grad()
    def raw_pixel_knn(self) -> float | None:
        """k-NN on the pixels of the images, shrunk to 32 px: the baseline that features must beat."""
        if self._database is None:
            return None

        def pixels_of(batch: ImageBatch) -> Tensor:
            return centre_view(batch.images, size=_RAW_PIXEL_SIDE, crop_ratio=self.settings.crop_ratio).flatten(1)

        return self._knn(*self._extract(self._queries, pixels_of), *self._extract(self._database, pixels_of))

    def _knn(self, queries: Tensor, query_labels: Tensor, database: Tensor, database_labels: Tensor) -> float:
        # Even a labelled source may have unlabelled images.
        known_queries, known_rows = query_labels >= 0, database_labels >= 0
        rows = queries[known_queries], query_labels[known_queries], database[known_rows], database_labels[known_rows]
        num_neighbours, temperature = self.settings.num_neighbours, self.settings.temperature
        if self._database is None or not self._may_find_itself:
            return knn_accuracy(*rows, num_neighbours=num_neighbours, temperature=temperature)
        query_indices = self._queries.indices.to(self._device)[known_queries]
        row_indices = self._database.indices.to(self._device)[known_rows]
        return knn_accuracy_among_others(
            *rows, query_indices, row_indices, num_neighbours=num_neighbours, temperature=temperature
        )

    def _extract(
        self,
        subset: _Subset,
        features_of: Callable[[ImageBatch], Tensor],
        between_batches: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Tensor]:
        """Features [N, D] and labels [N] of a subset; each rank computes its share, then they are gathered."""
        num_images, world_size = len(subset.indices), distributed.world_size()
        share = -(-num_images // world_size)
        positions = (distributed.rank() * share + torch.arange(share)) % num_images  # the last rank may wrap around
        chunk_pixels = _CPU_CHUNK_PIXELS if self._device.type == "cpu" else _CHUNK_PIXELS
        chunk_size = min(2048, max(1, chunk_pixels // self.views.global_size**2))
        chunks = torch.split(subset.indices[positions], chunk_size)
        loader = Loader(
            subset.source,
            order_at=lambda chunk: chunks[chunk % len(chunks)],  # read-ahead may pass the end
            seed=self._seed,
            num_workers=self._data.num_workers,
            max_side=self._data.max_side,
            device=self._device,
            batch_decoder=jpeg_decoder(self._data.decoder, self._device),
            cache=self._cache,
            on_skip=lambda message: self._on_skip(message, home_of(subset.source)),
        )
        features, labels = [], []
        try:
            for chunk in range(len(chunks)):
                between_batches()
                batch = loader.at(chunk)
                features.append(features_of(batch.to(self._device)))
                labels.append(batch.labels.to(self._device))
        finally:
            loader.close()
        all_features, all_labels = (distributed.gather_rows(torch.cat(parts)) for parts in (features, labels))
        return all_features[:num_images], all_labels[:num_images]


def warnings_of(
    method: Method, metrics: dict[str, float], *, before: Sequence[Mapping[str, float]] = (), num_queries: int = 1
) -> list[str]:
    """Sentences that warn the user if a probe's metrics show a problem; `before`: the rows of earlier probes."""
    collapsed = [*general_collapse_signs(metrics), *method.collapse_signs(metrics)]
    if is_learning([*before, metrics], num_queries=num_queries):
        collapsed = []
    found = [f"training may have collapsed: {sign}" for sign in collapsed]
    found += [f"training may hardly progress: {sign}" for sign in method.slow_signs(metrics)]
    return [f"{warning}. See docs/troubleshooting.md." for warning in found]


def is_learning(rows: Sequence[Mapping[str, float]], *, num_queries: int) -> bool:
    """Whether k-NN is above that of random weights and has not fallen since, by more than chance: no collapse."""
    accuracies = [row["knn_top1"] for row in rows if isinstance(row.get("knn_top1"), int | float)]
    if len(accuracies) < 2 or "knn_top1" not in rows[-1]:
        return False
    first, *_, last = accuracies
    margin = chance_margin(last, num_queries=num_queries)
    return last - first > margin and max(accuracies) - last <= margin


def chance_margin(accuracy: float, *, num_queries: int) -> float:
    """Two standard errors of an accuracy, in points: smaller differences may be chance.

    The queries are the same in all probes. If about half of what one gets right is shared (a correlation of 0.5), the
    difference of two accuracies has the standard error of one.
    """
    share = min(0.95, max(0.05, accuracy / 100))  # at 0 or 100 % the formula would claim certainty
    return 200 * math.sqrt(share * (1 - share) / num_queries)


def general_collapse_signs(metrics: dict[str, float]) -> list[str]:
    """Signs that hold for any method."""
    rank = metrics["effective_rank"]
    if rank >= _LOWEST_RANK:
        return []
    hardly = "" if rank < 1.5 else "hardly more than "
    return [f"the features span {hardly}a single direction (effective rank {rank:.2f})"]


def _are_same(first: _Subset, second: _Subset) -> bool:
    """Whether both are subsets of the same images, even if opened under different names."""
    one, other = first.source, second.source
    return one.name == other.name or (len(one) == len(other) and one.fingerprint() == other.fingerprint())
