"""The page of massl report in a browser: what a reader sees, hears of and can press."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from massl.commands.report.command import report
from massl.evaluations.measurement import Setting
from massl.evaluations.results import ResultRow, append_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ACCURACIES = [71.5, 9.25, 100.0, 44.0]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, write_run: Callable[..., Path]) -> Path:
    """Two runs, one with pictures and results, and an ablation."""
    folder = tmp_path_factory.mktemp("report")
    first = write_run(folder / "first")
    second = write_run(folder / "second", {"trainer.epochs": 20}, shift=1.0, has_backbone=False)
    shared: dict[str, Any] = {
        "metric": "top1",
        "num_samples": 1000,
        "seconds": 1.5,
        "weights": "w",
        "model": "first",
        "precision": "fp32",
    }
    shared |= {"architecture": "ViT-S/16", "run": "r", "train": "", "images": "i"}
    rows = [
        ResultRow(protocol="knn", data="Toys", setting=Setting(k=k), value=value, **shared)
        for k, value in enumerate(ACCURACIES, start=8)
    ]
    rows.append(ResultRow(protocol="knn", data="ImageNet", setting=Setting(k=20), value=70.0, **shared))
    append_rows(first / "results/results.jsonl", rows)
    ablation = folder / "ablation/memory-size"
    ablation.mkdir(parents=True)
    shutil.copy(ROOT / "docs/results/ablations/memory-size.json", ablation / "ablation.json")
    return report([first, second, folder / "ablation"], output=folder / "report.html").file


def column(browser: Any, table: int, place: int) -> list[str]:
    rows = "[...document.querySelectorAll('#results table')[arguments[0]].tBodies[0].rows]"
    texts: list[str] = browser.run(f"return {rows}.map(row => row.cells[arguments[1]].innerText)", table, place)
    return texts


def num_lines(browser: Any, chart: str) -> int:
    return int(browser.run("return document.querySelectorAll(`[data-chart=${arguments[0]}] .series`).length", chart))


def test_the_page_has_every_section_and_no_console_errors(browser: Any, page: Path) -> None:
    browser.open(page)
    ids = browser.run("return [...document.querySelectorAll('main > section')].map(section => section.id)")
    assert ids[:5] == ["verdict", "summary", "training", "results", "ablations"]
    assert ids[-1] == "reproduction"
    assert len(ids) > 5, "there are no sections of pictures"
    assert all(
        browser.run("return [...document.querySelectorAll('main > section')].map(section => section.offsetHeight > 50)")
    )
    assert browser.console_errors() == []


def test_nothing_is_asked_of_the_network(browser: Any, page: Path) -> None:
    browser.open(page)
    asked = browser.requests()
    assert page.as_uri() in asked
    assert [
        address for address in asked if address != page.as_uri() and not address.startswith(("data:", "blob:"))
    ] == []
    assert (
        browser.run("return performance.getEntriesByType('resource').filter(e => !/^(data|blob):/.test(e.name)).length")
        == 0
    )


def test_the_file_is_small(page: Path) -> None:
    assert page.stat().st_size < 10e6


def test_columns_are_sorted_by_click_and_by_keyboard(browser: Any, page: Path) -> None:
    browser.open(page)
    values = browser.run(
        "return [...document.querySelectorAll('#results th')]"
        ".findIndex(heading => heading.innerText.startsWith('value'))"
    )
    heading = f"#results th:nth-child({values + 1})"
    browser.press(f"{heading} button")
    assert column(browser, 0, values) == ["100.00", "71.50", "70.00", "44.00", "9.25"]
    assert browser.run("return document.querySelector(arguments[0]).getAttribute('aria-sort')", heading) == "descending"
    browser.press(f"{heading} button", "\n")
    assert column(browser, 0, values) == ["9.25", "44.00", "70.00", "71.50", "100.00"]
    assert browser.run("return document.querySelector(arguments[0]).getAttribute('aria-sort')", heading) == "ascending"
    assert (
        browser.run("return document.querySelectorAll('#results table:first-of-type th[aria-sort=ascending]').length")
        == 1
    )


def test_missing_values_stay_last_in_either_direction(browser: Any, page: Path) -> None:
    browser.open(page)
    paper = browser.run(
        "return [...document.querySelectorAll('#results th')].findIndex(heading => heading.innerText.includes('paper'))"
    )
    for _ in range(2):
        browser.press(f"#results th:nth-child({paper + 1}) button")
        cells = column(browser, 0, paper)
        assert cells[0] != "–"
        assert cells[1:] == ["–"] * 4


def test_the_legend_hides_and_shows_a_run_in_all_charts(browser: Any, page: Path) -> None:
    browser.open(page)
    assert num_lines(browser, "loss") == num_lines(browser, "knn_top1") == 2
    browser.press(".legend button[data-run='1']", " ")
    assert (
        browser.run("return document.querySelector('.legend button[data-run=\"1\"]').getAttribute('aria-pressed')")
        == "false"
    )
    assert num_lines(browser, "loss") == num_lines(browser, "knn_top1") == num_lines(browser, "knn_by_minutes") == 1
    browser.press(".legend button[data-run='1']")
    assert num_lines(browser, "loss") == 2


def test_a_page_with_all_runs_hidden_still_stands(browser: Any, page: Path) -> None:
    browser.open(page)
    for run in (0, 1):
        browser.press(f".legend button[data-run='{run}']")
    assert num_lines(browser, "loss") == 0
    assert browser.console_errors() == []


def test_the_axis_can_be_switched_except_where_it_is_the_point(browser: Any, page: Path) -> None:
    browser.open(page)
    ticks = "return [...document.querySelectorAll(`[data-chart=${arguments[0]}] text`)].map(text => text.textContent)"
    assert browser.run(ticks, "loss")[-1] == "epoch"
    assert "10" in browser.run(ticks, "loss")
    browser.press("button[data-axis=step]")
    assert browser.run(ticks, "loss")[-1] == "step"
    assert "100" in browser.run(ticks, "loss")
    browser.press("button[data-axis=minutes]")
    assert browser.run(ticks, "loss")[-1] == "GPU-minutes"
    assert browser.run(
        "return [...document.querySelectorAll('[data-axis][aria-pressed=true]')].map(b => b.dataset.axis)"
    ) == ["minutes"]
    browser.press("button[data-axis=epoch]")
    assert browser.run(ticks, "knn_by_minutes")[-1] == "GPU-minutes"


def test_pointing_at_a_chart_reads_the_nearest_point_of_each_run(browser: Any, page: Path) -> None:
    browser.open(page)
    browser.run(
        "const svg = document.querySelector('[data-chart=knn_top1] svg'), box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 14, clientY: box.top + 50}))"
    )
    read = (
        "const box = document.querySelector('[data-chart=knn_top1] .readout'); return box.hidden ? null : box.innerText"
    )
    assert browser.run(read).split("\n") == ["epoch 10", "first", "70 %", "second", "60 %"]
    assert browser.run(
        "const box = document.querySelector('[data-chart=knn_top1] .readout').getBoundingClientRect(),"
        "chart = document.querySelector('[data-chart=knn_top1]').getBoundingClientRect();"
        "return box.left >= chart.left && box.right <= chart.right && box.bottom <= chart.bottom && box.height < 120"
    )
    browser.press("[data-chart=knn_top1] svg", "\ue012")  # arrow left
    browser.press("[data-chart=knn_top1] svg", "\ue012")
    assert browser.run(read).startswith("epoch 9\n")
    browser.press("[data-chart=knn_top1] svg", "\ue00c")  # escape
    assert browser.run(read) is None


def test_static_and_drawn_charts_agree(browser: Any, page: Path) -> None:
    """What readers without scripts see stands in the file; at its width the script draws the same line."""
    browser.open(page)
    lines = (
        "return [...arguments[0].querySelectorAll('[data-chart=loss] polyline')]"
        ".map(line => line.getAttribute('points'))"
    )
    drawn = browser.run(lines.replace("arguments[0]", "document"))
    static = browser.run(
        "const page = new DOMParser().parseFromString(arguments[0], 'text/html');"
        f"return (function () {{ {lines} }})(page)",
        page.read_text(),
    )
    assert [len(line.split()) for line in static] == [len(line.split()) for line in drawn] == [11, 11]
    heights = [[float(corner.split(",")[1]) for corner in line.split()] for line in (static[0], drawn[0])]
    assert heights[0] == pytest.approx(heights[1], abs=0.11)


def test_pictures_are_not_blank(browser: Any, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    spreads = browser.run(
        """return [...document.images].map(image => {
            const canvas = document.createElement('canvas');
            canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
            if (!canvas.width) return 0;
            const pen = canvas.getContext('2d');
            pen.drawImage(image, 0, 0);
            const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
            let low = 255, high = 0;
            for (let at = 0; at < pixels.length; at += 4) {
                low = Math.min(low, pixels[at]); high = Math.max(high, pixels[at]);
            }
            return high - low;
        })"""
    )
    assert spreads, "the page shows no pictures"
    assert min(spreads) > 10
    assert browser.run("return document.querySelector('#ablations svg').getBoundingClientRect().height") > 100


@pytest.mark.parametrize("opened", [False, True], ids=["folded", "unfolded"])
def test_a_telephone_shows_it_without_scrolling_sideways(browser: Any, page: Path, opened: bool) -> None:
    browser.open(page, width=360)
    browser.run("document.querySelectorAll('details').forEach(details => { details.open = arguments[0]; })", opened)
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    assert browser.run(
        "return document.querySelector('.table-box').scrollWidth > document.querySelector('.table-box').clientWidth"
    )


def test_a_telephone_shows_the_accuracy_first_and_that_there_is_more(browser: Any, page: Path) -> None:
    browser.open(page, width=390)
    browser.run("document.querySelector('#summary .table-box').scrollIntoView({block: 'center'})")
    headings = browser.run(
        "const box = document.querySelector('#summary .table-box'), edge = box.getBoundingClientRect().right;"
        "return [...box.querySelectorAll('th')]"
        ".filter(one => one.getBoundingClientRect().right <= edge).map(one => one.textContent)"
    )
    assert headings[:2] == ["run", "k-NN last, %"]
    assert browser.run("return document.querySelector('#summary .unlike').open")
    before = edges_of(browser, "#summary .table-box")
    assert before[0] > before[1] + 20  # darker at the right, where more lies
    browser.run("document.querySelector('#summary .table-box').scrollLeft = 1e4")
    after = edges_of(browser, "#summary .table-box")
    assert after[1] > after[0] + 20


def edges_of(browser: Any, selector: str) -> tuple[int, int]:
    """How light the left and right edge of a box are, near its lower end, where no text stands."""
    box = browser.run(
        "const {left, right, bottom} = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return {left, right, bottom}",
        selector,
    )
    picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("L")
    height = (
        box["bottom"]
        - browser.run(
            "const box = document.querySelector(arguments[0]); return box.offsetHeight - box.clientHeight", selector
        )
        - 14
    )
    left, right = (picture.getpixel((round(place), round(height))) for place in (box["left"] + 2, box["right"] - 3))
    return int(left), int(right)


def test_raw_pixels_are_a_line_with_a_name(browser: Any, tmp_path: Path, write_run: Callable[..., Path]) -> None:
    run = write_run(tmp_path / "run", has_backbone=False)
    (run / "baseline.json").write_text('{"raw_pixel_knn": 31.0}')
    browser.open(report([run], output=tmp_path / "r.html", figures=False).file)
    for chart in ("knn_top1", "knn_by_minutes"):
        assert (
            browser.run("return document.querySelector(`[data-chart=${arguments[0]}] .level-name`).textContent", chart)
            == "raw pixels 31.0 %"
        )
        look = browser.run(
            "return getComputedStyle(document.querySelector(`[data-chart=${arguments[0]}] .level`)).strokeDasharray",
            chart,
        )
        assert look != "none"
    assert browser.run("return document.querySelectorAll('.level').length") == 2
    assert browser.console_errors() == []


@pytest.mark.parametrize("width", [360, 1280])
def test_no_word_of_a_chart_lies_on_a_curve(
    browser: Any, tmp_path: Path, write_run: Callable[..., Path], width: int
) -> None:
    """Raw pixels on a level with the end of the curve: their name once lay upon it."""
    run = write_run(tmp_path / "run", has_backbone=False)
    (run / "baseline.json").write_text('{"raw_pixel_knn": 69.0}')
    browser.open(report([run], output=tmp_path / "r.html", figures=False).file, width=width)
    collisions = browser.run(
        """
        const found = [];
        for (const svg of document.querySelectorAll('.chart > svg')) {
          if (!svg.getClientRects().length) continue;
          for (const word of svg.querySelectorAll('text')) {
            const box = word.getBBox();
            for (const line of svg.querySelectorAll('.series')) {
              const length = line.getTotalLength();
              for (let at = 0; at <= length; at += 1) {
                const point = line.getPointAtLength(at);
                if (point.x > box.x && point.x < box.x + box.width && point.y > box.y && point.y < box.y + box.height) {
                  found.push(word.textContent);
                  break;
                }
              }
            }
          }
        }
        return found;
        """
    )
    assert collisions == []


@pytest.mark.parametrize("dark", [False, True])
def test_buttons_show_which_is_on(browser: Any, page: Path, dark: bool) -> None:
    """By more than a shade: 3 : 1 between the grounds of on and off, or a line through what is off."""
    browser.open(page, dark=dark)
    browser.press(".legend button")
    browser.press("[data-do=wrong]")
    for on, off in (
        ("[data-axis][aria-pressed=true]", "[data-axis][aria-pressed=false]"),
        ("[data-do=wrong][aria-pressed=true]", ".copy"),
        (".legend button[aria-pressed=true]", ".legend button[aria-pressed=false]"),
    ):
        grounds, words = browser.run(LOOKS, on, off)
        assert grounds >= 3.0 or words == ["none", "line-through"], on


LOOKS = """
const channel = value => { value /= 255; return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4; };
const light = ([red, green, blue]) => 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
const card = getComputedStyle(document.querySelector('.chart')).backgroundColor;
const both = [...arguments].map(selector => getComputedStyle(document.querySelector(selector)));
const [one, other] = both.map(style => {
  const colour = style.backgroundColor.match(/[\\d.]+/g).map(Number);
  return light(colour[3] === 0 ? card.match(/[\\d.]+/g).map(Number) : colour);
});
return [(Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05), both.map(style => style.textDecorationLine)];
"""


CONTRASTS = """
const channel = value => { value /= 255; return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4; };
const light = ([red, green, blue]) => 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
const behind = element => {
  for (let at = element; at; at = at.parentElement) {
    const colour = numbers(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll('body *')) {
  const hasText = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  if (!hasText || !element.getClientRects().length || ['SCRIPT', 'STYLE', 'OPTION'].includes(element.tagName)) continue;
  const style = getComputedStyle(element);
  const ink = numbers(element instanceof SVGElement ? style.fill : style.color);
  const [one, other] = [light(ink), light(behind(element))].sort((a, b) => b - a);
  const ratio = (one + 0.05) / (other + 0.05);
  if (ratio < 4.5) found.push(`${element.tagName} ${ratio.toFixed(2)} ${element.textContent.trim().slice(0, 30)}`);
}
return found;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read(browser: Any, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert browser.run(CONTRASTS) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_lines_of_runs_stand_out_from_their_ground(browser: Any, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    resolved = browser.run(
        "const probe = document.createElement('i'); document.body.append(probe);"
        "const colours = ['--card', ...[0, 1, 2, 3, 4, 5].map(run => `--run-${run}`)].map(name => {"
        "  probe.style.color = `var(${name})`; return getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number); });"
        "probe.remove(); return colours;"
    )
    card, *runs = (luminance(colour) for colour in resolved)
    assert min((max(card, run) + 0.05) / (min(card, run) + 0.05) for run in runs) >= 3.0


def luminance(colour: list[float]) -> float:
    linear = [
        value / 255 / 12.92 if value / 255 <= 0.03928 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in colour
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_light_and_dark_differ_and_the_button_overrules_the_system(browser: Any, page: Path) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    browser.open(page)
    light = browser.run(background)
    browser.open(page, dark=True)
    dark = browser.run(background)
    assert light != dark
    assert browser.run("return document.querySelector('.theme').innerText") == "Light"
    browser.press(".theme")
    assert browser.run(background) == light
    browser.press(".theme")
    assert browser.run(background) == dark


def test_on_paper_it_is_light_and_has_no_buttons(browser: Any, page: Path) -> None:
    browser.open(page, dark=True)
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        for hidden in (".theme", ".segmented", ".copy", "nav"):
            assert browser.run("return document.querySelector(arguments[0]).getClientRects().length", hidden) == 0, (
                hidden
            )
        assert browser.run("return document.querySelector('.legend').getClientRects().length") == 1
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_commands_are_copied(browser: Any, page: Path) -> None:
    browser.open(page)
    browser.run("window.copied = ''; navigator.clipboard.writeText = async text => { window.copied = text; }")
    browser.press("#reproduction button.copy")
    browser.run("return new Promise(done => setTimeout(done, 50))")
    assert browser.run("return window.copied") == "massl pretrain --recipe demo-vit --output first"
    assert browser.run("return document.querySelector('#reproduction button.copy').innerText") == "Copied"


def test_names_of_runs_cannot_put_markup_into_the_page(
    browser: Any, tmp_path: Path, write_run: Callable[..., Path]
) -> None:
    odd = write_run(tmp_path / "<img src=x onerror=alert(1)>", has_backbone=False)
    other = write_run(tmp_path / "a & b", has_backbone=False)
    file = report([odd, other], output=tmp_path / "odd.html", figures=False).file
    browser.open(file)
    assert browser.run("return document.images.length") == 0
    assert browser.run("return document.querySelector('.legend button').innerText") == "<img src=x onerror=alert(1)>"
    assert json.loads(browser.run("return document.getElementById('page-data').textContent"))["runs"][1] == {
        "label": "a & b"
    }
    assert browser.console_errors() == []


def test_many_runs_of_long_names_fit_a_telephone(browser: Any, tmp_path: Path, write_run: Callable[..., Path]) -> None:
    runs = [
        write_run(tmp_path / f"{'a-rather-long-name-of-a-run-' * 3}{number}", shift=number / 8, has_backbone=False)
        for number in range(8)
    ]
    browser.open(report(runs, output=tmp_path / "many.html", figures=False).file, width=360)
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    assert browser.run("return document.querySelector('.bar').offsetHeight") < 200
    dashes = browser.run(
        "return [...document.querySelectorAll('[data-chart=loss] .series')]"
        ".map(line => line.getAttribute('stroke-dasharray'))"
    )
    assert dashes == [None] * 6 + ["6 4"] * 2  # whose colours are those of the first two


def test_without_scripts_charts_and_tables_are_there(browser: Any, page: Path) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(page)
        tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    seen = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    assert ("image", "Loss by epoch") in seen
    assert ("button", "Copy") not in seen
    assert any(role == "cell" and name == "71.50" for role, name in seen)
