"""`brim find`: its JSON, its table, its run folder, and how each wrong request ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--device", "cpu", "--max-batch-size", "64")
Brim = Callable[..., Any]


def document(result: Any) -> dict[str, Any]:
    assert result.code == 0, result.err
    data: dict[str, Any] = json.loads(result.out)
    return data


def test_json_is_one_document_with_the_promised_fields(brim: Brim, factories: str) -> None:
    plan = document(brim("find", f"py:{factories}:rows", "--memory-limit", "64KiB", "--json", *SMALL))
    assert plan["schema"] == "brim.plan/1"
    assert (plan["unit"], plan["objective"], plan["cached"], plan["device"]) == ("samples", "fastest", False, "cpu")
    assert plan["size"] == plan["batch_size"] <= plan["batch_size_max"] <= 32
    assert plan["reason"]
    assert plan["memory"]["limit_bytes"] == 64 * 1024
    for probe in plan["probes"]:
        assert probe["verdict"] in ("fits", "oom", "thrashes", "size_limit", "fatal", "timeout")
        assert {
            "batch_size", "peak_allocated_bytes", "peak_reserved_bytes", "alloc_retries", "step_seconds",
            "samples_per_second",
        } <= set(probe)  # fmt: skip
    (chosen,) = (p for p in plan["probes"] if p["batch_size"] == plan["size"])
    assert plan["memory"]["headroom_bytes"] == 64 * 1024 - chosen["peak_reserved_bytes"]


def test_the_largest_is_exact(brim: Brim, factories: str) -> None:
    arguments = ("--objective", "largest", "--memory-limit", "64KiB", "--json", *SMALL)
    assert document(brim("find", f"py:{factories}:rows", *arguments))["batch_size"] == 32
    assert document(brim("find", f"py:{factories}:rows", "--knob", "width=512", *arguments))["batch_size"] == 16


def test_a_built_in_model_is_found_in_training(brim: Brim) -> None:
    plan = document(
        brim("find", "py:brim.models.small:convnet", "--mode", "train", "--knob", "size=16", "--memory-limit", "24MiB",
             "--max-probes", "4", "--json", *SMALL)
    )  # fmt: skip
    assert plan["batch_size"] >= 1
    assert 1 <= len(plan["probes"]) <= 4


def test_underscores_are_accepted_in_every_long_option(brim: Brim, factories: str) -> None:
    plan = document(
        brim("find", f"py:{factories}:rows", "--memory_limit=64KiB", "--batch_size", "8", "--max_batch_size", "64",
             "--no_cache", "--device", "cpu", "--json")
    )  # fmt: skip
    assert plan["batch_size"] == 8
    assert plan["memory"]["limit_bytes"] == 64 * 1024


def test_the_table_has_a_row_per_probe_and_none_wraps_at_eighty_columns(brim: Brim, factories: str) -> None:
    result = brim("find", f"py:{factories}:rows", "--objective", "largest", "--memory-limit", "64KiB", *SMALL)
    assert result.code == 0
    lines = result.out.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.split()[:2] == ["size", "verdict"])
    rows = [line for line in lines[heading + 1 :] if re.match(r"\s*\d+\s+(fits|oom)\s", line)]
    assert len(rows) >= 3
    assert any(re.match(r"\s*32\s+fits\s+64\.0 KiB\s+64\.0 KiB\s+0\s+[\d,.]+$", row) for row in rows)
    assert any(re.match(r"\s*33\s+oom\s", row) for row in rows)
    assert lines[heading + 1 : heading + 1 + len(rows)] == rows
    assert all(len(row) <= 80 for row in rows)
    conclusion = " ".join(" ".join(lines[heading + 1 + len(rows) :]).split())
    for words in ("batch size 32", "largest seen to fit 32", "headroom 0 B of 64.0 KiB", "33 does not (oom)"):
        assert words in conclusion
    assert "\x1b" not in result.out


def test_output_writes_a_run_folder(brim: Brim, factories: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    plan = document(
        brim("find", f"py:{factories}:rows", "--memory-limit", "64KiB", "-o", str(folder), "--json", *SMALL)
    )
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert (run["schema"], run["kind"], run["plan"]) == ("brim.run/1", "find", plan)
    assert run["summary"]["batch_size_used"] == plan["batch_size"]
    assert run["request"]["model"] == f"py:{factories}:rows"
    assert {"environment", "started_at", "ended_at", "duration_seconds"} <= set(run)
    assert "torch" in run["environment"]["packages"]


def test_output_onto_a_file_is_refused_before_any_probe(brim: Brim, factories: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    result = brim("find", f"py:{factories}:rows", "--memory-limit", "64KiB", "-o", str(taken), *SMALL)
    assert result.code == 2
    assert "it is a file; give a folder" in " ".join(result.err.split())
    assert taken.read_text() == "mine"
    assert "verdict" not in result.out


def test_the_second_time_comes_from_the_cache_unless_it_is_off(brim: Brim, factories: str) -> None:
    arguments = ("find", f"py:{factories}:rows", "--memory-limit", "64KiB", "--json", *SMALL)
    first, second = document(brim(*arguments)), document(brim(*arguments))
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["batch_size"] == second["batch_size"]
    assert not document(brim(*arguments, "--no-cache"))["cached"]


def test_a_cached_plan_beyond_what_was_asked_is_ignored_and_noted(
    brim: Brim, factories: str, own_cache_folder: Path
) -> None:
    arguments = ("find", f"py:{factories}:rows", "--objective", "largest", "--memory-limit", "64KiB", *SMALL)
    assert brim(*arguments).code == 0
    (file,) = (own_cache_folder / "brim" / "plans").glob("*.json")
    kept = file.read_text(encoding="utf-8")
    file.write_text(kept.replace('"size": 32', '"size": 1000000000000').replace('_size": 32', '_size": 1000000000000'))
    result = brim(*arguments)
    assert result.code == 0
    assert "batch size 32: the largest size that fits" in " ".join(result.out.split())
    assert "note: the cached plan" in result.out
    file.write_text(kept.replace('"batch_size_max": 32', '"batch_size_max": "x"'))
    result = brim(*arguments)
    assert (result.code, result.err) == (0, "")
    assert "note: the cached plan" in result.out
    again = brim(*arguments)
    assert "batch size 32: cached" in " ".join(again.out.split())
    assert "note: the cached plan" not in again.out  # it was said of another one


def test_an_edited_factory_is_searched_again(brim: Brim, factories: str) -> None:
    arguments = ("find", f"py:{factories}:rows", "--objective", "largest", "--memory-limit", "64KiB", "--json", *SMALL)
    assert document(brim(*arguments))["batch_size"] == 32
    file = Path(factories)
    file.write_text(file.read_text().replace("batch * 2", "(batch, batch + 1, batch + 2)"))
    edited = document(brim(*arguments))
    assert (edited["cached"], edited["batch_size"]) == (False, 21)


def test_nothing_fits_ends_with_three_and_the_remedies(brim: Brim, factories: str) -> None:
    result = brim("find", f"py:{factories}:rows", "--memory-limit", "1500", *SMALL)
    assert result.code == 3
    for words in ("a batch of 1 sample", "at least 2.0 KiB", "What may help", "half precision", "--knob (width)"):
        assert words in " ".join(result.err.split())
    assert "--dtype" not in result.err  # the factory has no such parameter, and the flag would be refused
    assert "Traceback" not in result.err


def test_a_fixed_size_can_be_made_to_fail(brim: Brim, factories: str) -> None:
    fixed = ("-b", "40", "--no-auto-batch-size", "--memory-limit", "64KiB")
    split = document(brim("find", f"py:{factories}:rows", *fixed, "--json", *SMALL))
    assert split["batch_size"] == 32
    assert "split into parts of 32" in split["reason"]
    assert brim("find", f"py:{factories}:rows", *fixed, "--fail-on-oom", *SMALL).code == 3


@pytest.mark.parametrize(
    "asked",
    [("--objective", "largest"), ("--objective", "fastest"), ("-b", "40", "--no-auto-batch-size"), ("--isolate",)],
    ids=lambda asked: " ".join(asked),
)
def test_a_model_that_cannot_step_on_one_sample_is_searched_from_two(
    brim: Brim, factories: str, asked: tuple[str, ...]
) -> None:
    limit = ("--memory-limit", "32KiB", "--mode", "train")
    plan = document(brim("find", f"py:{factories}:pooled", *limit, *asked, "--json", *SMALL))
    assert 2 <= plan["batch_size"] < 40
    assert min(probe["batch_size"] for probe in plan["probes"]) == 2
    assert any("batch size 1 cannot step" in note and "searched from 2" in note for note in plan["notes"])


def test_a_model_that_cannot_step_on_one_sample_is_forecast(brim: Brim, factories: str) -> None:
    forecast = document(brim("forecast", f"py:{factories}:pooled", "--gpu", "h200", "--max-batch-size", "64", "--json"))
    assert forecast["batch_size_max"] == 64


def test_a_step_that_takes_even_sizes_only_is_searched_in_multiples_of_two(brim: Brim, factories: str) -> None:
    arguments = ("find", f"py:{factories}:pairs", "--objective", "largest", "--memory-limit", "64KiB", *SMALL)
    refused = brim(*arguments)
    assert refused.code == 2
    assert "--multiple-of 2" in " ".join(refused.err.split())
    assert document(brim(*arguments, "--multiple-of", "2", "--json"))["batch_size"] == 32


def test_a_step_that_keeps_ever_more_memory_is_noted(brim: Brim, factories: str) -> None:
    plan = document(brim("find", f"py:{factories}:leaks", "--memory-limit", "64KiB", "-b", "8", "--json", *SMALL))
    assert plan["probes"][0]["growth_bytes_per_step"] == 1024
    assert any("grows by 1.0 KiB with every step" in note for note in plan["notes"])
    steady = document(brim("find", f"py:{factories}:pooled", "--memory-limit", "64KiB", "-b", "8", "--json", *SMALL))
    assert steady["probes"][0]["growth_bytes_per_step"] == 0
    assert steady["notes"] == []


@pytest.mark.parametrize(
    ("factory", "asked", "words"),
    [
        ("segfaults", (), "segmentation fault"),
        pytest.param(
            "sleeps", ("--probe-timeout", "1"), "no answer within 1 s", marks=pytest.mark.slow
        ),  # test_isolate.py
    ],
)
def test_a_child_that_is_lost_at_every_size_ends_with_four(
    brim: Brim, factories: str, factory: str, asked: tuple[str, ...], words: str
) -> None:
    result = brim("find", f"py:{factories}:{factory}", "--memory-limit", "64KiB", "--isolate", *asked, *SMALL)
    message = " ".join(result.err.split())
    assert result.code == 4
    assert words in message
    assert "half precision" not in message


WRONG: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("unknown model", ("resnet51",), ("resnet51", "resnet50")),
    ("no such file", ("py:absent.py:net",), ("absent.py", "no file")),
    ("no such factory", ("py:FILE:row",), ("row", "did you mean rows")),
    ("unknown knob", ("py:FILE:rows", "--knob", "with=8"), ("with", "width")),
    ("knob without value", ("py:FILE:rows", "--knob", "width"), ("--knob", "NAME=VALUE")),
    ("bad knob value", ("py:FILE:rows", "--knob", "width=wide"), ("width", "wide")),
    ("bad knob of a built-in model", ("py:brim.models.small:convnet", "--knob", "size=big"), ("size", "big")),
    ("negative limit", ("py:FILE:rows", "--memory-limit=-4GiB"), ("--memory-limit", "-4GiB", "more than zero")),
    ("senseless limit", ("py:FILE:rows", "--memory-limit", "lots"), ("--memory-limit", "lots", "24GiB")),
    ("limit above the machine", ("py:FILE:rows", "--memory-limit", "9000TiB"), ("--memory-limit", "smaller limit")),
    ("factory raises", ("py:FILE:broken",), ("factory raised", "ValueError", "no checkpoint at step 7", "nets.py:8")),
    ("factory returns nonsense", ("py:FILE:nothing",), ("returned int", "make_batch")),
    ("batch of the wrong size", ("py:FILE:halves",), ("make_batch(1) returned a batch of 0", "batch_length=")),
    ("step raises", ("py:FILE:faulty_step",), ("the step raised KeyError", "labels", "by the step at batch size 1")),
    (
        "make_batch raises",
        ("py:FILE:faulty_batch",),
        ("make_batch raised KeyError", "pixels", "by make_batch at batch size 1"),
    ),
    ("even sizes only", ("py:FILE:pairs", "-b", "7"), ("--multiple-of 2", "cannot split into pairs")),
    ("bad batch size", ("py:FILE:rows", "-b", "many"), ("--batch-size many", "auto or a whole number")),
    ("bad objective", ("py:FILE:rows", "--objective", "best"), ("--objective best", "fastest, largest")),
    ("bad mode", ("py:FILE:rows", "--mode", "training"), ("--mode training", "train")),
    ("bad device", ("py:FILE:rows", "--device", "tpu"), ("--device tpu", "cpu")),
    ("bad dtype", ("py:FILE:rows", "--dtype", "float64"), ("--dtype float64", "bfloat16")),
    ("flag the factory cannot take", ("py:FILE:rows", "--dtype", "float16"), ("--dtype float16", "no parameter")),
    ("fixed without a size", ("py:FILE:rows", "--no-auto-batch-size"), ("--no-auto-batch-size needs --batch-size N",)),
    ("unknown option", ("py:FILE:rows", "--memory", "1GiB"), ("--memory",)),
    ("no model", (), ("MODEL",)),
]


@pytest.mark.parametrize(("arguments", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_request_ends_with_two_and_says_what_to_do(
    brim: Brim, factories: str, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = brim("find", *(argument.replace("FILE", factories) for argument in arguments))
    assert result.code == 2
    message = " ".join(result.err.split())
    assert "Traceback" not in message
    for word in words:
        assert word in message or word.replace(" ", "") in message.replace(" ", "")  # a path may be wrapped


def test_wrong_requests_print_nothing_on_standard_output_with_json(brim: Brim, factories: str) -> None:
    result = brim("find", f"py:{factories}:broken", "--json")
    assert (result.code, result.out) == (2, "")


@pytest.mark.parametrize(
    ("model", "mode"), [("lraspp_mobilenet_v3_large", "train"), ("fasterrcnn_mobilenet_v3_large_320_fpn", "forward")]
)
def test_segmentation_and_detection_models_are_searched(brim: Brim, model: str, mode: str) -> None:
    result = brim("find", model, "--mode", mode, "--knob", "size=64", "--max-batch-size", "2", "--device", "cpu",
                  "--no-cache", "--json")  # fmt: skip
    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert {probe["verdict"] for probe in plan["probes"]} == {"fits"}
    assert plan["batch_size"] in (1, 2)
