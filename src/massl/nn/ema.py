"""The teacher as an exponential moving average (EMA) of the student."""

import torch
from torch import Tensor, nn

from massl.ops.kernel_fit import fits_update_kernels


@torch.no_grad()  # otherwise the teacher would join the graph, which would grow with every step
def move_towards(teacher: nn.Module, student: nn.Module, *, momentum: float | Tensor) -> None:
    """teacher <- momentum * teacher + (1 - momentum) * student, for every parameter."""
    teacher_parameters: list[Tensor] = list(teacher.parameters())
    student_parameters: list[Tensor] = list(student.parameters())
    have_same_shapes = [one.shape for one in teacher_parameters] == [one.shape for one in student_parameters]
    if have_same_shapes and fits_update_kernels([*teacher_parameters, *student_parameters]):
        from massl.ops.kernels.update import move_towards_  # needs Triton, which requires CUDA

        move_towards_(teacher_parameters, student_parameters, momentum)
    elif isinstance(momentum, Tensor):  # torch takes no tensor for alpha
        torch._foreach_mul_(teacher_parameters, momentum.float())
        torch._foreach_add_(teacher_parameters, torch._foreach_mul(student_parameters, (1.0 - momentum).float()))
    else:
        torch._foreach_mul_(teacher_parameters, momentum)
        torch._foreach_add_(teacher_parameters, student_parameters, alpha=1.0 - momentum)
