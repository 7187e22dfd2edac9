"""Records cross processes as JSON and come back equal; another schema is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.records import MemoryFigures, Plan, Probe, SearchSeconds, Verdict

sizes = st.integers(1, 10**6)
maybe_bytes = st.none() | st.integers(0, 2**60)
seconds = st.none() | st.floats(1e-9, 1e6)
probes = st.builds(
    Probe,
    batch_size=sizes,
    verdict=st.sampled_from(get_args(Verdict)),
    peak_allocated_bytes=maybe_bytes,
    peak_reserved_bytes=maybe_bytes,
    alloc_retries=st.integers(0, 9),
    step_seconds=seconds,
    samples_per_second=seconds,
    steps=st.integers(0, 50),
    needed_bytes=maybe_bytes,
    detail=st.text(),
    warm_up_seconds=seconds,
    steady_seconds=seconds,
    release_seconds=seconds,
)
plans = st.builds(
    Plan,
    unit=st.sampled_from(["samples", "tokens"]),
    size=sizes,
    batch_size_max=sizes,
    batch_size_max_estimate=st.none() | sizes,
    objective=st.sampled_from(["fastest", "largest"]),
    reason=st.text(),
    cached=st.booleans(),
    device=st.text(),
    memory=st.builds(MemoryFigures, limit_bytes=maybe_bytes, headroom_bytes=maybe_bytes),
    probes=st.lists(probes, max_size=4).map(tuple),
    fingerprint=st.none() | st.text(),
    notes=st.lists(st.text(), max_size=2).map(tuple),
    batch_sizes_per_rank=st.none() | st.lists(sizes, max_size=3).map(tuple),
    seconds=st.none() | st.builds(SearchSeconds, total=st.floats(0, 1e6), forecast=st.floats(0, 1e6)),
)


def plan(**changes: object) -> Plan:
    made = Plan(
        unit="samples", size=8, batch_size_max=9, batch_size_max_estimate=None, objective="fastest", reason="r",
        cached=False, device="cpu", memory=MemoryFigures(limit_bytes=10, headroom_bytes=2), probes=(),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@given(plans)
def test_a_plan_comes_back_equal_from_its_json(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_json_has_the_fields_that_the_interface_promises() -> None:
    data = plan(probes=(Probe(batch_size=8, verdict="fits"),)).to_json()
    assert next(iter(data)) == "schema"
    assert data["schema"] == "brim.plan/1"
    promised = {
        "unit", "size", "batch_size", "batch_size_max", "objective", "reason", "cached", "device", "memory", "probes",
    }  # fmt: skip
    assert promised <= set(data)
    assert {"limit_bytes", "headroom_bytes"} <= set(data["memory"])
    assert {
        "batch_size", "verdict", "peak_allocated_bytes", "peak_reserved_bytes", "alloc_retries", "step_seconds",
        "samples_per_second",
    } <= set(data["probes"][0])  # fmt: skip
    assert data["batch_size"] == data["size"] == 8


@pytest.mark.parametrize("schema", [None, "brim.plan/2", "brim.run/1"])
def test_another_schema_is_refused(schema: str | None) -> None:
    with pytest.raises(RequestError, match=r"brim\.plan/1"):
        Plan.from_json({**plan().to_json(), "schema": schema})


def test_fields_of_a_later_version_are_ignored() -> None:
    later = {**plan().to_json(), "colour": "blue", "memory": {"limit_bytes": 10, "headroom_bytes": 2, "bank": 1}}
    assert Plan.from_json(later) == plan()


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_only_a_fitting_size_fits(verdict: str) -> None:
    assert Probe(batch_size=1, verdict=verdict).fits == (verdict == "fits")


def test_the_chosen_probe_is_the_last_fitting_one_at_the_size() -> None:
    wrong = Probe(batch_size=8, verdict="oom")
    first, last = (Probe(batch_size=8, verdict="fits", steps=steps) for steps in (3, 20))
    assert plan(probes=(first, last, wrong, Probe(batch_size=4, verdict="fits"))).chosen_probe() is last
    assert plan(probes=(wrong,)).chosen_probe() is None
    assert plan(probes=(wrong, first, wrong)).oom_events == 2


def test_the_parts_of_a_searchs_seconds_add_up_to_the_total() -> None:
    probe = Probe(batch_size=1, verdict="fits", warm_up_seconds=1.0, steady_seconds=0.5, release_seconds=0.25)
    seconds = SearchSeconds.of(
        [probe, probe, Probe(batch_size=2, verdict="oom")], total=8.0, forecast=2.0, state=1.0, ranks=0.5
    )
    assert (seconds.warm_up, seconds.steady, seconds.release, seconds.other) == (2.0, 1.0, 0.5, 1.0)


def test_a_plan_without_seconds_is_read_as_before() -> None:
    data = plan().to_json()
    del data["seconds"]
    assert Plan.from_json(data).seconds is None
    with pytest.raises(RequestError, match="seconds: total"):
        Plan.from_json({**data, "seconds": {"total": "long"}})
