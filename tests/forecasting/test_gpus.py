"""The catalogue: its figures are possible ones with a source each, and friendly spellings find the right card."""

from __future__ import annotations

import pytest

from brim.errors import RequestError
from brim.forecasting.gpus import catalogue, find_gpu, gpu_of_memory

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

GIB = 2**30


def test_the_catalogue_has_data_centre_and_consumer_cards() -> None:
    cards = catalogue()
    assert len(cards) >= 20
    assert sum(card.kind == "data centre" for card in cards) >= 10
    assert sum(card.kind == "consumer" for card in cards) >= 10
    assert len({card.key for card in cards}) == len(cards)


@pytest.mark.parametrize("card", catalogue(), ids=lambda card: card.key)
def test_a_card_has_less_than_its_nominal_memory_and_a_source(card) -> None:
    advertised = int(card.key.rpartition("-")[2].removesuffix("gb")) * GIB
    assert 0.9 * advertised < card.memory_bytes < 1.02 * advertised
    assert 100 * 2**20 < card.context_bytes < GIB
    assert card.usable_bytes == card.memory_bytes - card.context_bytes
    assert len(card.memory_source) > 20
    assert len(card.context_source) > 20
    assert card.target.total_bytes == card.memory_bytes
    assert 6 <= card.compute_capability[0] <= 12
    assert 20 <= card.multiprocessors <= 200


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("a100-80gb", "a100-80gb"), ("A100 80GB", "a100-80gb"), ("a100", "a100-80gb"), ("A100-40G", "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("h200", "h200-141gb"), ("h100", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("H100 NVL", "h100-94gb"), ("rtx 4090", "rtx-4090-24gb"), ("RTX4090", "rtx-4090-24gb"),
        ("4090", "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"), ("rtx_3090", "rtx-3090-24gb"), ("4060 ti", "rtx-4060-ti-16gb"),
        ("4060ti", "rtx-4060-ti-16gb"), ("RTX 4060", "rtx-4060-8gb"), ("Tesla T4", "t4-16gb"), ("v100", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"), ("L4", "l4-24gb"), ("L40", "l40-48gb"), ("l40s", "l40s-48gb"),
        ("2080 ti", "rtx-2080-ti-11gb"), ("RTX A6000", "rtx-a6000-48gb"), ("rtx 6000 ada", "rtx-6000-ada-48gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"), ("a10g", "a10g-24gb"), ("b200", "b200-180gb"),
    ],
)  # fmt: skip
def test_a_friendly_spelling_finds_the_card(spelling: str, key: str) -> None:
    assert find_gpu(spelling).key == key


@pytest.mark.parametrize("card", catalogue(), ids=lambda card: card.key)
def test_every_card_is_found_by_its_key_and_by_the_drivers_name(card) -> None:
    assert find_gpu(card.key) == card
    assert find_gpu(card.name) == card


@pytest.mark.parametrize(
    ("spelling", "near"),
    [("a100-60gb", "a100-40gb"), ("h300", "h"), ("rtx-4099", "rtx-4090-24gb"), ("geforce 3085", "")],
)
def test_an_unknown_card_is_reported_with_the_nearest_names(spelling: str, near: str) -> None:
    with pytest.raises(RequestError, match="knows no such card") as raised:
        find_gpu(spelling)
    assert near in str(raised.value)
    assert "--memory" in str(raised.value)


def test_a_card_given_by_its_memory_is_taken_as_given() -> None:
    assert gpu_of_memory("24GiB").memory_bytes == 24 * GIB
    assert gpu_of_memory(10 * GIB).memory_bytes == 10 * GIB


@pytest.mark.parametrize("memory", ["500MiB", "0", "-3", "much"])
def test_a_memory_no_card_has_is_refused(memory: str) -> None:
    with pytest.raises(RequestError, match="--memory"):
        gpu_of_memory(memory)


def test_the_margin_is_taken_off_what_is_usable() -> None:
    card = find_gpu("a100-80gb")
    assert card.limit_bytes(0.0) == card.usable_bytes
    assert card.limit_bytes(0.05) == int(card.usable_bytes * 0.95)
