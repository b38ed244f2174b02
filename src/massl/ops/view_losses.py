"""Shared by the losses between student and teacher views: input checks, pairs of views, chunks of bounded memory."""

from collections.abc import Iterator, Mapping

from torch import Tensor


def check_shapes(tensors: Mapping[str, tuple[Tensor | None, str]]) -> None:
    """Name -> tensor and its axes, as in "views rows dim"; equal axes must have equal sizes, and none may be empty."""
    sizes: dict[str, int] = {}
    for name, (tensor, axes) in tensors.items():
        if tensor is None:
            continue
        names = axes.split()
        expected = ", ".join(str(sizes.get(axis, axis)) for axis in names)
        if tensor.dim() != len(names) or any(
            size == 0 or sizes.setdefault(axis, size) != size for axis, size in zip(names, tensor.shape, strict=True)
        ):
            raise ValueError(f"{name} must be [{expected}], not empty; got {list(tensor.shape)}")


def check_temperatures(student_temperature: float, teacher_temperature: float | Tensor) -> None:
    # A tensor is not checked: reading it would wait for the GPU.
    if student_temperature <= 0 or (not isinstance(teacher_temperature, Tensor) and teacher_temperature <= 0):
        raise ValueError(f"temperatures must be positive; got {student_temperature} and {teacher_temperature}")


def num_different_pairs(num_student_views: int, num_teacher_views: int) -> int:
    """Pairs of a student and a teacher view that are different crops; views of the same index are the same crop."""
    num_pairs = num_student_views * num_teacher_views - min(num_student_views, num_teacher_views)
    if num_pairs <= 0:
        raise ValueError(
            f"{num_student_views} student and {num_teacher_views} teacher views form no pair of different views; "
            "give more views"
        )
    return num_pairs


def equal_chunks(num_items: int, max_items: int) -> Iterator[slice]:
    """The fewest chunks of at most `max_items` (or 1), of nearly equal size; fixed by shapes, as CUDA graphs need."""
    num_chunks = -(-num_items // max(1, max_items))
    size = -(-num_items // num_chunks)
    for start in range(0, num_items, size):
        yield slice(start, min(start + size, num_items))
