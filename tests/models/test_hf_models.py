"""Tiny configurations written to a folder: nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from brim.errors import RequestError
from brim.models.build import build_workload, model_knobs
from brim.settings.find_settings import WorkloadRequest
from brim.workloads.base import Workload

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
LLAMA: dict[str, Any] = {
    **TINY,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT: dict[str, Any] = {**TINY, "model_type": "bert", "max_position_embeddings": 32}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 16,
    "d_ff": 32,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 99,
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
VIT: dict[str, Any] = {**TINY, "model_type": "vit", "image_size": 32, "patch_size": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def build(model: str, mode: str | None = None, **options: Any) -> tuple[Workload, tuple[str, ...]]:
    return build_workload(WorkloadRequest(model=model, mode=mode, device="cpu", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "modes", "natural"),
    [
        (LLAMA, ("forward", "generate", "train"), "generate"),
        (T5, ("forward", "generate", "train"), "generate"),
        (BERT, ("forward", "train"), "forward"),
        ({**BERT, "architectures": ["BertModel"]}, ("forward", "train"), "forward"),
        ({**BERT, "architectures": ["BertForSequenceClassification"]}, ("forward", "train"), "forward"),
        ({**BERT, "architectures": ["BertForTokenClassification"]}, ("forward", "train"), "forward"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, ("forward", "train"), "forward"),
        (VIT, ("forward", "train"), "forward"),
    ],
    ids=["llama", "t5", "bert", "encoder", "sequence", "token", "llama-sequence", "vit"],
)
def test_every_kind_runs_in_its_modes(
    folder: Path, config: dict[str, Any], modes: tuple[str, ...], natural: str
) -> None:
    model = write(folder, config)
    knobs: dict[str, int] = {} if config is VIT else {"tokens": 8}
    assert build(model, knobs=knobs)[0].mode == natural
    for mode in ("forward", "generate", "train"):
        if mode not in modes:
            with pytest.raises(RequestError, match=f"--mode {mode}: .* does not generate"):
                build(model, mode, knobs=knobs)
            continue
        workload, notes = build(model, mode, knobs=knobs)
        assert any("random weights" in note for note in notes)
        batch = workload.make_batch(3)
        assert workload.batch_length(batch) == 3
        workload.step(batch)


@pytest.mark.parametrize("config", [LLAMA, T5, BERT], ids=["llama", "t5", "bert"])
def test_gradient_checkpointing_is_the_models_own_and_silent(
    folder: Path, config: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    workload, notes = build(write(folder, config), "train", knobs={"tokens": 8}, gradient_checkpointing=True)
    assert any("own (transformers)" in note for note in notes)
    workload.step(workload.make_batch(2))
    assert "use_cache" not in capfd.readouterr().err


def test_all_new_tokens_are_generated_without_warnings(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write(folder, LLAMA)
    flags = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": list(range(3, 99)), "max_length": 9}
    (folder / "generation_config.json").write_text(json.dumps(flags))
    workload, _ = build(model, knobs={"tokens": 8, "max_new_tokens": 12})
    network: Any = workload.modules()[0]
    network.generation_config = transformers.GenerationConfig.from_pretrained(model)  # as loading weights would set
    capfd.readouterr()
    usual = network.generation_config
    answers = workload.step(workload.make_batch(2))
    assert [len(tokens) for tokens in answers.token_lists()] == [12, 12]
    assert network.generation_config is usual
    assert capfd.readouterr().err == ""


def test_prompts_have_no_special_token_and_no_padding(folder: Path) -> None:
    workload, _ = build(write(folder, LLAMA), knobs={"tokens": 30})
    batch = workload.make_batch(20)
    assert batch["attention_mask"].all()
    assert batch["input_ids"].min() > 2


def test_lengths_are_bounded_by_the_positions(folder: Path) -> None:
    model = write(folder, LLAMA)
    assert [(knob.name, knob.default, knob.maximum) for knob in model_knobs(model)] == [
        ("tokens", 32, 64),
        ("max_new_tokens", 32, 64),
        ("layers", 2, 2),
    ]
    with pytest.raises(RequestError, match="--knob tokens=65: the largest is 64"):
        build(model, "forward", knobs={"tokens": 65})
    with pytest.raises(RequestError, match=r"together 70, but .* has 64 positions; use at most tokens=54"):
        build(model, "generate", knobs={"tokens": 60, "max_new_tokens": 10})
    build(model, "forward", knobs={"tokens": 64})


def test_roberta_counts_its_positions_from_the_padding_id(folder: Path) -> None:
    model = write(folder, {**BERT, "model_type": "roberta", "max_position_embeddings": 34, "pad_token_id": 1})
    workload, _ = build(model)
    assert workload.make_batch(1)["input_ids"].shape == (1, 32)
    workload.step(workload.make_batch(1))


def test_max_new_tokens_in_a_forward_is_noted_as_unused(folder: Path) -> None:
    model = write(folder, LLAMA)
    assert any("no effect" in note for note in build(model, "forward", knobs={"max_new_tokens": 5})[1])
    assert not any("no effect" in note for note in build(model, "forward")[1])


def test_auto_is_the_configurations_own_dtype_outside_training(folder: Path) -> None:
    model = write(folder, {**LLAMA, "torch_dtype": "bfloat16"})

    def dtype(mode: str, asked: str = "auto") -> torch.dtype:
        return next(build(model, mode, dtype=asked)[0].modules()[0].parameters()).dtype

    assert dtype("generate") == torch.bfloat16
    assert dtype("generate", "float32") == torch.float32
    assert dtype("train") == torch.float32
    assert dtype("train", "bfloat16") == torch.float32


def test_saved_weights_are_loaded(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write(folder, LLAMA)
    saved = build(model)[0].modules()[0]
    saved.save_pretrained(model)  # type: ignore[operator]
    capfd.readouterr()
    workload, notes = build(model)
    assert notes == ()
    for name, value in workload.modules()[0].state_dict().items():
        assert torch.equal(value, saved.state_dict()[name])
    assert "Loading" not in capfd.readouterr().err  # progress only on a terminal


def test_identity_follows_the_configuration_and_the_weight_files(folder: Path) -> None:
    model = write(folder, LLAMA)
    random, _ = build(model)
    random.modules()[0].save_pretrained(model)  # type: ignore[operator]
    first, second = build(model)[0].identity(), build(model)[0].identity()
    assert random.identity() != first == second
    os.utime(folder / "model.safetensors", (1, 1))
    assert build(model)[0].identity() != first
    json.dumps(first)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llava"}, "llava is a vision-language model.*py:FILE:FACTORY"),
        (
            {"model_type": "canine", "architectures": ["CanineForSequenceClassification"]},
            "knows no batches for canine.*py:FILE:FACTORY",
        ),
        ({"model_type": "whisper", "is_encoder_decoder": True}, "knows no batches for whisper.*py:FILE:FACTORY"),
        ({"model_type": "no_such_type"}, r"cannot be loaded \(config.json\): .*no_such_type"),
        ({**VIT, "auto_map": {"AutoConfig": "code.Config"}, "model_type": "mine"}, "--trust-remote-code"),
    ],
)
def test_a_model_brim_cannot_batch_is_refused(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(write(folder, config))


def test_a_folder_without_a_configuration_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    with pytest.raises(RequestError, match=r"has no config\.json"):
        build(str(folder))
    (folder / "resnet18").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(RequestError, match=r"no config\.json.*write torchvision:resnet18"):
        build("resnet18")


def test_the_size_of_an_image_classifier_is_that_of_its_configuration(folder: Path) -> None:
    model = write(folder, VIT)
    assert build(model)[0].make_batch(2)["pixel_values"].shape == (2, 3, 32, 32)
    with pytest.raises(RequestError, match="--knob size=64: the largest is 32"):
        build(model, knobs={"size": 64})
