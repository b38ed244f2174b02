from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from massl.data.order import EpochOrder
from massl.data.sources.base import DataError


@settings(max_examples=30, deadline=None)
@given(
    num_images=st.integers(1, 60), batch_size=st.integers(1, 60), seed=st.integers(0, 2**31), epoch=st.integers(0, 5)
)
def test_no_image_comes_twice_in_an_epoch(num_images: int, batch_size: int, seed: int, epoch: int) -> None:
    batch_size = min(batch_size, num_images)
    order = EpochOrder(num_images, batch_size, seed)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    seen = torch.cat([order.at(step) for step in steps])
    assert {order.epoch_of(step) for step in steps} == {epoch}
    assert len(seen) == num_images - num_images % batch_size
    assert len(set(seen.tolist())) == len(seen)
    assert seen.min() >= 0
    assert seen.max() < num_images


def test_a_step_does_not_depend_on_the_steps_asked_for_before() -> None:
    forwards, backwards = EpochOrder(10, 3, seed=1), EpochOrder(10, 3, seed=1)
    ascending = [forwards.at(step) for step in range(9)]
    descending = [backwards.at(step) for step in reversed(range(9))][::-1]
    assert torch.equal(torch.stack(ascending), torch.stack(descending))


def test_epochs_and_seeds_shuffle_differently() -> None:
    order = EpochOrder(50, 50, seed=1)
    assert not torch.equal(order.at(0), order.at(1))
    assert not torch.equal(order.at(0), EpochOrder(50, 50, seed=2).at(0))


def test_changing_a_returned_batch_does_not_change_the_order() -> None:
    order = EpochOrder(6, 3, seed=0)
    expected = order.at(0).clone()
    order.at(0).zero_()
    assert torch.equal(order.at(0), expected)


def test_threads_asking_at_once_get_what_one_would_get() -> None:
    order, steps = EpochOrder(1000, 10, seed=3), [0, 150, 250, 7, 350] * 20
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(order.at, steps))
    alone = EpochOrder(1000, 10, seed=3)
    assert all(torch.equal(batch, alone.at(step)) for batch, step in zip(found, steps, strict=True))


def test_too_few_images_for_a_batch_say_what_to_lower() -> None:
    with pytest.raises(DataError, match=r"--trainer\.batch_size"):
        EpochOrder(7, 8, seed=0)
