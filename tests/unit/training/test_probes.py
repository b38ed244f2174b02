from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from massl.config import RecipeError
from massl.data.settings import DataSettings
from massl.data.sources import ImageSource, open_source
from massl.data.sources.array import ArraySource
from massl.data.views import ViewBatch, ViewSettings
from massl.methods.base import Method, StepHyper, StepOutput
from massl.methods.massl import memory_collapse_signs
from massl.nn.backbone import Backbone
from massl.ops.scoring.neighbours import knn_accuracy, knn_accuracy_among_others
from massl.training.probes import Probe, ProbeSettings, general_collapse_signs, warnings_of

HYPER = StepHyper(
    step=0, epoch=0, learning_rate=0.1, weight_decay=0.0, own={"momentum": 0.9, "teacher_temperature": 0.05}
)
VIEWS = ViewSettings(global_size=4, local_size=4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


class MeanColour(nn.Module):
    """Features that can be worked out by hand."""

    head_hidden_size = 3

    def forward(self, images: Tensor) -> Tensor:  # [B, 3, H, W] -> [B, 3]
        assert not self.training
        return images.mean(dim=(2, 3)) if not self.collapsed else torch.ones(len(images), 3)

    collapsed = False


class Still(Method):
    """A method that learns nothing and reports how many features it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone(MeanColour(), timm_arguments={})

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        raise NotImplementedError

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        raise NotImplementedError

    def backbone_to_evaluate(self) -> Backbone:
        return self.backbone

    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        return {"num_shown": float(len(features))}


def coloured(num_images: int, *, labels: list[int] | None) -> ArraySource:
    """Image i is red, green or blue, of a brightness of its own; where labelled, the label is its colour."""
    pixels = np.zeros((num_images, 6, 5, 3), dtype=np.uint8)
    for i in range(num_images):
        pixels[i, :, :, i % 3] = 100 + i
    names = None if labels is None else ("red", "green", "blue")
    array = None if labels is None else np.array(labels)
    return ArraySource(name="coloured", pixels=pixels, labels=array, class_names=names, key_prefix="coloured")


def probe(source: ImageSource, **settings: object) -> Probe:
    return Probe(
        ProbeSettings(**{"num_neighbours": 3, **settings}),
        data=DataSettings(num_workers=0),
        views=VIEWS,
        training_source=source,
        seed=0,
        device=torch.device("cpu"),
        on_skip=print,
    )


def test_with_labels_the_probe_scores_nearest_neighbours_and_without_it_does_not() -> None:
    labelled = probe(coloured(30, labels=[i % 3 for i in range(30)])).measure(Still(), HYPER)
    assert labelled["knn_top1"] == 100.0  # colours are told apart
    unlabelled = probe(coloured(30, labels=None)).measure(Still(), HYPER)
    assert unlabelled.keys() == {"effective_rank", "alpha_req", "num_shown", "other_view_top1"}
    assert unlabelled["effective_rank"] == pytest.approx(3.0, abs=0.01)


def test_a_crop_in_other_colours_finds_its_image_and_equal_features_find_it_by_chance() -> None:
    method = Still()
    for labels in (None, [0, 1, 2]):  # red, green, blue: told apart unless the crop is made grey
        source = coloured(3, labels=labels)
        found = [probe(source, max_queries=3).measure(method, HYPER)["other_view_top1"] for _ in range(2)]
        assert found[0] == found[1] >= 66.0
    method.backbone_to_evaluate().model.collapsed = True
    assert probe(coloured(40, labels=None)).measure(method, HYPER)["other_view_top1"] == 2.5


def test_doubtful_classes_are_not_shown_as_accuracy_unless_they_are_chosen(tmp_path: Path) -> None:
    for number in range(30):
        folder = tmp_path / str(2019 + number % 3)
        folder.mkdir(exist_ok=True)
        pixels = np.zeros((6, 5, 3), dtype=np.uint8)
        pixels[:, :, number % 3] = 100 + number
        Image.fromarray(pixels).save(folder / f"{number}.png")
    chosen = f"folder:{tmp_path}?labels=folders"
    doubtful = probe(open_source(tmp_path))
    assert doubtful.measure(Still(), HYPER).keys() == {"effective_rank", "alpha_req", "num_shown", "other_view_top1"}
    assert doubtful.raw_pixel_knn() is None
    assert probe(open_source(chosen)).measure(Still(), HYPER)["knn_top1"] == 100.0
    assert probe(open_source(tmp_path, as_before=True)).measure(Still(), HYPER)["knn_top1"] == 100.0
    named = probe(open_source(tmp_path), database=str(tmp_path), queries=chosen)
    assert named.measure(Still(), HYPER)["knn_top1"] == 100.0


def test_wrong_labels_lower_the_score() -> None:
    assert probe(coloured(60, labels=[i // 20 for i in range(60)])).measure(Still(), HYPER)["knn_top1"] < 80.0


def test_queries_held_out_of_the_database_are_never_in_it_and_are_at_most_half() -> None:
    source = coloured(30, labels=[i % 3 for i in range(30)])
    for max_queries, num_queries in ((2, 2), (10, 10), (1000, 15)):
        chosen = probe(source, max_queries=max_queries)
        assert chosen._database is not None
        queries, database = set(chosen._queries.indices.tolist()), set(chosen._database.indices.tolist())
        assert len(queries) == num_queries
        assert not queries & database
        assert queries | database == set(range(30))


def test_no_more_images_are_taken_than_asked_for_and_always_the_same() -> None:
    source = coloured(30, labels=[i % 3 for i in range(30)])
    first, second = (probe(source, max_queries=4, max_database=7) for _ in range(2))
    assert first._database is not None
    assert second._database is not None
    assert (len(first._queries.indices), len(first._database.indices)) == (4, 7)
    assert torch.equal(first._queries.indices, second._queries.indices)
    assert torch.equal(first._database.indices, second._database.indices)
    assert first.measure(Still(), HYPER)["num_shown"] == 4


def test_queries_and_database_of_their_own_are_used_whole(tmp_path: Path) -> None:
    images = coloured(12, labels=None).pixels
    np.savez(tmp_path / "queries.npz", images=images, labels=np.arange(12) % 3)
    np.savez(tmp_path / "database.npz", images=images[:9], labels=np.arange(9) % 3)
    chosen = probe(
        coloured(3, labels=None), queries=str(tmp_path / "queries.npz"), database=str(tmp_path / "database.npz")
    )
    assert chosen._database is not None
    assert (len(chosen._queries.indices), len(chosen._database.indices)) == (12, 9)
    assert chosen.measure(Still(), HYPER)["knn_top1"] == 100.0


def noise_archive(path: Path, *, seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (400, 4, 4, 3), dtype=np.uint8)
    np.savez(path, images=pixels, labels=np.arange(400) % 4)
    return str(path)


@pytest.mark.parametrize("other_name", [False, True])
@pytest.mark.parametrize("num_neighbours", [1, 20])
def test_no_image_is_its_own_neighbour_where_queries_and_database_are_the_same(
    tmp_path: Path, num_neighbours: int, other_name: bool
) -> None:
    archive = noise_archive(tmp_path / "noise.npz", seed=0)
    queries = f"{tmp_path}/../{tmp_path.name}/noise.npz" if other_name else archive
    chosen = probe(coloured(3, labels=None), database=archive, queries=queries, num_neighbours=num_neighbours)
    accuracies = chosen.measure(Still(), HYPER)["knn_top1"], chosen.raw_pixel_knn()
    for accuracy in accuracies:  # four classes of noise; an image that finds itself is right every time
        assert accuracy is not None
        assert 15.0 < accuracy < 35.0


def test_the_training_images_as_queries_do_not_find_themselves_either(tmp_path: Path) -> None:
    labels = [0, 1, 2] * 4
    source = coloured(12, labels=labels)
    np.savez(tmp_path / "same.npz", images=source.pixels, labels=labels)
    chosen = probe(source, queries=str(tmp_path / "same.npz"))
    assert chosen._may_find_itself
    assert not probe(source)._may_find_itself  # held out, so never in the database


def test_other_queries_are_scored_among_all_images_of_the_database(tmp_path: Path) -> None:
    database = noise_archive(tmp_path / "database.npz", seed=1)
    with np.load(database) as archive:
        pixels, labels = archive["images"], archive["labels"]
    # as many as in the database and nearly the same, but others: each finds the image of its own number
    pixels[:, 0, 0, 0] ^= 1
    np.savez(tmp_path / "queries.npz", images=pixels, labels=labels)
    chosen = probe(coloured(3, labels=None), database=database, queries=str(tmp_path / "queries.npz"), num_neighbours=1)
    assert chosen.raw_pixel_knn() == 100.0


@pytest.mark.parametrize("num_rows", [2, 5, 60])
def test_neighbours_among_others_are_those_of_a_database_without_the_image(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    features, labels = torch.randn(60, 3, generator=generator), torch.randint(4, (60,), generator=generator)
    images, settings = torch.randperm(60, generator=generator), {"num_neighbours": 5, "temperature": 0.07}
    database = images[:num_rows]  # so some of the queries are in it and some are not
    one_by_one = []
    for query in range(60):
        others = database[database != query]
        one_by_one.append(
            knn_accuracy(features[query, None], labels[query, None], features[others], labels[others], **settings)
        )
    among_others = knn_accuracy_among_others(
        features, labels, features[database], labels[database], torch.arange(60), database, **settings
    )
    assert among_others == pytest.approx(sum(one_by_one) / 60)


def test_a_source_named_for_the_probe_must_have_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", images=coloured(4, labels=None).pixels)
    with pytest.raises(RecipeError, match=r"plain\.npz has no labels"):
        probe(coloured(6, labels=[0, 1, 2, 0, 1, 2]), queries=str(tmp_path / "plain.npz"))


def test_images_without_a_label_among_labelled_ones_do_not_stop_the_probe() -> None:
    labels = [-1 if i % 4 == 0 else i % 3 for i in range(40)]
    assert probe(coloured(40, labels=labels)).measure(Still(), HYPER)["knn_top1"] == 100.0


def test_the_backbone_is_in_eval_mode_while_probed_and_in_its_own_mode_afterwards() -> None:
    for training in (True, False):
        method = Still().train(training)
        probe(coloured(9, labels=None)).measure(method, HYPER)  # MeanColour refuses to run in training mode
        assert method.backbone_to_evaluate().training is training


def test_raw_pixels_are_scored_where_there_are_labels() -> None:
    assert probe(coloured(30, labels=[i % 3 for i in range(30)])).raw_pixel_knn() == 100.0
    assert probe(coloured(30, labels=None)).raw_pixel_knn() is None


def test_features_along_a_single_direction_are_a_sign_of_collapse() -> None:
    method = Still()
    healthy = probe(coloured(30, labels=None)).measure(method, HYPER)
    assert general_collapse_signs(healthy) == []
    method.backbone_to_evaluate().model.collapsed = True
    (sign,) = general_collapse_signs(probe(coloured(30, labels=None)).measure(method, HYPER))
    assert "the features span a single direction (effective rank 1.00)" in sign


def test_a_few_directions_are_one_too_few() -> None:
    """1.5 and 6.59: a collapsed run and the least healthy other one of docs/results/tiny-imagenet-100."""
    for rank in (1.5, 1.79):
        (sign,) = general_collapse_signs({"effective_rank": rank})
        assert sign == f"the features span hardly more than a single direction (effective rank {rank:.2f})"
    assert general_collapse_signs({"effective_rank": 6.59}) == []


class Sluggish(Still):
    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return ["one vector"] if metrics["spread"] == 0.0 else []

    def slow_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return ["an even teacher"]


def test_warnings_tell_a_slow_run_from_a_collapsed_one() -> None:
    slow = "training may hardly progress: an even teacher. See docs/troubleshooting.md."
    single = "the features span a single direction (effective rank 1.00). See docs/troubleshooting.md."
    assert warnings_of(Still(), {"effective_rank": 9.0}) == []
    assert warnings_of(Sluggish(), {"effective_rank": 9.0, "spread": 0.5}) == [slow]
    assert warnings_of(Sluggish(), {"effective_rank": 1.0, "spread": 0.0}) == [
        f"training may have collapsed: {single}",
        "training may have collapsed: one vector. See docs/troubleshooting.md.",
        slow,
    ]


def test_a_loss_above_guessing_is_no_collapse_while_the_teacher_prefers_rows() -> None:
    """Two epochs of 231 photographs in batches of 32: the student disagrees with a sharp teacher."""
    young = {"loss": 3.148, "teacher_entropy": 0.659, "embedding_spread": 0.881}
    assert memory_collapse_signs(young, block_size=16) == []
    assert memory_collapse_signs(young | {"loss": 2.77}, block_size=16) == []
    contracted = {"loss": 2.0792, "teacher_entropy": 2.0791, "embedding_spread": 0.0319}
    (sign,) = memory_collapse_signs(contracted, block_size=8)
    assert "ln 8 = 2.079" in sign


@pytest.mark.parametrize(
    ("accuracies", "num_queries", "warned"),
    [
        ([30.0, 45.0], 1000, False),  # rises
        ([30.0, 45.0], 10, True),  # might be chance
        ([30.0, 31.0], 1000, True),
        ([30.0, 60.0, 45.0], 1000, True),  # collapsed after it had learnt
        ([60.0, 30.0, 45.0], 1000, True),  # below random weights
        ([45.0], 1000, True),
    ],
)
def test_no_collapse_is_claimed_while_accuracy_rises(accuracies: list[float], num_queries: int, warned: bool) -> None:
    *before, last = [{"effective_rank": 1.2, "spread": 0.0, "knn_top1": accuracy} for accuracy in accuracies]
    found = warnings_of(Sluggish(), last, before=before, num_queries=num_queries)
    assert any("may have collapsed" in warning for warning in found) is warned
    assert any("may hardly progress" in warning for warning in found)


def test_without_labels_every_sign_counts() -> None:
    row = {"effective_rank": 1.2}
    assert len(warnings_of(Still(), row, before=[row], num_queries=1000)) == 1
