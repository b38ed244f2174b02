import numpy as np
import pytest
from PIL import Image

from massl.data.sources.base import Pixels
from massl.reports.pictures.sheets import GREEN, RED, Tile, fitted, sheet, tile_side


def plain(height: int, width: int, colour: tuple[int, int, int] = (10, 20, 200)) -> Pixels:
    return np.full((height, width, 3), colour, dtype=np.uint8)


def places_of(picture: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, right, bottom (inclusive) of the pixels of a colour."""
    rows, columns = np.nonzero((np.array(picture) == colour).all(axis=2))
    assert len(rows), f"there is no pixel of {colour}"
    return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())


@pytest.mark.parametrize(
    ("size", "side"), [(480, 160), (224, 224), (476, 238), (32, 160), (72, 216), (28, 168), (160, 160), (159, 318)]
)
def test_tiles_are_at_least_160_px_and_a_whole_multiple_or_part(size: int, side: int) -> None:
    assert tile_side(size) == side >= 160
    assert side % size == 0 or size % side == 0


def test_maps_are_enlarged_in_sharp_squares_and_photographs_smoothly() -> None:
    board = np.zeros((2, 2, 3), dtype=np.uint8)
    board[0, 0] = board[1, 1] = 255
    sharp, smooth = (np.array(fitted(board, (40, 40), smooth=way)) for way in (False, True))
    assert np.array_equal(sharp, board.repeat(20, axis=0).repeat(20, axis=1))
    assert len(np.unique(smooth)) > 10


def test_pictures_keep_their_proportions() -> None:
    assert fitted(plain(100, 300), (60, 60), smooth=True).size == (60, 20)
    assert fitted(plain(300, 100), (60, 90), smooth=True).size == (30, 90)
    assert fitted(plain(1000, 1), (60, 60), smooth=True).size == (1, 60)


def test_a_picture_of_the_right_size_is_not_touched() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    assert np.array_equal(np.array(fitted(noise, (70, 50), smooth=True)), noise)


def test_tiles_stand_in_rows_and_columns_on_white() -> None:
    colours = [[(200, 0, 0), (0, 200, 0)], [(0, 0, 200), (200, 200, 0)]]
    made = sheet([[Tile(picture=plain(50, 50, colour)) for colour in row] for row in colours], box=(50, 50))
    boxes = [[places_of(made, colour) for colour in row] for row in colours]
    assert all((box[2] - box[0] + 1, box[3] - box[1] + 1) == (50, 50) for row in boxes for box in row)
    assert boxes[0][0][1] == boxes[0][1][1] < boxes[1][0][1] == boxes[1][1][1]
    assert boxes[0][0][0] == boxes[1][0][0] < boxes[0][1][0] == boxes[1][1][0]
    pixels = np.array(made)
    for colour in (colour for row in colours for colour in row):
        pixels[(pixels == colour).all(axis=2)] = 255
    assert (pixels == 255).all()
    # margins
    assert made.width - 1 - boxes[1][1][2] == boxes[0][0][0] == boxes[0][0][1] == made.height - 1 - boxes[1][1][3] > 0


def test_text_never_touches_a_tile_or_another_text() -> None:
    blue = (0, 0, 255)
    long = "a_very_long_file_name_of_a_photograph_from_a_deep_folder.jpeg"
    rows = [[Tile(picture=plain(90, 90, blue), captions=(long, "0.93")) for _ in range(3)] for _ in range(2)]
    made = sheet(
        rows,
        box=(90, 90),
        title=f"A title of many words that must be broken into several lines, and {long}",
        headings=["one", long, "3"],
    )
    pixels = np.array(made)
    is_blue = (pixels == blue).all(axis=2)
    assert is_blue.sum() == 6 * 90 * 90  # no letter on a tile
    is_text = ~is_blue & (pixels < 200).all(axis=2)
    edges = np.nonzero(is_text.any(axis=0))[0]
    assert edges.min() >= 16
    assert edges.max() < made.width - 16
    columns_between_tiles = ~is_blue.any(axis=0)
    below_title = np.nonzero(is_blue.any(axis=1))[0].min()
    assert not is_text[below_title:, columns_between_tiles].any()  # captions stay below their own tile
    assert is_text[below_title:].any()


def test_captions_that_are_too_wide_keep_both_ends() -> None:
    name = "ILSVRC2012_validation_00000293.JPEG"
    wide = sheet([[Tile(picture=plain(20, 400), captions=(name,))]], box=(400, 20))
    narrow = sheet([[Tile(picture=plain(20, 90), captions=(name,))]], box=(90, 20))
    assert wide.height == narrow.height
    assert np.array(narrow).shape[1] == 90 + 32


def test_a_frame_lies_around_the_picture_inside_its_box() -> None:
    made = sheet(
        [[Tile(picture=plain(40, 80, (1, 2, 3)), frame=GREEN), Tile(picture=plain(40, 80), frame=RED)]], box=(100, 100)
    )
    outer, inner = places_of(made, GREEN), places_of(made, (1, 2, 3))
    assert outer[0] < inner[0] <= inner[2] < outer[2]
    assert outer[1] < inner[1] <= inner[3] < outer[3]
    assert outer[2] - outer[0] + 1 == 100  # as wide as the box, as high as the picture needs
    assert outer[3] - outer[1] + 1 < 60
    assert places_of(made, RED)[0] > outer[2]


def test_a_rule_sets_the_first_column_apart() -> None:
    row = [Tile(picture=plain(30, 30)) for _ in range(3)]
    without, with_rule = sheet([row], box=(30, 30)), sheet([row], box=(30, 30), rule_after_first=True)
    assert with_rule.width > without.width
    left = places_of(with_rule, (150, 150, 150))
    assert left[0] == left[2]
    assert 16 + 30 < left[0] < 16 + 30 + 24


def test_a_short_last_row_is_no_trouble() -> None:
    made = sheet([[Tile(picture=plain(30, 30))] * 2, [Tile(picture=plain(30, 30))]], box=(30, 30))
    assert (np.array(made) == (10, 20, 200)).all(axis=2).sum() == 3 * 900
