"""The pages, opened for real: charts drawn, nothing asked of the network, no message on the console, in every light."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reporting.chromium import Chromium
from tests.reporting.reported_pages import PAGES

Pages = dict[str, Path]

LONG_NAMES = ("hostile_profile", "compared_evaluations")  # whose labels are cut on purpose

MARKS = """
return [...document.querySelectorAll('.chart')].map(chart => ({
  title: chart.parentElement.querySelector('h3').textContent,
  svg: !!chart.querySelector('svg'),
  marks: [...chart.querySelectorAll('[class*="mark-symbol role-mark"] path, [class*="mark-rect role-mark"] path, '
      + '[class*="mark-line role-mark"] path, [class*="mark-area role-mark"] path, '
      + '[class*="mark-rule role-mark"] line')]
    .filter(mark => mark.getBoundingClientRect().width + mark.getBoundingClientRect().height > 0).length,
}))
"""
# Every text of a chart: what it says and where it stands, in its chart.
TEXTS = """
return [...document.querySelectorAll('.chart svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => text.textContent && getComputedStyle(text).opacity > 0)
    .map(text => { const box = text.getBoundingClientRect();
      return {text: text.textContent, left: box.left - frame.left, right: frame.right - box.right,
              top: box.top - frame.top, bottom: frame.bottom - box.bottom}; });
})
"""
# Labels of one axis that lie on one another.
OVERLAPS = """
return [...document.querySelectorAll('.chart svg [class*="role-axis-label"]')].flatMap(axis => {
  const labels = [...axis.querySelectorAll('text')].filter(text => text.textContent
    && getComputedStyle(text).opacity > 0 && !text.getAttribute('transform').includes('rotate'));
  const boxes = labels.map(label => label.getBoundingClientRect());
  return labels.slice(1).filter((_, place) => { const [a, b] = [boxes[place], boxes[place + 1]];
    return a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom; })
    .map(label => label.textContent);
})
"""
COLOURS = """
const seen = (element, name) => getComputedStyle(element).getPropertyValue(name);
const chart = document.querySelector('.chart svg');
return {page: seen(document.body, 'background-color'), ink: seen(document.body, 'color'),
        label: seen(chart.querySelector('.role-axis-label text'), 'fill'),
        line: seen(chart.querySelector('.mark-line.role-mark path'), 'stroke')}
"""


def luminance(colour: str) -> float:
    """Of `rgb(27, 31, 36)`, by WCAG."""
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_all_charts_without_network_requests(browser: Chromium, pages: Pages, name: str) -> None:
    for width, theme in ((1280, "light"), (360, "dark")):
        browser.open(pages[name], width=width, theme=theme)
        charts = browser.ask(MARKS)
        assert [chart["title"] for chart in charts if not chart["svg"] or chart["marks"] == 0] == []
        assert browser.console() == []
        assert browser.requests() == [pages[name].as_uri()]
        assert browser.ask("return window.hacked") is None
        assert browser.ask("return document.querySelectorAll('script').length") == 3
        assert browser.ask("return document.querySelectorAll('img').length") == 0
        if name in LONG_NAMES:
            continue
        assert browser.ask("return document.documentElement.scrollWidth") == width
        sides = ("left", "right", "top", "bottom")
        assert [one["text"] for one in browser.ask(TEXTS) if any(one[side] < -1.5 for side in sides)] == []
        assert browser.ask(OVERLAPS) == []


def test_a_full_profile_has_all_its_figures(browser: Chromium, pages: Pages) -> None:
    browser.open(pages["full"])
    titles = [chart["title"] for chart in browser.ask(MARKS)]
    assert titles == [
        "Accuracy (vqa)", "Vision tokens per sample (mean)", "vqa against time per sample", "Throughput (samples/s)",
        "Batch size (samples)", "Memory (GiB)", "At batch size 1 (ms)", "At the batch size used (ms)",
        "Sizes tried (samples)", "Reserved memory by batch size (GiB)", "Throughput by batch size (samples/s)",
        "GPU use", "GPU memory in use (GiB)", "GPU power (W)",
    ]  # fmt: skip
    accuracy = next(chart for chart in browser.ask(MARKS) if chart["title"] == "Accuracy (vqa)")
    assert accuracy["marks"] == 12 + 12 + 1 + 1  # points, intervals, the line, the ring


@pytest.mark.parametrize("width", [360, 1280])
def test_the_recommended_point_is_marked_and_named(browser: Chromium, pages: Pages, width: int) -> None:
    browser.open(pages["full"], width=width)
    names = [one for one in browser.ask(TEXTS) if one["text"] == "recommended: 11"]
    assert len(names) == 2  # the name, and its halo behind it
    assert all(name[side] >= 0 for name in names for side in ("left", "right", "top", "bottom"))
    assert browser.ask("return document.querySelector('.headline h2').textContent") == "Recommended: max_crops = 11"


def test_the_theme_follows_the_system_without_a_new_load(browser: Chromium, pages: Pages) -> None:
    browser.open(pages["full"], theme="light")
    light = browser.ask(COLOURS)
    browser.emulate(theme="dark")
    dark = browser.ask(COLOURS)
    assert luminance(light["page"]) > 0.9 > 0.1 > luminance(dark["page"])
    assert all(light[name] != dark[name] for name in light)
    for seen in (light, dark):
        assert contrast(seen["ink"], seen["page"]) >= 7
        assert contrast(seen["label"], seen["page"]) >= 4.5
        assert contrast(seen["line"], seen["page"]) >= 3


def test_print_is_light_and_open_and_closes_again(browser: Chromium, pages: Pages) -> None:
    browser.open(pages["full"], theme="dark")
    closed = "return document.querySelectorAll('details:not([open])').length"
    before = browser.ask(closed)
    assert before > 5
    browser.emulate(theme="dark", medium="print")
    printed = browser.ask(COLOURS)
    assert contrast(printed["ink"], "rgb(255, 255, 255)") >= 7
    assert contrast(printed["label"], "rgb(255, 255, 255)") >= 4.5
    browser.ask("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.ask(closed) == 0
    assert browser.ask("return document.querySelector('details table').getBoundingClientRect().height") > 100
    browser.ask("window.dispatchEvent(new Event('afterprint'))")
    assert browser.ask(closed) == before
    assert browser.console() == []


def test_hovering_shows_the_point_as_plain_text(browser: Chromium, pages: Pages) -> None:
    browser.open(pages["hostile_profile"])
    place: Any = browser.ask("""
        document.querySelector('.chart').scrollIntoView();
        const point = document.querySelector('.chart svg .mark-symbol.role-mark:last-of-type path');
        const box = point.getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2];
    """)
    browser.hover(*place)
    shown = browser.ask("const box = document.getElementById('vg-tooltip-element'); return box && box.textContent")
    assert "<script>window.hacked" in shown
    assert browser.ask("return getComputedStyle(document.getElementById('vg-tooltip-element')).visibility") == "visible"
    assert browser.ask("return window.hacked") is None
    assert browser.ask("return document.querySelectorAll('#vg-tooltip-element img').length") == 0
    assert browser.console() == []


def test_without_scripts_every_figure_is_in_a_table(browser: Chromium, pages: Pages) -> None:
    browser.without_scripts(True)
    try:
        browser.open(pages["full"], wait=False)
        assert "Charts need JavaScript" in browser.ask("return document.querySelector('noscript').textContent")
        rows = browser.ask("return [...document.querySelectorAll('table')].map(table => table.rows.length)")
        assert len(rows) >= 9
        assert min(rows) > 1
    finally:
        browser.without_scripts(False)
