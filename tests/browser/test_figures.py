"""The pictures of a report, as a reader meets them: with a mouse, a finger, the keyboard, on a phone and on paper."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from massl.commands.report.command import report

pytestmark = pytest.mark.slow
MAP = ".fig-panel:not([hidden]) .fig-map"
LEGEND = f"{MAP} .fig-legend button"


@pytest.fixture(scope="module")
def mislabelled(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images, every seventh under the label of another class: what no classifier gets right."""
    stored = np.load(images)
    labels = stored["labels"].copy()
    labels[::7] = (labels[::7] + 1) % 3
    path = tmp_path_factory.mktemp("mislabelled") / "images.npz"
    np.savez(path, images=stored["images"], labels=labels)
    return path


@pytest.fixture(scope="module")
def page(write_run: Callable[..., Path], mislabelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    resnet = {
        "backbone.name": "resnet18",
        "backbone.image_size": None,
        "backbone.patch_size": None,
        "backbone.timm_options": {},
    }
    runs = [write_run(folder / "vit"), write_run(folder / "resnet", resnet)]
    return report(runs, output=folder / "report.html", data=mislabelled).file


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    browser.open(page)
    browser.run(f"document.querySelector('{MAP}').scrollIntoView()")
    return browser


def dots(browser: Any) -> list[dict[str, Any]]:
    """Dots in the order of the page: place on the screen, image, label, prediction and whether it is visible."""
    found: list[dict[str, Any]] = browser.run(
        """
        const map = document.querySelector(arguments[0]);
        const facts = JSON.parse(map.querySelector('.fig-facts').textContent);
        return [...map.querySelectorAll('.fig-dots use')].map((dot, place) => {
          const box = dot.getBoundingClientRect();
          const image = facts.order[place];
          return {x: box.left + box.width / 2, y: box.top + box.height / 2, isSeen: box.width > 0,
            key: facts.keys[image],
            label: facts.names[facts.labels[image]], guess: facts.names[facts.predictions[image]],
            isOutlined: getComputedStyle(dot).stroke !== 'none'};
        });
        """,
        MAP,
    )
    return found


def said(browser: Any) -> list[str]:
    text: str = browser.run(f"return document.querySelector('{MAP} .fig-said').innerText")
    return text.split("\n")


def point_at(browser: Any, dot: dict[str, Any], *, kind: str = "mouse") -> None:
    """A real event of the browser's, not one made by a script."""
    where = {"x": dot["x"], "y": dot["y"]}
    if kind == "mouse":
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **where})
    else:
        browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [where]})
        browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def shown_pixels(browser: Any) -> list[int]:
    """Red, green, blue and opacity of each pixel of the canvas, once the thumbnail is painted."""
    pixels: list[int] = browser.driver.execute_async_script(
        """
        const [selector, done] = arguments;
        setTimeout(() => {
          const canvas = document.querySelector(selector);
          done([...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]);
        }, 200);
        """,
        f"{MAP} canvas",
    )
    return pixels


def lonely(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dots that no other lies close to, so that pointing at them is clear."""

    def gap(one: dict[str, Any]) -> float:
        return min((one["x"] - other["x"]) ** 2 + (one["y"] - other["y"]) ** 2 for other in found if other is not one)

    return sorted(found, key=gap, reverse=True)


def test_pointing_at_a_dot_shows_its_image_label_and_prediction(opened: Any) -> None:
    first, second, *_ = lonely(dots(opened))
    for dot in (first, second):
        point_at(opened, dot)
        label, verdict, key = said(opened)
        assert (label, key) == (dot["label"], dot["key"])
        assert verdict == ("✓ k-NN agrees" if dot["label"] == dot["guess"] else f"✗ k-NN says {dot['guess']}")
    ring = opened.run(f"return document.querySelector('{MAP} .fig-ring').getBoundingClientRect().toJSON()")
    assert ring["left"] < second["x"] < ring["right"]
    assert ring["top"] < second["y"] < ring["bottom"]
    assert opened.console_errors() == []


def test_the_thumbnails_are_those_of_the_dots(opened: Any, images: Path) -> None:
    stored = np.load(images)["images"].astype(float)
    for dot in lonely(dots(opened))[:5]:
        point_at(opened, dot)
        canvas = np.array(shown_pixels(opened)).reshape(256, 256, 4)[:, :, :3].astype(float)
        small = canvas.reshape(16, 16, 16, 16, 3).mean(axis=(1, 3))
        distances = np.abs(stored - small).mean(axis=(1, 2, 3))
        assert int(distances.argmin()) == int(dot["key"].rpartition("/")[2])
        assert distances.min() < 20


def test_a_tap_chooses_and_a_tap_beside_the_dots_chooses_nothing(browser: Any, page: Path) -> None:
    browser.open(page, width=360)
    browser.run(f"document.querySelector('{MAP} .fig-plane').scrollIntoView({{block: 'center'}})")
    dot = lonely(dots(browser))[0]
    point_at(browser, dot, kind="finger")
    assert said(browser)[-1] == dot["key"]
    browser.run(
        f"document.querySelector('{MAP} .fig-plane svg')"
        ".dispatchEvent(new MouseEvent('click', {clientX: -500, clientY: -500}))"
    )
    assert said(browser) == ["Point at a dot, tap it, or walk with the arrow keys."]


def test_arrow_keys_walk_to_dots_in_their_direction(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    by_key = {dot["key"]: dot for dot in dots(opened)}
    opened.press(f"{MAP} .fig-plane svg", Keys.ARROW_RIGHT)  # the first key chooses a dot in the middle
    places = [by_key[said(opened)[-1]]]
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ARROW_UP):
        opened.press(f"{MAP} .fig-plane svg", key)
        places.append(by_key[said(opened)[-1]])
    signs = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    for (along, down), before, after in zip(signs, places, places[1:], strict=False):
        if before is not after:  # at the border there is nowhere to go
            assert along * (after["x"] - before["x"]) + down * (after["y"] - before["y"]) > 0
    assert len({place["key"] for place in places}) >= 3
    opened.press(f"{MAP} .fig-plane svg", Keys.ESCAPE)
    assert said(opened) == ["Point at a dot, tap it, or walk with the arrow keys."]


def test_the_legend_hides_classes_by_mouse_and_keyboard(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    name = opened.run(f"return document.querySelector('{LEGEND} span').innerText")
    assert {dot["label"] for dot in dots(opened) if dot["isSeen"]} == {"0", "1", "2"}
    opened.press(LEGEND)
    assert {dot["label"] for dot in dots(opened) if dot["isSeen"]} == {"0", "1", "2"} - {name}
    assert opened.run(f"return document.querySelector('{LEGEND}').getAttribute('aria-pressed')") == "false"
    opened.press(LEGEND, Keys.ENTER)
    assert all(dot["isSeen"] for dot in dots(opened))
    opened.press(f"{MAP} [data-do=all]")
    assert not any(dot["isSeen"] for dot in dots(opened))
    opened.press(f"{MAP} [data-do=all]")
    opened.press(f"{MAP} [data-do=wrong]")
    assert all(dot["isSeen"] == (dot["label"] != dot["guess"]) for dot in dots(opened))


def test_dots_that_are_hidden_cannot_be_reached(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    opened.press(f"{MAP} [data-do=wrong]")
    opened.press(LEGEND)
    reachable = {dot["key"] for dot in dots(opened) if dot["isSeen"]}
    reached = set()
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_UP):
        opened.press(f"{MAP} .fig-plane svg", key)
        reached.add(said(opened)[-1])
    assert len(reached) > 1
    assert reached <= reachable
    opened.press(f"{MAP} [data-do=all]")
    opened.press(f"{MAP} [data-do=all]")
    assert said(opened) == ["Point at a dot, tap it, or walk with the arrow keys."]  # what was chosen has been hidden


def test_exactly_the_wrong_dots_are_outlined(opened: Any) -> None:
    found = dots(opened)
    assert all(dot["isOutlined"] == (dot["label"] != dot["guess"]) for dot in found)
    assert any(dot["isOutlined"] for dot in found)


def test_one_selector_changes_the_run_of_all_pictures(opened: Any) -> None:
    script = (
        "return [...document.querySelectorAll('.fig-panel')]"
        ".filter((panel) => panel.offsetHeight).map((panel) => panel.dataset.run)"
    )
    assert opened.run(script) == ["0"] * 5
    opened.run(
        "const select = document.querySelector('#neighbours select');"
        "select.value = '1'; select.dispatchEvent(new Event('change'))"
    )
    assert opened.run(script) == ["1"] * 5
    assert "resnet18 does not have" in opened.run("return document.querySelector('#attention').innerText")
    assert "resnet18 does not have" in opened.run("return document.querySelector('#components').innerText")
    point_at(opened, lonely(dots(opened))[0])


def test_pictures_are_there_and_not_blank(opened: Any) -> None:
    sizes = opened.run("return [...document.querySelectorAll('.fig-panels img')].map((image) => image.naturalWidth)")
    assert len(sizes) > 40
    assert min(sizes) > 0
    dot = lonely(dots(opened))[0]
    point_at(opened, dot)
    assert len(set(shown_pixels(opened)[::4])) > 5
    assert [url for url in opened.requests() if not url.startswith(("data:", "file:"))] == []


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone_and_sheets_scroll_in_their_box(browser: Any, page: Path, dark: bool) -> None:
    browser.open(page, width=360, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    assert browser.run(
        "const box = document.querySelector('#neighbours .fig-box'); return box.scrollWidth > box.clientWidth"
    )


@pytest.mark.parametrize("width", [360, 600, 768, 840, 900, 1024, 1280])
def test_words_beside_the_map_have_room_at_every_width(browser: Any, page: Path, width: int) -> None:
    """At 900 px they once stood a letter to the line."""
    browser.open(page, width=width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run("return document.querySelector('.fig-said').getBoundingClientRect().width") > 110
    labels = browser.run(
        "return [...document.querySelectorAll('.fig-legend span')].map((label) => label.getBoundingClientRect().height)"
    )
    assert max(height for height in labels if height) < 45  # two lines at most


def test_paper_shows_the_maps_of_all_runs_without_what_needs_a_pointer(opened: Any) -> None:
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        seen = (
            "return [...document.querySelectorAll(arguments[0])]"
            ".filter((element) => element.getClientRects().length).length"
        )
        assert opened.run(seen, ".fig-plane svg") == 2
        assert opened.run(seen, "#embedding-map h3") == 2
        assert opened.run(seen, ".fig-card, .fig-tools, .fig-runs") == 0
    finally:
        opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_without_a_script_all_maps_are_there(browser: Any, page: Path) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(page)
        picture = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        assert base64.b64decode(picture["data"]).startswith(b"\x89PNG")
        document = browser.driver.execute_cdp_cmd("DOM.getDocument", {})["root"]["nodeId"]
        maps = browser.driver.execute_cdp_cmd(
            "DOM.querySelectorAll", {"nodeId": document, "selector": ".fig-plane svg"}
        )["nodeIds"]
        assert [
            browser.driver.execute_cdp_cmd("DOM.getBoxModel", {"nodeId": one})["model"]["width"] > 300 for one in maps
        ] == [True, True]
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.fixture(scope="module")
def unlabelled(write_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of two colours each, without labels."""
    folder = tmp_path_factory.mktemp("unlabelled")
    halves = np.random.default_rng(0).integers(0, 256, (60, 2, 1, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=halves.repeat(8, axis=1).repeat(16, axis=2))
    run = write_run(folder / "run", {"data.source": str(folder / "images.npz")})
    return report([run], output=folder / "report.html").file


def test_without_labels_the_map_shows_images_and_pointing_at_one_enlarges_it(browser: Any, unlabelled: Path) -> None:
    browser.open(unlabelled)
    browser.run(f"document.querySelector('{MAP}').scrollIntoView()")
    shown = browser.run(
        """
        const map = document.querySelector(arguments[0]);
        const facts = JSON.parse(map.querySelector('.fig-facts').textContent);
        const plane = map.querySelector('.fig-plane svg');
        const box = plane.getBoundingClientRect();
        const unit = box.width / plane.viewBox.baseVal.width;
        return [...map.querySelectorAll('.fig-thumbnail')].map((one, place) => ({
          x: box.left + unit * one.x.baseVal.value, y: box.top + unit * one.y.baseVal.value,
          side: unit * one.width.baseVal.value, key: facts.keys[facts.thumbnails[place]],
        }));
        """,
        MAP,
    )
    assert len(shown) > 10
    picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    stored = np.load(unlabelled.parent / "images.npz")["images"].astype(float)
    for one in shown[:5]:
        box = (one["x"], one["y"], one["x"] + one["side"], one["y"] + one["side"])
        small = np.asarray(picture.crop([round(edge) for edge in box]).resize((16, 16))).astype(float)
        distances = np.abs(stored - small).mean(axis=(1, 2, 3))
        assert int(distances.argmin()) == int(one["key"].rpartition("/")[2])
        assert distances.min() < 25
        point_at(browser, {"x": one["x"] + 2, "y": one["y"] + 2})  # its corner
        assert said(browser)[-1] == one["key"]
    assert browser.console_errors() == []


def test_without_labels_nothing_is_said_of_classes(browser: Any, unlabelled: Path) -> None:
    browser.open(unlabelled)
    words = browser.run(
        "return ['embedding-map', 'neighbours', 'correspondence'].map((id) => document.getElementById(id).innerText)"
    )
    alts = browser.run("return [...document.querySelectorAll('#neighbours img')].map((one) => one.alt)")
    for text in (*words, *alts):
        assert not [words for words in ("same class", "another class", "of a class", "k-NN", "✓", "✗") if words in text]
    assert browser.run("return document.querySelectorAll('#neighbours .fig-right, #neighbours .fig-wrong').length") == 0
