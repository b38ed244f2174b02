import pytest
import torch

from massl.ops.pixel_targets import cut_patches, hidden_patch_error, hidden_patches, normalised_patches


def noise(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def test_patches_come_row_by_row_with_their_pixels_row_by_row_and_colours_last() -> None:
    images = noise(2, 3, 4, 6)
    patches = cut_patches(images, 2)
    assert patches.shape == (2, 6, 12)
    for row in range(2):
        for column in range(3):
            cell = images[1, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert patches[1, 3 * row + column].tolist() == cell.permute(1, 2, 0).flatten().tolist()


def test_pixels_beyond_the_last_whole_patch_are_left_out() -> None:
    images = noise(1, 3, 7, 5)
    assert torch.equal(cut_patches(images, 2), cut_patches(images[:, :, :6, :4], 2))


def test_a_normalised_patch_has_mean_zero_and_unbiased_variance_one() -> None:
    patches = normalised_patches(5.0 + 3.0 * noise(2, 4, 48))
    torch.testing.assert_close(patches.mean(dim=-1), torch.zeros(2, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(patches.var(dim=-1, unbiased=True), torch.ones(2, 4), atol=1e-5, rtol=0)


def test_a_patch_of_one_colour_becomes_zeros_and_faint_patches_are_not_blown_up() -> None:
    assert normalised_patches(torch.full((1, 1, 12), 0.7)).abs().max() < 1e-3
    faint = 1e-3 * noise(1, 1, 48)  # its variance is that which is added: half the contrast of others
    assert normalised_patches(faint).std() == pytest.approx(0.5**0.5, rel=0.2)


def test_rounded_views_become_float32_targets() -> None:
    patches = noise(1, 4, 12).bfloat16()
    targets = normalised_patches(patches)
    assert targets.dtype == torch.float32
    assert torch.equal(targets, normalised_patches(patches.float()))


def test_what_is_not_kept_is_hidden() -> None:
    kept = torch.tensor([[2, 0], [4, 3]])
    assert hidden_patches(kept, 5).tolist() == [[0, 1, 0, 1, 1], [1, 1, 1, 0, 0]]


def test_the_error_is_the_mean_over_hidden_patches_alone() -> None:
    targets, kept = noise(2, 4, 6), torch.tensor([[1], [3]])
    predictions = targets.clone()
    predictions[0, 1], predictions[1, 3] = 100.0, -7.0  # visible: nobody asks
    assert hidden_patch_error(predictions, targets, kept) == 0
    predictions[0, 0] += 3.0
    predictions[1, 2, :3] -= 2.0
    expected = (9.0 + 4.0 * 0.5) / 6
    assert hidden_patch_error(predictions, targets, kept).item() == pytest.approx(expected)


def test_visible_patches_get_no_gradient_and_rounded_predictions_a_float32_loss() -> None:
    predictions, kept = noise(1, 4, 6).bfloat16().requires_grad_(), torch.tensor([[1, 2]])
    loss = hidden_patch_error(predictions, torch.zeros(1, 4, 6), kept)
    assert loss.dtype == torch.float32
    loss.backward()  # type: ignore[no-untyped-call]
    assert predictions.grad is not None
    assert predictions.grad.abs().amax(dim=2)[0].gt(0).tolist() == [True, False, False, True]


def test_predicting_the_mean_of_normalised_patches_has_an_error_of_nearly_one() -> None:
    targets = normalised_patches(noise(3, 4, 48))
    loss = hidden_patch_error(torch.zeros_like(targets), targets, torch.tensor([[0], [1], [2]]))
    assert loss.item() == pytest.approx(1 - 1 / 48, abs=1e-5)
