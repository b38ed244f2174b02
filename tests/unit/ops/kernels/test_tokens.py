"""The kernels against torch's own operations: all shapes on a GPU, one on a CPU, in Triton's interpreter."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from massl.ops.kernels.reduce import sum_over_rows
from massl.ops.kernels.tokens import cut_into_patches, pack_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.kernel


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("patch", "height", "width"),
    [((5, 3), 19, 10), ((4, 4), 8, 8), ((4, 8), 19, 25), ((2, 16), 4, 150), ((7, 7), 7, 7)],
    ids=["no power of two, leftover pixels", "square", "leftover pixels", "wider than a tile", "one patch"],
)
def test_patches_times_weights_are_a_convolution(patch: tuple[int, int], height: int, width: int) -> None:
    views, weight = noise(2, 3, height, width, seed=0), noise(5, 3, *patch, seed=1)
    patches = cut_into_patches(views, patch, torch.float32)
    expected = conv2d(views.double(), weight.double(), stride=patch).flatten(2).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(patches.double() @ weight.double().flatten(1).t(), expected)


def test_patches_hold_the_very_pixels_row_by_row() -> None:
    views = torch.arange(2 * 3 * 4 * 6.0, device=DEVICE).view(2, 3, 4, 6)
    patches = cut_into_patches(views, (2, 3), torch.float32)
    expected = views.view(2, 3, 2, 2, 2, 3).permute(0, 2, 4, 1, 3, 5).reshape(8, 18)
    assert torch.equal(patches, expected)


def test_patches_come_in_the_type_that_was_asked_for_from_views_of_any_layout() -> None:
    views = noise(2, 3, 8, 8, seed=0)
    patches = cut_into_patches(views.contiguous(memory_format=torch.channels_last), (4, 4), torch.bfloat16)
    assert patches.dtype == torch.bfloat16
    torch.testing.assert_close(patches.float(), cut_into_patches(views, (4, 4), torch.float32), rtol=2**-7, atol=0)
    from_halves = cut_into_patches(views.bfloat16(), (4, 4), torch.bfloat16)
    assert torch.equal(from_halves, cut_into_patches(views.bfloat16().float(), (4, 4), torch.float32).bfloat16())


@pytest.mark.parametrize("num_prefix", [2, 1])
@pytest.mark.parametrize("dim", [6, 16])
def test_packed_tokens_are_table_plus_patches_and_so_are_their_gradients(num_prefix: int, dim: int) -> None:
    """33 sequences: one more than a program of the backward kernel sums."""
    counts, num_patches = (3, 33), (4, 1)
    patches = [
        noise(count * num, dim, seed=num).requires_grad_() for count, num in zip(counts, num_patches, strict=True)
    ]
    tables = [noise(num_prefix + num, dim, seed=10 + num).requires_grad_() for num in num_patches]
    parts = []
    for part, table, count in zip(patches, tables, counts, strict=True):
        prefix = torch.zeros(count, num_prefix, dim, device=DEVICE)
        parts.append((torch.cat([prefix, part.view(count, -1, dim)], dim=1) + table).flatten(0, 1))
    expected, ours = torch.cat(parts), pack_tokens(patches, tables, num_prefix, torch.float32)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    grad = noise(*expected.shape, seed=20)
    inputs = [*patches, *tables]
    for gradient, truth in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked_share", [0.4, 1.0])
@pytest.mark.parametrize("num_prefix", [2, 1])
def test_masked_patches_of_the_first_group_are_replaced_and_pass_their_gradient_to_the_stand_in(
    num_prefix: int, masked_share: float
) -> None:
    counts, num_patches, dim = (33, 3), (5, 2), 6
    patches = [
        noise(count * num, dim, seed=num).requires_grad_() for count, num in zip(counts, num_patches, strict=True)
    ]
    tables = [noise(num_prefix + num, dim, seed=10 + num).requires_grad_() for num in num_patches]
    stand_in = noise(dim, seed=3).requires_grad_()
    masks = torch.rand(33, 5, generator=torch.Generator().manual_seed(4)).to(DEVICE) < masked_share
    replaced = [torch.where(masks.flatten()[:, None], stand_in, patches[0]), patches[1]]
    ours = pack_tokens(patches, tables, num_prefix, torch.float32, masks=masks, stand_in=stand_in)
    expected = pack_tokens(replaced, tables, num_prefix, torch.float32)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    grad = noise(*expected.shape, seed=20)
    inputs = [stand_in, *patches, *tables]
    for gradient, truth in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(257, 33), (1, 1), (1, 17), (7, 16), (256, 3), (600, 15)])
def test_rows_are_summed_whatever_their_number(num_rows: int, num_columns: int) -> None:
    rows = noise(num_rows, num_columns, seed=0)
    torch.testing.assert_close(sum_over_rows(rows), rows.double().sum(dim=0).float(), rtol=1e-5, atol=1e-5)
