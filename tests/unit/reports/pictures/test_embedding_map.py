from typing import Any

import numpy as np
import pytest

from massl.reports.pictures.embedding_map import (
    MAX_CLASSES,
    THUMBNAIL,
    WIDTH,
    MapError,
    class_groups,
    height_of,
    plane_positions,
    with_room,
)


def clusters(num_images: int, num_classes: int, *, seed: int = 0) -> tuple[Any, Any]:
    """Features [N, 16] around one direction for each class, and labels [N]."""
    generator = np.random.default_rng(seed)
    labels = np.arange(num_images) % num_classes
    rows = 5.0 * np.eye(16)[labels] + generator.normal(0, 0.5, (num_images, 16))
    return rows.astype(np.float32), labels


def test_images_of_a_class_lie_together_on_the_map() -> None:
    rows, labels = clusters(120, 4)
    positions = plane_positions(rows).astype(float)
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    assert (labels[distances.argmin(axis=1)] == labels).mean() > 0.95


def test_the_same_features_give_the_same_map_and_their_length_does_not_matter() -> None:
    rows, _ = clusters(60, 3)
    first = plane_positions(rows)
    assert np.array_equal(first, plane_positions(rows.copy()))
    # powers of two: scaling is exact
    lengths = 2.0 ** np.random.default_rng(1).integers(-2, 3, (60, 1)).astype(np.float32)
    assert np.array_equal(first, plane_positions(rows * lengths))


def test_the_map_fills_its_width_and_is_never_higher_than_wide() -> None:
    for num_images, num_classes in ((10, 2), (90, 2), (90, 6)):
        positions = plane_positions(clusters(num_images, num_classes)[0])
        assert positions.shape == (num_images, 2)
        assert positions.min() >= 0
        assert positions[:, 0].max() <= WIDTH
        assert positions[:, 1].max() <= height_of(positions)
        spread = positions.max(axis=0) - positions.min(axis=0)
        assert spread.max() > 0.9 * WIDTH
        assert positions[:, 0].std() >= positions[:, 1].std()


def test_too_few_images_and_a_collapsed_model_are_refused_in_words() -> None:
    with pytest.raises(MapError, match="at least 10 images, and there are 9"):
        plane_positions(clusters(9, 3)[0])
    with pytest.raises(MapError, match="same features"):
        plane_positions(np.ones((20, 16), dtype=np.float32))


def test_up_to_twelve_classes_have_a_look_of_their_own() -> None:
    labels = [number % MAX_CLASSES for number in range(30)]
    groups = class_groups(labels, tuple(f"class {number}" for number in range(MAX_CLASSES)))
    assert [group.style for group in groups] == list(range(MAX_CLASSES))
    assert [group.name for group in groups] == [f"class {number}" for number in range(MAX_CLASSES)]
    assert all(labels[number] == place for place, group in enumerate(groups) for number in group.images)


def test_of_more_classes_the_most_frequent_have_one_and_the_others_are_grey_below_them() -> None:
    labels = [*range(15), *range(4, 15)]  # classes 0 to 3 once, the others twice
    others, *frequent = class_groups(labels, tuple("abcdefghijklmno"))
    assert (others.name, others.style, others.images) == ("4 other classes", None, (0, 1, 2, 3))
    assert [group.name for group in frequent] == list("efghijklmno")
    assert sorted(number for group in (others, *frequent) for number in group.images) == list(range(len(labels)))


def test_images_without_classes_are_one_group() -> None:
    (group,) = class_groups((0, 0, 0), None)
    assert group.images == (0, 1, 2)
    assert group.style == 0


def test_thumbnails_do_not_hide_each_other_and_leave_no_room_unused() -> None:
    positions = np.random.default_rng(0).integers(0, WIDTH, (800, 2))
    chosen = with_room(positions)
    gaps = np.abs(positions[chosen][:, None] - positions[chosen][None]).max(axis=2)
    assert gaps[~np.eye(len(chosen), dtype=bool)].min() >= THUMBNAIL
    to_nearest = np.abs(positions[:, None] - positions[chosen][None]).max(axis=2).min(axis=1)
    assert to_nearest.max() < THUMBNAIL  # any further one would hide another
    assert with_room(positions[:1]) == [0]
