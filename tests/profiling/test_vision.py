"""A profile of the shipped vision-language model: crops, sizes under a limit, stages, ranks, what makes it fast."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.comparing.rounds import RoundRules
from brim.demo.digitboard import write_digitboard
from brim.demo.model import weights_folder
from brim.models.load import load_model
from brim.profiling.explain_speed import SWITCHES, explain_speed
from brim.profiling.run import ProfileResult, profile
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import ProfileRequest

pytest.importorskip("sklearn")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Molmo2ForConditionalGeneration"):
    pytest.skip("transformers has no Molmo2 before 5.22", allow_module_level=True)

QUESTIONS = 24
LIMIT = "24MiB"  # 16 boards of 12 crops do not fit


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digitboard(tmp_path_factory.mktemp("boards"), questions=QUESTIONS, seed=1)


@pytest.fixture(scope="module")
def base(boards: Path) -> EvalRequest:
    return EvalRequest(
        model=str(weights_folder()), data=str(boards), device="cpu", batch_size=16, memory_limit=LIMIT, use_cache=False
    )


@pytest.fixture(scope="module")
def profiled(base: EvalRequest, tmp_path_factory: pytest.TempPathFactory) -> ProfileResult:
    loads: list[str] = []

    def counted(request: Any) -> Any:
        loads.append(request.model)
        return load_model(request)

    request = ProfileRequest(base=base, axes={"max_crops": ("1", "4", "12")}, latency_samples=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brim.models.load.load_model", counted)
        result = profile(request, output=tmp_path_factory.mktemp("profile") / "run")
    assert len(loads) == 1, "the model stays loaded while only crops change"
    return result


def test_more_crops_are_more_tokens_and_better_answers(profiled: ProfileResult) -> None:
    entries = profiled.entries
    assert [entry["max_crops"] for entry in entries] == [1, 4, 12]
    assert entries[0]["accuracy"] < entries[2]["accuracy"]
    for figure in ("vision_tokens_mean", "crops_used_mean"):
        assert entries[0][figure] < entries[1][figure] < entries[2][figure]
    assert entries[0]["crops_used_mean"] == 1.0  # the overview beside the crops is not counted
    assert entries[2]["crops_used_mean"] <= 12
    assert not any(entry["saturated"] for entry in entries)


def test_costly_values_get_smaller_batches_without_an_oom(
    profiled: ProfileResult,
) -> None:
    sizes = [entry["batch_size_used"] for entry in profiled.entries]
    assert sizes[0] == 16 > sizes[2]
    for entry in profiled.entries:
        assert entry["num_failed"] == 0
        assert entry["peak_reserved_bytes"] <= entry["limit_bytes"] == 24 * 2**20
        assert entry["probes"]
    assert sum(entry["oom_events"] for entry in profiled.entries[1:]) == 0


def test_latency_is_split_into_seeing_reading_and_writing(profiled: ProfileResult) -> None:
    for entry in profiled.entries:
        alone = entry["latency_ms"]["batch_1"]
        assert (alone["batch_size"], alone["num_batches"]) == (1, 3)
        stages = [alone[stage]["p50"] for stage in ("vision", "prefill", "decode")]
        assert all(stage > 0 for stage in stages)
        assert max(stages) < alone["total"]["p50"] * 1.5


def test_a_larger_cap_than_the_pictures_have_crops_is_reported(base: EvalRequest, tmp_path: Path) -> None:
    request = ProfileRequest(
        base=dataclasses.replace(base, limit=4), axes={"max_crops": ("40", "48")}, latency_samples=0
    )
    result = profile(request, output=tmp_path / "run")
    assert result.entries[1]["saturated"]
    assert "from 48 on" in result.document["notes"][0]


@pytest.mark.slow  # the ranks of tests/evaluation/test_ranks.py profile a function instead
def test_two_ranks_give_the_accuracy_of_one(profiled: ProfileResult, boards: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "brim", "profile",
        "-m", str(weights_folder()), "-d", str(boards), "--device", "cpu", "--knob", "max_crops=1,12", "-b", "16",
        "--memory-limit", LIMIT, "--no-cache", "--latency-samples", "0", "-o", str(tmp_path / "run"), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert [entry["accuracy"] for entry in document["summary"]] == [
        profiled.entries[0]["accuracy"],
        profiled.entries[2]["accuracy"],
    ]
    assert [entry["ranks"] for entry in document["summary"]] == [2, 2]
    assert all(len(entry["batch_sizes"]["per_rank"]) == 2 for entry in document["summary"])


def test_what_makes_it_fast_is_switched_off_in_turn(base: EvalRequest, tmp_path: Path) -> None:
    short = dataclasses.replace(base, limit=4, memory_limit=None, batch_size=None, knobs={"max_crops": "1"})
    found = explain_speed(short, output=tmp_path / "run", rules=RoundRules(least=2, most=2))
    first, *rows = found.rows
    assert (first["name"], first["brings"], first["clear"]) == ("everything on", None, None)
    everywhere = [switch.name for switch in SWITCHES if "CUDA" not in switch.name]
    gpu_only = {"pinned memory", "non-blocking copies"}
    assert [row["name"] for row in rows] == [name for name in everywhere if name not in gpu_only]
    assert all(row["samples_per_second"] > 0 and row["brings"] > 0 and row["rounds"] == 2 for row in rows)
    assert not any(row["clear"] for row in rows), "four samples make one batch"
    assert all("4 samples" in row["unclear_because"] for row in rows)
    assert found.recommendation["not_clear"] == [row["name"] for row in rows]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["kind"], record["request"]["explain_speed"]) == ("comparison", True)
