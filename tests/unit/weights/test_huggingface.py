"""Folders of transformers: features equal those of transformers' own model at two sizes; odd folders are refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

import massl
from massl.commands.start import backbone_settings
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.facts import WeightsError
from massl.weights.huggingface_keys import with_timm_keys
from massl.weights.io import backbone_bytes
from massl.weights.models import LoadedModel, open_foreign, open_model

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
VIT = {**TINY, "intermediate_size": 80}
ATTO = {"hidden_sizes": [40, 80, 160, 320], "depths": [2, 2, 6, 2]}
DINOV3 = {**VIT, "num_register_tokens": 3}
GATED = {**DINOV3, "use_gated_mlp": True, "hidden_act": "silu"}
# name -> classes of model and config, values of the config, what massl says of it
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "ViT": ("ViTModel", "ViTConfig", VIT, "2 blocks, 4 heads, 56 px"),
    "ViT without bias": ("ViTModel", "ViTConfig", {**VIT, "qkv_bias": False}, "4 heads, 56 px"),
    "ViT with tanh GELU": ("ViTModel", "ViTConfig", {**VIT, "hidden_act": "gelu_pytorch_tanh"}, "4 heads"),
    "ViT-MAE": ("ViTMAEModel", "ViTMAEConfig", {**VIT, "mask_ratio": 0.0}, "4 heads, 56 px"),
    "DINOv2": ("Dinov2Model", "Dinov2Config", TINY, "4 heads, 56 px"),
    "DINOv2 with SwiGLU": ("Dinov2Model", "Dinov2Config", {**TINY, "use_swiglu_ffn": True}, "4 heads, SwiGLU, 56 px"),
    "DINOv2 with registers": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        {**TINY, "num_register_tokens": 3},
        "4 heads, 3 registers, 56 px",
    ),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", DINOV3, "4 heads, 3 registers, rotary positions"),
    "DINOv3, gated": ("DINOv3ViTModel", "DINOv3ViTConfig", GATED, "3 registers, SwiGLU, rotary positions"),
    "ConvNeXt of DINOv3": ("DINOv3ConvNextModel", "DINOv3ConvNextConfig", ATTO, "ConvNeXt-Atto, (2, 2, 6, 2) blocks"),
    "ConvNeXt": ("ConvNextModel", "ConvNextConfig", ATTO, "ConvNeXt-Atto, (2, 2, 6, 2) blocks"),
    "ConvNeXt-V2": ("ConvNextV2Model", "ConvNextV2Config", ATTO, "ConvNeXt-V2-Atto, (2, 2, 6, 2) blocks"),
}


@torch.no_grad()
def redrawn(model: nn.Module) -> nn.Module:
    """Every number random, so that none can be lost unseen."""
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        scale = 1.0 if tensor.ndim < 2 else 1.0 / math.sqrt(math.prod(tensor.shape[1:]))
        tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def made(name: str, **changes: Any) -> Any:
    """transformers' own model with random weights."""
    model, config, values, _ = MODELS[name]
    if not hasattr(transformers, model):
        pytest.skip(f"this version of transformers has no {model}")
    return redrawn(getattr(transformers, model)(getattr(transformers, config)(**{**values, **changes})))


def folder_of(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def features(model: Any, size: tuple[int, int]) -> Tensor:
    """The class token after the last norm; the pooled features of a convolutional network."""
    name = type(model).__name__
    if "ConvN" in name:
        return model(images(*size)).pooler_output
    num_patches = size[0] // 14 * (size[1] // 14)
    in_order = (
        {"noise": torch.arange(num_patches).float().expand(2, -1)} if "MAE" in name else {}
    )  # MAE shuffles patches
    return model(images(*size), **in_order).last_hidden_state[:, 0]


def assert_same(loaded: LoadedModel, expected: Tensor, size: tuple[int, int]) -> None:
    assert float(expected.std()) > 0.1  # it would compare nothing
    with torch.inference_mode():
        torch.testing.assert_close(loaded.backbone(images(*size)).pooled, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("ConvNeXt", "ConvNeXt-V2"))) for name in MODELS]
)
def test_a_folder_gives_the_features_of_transformers_at_two_sizes(name: str, tmp_path: Path) -> None:
    model = made(name)
    loaded = open_model(folder_of(model, tmp_path / "model"))
    assert loaded.origin.startswith("transformers model ")
    assert MODELS[name][3] in loaded.origin
    assert_same(loaded, features(model, (56, 56)), (56, 56))
    if loaded.backbone.position_resampling != "dino":  # transformers resamples as the authors do, or not at all
        assert_same(loaded, features(model, (42, 70)), (42, 70))
        return
    # without registers transformers has a rule of its own; massl keeps that of DINO and DINOv2
    small, state = made(name, image_size=28), dict(model.state_dict())
    key = next(key for key in state if key.endswith("position_embeddings"))
    table = state[key][:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
    resampled = interpolate(table, scale_factor=(2.1 / 4, 2.1 / 4), mode="bicubic").flatten(2).transpose(1, 2)
    small.load_state_dict({**state, key: torch.cat([state[key][:, :1], resampled], dim=1)})
    assert_same(loaded, features(small, (28, 28)), (28, 28))


def test_weights_in_one_file_in_parts_or_pickled_are_the_same(tmp_path: Path) -> None:
    model = made("DINOv2 with registers")
    whole = folder_of(model, tmp_path / "whole")
    in_parts = folder_of(model, tmp_path / "parts", max_shard_size="20KB")
    assert len([*in_parts.glob("*.safetensors")]) > 1
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((whole / "config.json").read_bytes())
    state = load_file(whole / "model.safetensors")
    torch.save(state, pickled / "pytorch_model.bin")
    alone = tmp_path / "dinov2.safetensors"  # no config beside it
    save_file(state, alone)
    expected = open_model(whole)
    for loaded in (
        *map(open_model, (whole / "model.safetensors", in_parts, pickled)),
        open_foreign(alone, num_heads=4),
    ):
        assert loaded.fingerprint == expected.fingerprint
    with pytest.raises(WeightsError, match="has 4 attention heads, not 2"):
        open_model(whole, num_heads=2)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("ViTForImageClassification", "ViT"),
        ("ViTMAEForPreTraining", "ViT-MAE"),
        ("Dinov2ForImageClassification", "DINOv2"),
    ],
)
def test_heads_and_decoders_are_left_out(head: str, name: str, tmp_path: Path) -> None:
    _, config, values, _ = MODELS[name]
    decoder = {f"decoder_{key}": 16 for key in ("hidden_size", "intermediate_size")} if "MAE" in name else {}
    model = redrawn(getattr(transformers, head)(getattr(transformers, config)(**{**values, **decoder})))
    inner = getattr(model, model.base_model_prefix)
    assert_same(open_model(folder_of(model, tmp_path / "model")), features(inner, (56, 56)), (56, 56))


def test_the_preparation_of_images_comes_from_the_folder(tmp_path: Path) -> None:
    folder = folder_of(made("ViT"), tmp_path / "model")
    assert open_model(folder).mean == (0.485, 0.456, 0.406)
    config = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 1], "do_center_crop": True}
    sizes = {"size": {"shortest_edge": 64}, "crop_size": {"height": 56, "width": 56}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**config, **sizes}))
    imported = massl.import_weights(folder, output=tmp_path / "imported")
    for loaded in (open_model(folder), open_model(imported)):
        assert (loaded.mean, loaded.std, loaded.crop_ratio) == ((0.5, 0.5, 0.5), (0.25, 0.5, 1.0), 56 / 64)


@pytest.mark.parametrize(
    "options",
    [{"qkv_bias": False}, {"init_values": 0.1}, {"reg_tokens": 2, "no_embed_class": True}, {"reg_tokens": 2}],
    ids=["plain", "layer scale", "registers", "registers with positions"],
)
def test_what_massl_exports_to_transformers_it_reads_again_without_a_difference(
    options: dict[str, Any], tmp_path: Path
) -> None:
    chosen = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=32,
        timm_options={"embed_dim": 48, "depth": 2, "num_heads": 3, **options},
    )
    file, facts = tmp_path / "b.safetensors", {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2), "crop_ratio": 1.0}
    model = redrawn(build_backbone(chosen, seed=0).model)
    file.write_bytes(backbone_bytes(model, timm_arguments=chosen.timm_arguments(), image_size=32, **facts))  # type: ignore[arg-type]
    folder = massl.export(file, to="transformers", output=tmp_path / "hf")
    rule = {"position_resampling": "dino"}  # a file with registers is taken for DINOv2's, which has timm's rule
    imported = massl.import_weights(folder, output=tmp_path / "imported", overrides=rule)
    original, from_folder, again = map(open_model, (file, folder, imported))
    for size in ((32, 32), (48, 64)):
        expected = original.backbone(images(*size)).pooled
        assert torch.equal(again.backbone(images(*size)).pooled, expected)
    assert torch.equal(from_folder.backbone(images(32, 32)).pooled, original.backbone(images(32, 32)).pooled)
    assert (again.mean, again.std, again.crop_ratio) == (facts["mean"], facts["std"], 1.0)
    settings = backbone_settings(from_folder, drop_path_rate=0.0)  # what --init trains
    own = build_backbone(settings, seed=1).eval()
    own.model.load_state_dict(from_folder.backbone.model.state_dict())
    assert torch.equal(own(images(32, 32)).pooled, from_folder.backbone(images(32, 32)).pooled)


@pytest.mark.parametrize(
    ("name", "options", "tag", "rule"),
    [
        ("vit_tiny_patch16_224", {"depth": 2, "img_size": 64}, "augreg_in21k", "timm"),
        ("vit_tiny_patch16_224", {"depth": 2, "img_size": 64}, "dino", "dino"),
        ("resnet10t", {}, "c3_in1k", None),
    ],
)
@torch.inference_mode()
def test_a_folder_of_timm_has_its_own_network_colours_and_rule(
    name: str, options: dict[str, Any], tag: str, rule: str | None, tmp_path: Path
) -> None:
    theirs = timm.create_model(name, num_classes=0, **options).eval()
    about = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.3], "crop_pct": 0.9, "tag": tag}
    config = {"architecture": name, "num_classes": 0, "model_args": options, "pretrained_cfg": about}
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        found = open_model(path)
        assert (found.mean, found.std, found.crop_ratio) == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.3), 0.9)
        assert found.backbone.position_resampling == rule
        batch = images(64, 64)
        torch.testing.assert_close(found.backbone(batch).pooled, theirs(batch), rtol=1e-4, atol=1e-4)
    for change, message in (
        ({"model_args": {**options, "checkpoint_path": "/etc/passwd"}}, "checkpoint_path is no option"),
        ({"model_args": {"img_size": [64, 32]}}, "massl reads square ones"),
        ({"pretrained_cfg": {"mean": ["x"] * 3}}, "is damaged: expected mean"),
        ({"architecture": "hf-hub:a/b"}, "which timm does not have"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(WeightsError, match=message):
            open_model(tmp_path)


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
QUERY, KEY = (f"encoder.layer.1.attention.attention.{part}" for part in ("query", "key"))
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "another model": ("ViT", lambda c, s: c.update(model_type="swin"), "'swin'; massl reads these of transformers: "),
    "no model": ("ViT", lambda c, s: c.pop("model_type"), "massl reads these of transformers"),
    "timm's folder": (
        "ViT",
        lambda c, s: (c.clear(), c.update(architecture="x")),
        "names the architecture 'x', which timm does not have",
    ),
    "other eps": ("ViT", lambda c, s: c.update(layer_norm_eps=1e-3), "layer_norm_eps 0.001 instead of 1e-06"),
    "huge eps": ("ViT", lambda c, s: c.update(layer_norm_eps=10**400), "layer_norm_eps 1000"),
    "other activation": ("ViT", lambda c, s: c.update(hidden_act="relu"), "hidden_act relu"),
    "odd activation": ("ViT", lambda c, s: c.update(hidden_act=["gelu"]), "hidden_act"),
    "GELU behind a gate": ("DINOv3, gated", lambda c, s: c.update(hidden_act="gelu"), "hidden_act gelu"),
    "no heads": ("ViT", lambda c, s: c.pop("num_attention_heads"), "num_attention_heads None"),
    "odd heads": ("ViT", lambda c, s: c.update(num_attention_heads=5), "5 attention heads do not divide"),
    "not square": ("ViT", lambda c, s: c.update(image_size=[28, 112]), "which is not square"),
    "other rotations": ("DINOv3", lambda c, s: c.update(rope_theta=10.0), "rope_theta 10.0 instead of 100"),
    "bias of keys": (
        "DINOv3",
        lambda c, s: s.update({"layer.1.attention.k_proj.bias": torch.ones(32)}),
        "has a bias of keys",
    ),
    "lost keys": ("ViT", lambda c, s: s.pop(f"{KEY}.weight"), r"blocks\.1\.attn\.qkv\.weight lacks those of the keys"),
    "lost bias": ("DINOv2", lambda c, s: s.pop(f"{KEY}.bias"), r"qkv\.bias lacks those of the keys"),
    "lost values": ("DINOv3", lambda c, s: s.pop("layer.0.attention.v_proj.bias"), "lacks those of the values"),
    "short queries": (
        "ViT",
        lambda c, s: s.update({f"{QUERY}.weight": torch.ones(8, 32)}),
        r"have the shapes \[8, 32\]",
    ),
    "whole queries": (
        "ViT",
        lambda c, s: s.update({f"{QUERY}.weight": torch.ones(32, 32, dtype=torch.int32)}),
        "queries, keys and values",
    ),
    "lost norm": ("DINOv2", lambda c, s: s.pop("layernorm.bias"), r"missing norm\.bias"),
    "lost scale": (
        "DINOv2",
        lambda c, s: s.pop("encoder.layer.1.layer_scale2.lambda1"),
        r"missing blocks\.1\.ls2\.gamma",
    ),
    "second norm": ("ViT", lambda c, s: s.update({"norm.weight": torch.ones(32)}), "holds some weights twice"),
    "an unknown tensor": ("ViT", lambda c, s: s.update({"adapter.x": torch.ones(1)}), r"unexpected adapter\.x"),
    "a broken number": ("ViT", lambda c, s: s["layernorm.bias"].fill_(math.nan), "not finite"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_odd_folders_are_refused_in_one_line_with_the_reason(damage: str, tmp_path: Path) -> None:
    name, change, message = DAMAGES[damage]
    folder = folder_of(made(name), tmp_path / "model")
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, state)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=message) as caught:
        open_model(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def index(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        weight_map = {f"key{number}": name for number, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def twice(folder: Path) -> None:
    index("a.safetensors", "b.safetensors")(folder)
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (without_weights, r"no model\.safetensors, .* copy it whole"),
    "cut weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x09" + b"\0" * 9), "cannot read"),
    "no JSON": (text("config.json", "{"), "cannot read .*config.json"),
    "deep JSON": (text("config.json", "[" * 10**5), "cannot read .*config.json"),
    "another JSON": (text("config.json", "[]"), "holds no JSON object"),
    "a lost part": (index("a.safetensors", "b.safetensors"), r"lacks b\.safetensors"),
    "a part elsewhere": (index("../a.safetensors"), r"names '\.\./a\.safetensors'"),
    "an absolute part": (index("/etc/a.safetensors"), "names '/etc/a.safetensors'"),
    "too many parts": (index(*(f"{number}.safetensors" for number in range(101))), "names 101 weights files"),
    "no parts": (index(), "names 0 weights files"),
    "a part twice": (twice, "two weights files of .* hold embeddings"),
    "odd colours": (text("preprocessor_config.json", '{"image_mean": [1, 2], "image_std": [1, 1, 1]}'), "image_mean"),
    "huge colours": (
        text("preprocessor_config.json", json.dumps({"image_mean": [10**400] * 3, "image_std": [1, 1, 1]})),
        "image_mean",
    ),
}


@pytest.mark.parametrize("damage", FILES)
def test_folders_with_odd_files_are_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    change, message = FILES[damage]
    folder = folder_of(made("ViT"), tmp_path / "model")
    change(folder)
    with pytest.raises(WeightsError, match=message) as caught:
        open_model(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_small_file_cannot_ask_for_much_memory() -> None:
    """Joined layers are copies: 400 blocks that share one tensor of 4 MB would take 5 GB."""
    shared = torch.ones(1000, 1000)
    one = torch.ones(()).expand(10**6, 10**6)
    stem = {"embeddings.patch_embeddings.projection.weight": torch.ones(1000, 3, 2, 2)}
    for weight in (shared, one):
        names = (
            f"encoder.layer.{at}.attention.attention.{part}" for at in range(400) for part in ("query", "key", "value")
        )
        with pytest.raises(WeightsError, match="share their memory"):
            with_timm_keys({**stem, **{f"{name}.weight": weight for name in names}}, origin="a.bin")


def test_torchvisions_convnext_gives_the_same_features_at_two_sizes(tmp_path: Path) -> None:
    blocks = [
        CNBlockConfig(40, 80, 2),
        CNBlockConfig(80, 160, 2),
        CNBlockConfig(160, 320, 6),
        CNBlockConfig(320, None, 2),
    ]
    model = redrawn(ConvNeXt(blocks))
    torch.save(model.state_dict(), tmp_path / "convnext.pth")
    loaded = open_model(tmp_path / "convnext.pth")
    assert "ConvNeXt-Atto, (2, 2, 6, 2) blocks" in loaded.origin
    model.classifier[2] = nn.Identity()  # type: ignore[index]
    for size in ((64, 64), (96, 50)):
        with torch.no_grad():
            assert_same(loaded, model(images(*size)), size)
    state = model.state_dict()
    del state["features.3.1.layer_scale"]
    torch.save(state, tmp_path / "damaged.pth")
    with pytest.raises(WeightsError, match=r"missing stages\.1\.blocks\.1\.gamma"):
        open_model(tmp_path / "damaged.pth")
