"""How weights and gradients of whole networks are compared with those that the authors' code gave."""

from collections.abc import Mapping

from torch import Tensor


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, within: float) -> None:
    """Equal but for rounding: in every tensor the root mean square of the differences is at most `within`.

    It is relative to the root mean square of the tensor if that is above 1. Single elements are not compared:
    processors sum in different orders, and AdamW divides by the gradient, so one weight in a thousand is off by 30
    times as much as the rest. The bias of the keys is left out: it adds the same number to all logits of a query, so
    its true gradient is 0, and AdamW scales what rounding leaves of it up to the learning rate.
    """
    assert found
    for name, value in found.items():
        reference = expected[name]
        difference = value.detach() - reference
        if name.endswith("attn.qkv.bias"):
            difference[len(difference) // 3 : 2 * len(difference) // 3] = 0
        deviation, scale = root_mean_square(difference), max(1.0, root_mean_square(reference))
        assert deviation <= within * scale, f"{name}: differs by {deviation:.2g} on average, where {scale:.2g} is usual"


def root_mean_square(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
