"""timm's vision transformer for images of any size, with the position embeddings of training."""

from collections.abc import Mapping
from typing import Any

from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from massl.nn.positions import model_positions
from massl.nn.timm_models import create_timm_model
from massl.nn.transformer.plain import embed_patches
from massl.nn.transformer.tokens import is_transformer


class AnySizeTransformer(VisionTransformer):
    """timm's model, except that position embeddings are resampled as in training; timm's rule gives other features.

    Only for models built with `dynamic_img_size=True`.
    """

    def _pos_embed(self, x: Tensor) -> Tensor:  # [B, height, width, D] -> [B, prefix + height * width, D]
        tokens: Tensor = self.pos_drop(embed_patches(self, x.flatten(1, 2), model_positions(self, *x.shape[1:3])))
        return tokens


def for_any_size(model: nn.Module) -> nn.Module:
    """The same model, which resamples position embeddings as in training; other networks stay as they are."""
    if isinstance(model, Eva) and is_transformer(model):  # its rotations follow from the size
        model.patch_embed.register_forward_pre_hook(_whole_patches)
    elif type(model) is VisionTransformer and model.dynamic_img_size:
        model.__class__ = AnySizeTransformer
        model.patch_embed.register_forward_pre_hook(_whole_patches)
    return model


def _whole_patches(patch_embed: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:  # [B, 3, H, W]
    """Pixels beyond the last whole patch are ignored, as in training; timm refuses such images."""
    (images,) = inputs
    height, width = patch_embed.patch_size  # type: ignore[misc]
    return (images[..., : images.shape[2] // height * height, : images.shape[3] // width * width],)


def for_one_size(model: VisionTransformer, timm_arguments: Mapping[str, Any], image_size: int) -> nn.Module:
    """A plain timm model for square images of this size; the position embeddings are resampled once, as in training."""
    resized = create_timm_model({**timm_arguments, "img_size": image_size})
    side = image_size // int(model.patch_embed.patch_size[0])
    positions = model_positions(model, side, side)
    state = model.state_dict()
    resized.load_state_dict(state if positions is None else {**state, "pos_embed": positions.detach()})
    return resized
