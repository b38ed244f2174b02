"""Weights files and backbone sections of recipes from strangers: changed bytes, odd headers, hostile options."""

import contextlib
import functools
import io
import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from torch import nn

from massl.commands.recipe import PretrainRecipe
from massl.config import MasslError, RecipeError, validate
from massl.nn.backbone import BackboneSettings, build_backbone, refuse_published_weights
from massl.weights.io import backbone_bytes, load_backbone
from massl.weights.models import open_model
from tests.reliability.frame import Case, Wrong, fault_class
from tests.reliability.mutations import mutated
from tests.unit.weights.foreign_states import convnext, dinov2, dinov3

_SETTINGS = BackboneSettings(
    name="vit_tiny_patch16_224",
    image_size=16,
    patch_size=8,
    timm_options={"embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 2},
)
_STRANGE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        7,
        2**31,
        2**63,
        10**30,
        100_000,
        1e308,
        0.5,
        -0.5,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "avg",
        "token",
        "jax",
        "gelu",
        "os.system",
        "/etc/passwd",
        "http://localhost:9/x",
        "\x1b[2J",
        "a" * 5000,
    ),
    *([], [1], [8, 8], ["x"], {}, {"a": 1}, {"url": "http://localhost:9/x.pth"}, {"file": "/tmp/x.pth"}, [[[[]]]]),
)
_KEYS = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "features_only"),
    *("scriptable", "exportable", "no_jit", "out_indices", "feature_cls", "kwargs_filter", "pretrained_strict"),
    *(
        "img_size",
        "patch_size",
        "in_chans",
        "num_classes",
        "embed_dim",
        "depth",
        "num_heads",
        "mlp_ratio",
        "reg_tokens",
    ),
    *(
        "init_values",
        "class_token",
        "global_pool",
        "pos_embed",
        "weight_init",
        "act_layer",
        "norm_layer",
        "embed_layer",
    ),
    *(
        "embed_layer",
        "block_fn",
        "attn_layer",
        "mlp_layer",
        "qkv_bias",
        "qk_norm",
        "dynamic_img_size",
        "drop_path_rate",
    ),
    *(
        "device",
        "dtype",
        "stem",
        "window_size",
        "model_name",
        "strict_img_size",
        "fc_norm",
        "__class__",
        "self",
        "",
        "a\x1b[2J",
    ),
)
_NAMES = (
    *("hf-hub:a/b", "hf_hub:a/b", "local-dir:/tmp", "timm/resnet10t", "resnet10t", "test_vit", "test_convnext"),
    *("vit_tiny_patch16_224.x", "vit_tiny_patch16_224./resnet10t", "../x", "", "a" * 5000, "vit_giant_patch14_224"),
    *("vit_tiny_patch16_224\n", "VIT_TINY_PATCH16_224", "vit_relpos_small_patch16_224", "resnet26t", "\0", "é"),
)


@functools.cache
def _original() -> tuple[nn.Module, dict[str, str], bytes]:
    """A tiny model, the metadata of its file without the digest, and the file as massl writes it."""
    backbone = build_backbone(_SETTINGS, seed=0)
    content = backbone_bytes(
        backbone.model, timm_arguments=backbone.timm_arguments, mean=(0.5,) * 3, std=(0.2,) * 3, image_size=16
    )
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    metadata.pop("massl_digest", None)
    return backbone.model, metadata, content


def _with_metadata(metadata: dict[str, str]) -> bytes:
    return safetensors.torch.save(_original()[0].state_dict(), metadata)


@functools.cache
def _foreign() -> list[dict[str, torch.Tensor]]:
    """State dicts of other projects; one number in place of a tensor of the larger network."""
    small = {key: tensor.flatten()[0].clone().expand(tensor.shape) for key, tensor in convnext().items()}
    return [dinov2(), dinov2(num_registers=4), dinov2(swiglu=True), dinov3(), dinov3(swiglu=True), small]


@functools.cache
def _files() -> list[tuple[str, bytes]]:
    """Suffix and bytes of good files, in every layout that is read."""
    model, metadata, content = _original()
    state = model.state_dict()
    found = [("safetensors", content), ("safetensors", _with_metadata(metadata)), ("safetensors", _with_metadata({}))]
    for layout in (state, {"model": state}, {"teacher": {f"module.backbone.{k}": v for k, v in state.items()}}):
        for is_zip in (True, False):
            buffer = io.BytesIO()
            torch.save(layout, buffer, _use_new_zipfile_serialization=is_zip)
            found.append(("pth", buffer.getvalue()))
    for number, layout in enumerate(_foreign()):
        buffer = io.BytesIO()
        torch.save(layout, buffer, _use_new_zipfile_serialization=number % 2 == 0)
        found.append(("pth", buffer.getvalue()))
    return found


@functools.cache
def _weights_in(suffix: str, content: bytes) -> dict[str, torch.Tensor]:
    """The weights that a good file gives."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x.{suffix}"
        path.write_bytes(content)
        return open_model(path, num_heads=2).backbone.model.state_dict()


@contextlib.contextmanager
def _no_network() -> Iterator[None]:
    def refuse(*_: object, **__: object) -> None:
        raise Wrong("a socket was opened")

    with mock.patch.object(socket, "socket", refuse), mock.patch.object(socket, "getaddrinfo", refuse):
        yield


def read_weights(path: Path) -> list[dict[str, torch.Tensor]]:
    """The weights that each reader accepts; a refusal must name the file and keep the terminal as it is."""
    accepted = []
    with _no_network():
        for read in (load_backbone, functools.partial(open_model, num_heads=2)):
            try:
                opened = read(path)
            except MasslError as error:
                if path.name not in str(error):
                    raise Wrong(f"the message does not name the file: {error}") from error
                if "\x1b" in str(error) or len(str(error)) > 10_000:
                    raise Wrong(f"the message is no text for a terminal: {str(error)[:500]!a}") from error
                continue
            model = opened.model if hasattr(opened, "model") else opened.backbone.model  # type: ignore[attr-defined]
            accepted.append(model.state_dict())
    for state in accepted:
        broken = [key for key, value in state.items() if not bool(value.isfinite().all())]
        if broken:
            raise Wrong(f"{broken[0]} is not finite")
    return accepted


@fault_class("weights files with changed bytes", mib=600, quick=60, more=400)
def changed_bytes(case: Case) -> None:
    suffix, content = case.pick(_files())
    path = case.folder / f"x.{suffix}"
    changed = mutated(content, case.random, header=1024)
    path.write_bytes(changed)
    accepted = read_weights(path)
    if changed != content and accepted and (content == _original()[2] or (suffix == "pth" and content[:2] == b"PK")):
        wanted = _weights_in(suffix, content)
        if any(not torch.equal(state[key], value) for state in accepted for key, value in wanted.items()):
            raise Wrong("other weights were loaded than were written")


@fault_class("weights files with odd headers", mib=600, quick=60, more=300)
def odd_headers(case: Case) -> None:
    """Names, types, shapes and places of tensors that do not belong together."""
    _, metadata, _ = _original()
    content = _with_metadata(metadata if case.random.random() < 0.7 else {})
    if case.number % 3 == 0:
        content = safetensors.torch.save(_foreign()[case.number // 3 % 5])
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    for _ in range(int(case.random.integers(1, 4))):
        name = str(case.random.choice([key for key in header if key != "__metadata__"] or ["x"]))
        entry = header.setdefault(name, {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
        match int(case.random.integers(8)):
            case 0:
                types = ["F64", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "C64", "F4", "X", "", None]
                entry["dtype"] = types[int(case.random.integers(len(types)))]
            case 1:
                entry["shape"] = [[], [0], [-1], [2**63], [2**32, 2**32], [1] * 70, "x", None][case.number % 8]
            case 2:
                entry["data_offsets"] = [[0, 0], [4, 0], [0, 2**63], [-4, 0], [0], "x", None, [0, len(data)]][
                    case.number % 8
                ]
            case 3:
                header[str(case.random.choice(["\x1b[2J", "", "a" * 9999, "blocks.99999.x", "head.weight"]))] = entry
            case 4:
                header.pop(name)
            case 5:
                entry["shape"] = list(reversed(entry["shape"])) if isinstance(entry.get("shape"), list) else []
            case 6:
                header["__metadata__"] = [None, [], "x", {"timm": 1}, {"timm": "[" * 9999}, {"timm": "{}"}][
                    case.number % 6
                ]
            case _:
                data = data[: int(case.random.integers(len(data) + 1))]
    text = json.dumps(header).encode()
    length = len(text) if case.random.random() < 0.9 else int(case.random.choice([0, 1, 2**20, 2**40, 2**63]))
    path = case.folder / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    read_weights(path)


@fault_class("weights files with hostile metadata", mib=600, quick=80, more=400)
def hostile_metadata(case: Case) -> None:
    _, metadata, _ = _original()
    arguments: Any = {**json.loads(metadata["timm"]), **_hostile_options(case)}
    changed = {**metadata, "timm": json.dumps(arguments)}
    if case.number % 5 == 0:
        key = str(case.random.choice(["timm", "mean", "std", "image_size", "crop_ratio", "position_resampling"]))
        changed[key] = json.dumps(_strange(case)) if case.random.random() < 0.7 else str(_strange(case))
    path = case.folder / "x.safetensors"
    path.write_bytes(_with_metadata(changed))
    wanted = _original()[0].state_dict()
    for state in read_weights(path):
        if any(key not in wanted or not torch.equal(value, wanted[key]) for key, value in state.items()):
            raise Wrong("other weights were loaded than are in the file")


@fault_class("recipes with a hostile backbone", mib=600, quick=80, more=400)
def hostile_recipe(case: Case) -> None:
    options = {**_SETTINGS.timm_options, **_hostile_options(case)}
    section: dict[str, Any] = {**_SETTINGS.model_dump(), "timm_options": options}
    if case.number % 3 == 0:
        section[str(case.random.choice(["name", "image_size", "patch_size", "stem", "drop_path_rate", "x"]))] = (
            _strange(case) if case.random.random() < 0.5 else str(case.random.choice(_NAMES))
        )
    with _no_network(), contextlib.suppress(RecipeError):
        settings = validate(PretrainRecipe, {"backbone": section}, origin="recipe.yaml").backbone
        refuse_published_weights(settings)
        build_backbone(settings, seed=0)


def _hostile_options(case: Case) -> dict[str, Any]:
    keys = [case.pick(_KEYS), *(str(key) for key in case.random.choice(_KEYS, int(case.random.integers(3))))]
    options = {key: _strange(case) for key in keys}
    if "model_name" in options:
        options["model_name"] = str(case.random.choice(_NAMES))
    return options


def _strange(case: Case) -> Any:
    return _STRANGE[int(case.random.integers(len(_STRANGE)))]
