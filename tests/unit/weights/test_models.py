import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear

from massl.commands.import_weights import import_weights
from massl.config import MasslError, RecipeError
from massl.nn.backbone import Backbone
from massl.nn.timm_models import create_timm_model
from massl.weights.facts import WeightsError
from massl.weights.io import BACKBONE_FILE, backbone_bytes
from massl.weights.models import LoadedModel, model_fingerprint, open_foreign, open_model

State = dict[str, Tensor]
MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
NUM_HEADS = 2
TINY = {
    "model_name": "vit_tiny_patch16_224",
    "num_classes": 0,
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
}
TINY["num_heads"] = NUM_HEADS
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def tiny_state(seed: int = 0, **changes: Any) -> State:
    """A tiny vision transformer in which every number is random, so that none can be lost unseen."""
    generator = torch.Generator().manual_seed(seed)
    shapes = create_timm_model({**TINY, **changes}).state_dict()
    return {key: 0.3 * torch.randn(tensor.shape, generator=generator) for key, tensor in shapes.items()}


def truth(state: State, images: Tensor, num_heads: int) -> Tensor:  # [B, 3, H, W] -> [B, D]
    """The class token of a vision transformer, written out from the state dict."""
    dim, _, patch, _ = state["patch_embed.proj.weight"].shape
    patches = (
        conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch).flatten(2).mT
    )
    tokens = torch.cat([state["cls_token"].expand(len(images), -1, -1), patches], dim=1) + state["pos_embed"]

    def apply(name: str, values: Tensor) -> Tensor:
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        return layer_norm(values, (dim,), weight, bias, eps=1e-6) if "norm" in name else linear(values, weight, bias)

    for block in sorted({key.rpartition("blocks.")[2].split(".")[0] for key in state if key.startswith("blocks.")}):
        name = f"blocks.{block}"
        qkv = apply(f"{name}.attn.qkv", apply(f"{name}.norm1", tokens))
        query, key, value = (part.unflatten(2, (num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
        weights = (query @ key.mT * (dim // num_heads) ** -0.5).softmax(dim=-1)
        attended = apply(f"{name}.attn.proj", (weights @ value).transpose(1, 2).flatten(2))
        tokens = tokens + state.get(f"{name}.gamma_1", torch.tensor(1.0)) * attended
        hidden = gelu(apply(f"{name}.mlp.fc1", apply(f"{name}.norm2", tokens)))
        tokens = tokens + state.get(f"{name}.gamma_2", torch.tensor(1.0)) * apply(f"{name}.mlp.fc2", hidden)
    return apply("norm", tokens)[:, 0]


def under(prefix: str, state: State) -> State:
    return {f"{prefix}{key}": tensor for key, tensor in state.items()}


def dino_head() -> State:
    return {
        "head.mlp.0.weight": torch.ones(4, 32),
        "head.last_layer.weight_g": torch.ones(4, 1),
        "head.last_layer.weight_v": torch.ones(4, 4),
    }


def joint_checkpoint(state: State, *, teacher_prefix: str = "backbone.", **beside: Any) -> dict[str, Any]:
    """Student, teacher and the rest, as DINO, iBOT and MaSSL keep them."""
    student = under(
        "module.", {**under("backbone.", {**tiny_state(seed=9), "masked_embed": torch.ones(1, 32)}), **dino_head()}
    )
    teacher = {**under(teacher_prefix, state), **under(teacher_prefix.removesuffix("backbone."), dino_head())}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    options = argparse.Namespace(arch="vit_small", lr=5e-4, local_crops_scale=(0.05, 0.4), output_dir=".")
    return {"student": student, "teacher": teacher, "optimizer": optimizer, "epoch": 3, "args": options, **beside}


def mocov3_checkpoint(state: State) -> dict[str, Any]:
    base = {**state, "head.0.weight": torch.ones(4, 32), "head.1.running_mean": torch.ones(4)}
    momentum = under("momentum_encoder.", {**base, **{key: tensor + 1 for key, tensor in state.items()}})
    weights = {**under("base_encoder.", base), **momentum, "predictor.0.weight": torch.ones(4, 4)}
    return {
        "epoch": 300,
        "arch": "vit_small",
        "state_dict": under("module.", weights),
        "optimizer": {},
        "scaler": {"scale": 1.0},
    }


def mae_full(state: State) -> State:
    decoder = {
        "decoder_pos_embed": torch.ones(1, 17, 8),
        "decoder_blocks.0.norm1.weight": torch.ones(8),
        "decoder_pred.bias": torch.ones(3),
    }
    return {**state, **decoder, "mask_token": torch.ones(1, 1, 8)}


LAYOUTS: dict[str, tuple[Callable[[State], Any], str]] = {
    "DINO backbone": (lambda state: state, "backbone of"),
    "DINO full": (
        lambda state: joint_checkpoint(state, dino_loss={"center": torch.ones(1, 4)}),
        "teacher of the DINO checkpoint",
    ),
    "DINO full, head with batch norm": (
        lambda state: joint_checkpoint(
            state, teacher_prefix="module.backbone.", dino_loss={}, fp16_scaler={"scale": 2.0}
        ),
        "teacher of the DINO checkpoint",
    ),
    "iBOT backbone": (lambda state: {"state_dict": state}, "backbone under 'state_dict' of"),
    "iBOT full": (
        lambda state: joint_checkpoint(state, ibot_loss={"center2": torch.ones(1, 1, 4)}),
        "teacher of the iBOT checkpoint",
    ),
    "MaSSL": (
        lambda state: joint_checkpoint(
            state,
            memory_bank={"queue": torch.ones(256, 8), "queue_ptr": torch.zeros(1, dtype=torch.long)},
            fp16_scaler=None,
        ),
        "teacher of the MaSSL checkpoint",
    ),
    "MoCo-v3": (mocov3_checkpoint, "base encoder of the MoCo-v3 checkpoint"),
    "MAE encoder": (lambda state: {"model": state}, "backbone under 'model' of"),
    "MAE full": (
        lambda state: {"model": mae_full(state), "args": argparse.Namespace(epochs=1)},
        "encoder of the MAE checkpoint",
    ),
    "DeiT": (
        lambda state: {"model": {**state, "head.weight": torch.ones(10, 32), "head.bias": torch.ones(10)}},
        "backbone under 'model' of",
    ),
    "timm": (lambda state: {**state, "head.weight": torch.ones(10, 32), "head.bias": torch.ones(10)}, "backbone of"),
}


def own_file(folder: Path, state: State, arguments: dict[str, Any]) -> Path:
    model = create_timm_model(arguments)
    model.load_state_dict(state)
    (folder / BACKBONE_FILE).write_bytes(
        backbone_bytes(model, timm_arguments=arguments, mean=MEAN, std=STD, image_size=32)
    )
    return folder / BACKBONE_FILE


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


# ---- files of massl --------------------------------------------------------------------------------------------------


def test_a_run_is_opened_by_its_folder_or_its_file(tmp_path: Path) -> None:
    file, state = own_file(tmp_path, tiny_state(), TINY), tiny_state()
    run, single = open_model(tmp_path), open_model(str(file))
    for model in (run, single):
        torch.testing.assert_close(model.backbone(IMAGES).pooled, truth(state, IMAGES, NUM_HEADS), rtol=1e-4, atol=1e-4)
        assert (model.mean, model.std, model.image_size) == (MEAN, STD, 32)
        assert model.backbone.timm_arguments == TINY
    assert (run.name, run.origin) == (str(tmp_path), f"teacher of {tmp_path}")
    assert (single.name, single.origin) == (str(file), f"backbone {file}")
    assert run.fingerprint == single.fingerprint


def test_a_run_is_evaluated_at_the_size_and_crop_of_its_training(tmp_path: Path) -> None:
    model = create_timm_model({**TINY, "img_size": 48})  # position embeddings for 48 px
    facts: dict[str, Any] = {"timm_arguments": {**TINY, "img_size": 48}, "mean": MEAN, "std": STD}
    (tmp_path / BACKBONE_FILE).write_bytes(backbone_bytes(model, **facts, image_size=32, crop_ratio=1.0))
    opened = open_model(tmp_path)
    assert (opened.image_size, opened.crop_ratio) == (32, 1.0)


def test_an_opened_model_is_ready_to_be_evaluated(tmp_path: Path) -> None:
    own_file(tmp_path, tiny_state(), TINY)
    state = torch.get_rng_state()
    backbone = open_model(tmp_path).backbone
    assert not backbone.training
    assert not backbone.model.training
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_convolutional_run_opens_too(tmp_path: Path) -> None:
    arguments = {"model_name": "test_resnet", "num_classes": 0}
    model = create_timm_model(arguments, seed=5).eval()
    own_file(tmp_path, model.state_dict(), arguments)
    opened = open_model(tmp_path)
    assert torch.equal(opened.backbone(IMAGES).pooled, model(IMAGES))
    assert (opened.mean, opened.image_size, opened.architecture) == (MEAN, 32, "test_resnet")


def test_a_folder_without_a_backbone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"backbone\.safetensors does not exist"):
        open_model(tmp_path)


def test_a_run_tells_its_number_of_heads_and_no_other_is_taken(tmp_path: Path) -> None:
    own_file(tmp_path, tiny_state(), TINY)
    assert open_model(tmp_path, num_heads=NUM_HEADS).fingerprint == open_model(tmp_path).fingerprint
    with pytest.raises(WeightsError, match="attention heads, not 4"):
        open_model(tmp_path, num_heads=4)


def test_random_weights_cannot_be_asked_of_a_file(tmp_path: Path) -> None:
    own_file(tmp_path, tiny_state(), TINY)
    assert open_model(tmp_path, pretrained=True).fingerprint == open_model(tmp_path).fingerprint
    with pytest.raises(WeightsError, match="holds weights"):
        open_model(tmp_path, pretrained=False)


def test_a_training_checkpoint_of_massl_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    file = saved(
        tmp_path / "step_000000010.pt", {"method": {"teacher.x": torch.ones(1)}, "recipe": "{}", "optimizer": {}}
    )
    with pytest.raises(WeightsError, match="give the folder of the run instead"):
        open_model(file)


def test_damaged_metadata_are_refused(tmp_path: Path) -> None:
    save_file(tiny_state(), tmp_path / "a.safetensors", {"timm": "{", "mean": "[0]", "std": "[1]"})
    with pytest.raises(WeightsError, match=r"metadata of .* are damaged"):
        open_model(tmp_path / "a.safetensors")


# ---- files of other projects -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_bit_for_bit_the_features_of_a_massl_file(tmp_path: Path, layout: str) -> None:
    make, part = LAYOUTS[layout]
    state = tiny_state()
    file = saved(tmp_path / "weights.pth", make(state))
    opened, own = open_model(file, num_heads=NUM_HEADS), open_model(own_file(tmp_path, state, TINY))
    images = torch.cat([IMAGES, IMAGES.flip(0)], dim=3)  # another size than the model's own
    for views in (IMAGES, images):
        tokens, expected = opened.backbone(views), own.backbone(views)
        assert torch.equal(tokens.pooled, expected.pooled)
        assert torch.equal(tokens.patches, expected.patches)
    torch.testing.assert_close(opened.backbone(IMAGES).pooled, truth(state, IMAGES, NUM_HEADS), rtol=1e-4, atol=1e-4)
    assert opened.origin.startswith(f"{part} {file} (ViT of width 32, patch 8, 2 blocks, 2 heads, 32 px)")
    assert (opened.mean, opened.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert opened.image_size == 32


def test_a_foreign_safetensors_file_and_the_old_torch_format_open_too(tmp_path: Path) -> None:
    state = tiny_state()
    save_file(under("module.", under("backbone.", state)), tmp_path / "a.safetensors")
    torch.save(joint_checkpoint(state), tmp_path / "b.bin", _use_new_zipfile_serialization=False)
    for file in ("a.safetensors", "b.bin"):
        features = open_model(tmp_path / file, num_heads=NUM_HEADS).backbone(IMAGES).pooled
        torch.testing.assert_close(features, truth(state, IMAGES, NUM_HEADS), rtol=1e-4, atol=1e-4)


def test_the_teacher_is_taken_also_where_it_has_no_prefix_or_no_known_company(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.pth", {"student": tiny_state(seed=9), "teacher": tiny_state()})
    opened = open_model(file, num_heads=NUM_HEADS)
    torch.testing.assert_close(
        opened.backbone(IMAGES).pooled, truth(tiny_state(), IMAGES, NUM_HEADS), rtol=1e-4, atol=1e-4
    )
    assert opened.origin.startswith("teacher of the checkpoint ")


def test_layer_scale_of_ibot_becomes_that_of_timm(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    scales = {
        f"blocks.{block}.gamma_{half}": torch.rand(32, generator=generator) for block in (0, 1) for half in (1, 2)
    }
    state = {**tiny_state(), **scales}
    opened = open_model(saved(tmp_path / "a.pth", {"state_dict": state}), num_heads=NUM_HEADS)
    torch.testing.assert_close(opened.backbone(IMAGES).pooled, truth(state, IMAGES, NUM_HEADS), rtol=1e-4, atol=1e-4)
    timm_state = tiny_state(init_values=1.0)  # and timm's own keys are read as they are
    opened = open_model(saved(tmp_path / "b.pth", timm_state), num_heads=NUM_HEADS)
    assert torch.equal(opened.backbone.model.state_dict()["blocks.1.ls2.gamma"], timm_state["blocks.1.ls2.gamma"])


@pytest.mark.parametrize(("dim", "num_heads"), [(192, 3), (384, 6), (768, 12), (1024, 16)])
def test_the_number_of_heads_follows_from_the_width(tmp_path: Path, dim: int, num_heads: int) -> None:
    state = tiny_state(embed_dim=dim, depth=1, num_heads=1, mlp_ratio=0.5)
    opened = open_model(saved(tmp_path / "a.pth", state))
    assert opened.backbone.model.blocks[0].attn.num_heads == num_heads
    assert f"1 blocks, {num_heads} heads" in opened.origin


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto"])
def test_a_number_of_heads_is_refused_for_networks_without_attention(name: str, tmp_path: Path) -> None:
    file = saved(tmp_path / "a.pth", timm.create_model(name, num_classes=0).state_dict())
    for timm_name in (None, name):
        with pytest.raises(WeightsError, match=r"a\.pth holds a convolutional network, .*; omit (--)?num_heads"):
            open_foreign(file, num_heads=3, timm_name=timm_name)
    own = import_weights(file, output=tmp_path / "own", overrides={"backbone": name})
    with pytest.raises(WeightsError, match="with no attention heads, not 3; omit num_heads"):
        open_model(own, num_heads=3)
    with pytest.raises(RecipeError, match="it has no num_heads; leave that out"):
        open_model(name, num_heads=3)


def test_mocov3_of_width_384_has_12_heads_and_says_so(tmp_path: Path) -> None:
    state = tiny_state(embed_dim=384, depth=1, num_heads=12)
    file = saved(tmp_path / "vit-s-300ep.pth.tar", mocov3_checkpoint(state))
    opened, wrong = open_model(file), open_model(file, num_heads=6)
    assert "12 heads" in opened.origin
    assert "MoCo-v3's ViT-S has 12 heads where others have 6" in opened.origin
    assert "6 heads" in wrong.origin
    assert "where others" not in wrong.origin
    for model, num_heads in ((opened, 12), (wrong, 6)):
        torch.testing.assert_close(model.backbone(IMAGES).pooled, truth(state, IMAGES, num_heads), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(opened.backbone(IMAGES).pooled, wrong.backbone(IMAGES).pooled, atol=1e-2)
    assert opened.fingerprint != wrong.fingerprint
    assert (
        "1 blocks, 12 heads"
        in open_model(
            saved(tmp_path / "b.pth", mocov3_checkpoint(tiny_state(embed_dim=768, depth=1, mlp_ratio=0.5)))
        ).origin
    )


def test_an_unusual_width_needs_a_number_of_heads_that_divides_it(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.pth", tiny_state())
    with pytest.raises(WeightsError, match=r"width 32.*--num_heads"):
        open_model(file)
    with pytest.raises(WeightsError, match=r"5 attention heads.* width 32"):
        open_model(file, num_heads=5)
    with pytest.raises(WeightsError, match="cannot have 0 attention heads"):
        open_model(file, num_heads=0)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_every_single_missing_key_is_named(tmp_path: Path) -> None:
    state = tiny_state()
    for key in state:
        file = saved(
            tmp_path / "a.pth", {"teacher": under("backbone.", {name: state[name] for name in state if name != key})}
        )
        with pytest.raises(WeightsError, match=f"missing {key}$"):
            open_model(file, num_heads=NUM_HEADS)


def test_all_missing_and_unexpected_keys_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    state = {
        **tiny_state(),
        "fc_norm.weight": torch.ones(32),
        "blocks.1.extra": torch.ones(1),
        "norm.bias": torch.ones(31),
    }
    del state["blocks.0.norm1.bias"], state["blocks.1.attn.qkv.bias"]
    with pytest.raises(WeightsError) as caught:
        open_model(saved(tmp_path / "a.pth", state), num_heads=NUM_HEADS)
    assert "missing blocks.0.norm1.bias, blocks.1.attn.qkv.bias;" in str(caught.value)
    assert "unexpected blocks.1.extra, fc_norm.weight;" in str(caught.value)
    assert "norm.bias has the shape [31] instead of [32]" in str(caught.value)


def test_a_massl_file_with_a_missing_key_is_refused_by_name(tmp_path: Path) -> None:
    file = own_file(tmp_path, tiny_state(), {**TINY, "depth": 2})
    arguments = {**TINY, "depth": 3}
    model = create_timm_model(TINY)
    file.write_bytes(backbone_bytes(model, timm_arguments=arguments, mean=MEAN, std=STD, image_size=32))
    with pytest.raises(WeightsError, match=r"missing blocks\.2\.attn\.proj\.bias, "):
        open_model(file)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "a.pth", joint_checkpoint(tiny_state())).read_bytes()
    for share in (0.0, 0.3, 0.99):
        (tmp_path / "a.pth").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(WeightsError, match=r"cannot read .*damaged"):
            open_model(tmp_path / "a.pth")


def test_a_file_with_a_damaged_block_is_refused(tmp_path: Path) -> None:
    content = bytearray(saved(tmp_path / "a.pth", tiny_state()).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(WeightsError, match="is damaged"):
        open_model(tmp_path / "a.pth", num_heads=NUM_HEADS)


class _Attack:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("kind", ["torch", "old torch", "plain pickle"])
def test_code_in_a_file_is_never_run(tmp_path: Path, kind: str) -> None:
    trace, file = tmp_path / "attacked", tmp_path / "a.pth"
    content = {"teacher": under("backbone.", tiny_state()), "args": _Attack(trace)}
    if kind == "plain pickle":
        file.write_bytes(pickle.dumps(content["args"], protocol=2))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(WeightsError, match=r"Python object \(\S*system\)"):
        open_model(file, num_heads=NUM_HEADS)
    assert not trace.exists()


def test_whole_modules_are_refused_with_advice(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.pth", {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(WeightsError, match=r"Python object \(torch.nn.modules.linear.Linear\)"):
        open_model(file)
    assert argparse.Namespace not in torch.serialization.get_safe_globals()  # allowed while reading only


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for content in (b"hello", b"\x89PNG\r\n\x1a\n", pickle.dumps({"a": 1}, protocol=5)):
        (tmp_path / "a.pth").write_bytes(content)
        with pytest.raises(WeightsError, match=r"cannot read|holds no|is no state dict"):
            open_model(tmp_path / "a.pth")
    (tmp_path / "a.safetensors").write_bytes(b"hello")
    with pytest.raises(WeightsError, match="cannot read"):
        open_model(tmp_path / "a.safetensors")


# ---- timm models -----------------------------------------------------------------------------------------------------


def test_a_timm_name_without_a_tag_gives_the_same_random_weights_every_time() -> None:
    first, second = open_model("test_vit"), open_model(Path("test_vit"))
    assert first.origin == "random weights (timm's test_vit, seed 0)"
    assert first.fingerprint == second.fingerprint
    assert torch.equal(first.backbone(IMAGES).pooled, second.backbone(IMAGES).pooled)
    config = timm.create_model("test_vit").default_cfg
    assert (first.mean, first.std, first.image_size) == (config["mean"], config["std"], 160)


@pytest.mark.parametrize("name", ["resnet18", "test_vit2", "test_byobnet", "vit_tiny_patch16_224"])
def test_timm_models_of_any_kind_give_the_features_of_timm(name: str) -> None:
    opened = open_model(name)
    reference = timm.create_model(name, num_classes=0).eval()
    reference.load_state_dict(opened.backbone.model.state_dict())
    images = torch.randn(2, 3, opened.image_size, opened.image_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(opened.backbone(images).pooled, reference(images), rtol=1e-4, atol=1e-5)
    assert opened.backbone.dim == reference(images[:1]).shape[1]


def published(monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    """What timm would fetch from the network."""
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *place, **options: dict(state))


def test_a_tag_loads_the_published_weights_without_their_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {
        key: 0.1 * torch.randn(tensor.shape) for key, tensor in timm.create_model("test_vit").state_dict().items()
    }
    published(monkeypatch, weights)
    generator_state = torch.get_rng_state()
    tagged, forced, refused = (
        open_model("test_vit.r160_in1k"),
        open_model("test_vit", pretrained=True),
        open_model("test_vit.r160_in1k", pretrained=False),
    )
    assert tagged.origin == forced.origin == "timm weights test_vit.r160_in1k"
    for opened in (tagged, forced):
        state = opened.backbone.model.state_dict()
        assert state.keys() == {key for key in weights if not key.startswith("head.")}
        assert all(torch.equal(tensor, weights[key]) for key, tensor in state.items())
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert refused.origin.startswith("random weights")
    assert torch.equal(refused.backbone(IMAGES).pooled, open_model("test_vit").backbone(IMAGES).pooled)


@torch.inference_mode()
def test_published_weights_are_those_of_timm_at_other_sizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {key: 0.1 * torch.randn(value.shape) for key, value in timm.create_model("test_vit").state_dict().items()}
    published(monkeypatch, weights)
    opened = open_model("test_vit.r160_in1k")
    theirs = timm.create_model("test_vit", num_classes=0, dynamic_img_size=True).eval()
    theirs.load_state_dict(opened.backbone.model.state_dict())
    for size in (160, 96):
        batch = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(opened.backbone(batch).pooled, theirs(batch), rtol=1e-4, atol=1e-5)
    assert (opened.backbone.position_resampling, open_model("test_vit").backbone.position_resampling) == (
        "timm",
        "dino",
    )


def test_the_feature_of_dinov3_by_name_is_its_class_token() -> None:
    opened = open_model("vit_small_patch16_dinov3")
    assert opened.backbone.timm_arguments["global_pool"] == "token"
    assert (opened.backbone.position_resampling, opened.image_size) == (None, 256)
    tokens = opened.backbone(IMAGES)
    normed = opened.backbone.model.forward_features(IMAGES)
    torch.testing.assert_close(tokens.pooled, normed[:, 0], rtol=1e-4, atol=1e-5)


def test_incomplete_published_weights_are_not_filled_up_with_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = timm.create_model("test_vit").state_dict()
    del weights["blocks.1.attn.proj.weight"]
    published(monkeypatch, weights)
    with pytest.raises(WeightsError, match=r"blocks\.1\.attn\.proj\.weight"):
        open_model("test_vit.r160_in1k")


@pytest.mark.parametrize(
    "error", [OSError("no route to host"), RuntimeError("client is closed"), ValueError("offline\nmode")]
)
def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*place: Any, **options: Any) -> State:
        raise error

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", fail)
    with pytest.raises(WeightsError, match=r"test_vit\.r160_in1k .*HF_HOME"):
        open_model("test_vit.r160_in1k")


def test_a_name_that_is_nothing_is_answered_with_close_names_and_the_three_possibilities() -> None:
    with pytest.raises(WeightsError, match="is no model") as caught:
        open_model("vit_smal_patch16_224")
    assert "'vit_small_patch16_224" in str(caught.value)
    for possibility in (
        "the folder of a massl run",
        "a weights file (.safetensors .pth .pt .bin)",
        "`timm.list_models()`",
    ):
        assert possibility in str(caught.value)
    with pytest.raises(WeightsError, match="'runs/nowhere' is no model: neither"):
        open_model("runs/nowhere")


def test_old_timm_names_are_refused_because_they_hide_their_tag() -> None:
    with pytest.raises(WeightsError, match=r"Did you mean 'vit_small_patch16_224\.dino'"):
        open_model("vit_small_patch16_224_dino")


def test_an_unknown_tag_is_answered_with_the_known_ones() -> None:
    with pytest.raises(WeightsError, match=r"'dinosaur' for vit_small_patch16_224; .*dino"):
        open_model("vit_small_patch16_224.dinosaur")


def test_a_transformer_that_pools_patches_is_read_by_its_class_token(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    build = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, **options: build(name, **{"global_pool": "avg", **small, **options})
    )
    opened = open_model("vit_tiny_patch16_224")
    assert opened.backbone.timm_arguments["global_pool"] == "token"
    state = opened.backbone.model.state_dict()
    torch.testing.assert_close(opened.backbone(IMAGES).pooled, truth(state, IMAGES, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_vit3", "pools its patch tokens"),
        ("vit_tiny_r_s16_p8_224", "convolutional stem"),
        ("poolformer_s12", "number of features"),
    ],
)
def test_models_that_cannot_be_read_are_refused_before_anything_is_fetched(name: str, message: str) -> None:
    with pytest.raises(MasslError, match=message):
        open_model(name, pretrained=True)


def test_the_number_of_heads_of_a_timm_model_can_be_chosen() -> None:
    assert open_model("vit_tiny_patch16_224", num_heads=6).backbone.model.blocks[0].attn.num_heads == 6
    with pytest.raises(RecipeError, match="timm cannot build resnet18"):
        open_model("resnet18", num_heads=6)


# ---- fingerprints and names ------------------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_any_weight_and_with_the_heads() -> None:
    model = create_timm_model(TINY)
    before = model_fingerprint(model, arguments=TINY)
    assert model_fingerprint(create_timm_model(TINY), arguments=dict(reversed(TINY.items()))) == before
    assert model_fingerprint(create_timm_model({**TINY, "num_heads": 4}), arguments={**TINY, "num_heads": 4}) != before
    seen = {before}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] = torch.nextafter(parameter.view(-1)[-1], torch.tensor(torch.inf))
        seen.add(model_fingerprint(model, arguments=TINY))
    assert len(seen) == 1 + len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "options", "architecture"),
    [
        ("vit_small_patch16_224", {}, "ViT-S/16"),
        ("vit_base_patch16_224", {}, "ViT-B/16"),
        ("vit_base_patch16_224", {"patch_size": 8}, "ViT-B/8"),
        ("vit_small_patch16_224", {"depth": 3}, "vit_small_patch16_224"),
        ("resnet18", {}, "resnet18"),
    ],
)
def test_the_architecture_has_the_name_of_the_literature(name: str, options: dict[str, Any], architecture: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=0, **options)
    backbone = Backbone(model, timm_arguments={"model_name": name, **options})
    loaded = LoadedModel(backbone=backbone, name="", origin="", fingerprint="", image_size=224, mean=MEAN, std=STD)
    assert loaded.architecture == architecture
