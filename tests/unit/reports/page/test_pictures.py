import itertools
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from massl.reports.page.pictures import (
    SHAPES,
    EmbeddingMap,
    PagePicture,
    map_markup,
    pairs_markup,
    panels_markup,
    sentence_markup,
    sheet_markup,
    sprites_markup,
)
from massl.reports.page.templates import asset
from massl.reports.pictures.embedding_map import MAX_CLASSES
from massl.reports.pictures.sprites import SpriteSheet

EVIL = '</script><b onclick="x">&'
MAP = EmbeddingMap(
    positions=np.array([[10, 20], [30, 40], [50, 60], [70, 80]]),
    labels=(1, 0, 1, 0),
    predictions=(1, 1, 1, 0),
    class_names=("cat", "dog"),
    keys=("a.png", "b.png", "c.png", "d.png"),
    sprites=SpriteSheet(uri="data:image/webp;base64,AAAA", side=16, num_columns=2, num_rows=2),
)
# How colours look without one kind of cones (Machado, Oliveira and Fernandes, 2009), on linear light; rows are red,
# green, blue.
VISIONS = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
CARDS = {"light": "#ffffff", "dark": "#1b1f24"}  # what the page draws maps on


def facts_of(markup: str) -> Any:
    return json.loads(markup.partition('class="fig-facts">')[2].partition("</script>")[0])


def linear(colour: str) -> Any:
    levels = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


def lab(light: Any) -> Any:
    """CIELAB of linear light."""
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    relative = to_xyz @ np.clip(light, 0, 1) / (0.95047, 1.0, 1.08883)
    x, y, z = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(colour) @ (0.2126, 0.7152, 0.0722)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def colours_of(scheme: str) -> dict[str, str]:
    found = re.findall(r"--(fig-[\w-]+): light-dark\((#\w{6}), (#\w{6})\)", asset("figures_pictures.css"))
    return {name: light if scheme == "light" else dark for name, light, dark in found}


@pytest.mark.parametrize("scheme", CARDS)
def test_classes_of_one_shape_are_told_apart_with_any_colour_vision(scheme: str) -> None:
    colours = colours_of(scheme)
    looks = [colours[f"fig-class-{number}"] for number in range(MAX_CLASSES)]
    for one, other in itertools.combinations(range(MAX_CLASSES), 2):
        if one % len(SHAPES) == other % len(SHAPES):
            for vision in VISIONS.values():
                assert np.linalg.norm(lab(vision @ linear(looks[one])) - lab(vision @ linear(looks[other]))) > 20, (
                    one,
                    other,
                )


@pytest.mark.parametrize("scheme", CARDS)
def test_dots_stand_out_from_the_card_and_words_can_be_read(scheme: str) -> None:
    for name, colour in colours_of(scheme).items():
        assert contrast(colour, CARDS[scheme]) >= (4.5 if name in ("fig-right", "fig-wrong") else 3.0), name


def test_every_dot_is_drawn_in_its_group_and_the_wrong_ones_are_outlined() -> None:
    markup = map_markup(MAP, title="a map")
    groups = re.findall(r'<g class="fig-dots fig-class-(\d)">(.*?)</g>', markup, flags=re.DOTALL)
    places = {look: re.findall(r'x="(\d+)" y="\d+"( class="fig-miss")?', dots) for look, dots in groups}
    assert places == {"0": [("30", ' class="fig-miss"'), ("70", "")], "1": [("10", ""), ("50", "")]}
    assert facts_of(markup)["order"] == [1, 3, 0, 2]
    assert re.findall(r"<small>(.*?)</small>", markup) == ["50 % of 2", "100 % of 2"]
    assert "Only the 1 wrong" in markup


def test_without_labels_the_map_has_no_legend_and_nothing_is_wrong() -> None:
    markup = map_markup(replace(MAP, labels=(), predictions=(), class_names=None), title="a map")
    assert markup.count('<use href="#fig-shape-') == 4
    assert "fig-miss" not in markup
    assert "fig-legend" not in markup


def test_without_labels_thumbnails_show_the_images_where_there_is_room() -> None:
    positions = np.array([[100, 100], [110, 100], [400, 100], [700, 200]])  # the second has no room beside the first
    drawn = replace(MAP, positions=positions, labels=(), predictions=(), class_names=None)
    markup = map_markup(drawn, title="a map")
    facts = facts_of(markup)
    assert facts["thumbnails"] == [0, 2, 3]
    found = re.findall(r'<svg class="fig-thumbnail" x="(\d+)" y="(\d+)" width="(\d+)".*?viewBox="([\d ]+)"', markup)
    half = facts["thumbnail"] // 2
    assert [(int(x) + half, int(y) + half, part) for x, y, _, part in found] == [
        (100, 100, "0 0 16 16"),
        (400, 100, "0 16 16 16"),
        (700, 200, "16 16 16 16"),
    ]
    assert markup.count(f'<use href="#{facts["sprite"]}"/>') == 3
    assert f'id="{facts["sprite"]}"' in sprites_markup([drawn.sprites])
    labelled = map_markup(MAP, title="a map")
    assert facts_of(labelled)["thumbnails"] == []
    assert "fig-thumbnail" not in labelled


def test_names_cannot_break_out_of_the_markup() -> None:
    picture = PagePicture(uri="data:,", alt=EVIL, captions=(EVIL,), mark="wrong")
    drawn = replace(MAP, class_names=(EVIL, EVIL), keys=(EVIL,) * 4)
    parts = [
        sheet_markup([[picture]], headings=[EVIL]),
        pairs_markup({EVIL: [picture]}),
        map_markup(drawn, title=EVIL),
        panels_markup({EVIL: "", "b": ""}, note=EVIL),
        sentence_markup(EVIL),
    ]
    for part in parts:
        assert "<b " not in part
        assert 'onclick="' not in part
    assert facts_of(parts[2])["keys"] == [EVIL] * 4


def test_maps_of_the_same_images_share_one_sheet_of_thumbnails() -> None:
    other = replace(MAP.sprites, uri="data:image/webp;base64,BBBB")
    markup = sprites_markup([MAP.sprites, MAP.sprites, other])
    assert markup.count("AAAA") == markup.count("BBBB") == 1
    assert f'id="{facts_of(map_markup(MAP, title=""))["sprite"]}"' in markup


def test_only_several_runs_have_a_selector() -> None:
    assert "<select" not in panels_markup({"a": "one"}, note="")
    two = panels_markup({"a": "one", "b": "<i>two</i>"}, note="")
    assert re.findall(r"<option.*?>(.*?)</option>", two) == ["a", "b"]
    assert "<i>two</i>" in two


def test_style_and_script_do_not_end_early_and_ask_for_nothing_outside() -> None:
    for text in (asset("figures_pictures.css"), asset("figures_pictures.js")):
        assert "</" not in text
        assert "http" not in text
