"""Damaged files of ours: each damage is noticed, or harmless. A tensor that differs in a bit is wrong."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massl.data.evaluation.views import CentreView
from massl.data.sources.array import ArraySource
from massl.digests import DIGEST_KEY
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.nn.backbone import build_backbone
from massl.ops.scoring.finite import NotFinite
from massl.training.checkpoint import CheckpointError, CheckpointStore
from massl.weights.io import WeightsError, backbone_bytes, read_safetensors
from massl.weights.models import LoadedModel
from tests.reliability.frame import Case, Lost, Wrong, fault_class, made_once
from tests.reliability.world import difference
from tests.unit.ops.scoring.test_finite import SCORERS, rows

_PAGE = 4096

# ---- damage ----------------------------------------------------------------------------------------------------------

Damage = Callable[[bytes, bytes, np.random.Generator], bytes]  # content, content of another such file


def _flip_bits(content: bytes, num_bits: int, random: np.random.Generator) -> bytes:
    changed = np.frombuffer(content, dtype=np.uint8).copy()
    for place in random.choice(len(content), num_bits, replace=False):
        changed[place] ^= 1 << random.integers(8)
    return changed.tobytes()


def _stretch(content: bytes, random: np.random.Generator) -> slice:
    """A page or less: what a disk loses at once."""
    size = int(random.choice([1, 4, 64, 512, _PAGE]))
    begin = int(random.integers(max(1, len(content) - size)))
    return slice(begin, begin + size)


def _replace(content: bytes, part: slice, by: bytes) -> bytes:
    return content[: part.start] + by + content[part.stop :]


def _zero(content: bytes, _: bytes, random: np.random.Generator) -> bytes:
    part = _stretch(content, random)
    return _replace(content, part, bytes(len(content[part])))


def _mix(content: bytes, other: bytes, random: np.random.Generator) -> bytes:
    part = _stretch(content, random)
    return _replace(content, part, other[part])


def _swap_halves(content: bytes, other: bytes, random: np.random.Generator) -> bytes:
    at = int(random.integers(len(content)))
    return content[:at] + other[at:]


def _garble(content: bytes, _: bytes, random: np.random.Generator) -> bytes:
    part = _stretch(content, random)
    return _replace(content, part, random.bytes(len(content[part])))


def _shift(content: bytes, _: bytes, random: np.random.Generator) -> bytes:
    at = int(random.integers(len(content)))
    return content[:at] + content[at + 1 :] if random.random() < 0.5 else content[:at] + b"\0" + content[at:]


DAMAGES: list[Damage] = [
    lambda content, _, random: _flip_bits(content, 1, random),
    lambda content, _, random: _flip_bits(content, int(random.integers(2, 9)), random),
    lambda content, _, random: content[: int(random.integers(len(content)))],
    _zero,
    _mix,
    _swap_halves,
    _garble,
    _shift,
]


def _of_directory(content: bytes, _: bytes, random: np.random.Generator) -> bytes:
    """Bits of the attributes of one entry in the directory of a zip file."""
    entries = [at for at in range(len(content)) if content.startswith(b"PK\1\2", at)]
    at = int(random.choice(entries)) + 38 + int(random.integers(4))
    return _replace(content, slice(at, at + 1), bytes([content[at] ^ (1 << int(random.integers(8)))]))


def _folder_bit(content: bytes, _: bytes, random: np.random.Generator) -> bytes:
    """The bit for which torch.load returns whatever is in memory."""
    entries = [at for at in range(len(content)) if content.startswith(b"PK\1\2", at)]
    at = int(random.choice(entries)) + 38
    return _replace(content, slice(at, at + 1), bytes([content[at] | 0x10]))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weights = {f"student.{name}": torch.randn(64, 16, generator=generator) for name in "abc"}
    averages = {name: torch.randn(64, 16, generator=generator) for name in ("exp_avg", "exp_avg_sq")}
    return {
        "step": step,
        "recipe": '{"trainer.seed": 0}',
        "data": "",
        "method": {**weights, "memory.cursor": torch.tensor(step)},
        "optimizer": {"state": {0: averages}, "param_groups": [{"params": [0], "betas": (0.9, 0.999)}]},
    }


_STATES = {step: _state(step) for step in (10, 20)}
_LIKE = {"step": 0, "recipe": "", "method": _STATES[10]["method"], "optimizer": {"state": {}, "param_groups": []}}


@functools.cache
def _checkpoints() -> dict[int, bytes]:
    def make(folder: Any) -> None:
        store = CheckpointStore(folder, keep_last=2)
        for step, state in _STATES.items():
            store.save(step, state, milestone_every=0)

    store = CheckpointStore(made_once("two checkpoints", make), keep_last=2)
    return {step: store.path(step).read_bytes() for step in _STATES}


@fault_class("damaged checkpoints")
def damaged_checkpoints(case: Case) -> None:
    damage = case.pick([*DAMAGES, _of_directory, _folder_bit])
    damaged = [20, 10] if case.random.random() < 0.2 else [20]
    store = CheckpointStore(case.folder, keep_last=2)
    contents = {**_checkpoints()}
    for step in damaged:
        contents[step] = damage(contents[step], _checkpoints()[30 - step], case.random)
    for step, content in contents.items():
        store.path(step).write_bytes(content)
    warnings: list[str] = []
    try:
        with case.recovery():
            state = store.load_latest(warnings.append, like=_LIKE)
    except CheckpointError:
        if len(damaged) == 1:
            raise Lost("the intact checkpoint was not taken") from None
        state = None
    else:
        if state is None or (found := difference(state, _STATES[int(state["step"])], "state")):
            raise Wrong(f"a damaged checkpoint was loaded: {found}")
        if state["step"] == 10 and not warnings:
            raise Wrong("the older checkpoint was taken without a word")
    if any(str(store.path(step)) not in text for step, text in zip((20, 10), warnings, strict=False)):
        raise Wrong(f"the message does not name the file: {warnings}")
    if {step: store.path(step).read_bytes() for step in store.steps()} != contents:
        raise Lost("a checkpoint was deleted or changed by reading it")


# ---- backbone files --------------------------------------------------------------------------------------------------


@functools.cache
def _backbones() -> list[bytes]:
    def content(seed: int) -> bytes:
        backbone = _backbone(seed)
        return backbone_bytes(
            backbone.model,
            timm_arguments=backbone.timm_arguments,
            mean=(0.5, 0.5, 0.5),
            std=(0.2, 0.2, 0.2),
            image_size=16,
        )

    return [content(0), content(1)]


def _backbone(seed: int) -> Any:
    from massl.nn.backbone import BackboneSettings

    options = {"embed_dim": 8, "depth": 1, "num_heads": 2}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=16, patch_size=4, timm_options=options)
    return build_backbone(settings, seed=seed)


@fault_class("damaged backbone files")
def damaged_backbones(case: Case) -> None:
    path = case.folder / "backbone.safetensors"
    path.write_bytes(_backbones()[0])
    expected, about = read_safetensors(path)
    path.write_bytes(case.pick(DAMAGES)(*_backbones(), case.random))
    try:
        tensors, metadata = read_safetensors(path)
    except WeightsError as error:
        if str(path) not in str(error):
            raise Wrong(f"the message does not name the file: {error}") from error
        return
    metadata.pop(DIGEST_KEY, None)
    about.pop(DIGEST_KEY)
    if found := difference(tensors, expected, "tensors"):
        raise Wrong(f"a damaged file was loaded: {found}")
    if {key: about[key] for key in about if key in metadata} != {
        key: metadata[key] for key in about if key in metadata
    }:
        raise Wrong("damaged metadata were read")


# ---- the cache of features -------------------------------------------------------------------------------------------

_VIEW = CentreView(size=16)
_IMAGES = ArraySource(
    name="noise",
    pixels=np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8),
    labels=np.arange(40) % 4,
    class_names=tuple("abcd"),
    key_prefix="noise",
)


@dataclass(frozen=True, kw_only=True)
class _FixedExtractor(Extractor):
    """Has its features ready, so that a case takes a millisecond."""

    # the same signature as that of Extractor
    def _extract(self, source: Any, indices: Tensor, view: Any, feature: str) -> tuple[Tensor, dict[int, str]]:
        seed = len(feature)  # "cls" and "pooled" differ
        return torch.randn(len(indices), 8, generator=torch.Generator().manual_seed(seed)), {}


@functools.cache
def _model() -> LoadedModel:
    side = (0.5, 0.5, 0.5)
    return LoadedModel(
        backbone=_backbone(0), name="tiny", origin="random", fingerprint="0", image_size=16, mean=side, std=side
    )


@fault_class("damaged feature caches")
def damaged_caches(case: Case) -> None:
    lines: list[str] = []
    extractor = _FixedExtractor(
        model=_model(),
        settings=ExtractionSettings(num_workers=0),
        device=torch.device("cpu"),
        cache=case.folder,
        say=lines.append,
    )
    expected, _ = (extractor.features(_IMAGES, view=_VIEW, feature=name).rows for name in ("cls", "pooled"))
    own, other = (
        case.folder / extractor.cache_key(_IMAGES, _VIEW, name) / "000000000.safetensors" for name in ("cls", "pooled")
    )
    intact = own.read_bytes()
    own.write_bytes(case.pick(DAMAGES)(intact, other.read_bytes(), case.random))
    with case.recovery():
        found = extractor.features(_IMAGES, view=_VIEW, feature="cls").rows
    if not torch.equal(found, expected):
        raise Wrong("damaged features were taken")
    if lines and (len(lines) > 1 or str(own) not in lines[0]):
        raise Wrong(f"one line should name the file: {lines}")
    if lines and own.read_bytes() != intact:
        raise Wrong("the damaged file is still there")


# ---- features that are not finite ------------------------------------------------------------------------------------


@fault_class("features that are not finite")
def not_finite(case: Case) -> None:
    name = case.pick(list(SCORERS))
    given = [rows(2 * case.number), rows(2 * case.number + 1)]
    broken = given[int(case.random.integers(2))]
    lines = case.random.choice(len(broken), int(case.random.integers(1, 5)), replace=False)
    for line in lines:
        broken[line, int(case.random.integers(broken.shape[1]))] = float(case.random.choice([np.nan, np.inf, -np.inf]))
    try:
        SCORERS[name](given[0], given[1])
    except NotFinite as error:
        if f"{len(lines)} of {len(broken)} rows" not in str(error):
            raise Wrong(f"{len(lines)} rows are not finite, and the message says: {error}") from error
        return
    raise Wrong(f"{name} scored rows that are not finite")
