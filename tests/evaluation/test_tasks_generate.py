"""Generation as a task: the same answers as transformers' own `generate`, whatever the batch."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from brim.data.open import DataRequest, open_data
from brim.errors import RequestError
from brim.models.base import LoadedModel, LoadRequest
from brim.models.load import load_model
from brim.tasks.base import Task, TaskSettings
from brim.tasks.multimodal import MultimodalInputs, joined
from brim.tasks.prompts import PromptWriter
from tests.evaluation.evaluation_runs import predictions, run, write_lines
from tests.saved_models import VOCABULARY

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

TOKENS = 10


def asked(data: Path) -> list[str]:
    return [sample.prompt or "" for sample in open_data(DataRequest(path=str(data))).samples]


def own_answers(folder: Path, texts: Sequence[str], **options: Any) -> list[str]:
    """What transformers' `generate` writes to each text alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    seq2seq = (folder / "config.json").read_text().find('"is_encoder_decoder": true') > 0
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder)
    answers = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", **options)
        read = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        ids = model.generate(**read, max_new_tokens=TOKENS, do_sample=False)[0]
        new = ids[1:] if seq2seq else ids[inputs["input_ids"].shape[1] :]
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        kept = [token for token in new.tolist() if token not in ends]  # generate leaves the end token in its place
        answers.append(tokenizer.decode(kept, skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("size", [1, 8, "auto"])
def test_answers_are_those_of_generate_at_batch_size_one(
    language_model: Path, questions: Path, tmp_path: Path, size: Any
) -> None:
    result = run(language_model, questions, tmp_path / "run", batch_size=size, max_new_tokens=TOKENS)
    expected = own_answers(language_model, asked(questions))
    assert predictions(result) == expected
    assert len(set(expected)) > 10, "the prompt must matter"
    lengths = {sample["tokens"] for sample in result.samples}
    assert min(lengths) < TOKENS == max(lengths), "some answers must end by themselves, some must not"
    assert all(sample["truncated"] == (sample["tokens"] == TOKENS) for sample in result.samples)
    assert result.summary["batch_sizes"]["largest"] == {1: 1, 8: 8}.get(size, result.summary["batch_sizes"]["largest"])


@pytest.mark.parametrize("size", [1, 5])
def test_a_model_with_an_encoder_answers_as_its_own_generate(
    seq2seq_model: Path, questions: Path, tmp_path: Path, size: int
) -> None:
    result = run(seq2seq_model, questions, tmp_path / "run", batch_size=size, max_new_tokens=TOKENS)
    expected = own_answers(seq2seq_model, asked(questions))
    assert predictions(result) == expected
    assert len(set(expected)) > 4, "the prompt must matter"


def test_an_answer_ends_before_a_stop_string(language_model: Path, questions: Path, tmp_path: Path) -> None:
    whole = run(language_model, questions, tmp_path / "whole", max_new_tokens=TOKENS)
    words = [answer.split() for answer in predictions(whole)]
    stop = next(word for word in VOCABULARY if sum(word in answer[1:] for answer in words) >= 2)
    cut = run(language_model, questions, tmp_path / "cut", max_new_tokens=TOKENS, stop=(f" {stop}",))
    assert predictions(cut) == [
        " ".join(answer[: answer.index(stop, 1)] if stop in answer[1:] else answer) for answer in words
    ]
    for answer, before, after in zip(words, whole.samples, cut.samples, strict=True):
        if stop in answer[1:]:
            assert (after["tokens"], after["truncated"]) == (answer.index(stop, 1) + 1, False)
        else:
            assert (after["tokens"], after["truncated"]) == (before["tokens"], before["truncated"])


def test_prompts_use_the_chat_template_by_default(chat_model: Path, questions: Path, tmp_path: Path) -> None:
    prompts = asked(questions)
    written = [f"user: {prompt} assistant: " for prompt in prompts]
    usual = run(chat_model, questions, tmp_path / "usual", max_new_tokens=TOKENS)
    assert predictions(usual) == own_answers(chat_model, written, add_special_tokens=False)
    assert any("chat template" in note for note in usual.notes)
    plain = run(chat_model, questions, tmp_path / "plain", max_new_tokens=TOKENS, chat=False)
    assert predictions(plain) == own_answers(chat_model, prompts)
    assert predictions(plain) != predictions(usual)
    told = run(chat_model, questions, tmp_path / "told", max_new_tokens=TOKENS, system="w1 w2")
    systems = [f"system: w1 w2 {text}" for text in written]
    assert predictions(told) == own_answers(chat_model, systems, add_special_tokens=False)


def test_chat_is_refused_for_a_model_without_template(language_model: Path, questions: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--chat"):
        run(language_model, questions, tmp_path / "run", chat=True)


def test_sampled_answers_do_not_depend_on_the_batch_size(language_model: Path, questions: Path, tmp_path: Path) -> None:
    def drawn(name: str, **settings: Any) -> list[Any]:
        options = {"max_new_tokens": TOKENS, "temperature": 0.8, "top_p": 0.9, **settings}
        return predictions(run(language_model, questions, tmp_path / name, **options))

    alone = drawn("1", batch_size=1)
    assert drawn("8", batch_size=8) == alone
    assert drawn("auto") == alone
    assert drawn("seed", seed=1) != alone
    assert drawn("greedy", temperature=0.0) != alone


def test_an_error_of_the_chat_template_is_reported(chat_model: Path, questions: Path, tmp_path: Path) -> None:
    strict = tmp_path / "strict"
    shutil.copytree(chat_model, strict)
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(strict)
    tokenizer.chat_template = template + tokenizer.chat_template
    tokenizer.save_pretrained(strict)
    with pytest.raises(RequestError, match=r"--system: the model's chat template refuses \(no system role\)"):
        run(strict, questions, tmp_path / "run", system="w1")


def test_a_prompt_too_long_for_the_model_fails_only_its_sample(
    language_model: Path, seq2seq_model: Path, tmp_path: Path
) -> None:
    long = {"id": "long", "question": "w1 " * 315, "answer": "1"}
    data = write_lines(tmp_path / "data.jsonl", [{"id": "short", "question": "w1 w2", "answer": "1"}, long])
    for model, positions in ((language_model, 320), (seq2seq_model, 64)):
        result = run(model, data, tmp_path / model.name, max_new_tokens=TOKENS)
        short, failed = result.samples
        assert short["error"] is None
        assert short["prediction"]
        assert failed["prediction"] is None
        assert f"{positions} positions" in failed["error"]["message"]
        assert result.metrics["exact_match"]["count"] == 2


def test_a_classifier_is_refused_for_generation(text_classifier: Path, questions: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--task generate: .* does not write text; use --task classify"):
        run(text_classifier, questions, tmp_path / "run", task="generate")


# ---------------------------------------------------------------------------------------------- with pictures


def own_picture_answers(folder: Path, data: Path, written: str = "", **options: Any) -> list[str]:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    answers = []
    for sample in open_data(DataRequest(path=str(data))).samples:
        images = [Image.open(image.path).convert("RGB") for image in sample.images if image.path]
        text = (written or "<image>\n" * len(images) + "{}").format(sample.prompt)
        inputs = processor(text=text, images=images or None, return_tensors="pt", **options)
        ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0]
        answers.append(processor.tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("size", [1, 4])
def test_answers_about_images_are_those_of_generate(
    vision_language_model: Path, picture_questions: Path, tmp_path: Path, size: int
) -> None:
    result = run(vision_language_model, picture_questions, tmp_path / "run", batch_size=size, max_new_tokens=TOKENS)
    expected = own_picture_answers(vision_language_model, picture_questions)
    assert predictions(result) == expected
    assert len(set(expected)) == len(expected)
    assert set(result.metrics) == {"vqa_accuracy", "vqa_accuracy_simple", "exact_match"}
    assert result.samples[0]["input"]["media"][0].endswith("0.png")


def test_a_processors_chat_template_has_a_placeholder_for_every_image(
    vision_language_model: Path, picture_questions: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(vision_language_model, folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
        "{{ '<image> ' if part['type'] == 'image' else part['text'] }}{% endfor %} {% endfor %}assistant: "
    )
    processor.save_pretrained(folder)
    result = run(folder, picture_questions, tmp_path / "run", batch_size=3, max_new_tokens=TOKENS)
    written = "user: <image> {} assistant: "
    assert predictions(result) == own_picture_answers(vision_language_model, picture_questions, written)
    assert predictions(result) != own_picture_answers(vision_language_model, picture_questions)


def test_half_precision_works_with_images(vision_language_model: Path, picture_questions: Path, tmp_path: Path) -> None:
    result = run(vision_language_model, picture_questions, tmp_path / "run", dtype="bfloat16", max_new_tokens=3)
    assert [sample["error"] for sample in result.samples] == [None] * 6


def test_a_knob_is_an_option_of_the_processor(
    vision_language_model: Path, picture_questions: Path, tmp_path: Path
) -> None:
    knobs = {"do_normalize": "false"}  # as the command line gives it
    result = run(vision_language_model, picture_questions, tmp_path / "run", max_new_tokens=TOKENS, knobs=knobs)
    assert predictions(result) == own_picture_answers(vision_language_model, picture_questions, do_normalize=False)
    assert predictions(result) != own_picture_answers(vision_language_model, picture_questions)


def test_an_unknown_knob_is_refused_with_the_known_ones(
    vision_language_model: Path, picture_questions: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=r"--knob max_crops: .* \(it has max_new_tokens, layers\)"):
        run(vision_language_model, picture_questions, tmp_path / "run", knobs={"max_crops": "4"})


@pytest.mark.parametrize("kind", ["language_model", "vision_language_model"])
def test_a_knob_changes_the_model_that_answers_and_the_fingerprint(
    request: pytest.FixtureRequest, kind: str, questions: Path, picture_questions: Path, tmp_path: Path
) -> None:
    model = request.getfixturevalue(kind)
    data = questions if kind == "language_model" else picture_questions
    whole = run(model, data, tmp_path / "whole", max_new_tokens=TOKENS)
    same = run(model, data, tmp_path / "same", max_new_tokens=TOKENS, knobs={"layers": "2"})
    cut = run(model, data, tmp_path / "cut", max_new_tokens=TOKENS, knobs={"layers": "1"})
    assert predictions(whole) == predictions(same) != predictions(cut)
    assert not any(sample["error"] for sample in cut.samples)
    with pytest.raises(RequestError, match="model differ"):
        run(model, data, tmp_path / "whole", max_new_tokens=TOKENS, knobs={"layers": "1"}, resume=True)


@pytest.fixture(scope="module")
def reader(vision_language_model: Path) -> LoadedModel:
    return load_model(LoadRequest(model=str(vision_language_model), device=torch.device("cpu")))


def inputs_of(reader: LoadedModel, data: Path) -> MultimodalInputs:
    writer = PromptWriter(reader.tokenizer, reader.processor, TaskSettings())
    return MultimodalInputs(reader, open_data(DataRequest(path=str(data))), writer, TaskSettings())


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_joined_samples_equal_the_processors_batch(reader: LoadedModel, picture_questions: Path) -> None:
    inputs = inputs_of(reader, picture_questions)
    prepared = [inputs.prepare(item) for item in range(6)]
    assert len({one["input_ids"].shape for one in prepared}) > 1
    assert same(joined(prepared, pad=0), inputs._process(range(6)))


def test_costs_include_the_tokens_of_the_images(reader: LoadedModel, picture_questions: Path) -> None:
    inputs = inputs_of(reader, picture_questions)
    lengths = inputs.lengths()
    for item in range(6):
        assert abs(lengths[item] - inputs.prepare(item)["input_ids"].shape[1]) <= 1  # the place of the image is a word


def test_a_batch_may_mix_samples_with_and_without_images(
    reader: LoadedModel, picture_questions: Path, vision_language_model: Path, tmp_path: Path
) -> None:
    """The costliest comes first: here the one without a picture, which has no pixels to lead the way."""
    Image.new("RGB", (20, 10), (200, 30, 30)).save(tmp_path / "red.png")
    words = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"
    data = write_lines(
        tmp_path / "data.jsonl",
        [
            {"id": "text", "image": None, "question": words, "answer": "1"},
            {"id": "red", "image": "red.png", "question": "w1", "answer": "1"},
        ],
    )
    result = run(vision_language_model, data, tmp_path / "run", task="generate", batch_size=2, max_new_tokens=TOKENS)
    assert predictions(result) == own_picture_answers(vision_language_model, data)
    assert result.summary["batch_sizes"]["largest"] == 2
    inputs = inputs_of(reader, data)
    batch = joined([inputs.prepare(0), inputs.prepare(1)], pad=0)
    assert batch["pixel_values"].shape[0] == 1
    assert same(batch, inputs._process([0, 1]))


class Counting:
    """A processor whose inputs depend on what else is in the batch, as some do."""

    image_token = "<image>"

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.sizes: list[int] = []

    def __call__(self, *, text: Sequence[str], **options: Any) -> dict[str, Any]:
        self.sizes.append(len(text))
        made = dict(self.processor(text=text, **options))
        return {**made, "offsets": torch.arange(len(text))}


def test_a_processor_that_differs_in_batches_prepares_whole_batches(
    reader: LoadedModel, picture_questions: Path
) -> None:
    processor = Counting(reader.processor)
    inputs = inputs_of(dataclasses.replace(reader, processor=processor), picture_questions)
    prepared = [inputs.prepare(item) for item in range(6)]
    assert inputs.batch([0], prepared[:1])["offsets"].tolist() == [0]
    for items in ([0, 1, 2], [3, 4, 5]):
        batch = inputs.batch(items, [prepared[item] for item in items])
        assert batch["offsets"].tolist() == [0, 1, 2]
    assert processor.sizes == [1] * 6 + [3, 3, 3]  # compared once, then whole
    assert len(inputs.notes) == 1
    assert "whole batches" in inputs.notes[0]


class Rounding(Counting):
    """One whose pixels depend on how many threads resize them, by a level or two of 256, as torch's do."""

    level = 0.0

    def __call__(self, *, text: Sequence[str], **options: Any) -> dict[str, Any]:
        self.sizes.append(len(text))
        made = dict(self.processor(text=text, **options))
        return {**made, "pixel_values": made["pixel_values"] + self.level}


@pytest.mark.parametrize(("level", "whole"), [(2 / 127.5, False), (0.5, True)])
def test_rounding_differences_of_pixels_are_tolerated(
    reader: LoadedModel, picture_questions: Path, level: float, whole: bool
) -> None:
    """Worker processes have one thread each: without this every batch was made a second time, in the main process."""
    processor = Rounding(reader.processor)
    inputs = inputs_of(dataclasses.replace(reader, processor=processor), picture_questions)
    prepared = [inputs.prepare(item) for item in range(3)]
    processor.level = level
    inputs.batch([0, 1, 2], prepared)
    inputs.batch([0, 1, 2], prepared)
    assert inputs._whole is whole
    assert processor.sizes == [1] * 3 + ([3, 3, 3] if whole else [3])


def test_the_compared_samples_cover_every_difference(reader: LoadedModel, picture_questions: Path) -> None:
    """A processor takes a tenth of a second for a picture, and batches have hundreds."""
    compared: list[Sequence[int]] = []
    inputs = inputs_of(reader, picture_questions)
    own = inputs._process
    inputs._process = lambda items: compared.append(items) or own(items)  # type: ignore[method-assign, func-returns-value]
    short = inputs.prepare(0)
    longer = {**short, "input_ids": torch.cat([short["input_ids"], short["input_ids"]], dim=1)}
    compared.clear()
    inputs.batch([0] * 40 + [1], [short] * 40 + [longer])
    assert compared[0] == [0, 0, 0, 1]
    compared.clear()
    again = inputs.batch([0] * 40, [short] * 40)
    assert [len(items) for items in compared] in ([3], [40])  # the copy above is not what the processor gives
    assert again["input_ids"].shape[0] == 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pixels_have_the_models_dtype_in_the_worker(
    reader: LoadedModel, picture_questions: Path, dtype: torch.dtype
) -> None:
    inputs = inputs_of(dataclasses.replace(reader, dtype=dtype), picture_questions)
    full = inputs_of(reader, picture_questions).prepare(0)
    prepared = inputs.prepare(0)
    assert prepared["pixel_values"].dtype == dtype
    assert torch.equal(prepared["pixel_values"], full["pixel_values"].to(dtype))  # as the model's first line does
    assert prepared["input_ids"].dtype == torch.int64


class Fussy(Counting):
    """One that pads the texts of a batch in a way of its own, which shows only where they differ in length."""

    def __call__(self, *, text: Sequence[str], **options: Any) -> dict[str, Any]:
        self.sizes.append(len(text))
        made = dict(self.processor(text=text, **options))
        return {**made, "input_ids": made["input_ids"].where(made["attention_mask"] == 1, 9)}


def test_every_composition_of_a_batch_is_compared_once(reader: LoadedModel, tmp_path: Path) -> None:
    Image.new("RGB", (20, 10), (200, 30, 30)).save(tmp_path / "red.png")
    texts = ["w1 w2", "w3 w4", "w5 w6", "w7 w8", "w1 w2 w3", "w4 w5"]
    records = [{"image": "red.png", "question": text, "answer": "1"} for text in texts]
    data = write_lines(tmp_path / "data.jsonl", records)
    processor = Fussy(reader.processor)
    inputs = inputs_of(dataclasses.replace(reader, processor=processor), data)
    prepared = [inputs.prepare(item) for item in range(6)]
    for items in ([0, 1], [2, 3], [4, 5], [0, 1]):
        inputs.batch(items, [prepared[item] for item in items])
    # Compared: the first even batch and the first uneven one, which differs: it and the last are asked for whole.
    assert processor.sizes == [1] * 6 + [2, 2, 2, 2]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_tensors_inside_lists_are_moved_to_the_device(non_blocking: bool) -> None:
    """Some processors give a list of pictures of different sizes."""
    task = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("meta")), settings=SimpleNamespace(non_blocking=non_blocking)
    )
    sent = Task.to_device(
        task,  # type: ignore[arg-type]  # all that it asks for
        {"input_ids": torch.zeros(2, 3), "pictures": [torch.zeros(4), {"low": torch.zeros(1)}], "sizes": (2, None)},
    )
    assert sent["input_ids"].device.type == "meta"
    assert [sent["pictures"][0].device.type, sent["pictures"][1]["low"].device.type] == ["meta", "meta"]
    assert sent["sizes"] == (2, None)
