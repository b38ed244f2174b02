import math

import pytest
import torch

from massl.ops.block_masks import block_masks
from massl.ops.masked_rows import masked_rows, num_slots

IBOT_RATIOS = {"ratios": (0.0, 0.3), "ratio_variances": (0.0, 0.2)}


@pytest.mark.parametrize("spare", [0, 3])
def test_rows_are_the_hidden_patches_in_order_and_weights_average_over_patches_then_views(spare: int) -> None:
    masks = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    rows, weights = masked_rows(masks, 5 + spare)
    assert rows[:5].tolist() == [1, 3, 8, 9, 10]
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9, *[0.0] * spare])
    values = torch.randn(12)
    per_view = [values[0:4][masks[0]].mean(), torch.tensor(0.0), values[8:12][masks[2]].mean()]
    torch.testing.assert_close((values[rows] * weights).sum(), torch.stack(per_view).mean())


def test_no_patch_stands_in_two_slots_so_that_its_gradient_is_written_once() -> None:
    masks = torch.rand(6, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    rows, _ = masked_rows(masks, 100)
    assert len(rows.unique()) == 100


def test_without_room_the_last_hidden_patches_are_left_out() -> None:
    rows, weights = masked_rows(torch.ones(2, 4, dtype=torch.bool), 6)
    assert rows.tolist() == list(range(6))
    assert weights.tolist() == pytest.approx([1 / 8] * 6)


def test_small_batches_have_a_slot_for_every_patch_that_can_be_hidden() -> None:
    assert num_slots(4, 196, **IBOT_RATIOS) == 4 * 98
    assert num_slots(1, 16, ratios=(0.4,), ratio_variances=(0.0,)) == 7


def test_large_batches_have_slots_by_hoeffdings_inequality() -> None:
    assert (
        num_slots(256, 196, **IBOT_RATIOS)
        == math.ceil(256 * 0.15 * 196 + 98 * math.sqrt(256 * math.log(1e9) / 2))
        == 12_574
    )
    assert num_slots(2048, 196, **IBOT_RATIOS) < 0.2 * 2048 * 196


def test_the_masks_that_are_drawn_fit() -> None:
    masks = block_masks((0, "masks", 1), torch.arange(150), num_views=2, grid=(7, 7), **IBOT_RATIOS)
    num_hidden, slots = int(masks.sum()), num_slots(300, 49, **IBOT_RATIOS)
    assert 0.5 * slots < num_hidden < slots < 300 * 0.5 * 49
