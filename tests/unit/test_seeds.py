import math

import pytest

from massl import keyed_random
from massl.commands.recipe import PretrainRecipe
from massl.config import RecipeError, Settings, validate
from massl.evaluations.protocols.attention import AttentionSettings
from massl.evaluations.protocols.clustering import ClusteringSettings
from massl.evaluations.protocols.correspondence import CorrespondenceSettings
from massl.evaluations.protocols.linear_training import SweepSettings
from massl.evaluations.protocols.low_shot import LowShotSettings
from massl.training.settings import TrainerSettings

SETTINGS = [
    AttentionSettings,
    ClusteringSettings,
    CorrespondenceSettings,
    LowShotSettings,
    SweepSettings,
    TrainerSettings,
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: one.__name__)
def test_every_seed_that_settings_accept_is_a_key_and_others_are_refused_by_name(settings: type[Settings]) -> None:
    largest = keyed_random.MAX_SEED
    assert keyed_random.seed_from(settings(seed=largest).seed, "x") != keyed_random.seed_from(largest - 1, "x")
    for wrong in (largest + 1, 2**64, 10**30, -(2**64), 1.5, "many", math.nan):
        with pytest.raises(RecipeError, match="seed"):
            validate(settings, {"seed": wrong}, origin="recipe")


def test_a_recipe_names_the_seed_that_is_too_large() -> None:
    with pytest.raises(RecipeError, match=r"trainer\.seed.*9223372036854775807"):
        validate(PretrainRecipe, {"trainer": {"seed": 2**63}}, origin="recipe")
