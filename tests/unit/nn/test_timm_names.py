import pytest

from massl.config import RecipeError
from massl.nn.timm_models import checked_options


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("vit_tinny", "vit_tiny_patch16_224"),
        ("vit_base", "vit_base_patch16_224"),
        ("resnet-50", "resnet50"),
        ("convnxt_tiny", "convnext_tiny"),
    ],
)
def test_of_the_names_like_a_mistyped_one_the_common_one_is_suggested(given: str, suggested: str) -> None:
    with pytest.raises(RecipeError, match=f"no model .*{given}.* Did you mean '{suggested}'"):
        checked_options({"model_name": given}, prefix="")
