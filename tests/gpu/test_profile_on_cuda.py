"""Profiles where times are the device's own and memory is real."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from brim.evaluation.timing import StageClock
from brim.profiling.explain_speed import SWITCHES, explain_speed
from brim.profiling.run import profile
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import ProfileRequest

pytestmark = pytest.mark.gpu
pytest.importorskip("sklearn")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Molmo2ForConditionalGeneration"):
    pytest.skip("transformers has no Molmo2 before 5.22", allow_module_level=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EvalRequest:
    from brim.demo.digitboard import write_digitboard
    from brim.demo.model import weights_folder

    boards = write_digitboard(tmp_path_factory.mktemp("boards"), questions=200, seed=1)
    return EvalRequest(model=str(weights_folder()), data=str(boards), device="cuda", dtype="float32", use_cache=False)


def test_a_profile_on_the_card_is_as_accurate_as_on_the_cpu(base: EvalRequest, tmp_path: Path) -> None:
    request = ProfileRequest(base=base, axes={"max_crops": ("1", "4", "12")}, latency_samples=20)
    result = profile(request, output=tmp_path / "run")
    accuracies = [entry["accuracy"] for entry in result.entries]
    assert accuracies[0] < 0.65 < 0.9 < accuracies[2]
    for entry in result.entries:
        assert entry["num_failed"] == 0
        assert entry["peak_reserved_bytes"] > 0
        alone = entry["latency_ms"]["batch_1"]
        assert alone["total"]["p95"] >= alone["total"]["p50"] > 0
        stages = [alone[stage]["p50"] for stage in ("vision", "prefill", "decode")]
        assert all(stage > 0 for stage in stages)
        assert sum(stages) < 2 * alone["total"]["p95"]


def test_a_limit_lowers_the_size_of_costly_values_without_an_error(base: EvalRequest, tmp_path: Path) -> None:
    tight = dataclasses.replace(base, batch_size=128, memory_limit="160MiB")
    result = profile(
        ProfileRequest(base=tight, axes={"max_crops": ("1", "12")}, latency_samples=0), output=tmp_path / "run"
    )
    cheap, dear = result.entries
    assert cheap["num_failed"] == dear["num_failed"] == 0
    assert dear["batch_size_used"] < cheap["batch_size_used"]


def test_marks_in_the_stream_measure_the_device_not_the_host() -> None:
    module = torch.nn.Linear(4096, 4096, device="cuda")
    batch = torch.randn(8192, 4096, device="cuda")
    clock = StageClock(torch.device("cuda"), module, generates=True)
    with clock:
        for _ in range(3):
            with clock.batch(8192):
                module(batch)
                for _ in range(10):
                    module(batch)
    last = clock.times()[-1]
    assert last.prefill_ms is not None
    assert last.decode_ms is not None
    assert last.decode_ms > 2 * last.prefill_ms > 0
    assert last.vision_ms is None


def test_every_switch_can_be_thrown_on_the_card(base: EvalRequest, tmp_path: Path) -> None:
    rows = explain_speed(dataclasses.replace(base, limit=32, knobs={"max_crops": "2"}), output=tmp_path / "run").rows
    assert [row["name"] for row in rows[1:]] == [switch.name for switch in SWITCHES]
    assert all(row["samples_per_second"] > 0 for row in rows)
