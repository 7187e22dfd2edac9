"""The colours of the style sheet: enough contrast in both themes, and every colour that a chart names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import brim.reporting
from brim.reporting.theme import CONFIG, RAMP_STEPS, ramp_for, series_for

STYLE = (Path(brim.reporting.__file__).parent / "template" / "page.css").read_text(encoding="utf-8")
BLOCKS = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
THEMES = {
    name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for name, block in zip(("light", "dark"), BLOCKS, strict=True)
}

TEXT = ("ink", "muted", "link")
GRAPHICS = (
    "accent",
    "bad",
    "limit",
    "rule",
    *(f"series-{n}" for n in range(1, 7)),
    *(f"ramp-{n}" for n in range(1, 13)),
)


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_words_and_marks_stand_out_from_the_page(theme: str) -> None:
    colours = THEMES[theme]
    for ground in ("surface", "raised", "warning"):
        assert [name for name in TEXT if contrast(colours[name], colours[ground]) < 4.5] == []
    assert [name for name in GRAPHICS if contrast(colours[name], colours["surface"]) < 3] == []


@pytest.mark.parametrize("theme", THEMES)
def test_the_ramp_is_monotonic_in_lightness(theme: str) -> None:
    steps = [luminance(THEMES[theme][f"ramp-{n}"]) for n in range(1, RAMP_STEPS + 1)]
    assert steps == sorted(steps)


def test_both_themes_have_the_same_colours() -> None:
    assert set(THEMES["light"]) == set(THEMES["dark"])


def test_lines_differ_by_symbol_and_use_known_colours() -> None:
    few, many = series_for([f"run {n}" for n in range(6)]), series_for([f"run {n}" for n in range(30)])
    assert len({line.shape for line in few}) == len({line.dash for line in few}) == 6
    assert len({line.colour for line in many}) == RAMP_STEPS
    assert ramp_for(["only"])[0].colour == "var(--ramp-1)"
    used = {line.colour for line in [*few, *many]} | set(re.findall(r"var\(--[\w-]+\)", str(CONFIG)))
    assert {name.removeprefix("var(--").removesuffix(")") for name in used} <= set(THEMES["light"])
