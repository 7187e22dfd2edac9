"""Replays of size decisions: what they save, what they compare, and that choices have not become worse."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import replays
from benchmarks.replay_curves import held_out_curves, tuned_cards

BEFORE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "replays-before.json"
QUICK = ("largest", "fastest", "card", "live", "training")  # the others trace models


def row(case: str = "a", **changes: object) -> dict[str, object]:
    return {
        "kind": "live",
        "group": "g",
        "case": case,
        "size": 8,
        "probes": None,
        "ooms": 0,
        "of_best": 0.98,
        **changes,
    }


@pytest.mark.parametrize("kind", QUICK)
def test_choices_are_no_worse_than_before(kind: str) -> None:
    before = json.loads(BEFORE.read_text())["rows"]
    pairs = replays.paired([one for one in before if one["kind"] == kind], list(replays.run_kind(kind)))
    assert len(pairs) == sum(one["kind"] == kind for one in before)
    for (_, group), both in replays.groups(pairs).items():
        old, new = ([pair[side] for pair in both] for side in (0, 1))
        means = [statistics.mean(one["of_best"] for one in side) for side in (old, new)]
        ooms = [sum(one["ooms"] for one in side) for side in (old, new)]
        assert means[1] >= means[0] - 0.005, f"{kind}, {group}: of the best rate {means[0]:.4f} → {means[1]:.4f}"
        assert ooms[1] <= 1.1 * ooms[0] + 1, f"{kind}, {group}: out of memory {ooms[0]} → {ooms[1]} times"


def test_a_replay_gives_the_same_rows_twice() -> None:
    assert list(replays.run_kind("live")) == list(replays.run_kind("live"))


def test_held_out_curves_are_of_every_kind_and_none_is_a_tuned_one() -> None:
    held_out = list(held_out_curves())
    assert len(held_out) == 40
    names = " ".join(curve.name for curve in held_out)
    assert all(word in names for word in ("affine", "quadratic", "stairs", "kinked", "saturates", "slower", "waves"))
    assert not {curve.limit for curve in held_out} & {curve.limit for curve in tuned_cards()}
    for curve in held_out:
        largest = curve.largest(65_536)
        assert f"largest {largest}" in curve.name
        assert curve.fits(largest)
        assert not curve.fits(largest + 1)


def test_a_slower_choice_or_more_failures_are_named(tmp_path: Path) -> None:
    before = [row("slower"), row("failing"), row("faster"), row("gone")]
    after = [row("slower", size=4, of_best=0.9), row("failing", ooms=2), row("faster", of_best=1.0), row("new")]
    text = replays.comparison(before, after)
    assert "| live, g: slower | 8 → 4 | 0.98 → 0.9 | 0 → 0 |" in text
    assert "| live, g: failing | 8 → 8 | 0.98 → 0.98 | 0 → 2 |" in text
    assert "faster" not in text
    assert "| live | g | 3 | 2 |" in text
    assert "Only in the second file: 1; only in the first: 1." in text


def test_peaks_are_compared_to_the_mib() -> None:
    def peak(case: str, allocated: int) -> dict[str, object]:
        return {"kind": "peaks", "group": "h200", "case": case, "allocated_bytes": allocated, "reserved_bytes": 2**30}

    text = replays.comparison([peak("a", 2**20), peak("b", 2**20)], [peak("a", 2**20), peak("b", 3 * 2**20)])
    assert "2 forecasts, 1 the same to the byte, 1 off by a MiB or more: b (+2.0 MiB)" in text


def test_what_is_saved_can_be_compared(tmp_path: Path) -> None:
    replays.save(tmp_path / "rows.json", [row()], "a note")
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert (saved["schema"], saved["note"], saved["rows"]) == (replays.SCHEMA, "a note", [row()])
