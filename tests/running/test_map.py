"""`brim.map`: one result per item, in order, whatever the function does on the way."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import brim


def doubled(batch: list[int]) -> list[int]:
    return [2 * item for item in batch]


def test_results_come_in_the_callers_order_whatever_the_costs() -> None:
    items = [5, 1, 9, 3, 9, 2]
    assert list(brim.map(doubled, items, cost=lambda item: item)) == [10, 2, 18, 6, 18, 4]


def test_no_items_give_no_results() -> None:
    result = brim.map(doubled, [])
    assert len(result) == 0
    assert result.batch_size_used is None


def test_out_of_memory_splits_and_no_finished_batch_is_computed_again() -> None:
    computed: Counter[int] = Counter()

    def function(batch: list[int]) -> list[int]:
        if len(batch) > 7:
            raise MemoryError
        computed.update(batch)
        return doubled(batch)

    result = brim.map(function, range(100), batch_size=32)
    assert list(result) == [2 * item for item in range(100)]
    assert result.oom_events > 0
    assert set(computed.values()) == {1}
    assert result.batch_sizes is not None
    assert result.batch_sizes.largest <= 7


def test_an_item_that_does_not_fit_alone_fails_alone() -> None:
    def function(batch: list[int]) -> list[int]:
        if 42 in batch:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB")
        return doubled(batch)

    result = brim.map(function, range(100))
    assert [result[item] for item in range(100) if item != 42] == [2 * item for item in range(100) if item != 42]
    assert result.failures[42].reason == "out_of_memory"
    assert result.failures[42].needed_bytes == 2 * 2**30
    assert result[42] is result.failures[42]


def test_the_failing_item_is_found_and_its_error_is_not_taken_for_oom() -> None:
    def function(batch: list[int]) -> list[int]:
        if 13 in batch or 77 in batch:
            raise ValueError("cannot read this one")
        return doubled(batch)

    result = brim.map(function, range(100), batch_size=32)
    assert set(result.failures) == {13, 77}
    assert result.failures[13].reason == "error"
    assert "cannot read this one" in result.failures[13].message
    assert result.oom_events == 0


def test_fail_fast_raises_the_items_own_error() -> None:
    def function(batch: list[int]) -> list[int]:
        if 13 in batch:
            raise ValueError("cannot read this one")
        return doubled(batch)

    with pytest.raises(ValueError, match="cannot read this one"):
        brim.map(function, range(100), fail_fast=True)


def test_an_ambiguous_error_that_a_smaller_batch_cures_loses_nothing() -> None:
    def function(batch: list[int]) -> list[int]:
        if len(batch) > 4:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
        return doubled(batch)

    result = brim.map(function, range(50), batch_size=16)
    assert list(result) == [2 * item for item in range(50)]


def test_fail_on_oom_stops() -> None:
    def function(batch: list[int]) -> list[int]:
        raise MemoryError

    with pytest.raises(brim.DoesNotFitError):
        brim.map(function, range(8), batch_size=8, fail_on_oom=True)


def test_a_fatal_error_ends_the_run_and_the_journal_keeps_what_is_done(tmp_path: Path) -> None:
    def function(batch: list[int]) -> list[int]:
        if 60 in batch:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return doubled(batch)

    journal = tmp_path / "journal.jsonl"
    with pytest.raises(brim.LostError, match="resume"):
        brim.map(function, range(100), batch_size=8, journal=journal)
    result = brim.map(doubled, range(100), batch_size=8, journal=journal, resume=True)
    assert result.resumed == 56
    assert list(result) == [2 * item for item in range(100)]


def test_a_function_that_drops_results_is_reported() -> None:
    with pytest.raises(brim.RequestError, match="returned 1 results for a batch of 2"):
        brim.map(lambda batch: batch[:1], range(4))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (set, "a set"),
        (frozenset, "a frozenset"),
        (lambda batch: dict.fromkeys(batch, 1), "a dict"),
        (lambda batch: {item: item for item in batch}.values(), "a dict_values"),
        (lambda batch: (item for item in batch), "a generator"),
        (lambda batch: None, "nothing"),
        (len, "an int"),
        (lambda batch: "x" * len(batch), "a str"),
        (lambda batch: b"x" * len(batch), "a bytes"),
    ],
)
def test_results_without_an_order_of_their_own_are_refused(answer: Any, kind: str) -> None:
    with pytest.raises(brim.RequestError, match=f"the function returned {kind}.* for a batch of 2; return a list"):
        brim.map(answer, [3, 1, 2, 5], batch_size=2)


def test_results_are_split_along_their_first_dimension() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert list(brim.map(tuple, rows)) == rows
    assert [row.tolist() for row in brim.map(numpy.array, rows)] == rows
    assert [row.tolist() for row in brim.map(torch.tensor, rows)] == rows
    with pytest.raises(brim.RequestError, match="returned a Tensor for a batch"):
        brim.map(lambda batch: torch.tensor(1.0), rows)


@pytest.mark.parametrize("size", [0, -1, True, "many", 2.5])
def test_a_batch_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(brim.RequestError, match="whole number"):
        brim.map(doubled, range(4), batch_size=size)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"function": 3}, "function=3: give a function"),
        ({"items": 5}, "items=5: "),
        ({"cost": 7}, "cost=7: give a function"),
        ({"on_batch": "loud"}, "on_batch='loud': give a function"),
        ({"device": "cuda:9"}, "device='cuda:9': there is no such device; here: cpu"),
        ({"device": "cuda:99"}, "device='cuda:99': there is no such device; here: cpu"),
        ({"device": "cuda:x"}, "device='cuda:x': give a device such as"),
        ({"device": "grafics"}, "device='grafics': give a device such as"),
        ({"device": 1.5}, "device=1.5: give a device such as"),
        ({"device": "meta"}, "device meta: brim measures memory on"),
        ({"memory_limit": "1GiB"}, "memory_limit needs device="),
        ({"device": "cpu", "memory_limit": "lots"}, "memory_limit='lots'"),
        ({"device": "cpu", "memory_limit": "900TiB"}, "memory_limit=900"),
    ],
)
def test_an_argument_that_cannot_be_is_named_as_a_caller_writes_it(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(brim.RequestError, match=re.escape(words)):
        brim.map(**{"function": doubled, "items": range(4), **arguments})


def test_costs_cap_batches_in_padded_cost_and_the_padding_is_reported() -> None:
    seen: list[list[int]] = []

    def function(batch: list[int]) -> list[int]:
        seen.append(batch)
        return batch

    result = brim.map(function, [1] * 50 + [10] * 10, cost=lambda item: item)
    assert seen[0] == [10, 10]
    assert 0 <= result.padding_fraction < 1


def test_costs_and_sizes_may_be_whole_numbers_of_numpy() -> None:
    results = brim.map(doubled, range(4), batch_size=numpy.int64(2), cost=lambda item: numpy.int64(3))
    assert list(results) == [0, 2, 4, 6]
    assert results.batch_sizes is not None
    assert results.batch_sizes.largest == 2


def test_a_result_that_json_cannot_hold_is_refused_with_a_journal(tmp_path: Path) -> None:
    with pytest.raises(brim.RequestError, match="cannot be journalled"):
        brim.map(lambda batch: [object() for _ in batch], range(4), journal=tmp_path / "journal.jsonl")


def test_a_journal_is_not_resumed_by_other_work(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    brim.map(doubled, range(10), journal=journal)
    with pytest.raises(brim.RequestError, match="earlier run"):
        brim.map(doubled, range(10), journal=journal)
    with pytest.raises(brim.RequestError, match="other items or settings"):
        brim.map(doubled, range(11), journal=journal, resume=True)
    with pytest.raises(brim.RequestError, match="other items or settings"):
        brim.map(doubled, range(10), journal=journal, resume=True, key="another function")


def circular() -> list[Any]:
    item: list[Any] = []
    item.append(item)
    return item


def nested() -> list[Any]:
    item: list[Any] = []
    for _ in range(100_000):
        item = [item]
    return item


@dataclasses.dataclass
class Question:
    text: str
    picture: Any = None


@pytest.mark.parametrize(
    ("item", "other"),
    [
        ({("a", 1): 2}, {("a", 1): 3}),
        ({"one", "two"}, {"one", "three"}),
        (b"one", b"two"),
        ("\udc80", "\udc81"),
        (Path("one"), Path("two")),
        (numpy.arange(3), numpy.arange(3.0)),
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16)),
        (torch.arange(2), torch.arange(2).reshape(2, 1)),
        (Question("one", numpy.zeros(2)), Question("one", numpy.ones(2))),
        ([{"picture": torch.ones(1)}], [{"picture": torch.zeros(1)}]),
    ],
)
def test_a_journal_knows_items_by_their_content(tmp_path: Path, item: Any, other: Any) -> None:
    journal = tmp_path / "journal.jsonl"
    for resumed in (0, 3):
        again = copy.deepcopy(item)
        result = brim.map(lambda batch: [7 for _ in batch], [again] * 3, journal=journal, resume=True)
        assert (list(result), result.resumed) == ([7, 7, 7], resumed)
    with pytest.raises(brim.RequestError, match="other items or settings"):
        brim.map(lambda batch: [8 for _ in batch], [other] * 3, journal=journal, resume=True)


@pytest.mark.parametrize("item", [circular(), object(), nested(), len, [object()]])
def test_items_whose_content_cannot_be_read_need_a_key(tmp_path: Path, item: Any) -> None:
    journal = tmp_path / "journal.jsonl"
    with pytest.raises(brim.RequestError, match="give key="):
        brim.map(lambda batch: [7 for _ in batch], [item] * 3, journal=journal)
    for resumed in (0, 3):
        result = brim.map(lambda batch: [7 for _ in batch], [item] * 3, journal=journal, resume=True, key="first")
        assert (list(result), result.resumed) == ([7, 7, 7], resumed)


@pytest.mark.parametrize("result", [circular(), {("a", 1): 2}, nested()])
def test_results_that_json_cannot_hold_are_refused(tmp_path: Path, result: Any) -> None:
    with pytest.raises(brim.RequestError, match="cannot be journalled"):
        brim.map(lambda batch: [result for _ in batch], range(4), journal=tmp_path / "journal.jsonl")


@pytest.mark.parametrize(
    "foreign",
    [{"item": 10, "result": 1, "failure": None, "batch_size": 1}, {"item": -1, "result": 1, "failure": None,
     "batch_size": 1}, {"item": "3", "result": 1, "failure": None, "batch_size": 1}, {"answer": 42},
     {"item": 3, "result": 1, "failure": {"why": "so"}, "batch_size": 1}],
)  # fmt: skip
def test_a_journal_entry_without_an_item_is_skipped_and_named(tmp_path: Path, foreign: dict[str, Any]) -> None:
    journal = tmp_path / "journal.jsonl"
    brim.map(doubled, range(10), journal=journal)
    with journal.open("a") as file:
        file.write(json.dumps(foreign) + "\n")
    result = brim.map(doubled, range(10), journal=journal, resume=True)
    assert list(result) == [2 * item for item in range(10)]
    assert result.resumed == 10
    (note,) = result.notes
    assert "line 12" in note
    assert "journal.jsonl.damaged" in note


def test_a_device_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(brim.RequestError, match="/dev/zero is not a regular file"):
        brim.map(doubled, range(3), journal="/dev/zero", resume=True)


def test_a_memory_limit_on_the_cpu_splits_real_steps() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(1000, 1000)
    with torch.no_grad():
        layer.weight.abs_()  # sums that do not cancel, whatever the kernel adds up first

    def function(batch: list[int]) -> list[float]:
        with torch.no_grad():
            out = layer(torch.full((len(batch), 1000), 1.0)).sum(1) * torch.tensor(batch)
        return out.tolist()

    limit = 5 * 2**20  # the weights are 4 MB, a row and its output 8 kB
    result = brim.map(function, range(500), batch_size=256, device="cpu", memory_limit=limit)
    assert result.oom_events > 0
    assert not result.failures
    plain = [function([item])[0] for item in range(500)]
    assert list(result) == pytest.approx(plain, rel=1e-4, abs=1e-4)
    assert result.peak_allocated_bytes is not None
    assert result.peak_allocated_bytes <= limit


class Killed(BaseException):
    """Stands for the process being killed: nothing in brim may catch it."""


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.lists(st.sampled_from(["ok", "ok", "ok", "oom", "kill", "ambiguous"]), max_size=60),
    st.sets(st.integers(0, 59), max_size=4),
    st.sampled_from(["auto", 1, 7, 64]),
)
def test_recorded_exactly_once_under_any_schedule_of_trouble(
    tmp_path_factory: pytest.TempPathFactory, costs: list[int], troubles: list[str], broken: set[int], size: Any
) -> None:
    journal = tmp_path_factory.mktemp("map") / "journal.jsonl"
    schedule = iter(troubles)
    recorded: Counter[int] = Counter()

    def function(batch: list[int]) -> list[str]:
        trouble = next(schedule, "ok")
        if trouble == "kill":
            raise Killed
        if trouble == "oom" and len(batch) > 1:
            raise MemoryError
        if trouble == "ambiguous" and len(batch) > 1:
            raise RuntimeError("Unable to find a valid cuDNN algorithm to run convolution")
        if broken & set(batch):
            raise ValueError("broken item")
        recorded.update(batch)
        return [f"answer {item}" for item in batch]

    for _ in range(len(troubles) + 1):
        try:
            result = brim.map(function, range(len(costs)), batch_size=size, cost=lambda item: costs[item],
                              journal=journal, resume=True)  # fmt: skip
            break
        except Killed:
            continue
    plain = {item: f"answer {item}" for item in range(len(costs)) if item not in broken}
    assert {item: result[item] for item in plain} == plain
    assert set(result.failures) == broken & set(range(len(costs)))
    entries = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert Counter(entry["item"] for entry in entries) == Counter(range(len(costs)))
    assert all(count == 1 for count in recorded.values())


def test_map_needs_no_torch() -> None:
    program = "import sys, brim; brim.map(lambda b: b, range(9)); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
