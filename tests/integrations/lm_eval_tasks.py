"""Tasks of lm-eval of every kind over small local files, models for them, and answers side by side."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lm_eval
import tokenizers
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from brim.integrations.lm_eval import BrimLM
from tests import saved_models

NAMES = ("continued", "spoken", "chosen", "rolled")  # one of each kind of request
CORPUS = "The quick brown fox jumps over the lazy dog. 0123456789\n\nQ: what is it?\nA: it is a dog, and 42 more."
BYTE_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|done|>")


def phrase(words: random.Random, length: int) -> str:
    return " ".join(words.choice(saved_models.WORDS[:24]) for _ in range(length))


def write_tasks(folder: Path, *, documents: int = 9, until: Iterable[str] = ("w3 ", "w17 w")) -> Path:
    """YAML files and their data; some documents are longer than the model's 320 positions, and one comes twice."""
    words = random.Random(5)
    lengths = [1, 380, *(words.randint(1, 60) for _ in range(documents - 2))]
    asked = [
        {"q": phrase(words, length), "a": phrase(words, words.randint(1, 3)), "gold": words.randint(0, 3),
         "choices": [phrase(words, words.randint(1, 2)) for _ in range(4)]}
        for length in lengths
    ]  # fmt: skip
    texts = [{"text": phrase(words, length)} for length in (5, 400, 1, 321, 320)]
    folder.mkdir(parents=True)
    write_jsonl(folder / "asked.jsonl", [*asked, asked[2]])
    write_jsonl(folder / "texts.jsonl", texts)
    question = {"doc_to_text": "{{q}}", "doc_to_target": " {{a}}"}
    generation = {"until": list(until), "max_gen_toks": 20}
    write_task(folder, "continued", "generate_until", "exact_match", generation_kwargs=generation, **question)
    write_task(folder, "spoken", "loglikelihood", "acc", **question)
    write_task(folder, "chosen", "multiple_choice", "acc", doc_to_text="{{q}}", doc_to_choice="{{choices}}",
               doc_to_target="{{gold}}")  # fmt: skip
    write_task(folder, "rolled", "loglikelihood_rolling", "bits_per_byte", data="texts", doc_to_text="",
               doc_to_target="{{text}}")  # fmt: skip
    return folder


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_task(folder: Path, name: str, kind: str, metric: str, *, data: str = "asked", **settings: Any) -> None:
    task = {
        "task": name, "dataset_path": "json", "output_type": kind, "test_split": "test", "fewshot_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{data}.jsonl")}},
        "metric_list": [{"metric": metric, "aggregation": {"bits_per_byte": "bits_per_byte"}.get(metric, "mean"),
                         "higher_is_better": metric != "bits_per_byte"}],
        **settings,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def index(folder: Path) -> TaskManager:
    return TaskManager(include_path=str(folder), include_defaults=False)


def hf(model: Path, batch_size: int = 1, **settings: Any) -> HFLM:
    """lm-eval's own model."""
    return HFLM(str(model), device="cpu", dtype="float32", batch_size=batch_size, **settings)


def ours(model: Path, **settings: Any) -> BrimLM:
    return BrimLM(model, **{"device": "cpu", "dtype": "float32", "no_cache": True, **settings})


def evaluated(lm: Any, tasks: Path, names: Iterable[str] = NAMES, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=lm, tasks=list(names), task_manager=index(tasks), bootstrap_iters=0, **settings
    )
    return found


def assert_same_answers(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Sample by sample: log-likelihoods to 1e-4, large ones to a millionth, everything else exactly."""
    assert found["samples"].keys() == expected["samples"].keys()
    for task, samples in expected["samples"].items():
        assert len(found["samples"][task]) == len(samples)
        for one, other in zip(found["samples"][task], samples, strict=True):
            assert one["arguments"] == other["arguments"]
            for answers, wanted in zip(one["resps"], other["resps"], strict=True):
                for answer, want in zip(answers, wanted, strict=True):
                    assert_same_answer(answer, want)


def assert_same_answer(answer: Any, wanted: Any) -> None:
    if isinstance(wanted, str):
        assert answer == wanted
    elif isinstance(wanted, tuple | list):
        assert_same_answer(answer[0], wanted[0])
        assert answer[1] == wanted[1]
    else:
        assert abs(answer - wanted) < max(1e-4, 1e-6 * abs(wanted))  # sums of hundreds in float32


def requests(kind: str, arguments: Iterable[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=0, metadata=("made", number, 1))
        for number, one in enumerate(arguments)
    ]


def save_byte_model(folder: Path, *, adds_bos: bool) -> Path:
    """A byte-level tokenizer, in which white space matters, that puts a BOS token first or does not."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(BYTE_SPECIAL), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator([CORPUS] * 3, trainer)
    if adds_bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<|done|>"], model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2, num_key_value_heads=2,
        **{**saved_models.SHAPE, "max_position_embeddings": 96},
    )  # fmt: skip
    model = saved_models.varied(transformers.LlamaForCausalLM(config))
    return saved_models.save(folder, model, tokenizer)
