"""The kernel against the tensor operations of keyed_random: compiled where there is a GPU, elsewhere as Python
(tests/conftest.py).
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from massl import keyed_random, keyed_random_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INT64 = st.one_of(
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.integers(min_value=-3, max_value=3),
    st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**32, -(2**31), -(2**32), -(2**63), 2**63 - 1, 1 << 40]),
)
PLAIN = st.one_of(st.none(), INT64)
NUM_EXAMPLES = 100 if DEVICE.type == "cuda" else 20  # Triton's interpreter takes 20 ms for one


def assert_equal_bits(*key: keyed_random.KeyPart) -> None:
    """`key` by the kernel is what it is by tensor operations on the CPU."""
    prefix = keyed_random._mixed_prefix(key)
    parts = [part.to(DEVICE) if isinstance(part, Tensor) else part for part in prefix[2]]
    on_cpu = [part.cpu() if isinstance(part, Tensor) else part for part in key]
    bits = keyed_random_kernel.draw(*prefix[:2], parts, as_uniform=False)
    uniform = keyed_random_kernel.draw(*prefix[:2], parts, as_uniform=True)
    assert (bits.dtype, uniform.dtype) == (torch.int64, torch.float32)
    assert torch.equal(bits.cpu(), keyed_random.bits(*on_cpu))
    assert torch.equal(uniform.cpu(), keyed_random.uniform(*on_cpu))


@pytest.mark.kernel
@given(st.lists(INT64, max_size=2), st.lists(INT64, min_size=1, max_size=4), PLAIN)
@example([], [0], None)
@settings(max_examples=NUM_EXAMPLES)
def test_a_list_of_keys(prefix: list[int], items: list[int], plain: int | None) -> None:
    assert_equal_bits(*prefix, torch.tensor(items), *([] if plain is None else [plain]))


@pytest.mark.kernel
@given(
    INT64, INT64, PLAIN, st.lists(INT64, min_size=1, max_size=3), PLAIN, st.lists(INT64, min_size=1, max_size=3), PLAIN
)
@settings(max_examples=NUM_EXAMPLES)
def test_three_tensors_that_broadcast_with_integers_between(
    seed: int,
    step: int,
    after_step: int | None,
    columns: list[int],
    after_columns: int | None,
    rows: list[int],
    after_rows: int | None,
) -> None:
    key = [
        seed,
        "purpose",
        torch.tensor(step),
        after_step,
        torch.tensor(columns),
        after_columns,
        torch.tensor(rows)[:, None],
        after_rows,
    ]
    assert_equal_bits(*(part for part in key if part is not None))


@pytest.mark.kernel
def test_tensors_of_any_strides_and_more_keys_than_one_program_draws() -> None:
    table = torch.arange(7 * 11 * 13).view(7, 11, 13) * 2**29
    assert_equal_bits(3, table, "a", table.flip(0)[:, :1], table[2, ::2][:1] - 2**40)
    assert_equal_bits(3, table.permute(2, 0, 1), torch.arange(11))
    assert_equal_bits(3, torch.arange(10).expand(4, 5, 10), torch.arange(4)[:, None, None])
    assert_equal_bits(3, torch.tensor(-1), torch.arange(0))


@pytest.mark.kernel
def test_the_keys_of_a_training_step() -> None:
    step = torch.tensor(1234)
    images, views = torch.arange(5, 21)[None, :], torch.arange(8)[:, None]
    assert_equal_bits(7, step, "memory blocks", torch.arange(1000))
    assert_equal_bits(7, "drop path", step, images, views)
    keys = keyed_random.bits(7, "drop path", step, images, views)
    assert_equal_bits("drop path", torch.arange(24)[:, None], keys.flatten()[None, :])


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("parts", "fits"),
    [
        ([0], True),
        ([0, 5, 1, 5, 3, 5], True),
        ([], False),
        ([0, 1, 2, 3], False),  # four tensors
        ([0, 5, 5], False),  # two integers in a row
    ],
)
def test_other_keys_are_left_to_tensor_operations(parts: list[int], fits: bool) -> None:
    """Numbers below 5 stand for tensors of so many axes."""
    tensors = [torch.zeros([1] * part, dtype=torch.int64, device=DEVICE) if part < 5 else part for part in parts]
    assert keyed_random._fits_kernel(tensors, None) is (fits and DEVICE.type == "cuda")
    assert not keyed_random._fits_kernel(tensors, "cpu")


@pytest.mark.gpu
def test_what_is_drawn_on_a_gpu_is_what_is_drawn_on_the_cpu() -> None:
    items = torch.arange(3000)
    for key in [
        (0, items),
        (1, items, 2, 3),
        (items[:, None], items[:5], "a"),
        (items.view(5, 5, 5, 24), -1),
        (items.int(), items, items, items),
    ]:
        on_gpu = [part.to(DEVICE) if isinstance(part, Tensor) else part for part in key]
        assert torch.equal(keyed_random.bits(*on_gpu).cpu(), keyed_random.bits(*key))
        assert torch.equal(
            keyed_random.uniform(*on_gpu, low=-1.0, high=3.0).cpu(), keyed_random.uniform(*key, low=-1.0, high=3.0)
        )
        assert torch.equal(keyed_random.integers(*on_gpu, upper=77).cpu(), keyed_random.integers(*key, upper=77))
        assert torch.equal(keyed_random.bits(*key, device=DEVICE).cpu(), keyed_random.bits(*key))
    order = keyed_random.permutation(1000, (3, torch.tensor(5, device=DEVICE)), "memory blocks", device=DEVICE)
    assert torch.equal(order.cpu(), keyed_random.permutation(1000, (3, 5), "memory blocks"))


@pytest.mark.gpu
def test_a_recorded_draw_follows_the_step() -> None:
    step, items = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.arange(100, device=DEVICE)
    keyed_random.bits(1, step, "a", items)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = keyed_random.bits(1, step, "a", items)
    for number in (3, -(2**40)):
        step.fill_(number)
        graph.replay()
        assert torch.equal(drawn.cpu(), keyed_random.bits(1, number, "a", items.cpu()))
