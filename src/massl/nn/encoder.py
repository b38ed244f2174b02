"""Backbone and head together: from views to embeddings."""

from torch import Tensor, nn

from massl.nn.backbone import Backbone


class Encoder(nn.Module):
    """A backbone and the head that follows its class token."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    # groups of [V_i, B, 3, H_i, W_i], [sum V_i, B] -> [sum V_i, B, D]
    def forward(self, view_groups: list[Tensor], sample_keys: Tensor | None = None) -> Tensor:
        """The backbone for each view size, then the head once for all views."""
        num_views, num_images = sum(group.shape[0] for group in view_groups), view_groups[0].shape[1]
        keys = None if sample_keys is None else sample_keys.flatten()
        embeddings: Tensor = self.head(self.backbone.pooled([group.flatten(0, 1) for group in view_groups], keys))
        return embeddings.reshape(num_views, num_images, -1)


class ViewwiseEncoder(nn.Module):
    """A backbone and a head that computes its statistics for each view separately."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    # [V, B, 3, H, W], [V, B] -> [V, B, D]
    def forward(self, views: Tensor, sample_keys: Tensor | None = None) -> Tensor:
        features = self.backbone.pooled([views.flatten(0, 1)], None if sample_keys is None else sample_keys.flatten())
        return self.head(features.reshape(*views.shape[:2], -1))  # type: ignore[no-any-return]
