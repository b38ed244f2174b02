"""Networks of other projects: the features of timm's own model, filled by timm's own converter, at two sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from timm.models import convnext as timm_convnext
from timm.models import eva as timm_eva
from timm.models import vision_transformer as timm_vit
from torch import Tensor, nn
from torch.nn.functional import interpolate

from massl.commands.import_weights import import_weights
from massl.commands.start import backbone_settings
from massl.config import MasslError
from massl.nn.backbone import build_backbone
from massl.nn.timm_models import create_timm_model
from massl.weights.convnet_keys import _CONVNEXTS, _ONLY_IN, _RESNETS
from massl.weights.facts import WeightsError
from massl.weights.key_maps import backbone_of
from massl.weights.models import LoadedModel, open_foreign, open_model
from tests.unit.weights.foreign_states import (
    State,
    convnext,
    dinov2,
    dinov3,
    layer,
    resnet,
    under,
    without_classifier,
)

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 2, "img_size": 56}
GIANT = {**SMALL, "mlp_ratio": 112 / 24 + 1e-9}


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def timm_model(name: str, state: State, **options: Any) -> nn.Module:
    """timm's own model with the weights that timm's own converter makes of an official file."""
    dynamic = {"dynamic_img_size": True} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=0, **dynamic, **options)
    kind = timm_eva if "dinov3" in name else timm_convnext if "convnext" in name else timm_vit
    converted = kind.checkpoint_filter_fn(dict(state), model)
    left_out = ("head.fc.", "norms.")  # older versions of timm leave DINOv3's second norm of a ConvNeXt in
    model.load_state_dict({key: value for key, value in converted.items() if not key.startswith(left_out)})
    return model.eval()


DINOV3 = {"embed_dim": 32, "depth": 2, "num_heads": 2, "global_pool": "token"}
NETWORKS: dict[str, tuple[Callable[[], State], Callable[[State], nn.Module], str]] = {
    "DINOv2": (
        dinov2,
        lambda state: timm_model("vit_small_patch14_dinov2", state, **SMALL),
        "ViT of width 24, patch 14, 2 blocks, 2 heads, 56 px",
    ),
    "DINOv2 with registers": (
        lambda: dinov2(num_registers=4),
        lambda state: timm_model("vit_small_patch14_reg4_dinov2", state, **SMALL),
        "2 heads, 4 registers, 56 px",
    ),
    "DINOv2 with SwiGLU": (
        lambda: dinov2(swiglu=True),
        lambda state: timm_model("vit_giant_patch14_dinov2", state, **GIANT),
        "2 heads, SwiGLU, 56 px",
    ),
    "DINOv2 with registers and SwiGLU": (
        lambda: dinov2(swiglu=True, num_registers=4),
        lambda state: timm_model("vit_giant_patch14_reg4_dinov2", state, **GIANT),
        "4 registers, SwiGLU, 56 px",
    ),
    "DINOv3": (
        dinov3,
        lambda state: timm_model("vit_small_patch16_dinov3_qkvb", state, **DINOV3),
        "DINOv3 ViT of width 32, patch 16, 2 blocks, 2 heads, 4 registers, rotary positions",
    ),
    "DINOv3 without bias": (
        lambda: dinov3(bias=False),
        lambda state: timm_model("vit_small_patch16_dinov3", state, **DINOV3),
        "DINOv3 ViT of width 32",
    ),
    "DINOv3 with SwiGLU": (
        lambda: dinov3(swiglu=True),
        lambda state: timm_model("vit_small_plus_patch16_dinov3_qkvb", state, mlp_ratio=56 / 32, **DINOV3),
        "4 registers, SwiGLU, rotary positions",
    ),
    "ConvNeXt": (
        convnext,
        lambda state: timm_model("convnext_atto", state),
        "ConvNeXt-Atto, (2, 2, 6, 2) blocks, 224 px",
    ),
    "ConvNeXt of DINOv3": (
        lambda: convnext(dinov3=True),
        lambda state: timm_model("convnext_atto", state),
        "ConvNeXt-Atto, (2, 2, 6, 2) blocks",
    ),
    "ConvNeXt-V2": (
        lambda: convnext(v2=True),
        lambda state: timm_model("convnextv2_atto", state),
        "ConvNeXt-V2-Atto, (2, 2, 6, 2) blocks",
    ),
}


def saved(folder: Path, checkpoint: Any) -> Path:
    path = folder / "foreign.pth"
    torch.save(checkpoint, path)
    return path


def opened(folder: Path, checkpoint: Any, **options: Any) -> LoadedModel:
    has_heads = any("cls_token" in key for key in checkpoint.get("teacher", checkpoint))
    return open_foreign(saved(folder, checkpoint), num_heads=2 if has_heads else None, **options)


@torch.inference_mode()
def assert_equal_features(loaded: LoadedModel, truth: nn.Module, *sizes: tuple[int, int]) -> None:
    for size in sizes:
        expected = truth(images(*size))
        assert float(expected.std()) > 0.01  # it would compare nothing
        torch.testing.assert_close(loaded.backbone(images(*size)).pooled, expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(loaded.backbone.pooled([images(*size)]), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_official_files_give_the_features_of_timms_model_at_two_sizes(network: str, tmp_path: Path) -> None:
    state, truth, summary = NETWORKS[network][0](), NETWORKS[network][1], NETWORKS[network][2]
    heads = {} if "ConvNeXt" in network else {"num_heads": 2}
    has_table = "pos_embed" in state
    loaded = open_foreign(saved(tmp_path, state), **heads, **({"position_resampling": "timm"} if has_table else {}))
    assert summary in loaded.origin
    own = loaded.image_size if has_table else 96
    patch = 14 if has_table else 16
    model = truth(state)
    assert_equal_features(loaded, model, (own, own), (2 * patch, 5 * patch))
    if loaded.backbone.is_transformer:
        tokens = model.forward_features(images(own, own))  # type: ignore[operator]
        patches = loaded.backbone(images(own, own)).patches
        torch.testing.assert_close(patches, tokens[:, model.num_prefix_tokens :], rtol=1e-4, atol=1e-4)  # type: ignore[misc]


@pytest.mark.parametrize("network", ["DINOv2 with registers", "DINOv2 with SwiGLU", "DINOv3", "ConvNeXt-V2"])
def test_files_in_timms_own_layout_are_read_alike(network: str, tmp_path: Path) -> None:
    make, truth, summary = NETWORKS[network]
    model = truth(make())
    path = tmp_path / "model.safetensors"
    save_file({**model.state_dict(), "head.fc.weight": torch.ones(2, 2)}, path)
    loaded = open_model(path, num_heads=None if "ConvNeXt" in network else 2)
    assert summary in loaded.origin
    assert_equal_features(loaded, model, (loaded.image_size, loaded.image_size))


NAMED = {  # timm's name -> whether massl reads its patch tokens, and takes other sizes
    "deit3_small_patch16_224": True,
    "vit_small_patch16_rope_224": True,
    "vit_small_patch16_rope_ape_224": True,
    "vit_small_patch16_rope_mixed_224": False,
    "beit_base_patch16_224": False,
}


def named_model(name: str, **options: Any) -> Any:
    """timm's model, in which every number is random."""
    model = timm.create_model(name, **options).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", NAMED)
@torch.inference_mode()
def test_networks_that_are_named_give_the_tokens_of_timms_model_at_two_sizes(name: str, tmp_path: Path) -> None:
    model = named_model(name)
    file = saved(tmp_path, model.state_dict())
    has_table = getattr(model, "pos_embed", None) is not None
    rule = {"position_resampling": "timm"} if has_table else {}
    folder = import_weights(file, output=tmp_path / "own", overrides={"backbone": name, **rule})
    loaded = open_model(folder)
    built = build_backbone(backbone_settings(loaded, drop_path_rate=0.0), seed=0).eval()  # what --init trains
    built.model.load_state_dict(loaded.backbone.model.state_dict())
    features = model.forward_head(model.forward_features(images(224, 224)), pre_logits=True)
    torch.testing.assert_close(loaded.backbone(images(224, 224)).pooled, features, rtol=1e-4, atol=1e-4)
    assert loaded.backbone.is_transformer == NAMED[name]
    if not NAMED[name]:
        assert loaded.backbone(images(224, 224)).patches is None
        if name.startswith("beit"):  # its relative positions are those of one size
            with pytest.raises(MasslError, match=r"takes no images of 96 px \(.*\); omit --image_size"):
                import_weights(file, output=tmp_path / "small", overrides={"backbone": name, "image_size": 96})
        return
    at_any_size = timm.create_model(name, dynamic_img_size=True).eval()
    at_any_size.load_state_dict(model.state_dict())
    for size in ((224, 224), (96, 160)):
        tokens = at_any_size.forward_features(images(*size))  # type: ignore[operator]
        for backbone in (loaded.backbone, built):
            found = backbone(images(*size))
            torch.testing.assert_close(found.pooled, tokens[:, 0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.patches, tokens[:, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMED)
def test_the_networks_that_only_a_name_tells_are_never_taken_for_others(name: str, tmp_path: Path) -> None:
    model = named_model(name)
    if name.startswith("deit3"):  # timm's tensors tell it
        found = open_foreign(saved(tmp_path, model.state_dict())).backbone(images(224, 224)).pooled
        torch.testing.assert_close(found, model.forward_features(images(224, 224))[:, 0], rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(WeightsError, match=r"If it is another network of timm, name it: massl import --backbone NAME$"):
        open_foreign(saved(tmp_path, model.state_dict()))


def test_files_of_deit3s_authors_are_read_if_they_are_named(tmp_path: Path) -> None:
    model = named_model("deit3_small_patch16_224")
    state = {
        key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value
        for key, value in model.state_dict().items()
    }
    found = open_foreign(saved(tmp_path, {"model": state}), timm_name="deit3_small_patch16_224")
    expected = model.forward_features(images(224, 224))[:, 0]
    torch.testing.assert_close(found.backbone(images(224, 224)).pooled, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(WeightsError, match=r"name it: massl import --backbone NAME"):
        open_foreign(saved(tmp_path, {"model": state}))


@pytest.mark.parametrize(("num_registers", "rule"), [(0, "dino"), (4, "timm")])
def test_dinov2_resamples_positions_by_the_rule_of_its_authors(num_registers: int, rule: str, tmp_path: Path) -> None:
    """facebookresearch/dinov2, hub/backbones.py: scale factor + 0.1 without antialias; with registers size and
    antialias.
    """
    state = dinov2(num_registers=num_registers)
    loaded = opened(tmp_path, state)
    assert loaded.backbone.position_resampling == rule
    table = state["pos_embed"][:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
    how: dict[str, Any] = {"scale_factor": (3.1 / 4, 2.1 / 4)}
    if num_registers:
        how = {"size": (3, 2), "antialias": True}
    resampled = interpolate(table, mode="bicubic", **how).permute(0, 2, 3, 1).flatten(1, 2)
    model = timm_model(f"vit_small_patch14{'_reg4' if num_registers else ''}_dinov2", state, **SMALL)
    if not num_registers:
        resampled = torch.cat([state["pos_embed"][:, :1], resampled], dim=1)
    model.pos_embed = nn.Parameter(resampled)
    model.dynamic_img_size = False
    model.patch_embed.flatten, model.patch_embed.output_fmt = True, None  # type: ignore[union-attr, assignment]
    model.patch_embed.strict_img_size = False  # type: ignore[union-attr, assignment]
    assert_equal_features(loaded, model, (42, 28))


def test_without_registers_timms_rule_gives_other_features_at_other_sizes(tmp_path: Path) -> None:
    """So the choice matters: it changes the features of this random network by 0.2 %."""
    by_authors, by_timm = (opened(tmp_path, dinov2(), position_resampling=rule) for rule in ("dino", "timm"))
    own, other = images(56, 56), images(28, 28)
    assert torch.equal(by_authors.backbone(own).pooled, by_timm.backbone(own).pooled)
    features, others = by_authors.backbone(other).pooled, by_timm.backbone(other).pooled
    assert float((features - others).norm() / features.norm()) > 1e-3
    assert by_authors.fingerprint != by_timm.fingerprint


RESNETS: dict[str, tuple[Callable[[], State], Callable[[], nn.Module], str]] = {
    "ResNet-18": (resnet, torchvision.models.resnet18, "ResNet-18, (2, 2, 2, 2) blocks, 224 px"),
    "ResNet-50": (lambda: resnet(bottleneck=True), torchvision.models.resnet50, "ResNet-50, (3, 4, 6, 3)"),
    "ResNeXt": (
        lambda: resnet(bottleneck=True, groups=32, group_width=4),
        torchvision.models.resnext50_32x4d,
        "ResNet-50 with 32 groups of 4",
    ),
}


@pytest.mark.parametrize(
    "network", ["ResNet-18", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ResNet-50", "ResNeXt"))]
)
def test_resnets_give_the_features_of_torchvision_at_two_sizes(network: str, tmp_path: Path) -> None:
    make, build, summary = RESNETS[network]
    state = make()
    truth = build()
    truth.load_state_dict(state)
    truth.fc = nn.Identity()
    loaded = open_model(saved(tmp_path, state))
    assert summary in loaded.origin
    assert_equal_features(loaded, truth.eval(), (64, 64), (96, 50))


def moco(state: State) -> Any:
    projector = {**layer("fc.0", 4, 4), **layer("fc.2", 4, 4)}
    head = {key: torch.ones(shape) for key, shape in projector.items()}
    weights = {**under("encoder_q.", {**without_classifier(state), **head})}
    weights |= under("encoder_k.", {key: tensor + 1 for key, tensor in state.items()})
    weights |= {"queue": torch.ones(4, 8), "queue_ptr": torch.zeros(1, dtype=torch.int64)}
    return {"epoch": 200, "arch": "resnet50", "state_dict": under("module.", weights), "optimizer": {}}


def swav(state: State) -> State:
    head = {"projection_head.0.weight": torch.ones(2, 2), "projection_head.1.running_mean": torch.ones(2)}
    return under("module.", {**without_classifier(state), **head, "prototypes.weight": torch.ones(3, 2)})


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        (lambda state: state, "backbone of"),
        (without_classifier, "backbone of"),  # DINO's dino_resnet50_pretrain.pth
        (moco, "encoder of the MoCo checkpoint"),
        (swav, "backbone of the SwAV checkpoint"),
        (lambda state: {"state_dict": under("module.base_encoder.", state)}, "base encoder of the MoCo-v3 checkpoint"),
        (
            lambda state: {"teacher": under("backbone.", without_classifier(state)), "dino_loss": {}},
            "teacher of the DINO checkpoint",
        ),
    ],
    ids=["torchvision", "DINO backbone", "MoCo", "SwAV", "MoCo-v3", "DINO"],
)
def test_resnets_of_each_project_are_the_same_network(layout: Callable[[State], Any], part: str) -> None:
    state = resnet(counters=False)  # as old files
    found = backbone_of(layout(state), origin="a.pth")
    assert found.part == part
    wanted = create_timm_model({"model_name": "resnet18", "num_classes": 0}).state_dict()
    tensors = {key: tensor for key, tensor in found.network.tensors.items() if not key.startswith("fc.")}
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[key], state[key]) for key in without_classifier(state))


def test_training_checkpoints_of_dinov2_have_their_blocks_in_chunks(tmp_path: Path) -> None:
    state = dinov2()
    renamed = {
        f"blocks.{int(key.split('.')[1]) // 2}.{key.removeprefix('blocks.')}"
        if key.startswith("blocks.")
        else key: value
        for key, value in state.items()
    }
    heads = {"dino_head.mlp.0.weight": torch.ones(2, 2), "ibot_head.last_layer.weight_g": torch.ones(1)}
    loaded = opened(tmp_path, {"teacher": {**under("backbone.", renamed), **heads}})
    assert "teacher of the checkpoint" in loaded.origin
    expected = open_foreign(saved(tmp_path, state), num_heads=2)
    assert torch.equal(loaded.backbone(images(56, 56)).pooled, expected.backbone(images(56, 56)).pooled)


@pytest.mark.slow
@pytest.mark.parametrize("size", sorted(set(_CONVNEXTS.values())))
@pytest.mark.parametrize("family", ["convnext", "convnextv2"])
def test_the_size_of_every_convnext_of_timm_follows_from_its_shapes(family: str, size: str) -> None:
    name = f"{family}_{size}"
    if _ONLY_IN.get(size, family) != family:
        assert not timm.is_model(name) or size == "huge"
        return
    with torch.device("meta"):
        state = timm.create_model(name).state_dict()
    found = backbone_of(state, origin="a.pth").network
    assert found.timm_arguments["model_name"] == name


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(_RESNETS.values()), "wide_resnet50_2", "resnext101_32x8d"])
def test_every_plain_resnet_of_timm_follows_from_its_shapes(name: str) -> None:
    with torch.device("meta"):
        state = timm.create_model(name, num_classes=0).state_dict()
        found = backbone_of(state, origin="a.pth").network
        built = create_timm_model(found.timm_arguments).state_dict()
    assert {key: tensor.shape for key, tensor in built.items()} == {key: tensor.shape for key, tensor in state.items()}


Change = Callable[[State], Any]
NORM = {"cls_norm.weight": torch.ones(32), "cls_norm.bias": torch.ones(32)}
DAMAGES: dict[str, tuple[Callable[[], State], Change, str]] = {
    "lost scale": (lambda: dinov2(num_registers=4), lambda s: s.pop("blocks.1.ls2.gamma"), r"missing blocks\.1\.ls2"),
    "flat registers": (dinov2, lambda s: s.update(register_tokens=torch.ones(4, 24)), "register_tokens"),
    "odd positions": (dinov2, lambda s: s.update(pos_embed=torch.ones(1, 7, 24)), "7 rows"),
    "no first block": (dinov2, lambda s: s.pop("blocks.0.mlp.fc1.weight"), r"missing blocks\.0\.mlp\.fc1"),
    "other periods": (dinov3, lambda s: s.update({"rope_embed.periods": torch.ones(4)}), "other periods than DINOv3's"),
    "odd periods": (dinov3, lambda s: s.update({"rope_embed.periods": torch.ones(3)}), r"shape \[3\]"),
    "other heads": (lambda: dinov3(num_heads=1), lambda s: None, "has 1 attention heads, not 2"),
    "bias of keys": (dinov3, lambda s: s.pop("blocks.0.attn.qkv.bias_mask"), "has a bias of keys"),
    "untied norms": (dinov3, lambda s: s.update(NORM), r"unexpected cls_norm\.bias"),
    "no stem": (convnext, lambda s: s.pop("downsample_layers.0.0.bias"), r"missing stem\.0\.bias"),
    "other ConvNeXt": (convnext, lambda s: s.update({"stages.3.2.gamma": torch.ones(320)}), "of no size"),
    "other ResNet": (resnet, lambda s: s.update({"layer4.2.conv1.weight": torch.ones(1)}), "of no size"),
    "small stem": (
        resnet,
        lambda s: s.update({"conv1.weight": torch.ones(64, 3, 3, 3)}),
        r"first convolution \[64, 3, 3, 3\].*massl import --backbone NAME",
    ),
    "half a bottleneck": (
        lambda: resnet(bottleneck=True),
        lambda s: s.pop("layer1.0.conv2.weight"),
        "no bottleneck",
    ),
    "lost norm": (resnet, lambda s: s.pop("layer2.0.bn1.bias"), r"missing layer2\.0\.bn1\.bias"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_unsupported_files_are_refused_in_one_line_with_the_reason(damage: str, tmp_path: Path) -> None:
    make, change, message = DAMAGES[damage]
    state = make()
    change(state)
    with pytest.raises(WeightsError, match=message) as caught:
        opened(tmp_path, state)
    assert "foreign.pth" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_can_be_named_where_the_tensors_do_not_tell(tmp_path: Path) -> None:
    model = timm.create_model("test_efficientnet_gn.r160_in1k", num_classes=10).eval()
    path = saved(tmp_path, {"state_dict": model.state_dict()})
    with pytest.raises(WeightsError, match="no known network: its entries are conv_stem"):
        open_model(path)
    loaded = open_foreign(path, timm_name="test_efficientnet_gn.r160_in1k")
    config = timm.get_pretrained_cfg("test_efficientnet_gn.r160_in1k")
    assert (loaded.mean, loaded.std) == (tuple(config.mean), tuple(config.std)) == ((0.5,) * 3, (0.5,) * 3)
    assert_equal_features(loaded, _headless(model), (64, 64))
    with pytest.raises(WeightsError, match="do not fit the model"):
        open_foreign(path, timm_name="test_resnet")
    with pytest.raises(WeightsError, match="is no model"):
        open_foreign(path, timm_name="no_such_model")


def _headless(model: nn.Module) -> nn.Module:
    model.reset_classifier(0)  # type: ignore[operator]
    return model


def test_a_rule_for_positions_is_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no position embeddings to resample"):
        opened(tmp_path, dinov3(), position_resampling="timm")
