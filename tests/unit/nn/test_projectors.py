import torch
from torch import Tensor, nn

from massl.nn.heads import BatchNorm, PredictorSettings, ProjectorSettings, build_predictor, build_projector


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def test_the_projector_of_mocov3_ends_with_batch_norm_without_weights_and_has_no_biases_in_its_layers() -> None:
    projector = build_projector(6, ProjectorSettings(hidden_dim=10, out_dim=4), last_norm="plain")
    kinds = [nn.Linear, BatchNorm, nn.ReLU, nn.Linear, BatchNorm, nn.ReLU, nn.Linear, BatchNorm]
    assert [type(layer) for layer in projector.layers] == kinds
    assert shapes(projector.layers) == {
        "0.weight": (10, 6),
        "1.weight": (10,),
        "1.bias": (10,),
        "3.weight": (10, 10),
        "4.weight": (10,),
        "4.bias": (10,),
        "6.weight": (4, 10),
    }
    embeddings = projector(rows(32, 6))
    torch.testing.assert_close(embeddings.mean(dim=0), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(embeddings.var(dim=0, correction=0), torch.ones(4), rtol=1e-3, atol=0)


def test_the_heads_of_nnclr_end_with_a_scale_and_with_a_bias() -> None:
    projector = build_projector(6, ProjectorSettings(hidden_dim=10, out_dim=4), last_norm="scaled")
    predictor = build_predictor(4, PredictorSettings(hidden_dim=12), last_norm="none")
    assert shapes(projector.layers)["7.weight"] == (4,)
    assert "7.bias" not in shapes(projector.layers)  # the predictor's batch norm would take it away again
    assert shapes(predictor.layers) == {
        "0.weight": (12, 4),
        "1.weight": (12,),
        "1.bias": (12,),
        "3.weight": (4, 12),
        "3.bias": (4,),
    }


def test_the_number_of_layers_is_that_of_the_settings() -> None:
    for num_layers in (1, 2, 4):
        projector = build_projector(
            6, ProjectorSettings(num_layers=num_layers, hidden_dim=10, out_dim=4), last_norm="none"
        )
        predictor = build_predictor(4, PredictorSettings(num_layers=num_layers, hidden_dim=10), last_norm="plain")
        for mlp, in_dim in ((projector, 6), (predictor, 4)):
            assert sum(isinstance(layer, nn.Linear) for layer in mlp.layers) == num_layers
            assert mlp(rows(5, in_dim)).shape == (5, 4)


def test_a_constant_added_to_all_features_changes_no_embedding() -> None:
    projector = build_projector(6, ProjectorSettings(hidden_dim=10, out_dim=4), last_norm="plain")
    torch.testing.assert_close(projector(rows(8, 6) + 2.0), projector(rows(8, 6)), rtol=1e-4, atol=1e-4)


def test_embeddings_are_float32_under_bf16_autocast_with_and_without_a_last_norm() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for last_norm in ("plain", "none"):
            projector = build_projector(6, ProjectorSettings(hidden_dim=10, out_dim=4), last_norm=last_norm)
            assert projector(rows(8, 6)).dtype == torch.float32
