import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from massl.commands.recipe import load_recipe
from massl.commands.report.figures import choose_sample, figures_of, open_run
from massl.config import to_yaml
from massl.nn.backbone import build_backbone
from massl.reports.page.sections import figures as sections_of_figures
from massl.reports.page.sections.figures import PICTURES
from massl.reports.page.templates import Section
from massl.weights.io import backbone_bytes

SMALL = {
    "views.global_size": 16,
    "views.local_size": 8,
    "backbone.image_size": 16,
    "backbone.patch_size": 4,
    "backbone.timm_options": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "probes.database": "",
    "probes.queries": "",
    "probes.num_neighbours": 5,
}
RESNET = {
    "backbone.name": "resnet18",
    "backbone.image_size": None,
    "backbone.patch_size": None,
    "backbone.timm_options": {},
}
MakeRun = Callable[..., Path]


def write_images(path: Path, num_images: int, *, has_labels: bool = True, seed: int = 0) -> Path:
    """Images of 16 px in three classes: dark, grey and bright."""
    labels = np.arange(num_images) % 3
    noise = np.random.default_rng(seed).integers(0, 60, (num_images, 16, 16, 3))
    pixels = (noise + 90 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(path, images=pixels, **({"labels": labels} if has_labels else {}))
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run("a", source, {"backbone.name": "resnet18"}): recipe and untrained backbone of a run."""

    def make(name: str, source: Path | str, changes: Mapping[str, Any] | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        recipe = load_recipe("demo-vit", {**SMALL, "data.source": str(source), **(changes or {})})
        (folder / "recipe.yaml").write_text(to_yaml(recipe))
        backbone = build_backbone(recipe.backbone, seed=0)
        weights = backbone_bytes(
            backbone.model,
            timm_arguments=backbone.timm_arguments,
            mean=recipe.views.mean,
            std=recipe.views.std,
            image_size=recipe.views.global_size,
        )
        (folder / "backbone.safetensors").write_bytes(weights)
        return folder

    return make


def drawn(runs: Mapping[str, Path], **options: Any) -> dict[str, Section]:
    return {section.id: section for section in figures_of(runs, device="cpu", **options)}


def sentences(section: Section) -> list[str]:
    return re.findall(r'<p class="fig-sentence">(.*?)</p>', section.html)


def num_pictures(section: Section) -> int:
    return section.html.count("<img ")


def test_a_transformer_has_every_picture_each_with_words_for_those_who_cannot_see_it(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("a", write_images(tmp_path / "images.npz", 30))
    sections = drawn({"a": run})
    assert (
        list(sections)
        == list(PICTURES)
        == [
            "embedding-map",
            "neighbours",
            "attention",
            "components",
            "correspondence",
        ]
    )
    assert sections["embedding-map"].html.count('class="fig-dots') == 3
    assert sections["embedding-map"].html.count("<use") == 30 + 3  # dots and legend
    # one query of each class; the classifier asks for 5 neighbours
    assert num_pictures(sections["neighbours"]) == 3 * (1 + 5)
    assert num_pictures(sections["attention"]) == 3 * (1 + 1 + 1 + 2)  # image, all heads, mean, two heads
    assert num_pictures(sections["components"]) == 3 * 2
    assert re.search(r"hold \d+ % of the variance", sentences(sections["components"])[0])
    assert num_pictures(sections["correspondence"]) == 4 + 4
    for kind in ("neighbours", "attention", "components", "correspondence"):
        assert all(re.findall(r'alt="(.*?)"', sections[kind].html))
    assert not any("ot drawn" in section.html for section in sections.values())
    assert "<select" not in sections["attention"].html


def test_the_same_run_gives_the_same_pictures(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", write_images(tmp_path / "images.npz", 30))
    assert figures_of({"a": run}, device="cpu") == figures_of({"a": run}, device="cpu")


def test_a_network_without_patches_has_the_other_pictures_and_says_so_only_beside_one_with_patches(
    make_run: MakeRun, tmp_path: Path
) -> None:
    images = write_images(tmp_path / "images.npz", 30)
    resnet = make_run("a", images, RESNET)
    alone = drawn({"a": resnet})
    assert list(alone) == ["embedding-map", "neighbours"]
    assert alone["embedding-map"].html.count("<use") == 33
    assert num_pictures(alone["neighbours"]) == 18
    both = drawn({"a": resnet, "b": make_run("b", images)})
    assert list(both) == list(PICTURES)
    for kind in ("attention", "components", "correspondence"):
        assert re.search("^Not drawn: .*needs patch tokens, which resnet18 does not have", sentences(both[kind])[0])
        assert num_pictures(both[kind]) > 0


def test_images_that_are_gone_become_one_sentence_with_advice(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", tmp_path / "gone.npz")
    (section,) = figures_of({"a": run}, device="cpu")
    (said,) = sentences(section)
    assert said.startswith("No pictures: ")
    assert "gone.npz" in said
    assert said.endswith("other images can be named with --data.")
    other = write_images(tmp_path / "other.npz", 12)
    assert "12 images of" in sentences(drawn({"a": run}, data=str(other))["embedding-map"])[0]


def test_damaged_weights_and_a_missing_recipe_are_sentences_too(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", write_images(tmp_path / "images.npz", 30))
    (run / "backbone.safetensors").write_bytes(b"nothing")
    assert "cannot read" in sentences(figures_of({"a": run}, device="cpu")[0])[0]
    (run / "recipe.yaml").unlink()
    assert "recipe.yaml" in sentences(figures_of({"a": run}, device="cpu")[0])[0]


def test_few_images_are_too_few_for_a_map_but_not_for_the_rest(make_run: MakeRun, tmp_path: Path) -> None:
    sections = drawn({"a": make_run("a", write_images(tmp_path / "images.npz", 9))})
    assert sentences(sections["embedding-map"]) == ["Not drawn: a map needs at least 10 images, and there are 9."]
    assert num_pictures(sections["neighbours"]) == 3 * (1 + 5)
    lonely = drawn({"b": make_run("b", write_images(tmp_path / "one.npz", 1))})
    assert "holds no other image" in sentences(lonely["neighbours"])[0]
    assert num_pictures(lonely["attention"]) == 5


def test_an_image_that_cannot_be_read_is_left_out_of_all_pictures(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = drawn({"a": make_run("a", _photos_with_one_unreadable(tmp_path, num_images=24))})
    assert "23 images of" in sentences(sections["embedding-map"])[0]
    assert not any("cannot be read" in section.html for section in sections.values())
    assert "skipped an unreadable image: class0/0.png: " in capsys.readouterr().err
    drawn({"b": make_run("b", tmp_path / "photos"), "c": make_run("c", tmp_path / "photos")})
    assert capsys.readouterr().err.count("2 classes from folder names") == 1  # once for all runs


def test_too_many_images_that_cannot_be_read_are_a_sentence(make_run: MakeRun, tmp_path: Path) -> None:
    sections = drawn({"a": make_run("a", _photos_with_one_unreadable(tmp_path, num_images=12))})
    assert "cannot be read" in sentences(sections["embedding-map"])[0]
    assert "cannot be read" in sentences(sections["neighbours"])[0]


def test_doubtful_classes_are_no_classes_on_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    folder = _photos_with_one_unreadable(tmp_path, num_images=24)
    for number in (0, 1):
        (folder / f"class{number}").rename(folder / str(2019 + number))
    assert "fig-legend" not in drawn({"a": make_run("a", folder)})["embedding-map"].html
    chosen = make_run("b", f"folder:{folder}?labels=folders")
    assert "fig-legend" in drawn({"b": chosen})["embedding-map"].html


def _photos_with_one_unreadable(tmp_path: Path, *, num_images: int) -> Path:
    from PIL import Image

    folder = tmp_path / "photos"
    for number in range(num_images):
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (10 * number, 50, 90)).save(folder / f"class{number % 2}" / f"{number}.png")
    (folder / "class0" / "0.png").write_bytes(b"no picture")
    return folder


def test_without_labels_nothing_is_right_or_wrong(make_run: MakeRun, tmp_path: Path) -> None:
    sections = drawn({"a": make_run("a", write_images(tmp_path / "images.npz", 30, has_labels=False))})
    said = sentences(sections["embedding-map"])[0]
    assert said.startswith(f"30 images of {tmp_path / 'images.npz'}. Without labels, thumbnails")
    assert 'class="fig-thumbnail"' in sections["embedding-map"].html
    for kind in ("embedding-map", "neighbours"):
        assert not re.search(r"fig-miss|fig-right|fig-wrong|fig-legend|✓|✗", sections[kind].html)
    assert num_pictures(sections["neighbours"]) == 10 * (1 + 5)
    assert num_pictures(sections["correspondence"]) == 4  # no pairs of a class


def test_neighbours_are_marked_right_or_wrong_by_their_class(make_run: MakeRun, tmp_path: Path) -> None:
    html = drawn({"a": make_run("a", write_images(tmp_path / "images.npz", 30), {"probes.num_neighbours": 29})})[
        "neighbours"
    ].html
    cells = re.findall(r'<td(?: class="fig-(\w+)")?><img src=".*?" alt="(.*?)">', html)
    rows = [cells[at : at + 9] for at in range(0, len(cells), 9)]
    assert len(rows) == 3
    for (no_mark, query), *found in rows:
        assert no_mark == ""
        for mark, alt in found:
            is_same = alt.partition(",")[0] == query.removeprefix("query: ")
            assert (mark == "right") is is_same
            assert ("same class" in alt) is is_same


def test_no_image_is_its_own_neighbour_and_the_vote_is_that_of_the_others(make_run: MakeRun, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3)).astype(np.uint8)
    labels = np.random.default_rng(1).integers(0, 3, 30)
    np.savez(tmp_path / "images.npz", images=pixels, labels=labels)  # neighbours disagree, so their weights decide
    run = make_run("a", tmp_path / "images.npz", {"probes.temperature": 0.002})
    with open_run(run, data=None, device="cpu", num_images=20) as opened:
        assert opened.sample.is_own
        assert (len(opened.sample.queries), len(opened.sample.database)) == (20, 30)
        near = opened.neighbours.indices
        assert near.shape == (20, 5)
        assert not any(number in near[number].tolist() for number in range(20))
        assert [opened.sample.queries.key_of(n) for n in range(20)] == [
            opened.sample.database.key_of(n) for n in range(20)
        ]
        directions = opened.database_rows / opened.database_rows.norm(dim=1, keepdim=True)
        for number in range(20):
            cosines = directions @ directions[number]
            cosines[number] = -1.0
            nearest = cosines.argsort(descending=True)[:5]
            votes = [0.0, 0.0, 0.0]
            for other in nearest.tolist():
                votes[opened.sample.database.label_of(other) or 0] += float(((cosines[other] - 1) / 0.002).exp())
            assert opened.predictions[number] == int(np.argmax(votes))


def test_the_images_are_those_of_the_probe_and_do_not_depend_on_the_run(tmp_path: Path) -> None:
    train, test = write_images(tmp_path / "train.npz", 40), write_images(tmp_path / "test.npz", 20, seed=1)
    probes = {"probes.database": str(train), "probes.queries": str(test)}
    recipes = [load_recipe("demo-vit", {**SMALL, **probes, "trainer.seed": seed}) for seed in (0, 1)]
    samples = [choose_sample(recipe, None, num_images=10) for recipe in recipes]
    assert (samples[0].queries.name, samples[0].database.name, samples[0].is_own) == (str(test), str(train), False)
    keys = [[sample.queries.key_of(number) for number in range(10)] for sample in samples]
    assert keys[0] == keys[1]
    assert keys[0] != sorted(keys[0])
    other = write_images(tmp_path / "unlabelled.npz", 40, has_labels=False)
    mixed = load_recipe("demo-vit", {**SMALL, "probes.database": str(other), "probes.queries": str(test)})
    assert choose_sample(mixed, None, num_images=10).is_own  # neighbours without classes could not vote


def test_several_runs_have_a_selector_and_share_their_thumbnails(make_run: MakeRun, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images.npz", 30)
    runs = {
        "<one>": make_run("a", images),
        "gone": make_run("b", tmp_path / "gone.npz"),
        "two": make_run("c", images, RESNET),
    }
    sections = drawn(runs)
    for section in sections.values():
        assert re.findall(r"<option.*?>(.*?)</option>", section.html) == ["&lt;one&gt;", "gone", "two"]
        assert section.html.count("No pictures: ") == 1
    assert sections["embedding-map"].html.count('class="fig-sprite"') == 1
    assert sections["embedding-map"].html.count("<svg viewBox") == 2 * (1 + 3)  # maps and their legends


def test_a_bug_is_not_hidden_in_a_sentence(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("a", write_images(tmp_path / "images.npz", 12))
    monkeypatch.setattr(sections_of_figures, "sheet_markup", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        figures_of({"a": run}, device="cpu")


def test_only_images_that_the_user_names_are_downloaded(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class MNIST:
        def __init__(self, root: str, download: bool = False) -> None:
            asked.append(download)
            raise RuntimeError("no files")

    monkeypatch.setattr("torchvision.datasets.MNIST", MNIST)
    uri = "torchvision:MNIST?root=mnist&download=true"
    run = make_run("a", uri, {"probes.database": uri, "probes.queries": "joined:" + uri + "|" + uri})
    figures_of({"a": run}, device="cpu")
    assert asked == [False]
    figures_of({"a": run}, data=uri, device="cpu")
    assert asked == [False, True]
