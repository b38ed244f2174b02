from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from massl.nn.positions import resample_positions

GOLDEN = load_file(Path(__file__).parents[2] / "golden" / "position.safetensors")


@pytest.mark.parametrize("size", ["96x96", "480x480", "112x176", "112x448"])
def test_positions_at_other_sizes_are_those_of_the_authors_code(size: str) -> None:
    height, width = (int(side) // 16 for side in size.split("x"))
    expected = GOLDEN[size]
    resampled = resample_positions(GOLDEN["pos_embed"][:, 1:], height, width)
    torch.testing.assert_close(resampled, expected[:, 1:], rtol=0, atol=1e-6)
    assert torch.equal(GOLDEN["pos_embed"][:, :1], expected[:, :1])  # they leave the class token's position alone, as we do


def test_on_their_own_grid_positions_are_unchanged() -> None:
    positions = GOLDEN["pos_embed"][:, 1:]
    assert resample_positions(positions, 14, 14) is positions


def test_resampling_is_differentiable() -> None:
    positions = torch.randn(1, 16, 3, requires_grad=True)
    resample_positions(positions, 2, 3).sum().backward()
    assert positions.grad is not None
    torch.testing.assert_close(positions.grad.sum(), torch.tensor(18.0))  # bicubic weights add up to one for each of 6 x 3 outputs


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
