"""The teacher as an exponential moving average (EMA) of the student."""

import torch
from torch import Tensor, nn

from massl.nn.backbone import Backbone
from massl.ops.kernel_fit import fits_update_kernels


@torch.no_grad()  # otherwise the teacher would join the graph, which would grow with every step
def move_towards(teacher: nn.Module, student: nn.Module, *, momentum: float | Tensor) -> None:
    """teacher <- momentum * teacher + (1 - momentum) * student, for every parameter outside frozen backbones."""
    teacher_parameters, student_parameters = _moving(teacher), _moving(student)
    if not teacher_parameters:
        return
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


def _moving(module: nn.Module) -> list[Tensor]:
    """All parameters but those of frozen backbones: x * m + x * (1 - m) is not always x in float32."""
    fixed = [part for part in module.modules() if isinstance(part, Backbone) and part.is_frozen]
    ids = {id(parameter) for backbone in fixed for parameter in backbone.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in ids]
