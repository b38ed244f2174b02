"""Weight files and recipes from strangers: no code, no network, no endless model, and an error that names the file."""

import gzip
import io
import json
import pickle
import re
import socket
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import massl
from massl.config import RecipeError
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.facts import WeightsError
from massl.weights.io import backbone_bytes, load_backbone, load_strictly, read_pickled
from massl.weights.models import open_model

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
OPTIONS: dict[str, int | float | bool | str] = {"embed_dim": 24, "depth": 2, "num_heads": 2}
TINY = BackboneSettings(name="vit_tiny_patch16_224", image_size=16, patch_size=8, timm_options=OPTIONS)


class _Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def written(path: Path, *, timm: Any = None, tensors: dict[str, Tensor] | None = None, **facts: Any) -> Path:
    """A backbone file of massl; `timm` and `facts` replace entries of its metadata."""
    backbone = build_backbone(TINY, seed=0)
    content = backbone_bytes(
        backbone.model, timm_arguments=backbone.timm_arguments, mean=MEAN, std=STD, image_size=16, crop_ratio=1.0
    )
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:end])["__metadata__"]
    metadata.pop("massl_digest", None)  # a stranger may leave it out
    arguments = {**json.loads(metadata["timm"]), **timm} if isinstance(timm, dict) else timm
    metadata |= {key: json.dumps(value) for key, value in facts.items()}
    metadata |= {} if timm is None else {"timm": json.dumps(arguments)}
    weights = {**safetensors.torch.load(content), **(tensors or {})}
    path.write_bytes(safetensors.torch.save(weights, metadata))
    return path


def hostile_options(folder: Path) -> dict[str, dict[str, Any]]:
    pickled = str(folder / "evil.pth")
    return {
        "checkpoint_path": {"checkpoint_path": pickled},
        "pretrained_cfg": {"pretrained": True, "pretrained_cfg": {"file": pickled}},
        "pretrained_cfg_overlay": {"pretrained": True, "pretrained_cfg_overlay": {"url": "http://localhost:9/x.pth"}},
        "cache_dir": {"cache_dir": str(folder)},
        "features_only": {"features_only": True},
        "depth": {"depth": 100_000},
        "embed_dim": {"embed_dim": 1_000_000},
        "img_size": {"img_size": 10**9},
        "model_name": {"model_name": "hf-hub:someone/something"},
        "timm has no model": {"model_name": f"local-dir:{folder}"},
        "vit_tiny_patch16_224": {"model_name": "vit_tiny_patch16_224./resnet18"},
        "mlp_ratio": {"mlp_ratio": float("inf")},
        "attn_ratio": {"attn_ratio": 10**400},
        "embed_layer": {"embed_layer": "builtins.eval"},
        "act_layer": {"act_layer": "os.system"},
    }


def write_pickle(folder: Path) -> None:
    folder.joinpath("evil.pth").write_bytes(pickle.dumps(_Touch(folder / "touched")))


@pytest.mark.parametrize("key", hostile_options(Path("x")).keys())
def test_metadata_reach_timm_only_as_architecture(key: str, tmp_path: Path) -> None:
    write_pickle(tmp_path)
    file = written(tmp_path / "x.safetensors", timm=hostile_options(tmp_path)[key])
    for read in (load_backbone, open_model):
        with pytest.raises(WeightsError, match=key if key != "model_name" else "hf-hub") as caught:
            read(file)
        assert str(file) in str(caught.value)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "key", ["checkpoint_path", "pretrained_cfg", "cache_dir", "depth", "embed_dim", "act_layer", "mlp_ratio"]
)
def test_a_recipe_reaches_timm_only_with_architecture(key: str, tmp_path: Path) -> None:
    write_pickle(tmp_path)
    options = {**OPTIONS, **hostile_options(tmp_path)[key]}
    settings = BackboneSettings.model_construct(name="vit_tiny_patch16_224", timm_options=options, stem="")
    with pytest.raises(RecipeError, match=rf"backbone\.timm_options\.{key}"):
        build_backbone(settings, seed=0)
    assert not (tmp_path / "touched").exists()


def test_many_parameters_are_refused_before_they_are_made() -> None:
    settings = BackboneSettings(
        name="vit_tiny_patch16_224", timm_options={"depth": 200, "embed_dim": 8192, "num_heads": 64}
    )
    with pytest.raises(RecipeError, match="parameters"):
        build_backbone(settings, seed=0)


@pytest.mark.parametrize("arguments", [{"model_name": "vit_giant_patch14_224"}, {"depth": 200, "embed_dim": 1024}])
def test_a_small_file_cannot_ask_for_a_big_model(arguments: dict[str, Any], tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", timm={"depth": 24, "embed_dim": 1024, "num_heads": 16, **arguments})
    with pytest.raises(WeightsError, match="parameters") as caught:
        load_backbone(file)
    assert str(file) in str(caught.value)


def test_a_published_start_of_an_older_run_is_not_loaded_again(tmp_path: Path) -> None:
    # the weights come from the file
    model, _ = load_backbone(written(tmp_path / "x.safetensors", timm={"pretrained": True}))
    expected = build_backbone(TINY, seed=0).model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "facts",
    [
        {"timm": []},
        {"timm": {"model_name": 3}},
        {"timm": {"model_name": ["vit_tiny_patch16_224"]}},
        {"timm": {"stem": {"small": 1}}},
        {"mean": 0.5},
        {"mean": [0.5, 0.5]},
        {"mean": ["a", "b", "c"]},
        {"std": [0.0, 1.0, 1.0]},
        {"std": [float("nan"), 1.0, 1.0]},
        {"image_size": "big"},
        {"image_size": -4},
        {"image_size": 7},  # less than a patch
        {"image_size": 10**12},
        {"crop_ratio": 0},
        {"crop_ratio": 10**400},
        {"mean": [10**400, 0, 0]},
        {"crop_ratio": None},
        {"position_resampling": {"a": 1}},
    ],
)
def test_metadata_of_another_shape_are_named(facts: dict[str, Any], tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", **facts)
    for read in (load_backbone, open_model):
        with pytest.raises(WeightsError, match=rf"{file.name}.*{'|'.join(facts)}"):
            read(file)


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    weight = torch.zeros(24)
    weight[3] = torch.nan
    file = written(tmp_path / "x.safetensors", tensors={"norm.weight": weight})
    for read in (load_backbone, open_model):
        with pytest.raises(WeightsError, match=r"norm\.weight.*not finite") as caught:
            read(file)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_weights_of_another_kind_of_number_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", tensors={"norm.weight": torch.ones(24, dtype=dtype)})
    with pytest.raises(WeightsError, match=r"norm\.weight"):
        load_backbone(file)


def test_half_precision_weights_still_open(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", tensors={"norm.weight": torch.ones(24, dtype=torch.bfloat16)})
    assert load_backbone(file).model.norm.weight.dtype == torch.float32  # type: ignore[union-attr]


def test_names_from_a_file_cannot_control_the_terminal_or_fill_it() -> None:
    model = torch.nn.Linear(1, 1)
    strange = {f"\x1b[2Jkey {number}": torch.zeros(1) for number in range(10_000)}
    with pytest.raises(WeightsError, match="more") as caught:
        load_strictly(model, {**model.state_dict(), **strange}, origin="x")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({"patch_embed.proj.weight": torch.zeros(0, 3, 16, 16)}, "patches"),
        ({"patch_embed.proj.weight": torch.zeros(24, 3, 0, 0)}, "patches"),
        ({f"blocks.{'9' * 5000}.x": torch.zeros(1)}, "blocks"),
        ({"blocks.99999.norm1.weight": torch.zeros(1)}, "depth"),
        ({"pos_embed": torch.zeros(1).expand(1, 1 + 10**8, 24)}, "img_size"),
        ({"pos_embed": torch.zeros(1, 5, 24, device="meta")}, "pos_embed"),
        ({"pos_embed": torch.zeros(1, 5, 24).to_sparse()}, "pos_embed"),
    ],
)
def test_strange_tensors_of_other_projects_are_named(entries: dict[str, Tensor], word: str, tmp_path: Path) -> None:
    state = {**build_backbone(TINY, seed=0).model.state_dict(), **entries}
    file = tmp_path / "x.pth"
    torch.save(state, file)
    with pytest.raises(WeightsError, match=word) as caught:
        open_model(file, num_heads=2)
    assert str(file) in str(caught.value)


def test_an_archive_that_unpacks_to_more_than_its_size_is_refused(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.pth", tmp_path / "packed.pth"
    torch.save({"x": torch.zeros(1_000_000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    assert packed.stat().st_size < 100_000
    with pytest.raises(WeightsError, match="compressed"):
        read_pickled(packed)
    assert read_pickled(plain)["x"].shape == (1_000_000,)


def _tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("photos/a.jpg"))
    return content.getvalue()


def _zip(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "x" * 40)
    return content.getvalue()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (_tar(), "a tar archive, which begins with photos/a.jpg; unpack it and give the weights file in it"),
        (_zip("a.txt"), "a zip archive of a.txt; unpack it and give the weights file in it"),
        (_zip("net/constants.pkl"), "a TorchScript program; .*state_dict"),
        (gzip.compress(b"weights"), "packed by gzip; unpack it"),
        (b"<!DOCTYPE html><html>Not found</html>", "a web page; download the weights file itself"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS .*git lfs pull"),
    ],
    ids=["tar", "zip", "TorchScript", "gzip", "web page", "pointer"],
)
def test_a_file_of_another_kind_is_named_with_what_to_do(
    content: bytes, found: str, suffix: str, tmp_path: Path
) -> None:
    file = tmp_path / f"x{suffix}"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=rf"^cannot read {file}: it is {found}[^\n]*$"):
        open_model(file)


@pytest.mark.parametrize(
    "content", [bytes(4096), b"\xff\xd8\xff\xe0" + bytes(99), pickle.dumps({"x": 1})], ids=["zeros", "photo", "pickle"]
)
def test_a_file_that_is_no_checkpoint_is_told_without_words_of_torch(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.pth"
    file.write_bytes(content)
    told = "it is damaged, incomplete or not a PyTorch checkpoint; download it again"
    with pytest.raises(WeightsError, match=f"^cannot read {file}: {told}$"):
        open_model(file)


def test_weights_in_the_other_format_are_told_which_ending_they_need(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "x.pth")
    with pytest.raises(WeightsError, match=r"format safetensors; let its name end in \.safetensors"):
        open_model(tmp_path / "x.pth")


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}" * 40])
def test_a_file_that_is_no_safetensors_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    for read in (load_backbone, open_model):
        with pytest.raises(WeightsError, match=r"x\.safetensors"):
            read(file)


def test_a_folder_named_as_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run" / "backbone.safetensors").mkdir(parents=True)
    with pytest.raises(WeightsError, match=r"backbone\.safetensors"):
        load_backbone(tmp_path / "run")


def test_timm_builds_models_in_two_places_only() -> None:
    # create_timm_model checks the options; _load_published loads what the user named; exports open what they wrote
    source = Path(massl.__file__).parent
    places = [
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for _ in re.findall(r"timm\.create_model\(", path.read_text())
        if path.parent.name != "exports"
    ]
    assert sorted(places) == ["nn/timm_models.py", "nn/timm_models.py", "weights/models.py"]
    others = r"from timm.* import .*(create_model|load_checkpoint|load_pretrained)|timm\.models\.load"
    assert not [path for path in source.rglob("*.py") if re.search(others, path.read_text())]


def test_a_header_of_many_megabytes_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    entry = b'"%08d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(entry % number for number in range(300_000)) + b"}"
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsError, match=r"header of 1[5-9] MiB"):
        load_backbone(path)


@pytest.mark.parametrize("num_bytes", [0, 65_000, 65_600, 69_000])
def test_bytes_after_a_compressed_archive_do_not_hide_it(tmp_path: Path, num_bytes: int) -> None:
    torch.save({"x": torch.zeros(1 << 20)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with (tmp_path / "bomb.pth").open("ab") as file:
        file.write(bytes(num_bytes))
    with pytest.raises(WeightsError, match=r"bomb\.pth"):
        read_pickled(tmp_path / "bomb.pth")


def test_a_file_of_countless_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    safetensors.torch.save_file({f"t{number}": torch.zeros(0) for number in range(20_001)}, path)
    with pytest.raises(WeightsError, match="20,001 tensors"):
        load_backbone(path)
