import pytest

from massl.config import RecipeError, validate
from massl.data.settings import DataSettings


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
