"""Problems of files: one record, one way to tell them."""

from __future__ import annotations

import pytest

from brim.errors import RequestError
from brim.settings.problems import Problem, raise_errors, render_problems, strictly

ERROR = Problem(severity="error", message="wrong", fix="write 1", file="a.yaml", line=7, column=3, key="hp.x")
WARNING = Problem(severity="warning", message="odd", file="a.yaml", line=2)
NOTE = Problem(severity="note", message="known")


def test_a_problem_is_one_line_with_its_place_and_fix() -> None:
    assert str(ERROR) == "a.yaml:7: error: hp.x: wrong; write 1"
    assert str(NOTE) == "note: known"
    assert ERROR.to_json() == {
        "severity": "error",
        "message": "wrong",
        "fix": "write 1",
        "file": "a.yaml",
        "line": 7,
        "column": 3,
        "key": "hp.x",
    }


def test_problems_are_reported_in_the_order_of_the_file() -> None:
    assert render_problems([NOTE, ERROR, WARNING]).splitlines() == [str(WARNING), str(ERROR), str(NOTE)]


def test_errors_are_raised_together_with_the_warnings() -> None:
    raise_errors([WARNING, NOTE])
    with pytest.raises(RequestError) as alone:
        raise_errors([ERROR, NOTE])
    assert str(alone.value) == str(ERROR)
    with pytest.raises(RequestError) as both:
        raise_errors([ERROR, NOTE, WARNING])
    assert str(both.value) == f"1 error to correct\n{WARNING}\n{ERROR}"
    with pytest.raises(RequestError) as strict:
        raise_errors(strictly([WARNING, NOTE]))
    assert str(strict.value) == "a.yaml:2: error: odd"


def test_a_flood_of_errors_is_cut() -> None:
    with pytest.raises(RequestError) as caught:
        raise_errors([ERROR] * 10_000)
    lines = str(caught.value).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("10,000 errors to correct", "… and 9,950 more", 52)
