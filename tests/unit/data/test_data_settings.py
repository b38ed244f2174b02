import json

import pytest

from massl.config import RecipeError, validate
from massl.data.settings import DataSettings
from massl.data.sources.rules import PixelRanges


def test_every_setting_describes_itself() -> None:
    assert all(field.description for field in DataSettings.model_fields.values())


@pytest.mark.parametrize(
    ("key", "value"), [("max_side", 0), ("num_workers", -1), ("cache_gib", -1), ("decoder", "nvjpeg")]
)
def test_impossible_values_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(RecipeError, match=key):
        validate(DataSettings, {key: value}, origin="test")


def test_processes_and_the_gpu_decoder_exclude_each_other() -> None:
    with pytest.raises(RecipeError, match=r"worker_kind processes.*decoder gpu"):
        validate(DataSettings, {"worker_kind": "processes", "decoder": "gpu"}, origin="test")


@pytest.mark.parametrize(
    "pixel_range", [(0, 1e-300), (-1e308, 1e308), (0, 2.0**33), (3e6, 3e6 + 1), (5, 5), (float("nan"), 1)]
)
def test_a_range_in_which_all_images_look_the_same_is_refused(pixel_range: tuple[float, float]) -> None:
    with pytest.raises(RecipeError, match="pixel_range"):
        validate(DataSettings, {"pixel_range": pixel_range}, origin="test")


@pytest.mark.parametrize("pixel_range", [(0, 1e-4), (0, 4095), (273.15, 310), (0, 2.0**32), (-1, 1)])
def test_ranges_of_deep_images_are_taken(pixel_range: tuple[float, float]) -> None:
    assert validate(DataSettings, {"pixel_range": pixel_range}, origin="test").rules().ranges.stated == pixel_range


@pytest.mark.parametrize("text", ["[NaN, Infinity]", "[0, 1e-300]", "[-Infinity, 0]", "[3, 3]", "[1e400, 0]"])
@pytest.mark.parametrize("kind", ["stated", "integers", "floats"])
def test_a_recorded_range_is_checked(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match="HIGH"):
        PixelRanges.from_json(json.loads(f'{{"{kind}": {text}}}'))
