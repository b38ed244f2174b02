from pathlib import Path
from typing import Any

import pytest
import torch

from massl.config import RecipeError
from massl.methods import build_method
from massl.methods.base import Method
from massl.methods.massl import MaSSLSettings
from massl.nn.backbone import BackboneSettings
from massl.training.checkpoint import CheckpointStore
from massl.training.start_weights import load_run

METHOD: dict[str, Any] = {"head": {"hidden_dim": 16, "out_dim": 8}, "memory": {"num_rows": 16, "block_size": 8}}


def method(*, seed: int, depth: int = 1, **changes: Any) -> Method:
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=8,
        patch_size=4,
        timm_options={"embed_dim": 16, "depth": depth, "num_heads": 2},
    )
    return build_method(MaSSLSettings.model_validate({**METHOD, **changes}), backbone, seed=seed)


@pytest.fixture
def old(tmp_path: Path) -> Method:
    """The method of a run whose newest checkpoint is at step 7."""
    trained = method(seed=1)
    trained.memory.enqueue(torch.ones(3, 8))
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    store.save(5, {"step": 5, "method": method(seed=3).state_dict()}, milestone_every=0)
    store.save(7, {"step": 7, "method": trained.state_dict()}, milestone_every=0)
    return trained


def equal_names(left: Method, right: Method) -> set[str]:
    values = right.state_dict()
    return {name for name, value in left.state_dict().items() if value.equal(values[name])}


def test_all_weights_of_the_newest_checkpoint_are_taken(old: Method, tmp_path: Path) -> None:
    new = method(seed=2)
    assert not any(name.endswith("qkv.weight") for name in equal_names(new, old))
    assert load_run(new, tmp_path, warn=print) == (7, [])
    assert equal_names(new, old) == old.state_dict().keys()


def test_a_memory_of_another_size_starts_anew_with_its_cursor(old: Method, tmp_path: Path) -> None:
    new, untouched = (method(seed=2, memory={"num_rows": 2, "block_size": 2}) for _ in range(2))
    assert load_run(new, tmp_path, warn=print) == (7, ["memory"])
    assert new.memory.cursor == 0  # that of the old run lies beyond these rows
    assert new.memory.rows.equal(untouched.memory.rows)
    assert {name for name in old.state_dict() if not name.startswith("memory.")} <= {
        name for name, value in new.state_dict().items() if value.equal(old.state_dict().get(name, torch.zeros(0)))
    }


def test_a_layer_of_the_head_that_does_not_fit_starts_anew_and_is_named(old: Method, tmp_path: Path) -> None:
    new = method(seed=2, head={"hidden_dim": 16, "out_dim": 12})
    _, unfit = load_run(new, tmp_path, warn=print)
    assert "memory" in unfit
    assert {part.partition(".")[0] for part in unfit} == {"student", "teacher", "memory"}
    assert not any("backbone" in part for part in unfit)


def test_a_backbone_that_does_not_fit_is_refused_and_nothing_is_loaded(old: Method, tmp_path: Path) -> None:
    new = method(seed=2, depth=2)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    with pytest.raises(RecipeError, match=r"backbone of --init.*blocks\.1"):
        load_run(new, tmp_path, warn=print)
    assert all(value.equal(before[name]) for name, value in new.state_dict().items())


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--init .* has no checkpoint"):
        load_run(method(seed=2), tmp_path, warn=print)


@pytest.mark.parametrize("state", [{"step": 9}, {"step": 9, "method": 5}, {"method": {}}, [1, 2]])
def test_a_checkpoint_without_weights_is_skipped_for_the_one_before(old: Method, tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "checkpoints" / "step_000000009.pt")
    warnings: list[str] = []
    assert load_run(method(seed=2), tmp_path, warn=warnings.append) == (7, [])
    assert "step_000000009.pt" in warnings[0]


@pytest.mark.parametrize("kind", ["bool", "text"])
def test_weights_of_another_type_do_not_fit(old: Method, tmp_path: Path, kind: str) -> None:
    wrong = {name: value.bool() if kind == "bool" else "x" for name, value in old.state_dict().items()}
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    store.save(9, {"step": 9, "method": wrong}, milestone_every=0)
    with pytest.raises(RecipeError, match="backbone of --init"):
        load_run(method(seed=2), tmp_path, warn=print)


def test_weights_that_are_not_finite_are_refused_with_the_option_and_their_name(old: Method, tmp_path: Path) -> None:
    name = next(name for name in old.state_dict() if name.endswith("qkv.weight"))
    old.state_dict()[name][0, 0] = torch.nan
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    store.save(9, {"step": 9, "method": old.state_dict()}, milestone_every=0)
    with pytest.raises(RecipeError, match=rf"--init .* not finite \({name}"):
        load_run(method(seed=2), tmp_path, warn=print)
