import math

import pytest
import torch

from massl.training.loss_watch import LossWatch, NonFiniteLoss


def test_finite_losses_pass_and_the_newest_is_returned() -> None:
    watch = LossWatch(torch.device("cpu"))
    for step, loss in enumerate((3.0, 2.0, 1.0)):
        watch.push(step, torch.tensor(loss, requires_grad=True), torch.tensor([step]))
    assert watch.flush() == 1.0
    assert watch.last_indices.tolist() == [2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_noticed_with_its_step_and_images(bad: float) -> None:
    watch = LossWatch(torch.device("cpu"))
    watch.push(4, torch.tensor(1.0), torch.tensor([1]))
    with pytest.raises(NonFiniteLoss, match=f"the loss of step 5 is {bad}") as caught:
        watch.push(5, torch.tensor(bad), torch.tensor([7, 8]))
    assert caught.value.step == 5
    assert caught.value.indices.tolist() == [7, 8]


def test_nothing_pushed_is_nothing_wrong() -> None:
    assert math.isnan(LossWatch(torch.device("cpu")).flush())


def test_on_a_gpu_the_check_comes_one_step_late_and_flush_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lag alone, on tensors of the CPU: no step may wait for its own loss."""
    watch = LossWatch(torch.device("cuda"))
    watch.push(0, torch.tensor(math.nan), torch.tensor([3]))
    with pytest.raises(NonFiniteLoss, match="the loss of step 0 is nan"):
        watch.push(1, torch.tensor(1.0), torch.tensor([4]))
    late = LossWatch(torch.device("cuda"))
    late.push(0, torch.tensor(math.inf), torch.tensor([3]))
    with pytest.raises(NonFiniteLoss, match="the loss of step 0 is inf"):
        late.flush()
