"""The comparison of two checkouts: turns, what a second start skips, when it stops, what the tables say."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import before_after
from benchmarks.before_after import Case, Session

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class FakeChild:
    """Answers at once, and remembers what it was asked."""

    side: str
    asked: list[tuple[str, str]]
    answers: dict[str, dict[str, Any]]

    def ask(self, asked: dict[str, Any], patience: float) -> dict[str, Any]:
        assert patience >= 240
        self.asked.append((self.side, asked["do"]))
        return dict(self.answers.get(self.side, {"size": 8}))

    def end(self) -> None:
        pass


class FakeSession(Session):
    """A session whose processes answer as they are told to."""

    def __init__(self, folder: Path, answers: dict[str, dict[str, Any]] | None = None, **changes: Any) -> None:
        super().__init__(arguments(folder, **changes))
        self.asked: list[tuple[str, str]] = []
        self._answers = answers or {}

    def _start(self, side: str) -> Any:
        return FakeChild(side, self.asked, self._answers)


def arguments(folder: Path, **changes: Any) -> argparse.Namespace:
    usual = {"folder": str(folder), "seconds": None, "retry_failed": False, "tiny": True, "before": "x", "after": "y"}
    return argparse.Namespace(**{**usual, **changes})


def case(**changes: Any) -> Case:
    usual = {
        "part": "find", "name": "net", "seconds": 10.0, "ask": lambda folder: {"do": "find"},
        "judge": lambda before, after: {"do": "rates"}, "judge_seconds": 5.0, "rounds": 2,
    }  # fmt: skip
    return Case(**{**usual, **changes})


def test_checkouts_are_asked_in_turns_and_then_judged(tmp_path: Path) -> None:
    session = FakeSession(tmp_path)
    session.run(case())
    assert session.asked == [*((side, "find") for side in ("before", "after", "after", "before")), ("judge", "rates")]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5


def test_a_second_start_skips_what_is_there(tmp_path: Path) -> None:
    FakeSession(tmp_path).run(case(rounds=1))
    second = FakeSession(tmp_path)
    second.run(case(rounds=2))
    assert second.asked == [("after", "find"), ("before", "find")]
    third = FakeSession(tmp_path)
    third.run(case(rounds=2))
    assert third.asked == []


def test_a_process_that_was_lost_is_asked_again_an_error_only_on_demand(tmp_path: Path) -> None:
    for answer in ({"lost": True, "error": "no answer"}, {"error": "exit 3"}):
        FakeSession(tmp_path, {"after": answer}).run(case(rounds=1))
    again = FakeSession(tmp_path, retry_failed=False)
    again.run(case(rounds=1))
    assert again.asked == []
    retried = FakeSession(tmp_path, retry_failed=True)
    retried.run(case(rounds=1))
    assert retried.asked == [("after", "find"), ("judge", "rates")]


def test_nothing_is_started_that_would_end_too_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = FakeSession(tmp_path, seconds=before_after.STARTUP_SECONDS + 20)
    session.run(case())
    assert session.asked == []
    assert "not started" in capsys.readouterr().out
    session.run(case(rounds=1))
    assert len(session.asked) == 3


def test_a_process_that_leaks_memory_is_restarted(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"before": {"size": 8, "left_bytes": 2**30}})
    session.run(case(rounds=1))
    assert set(session._children) == {"after", "judge"}
    assert all("left_bytes" not in row for row in session.rows)


def test_the_rate_that_counts_is_that_of_the_third_process() -> None:
    common = {"part": "find", "case": "net", "round": 0}
    answer = {"probes": 3, "ooms": 0, "seconds": 4.0}
    measured = {"8": {"rate": 100.0, "spread": 0.01, "retries": 0, "ooms": 0},
                "16": {"rate": 110.0, "spread": 0.02, "retries": 2, "ooms": 0}}  # fmt: skip
    rows = [
        {**common, "side": "before", "size": 8, **answer},
        {**common, "side": "after", "size": 16, **answer},
        {**common, "side": "judge", "rates": {"net": measured}},
    ]
    text = before_after.table(rows)
    assert "| net | 8 → 16 | 1.100 | 2.0% | 0, 2 | 3 → 3 | 0 → 0 | 4.0 → 4.0 |" in text
    rows[1]["size"] = 8
    assert "| net | 8 → 8 | same size |" in before_after.table(rows)
    assert "- net, after: exit 3" in before_after.table([rows[0], {**common, "side": "after", "error": "exit 3"}])


def test_rows_of_sweeps_evaluations_and_profiles_have_their_tables() -> None:
    inner = {"size": 4, "rate": 50.0, "planning_seconds": 1.5, "ooms": 0}
    rows: list[dict[str, Any]] = []
    for side in before_after.SIDES:
        common = {"side": side, "round": 0, "seconds": 60.0}
        rows += [
            {**common, "part": "video", "case": "three models", "models": {"s3d": inner}},
            {**common, "part": "profile", "case": "max_crops", "values": {"2": inner}},
            {**common, "part": "eval", "case": "auto", "rate": 99.0, "notes": "fine", "first": {"seconds": 7.0}},
        ]
    text = before_after.table(rows)
    assert "| s3d | 4 → 4 | same size | 0.0% | 50.0 → 50.0 | 1.5 → 1.5 | 0 → 0 |" in text
    assert "| 2 | 4 → 4 | same size |" in text
    assert "| auto | 60.0 → 60.0 | 1.000 | 7.0 → 7.0 | fine |" in text


@pytest.mark.slow
def test_two_checkouts_are_compared_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--before", str(ROOT), "--tiny", "--folder", str(tmp_path), "--parts", "find,eval", "--rounds", "1"]
    for name in ("unet", "auto"):
        monkeypatch.setattr("sys.argv", ["before_after", *words, "--cases", name])
        before_after.main()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert not [row for row in rows if "error" in row]
    assert [row["side"] for row in rows if row["part"] == "find"] == ["before", "after", "judge"]
    assert [row["side"] for row in rows if row["part"] == "eval"] == ["before", "after", "after", "before"]
