"""What is called a problem, from documents of machines that are not here."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from brim.diagnosis.problems import find_problems

GIB = 2**30
CARD = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA H200", "slice_of": None, "problem": None}
SLICE = {**CARD, "uuid": "MIG-1", "slice_of": 0}
DEVICE = {"name": "cuda:0", "uuid": "1", "problem": None}
FOLDER = {"path": "/somewhere", "writable": True, "free_bytes": 9 * GIB, "problem": None}
FULL = {**FOLDER, "free_bytes": 2**20}
LOCKED = {**FOLDER, "writable": False, "problem": "Permission denied"}
HEALTHY: dict[str, Any] = {
    "torch": {"version": "2.9.0+cu128", "cuda": "12.8", "hip": None, "problem": None, "devices": [DEVICE]},
    "driver": {"version": "570.86.15", "cuda": "12.8", "problem": None, "cards": [CARD]},
    "host": {"shared_free_bytes": 9 * GIB},
    "folders": {"cache": FOLDER, "state": FOLDER, "temporary": FOLDER},
    "libraries": [{"name": "torch", "needs": ">=2.6", "version": "2.9.0"}],
    "extras": {"vision": {"libraries": [{"name": "timm", "needs": ">=1.0.12", "version": None}]}},
    "variables": {},
    "ranks_problem": None,
}


def problems(**changes: Any) -> list[tuple[str, str]]:
    """The severity and name of each problem of the healthy machine with some values changed: `torch__cuda=None`."""
    document = copy.deepcopy(HEALTHY)
    for path, value in changes.items():
        *sections, last = path.split("__")
        place = document
        for section in sections:
            place = place[section]
        place[last] = value
    found = find_problems(document)
    assert all(problem.text and problem.remedy for problem in found)
    return [(problem.severity, problem.name) for problem in found]


def test_a_machine_with_all_in_order_has_none() -> None:
    assert problems() == []


def test_a_machine_without_a_card_has_none() -> None:
    assert problems(torch__devices=[], driver__cards=[], driver__version=None, driver__problem="not found") == []


def test_an_extra_that_is_not_installed_is_none_but_an_old_library_is() -> None:
    assert problems(extras__vision__libraries=[{"name": "timm", "needs": ">=1.0", "version": "0.9"}]) == [
        ("warning", "extra_too_old")
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch__cuda": None}, ("error", "torch_without_cuda")),
        ({"torch__cuda": "13.0"}, ("error", "driver_too_old")),
        ({"torch__cuda": "12.9"}, ("error", "card_not_visible")),  # a driver of the same major version runs it
        ({"variables": {"CUDA_VISIBLE_DEVICES": ""}}, ("warning", "cards_hidden")),
        ({"variables": {"CUDA_VISIBLE_DEVICES": "7"}}, ("error", "cards_hidden")),
        ({"torch__problem": "forward compatibility was attempted"}, ("error", "card_not_visible")),
    ],
)
def test_a_card_that_torch_does_not_see(changes: dict[str, Any], expected: tuple[str, str]) -> None:
    assert problems(torch__devices=[], **changes) == [expected]


def test_one_of_two_cards_that_torch_sees() -> None:
    two = [CARD, {**CARD, "index": 1, "uuid": "GPU-2"}]
    assert problems(driver__cards=two) == [("error", "card_not_visible")]
    assert problems(driver__cards=two, variables={"CUDA_VISIBLE_DEVICES": "0"}) == []
    assert problems(driver__cards=[*two, SLICE]) == []  # a process sees one slice


def test_an_old_driver_that_torch_works_with_is_none() -> None:
    assert problems(torch__cuda="13.0") == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"libraries": [{"name": "torch", "needs": ">=2.6", "version": "2.4.0"}]}, ("error", "library_too_old")),
        ({"libraries": [{"name": "pyyaml", "needs": ">=6", "version": None}]}, ("error", "library_missing")),
        ({"libraries": None, "extras": {}}, ("warning", "not_installed")),
        ({"torch__devices": [{**DEVICE, "problem": "no kernel image"}]}, ("error", "device_fails")),
        ({"driver__cards": [], "driver__problem": "no permission"}, ("warning", "nvml_unreadable")),
        ({"driver__cards": [{**CARD, "problem": "GPU is lost"}]}, ("warning", "card_unreadable")),
        ({"folders__cache": LOCKED}, ("error", "folder_not_writable")),
        ({"folders__temporary": FULL}, ("error", "folder_full")),
        ({"folders__state": LOCKED}, ("warning", "folder_not_writable")),
        ({"host__shared_free_bytes": 60 * 2**20}, ("warning", "shared_memory")),
        ({"ranks_problem": "WORLD_SIZE is 2 but RANK is not set"}, ("error", "ranks")),
    ],
)
def test_other_problems(changes: dict[str, Any], expected: tuple[str, str]) -> None:
    assert problems(**changes) == [expected]


def test_a_torch_that_cannot_be_imported_is_an_error_without_a_card_too() -> None:
    broken = {"torch__problem": "ImportError: libcudart.so.12", "torch__devices": []}
    assert problems(**broken, driver__cards=[]) == [("error", "torch_broken")]
    assert problems(**broken) == [("error", "card_not_visible")]


def test_errors_come_first() -> None:
    severities = [severity for severity, _ in problems(host__shared_free_bytes=0, folders__temporary=LOCKED)]
    assert severities == ["error", "warning"]
