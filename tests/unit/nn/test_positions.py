import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from massl.config import RecipeError
from massl.nn.positions import FirstAxis, resample_positions, sine_cosine_positions

GOLDEN = load_file(Path(__file__).parents[2] / "golden" / "position.safetensors")


@pytest.mark.parametrize("size", ["96x96", "480x480", "112x176", "112x448"])
def test_positions_at_other_sizes_are_those_of_the_authors_code(size: str) -> None:
    height, width = (int(side) // 16 for side in size.split("x"))
    expected = GOLDEN[size]
    resampled = resample_positions(GOLDEN["pos_embed"][:, 1:], height, width)
    torch.testing.assert_close(resampled, expected[:, 1:], rtol=0, atol=1e-6)
    # they leave the class token's position alone, as we do
    assert torch.equal(GOLDEN["pos_embed"][:, :1], expected[:, :1])


def test_on_their_own_grid_positions_are_unchanged() -> None:
    positions = GOLDEN["pos_embed"][:, 1:]
    assert resample_positions(positions, 14, 14) is positions


def test_resampling_is_differentiable() -> None:
    positions = torch.randn(1, 16, 3, requires_grad=True)
    resample_positions(positions, 2, 3).sum().backward()
    assert positions.grad is not None
    # bicubic weights add up to one for each of 6 x 3 outputs
    torch.testing.assert_close(positions.grad.sum(), torch.tensor(18.0))


def test_positions_that_form_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match="15 position embeddings form no square grid"):
        resample_positions(torch.zeros(1, 15, 4), 3, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrices_first_made_without_gradients_serve_training_later(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        resample_positions(torch.randn(1, 9, 2, dtype=dtype), 7, 5)
    positions = torch.randn(1, 9, 2, dtype=dtype, requires_grad=True)
    resample_positions(positions, 7, 5).sum().backward()
    assert positions.grad is not None


@pytest.mark.parametrize(
    ("first_axis", "height", "width"), [("rows", 3, 5), ("columns", 3, 5), ("rows", 1, 1), ("columns", 4, 2)]
)
def test_fixed_positions_are_sines_and_cosines_of_row_and_column(
    first_axis: FirstAxis, height: int, width: int
) -> None:
    """One number at a time, after the papers of MoCo-v3 (rows first) and MAE (columns first)."""
    table = sine_cosine_positions(12, (height, width), first_axis=first_axis)
    assert table.shape == (1 + height * width, 12)
    assert table.dtype == torch.float32
    assert (table[0] == 0).all()
    for row in range(height):
        for column in range(width):
            places = (row, column) if first_axis == "rows" else (column, row)
            expected = [
                wave(place / 10_000 ** (k / 3)) for place in places for wave in (math.sin, math.cos) for k in range(3)
            ]
            assert table[1 + row * width + column].tolist() == pytest.approx(expected, abs=1e-6)


def test_dimensions_that_two_axes_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        sine_cosine_positions(10, (2, 2), first_axis="rows")


@pytest.mark.parametrize(("old", "new"), [(256, 8), (2, 8192)])
def test_resampling_that_would_fill_the_memory_is_refused(old: int, new: int) -> None:
    """A file of one megabyte can hold positions of 256 x 256 patches."""
    with pytest.raises(RecipeError, match="too much memory"):
        resample_positions(torch.zeros(1, old * old, 4), 2 * new, 4 * new)
