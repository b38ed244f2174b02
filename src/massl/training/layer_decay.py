"""Layer-wise learning rates of backbones: the lower a layer, the less it changes (BEiT, MAE)."""

from typing import Any

from timm.models import group_parameters

from massl.methods.base import Method
from massl.nn.backbone import Backbone

_DEPTH = 12  # blocks of a ViT-S or ViT-B, for which the usual values were found


def layer_scales(method: Method, decay: float) -> dict[str, float]:
    """Factors on the learning rate by parameter name: decay for the last block, decay^2 for the one below, and so on.

    Patch embedding, positions and class token are the lowest layer, the head has no factor. Networks of more than 12
    blocks spread the factor of 12 over all of theirs: ConvNeXt and ViT-L would hardly learn below otherwise.
    """
    names = {id(parameter): name for name, parameter in method.named_parameters()}
    scales = {}
    for backbone in method.backbones():
        layers = layers_of(backbone)
        top = max(layers.values(), default=0)
        step = min(1.0, _DEPTH / max(top, 1))
        for name, parameter in backbone.model.named_parameters():
            scales[names[id(parameter)]] = decay ** (step * (top + 1 - layers[name]))
    return scales


def layers_of(backbone: Backbone) -> dict[str, int]:
    """The layer of each parameter by timm's grouping, from 0 upwards; norms after the last block count to it."""
    model: Any = backbone.model
    return {name: int(layer) for name, layer in group_parameters(model, model.group_matcher(), reverse=True).items()}
