import io

import matplotlib.image
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from massl.ops.image_ops import normalise
from massl.ops.scoring.attention_maps import (
    attention_tiles,
    colour_map,
    enlarged,
    head_colours,
    head_opacity,
    heat_map,
    mass_mask,
    stretched,
    to_picture,
    winning_heads,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def random_maps(*shape: int, seed: int = 0) -> Tensor:
    """Positive and uneven, as attention is."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(2).exp() / 100


# ---- which patches hold the mass -------------------------------------------------------------------------------------


def test_the_mask_keeps_the_top_patches_that_hold_sixty_percent() -> None:
    # Sorted upwards the shares are 0.1 0.2 0.3 0.4, cumulated 0.1 0.3 0.6 1.0: those above 0.4 stay.
    assert mass_mask(torch.tensor([[3.0, 1.0], [4.0, 2.0]])).tolist() == [[True, False], [True, False]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), st.sampled_from([0.3, 0.6, 0.85]))
def test_the_mask_is_what_remains_when_the_weakest_patches_go_as_long_as_enough_mass_stays(
    values: list[int], mass: float
) -> None:
    kept = mass_mask(torch.tensor([values], dtype=torch.float32), mass=mass)[0]
    ascending = sorted(range(len(values)), key=lambda place: values[place])
    dropped = 0.0
    expected = [True] * len(values)
    for place in ascending:
        dropped += values[place] / sum(values)
        if dropped > 1 - mass:
            if dropped < 1 - mass + 1e-9:
                return  # rounding decides
            break
        expected[place] = False
    assert kept.tolist() == expected


def test_each_map_of_a_batch_has_its_own_mask() -> None:
    maps = random_maps(2, 3, 4, 5)
    masks = mass_mask(maps)
    for image in range(2):
        for head in range(3):
            assert torch.equal(masks[image, head], mass_mask(maps[image, head]))


def test_a_map_without_any_attention_has_no_patches_and_no_nan() -> None:
    nothing = torch.zeros(2, 3, 3)
    assert not mass_mask(nothing).any()
    assert torch.equal(head_opacity(nothing), nothing)


# ---- colours ---------------------------------------------------------------------------------------------------------


def test_the_strongest_head_takes_all_and_between_equals_the_lower_one() -> None:
    maps = torch.tensor([[[1.0, 5.0, 2.0, 0.0]], [[3.0, 5.0, 1.0, 0.0]], [[3.0, 4.0, 2.0, 0.0]]])
    assert winning_heads(maps).tolist() == [[[0, 5, 2, 0]], [[3, 0, 0, 0]], [[0, 0, 0, 0]]]


def test_opacity_is_the_root_of_the_stretched_map_above_a_fifth() -> None:
    # One head, masses 1 2 3 4 10 of 20: cumulated 0.05 0.15 0.3 0.5 1.0, so 4 and 10 survive; 4 / 10 of the largest is
    # above 0.2.
    opacity = head_opacity(torch.tensor([[[1.0, 2.0, 3.0, 4.0, 10.0]]]))
    torch.testing.assert_close(opacity, torch.tensor([[[0.0, 0.0, 0.0, 0.4**0.5, 1.0]]]))
    # 1 of 10 survives the mask (0.9 of the mass is kept) but not the threshold.
    assert head_opacity(torch.tensor([[[0.5, 1.0, 10.0]]]), mass=0.99)[0, 0].tolist() == [0.0, 0.0, 1.0]


def test_stretching_reaches_zero_and_one_and_leaves_flat_maps_at_zero() -> None:
    maps = torch.tensor([[[2.0, 4.0], [3.0, 2.5]], [[7.0, 7.0], [7.0, 7.0]]])
    assert stretched(maps, 2).tolist() == [[[0.0, 1.0], [0.5, 0.25]], [[0.0, 0.0], [0.0, 0.0]]]


def test_six_heads_have_the_published_colours_and_further_ones_stand_apart() -> None:
    assert head_colours(6) == (
        (0, 160, 215),
        (220, 55, 60),
        (245, 180, 0),
        (10, 120, 190),
        (40, 150, 100),
        (135, 75, 145),
    )
    sixteen = np.array(head_colours(16))
    assert head_colours(12) == head_colours(16)[:12]  # a head keeps its colour whatever the number of heads
    assert head_colours(3) == head_colours(6)[:3]
    distances = np.linalg.norm(sixteen[:, None] - sixteen[None], axis=2) + 1000 * np.eye(16)
    assert distances.min() >= 48  # as far apart as the closest published ones, two blues
    assert sixteen.max(axis=1).min() > 100  # bright on a near-black background
    assert ((sixteen >= 0) & (sixteen <= 255)).all()


def slow_colour_map(image: NDArray[np.float64], attention: NDArray[np.float64], patch: int) -> NDArray[np.float64]:
    """The published steps, pixel by pixel."""
    num_heads, height, width = attention.shape
    masked = np.zeros_like(attention)
    for head in range(num_heads):
        places = sorted(((attention[head, y, x], y, x) for y in range(height) for x in range(width)), reverse=True)
        held = 0.0
        for value, y, x in places:  # from the top, until 60 % are held
            if held >= 0.6 * attention[head].sum():
                break
            masked[head, y, x] = value
            held += value
    for y in range(height):
        for x in range(width):
            winner = int(np.argmax(masked[:, y, x]))  # the first of equals
            masked[[head for head in range(num_heads) if head != winner], y, x] = 0
    picture = np.empty((height * patch, width * patch, 3))
    for row in range(height * patch):
        for column in range(width * patch):
            grey = np.mean(192 + 64 * (image[:, row, column] - image.min()) / (image.max() - image.min()))
            colour = np.full(3, 0.1 * grey)
            for head in range(num_heads):
                low, high = masked[head].min(), masked[head].max()
                value = (masked[head, row // patch, column // patch] - low) / (high - low) if high > low else 0
                if value > 0.2:
                    colour = colour * (1 - np.sqrt(value)) + np.sqrt(value) * np.array(head_colours(num_heads)[head])
            picture[row, column] = colour
    return picture


@pytest.mark.parametrize("num_heads", [1, 6, 8])
def test_the_colour_map_follows_the_published_steps(num_heads: int) -> None:
    image = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(1))
    attention = random_maps(num_heads, 3, 5, seed=num_heads)
    picture = colour_map(image, attention, patch=4)
    expected = slow_colour_map(image.double().numpy(), attention.double().numpy(), 4)
    assert picture.dtype == torch.uint8
    assert np.abs(picture.numpy() - expected).max() <= 0.5 + 1e-6


def test_unattended_pixels_are_the_image_in_near_black_grey() -> None:
    # stretched 0, 0.5, 1: 192, 224 and 256, mean 224
    image = torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1).expand(3, 2, 2).clone()
    picture = colour_map(image, torch.zeros(2, 1, 1), patch=2)
    assert picture.tolist() == [[[22, 22, 22]] * 2] * 2


def test_heat_maps_are_those_of_matplotlib() -> None:
    attention = random_maps(5, 7).double()
    file = io.BytesIO()
    matplotlib.image.imsave(
        file, interpolate(attention[None, None], scale_factor=3, mode="nearest")[0, 0].numpy(), format="png"
    )
    with Image.open(file) as image:
        expected = np.array(image.convert("RGB"))
    assert np.array_equal(heat_map(attention, patch=3).numpy(), expected)


def test_enlarging_repeats_the_nearest_value() -> None:
    maps = random_maps(2, 3, 4)
    assert torch.equal(enlarged(maps, 5), interpolate(maps[None], scale_factor=5, mode="nearest")[0])


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_a_normalised_image_comes_back_as_it_looked() -> None:
    pixels = torch.randint(0, 256, (2, 3, 8, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    restored = to_picture(normalise(pixels.float() / 255, MEAN, STD), mean=MEAN, std=STD)
    assert torch.equal(restored, pixels.movedim(1, -1))


def test_a_strip_has_image_colour_map_and_one_heat_map_per_head_and_leaves_out_what_fills_no_patch() -> None:
    pixels = torch.randint(0, 256, (3, 13, 18), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image, attention = normalise(pixels.float() / 255, MEAN, STD), random_maps(3, 3, 4)
    tiles = attention_tiles(image, attention, patch=4, mean=MEAN, std=STD)
    assert [tuple(tile.shape) for tile in tiles] == [(12, 16, 3)] * 5
    assert torch.equal(tiles[0], pixels[:, :12, :16].movedim(0, 2))
    assert torch.equal(tiles[1], colour_map(image[:, :12, :16], attention, patch=4))
    assert torch.equal(tiles[4], heat_map(attention[2], patch=4))
