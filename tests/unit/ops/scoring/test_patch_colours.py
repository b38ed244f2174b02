import pytest
import torch
from torch import Tensor

from massl.ops.scoring.patch_colours import patch_colours


def things(num_images: int = 3, side: int = 8, dim: int = 12) -> tuple[Tensor, Tensor]:
    """Features of a thing in the middle of each image, left and right half apart, and where the thing is."""
    generator = torch.Generator().manual_seed(0)
    patches = 0.05 * torch.randn(num_images, side, side, dim, generator=generator)
    is_thing = torch.zeros(num_images, side, side, dtype=torch.bool)
    is_thing[:, 2:-2, 2:-2] = True
    patches[is_thing] += 4 * torch.eye(dim)[0]
    patches[:, 2:-2, 2 : side // 2] += torch.eye(dim)[1]
    return patches, is_thing


def test_the_first_component_is_bright_in_the_middle_whatever_its_sign() -> None:
    patches, is_thing = things()
    for given in (patches, -patches):
        red = patch_colours(given).colours[..., 0].double()
        assert red[is_thing].min() > 150
        assert red[~is_thing].max() < 50


def test_all_images_share_their_colours() -> None:
    patches, is_thing = things()
    patches[1] = patches[0]
    together = patch_colours(patches).colours
    assert torch.equal(together[0], together[1])
    patches[2] = patches[2] * ~is_thing[2, ..., None]  # nothing but background: no contrast of its own is made up
    alone = patch_colours(patches).colours[2, ..., 0]
    assert alone.max() < 50


def test_the_threshold_leaves_the_background_black_and_colours_the_rest_anew() -> None:
    patches, is_thing = things()
    drawn = patch_colours(patches, threshold=0.5)
    assert torch.equal(drawn.is_shown, is_thing)
    assert not drawn.colours[~is_thing].any()
    red = drawn.colours[:, 2:-2, 2:-2, 0].double()
    halves = red[:, :, :2].mean(), red[:, :, 2:].mean()
    assert abs(halves[0] - halves[1]) > 150  # what differs inside the things
    assert patch_colours(patches).explained > 0.8


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    patches = torch.randn(2, 6, 7, 5, generator=torch.Generator().manual_seed(1)).double()
    patches *= torch.tensor([5.0, 4.0, 3.0, 1.0, 0.5])
    rows = patches.flatten(0, 2) - patches.flatten(0, 2).mean(dim=0)
    left, values, _ = torch.linalg.svd(rows, full_matrices=False)
    drawn = patch_colours(patches)
    assert drawn.explained == pytest.approx(float((values[:3] ** 2).sum() / (values**2).sum()))
    for number in range(3):
        found = drawn.colours.flatten(0, 2)[:, number].double()
        assert abs(torch.corrcoef(torch.stack([found, left[:, number]]))[0, 1]) > 0.99


def test_small_changes_and_the_order_of_images_change_no_colour() -> None:
    patches, _ = things()
    patches *= torch.linspace(1, 2, 12)
    first = patch_colours(patches).colours
    assert torch.equal(first, patch_colours(patches.clone()).colours)
    turned = patch_colours(patches.flip(0)).colours.flip(0)
    nearly = patch_colours(patches * (1 + 1e-6)).colours
    for other in (turned, nearly):
        assert (first.int() - other.int()).abs().max() <= 1


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 3, 3, 1), (1, 2, 2, 8)])
def test_equal_features_and_tiny_grids_are_drawn_in_plain_grey(shape: tuple[int, ...]) -> None:
    drawn = patch_colours(torch.ones(shape))
    assert drawn.explained == 0.0
    assert (drawn.colours == 128).all()
    assert drawn.colours.shape == (*shape[:3], 3)
