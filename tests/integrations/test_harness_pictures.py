"""Prompts with images as a harness asks them, without the harness: answers, repetitions, resuming, little memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from brim.data.base import ImageFile
from brim.errors import DoesNotFitError, RequestError
from brim.evaluation.worker import EvalListener, Lines
from brim.integrations.harness_start import load_harness_model, open_work, writing_of
from brim.integrations.harness_tasks import PicturePrompt, Writing
from brim.integrations.harness_work import HarnessWork
from brim.ranks.agreement import Agreement
from brim.settings.eval_settings import EvalRequest
from tests import saved_models

WRITING = Writing(max_new_tokens=12)


class Counted(EvalListener):
    def __init__(self) -> None:
        self.lines: Lines = []

    def scored(self, lines: Lines) -> None:
        self.lines += lines


def made_images(chance: random.Random, count: int) -> list[Image.Image]:
    found = []
    for _ in range(count):
        size = (chance.randint(6, 40), chance.randint(6, 40))
        found.append(Image.frombytes("RGB", size, chance.randbytes(size[0] * size[1] * 3)))
    return found


@pytest.fixture(scope="module")
def questions() -> list[tuple[str, list[Image.Image]]]:
    chance = random.Random(3)
    asked = []
    for number in range(12):
        images = made_images(chance, (1, 1, 2, 0)[number % 4])
        words = [chance.choice(saved_models.WORDS[:24]) for _ in range(chance.randint(1, 30))]
        asked.append(("<image> " * len(images) + " ".join(words), images))
    return asked


def prompts_of(questions: Sequence[tuple[str, list[Image.Image]]]) -> list[PicturePrompt]:
    return [
        PicturePrompt(
            f"{number}", text, tuple(ImageFile(decoded=partial(lambda one: one, one), size=one.size) for one in images)
        )
        for number, (text, images) in enumerate(questions)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save_vision_language_model(tmp_path_factory.mktemp("saved") / "vlm")


@pytest.fixture(scope="module")
def alone(model: Path, questions: list[tuple[str, list[Image.Image]]]) -> list[str]:
    """Each by itself, by transformers alone."""
    processor = transformers.AutoProcessor.from_pretrained(model)
    module = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for text, images in questions:
        inputs = processor(text=text, return_tensors="pt", **({"images": images} if images else {}))
        made = module.generate(**inputs, max_new_tokens=WRITING.max_new_tokens, do_sample=False)
        found.append(processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])
    assert len(set(found)) > 5
    return found


def opened(model: Path, folder: Path | None, stack: contextlib.ExitStack, **settings: Any) -> tuple[HarnessWork, Lines]:
    counted = Counted()
    request = EvalRequest(model=str(model), data="pictures", device="cpu", dtype="float32", use_cache=False, **settings)
    loaded = load_harness_model(request, "harness", kinds=("vision_language",), wanted="model that sees")
    if folder is not None:
        folder.mkdir(exist_ok=True)
    return open_work(request, loaded, folder, counted, Agreement(), stack), counted.lines


def texts_of(work: HarnessWork, prompts: Sequence[PicturePrompt], writing: Writing = WRITING) -> list[str]:
    return [line["prediction"] for line in work.write_of_pictures(prompts, writing, templated=True)]


def test_answers_are_those_of_the_model_by_itself(
    model: Path, questions: list[tuple[str, list[Image.Image]]], alone: list[str]
) -> None:
    with contextlib.ExitStack() as stack:
        work, lines = opened(model, None, stack)
        assert texts_of(work, prompts_of(questions)) == alone
    assert max(line["batch_size"] for line in lines) > 1


def test_a_repeated_prompt_is_answered_once_and_a_sampled_one_each_time(
    model: Path, questions: list[tuple[str, list[Image.Image]]]
) -> None:
    prompts = prompts_of(questions[:3])
    with contextlib.ExitStack() as stack:
        work, lines = opened(model, None, stack)
        texts_of(work, [*prompts, prompts[0]])
        assert len(lines) == 3
        drawn = texts_of(work, [prompts[0]] * 4, Writing(max_new_tokens=12, temperature=2.0))
        assert len(lines) == 7
        assert len(set(drawn)) > 1


def test_a_second_start_computes_only_what_is_missing(
    model: Path, questions: list[tuple[str, list[Image.Image]]], alone: list[str], tmp_path: Path
) -> None:
    prompts = prompts_of(questions)
    with contextlib.ExitStack() as stack:
        work, _ = opened(model, tmp_path / "run", stack)
        texts_of(work, prompts[:5])
    with contextlib.ExitStack() as stack:
        work, lines = opened(model, tmp_path / "run", stack, resume=True)
        assert texts_of(work, prompts) == alone
        assert len(lines) == 7


def test_out_of_memory_in_the_middle_costs_no_answer(
    model: Path, questions: list[tuple[str, list[Image.Image]]], alone: list[str]
) -> None:
    with contextlib.ExitStack() as stack:
        work, _ = opened(model, None, stack, batch_size=1, memory_limit="1GiB")
        texts_of(work, prompts_of(questions))
        limit = int(1.5 * work.summary()["peak_reserved_bytes"])
        work, _ = opened(model, None, stack, batch_size=64, memory_limit=limit)
        assert texts_of(work, prompts_of(questions)) == alone
        assert work.summary()["oom_events"] > 0
        work, _ = opened(model, None, stack, memory_limit=60_000)
        with pytest.raises(DoesNotFitError, match="even alone"):
            texts_of(work, prompts_of(questions))


def test_an_answer_without_room_is_refused_before_anything_is_computed(
    model: Path, questions: list[tuple[str, list[Image.Image]]]
) -> None:
    with contextlib.ExitStack() as stack:
        work, lines = opened(model, None, stack)
        with pytest.raises(RequestError, match=r"320 positions.*use gen_kwargs=\{'max_new_tokens': \d+\} or less"):
            texts_of(work, prompts_of(questions), Writing(max_new_tokens=310))
        assert lines == []


def test_an_image_that_cannot_be_made_fails_alone(model: Path, questions: list[tuple[str, list[Image.Image]]]) -> None:
    def broken() -> Any:
        raise OSError("the image is torn")

    prompts = [
        *prompts_of(questions[:2]),
        PicturePrompt("torn", "<image> 3", (ImageFile(decoded=broken, size=(8, 8)),)),
    ]
    with contextlib.ExitStack() as stack:
        work, lines = opened(model, None, stack)
        with pytest.raises(RequestError, match=r"1 of 3 requests failed.*the image is torn"):
            texts_of(work, prompts)
        assert [line["error"] is None for line in lines].count(True) == 2


def test_a_setting_of_generation_that_does_not_exist_is_an_error(model: Path) -> None:
    with contextlib.ExitStack() as stack:
        work, _ = opened(model, None, stack)
        with pytest.raises(RequestError, match="no such setting"):
            writing_of({"visual_cot": True}, work.model, most_tokens=8)


def test_a_model_without_images_is_refused(language_model: Path) -> None:
    request = EvalRequest(model=str(language_model), data="pictures", device="cpu")
    with pytest.raises(RequestError, match="it is a language model; harness's tasks need a model that sees"):
        load_harness_model(request, "harness", kinds=("vision_language",), wanted="model that sees")
