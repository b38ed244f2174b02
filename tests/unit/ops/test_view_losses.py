import pytest
import torch

from massl.ops.view_losses import check_shapes, equal_chunks, num_different_pairs


@pytest.mark.parametrize(
    ("num_rows", "logits_per_row", "ends"),
    [
        (128, 14 * 65536, [64, 128]),
        (73, 14 * 65536, [73]),
        (74, 14 * 65536, [37, 74]),
        (10, 1 << 24, [4, 8, 10]),
        (3, 1 << 27, [1, 2, 3]),
    ],
)
def test_chunks_cover_all_rows_in_nearly_equal_parts(num_rows: int, logits_per_row: int, ends: list[int]) -> None:
    chunks = list(equal_chunks(num_rows, (1 << 26) // logits_per_row))
    assert [chunk.stop for chunk in chunks] == ends
    assert [chunk.start for chunk in chunks] == [0, *ends[:-1]]


def test_axes_of_one_name_must_have_one_size() -> None:
    rows, table = torch.zeros(2, 3), torch.zeros(4, 3)
    check_shapes({"rows": (rows, "batch dim"), "table": (table, "entries dim"), "weights": (None, "batch")})
    with pytest.raises(ValueError, match=r"table must be \[2, 3\].*got \[4, 3\]"):
        check_shapes({"rows": (rows, "batch dim"), "table": (table, "batch dim")})
    with pytest.raises(ValueError, match=r"rows must be \[batch\].*got \[2, 3\]"):
        check_shapes({"rows": (rows, "batch")})


def test_views_of_one_index_are_one_crop_and_form_no_pair() -> None:
    assert [num_different_pairs(*views) for views in ((2, 2), (12, 2), (1, 2))] == [2, 22, 1]
    with pytest.raises(ValueError, match="no pair of different views"):
        num_different_pairs(1, 1)
