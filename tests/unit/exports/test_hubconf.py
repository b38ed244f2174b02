import ast
from pathlib import Path

import pytest
import torch

from massl.exports import hubconf
from massl.nn.positions import resample_positions


@pytest.mark.parametrize("side", [4, 14, 37])
@pytest.mark.parametrize("grid", [(6, 6), (6, 10), (1, 3), (14, 14), (40, 20)])
def test_positions_are_resampled_as_in_training(side: int, grid: tuple[int, int]) -> None:
    positions = torch.randn(1, side * side, 8, generator=torch.Generator().manual_seed(0))
    expected = resample_positions(positions, *grid)
    torch.testing.assert_close(hubconf.resampled_positions(positions, *grid), expected, rtol=0, atol=2e-5)


def test_positions_on_their_own_grid_stay_bit_for_bit() -> None:
    positions = torch.randn(1, 49, 8)
    assert torch.equal(hubconf.resampled_positions(positions, 7, 7), positions)


def test_it_imports_nothing_of_massl() -> None:
    tree = ast.parse(Path(hubconf.__file__).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in imported if str(name).startswith("massl")]
