"""Evaluations that start from a forecast, on the card that it is about."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path

import pytest
import torch

from brim.evaluation.run import evaluate
from brim.evaluation.setup import EvaluationSetup, open_setup
from brim.evaluation.start import forecast_first_batch, is_worth_a_trace
from brim.forecasting.forecast import gpu_of_device
from brim.settings.eval_settings import EvalRequest
from brim.sizing.constants import MAX_FORECAST_ERROR

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = 512
SHAPE = {"vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 8, "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": None,
         "bos_token_id": None}  # fmt: skip
SAMPLES = 400
LIMIT = 8 * 2**30  # a first batch takes a sixteenth of it, workspaces of cuBLAS included


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def save_tokenizer(folder: Path) -> None:
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w1"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="w0", unk_token="w1").save_pretrained(folder)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if name not in ("eos_token_id", "bos_token_id")}
    transformers.BertForSequenceClassification(transformers.BertConfig(**shape)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def words(length: int, seed: int) -> str:
    return " ".join(f"w{2 + (seed * place) % 500}" for place in range(1, length + 1))


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def request_(language_model: Path, tmp_path: Path) -> EvalRequest:
    rows: list[dict[str, object]] = [{"prompt": words(280 + n % 20, n), "response": "w9"} for n in range(SAMPLES)]
    data = write(tmp_path / "data.jsonl", rows)
    return EvalRequest(
        model=str(language_model), data=data, device="cuda", dtype="float32", max_new_tokens=192, use_cache=False,
        memory_limit=LIMIT,
    )  # fmt: skip


def test_an_evaluation_starts_near_its_size_and_makes_no_failure(request_: EvalRequest, tmp_path: Path) -> None:
    result = evaluate(request_, output=tmp_path / "run")
    plan = result.plan
    assert plan is not None
    assert plan.reason.endswith("from a size that a forecast gave")
    assert not any("without a forecast" in note for note in result.notes)
    assert plan.probes[0].batch_size > 8
    assert result.summary["oom_events"] == 0
    assert result.summary["num_failed"] == 0
    assert result.summary["peak_reserved_bytes"] <= LIMIT
    assert result.summary["plan_seconds"] <= result.summary["seconds"]
    again = evaluate(dataclasses.replace(request_, batch_size=16), output=tmp_path / "sixteen")
    same = [a["prediction"] == b["prediction"] for a, b in zip(result.samples, again.samples, strict=True)]
    assert sum(same) >= 0.95 * SAMPLES  # float32, but other batch shapes take other kernels: near-ties go either way


def test_the_first_batch_takes_about_what_was_forecast(request_: EvalRequest, tmp_path: Path) -> None:
    setup = open_setup(request_)
    items = range(SAMPLES)
    assert is_worth_a_trace(setup, items)
    before = torch.cuda.memory_allocated()
    start = forecast_first_batch(setup, items, LIMIT)
    assert torch.cuda.memory_allocated() == before  # tracing takes no memory of the card
    assert start is not None
    assert start.note is None
    assert start.bytes is not None
    del setup
    gc.collect()
    torch.cuda.empty_cache()
    plan = evaluate(request_, output=tmp_path / "run").plan
    assert plan is not None
    first = plan.probes[0]
    assert first.cost is not None
    assert first.peak_reserved_bytes is not None
    forecast = start.bytes.bytes_at_cost(first.cost)
    left = 96 * 2**20  # workspaces that earlier tests have left in this process
    assert 0.8 * (first.peak_reserved_bytes - left) < forecast < MAX_FORECAST_ERROR * first.peak_reserved_bytes


@pytest.mark.parametrize("task", ["choice", "classify"])
def test_tracing_a_forward_leaves_the_model_unchanged(
    task: str, language_model: Path, text_classifier: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, object]]
    if task == "choice":
        rows = [{"question": words(100, n), "choices": ["w2 w3", "w4"], "answer": 0} for n in range(16)]
    else:
        rows = [{"text": words(100, n), "label": n % 2} for n in range(16)]
    model = language_model if task == "choice" else text_classifier
    data = write(tmp_path / f"{task}.jsonl", rows)
    setup = open_setup(EvalRequest(model=str(model), data=data, device="cuda", dtype="float32", task=task))
    answers = run(setup)
    before = torch.cuda.memory_allocated()
    start = forecast_first_batch(setup, range(16), 2**30, gpu=gpu_of_device(setup.device))
    assert torch.cuda.memory_allocated() == before
    assert start is not None
    assert start.note is None
    assert start.bytes is not None
    assert start.bytes.points[0][1] > sum(tensor.nbytes for tensor in setup.model.module.parameters())
    assert run(setup) == answers


def run(setup: EvaluationSetup) -> list[object]:
    items = range(len(setup.costs))
    pending = setup.task.launch(items, [setup.task.prepare(item) for item in items])
    return [answer.prediction for answer in pending.result()]
