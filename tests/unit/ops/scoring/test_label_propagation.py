import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from torch import Tensor

from massl.ops.scoring import label_propagation
from massl.ops.scoring.label_propagation import (
    contour,
    contour_accuracy,
    label_map,
    propagate_labels,
    region_similarity,
    resize_nearest,
)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_masks(num: int, height: int, width: int, *, seed: int) -> Tensor:
    """Blobs: noise that is smoothed and cut off."""
    noise = np.random.default_rng(seed).normal(size=(num, height, width))
    return torch.from_numpy(np.stack([ndimage.gaussian_filter(layer, 2) > 0.05 for layer in noise]))


# ---- propagation -----------------------------------------------------------------------------------------------------


def propagated_by_hand(
    target: Tensor, context: Tensor, labels: Tensor, *, width: int, radius: int, num_neighbours: int, temperature: float
) -> NDArray[np.float64]:
    rows = []
    for patch, feature in enumerate(target.double().numpy()):
        found: list[tuple[float, NDArray[np.float64]]] = []
        for frame_features, frame_labels in zip(context.double().numpy(), labels.double().numpy(), strict=True):
            for other, other_feature in enumerate(frame_features):
                distance = max(abs(patch // width - other // width), abs(patch % width - other % width))
                if distance <= radius:
                    cosine = float(feature @ other_feature) / float(
                        np.linalg.norm(feature) * np.linalg.norm(other_feature)
                    )
                    found.append((cosine, frame_labels[other]))
        best = sorted(found, key=lambda pair: -pair[0])[:num_neighbours]
        weights = [math.exp(cosine / temperature) for cosine, _ in best]
        rows.append(sum(weight * label for weight, (_, label) in zip(weights, best, strict=True)) / sum(weights))
    return np.stack(rows)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.integers(1, 7))
@settings(max_examples=30)
def test_labels_are_those_of_the_nearest_patches_that_a_plain_loop_finds(
    num_frames: int, height: int, width: int, radius: int, num_neighbours: int
) -> None:
    num_patches = height * width
    target, context = draw(num_patches, 6, seed=1), draw(num_frames, num_patches, 6, seed=2)
    labels = draw(num_frames, num_patches, 3, seed=3).softmax(dim=-1)
    found = propagate_labels(
        target, context, labels, grid=(height, width), radius=radius, num_neighbours=num_neighbours, temperature=0.1
    )
    truth = propagated_by_hand(
        target, context, labels, width=width, radius=radius, num_neighbours=num_neighbours, temperature=0.1
    )
    np.testing.assert_allclose(found.numpy(), truth, atol=2e-5)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(num_patches))


def test_taking_patches_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, context, labels = draw(20, 6, seed=1), draw(2, 20, 6, seed=2), draw(2, 20, 3, seed=3)
    whole = propagate_labels(target, context, labels, grid=(4, 5), radius=2, num_neighbours=5, temperature=0.1)
    monkeypatch.setattr(label_propagation, "_CHUNK_ELEMENTS", 3 * 40)
    torch.testing.assert_close(
        propagate_labels(target, context, labels, grid=(4, 5), radius=2, num_neighbours=5, temperature=0.1), whole
    )


def test_patches_as_similar_as_the_last_that_counts_all_count() -> None:
    context = torch.ones(1, 4, 3)
    labels = torch.eye(4)[None]
    found = propagate_labels(
        torch.ones(4, 3), context, labels, grid=(1, 4), radius=4, num_neighbours=1, temperature=0.1
    )
    torch.testing.assert_close(found, torch.full((4, 4), 0.25))


def test_a_square_that_moves_is_followed_without_a_mistake() -> None:
    height, width, num_frames = 10, 14, 7
    squares = torch.zeros(num_frames, height, width, dtype=torch.bool)
    for frame in range(num_frames):
        squares[frame, 2 + frame // 2 : 5 + frame // 2, 1 + frame : 4 + frame] = True
    is_square = squares.flatten(1)
    planted = torch.where(is_square[..., None], torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))  # what, [F, N, 2]
    features = torch.cat([planted, 0.3 * draw(num_frames, height * width, 6, seed=0)], dim=-1)
    known = [torch.nn.functional.one_hot(is_square[0].long(), 2).float()]
    for frame in range(1, num_frames):
        context = slice(max(0, frame - 3), frame)
        known.append(
            propagate_labels(
                features[frame],
                features[context],
                torch.stack(known[context]),
                grid=(height, width),
                radius=3,
                num_neighbours=5,
                temperature=0.1,
            )
        )
    followed = torch.stack(known).argmax(dim=-1).bool().view_as(squares)
    assert region_similarity(followed, squares).tolist() == [1.0] * num_frames


# ---- from labels to masks --------------------------------------------------------------------------------------------


def enlarged_by_hand(values: NDArray[np.float64], scale: int) -> NDArray[np.float64]:
    """Bilinear between the centres of old pixels; beyond the outermost centres nothing changes."""
    height, width = values.shape
    rows, columns = (np.clip((np.arange(size * scale) + 0.5) / scale - 0.5, 0, size - 1) for size in (height, width))
    return ndimage.map_coordinates(values, np.meshgrid(rows, columns, indexing="ij"), order=1)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=30)
def test_each_pixel_takes_the_class_that_is_largest_after_stretching(
    num_classes: int, height: int, width: int, scale: int
) -> None:
    labels = draw(num_classes, height, width, seed=height * 31 + width).double().softmax(dim=0)
    stretched = []
    for layer in labels.numpy():
        large = enlarged_by_hand(layer, scale)
        span = large.max() - large.min()
        stretched.append((large - large.min()) / span if span > 1e-9 else np.ones_like(large))
    chosen = np.take_along_axis(np.array(stretched), label_map(labels, scale=scale).numpy()[None], axis=0)[0]
    # of classes that rounding alone tells apart either will do
    np.testing.assert_allclose(chosen, np.max(stretched, axis=0), atol=1e-9)


def test_classes_that_are_the_same_everywhere_are_not_told_apart_by_rounding() -> None:
    for value in torch.linspace(0.05, 0.95, 40, dtype=torch.float64):
        labels = torch.stack([value.expand(1, 1), (1 - value).expand(1, 1)])
        assert label_map(labels, scale=4).unique().tolist() == [0]  # both fill the frame: the first counts


def test_a_class_that_fills_the_frame_is_found_and_one_that_has_vanished_is_not() -> None:
    nowhere, everywhere = torch.zeros(2, 3), torch.ones(2, 3)
    assert label_map(torch.stack([nowhere, everywhere]), scale=2).unique().tolist() == [1]
    assert label_map(torch.stack([everywhere, nowhere]), scale=2).unique().tolist() == [0]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_resizing_to_the_nearest_is_that_of_pillow(height: int, width: int, new_height: int, new_width: int) -> None:
    values = (np.arange(height * width) % 251).astype(np.uint8).reshape(height, width)
    expected = np.asarray(Image.fromarray(values).resize((new_width, new_height), Image.Resampling.NEAREST))
    assert resize_nearest(torch.from_numpy(values), (new_height, new_width)).tolist() == expected.tolist()


@pytest.mark.parametrize(("old", "new"), [(832, 854), (854, 52), (896, 910), (1152, 1138)])
def test_resizing_the_widths_of_davis_is_that_of_pillow(old: int, new: int) -> None:
    values = np.arange(old, dtype=np.int32)[None]
    expected = np.asarray(Image.fromarray(values).resize((new, 1), Image.Resampling.NEAREST))
    assert resize_nearest(torch.from_numpy(values), (1, new)).tolist() == expected.tolist()


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_region_similarity_is_intersection_over_union() -> None:
    masks, truths = random_masks(4, 20, 30, seed=1), random_masks(4, 20, 30, seed=2)
    for found, mask, truth in zip(
        region_similarity(masks, truths).tolist(), masks.tolist(), truths.tolist(), strict=True
    ):
        pixels, true_pixels = (
            {(y, x) for y, row in enumerate(layer) for x, is_inside in enumerate(row) if is_inside}
            for layer in (mask, truth)
        )
        assert found == pytest.approx(len(pixels & true_pixels) / len(pixels | true_pixels))


def test_empty_masks_agree_and_an_empty_one_shares_nothing_with_another() -> None:
    empty, full = torch.zeros(1, 4, 5, dtype=torch.bool), torch.zeros(1, 4, 5, dtype=torch.bool)
    full[0, 1:3, 1:3] = True
    for score in (region_similarity, contour_accuracy):
        assert float(score(empty, empty)) == 1.0
        assert float(score(full, empty)) == 0.0
        assert float(score(empty, full)) == 0.0
        assert float(score(full, full)) == 1.0


def contour_by_hand(mask: Any) -> NDArray[np.bool_]:
    height, width = len(mask), len(mask[0])
    found = np.zeros((height, width), dtype=bool)
    for y in range(height):
        for x in range(width):
            neighbours = [(y, x + 1), (y + 1, x), (y + 1, x + 1)]
            inside = [(min(row, height - 1), min(column, width - 1)) for row, column in neighbours]
            found[y, x] = any(mask[row][column] != mask[y][x] for row, column in inside)
    return found


def test_a_contour_is_where_the_mask_changes_to_the_right_or_below() -> None:
    mask = torch.zeros(1, 4, 5, dtype=torch.bool)
    mask[0, 1:3, 1:3] = True
    assert contour(mask)[0].int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    masks = random_masks(3, 12, 17, seed=3)
    assert contour(masks).tolist() == [contour_by_hand(mask).tolist() for mask in masks.tolist()]


@pytest.mark.parametrize(("height", "width"), [(40, 60), (150, 230)])  # tolerances of 1 and 3 pixels
def test_contour_accuracy_matches_contours_within_the_tolerance(height: int, width: int) -> None:
    masks, truths = (
        random_masks(3, height, width, seed=4),
        random_masks(3, height, width, seed=4).roll((1, 2), dims=(1, 2)),
    )
    tolerance = math.ceil(0.008 * math.sqrt(height**2 + width**2))
    for found, mask, truth in zip(
        contour_accuracy(masks, truths).tolist(), masks.tolist(), truths.tolist(), strict=True
    ):
        pixels, true_pixels = contour_by_hand(mask), contour_by_hand(truth)
        precision = (ndimage.distance_transform_edt(~true_pixels)[pixels] <= tolerance).mean()
        recall = (ndimage.distance_transform_edt(~pixels)[true_pixels] <= tolerance).mean()
        assert 0 < found <= 1
        assert found == pytest.approx(2 * precision * recall / (precision + recall))


def test_a_contour_may_be_off_by_the_tolerance_and_no_further() -> None:
    mask = torch.zeros(1, 150, 230, dtype=torch.bool)
    mask[0, 40:80, 60:100] = True
    assert float(contour_accuracy(mask.roll(3, dims=2), mask)) == 1.0
    assert float(contour_accuracy(mask.roll(4, dims=2), mask)) < 1.0
