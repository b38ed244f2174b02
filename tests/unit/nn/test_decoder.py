import pytest
import torch
from torch import Tensor

from massl.config import RecipeError
from massl.nn.decoder import DecoderSettings, PatchDecoder
from massl.nn.positions import sine_cosine_positions

SETTINGS = DecoderSettings(dim=12, depth=2, num_heads=3)
KEPT = torch.tensor([[5, 0, 3], [2, 7, 8]])


def decoder(settings: DecoderSettings = SETTINGS) -> PatchDecoder:
    torch.manual_seed(0)
    made = PatchDecoder(settings, in_dim=8, out_dim=6, grid=(3, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def tokens(num_prefix: int = 1) -> Tensor:
    return torch.randn(2, num_prefix + 3, 8, generator=torch.Generator().manual_seed(1))


def test_every_place_gets_its_token_or_the_mask_token_and_its_position() -> None:
    made, given, seen = decoder(), tokens(), []
    made.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    predictions = made(given, KEPT, (3, 3))
    assert predictions.shape == (2, 9, 6)
    positions = sine_cosine_positions(12, (3, 3), first_axis="columns")[1:]
    embedded = made.embed(given)
    for image in range(2):
        torch.testing.assert_close(seen[0][image, 0], embedded[image, 0])  # the class token has no place
        for place in range(9):
            is_kept = place in KEPT[image]
            token = embedded[image, 1 + KEPT[image].tolist().index(place)] if is_kept else made.mask_token[0, 0]
            torch.testing.assert_close(seen[0][image, 1 + place], token + positions[place])


def test_the_order_in_which_patches_are_kept_does_not_matter() -> None:
    made, given, order = decoder(), tokens(), torch.tensor([2, 0, 1])
    shuffled = torch.cat([given[:, :1], given[:, 1:][:, order]], dim=1)
    torch.testing.assert_close(made(shuffled, KEPT[:, order], (3, 3)), made(given, KEPT, (3, 3)))


def test_register_tokens_pass_through_and_a_network_without_class_token_works() -> None:
    made = decoder()
    for num_prefix in (0, 1, 4):
        assert made(tokens(num_prefix), KEPT, (3, 3)).shape == (2, 9, 6)


def test_other_grids_get_resampled_positions() -> None:
    assert decoder()(tokens(), KEPT, (4, 4)).shape == (2, 16, 6)


def test_activation_checkpointing_changes_neither_result_nor_gradients() -> None:
    results = []
    for enabled in (False, True):
        made = decoder()
        made.activation_checkpointing = enabled
        predictions = made(tokens(), KEPT, (3, 3))
        predictions.square().mean().backward()
        results.append([predictions, *(parameter.grad for parameter in made.parameters())])
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)


def test_positions_are_no_state() -> None:
    assert "positions" not in decoder().state_dict()


@pytest.mark.parametrize("sizes", [{"dim": 10, "num_heads": 2}, {"dim": 12, "num_heads": 5}])
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=r"method\.decoder\.dim 1.*method\.decoder\.num_heads"):
        PatchDecoder(DecoderSettings(**sizes), in_dim=8, out_dim=6, grid=(3, 3))


@pytest.mark.kernel
@pytest.mark.usefixtures("norm_gradients_in_large_steps")
@pytest.mark.parametrize("memory_lean", [False, True])
def test_blocks_and_norm_by_kernels_are_those_of_the_plain_path(memory_lean: bool) -> None:
    """Compiled where there is a GPU, elsewhere as Python (tests/conftest.py)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = decoder(DecoderSettings(dim=32, depth=2, num_heads=2)).to(device)
    made.activation_checkpointing = memory_lean
    given = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    parameters = [given, *made.blocks.parameters(), *made.norm.parameters()]
    fused, plain = (
        made.fused(given, dtype=torch.float32, stream_dtype=torch.float32),
        made.norm(made._through_blocks(given)),
    )
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    weights = torch.randn(fused.shape, generator=torch.Generator().manual_seed(2)).to(device)
    for ours, truth in zip(
        *(torch.autograd.grad((result * weights).sum(), parameters) for result in (fused, plain)), strict=True
    ):
        assert (ours - truth).norm() < 1e-5 * truth.norm() + 1e-6
