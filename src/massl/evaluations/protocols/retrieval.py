"""Retrieval of landmarks in the revisited Oxford and Paris sets (Radenović et al., 2018), as in DINO and iBOT.

Images are shrunk to at most 512 pixels and go through the network at three scales; the database is ranked by the cosine
of class tokens. DINO and iBOT use whole query images; the benchmark demands the part inside a box, which `crop_queries`
measures too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from massl.config import Settings
from massl.data.evaluation.ground_truth import RetrievalTruth, read_ground_truth
from massl.data.evaluation.views import ThumbnailView, picture_of
from massl.data.sources.base import DataError
from massl.data.sources.files import FileListSource
from massl.evaluations.base import EvaluationData, ProtocolEntry
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import EvaluationError, Measurement, Setting
from massl.nn.token_readout import patch_size
from massl.ops.image_ops import RaggedImages
from massl.ops.scoring.ranking import average_precisions, mean_of_answered, precisions_at, rank_by_cosine

_PUBLISHED_MAX_SIDE, _PUBLISHED_IMAGE_SIZE = 512, 224
# Each image goes through the network alone, so that more would only cost memory: four batches of 256 photographs of
# 1024 x 768 are 2.4 GB.
_LARGEST_BATCH = 32
_KS = (1, 5, 10)
NAMES = {"roxford5k": "ROxford5k", "rparis6k": "RParis6k"}  # name of the ground truth -> name in results

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


# Difficulty -> fields of the ground truth with images to find, and with images that are ignored; the rest are wrong.
_DIFFICULTIES = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}


class RetrievalSettings(Settings):
    max_side: int | None = Field(None, gt=0, description="longer side in pixels; default: 512 * image size / 224")
    multi_scale: bool = Field(True, description="average the class token over scales 1, 0.71 and 0.5")
    crop_queries: bool = Field(False, description="also use only the box of each query, as the benchmark demands")


@dataclass(frozen=True, kw_only=True)
class LandmarkView:
    """The image, or the part inside its box, shrunk to `max_side` by Pillow's `thumbnail`; never enlarged."""

    max_side: int
    min_side: int  # what the network needs at least
    boxes: tuple[Box, ...] | None = None  # one for each image of the source

    def apply(self, images: RaggedImages, indices: Tensor) -> list[Tensor]:
        numbers = indices.tolist()
        if self.boxes is not None:
            images = RaggedImages.from_list([self._cut(images, *pair) for pair in enumerate(numbers)])
        views = ThumbnailView(max_side=self.max_side).apply(images, indices)
        for view, number in zip(views, numbers, strict=True):
            height, width = view.shape[-2:]
            if min(height, width) < self.min_side:
                raise DataError(
                    f"image {number} (counted from 0) has {width} x {height} pixels after resizing; the model needs "
                    f"{self.min_side} on either side: repair its box or file, or raise --retrieval.max_side"
                )
        return views

    def _cut(self, images: RaggedImages, place: int, number: int) -> Tensor:  # -> uint8 [3, h, w]
        assert self.boxes is not None
        picture = picture_of(images, place)
        left, top, right, bottom = map(round, self.boxes[number])  # whole pixels, as in Pillow's `crop`
        part = picture[:, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
        if part.numel() == 0:
            size = f"{picture.shape[2]} x {picture.shape[1]}"
            raise DataError(f"box {self.boxes[number]} of query {number} (counted from 0) is outside its {size} image")
        return part


def measure_retrieval(extractor: Extractor, data: EvaluationData, settings: RetrievalSettings) -> Iterator[Measurement]:
    """Mean average precision and precision among the first 1, 5 and 10, for easy, medium and hard answers."""
    assert data.folder is not None
    truth_file = _ground_truth_file(data.folder)
    name = _name_in_results(data, truth_file)
    truth = read_ground_truth(truth_file)
    batch_size = min(extractor.settings.batch_size, _LARGEST_BATCH)
    images = replace(extractor, settings=extractor.settings.model_copy(update={"batch_size": batch_size}))
    view, feature = _view_and_feature(extractor, settings)
    database, queries = (
        FileListSource(data.folder / "jpg", [f"{image}.jpg" for image in listed], name=f"{what} of {name}")
        for what, listed in (("database", truth.database), ("queries", truth.queries))
    )
    database_rows = images.features(database, view=view, feature=feature).rows.to(extractor.device)
    query_views = {"": view}
    if settings.crop_queries:
        query_views["queries cropped"] = replace(view, boxes=tuple(answer.box for answer in truth.answers))
    for note, query_view in query_views.items():
        query_rows = images.features(queries, view=query_view, feature=feature).rows.to(extractor.device)
        rankings = rank_by_cosine(query_rows, database_rows)
        for difficulty, metric, value, num_queries in retrieval_scores(rankings, truth):
            setting = Setting(name=difficulty, note=note)
            yield Measurement(data=name, setting=setting, metric=metric, value=value, num_samples=num_queries)


def retrieval_scores(rankings: Tensor, truth: RetrievalTruth) -> Iterator[tuple[str, str, float, int]]:  # int64 [Q, M]
    """(difficulty, metric, percent, number of queries); a difficulty for which no query has answers is left out."""
    for name, fields in _DIFFICULTIES.items():
        positive, junk = (_marks(truth, of_kind).to(rankings.device) for of_kind in fields)
        if not bool(positive.any()):
            continue
        scores = {"mAP": average_precisions(rankings, positive, junk)}
        scores.update({f"mP@{k}": precisions_at(rankings, positive, junk, k=k) for k in _KS})
        for metric, values in scores.items():
            mean, num_queries = mean_of_answered(values)
            yield name, metric, 100.0 * mean, num_queries


def _marks(truth: RetrievalTruth, fields: tuple[str, ...]) -> Tensor:  # -> bool [num queries, num database images]
    marks = torch.zeros(len(truth.queries), len(truth.database), dtype=torch.bool)
    for row, answer in zip(marks, truth.answers, strict=True):
        for field in fields:
            row[getattr(answer, field)] = True
    return marks


def _view_and_feature(extractor: Extractor, settings: RetrievalSettings) -> tuple[LandmarkView, str]:
    feature = extractor.chosen_feature("cls_multiscale" if settings.multi_scale else "cls")
    # Not rounded to patches: published sizes follow the photograph's shape, and a remainder is left out.
    max_side = settings.max_side or round(_PUBLISHED_MAX_SIDE * extractor.model.image_size / _PUBLISHED_IMAGE_SIZE)
    min_side = (patch_size(extractor.model.backbone) or 1) * (2 if feature == "cls_multiscale" else 1)
    if max_side < min_side:
        raise EvaluationError(
            f"--retrieval.max_side {max_side} is less than the {min_side} pixels that the model needs"
        )
    return LandmarkView(max_side=max_side, min_side=min_side), feature


def _name_in_results(data: EvaluationData, truth_file: Path) -> str:
    """The given name; if that is the folder's name, the name by the ground truth."""
    assert data.folder is not None
    dataset = truth_file.stem.removeprefix("gnd_")
    return NAMES.get(dataset, data.name or dataset) if data.name == data.folder.name else data.name


def _ground_truth_file(folder: Path) -> Path:
    """gnd_<name of the folder>.pkl, or the only gnd_*.pkl."""
    found = sorted(folder.glob("gnd_*.pkl"))
    of_folder = folder / f"gnd_{folder.resolve().name}.pkl"
    if of_folder in found:
        return of_folder
    if len(found) != 1:
        listed = f"several ({', '.join(file.name for file in found)})" if found else "none"
        raise DataError(
            f"{folder} should hold one ground truth gnd_*.pkl beside the images in jpg, and holds {listed}; give the "
            "folder roxford5k or rparis6k with the file of the revisitop benchmark"
        )
    return found[0]


PROTOCOL = ProtocolEntry(
    measure=measure_retrieval,
    settings_type=RetrievalSettings,
    needs=("folder",),
    summary="landmark retrieval, ROxford5k and RParis6k",
    unremarked=frozenset({"crop_queries"}),
    uses_centre_crop=False,
)
