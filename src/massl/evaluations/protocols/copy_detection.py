"""Copy detection on INRIA's Copydays (Douze et al., 2009), as in DINO and iBOT: strongly changed copies are queries for
their originals.

The published score uses only the first 20 ranks, and counts 1 / (2 (r + 1)) for an original at rank r > 0; the score of
whole rankings is reported too.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from pydantic import Field
from torch import Tensor

from massl.config import Settings
from massl.data.evaluation.views import SquareView, whole_patches
from massl.data.sources import open_source
from massl.data.sources.base import DataError
from massl.data.sources.files import FileListSource
from massl.evaluations.base import EvaluationData, ProtocolEntry
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import Measurement, Setting
from massl.nn.token_readout import patch_size
from massl.ops.scoring.ranking import average_precisions, mean_of_answered, rank_by_cosine

_NUM_RANKS: Final = 20  # of the published score
_SCENE_CHARACTERS: Final = 4  # of a file name: 200000.jpg is the original of 200001.jpg and 200002.jpg
_SMALLEST_EIGENVALUE: Final = 1e-5  # relative to the largest
_CHUNK_ROWS: Final = 16_384


class CopyDetectionSettings(Settings):
    size: int | None = Field(None, gt=0, description="side of the square views in pixels; default: the model's own")
    whitening: str = Field("", description="URI of images for fitting a whitening of features; default: none")


# ---- whitening -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Whitening:
    """x -> projection (x - mean)."""

    mean: Tensor  # [D] float64
    projection: Tensor  # [D, D] float64

    def apply(self, rows: Tensor) -> Tensor:  # [N, D] -> [N, D] float64
        return (rows.double() - self.mean) @ self.projection.T


def fit_whitening(rows: Tensor, *, device: torch.device) -> Whitening:  # [N, D]
    """DINO's whitening, by eigenvectors of the second moments; the mean is NOT subtracted from these."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=device)
    moments = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=device)
    for chunk in torch.split(rows, _CHUNK_ROWS):  # float64 of all rows at once would be 16 GB for ImageNet
        values = chunk.to(device).double()
        total += values.sum(dim=0)
        moments += values.T @ values
    eigenvalues, eigenvectors = torch.linalg.eigh(moments / len(rows))
    lengths = eigenvalues.clamp_min(_SMALLEST_EIGENVALUE * eigenvalues.amax()).sqrt()
    return Whitening(mean=total / len(rows), projection=(eigenvectors / lengths).T)


# ---- protocol --------------------------------------------------------------------------------------------------------


def measure_copy_detection(
    extractor: Extractor, data: EvaluationData, settings: CopyDetectionSettings
) -> Iterator[Measurement]:
    """Mean average precision of strong copies among the originals, over the first 20 places and over all."""
    assert data.folder is not None
    name = data.name or data.folder.resolve().name
    name = "Copydays" if name.lower() == "copydays" else name  # the name in results, whatever the folder's case
    originals, copies = (_jpegs(data.folder / block) for block in ("original", "strong"))
    positive = original_of_copies(originals, copies).to(extractor.device)
    size = settings.size or extractor.model.image_size
    view = SquareView(size=whole_patches(size, patch_size(extractor.model.backbone), option="--copy-detection.size"))
    database, queries = (
        extractor.features(
            FileListSource(data.folder / block, files, name=f"{block} of {name}"), view=view, feature="cls_gem"
        ).rows
        for block, files in (("original", originals), ("strong", copies))
    )
    database, queries = database.to(extractor.device), queries.to(extractor.device)
    if settings.whitening:
        rows = extractor.features(open_source(settings.whitening), view=view, feature="cls_gem").rows
        whitening = fit_whitening(rows, device=extractor.device)
        database, queries = whitening.apply(database), whitening.apply(queries)
    rankings = rank_by_cosine(queries, database)
    parts = {"": rankings[:, :_NUM_RANKS], "all ranks": rankings}
    for part, part_rankings in parts.items():
        mean, num_queries = mean_of_answered(average_precisions(part_rankings, positive, torch.zeros_like(positive)))
        note = ", ".join(filter(None, (part, "whitened" if settings.whitening else "")))
        setting = Setting(name="strong", note=note)
        yield Measurement(data=name, setting=setting, metric="mAP", value=100.0 * mean, num_samples=num_queries)


# file names -> bool [num copies, num originals]
def original_of_copies(originals: list[str], copies: list[str]) -> Tensor:
    """Which original belongs to each copy: the one whose name begins with the same four characters."""
    scenes = [file[:_SCENE_CHARACTERS] for file in originals]
    repeated = [scene for scene, number in Counter(scenes).items() if number > 1]
    if repeated:
        raise DataError(f"original holds several images of scene {repeated[0]}..., by the first characters; keep one")
    column_of = {scene: column for column, scene in enumerate(scenes)}
    positive = torch.zeros(len(copies), len(originals), dtype=torch.bool)
    for row, file in enumerate(copies):
        scene = file[:_SCENE_CHARACTERS]
        if scene not in column_of:
            raise DataError(f"strong/{file} has no original that begins with {scene}; complete the folder original")
        positive[row, column_of[scene]] = True
    return positive


def _jpegs(folder: Path) -> list[str]:
    """Sorted names of the .jpg files directly in the folder."""
    files = sorted(entry.name for entry in folder.glob("*.jpg") if not entry.name.startswith("."))
    if not files:
        problem = "holds no .jpg images" if folder.is_dir() else "does not exist"
        raise DataError(f"{folder} {problem}; expected folders original and strong with files such as 200000.jpg")
    return files


PROTOCOL = ProtocolEntry(
    measure=measure_copy_detection,
    settings_type=CopyDetectionSettings,
    needs=("folder",),
    summary="Copydays, strong",
    uses_centre_crop=False,
)
