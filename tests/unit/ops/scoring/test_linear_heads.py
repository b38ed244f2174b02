import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from massl.ops.scoring import linear_heads
from massl.ops.scoring.linear_heads import (
    LinearHeads,
    classify,
    count_correct,
    matrix_products,
    mean_loss_gradients,
    new_heads,
    sgd_step_,
)

NUM_HEADS, NUM_CLASSES, DIM = 4, 5, 7
RATES = torch.tensor([0.01, 0.3, 2.0, 0.3])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batches(num_batches: int, *, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    labels = torch.Generator().manual_seed(1)
    return [
        (drawn(size, DIM, seed=10 + i), torch.randint(NUM_CLASSES, (size,), generator=labels))
        for i in range(num_batches)
    ]


def start() -> LinearHeads:
    return new_heads(0.1 * drawn(NUM_HEADS, NUM_CLASSES, DIM))


def trained_by_pytorch(steps: list[tuple[Tensor, Tensor]], *, head: int) -> nn.Linear:
    """One head alone, by autograd and torch.optim.SGD."""
    linear = nn.Linear(DIM, NUM_CLASSES)
    with torch.no_grad():
        linear.weight.copy_(start().weights[head])
        linear.bias.zero_()
    optimizer = torch.optim.SGD(linear.parameters(), lr=float(RATES[head]), momentum=0.9)
    for rows, labels in steps:
        optimizer.zero_grad()
        cross_entropy(linear(rows), labels).backward()
        optimizer.step()
    return linear


def assert_same(heads: LinearHeads, linear: nn.Linear, *, head: int) -> None:
    torch.testing.assert_close(heads.weights[head], linear.weight.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(heads.biases[head], linear.bias.detach(), atol=1e-5, rtol=1e-5)


def test_all_heads_learn_as_pytorch_trains_each_alone() -> None:
    heads, steps = start(), [*batches(6), *batches(1, size=3)]
    for rows, labels in steps:
        sgd_step_(heads, rows, labels, rates=RATES)
    for head in range(NUM_HEADS):
        assert_same(heads, trained_by_pytorch(steps, head=head), head=head)


def test_heads_that_may_not_see_rows_learn_as_if_those_did_not_exist() -> None:
    heads, steps = start(), batches(6)
    kept = torch.rand(6, 16, NUM_HEADS, generator=torch.Generator().manual_seed(3)) < 0.6
    kept[2, :, 1] = False  # head 1 sees nothing of batch 2, which comes when it has momentum
    for (rows, labels), kept_rows in zip(steps, kept, strict=True):
        sgd_step_(heads, rows, labels, rates=RATES, kept=kept_rows)
    for head in range(NUM_HEADS):
        seen = [
            (rows[kept_rows[:, head]], labels[kept_rows[:, head]])
            for (rows, labels), kept_rows in zip(steps, kept, strict=True)
            if kept_rows[:, head].any()
        ]
        assert len(seen) == (5 if head == 1 else 6)
        assert_same(heads, trained_by_pytorch(seen, head=head), head=head)


def test_gradients_change_nothing() -> None:
    heads = start()
    before = [tensor.clone() for tensor in vars(heads).values()]
    mean_loss_gradients(heads, *batches(1)[0])
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(vars(heads).values(), before, strict=True))


def test_correct_rows_are_counted_head_by_head_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = start()
    rows, labels = drawn(50, DIM, seed=5), torch.arange(50) % NUM_CLASSES
    biases = drawn(NUM_HEADS, NUM_CLASSES, seed=6)
    expected = [
        sum(
            int(torch.argmax(heads.weights[head] @ row + biases[head])) == label
            for row, label in zip(rows, labels.tolist(), strict=True)
        )
        for head in range(NUM_HEADS)
    ]
    assert 0 < min(expected) < max(expected)
    for max_logits in (10**8, 7 * NUM_HEADS * NUM_CLASSES, 1):
        monkeypatch.setattr(linear_heads, "_MAX_LOGITS", max_logits)
        assert count_correct(heads.weights, biases, rows, labels).tolist() == expected
        for head in range(NUM_HEADS):
            classes = classify(heads.weights[head], biases[head], rows)
            assert int((classes == labels).sum()) == expected[head]


def test_a_head_that_has_overflowed_classifies_nothing() -> None:
    heads = start()
    heads.weights[1] = torch.nan
    heads.weights[2] = torch.inf
    correct = count_correct(
        heads.weights, heads.biases, drawn(20, DIM, seed=5), torch.zeros(20, dtype=torch.int64)
    ).tolist()
    assert correct[1:3] == [0, 0]
    assert correct[0] > 0


@pytest.mark.parametrize("before", ["none", "tf32"])
def test_the_precision_of_products_is_set_inside_only(before: str) -> None:
    products = torch.backends.cuda.matmul
    original = products.fp32_precision
    products.fp32_precision = before
    try:
        for allow_tf32, inside in ((True, "tf32"), (False, "ieee")):
            with contextlib.suppress(ArithmeticError), matrix_products(allow_tf32=allow_tf32):
                assert products.fp32_precision == inside
                raise ArithmeticError
            assert products.fp32_precision == before
    finally:
        products.fp32_precision = original
    assert torch.get_float32_matmul_precision() == "highest"  # the older interface to the same switch still answers


@pytest.mark.gpu
def test_steps_on_a_gpu_are_those_on_the_cpu() -> None:
    here = start()
    there = LinearHeads(**{name: tensor.clone().cuda() for name, tensor in vars(here).items()})
    for rows, labels in batches(4):
        kept = (labels[:, None] != 2) | (torch.arange(NUM_HEADS) < 2)
        with matrix_products(allow_tf32=False):
            sgd_step_(here, rows, labels, rates=RATES, kept=kept)
            sgd_step_(there, rows.cuda(), labels.cuda(), rates=RATES.cuda(), kept=kept.cuda())
    for name, tensor in vars(here).items():
        torch.testing.assert_close(getattr(there, name).cpu(), tensor, atol=1e-5, rtol=1e-5)
