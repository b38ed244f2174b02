"""The nearest neighbours of images by the cosine of their features, with what is shown of each."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from massl.data.sources.base import DataError, ImageSource, Pixels
from massl.evaluations.features import Extractor
from massl.nn.token_readout import has_class_token
from massl.ops.scoring.neighbours import cosine_topk, without
from massl.reports.pictures.images import class_name, file_name, image_name

_CHUNK_ROWS = 1 << 16  # rows of the database compared at once
_QUERIES_AT_ONCE = 16  # whose pictures are in memory together

ReadPictures = Callable[[ImageSource, Tensor], Iterable[Pixels]]  # of images given by their indices


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The nearest images of the database, nearest first."""

    similarities: Tensor  # [Q, k]
    indices: Tensor  # [Q, k] into the database


@dataclass(frozen=True, kw_only=True)
class ShownImage:
    """A query or a neighbour, as it is shown."""

    picture: Pixels  # [H, W, 3]
    name: str  # class, or key if that is unknown
    file: str  # last part of the key; "" if `name` is the key
    similarity: float = 1.0  # to the query
    same_class: bool | None = None  # as the query; None: unknown


def neighbours_of(
    extractor: Extractor, source: ImageSource, chosen: Tensor, database: ImageSource, *, num_neighbours: int
) -> Neighbours:
    """The images of the database that are nearest to the chosen ones of the source, which is perhaps the same."""
    feature = extractor.chosen_feature("cls" if has_class_token(extractor.model.backbone) else "pooled")
    view = extractor.centre_view()
    rows = extractor.features(database, view=view, feature=feature).rows
    if database is source:
        queries = rows[chosen].to(extractor.device)
    else:
        chunks = list(torch.split(chosen, extractor.settings.batch_size))
        batches = extractor.views(source, chunks, view=view)
        queries = torch.cat([extractor.read(batch.groups, feature) for batch in batches])
    own_rows = chosen if database is source else None
    return find_neighbours(queries, rows, num_neighbours=num_neighbours, own_rows=own_rows, name=database.name)


def find_neighbours(
    queries: Tensor, database: Tensor, *, num_neighbours: int, own_rows: Tensor | None, name: str
) -> Neighbours:  # [Q, D], [M, D], [Q]
    """The nearest rows, or all of a small database. `own_rows`: the query's own row in the database, left out."""
    num_left_out = 0 if own_rows is None else 1
    num = min(num_neighbours, len(database) - num_left_out)
    if num < 1:
        raise DataError(f"{name} holds no other image; neighbours need at least two")
    similarities, indices = nearest_rows(queries, database, num_neighbours=num + num_left_out)
    if own_rows is not None:
        is_own = indices == own_rows.to(indices.device)[:, None]
        similarities, indices = without(similarities, indices, is_own, num_neighbours=num)
    return Neighbours(similarities=similarities.cpu(), indices=indices.cpu())


def nearest_rows(
    queries: Tensor, rows: Tensor, *, num_neighbours: int
) -> tuple[Tensor, Tensor]:  # [Q, D], [M, D] -> [Q, k], [Q, k]
    """`cosine_topk` for rows on the CPU, moved in chunks to the queries' device, which may be too small for all."""
    best_values = queries.new_empty(len(queries), 0)
    best_indices = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS].to(queries.device)
        values, indices = cosine_topk(queries, chunk, num_neighbours=min(num_neighbours, len(chunk)))
        values, indices = torch.cat([best_values, values], dim=1), torch.cat([best_indices, indices + start], dim=1)
        best_values, places = values.topk(min(num_neighbours, values.shape[1]), dim=1)
        best_indices = indices.gather(1, places)
    return best_values, best_indices


def neighbour_rows(
    source: ImageSource, chosen: Tensor, database: ImageSource, neighbours: Neighbours, pictures: ReadPictures
) -> Iterator[tuple[ShownImage, list[ShownImage]]]:
    """Each chosen image of the source and its neighbours, which are given in the order of `chosen`."""
    for start in range(0, len(chosen), _QUERIES_AT_ONCE):
        part = slice(start, start + _QUERIES_AT_ONCE)
        found = iter(pictures(database, neighbours.indices[part].flatten()))
        rows = zip(neighbours.indices[part].tolist(), neighbours.similarities[part].tolist(), strict=True)
        queries = zip(pictures(source, chosen[part]), chosen[part].tolist(), strict=True)
        for (picture, index), (near, similarities) in zip(queries, rows, strict=True):
            own_class = class_name(source, index)
            yield (
                ShownImage(picture=picture, name=image_name(source, index), file=file_name(source, index)),
                [
                    ShownImage(
                        picture=next(found),
                        name=image_name(database, other),
                        file=file_name(database, other),
                        similarity=similarity,
                        same_class=_is_same(own_class, class_name(database, other)),
                    )
                    for other, similarity in zip(near, similarities, strict=True)
                ],
            )


def _is_same(first: str, second: str) -> bool | None:
    return first == second if first and second else None
