import pytest
import torch

from massl.data.sources.base import DataError
from massl.reports.pictures import neighbours
from massl.reports.pictures.neighbours import find_neighbours, nearest_rows


def test_rows_in_chunks_are_searched_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, rows = torch.randn(5, 8, generator=generator), torch.randn(50, 8, generator=generator)
    cosines = torch.nn.functional.cosine_similarity(queries[:, None], rows[None], dim=2)
    for num_rows in (1, 7, 50, 999):
        monkeypatch.setattr(neighbours, "_CHUNK_ROWS", num_rows)
        values, indices = nearest_rows(queries, rows, num_neighbours=6)
        assert torch.equal(indices, cosines.argsort(dim=1, descending=True)[:, :6])
        torch.testing.assert_close(values, cosines.gather(1, indices))


def test_an_image_is_left_out_of_its_own_neighbours() -> None:
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    own_rows = torch.tensor([6, 0, 3])
    found = find_neighbours(rows[own_rows], rows, num_neighbours=99, own_rows=own_rows, name="photos")
    assert [sorted(row) for row in found.indices.tolist()] == [
        [other for other in range(9) if other != own] for own in own_rows.tolist()
    ]
    kept = find_neighbours(rows[own_rows], rows, num_neighbours=1, own_rows=None, name="photos")
    assert kept.indices.flatten().tolist() == own_rows.tolist()


def test_a_database_of_the_image_itself_alone_is_refused() -> None:
    with pytest.raises(DataError, match="photos"):
        find_neighbours(torch.ones(1, 4), torch.ones(1, 4), num_neighbours=2, own_rows=torch.tensor([0]), name="photos")
