"""Class and patch tokens of masked views, and tokens of the visible patches, as masked-image methods read them."""

import pytest
import torch
from torch import Tensor, nn

from massl.config import RecipeError
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.positions import sine_cosine_positions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Options = dict[str, int | float | bool | str]
TINY: Options = {"embed_dim": 16, "depth": 3, "num_heads": 1}
NETWORKS: dict[str, Options] = {
    "class token": {},
    "register without a position": {"reg_tokens": 1, "no_embed_class": True},
    "registers with positions": {"reg_tokens": 2},
    "norms of queries and keys": {"qk_norm": True},
    "mean of patches": {"class_token": False, "global_pool": "avg"},
}
KEYS = torch.arange(5)


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a float32 convolution, the plain patch embedding, is otherwise one of 10-bit operands."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def backbone_of(drop_path_rate: float = 0.5, **options: int | float | bool | str) -> Backbone:
    """A small transformer whose biases and norms are not what they start as."""
    settings = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=16, patch_size=4, timm_options={**TINY, **options}
    )
    backbone = build_backbone(settings, seed=0, drop_path_rate=drop_path_rate)
    with torch.no_grad():
        for seed, parameter in enumerate(backbone.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return backbone.to(DEVICE).train()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def view_groups() -> list[Tensor]:
    """Five views of two sizes; all have pixels that fill no patch. Those of the first group have 4 x 5 patches, not
    their own 4 x 4.
    """
    return [noise(2, 3, 17, 22), noise(3, 3, 8, 10, seed=1)]


def masks() -> Tensor:  # [2, 20]
    """Five patches of the first view and eight of the second, the first and the last patch among them."""
    return (torch.arange(40).view(2, 20) % torch.tensor([[4], [3]]) == torch.tensor([[0], [0]])).to(DEVICE)


def mask_token() -> Tensor:
    return noise(16, seed=9).requires_grad_()


def gradients_of(backbone: Backbone, outputs: tuple[Tensor, ...], *further: Tensor) -> dict[str, Tensor]:
    """Of the outputs, weighted at random, by all parameters and by `further`."""
    total = sum(
        (output.float() * noise(*output.shape, seed=20 + number)).sum() for number, output in enumerate(outputs)
    )
    names, parameters = zip(*backbone.named_parameters(), strict=True)
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, [*parameters, *further], allow_unused=True, materialize_grads=True)
    return dict(zip([*names, *(f"further {number}" for number in range(len(further)))], gradients, strict=True))


def assert_close(ours: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        assert (ours[name].float() - value).norm() < tolerance * value.norm() + 1e-6, name


def masked_by_hook(backbone: Backbone, images: Tensor, token: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition: the convolution's output is overwritten, everything after it is an ordinary forward pass."""
    grid = (images.shape[2] // 4, images.shape[3] // 4)

    def overwrite(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return torch.where(masks().view(2, 1, *grid), token[:, None, None], output)

    handle = backbone.model.patch_embed.proj.register_forward_hook(overwrite)
    tokens = backbone(images, keys)
    handle.remove()
    assert tokens.patches is not None
    return tokens.pooled, tokens.patches


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
def test_masked_patches_are_replaced_between_embedding_and_positions_in_the_first_group_only(
    network: str, with_keys: bool
) -> None:
    backbone, token, groups = backbone_of(**NETWORKS[network]), mask_token(), view_groups()
    keys = KEYS.to(DEVICE) if with_keys else None
    pooled, patches = masked_by_hook(backbone, groups[0], token, None if keys is None else keys[:2])
    expected = (torch.cat([pooled, backbone(groups[1], None if keys is None else keys[2:]).pooled]), patches)
    ours = backbone.class_and_patches(groups, keys, masks=masks(), mask_token=token)
    assert ours[0].shape == (5, 16)
    assert ours[1].shape == (2, 20, 16)
    for value, truth in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5)
    assert_close(gradients_of(backbone, ours, token), gradients_of(backbone, expected, token), 1e-5)
    if with_keys:
        without_keys = backbone.class_and_patches(groups, masks=masks(), mask_token=token)
        assert not any(torch.allclose(value, other, atol=1e-3) for value, other in zip(ours, without_keys, strict=True))


@pytest.mark.parametrize("network", NETWORKS)
def test_without_masks_class_and_patch_tokens_are_those_of_the_forward_pass(network: str) -> None:
    backbone, groups = backbone_of(**NETWORKS[network]), view_groups()
    pooled, patches = backbone.class_and_patches(groups)
    whole = backbone(groups[0])
    torch.testing.assert_close(pooled, torch.cat([whole.pooled, backbone(groups[1]).pooled]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(patches, whole.patches, rtol=1e-5, atol=1e-5)


def test_what_lies_under_a_mask_cannot_be_seen() -> None:
    backbone, token, (images, _) = backbone_of(), mask_token(), view_groups()
    under_mask = masks().view(2, 1, 4, 5).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    other = images.clone()
    other[:, :, :16, :20] += 5.0 * under_mask
    shown, hidden = (
        [backbone.class_and_patches([views], **given) for views in (images, other)] for given in ({}, masked(token))
    )
    assert torch.equal(hidden[0][0], hidden[1][0])
    assert torch.equal(hidden[0][1], hidden[1][1])
    assert not torch.allclose(shown[0][0], shown[1][0], atol=1e-2)


def masked(token: Tensor) -> dict[str, Tensor]:
    return {"masks": masks(), "mask_token": token}


def test_activation_checkpointing_changes_no_bit_of_tokens_and_gradients() -> None:
    results = []
    for enabled in (False, True):
        backbone, token = backbone_of(), mask_token()
        backbone.set_activation_checkpointing(enabled)
        outputs = backbone.class_and_patches(view_groups(), KEYS.to(DEVICE), **masked(token))
        seen = backbone.visible(view_groups()[0], kept(), KEYS[:2].to(DEVICE))
        results.append([*outputs, seen, *gradients_of(backbone, (*outputs, seen), token).values()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))


def kept() -> Tensor:  # [2, 4]
    """Of 20 patches, in no order; the first and the last among them."""
    return torch.tensor([[19, 3, 0, 7], [5, 6, 18, 11]], device=DEVICE)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_encoder_of_visible_patches_is_the_transformer_over_their_tokens_alone(network: str) -> None:
    """Against timm's own embedding, at the size of the model."""
    backbone = backbone_of(drop_path_rate=0.0, **NETWORKS[network])
    model, images = backbone.model, noise(2, 3, 16, 16)
    numbers = kept() % 16
    tokens = model._pos_embed(model.patch_embed(images))
    num_prefix = model.num_prefix_tokens
    chosen = [
        torch.cat([row[:num_prefix], row[num_prefix:][of_row]]) for row, of_row in zip(tokens, numbers, strict=True)
    ]
    expected = model.norm(model.blocks(torch.stack(chosen)))
    ours = backbone.visible(images, numbers)
    assert ours.shape == (2, num_prefix + 4, 16)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert_close(gradients_of(backbone, (ours,)), gradients_of(backbone, (expected,)), 1e-5)


def test_with_all_patches_visible_the_tokens_are_those_of_the_forward_pass_stochastic_depth_too() -> None:
    backbone, (images, _), keys = backbone_of(), view_groups(), KEYS[:2].to(DEVICE)
    everything = torch.arange(20, device=DEVICE).expand(2, -1)
    seen, whole = backbone.visible(images, everything, keys), backbone(images, keys)
    torch.testing.assert_close(seen[:, 0], whole.pooled, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[:, 1:], whole.patches, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(seen, backbone.visible(images, everything), atol=1e-3)


def test_other_networks_are_refused_with_the_advice_to_choose_a_transformer() -> None:
    backbone = build_backbone(BackboneSettings(name="resnet18"), seed=0)
    images = torch.zeros(1, 3, 32, 32)
    for ask in (
        lambda: backbone.class_and_patches([images]),
        lambda: backbone.visible(images, torch.zeros(1, 1, dtype=torch.int64)),
        lambda: backbone.patch_size,
        lambda: backbone.grid(32),
        lambda: backbone.fix_positions(first_axis="rows"),
    ):
        with pytest.raises(RecipeError, match=r"resnet18.*vit_small_patch16_224"):
            ask()


def test_the_grid_counts_whole_patches() -> None:
    backbone = backbone_of()
    assert backbone.patch_size == 4
    assert (backbone.grid(16), backbone.grid(23), backbone.grid(3)) == ((4, 4), (5, 5), (0, 0))


@pytest.mark.parametrize(
    ("network", "num_empty"), [("class token", 1), ("register without a position", 0), ("registers with positions", 3)]
)
def test_fixed_positions_are_sines_and_cosines_in_the_order_asked_for_and_not_trained(
    network: str, num_empty: int
) -> None:
    backbone = backbone_of(**NETWORKS[network])
    positions = backbone.model.pos_embed
    for first_axis in ("rows", "columns"):
        backbone.fix_positions(first_axis=first_axis)
        assert backbone.model.pos_embed is positions
        assert not positions.requires_grad
        assert (positions[0, :num_empty] == 0).all()
        assert torch.equal(positions[0, num_empty:].cpu(), sine_cosine_positions(16, (4, 4), first_axis=first_axis)[1:])
    tokens = backbone.class_and_patches(view_groups(), **masked(mask_token()))
    sum(token.sum() for token in tokens).backward()
    assert positions.grad is None
    assert backbone.model.patch_embed.proj.bias.grad is not None


def test_positions_that_do_not_exist_or_do_not_fit_cannot_be_fixed() -> None:
    without = backbone_of(pos_embed="none")
    with pytest.raises(RecipeError, match="position"):
        without.fix_positions(first_axis="rows")
    with pytest.raises(RecipeError, match="18"):
        backbone_of(embed_dim=18).fix_positions(first_axis="rows")


# ---- fused kernels; on a CPU in Triton's interpreter -----------------------------------------------------------------


def take_kernels(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """As on a GPU under autocast of this type."""
    monkeypatch.setattr(Backbone, "_dtype_of_kernels", lambda _backbone, _images: dtype)


@pytest.mark.kernel
@pytest.mark.usefixtures("norm_gradients_in_large_steps")
@pytest.mark.parametrize(
    ("network", "with_keys", "with_masks", "num_groups", "memory_lean"),
    [
        ("register without a position", True, True, 2, True),
        ("class token", True, True, 2, False),
        ("registers with positions", False, True, 1, False),
        ("class token", True, False, 2, False),
    ],
)
def test_kernels_give_the_class_and_patch_tokens_and_gradients_of_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, network: str, with_keys: bool, with_masks: bool, num_groups: int, memory_lean: bool
) -> None:
    backbone, token, groups = backbone_of(**NETWORKS[network]), mask_token(), view_groups()[:num_groups]
    assert backbone.use_fused_kernels() is None
    keys = KEYS[: sum(map(len, groups))].to(DEVICE) if with_keys else None
    given, further = (masked(token), [token]) if with_masks else ({}, [])
    plain = backbone.class_and_patches(groups, keys, **given)
    truth = gradients_of(backbone, plain, *further)
    backbone.set_activation_checkpointing(memory_lean)
    take_kernels(monkeypatch, torch.float32)
    ours = backbone.class_and_patches(groups, keys, **given)
    for value, expected in zip(ours, plain, strict=True):
        assert value.shape == expected.shape
        assert not torch.equal(value, expected)  # the kernels were taken
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    assert_close(gradients_of(backbone, ours, *further), truth, 1e-5)


@pytest.mark.kernel
@pytest.mark.usefixtures("norm_gradients_in_large_steps")
@pytest.mark.parametrize(
    ("network", "fixed", "memory_lean"),
    [
        ("register without a position", True, True),
        ("class token", False, False),
        ("registers with positions", False, False),
    ],
)
def test_kernels_give_the_visible_tokens_and_gradients_of_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, network: str, fixed: bool, memory_lean: bool
) -> None:
    backbone, (images, _), keys = backbone_of(**NETWORKS[network]), view_groups(), KEYS[:2].to(DEVICE)
    trained = backbone.model.pos_embed
    plain = backbone.visible(images, kept(), keys)
    truth = gradients_of(backbone, (plain,))
    backbone.set_activation_checkpointing(memory_lean)
    take_kernels(monkeypatch, torch.float32)
    ours = backbone.visible(images, kept(), keys)
    assert not torch.equal(ours, plain)  # the kernels were taken
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    assert_close(gradients_of(backbone, (ours,)), truth, 1e-5)
    if fixed:
        trained.requires_grad_(False)
        backbone.visible(images, kept(), keys).sum().backward()
        assert trained.grad is None


@pytest.mark.kernel
@pytest.mark.usefixtures("norm_gradients_in_large_steps")
def test_kernels_in_16_bits_with_a_float32_stream_are_near_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16: the interpreter multiplies bfloat16 numbers as if they were integers."""
    backbone, token, groups, keys = backbone_of(), mask_token(), view_groups(), KEYS.to(DEVICE)
    plain = (*backbone.class_and_patches(groups, keys, **masked(token)), backbone.visible(groups[0], kept(), keys[:2]))
    truth = gradients_of(backbone, plain, token)
    assert backbone.use_fused_kernels(float32_stream=True) is None
    take_kernels(monkeypatch, torch.float16)
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        ours = (
            *backbone.class_and_patches(groups, keys, **masked(token)),
            backbone.visible(groups[0], kept(), keys[:2]),
        )
    assert [value.dtype for value in ours] == [torch.float32, torch.float16, torch.float16]
    for value, expected in zip(ours, plain, strict=True):
        assert (value - expected).norm() < 5e-3 * expected.norm()
    assert_close(gradients_of(backbone, ours, token), truth, 1e-2)


@pytest.mark.kernel
def test_without_a_gradient_the_kernels_give_the_same_and_remember_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the teacher is computed."""
    backbone, groups = backbone_of().requires_grad_(False), view_groups()
    plain = (*backbone.class_and_patches(groups), backbone.visible(groups[0], kept()))
    take_kernels(monkeypatch, torch.float32)
    ours = (*backbone.class_and_patches(groups), backbone.visible(groups[0], kept()))
    for value, expected in zip(ours, plain, strict=True):
        assert not value.requires_grad
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_lean", [False, True])
def test_on_a_gpu_the_kernels_are_taken_in_16_bits_and_are_as_near_to_float32_as_autocast(memory_lean: bool) -> None:
    backbone, token, groups, keys = backbone_of(), mask_token(), view_groups(), KEYS.to(DEVICE)
    backbone.set_activation_checkpointing(memory_lean)

    def results() -> list[Tensor]:
        outputs = (
            *backbone.class_and_patches(groups, keys, **masked(token)),
            backbone.visible(groups[0], kept(), keys[:2]),
        )
        flat = torch.cat([value.flatten() for value in gradients_of(backbone, outputs, token).values()])
        return [*(output.detach().float() for output in outputs), flat]

    def in_16_bits() -> list[Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return results()

    exact, by_autocast = results(), in_16_bits()
    assert backbone.use_fused_kernels() is None
    by_kernels = in_16_bits()
    for value, plain, truth in zip(by_kernels, by_autocast, exact, strict=True):
        assert not torch.equal(value, plain)
        assert (value - truth).norm() < 0.03 * truth.norm()
    # float32: the plain path as before
    assert all(torch.equal(value, truth) for value, truth in zip(results(), exact, strict=True))
