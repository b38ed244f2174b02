"""16-bit inference against the plain modules; on a CPU the kernels run in Triton's interpreter."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.token_readout import last_layers
from massl.nn.transformer.inference import class_token, token_layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.kernel
# Triton's interpreter multiplies bfloat16 unreliably
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture
def backbone() -> Backbone:
    options: dict[str, int | float | bool | str] = {"embed_dim": 32, "depth": 3, "num_heads": 2, "reg_tokens": 1}
    options["init_values"] = 0.5  # layer scale
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=16, patch_size=4, timm_options=options)
    built = build_backbone(settings, seed=0)
    with torch.no_grad():
        for seed, parameter in enumerate(built.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return built.to(DEVICE).eval()


def images(height: int, width: int) -> Tensor:
    return torch.randn(3, 3, height, width, generator=torch.Generator().manual_seed(7)).to(DEVICE)


def assert_close(ours: Tensor, truth: Tensor) -> None:
    assert ours.shape == truth.shape
    assert float(cosine_similarity(ours.float().flatten(0, -2), truth.flatten(0, -2), dim=-1).min()) > 0.999
    assert float((ours.float() - truth).abs().max()) < 0.1


@torch.inference_mode()
@pytest.mark.parametrize("size", [(20, 10), (16, 16)], ids=["another size, pixels that fill no patch", "own size"])
def test_class_tokens_are_those_of_the_plain_modules(backbone: Backbone, size: tuple[int, int]) -> None:
    ours = class_token(backbone.model, images(*size), dtype=DTYPE)  # type: ignore[arg-type]
    assert ours.dtype == torch.float32
    assert_close(ours, backbone(images(*size)).pooled)


@torch.inference_mode()
def test_layers_are_those_of_the_plain_modules(backbone: Backbone) -> None:
    ours = token_layers(backbone.model, images(16, 16), num_layers=2, dtype=DTYPE)  # type: ignore[arg-type]
    truth = last_layers(backbone, images(16, 16), num_layers=2)
    for our_layer, layer in zip(ours, truth, strict=True):
        assert layer.patches is not None
        assert_close(our_layer[:, 0], layer.pooled)
        assert_close(our_layer[:, 2:], layer.patches)
