import pytest
import torch

from massl import distributed
from massl.commands.recipe import load_recipe
from massl.config import MasslError, RecipeError
from massl.data.identity import DataIdentity
from massl.failures import ToldElsewhere
from massl.training import ranks
from massl.training.ranks import OtherRankStopped, require_equal_ranks, require_equal_steps, stop_together


def images(digest: str = "a", source: str = "photos", num_images: int = 3) -> DataIdentity:
    return DataIdentity(digest=digest, num_images=num_images, source=source, files=b"", as_before=False)


def see(monkeypatch: pytest.MonkeyPatch, *answers: object) -> None:
    """What a second rank answers in each exchange."""
    remaining = iter(answers)
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value, next(remaining)])


def test_an_error_leaves_as_it_is_and_without_one_nothing_happens() -> None:
    with stop_together():
        pass
    with pytest.raises(RecipeError, match="mine"), stop_together():
        raise RecipeError("mine")


def test_the_error_of_another_rank_stops_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "photos does not exist")
    with pytest.raises(OtherRankStopped, match="rank 1 stopped: photos does not exist") as caught, stop_together():
        pass
    assert isinstance(caught.value, MasslError)


def exchanged(monkeypatch: pytest.MonkeyPatch, data: DataIdentity, **changes: object) -> list[object]:
    """What a rank sends when it compares itself with the others."""
    sent: list[object] = []

    def alone(value: object) -> list[object]:
        sent.append(value)
        return [value]

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "gather_objects", alone)
        require_equal_ranks(load_recipe("demo-vit", {key.replace("__", "."): changes[key] for key in changes}), data)
    return sent


def test_ranks_with_other_images_are_refused_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("demo-vit")
    see(monkeypatch, *exchanged(monkeypatch, images("b", "elsewhere", 2)))
    with pytest.raises(RecipeError, match=r"rank 0 sees 3 images in photos.*rank 1 sees 2 images in elsewhere"):
        require_equal_ranks(recipe, images())


def test_ranks_with_the_same_images_elsewhere_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *exchanged(monkeypatch, images("a", "there"), data__source="there", data__num_workers=3))
    require_equal_ranks(load_recipe("demo-vit", {"data.source": "here"}), images())


def test_ranks_of_other_recipes_are_refused_and_the_values_named(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *exchanged(monkeypatch, images(), trainer__max_steps=5))
    with pytest.raises(RecipeError, match=r"trainer\.max_steps is None on rank 0, 5 on rank 1"):
        require_equal_ranks(load_recipe("demo-vit"), images())


def test_ranks_of_other_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, values, seen), _ = exchanged(monkeypatch, images())
    see(monkeypatch, ("massl of digest 1234", values, seen), None)
    with pytest.raises(MasslError, match=r"rank 1 runs massl of digest 1234"):
        require_equal_ranks(load_recipe("demo-vit"), images())


def test_the_code_is_known_by_its_text() -> None:
    assert ranks._code() == ranks._code()
    assert torch.__version__ in ranks._code()


def test_what_all_ranks_find_is_told_by_the_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "images differ")
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "gather_objects", lambda value: ["images differ", value])
    with pytest.raises(OtherRankStopped, match="images differ") as caught, stop_together():
        raise RecipeError("images differ")
    assert isinstance(caught.value, ToldElsewhere)


def test_ranks_that_would_continue_from_other_steps_are_refused_and_one_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see(monkeypatch, 20, None)
    require_equal_steps(20)
    see(monkeypatch, 10, "steps differ")
    with pytest.raises(RecipeError, match="rank 0 at step 20; rank 1 at step 10"):
        require_equal_steps(20)
