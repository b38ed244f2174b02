"""Teachers that follow a student."""

import torch
from torch import Tensor, nn


@torch.no_grad()  # outside no_grad the teacher would join the graph and every step would be slower than the last
def move_towards(teacher: nn.Module, student: nn.Module, *, momentum: float | Tensor) -> None:
    """teacher <- momentum * teacher + (1 - momentum) * student, for every parameter."""
    teacher_parameters: list[Tensor] = list(teacher.parameters())
    student_parameters: list[Tensor] = list(student.parameters())
    if _fits_kernel(teacher_parameters, student_parameters):
        from massl.ops.update_kernels import move_towards_  # needs Triton, which only platforms with CUDA have

        move_towards_(teacher_parameters, student_parameters, momentum)
    elif isinstance(momentum, Tensor):  # torch takes no tensor for alpha
        torch._foreach_mul_(teacher_parameters, momentum.float())
        torch._foreach_add_(teacher_parameters, torch._foreach_mul(student_parameters, (1.0 - momentum).float()))
    else:
        torch._foreach_mul_(teacher_parameters, momentum)
        torch._foreach_add_(teacher_parameters, student_parameters, alpha=1.0 - momentum)


def _fits_kernel(teachers: list[Tensor], students: list[Tensor]) -> bool:
    """Contiguous float32 on one GPU, pair by pair of the same shape."""
    return (
        len(teachers) == len(students) > 0
        and teachers[0].is_cuda
        and all(tensor.device == teachers[0].device and tensor.dtype == torch.float32 for tensor in (*teachers, *students))
        and all(tensor.is_contiguous() for tensor in (*teachers, *students))
        and all(teacher.shape == student.shape for teacher, student in zip(teachers, students, strict=True))
    )
