"""The site, built strictly and opened for real: no dead link, nothing from the network, readable on any screen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest

from brim.settings.commands import COMMANDS
from tests.docs.blocks import ROOT
from tests.reporting.chromium import Chromium
from tests.reporting.test_pages_in_chromium import contrast, luminance

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}  # what a browser fetches
OPENED = ("index.html", "settings.html", "reference/functions.html", "measurements/find.html", "zh/get-started.html")
SEARCHED = """
const input = document.querySelector('[data-md-component=search-query]')
input.focus(); input.value = arguments[0]
input.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); input.dispatchEvent(new Event('input'))
"""
FOUND = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href'))"
COLOURS = """
const seen = (element, name) => getComputedStyle(element).getPropertyValue(name)
const text = document.querySelector('article p')
return {page: seen(document.body, 'background-color'), ink: seen(text, 'color')}
"""


class Links(HTMLParser):
    """The links of a page, what it loads and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif (address := given.get(LOADED.get(tag, ""))) and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    warnings = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
    assert done.returncode == 0, "\n".join(warnings)
    return folder


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Links]:
    return {page: Links(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}


def test_no_link_inside_the_site_is_dead(site: Path, parsed: dict[Path, Links]) -> None:
    dead = []
    for page, found in parsed.items():
        if page.name == "404.html":
            continue  # its links begin at the root of a server
        for link in found.links + found.loads:
            address, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", address):
                continue
            target = (page.parent / urllib.parse.unquote(address)).resolve() if address else page
            anchors = parsed[target].anchors if target in parsed else None
            if not target.is_file() or (anchor and anchors and urllib.parse.unquote(anchor) not in anchors):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_the_network(site: Path, parsed: dict[Path, Links]) -> None:
    loaded = {link for found in parsed.values() for link in found.loads if re.match(r"(https?:)?//", link)}
    assert loaded == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)]*", styles) == []


def test_every_page_of_the_docs_can_be_reached(site: Path, parsed: dict[Path, Links]) -> None:
    home, reached = site / "index.html", set()
    waiting = [home]
    while waiting:
        page = waiting.pop()
        if page in reached or page not in parsed:
            continue
        reached.add(page)
        links = (link.partition("#")[0] for link in parsed[page].links if not re.match(r"[a-z]+:", link))
        waiting += [(page.parent / urllib.parse.unquote(link)).resolve() for link in links if link]
    assert {page.relative_to(site).as_posix() for page in set(parsed) - reached} <= {"404.html"}


def test_links_of_pages_are_alive_in_the_repository_too() -> None:
    dead = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            path = urllib.parse.unquote(target.partition("#")[0])
            if path and not re.match(r"[a-z]+:", path) and not (page.parent / path).exists():
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert dead == []


@pytest.mark.parametrize("name", OPENED)
def test_a_page_opens_offline_wide_and_narrow_light_and_dark(browser: Chromium, site: Path, name: str) -> None:
    page = site / name
    seen = {}
    for width, theme in ((1280, "light"), (400, "light"), (400, "dark"), (1280, "dark")):
        browser.open(page, width=width, theme=theme, wait=False)
        assert browser.console() == []
        assert [address for address in browser.requests() if not address.startswith(("file:", "data:"))] == []
        assert browser.ask("return document.documentElement.scrollWidth") <= width
        seen[theme] = browser.ask(COLOURS)
    assert luminance(seen["light"]["page"]) > 0.9 > 0.1 > luminance(seen["dark"]["page"])
    assert contrast(seen["light"]["ink"], seen["light"]["page"]) >= 7
    assert contrast(seen["dark"]["ink"], seen["dark"]["page"]) >= 7


def test_search_finds_pages_from_the_disk(browser: Chromium, site: Path) -> None:
    browser.open(site / "index.html", wait=False)
    end = time.monotonic() + 60
    while not (found := browser.ask(FOUND)):
        assert time.monotonic() < end, browser.console()
        browser.ask(SEARCHED, "batch size")
        time.sleep(0.2)
    pages = {urllib.parse.urlsplit(address).path.rpartition("/")[2] for address in found}
    assert len(pages) >= 3
    assert pages <= {page.name for page in site.rglob("*.html")}
    assert [address for address in browser.requests() if not address.startswith(("file:", "data:"))] == []
    assert browser.console() == []


def test_every_command_has_a_page() -> None:
    titles = " ".join(
        page.read_text(encoding="utf-8").partition("\n")[0].replace("`", "")
        for page in (ROOT / "docs" / "commands").glob("*.md")
    )
    assert [name for name in COMMANDS if f"brim {name.partition(' ')[0]}" not in titles] == []
