"""The script inside every page: put together once, kept by version, and no reason to fail."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.reporting import page, write

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A vl-convert that only counts."""
    made: Calls = []

    def javascript_bundle(snippet: str, version: str) -> str:
        made.append((snippet, version))
        if version == "9.9":
            raise ValueError("no such version")
        return "const a = '</script><!--';"

    monkeypatch.setitem(sys.modules, "vl_convert", types.SimpleNamespace(javascript_bundle=javascript_bundle))
    page.chart_library.cache_clear()
    yield made
    page.chart_library.cache_clear()


def test_the_script_is_kept_for_the_next_process(calls: Calls, own_cache_folder: Path) -> None:
    first = page.chart_library("v6.4.1")
    page.chart_library.cache_clear()
    assert page.chart_library("v6.4.1") == first
    assert [version for _, version in calls] == ["6.4"]
    (kept,) = (own_cache_folder / "brim" / "report").iterdir()
    assert kept.name.startswith("vega-lite-6.4-vl-convert-")


def test_no_tag_in_the_script_can_end_it_and_its_names_stay_inside(calls: Calls) -> None:
    script = page.chart_library("v6.4.1")
    assert "</script" not in script
    assert "<!--" not in script
    assert script.startswith("(() => {")


def test_a_cache_that_cannot_be_written_costs_only_time(calls: Calls, own_cache_folder: Path) -> None:
    (own_cache_folder / "brim").write_text("a file where the folder would be")
    assert page.chart_library("v6.4.1")


def test_libraries_that_do_not_go_together_are_named(calls: Calls) -> None:
    with pytest.raises(RequestError, match=r"does not carry Vega-Lite 9\.9.*pip install --upgrade 'altair\[save\]'"):
        page.chart_library("v9.9.0")


def test_a_library_that_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write.importlib.util, "find_spec", lambda name: None if name == "altair" else object())
    with pytest.raises(RequestError, match=r"a report needs altair: pip install 'brim\[report\]'"):
        write.check_libraries()
