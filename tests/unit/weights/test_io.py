from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer

from massl.config import MasslError
from massl.digests import DIGEST_KEY
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.facts import WeightsError
from massl.weights.io import BACKBONE_FILE, backbone_bytes, load_backbone, read_safetensors

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
VIT = BackboneSettings(
    name="vit_tiny_patch16_224", image_size=16, patch_size=8, timm_options={"embed_dim": 24, "depth": 2, "num_heads": 2}
)
RESNET = BackboneSettings(name="resnet18", timm_options={"drop_rate": 0.0})


def write_run(folder: Path, settings: BackboneSettings, *, crop_ratio: float = 0.875) -> torch.nn.Module:
    backbone = build_backbone(settings, seed=3).eval()
    content = backbone_bytes(
        backbone.model,
        timm_arguments=backbone.timm_arguments,
        mean=MEAN,
        std=STD,
        image_size=32,
        crop_ratio=crop_ratio,
    )
    (folder / BACKBONE_FILE).write_bytes(content)
    return backbone


@pytest.mark.parametrize("settings", [VIT, RESNET], ids=["transformer", "convolutional"])
def test_a_backbone_comes_back_as_a_timm_model_with_the_same_features(
    tmp_path: Path, settings: BackboneSettings
) -> None:
    backbone, images = write_run(tmp_path, settings), torch.randn(2, 3, 16, 16)
    for model, _ in (load_backbone(tmp_path), load_backbone(str(tmp_path / BACKBONE_FILE))):
        assert not model.training
        torch.testing.assert_close(model(images), backbone(images).pooled, rtol=1e-5, atol=1e-6)


def test_the_model_says_how_its_images_are_normalised(tmp_path: Path) -> None:
    write_run(tmp_path, VIT)
    model, transform = load_backbone(tmp_path)
    assert (transform.mean, transform.std) == (MEAN, STD)
    assert (model.default_cfg["mean"], model.default_cfg["std"]) == (MEAN, STD)
    assert timm.create_model("vit_tiny_patch16_224").default_cfg["mean"] != MEAN  # timm's own is left alone


@pytest.mark.parametrize("settings", [VIT, RESNET], ids=["transformer", "convolutional"])
def test_the_model_says_for_which_size_it_was_trained(tmp_path: Path, settings: BackboneSettings) -> None:
    write_run(tmp_path, settings)
    assert timm.data.resolve_data_config(model=load_backbone(tmp_path).model)["input_size"] == (3, 32, 32)


def test_timm_finds_crop_and_filter_too(tmp_path: Path) -> None:
    write_run(tmp_path, VIT, crop_ratio=0.8)
    model, transform = load_backbone(tmp_path, image_size=24)
    found = timm.data.resolve_model_data_config(model)
    assert (found["input_size"], found["crop_pct"], found["interpolation"]) == ((3, 24, 24), 0.8, "bicubic")
    assert (transform.image_size, transform.crop_ratio) == (24, 0.8)


def without(path: Path, *keys: str) -> None:
    """Rewrite a backbone file as if it had been written before it had these keys."""
    tensors, metadata = read_safetensors(path)
    save_file(tensors, path, {key: value for key, value in metadata.items() if key not in (DIGEST_KEY, *keys)})


@pytest.mark.parametrize(("settings", "size"), [(VIT, 16), (RESNET, 224)], ids=["transformer", "convolutional"])
def test_older_files_have_the_size_of_their_model_and_the_published_crop(
    tmp_path: Path, settings: BackboneSettings, size: int
) -> None:
    write_run(tmp_path, settings, crop_ratio=1.0)
    without(tmp_path / BACKBONE_FILE, "image_size", "crop_ratio", "position_resampling")
    model, transform = load_backbone(tmp_path)
    assert model.default_cfg["input_size"] == (3, size, size)
    assert (transform.image_size, transform.crop_ratio) == (size, 224 / 256)


def test_an_unknown_rule_for_positions_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, VIT)
    without(tmp_path / BACKBONE_FILE, DIGEST_KEY)
    tensors, metadata = read_safetensors(tmp_path / BACKBONE_FILE)
    assert metadata["position_resampling"] == '"dino"'
    save_file(tensors, tmp_path / BACKBONE_FILE, {**metadata, "position_resampling": '"rotary"'})
    with pytest.raises(WeightsError, match="'rotary'"):
        load_backbone(tmp_path)


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    contents = set()
    for _ in range(8):
        write_run(tmp_path, VIT)
        contents.add((tmp_path / BACKBONE_FILE).read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("shape", [(32, 24), (16, 16), (21, 35)], ids=["other", "own", "not whole patches"])
def test_a_transformer_takes_images_of_other_sizes(tmp_path: Path, shape: tuple[int, int]) -> None:
    backbone, images = write_run(tmp_path, VIT), torch.randn(1, 3, *shape)
    model = load_backbone(tmp_path).model
    torch.testing.assert_close(model(images), backbone(images).pooled, rtol=1e-5, atol=1e-6)


def test_a_model_of_another_size_is_timms_own_for_that_size(tmp_path: Path) -> None:
    backbone, images = write_run(tmp_path, VIT), torch.randn(2, 3, 40, 40)
    model = load_backbone(tmp_path, image_size=40).model
    assert type(model) is VisionTransformer
    assert model.pos_embed.shape == (1, 26, 24)
    torch.testing.assert_close(model(images), backbone(images).pooled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [-8, 0, 20])
def test_an_impossible_size_is_refused(tmp_path: Path, size: int) -> None:
    write_run(tmp_path, VIT)
    with pytest.raises(MasslError, match=f"image_size.*{size}"):
        load_backbone(tmp_path, image_size=size)


def test_a_student_with_drop_path_is_saved_under_plain_keys_too(tmp_path: Path) -> None:
    backbone = build_backbone(VIT, seed=0, drop_path_rate=0.3)
    (tmp_path / BACKBONE_FILE).write_bytes(
        backbone_bytes(backbone.model, timm_arguments=backbone.timm_arguments, mean=MEAN, std=STD, image_size=32)
    )
    assert load_backbone(tmp_path).model.state_dict().keys() == build_backbone(VIT, seed=0).model.state_dict().keys()


def test_the_file_loads_strictly_into_a_model_that_timm_alone_has_built(tmp_path: Path) -> None:
    backbone, images = write_run(tmp_path, VIT), torch.randn(2, 3, 16, 16)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=0
    )
    model.load_state_dict(load_file(tmp_path / BACKBONE_FILE), strict=True)
    torch.testing.assert_close(model.eval()(images), backbone(images).pooled, rtol=1e-5, atol=1e-6)


def test_loading_leaves_the_global_random_generator_alone(tmp_path: Path) -> None:
    write_run(tmp_path, VIT)
    state = torch.get_rng_state()
    load_backbone(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_without_a_backbone_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"backbone\.safetensors does not exist"):
        load_backbone(tmp_path)
    with pytest.raises(WeightsError, match="nowhere does not exist"):
        load_backbone(tmp_path / "nowhere")


def test_a_file_of_someone_else_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(WeightsError, match="was not written by massl"):
        load_backbone(tmp_path / "foreign.safetensors")


@pytest.mark.parametrize("content", [b"", b"no safetensors at all", b"\xff" * 64], ids=["empty", "text", "bytes"])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / BACKBONE_FILE).write_bytes(content)
    with pytest.raises(WeightsError, match="cannot read"):
        load_backbone(tmp_path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, VIT)
    content = (tmp_path / BACKBONE_FILE).read_bytes()
    (tmp_path / BACKBONE_FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match="cannot read"):
        load_backbone(tmp_path)


@pytest.mark.parametrize("place", ["a weight", "the metadata", "the digest"])
def test_a_changed_bit_is_refused_with_what_to_do(tmp_path: Path, place: str) -> None:
    write_run(tmp_path, VIT)
    path = tmp_path / BACKBONE_FILE
    content = bytearray(path.read_bytes())
    content[
        {"a weight": -100, "the metadata": content.index(b"crop_ratio"), "the digest": content.index(b"sha256:") + 9}[
            place
        ]
    ] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=rf"cannot read {path}: .*digest.*massl pretrain"):
        load_backbone(tmp_path)


def test_a_file_written_again_without_the_digest_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, VIT)
    path = tmp_path / BACKBONE_FILE
    read, metadata = read_safetensors(path)
    tensors = {name: tensor.clone() for name, tensor in read.items()}  # old safetensors map the file, written to below
    without(path, DIGEST_KEY)
    again, _ = read_safetensors(path)
    assert DIGEST_KEY in metadata
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
