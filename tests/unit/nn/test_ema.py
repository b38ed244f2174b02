import pytest
import torch
from torch import nn

from massl.nn.ema import move_towards


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.9999, 1.0])
def test_every_parameter_moves_by_one_minus_momentum(momentum: float) -> None:
    teacher, student = nn.Linear(3, 2).requires_grad_(False), nn.Linear(3, 2)
    before, target = [p.clone() for p in teacher.parameters()], [p.detach().clone() for p in student.parameters()]
    move_towards(teacher, student, momentum=momentum)
    for parameter, old, new in zip(teacher.parameters(), before, target, strict=True):
        torch.testing.assert_close(parameter, momentum * old + (1.0 - momentum) * new)
    for parameter, new in zip(student.parameters(), target, strict=True):
        assert torch.equal(parameter, new)


def test_the_teacher_stays_outside_the_graph() -> None:
    teacher, student = nn.Linear(3, 2).requires_grad_(False), nn.Linear(3, 2)
    move_towards(teacher, student, momentum=0.5)
    assert all(parameter.grad_fn is None and not parameter.requires_grad for parameter in teacher.parameters())


def test_a_teacher_of_another_shape_is_not_moved_silently() -> None:
    with pytest.raises(RuntimeError):
        move_towards(nn.Linear(3, 2).requires_grad_(False), nn.Linear(4, 2), momentum=0.5)
