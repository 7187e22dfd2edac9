"""The pictures of README and docs/, drawn from stored records and from the demo's own report.

    python -m benchmarks.pictures                    docs/images/search.svg and evaluation.svg, from benchmarks/data/
    python -m benchmarks.pictures --report RUN       docs/images/report.png: parts of RUN/report.html, in Chromium

A picture has a background of its own and follows the reader's colour scheme, so that it can be read on any page.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data"
IMAGES = ROOT / "docs" / "images"
GIB = 2**30
WIDTH, LEFT, RIGHT = 760, 78, 24

STYLE = """
  .page { fill: #ffffff } .ink { fill: #1b1f24 } .quiet { fill: #59636e } .grid { stroke: #d9dee3 }
  .curve { stroke: #59636e; fill: none } .dot { fill: #59636e } .mine { fill: #0f766e } .ring { stroke: #0f766e }
  .second { fill: #7cc4bb } .bad { stroke: #b93815 } .bad-text { fill: #b93815 }
  text { font: 13px system-ui, sans-serif } .title { font-weight: 600; font-size: 15px }
  .small { font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1e2129 } .ink { fill: #e8eaed } .quiet { fill: #a8b0ba } .grid { stroke: #3d434d }
    .curve { stroke: #a8b0ba } .dot { fill: #a8b0ba } .mine { fill: #2dd4bf } .ring { stroke: #2dd4bf }
    .second { fill: #1f6f67 } .bad { stroke: #fb923c } .bad-text { fill: #fb923c }
  }
"""

Scale = Callable[[float], float]


class Panel:
    """One frame of a picture: a linear axis upwards, and marks in the units of both axes."""

    def __init__(self, title: str, *, top: float, height: float, x: Scale, most: float, step: float) -> None:
        self._x, self._base, self._height, self._most = x, top + height, height, most
        self.parts = [f'<text class="ink title" x="{LEFT - 60}" y="{top - 18}">{escape(title)}</text>']
        for line in range(int(most / step) + 1):
            y = self.y(line * step)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self._text(LEFT - 8, y + 4, f"{line * step:,.0f}", anchor="end")

    def y(self, value: float) -> float:
        return self._base - value / self._most * self._height

    def ticks(self, values: Sequence[float], label: str) -> None:
        for value in values:
            self._text(self._x(value), self._base + 18, f"{value:,.0f}", anchor="middle")
        self._text((LEFT + WIDTH - RIGHT) / 2, self._base + 38, label, anchor="middle")

    def curve(self, points: Sequence[tuple[float, float]]) -> None:
        line = " ".join(f"{self._x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline class="curve" stroke-width="1.5" points="{line}"/>')

    def dot(self, x: float, y: float, *, kind: str = "dot", radius: float = 2.5) -> None:
        self.parts.append(f'<circle class="{kind}" cx="{self._x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}"/>')

    def ring(self, x: float, y: float) -> None:
        place = f'cx="{self._x(x):.1f}" cy="{self.y(y):.1f}"'
        self.parts.append(f'<circle class="ring" fill="none" stroke-width="2.5" {place} r="9"/>')

    def cross(self, x: float, y: float) -> None:
        a, b = self._x(x), self.y(y)
        lines = f"M{a - 4:.1f} {b - 4:.1f}l8 8m0 -8l-8 8"
        self.parts.append(f'<path class="bad" fill="none" stroke-width="1.8" d="{lines}"/>')

    def bar(self, x: float, y: float, *, kind: str, width: float) -> None:
        top = self.y(y)
        place = f'x="{self._x(x) - width / 2:.1f}" y="{top:.1f}" width="{width}" height="{self._base - top:.1f}"'
        self.parts.append(f'<rect class="{kind}" {place}/>')

    def limit(self, value: float, label: str) -> None:
        y = self.y(value)
        self.parts.append(
            f'<line class="bad" stroke-dasharray="5 4" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        self._text(LEFT + 6, y - 6, label, kind="bad-text")

    def note(
        self, x: float, y: float, text: str, *, kind: str = "ink", anchor: str = "start", shift: float = 0
    ) -> None:
        self._text(self._x(x) + shift, self.y(y), text, kind=kind, anchor=anchor)

    def _text(self, x: float, y: float, text: str, *, kind: str = "quiet", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')


def save(name: str, height: int, alternative: str, panels: Sequence[Panel]) -> None:
    body = "\n".join(part for panel in panels for part in panel.parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>'
    text = f"{head}\n<title>{escape(alternative)}</title>\n<style>{STYLE}</style>\n{page}\n{body}\n</svg>\n"
    (IMAGES / name).write_text(text, encoding="utf-8")


def draw_search(search: dict[str, Any], curve: dict[str, Any]) -> None:
    """What brim tried, on every size that was measured."""
    measured = sorted((int(size), point) for size, point in curve.items())
    x: Scale = lambda size: LEFT + math.log2(size) / 9.3 * (WIDTH - LEFT - RIGHT)  # noqa: E731
    rate = Panel("Clips a second, training r3d_18 in bfloat16", top=48, height=200, x=x, most=700, step=100)
    memory = Panel("Reserved memory, GiB", top=318, height=170, x=x, most=28, step=4)
    fits = [(size, point) for size, point in measured if point["verdict"] == "fits"]
    rate.curve([(size, point["rate"]) for size, point in measured if point["rate"]])
    memory.curve([(size, point["reserved"] / GIB) for size, point in fits])
    for size, point in measured:
        if point["verdict"] == "fits":
            rate.dot(size, point["rate"])
            memory.dot(size, point["reserved"] / GIB)
        else:
            rate.cross(size, point["rate"] or 0)
            if point["verdict"] == "oom":
                memory.cross(size, search["limit_bytes"] / GIB)
    memory.limit(search["limit_bytes"] / GIB, "limit: 24 GiB")
    for number, probe in enumerate(search["probes"], 1):
        size, speed = probe["batch_size"], probe["batch_size"] / probe["step_seconds"]
        rate.ring(size, speed)
        memory.ring(size, probe["peak_reserved_bytes"] / GIB)
        chosen = ", chosen" if size == search["size"] else ""
        rate.note(size, speed + 55, f"probe {number}: {size} clips{chosen}", kind="mine", anchor="middle")
    rate.note(256, 300, "the allocator frees", kind="bad-text", anchor="end", shift=-16)
    rate.note(256, 245, "and retries at every step", kind="bad-text", anchor="end", shift=-16)
    rate.note(410, 60, "out of memory", kind="bad-text", anchor="middle")
    memory.ticks([2**power for power in range(10)], "batch size (clips), log scale")
    save("search.svg", 540, "A search on an H200 limited to 24 GiB: two probes, at 7 and 112 clips", [rate, memory])


def draw_evaluation(evaluation: dict[str, Any]) -> None:
    """Every batch of one evaluation, in order."""
    batches = evaluation["batches"]
    x: Scale = lambda number: LEFT + (number - 0.4) / (len(batches) + 0.2) * (WIDTH - LEFT - RIGHT)  # noqa: E731
    size = Panel("Tokens in a batch, thousands; on the bar: the number of prompts", top=48, height=190, x=x, most=500,
                 step=100)  # fmt: skip
    rate = Panel("Tokens a second, thousands", top=300, height=150, x=x, most=500, step=100)
    for number, batch in enumerate(batches, 1):
        kind = "second" if batch["detail"] == "climbing" else "mine"
        thousands = batch["cost"] / 1000
        size.bar(number, thousands, kind=kind, width=26)
        size.note(number, thousands + 10, f"{batch['batch_size']:,}", kind="ink small", anchor="middle")
        rate.dot(number, thousands / batch["step_seconds"], kind=kind, radius=5)
    rate.curve([(at, one["cost"] / 1000 / one["step_seconds"]) for at, one in enumerate(batches, 1)])
    size.note(1, 330, "climbing while it clearly pays", kind="quiet", shift=-12)
    size.note(6, 450, "comparing with twice as much", kind="quiet", shift=-12)
    rate.ticks(range(1, len(batches) + 1), "batch, in the order they ran: the longest prompts first")
    save("evaluation.svg", 505, "The 17 batches of an evaluation on an H200, from 2 prompts to 3,440", [size, rate])


SHOWN = ("Accuracy", "Throughput and batch size")
SHORTEN = """
for (const section of document.querySelectorAll('section'))
  if (!arguments[0].includes(section.querySelector('h2').textContent)) section.style.display = 'none';
for (const rest of document.querySelectorAll('nav, details')) rest.style.display = 'none';
return Math.ceil(document.body.getBoundingClientRect().bottom);
"""


def photograph(run: Path) -> None:
    """A report's headline and two of its sections, in few colours so that the file stays small."""
    from PIL import Image

    from tests.reporting.chromium import Chromium

    browser = Chromium()
    try:
        browser.open((run / "report.html").resolve(), width=1000)
        size = {"width": 1000, "height": browser.ask(SHORTEN, list(SHOWN)), "deviceScaleFactor": 1, "mobile": False}
        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "page.png"
            browser.driver.save_screenshot(str(picture))
            Image.open(picture).convert("RGB").quantize(128).save(IMAGES / "report.png", optimize=True)
    finally:
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="the folder of a profile, as `brim demo` leaves it")
    asked = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    if asked.report:
        photograph(asked.report)
        return
    stored = json.loads((DATA / "sizing-h200.json").read_text(encoding="utf-8"))
    curves = json.loads((DATA / "curves-h200.json").read_text(encoding="utf-8"))["curves"]
    draw_search(stored["search"], curves["24GiB"]["r3d_18 train 16x112"])
    draw_evaluation(stored["evaluation"])


if __name__ == "__main__":
    main()
