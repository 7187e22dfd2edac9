"""The command that asks the same again."""

from __future__ import annotations

import itertools
import shlex

from brim.advice.run_requests import command_of
from brim.reporting.repeat import flat_rows
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import ProfileRequest


def test_a_command_that_was_kept_is_shown_as_it_was_typed() -> None:
    request = {"argv": ["brim", "eval", "-m", "my model"], "model": "other"}
    assert command_of(request, kind="eval") == "brim eval -m 'my model'"


def test_defaults_are_left_out_and_the_rest_is_quoted() -> None:
    request = EvalRequest(
        model="./my model", data="q.jsonl", knobs={"max_crops": 4}, metrics=("vqa", "bleu"), stop=("\n", ";"),
        fixed=True, batch_size=8, use_cache=False, mapping={"prompt": "q"}, memory_limit="24GiB",
        trust_remote_code=True,
    )  # fmt: skip
    command = command_of({**request.to_json(), "command": "eval", "task": "vqa"}, kind="eval")
    parts = shlex.split(command)
    assert parts[:6] == ["brim", "eval", "-m", "./my model", "-d", "q.jsonl"]
    pairs = list(itertools.pairwise(parts))
    for pair in (("--knob", "max_crops=4"), ("--metrics", "vqa,bleu"), ("--stop", "\n"), ("--stop", ";"), ("-b", "8"),
                 ("--map", "prompt=q"), ("--memory-limit", "24GiB"), ("--task", "vqa")):  # fmt: skip
        assert pair in pairs
    assert {"--no-cache", "--no-auto-batch-size", "--trust-remote-code"} < set(parts)
    assert len(parts) == 6 + 2 * 8 + 3


def test_a_request_of_defaults_has_nothing_but_model_and_data() -> None:
    request = EvalRequest(model="m", data="d").to_json()
    assert command_of({**request, "command": "eval"}, kind="eval") == "brim eval -m m -d d"
    assert command_of({"model": "m", "mode": "train", "knobs": {}, "optimizer": "adamw"}, kind="find") == (
        "brim find m --mode train"
    )


def test_a_profile_names_its_knobs_and_their_values() -> None:
    base = EvalRequest(model="m", data="d", batch_size=64)
    request = ProfileRequest(
        base=base, axes={"max_crops": (2, 3), "size": None}, batch_size_for=(({"": "13"}, 24),), within=0.02,
        initial_scale=((4, 1.0), (float("inf"), 0.5)),
    ).to_json()  # fmt: skip
    asked = {**request.pop("base"), **request}
    assert command_of(asked, kind="profile") == (
        "brim profile -m m -d d -b 64 --knob max_crops=2,3 --knob size --initial-scale 4=1,0.5 --batch-size-for 13=24 "
        "--within 0.02"
    )


def test_settings_inside_settings_are_named_by_their_path() -> None:
    document = {"a": 1, "b": {"c": {"d": True}, "e": None}, "f": [], "g": ["x", 2], "argv": ["no"]}
    assert flat_rows(document, leave_out=("argv",)) == [
        {"name": "a", "value": "1"},
        {"name": "b.c.d", "value": "yes"},
        {"name": "g", "value": "x, 2"},
    ]


def test_a_request_that_no_command_wrote_still_gives_a_line() -> None:
    for junk in (5, "x", [1], {"a": 1}, [[1]]):
        request = dict.fromkeys(("model", "axes", "initial_scale", "batch_size_for", "stop", "knobs", "metrics"), junk)
        assert command_of(request, kind="profile").startswith("brim profile ")
