import torch

from massl.nn.backbone import BackboneSettings, build_backbone
from massl.nn.encoder import ViewwiseEncoder
from massl.nn.heads import ProjectorSettings, build_projector


def test_the_encoder_gives_each_view_the_embeddings_it_has_alone() -> None:
    options: dict[str, int | float | bool | str] = {"embed_dim": 8, "depth": 1, "num_heads": 2}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=8, patch_size=4, timm_options=options)
    backbone = build_backbone(settings, seed=0)
    encoder = ViewwiseEncoder(
        backbone, build_projector(8, ProjectorSettings(hidden_dim=10, out_dim=4), last_norm="plain")
    )
    views = torch.randn(2, 5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    views = views * torch.tensor([1.0, 3.0])[:, None, None, None, None]
    embeddings = encoder(views)
    assert embeddings.shape == (2, 5, 4)
    for view, expected in zip(views, embeddings, strict=True):
        torch.testing.assert_close(encoder.head(backbone(view).pooled), expected, rtol=1e-4, atol=1e-4)
