import pytest

from massl.config import RecipeError, validate
from massl.data.settings import DataSettings


def test_every_setting_describes_itself() -> None:
    assert all(field.description for field in DataSettings.model_fields.values())


@pytest.mark.parametrize(("key", "value"), [("max_side", 0), ("num_workers", -1)])
def test_impossible_numbers_are_refused_by_name(key: str, value: int) -> None:
    with pytest.raises(RecipeError, match=key):
        validate(DataSettings, {key: value}, origin="test")
