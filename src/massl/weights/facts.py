"""The metadata of a backbone file: what builds its model, and how its images are prepared.

A file may come from a stranger, so each value is checked before it is used.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from massl.config import MasslError
from massl.data.evaluation.views import MAX_SIDE, PUBLISHED_CROP_RATIO
from massl.nn.positions import RESAMPLING_RULE, RESAMPLING_RULES

_MAX_NUMBER = 1e30  # larger ones are infinite in float32, or soon will be
_MAX_SIGNS = 200  # of a text from a file in a message


class WeightsError(MasslError, ValueError):
    """A weights file is missing or unsuitable; the message says what to do."""


def for_message(text: str) -> str:
    """Text from a file, short and without signs that control a terminal."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MAX_SIGNS else f"{text[:_MAX_SIGNS]} ..."


@dataclass(frozen=True, kw_only=True)
class BackboneFacts:
    """The metadata of a file written by massl."""

    timm_arguments: dict[str, Any]  # these build the empty model; `create_timm_model` checks them
    mean: tuple[float, float, float]  # of the training images
    std: tuple[float, float, float]
    image_size: int | None  # side of the training views; None in older files
    crop_ratio: float  # centre crop / shorter side of the run's probes; older files: the published one
    origin: str | None  # of weights that `massl import` wrote: "teacher of the DINO checkpoint ..."


def read_facts(path: Path, metadata: Mapping[str, str]) -> BackboneFacts | None:
    """The facts in the metadata of a file; None for files that massl did not write."""
    if "timm" not in metadata:
        return None
    try:
        timm_arguments, mean, std = (json.loads(metadata[key]) for key in ("timm", "mean", "std"))
        image_size = json.loads(metadata.get("image_size", "null"))
        crop_ratio = json.loads(metadata.get("crop_ratio", str(PUBLISHED_CROP_RATIO)))
        rule = json.loads(metadata.get("position_resampling", f'"{RESAMPLING_RULE}"'))
    except (KeyError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"the metadata of {path} are damaged ({for_message(repr(error))}); write the file again"
        ) from error
    size_fits = type(image_size) is int and 0 < image_size <= MAX_SIDE
    expected = {
        "timm, a mapping with the name of the model": isinstance(timm_arguments, dict) and _has_names(timm_arguments),
        "mean, three numbers": are_three_numbers(mean),
        "std, three numbers above 0": are_three_numbers(std) and min(std) > 0,
        f"image_size, a whole number up to {MAX_SIDE}": image_size is None or size_fits,
        "crop_ratio, a number above 0 and up to 1": is_number(crop_ratio) and 0 < crop_ratio <= 1,
        "position_resampling, a word": isinstance(rule, str),
    }
    wrong = [what for what, fits in expected.items() if not fits]
    if wrong:
        raise WeightsError(f"the metadata of {path} are damaged: expected {'; '.join(wrong)}; write the file again")
    if rule not in RESAMPLING_RULES:
        raise WeightsError(
            f"{path} resamples position embeddings by the rule {for_message(rule)!r}, which this version of massl does "
            "not have; install a newer one"
        )
    if rule != RESAMPLING_RULE:
        timm_arguments = {**timm_arguments, "position_resampling": rule}
    return BackboneFacts(
        timm_arguments=timm_arguments,
        mean=tuple(mean),
        std=tuple(std),
        image_size=image_size,
        crop_ratio=crop_ratio,
        origin=metadata.get("origin"),
    )


def _has_names(timm_arguments: dict[str, Any]) -> bool:
    return isinstance(timm_arguments.get("model_name"), str) and timm_arguments.get("stem", "") in ("", "small")


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_NUMBER  # not math.isfinite: it fails for large integers


def are_three_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_number, value))
