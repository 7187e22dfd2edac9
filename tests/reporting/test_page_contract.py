"""What every page holds to, whatever kind of run it is of."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path

import pytest

from tests.reporting.reported_pages import HOSTILE

Pages = dict[str, Path]

VOID = ("meta", "link", "br", "img", "input")


class Outline(html.parser.HTMLParser):
    """The tags, and whether each that was opened was closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.style = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        if self.open and self.open[-1] == "style":
            self.style += data


@pytest.fixture(scope="module")
def texts(pages: Pages) -> dict[str, str]:
    return {name: page.read_text(encoding="utf-8") for name, page in pages.items()}


def test_pages_are_well_formed_and_allow_only_their_own_scripts(texts: dict[str, str]) -> None:
    for name, page in texts.items():
        outline = Outline(page)
        assert outline.open == [], name
        policy = next(attributes["content"] for tag, attributes in outline.attributes if "http-equiv" in attributes)
        assert policy is not None
        specs, *scripts = outline.scripts
        digests = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts]
        assert f"script-src {' '.join(digests)};" in policy, name
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert json.loads(specs)["config"]
        assert len(page) < 1_500_000, name


def test_nothing_is_linked_but_places_on_the_page_and_files_beside_it(texts: dict[str, str]) -> None:
    for name, page in texts.items():
        for tag, attributes in Outline(page).attributes:
            assert "src" not in attributes, (name, tag)
            assert not any(one.startswith("on") or one == "style" for one in attributes), (name, tag)
            assert not re.match(r"[a-z]+:|//", attributes.get("href") or "#"), (name, attributes)


def test_every_chart_has_a_text_a_title_and_a_table_in_its_section(texts: dict[str, str]) -> None:
    for name, page in texts.items():
        sections = re.findall(r"<section.*?</section>", page, re.DOTALL)
        assert sections, name
        for section in sections:
            charts = re.findall(r'<div class="chart" id="chart-\d+" role="img" aria-label="([^"]*)">', section)
            assert all(15 < len(text) < 400 or "hostile" in name for text in charts), (name, charts)
            assert section.count("<figure>") == section.count('<figcaption class="seen">') == len(charts), name
            assert not charts or "<table>" in section, name


def test_chart_specifications_are_numbered_and_strict_json(texts: dict[str, str]) -> None:
    for name, page in texts.items():
        specs = Outline(page).scripts[0]
        places = [int(place) for place in re.findall(r'id="chart-(\d+)"', page)]
        assert places == list(range(len(json.loads(specs)["specs"]))), name
        json.loads(specs, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_no_figure_is_shown_raw(texts: dict[str, str]) -> None:
    for name, page in texts.items():
        body = page[page.index("<body>") : page.index('<script type="application/json"')]
        assert re.findall(r">(nan|inf|None|null|NaN|\{\}|\[\])<", body) == [], name
        assert re.findall(r"\d\.\d{7,}", body) == [], name


def test_text_of_a_run_is_escaped(pages: Pages) -> None:
    page = pages["hostile_profile"].read_text(encoding="utf-8")
    assert HOSTILE not in page
    body = page[page.index("<body>") : page.index("<script>(() => {")]
    assert body.count("<script") == 1
    assert "&lt;script&gt;window.hacked = 1&lt;/script&gt;" in body
    assert "<img" not in body
