"""Freezes a backbone, or only the running averages of its batch norms."""

from torch.nn.modules.batchnorm import _BatchNorm

from massl.nn.backbone import Backbone


def freeze(backbone: Backbone, frozen: bool) -> None:
    """Freeze or unfreeze. Batch norms still use the statistics of the batch, as after the freezing, but keep none.

    Teachers do not move while they are frozen (`nn.ema`); the optimizer leaves out what has no gradient.
    """
    if backbone.is_frozen == frozen:
        return
    backbone.is_frozen = frozen
    for module in backbone.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = not frozen


def keep_statistics(backbone: Backbone) -> None:
    """From now on batch norms use their running averages in training too, and these stay as they are."""
    backbone.keeps_statistics = True
    backbone.train(backbone.training)
