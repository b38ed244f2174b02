"""Teachers that follow a student."""

import torch
from torch import Tensor, nn


@torch.no_grad()  # outside no_grad the teacher would join the graph and every step would be slower than the last
def move_towards(teacher: nn.Module, student: nn.Module, *, momentum: float) -> None:
    """teacher <- momentum * teacher + (1 - momentum) * student, for every parameter."""
    teacher_parameters: list[Tensor] = list(teacher.parameters())
    student_parameters: list[Tensor] = list(student.parameters())
    torch._foreach_mul_(teacher_parameters, momentum)
    torch._foreach_add_(teacher_parameters, student_parameters, alpha=1.0 - momentum)
