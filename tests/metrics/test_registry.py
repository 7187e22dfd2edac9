from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.metrics import registry
from brim.metrics.registry import ALIASES, get_metric, load_metric_file, metric_names, parse_metrics

STARTS_ALIKE = """
from brim.metrics.text import Anls
from brim.metrics.base import TextMetric

class StartsAlike(TextMetric):
    name = "starts_alike"

    def similarity(self, prediction, reference):
        return float(prediction[:1] == reference[:1])
"""


@pytest.fixture(autouse=True)
def only_built_in_metrics() -> Iterator[None]:
    before = dict(registry._added)
    registry._added.clear()
    yield
    registry._added.clear()
    registry._added.update(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my_metrics.py"


def test_the_built_in_names() -> None:
    assert set(metric_names()) >= {
        "vqa_accuracy", "vqa_accuracy_simple", "exact_match", "normalised_match", "contains", "token_f1", "anls",
        "bleu", "rouge_l", "cider", "top1", "top5", "choice_accuracy", "choice_accuracy_normalised",
    }  # fmt: skip


def test_every_alias_leads_to_a_metric_and_hides_none() -> None:
    assert set(ALIASES.values()) <= set(metric_names())
    assert not set(ALIASES) & set(metric_names())


def test_metrics_page_has_every_metric_with_its_aliases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    for name in metric_names():
        row = next((row for row in rows if f"`{name}`" in row), "")
        assert [each for each in (name, *get_metric(name).aliases) if f"`{each}`" not in row] == []


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("rouge", "rouge_l"),
        ("ROUGE-L", "rouge_l"),
        ("em", "exact_match"),
        ("acc", "exact_match"),
        ("vqa", "vqa_accuracy"),
        ("Top-5", "top5"),
        ("exact match", "exact_match"),
        ("normalized_match", "normalised_match"),
    ],
)
def test_a_name_may_be_an_alias_in_any_case(asked: str, name: str) -> None:
    assert get_metric(asked).name == name


def test_a_list_keeps_its_order_and_names_each_metric_once() -> None:
    assert [metric.name for metric in parse_metrics("bleu, rouge,exact_match,em,")] == [
        "bleu",
        "rouge_l",
        "exact_match",
    ]
    assert [metric.name for metric in parse_metrics(["anls", "f1"])] == ["anls", "token_f1"]


@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_list_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="names no metric; there are anls, bleu, "):
        parse_metrics(text)


def test_an_unknown_name_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(RequestError, match=r"metric 'blue' does not exist; did you mean .*bleu"):
        parse_metrics("blue")
    with pytest.raises(RequestError, match=r"metric 'xyzzy' does not exist; there are anls, bleu, "):
        get_metric("xyzzy")


def test_a_file_adds_the_metrics_that_it_defines_and_not_those_it_imports(file: Path) -> None:
    file.write_text(STARTS_ALIKE)
    assert load_metric_file(file) == ["starts_alike"]
    assert metric_names()[-1] == "starts_alike"
    assert get_metric("starts-alike").score("yes", ["yellow"]) == 1
    assert get_metric("starts_alike").score(None, ["yellow"]) == 0


def test_a_file_may_give_instances_with_their_own_settings(file: Path) -> None:
    file.write_text(f"{STARTS_ALIKE}\nloose = Anls(threshold=0.2)\nloose.name = 'loose_anls'\nalike = StartsAlike()\n")
    assert load_metric_file(str(file)) == ["loose_anls", "starts_alike"]
    assert get_metric("loose_anls").score("abcde", ["abxyz"]) == pytest.approx(0.4)


def test_loading_again_is_harmless_and_an_edited_file_replaces_its_metrics(file: Path) -> None:
    file.write_text(STARTS_ALIKE)
    load_metric_file(file)
    assert load_metric_file(file) == ["starts_alike"]
    file.write_text(STARTS_ALIKE.replace("starts_alike", "same_start"))
    load_metric_file(file)
    assert "same_start" in metric_names()
    assert "starts_alike" not in metric_names()


@pytest.mark.parametrize("taken", ["bleu", "rouge"])
def test_a_built_in_name_is_refused(file: Path, taken: str) -> None:
    file.write_text(STARTS_ALIKE.replace("starts_alike", taken))
    with pytest.raises(RequestError, match=f"StartsAlike is called {taken}, which is one of brim's own"):
        load_metric_file(file)


def test_a_name_that_another_file_has_is_refused_and_nothing_is_added(file: Path, tmp_path: Path) -> None:
    file.write_text(STARTS_ALIKE)
    load_metric_file(file)
    other = tmp_path / "other.py"
    other.write_text(f"{STARTS_ALIKE}\nfirst = Anls()\nfirst.name = 'first'\n")
    with pytest.raises(RequestError, match=r"StartsAlike is called starts_alike, as one in .*my_metrics\.py"):
        load_metric_file(other)
    assert "first" not in metric_names()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no metric"),
        ("import nowhere_at_all", "importing it raised ModuleNotFoundError: .*nowhere_at_all"),
        ("def (", r"importing it raised SyntaxError: .*my_metrics\.py:1"),
        (STARTS_ALIKE + "again = StartsAlike()\nonce_more = StartsAlike()", "two metrics are called starts_alike"),
        (STARTS_ALIKE.replace("starts_alike", "Starts alike"), "has the name 'Starts alike'"),
        (STARTS_ALIKE.replace('name = "starts_alike"', "pass"), "has the name None"),
        (STARTS_ALIKE + "    def __init__(self, n):\n        self.n = n", r"StartsAlike\(\) raised TypeError"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        load_metric_file(file)


def test_a_missing_file_and_one_that_is_no_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no such file"):
        load_metric_file(tmp_path / "none.py")
    text = tmp_path / "metrics.txt"
    text.write_text("x = 1")
    with pytest.raises(RequestError, match=r"its name must end in \.py"):
        load_metric_file(text)
