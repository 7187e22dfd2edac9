"""The shipped model: it loads, obeys max_crops, and reads held-out boards better the more crops it is given."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from PIL import Image

from brim.demo.digitboard import LAYOUTS, board_pixels, draw_board, draw_questions
from brim.demo.model import IMAGE_TOKEN, build_config, build_processor, weights_folder
from brim.tasks.multimodal import joined

transformers = pytest.importorskip("transformers", minversion="5.22")
pytest.importorskip("sklearn")

FEWEST, MOST = 1, 12


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(weights_folder()).eval()


@pytest.fixture(scope="module")
def processor() -> Any:
    return transformers.AutoProcessor.from_pretrained(weights_folder())


def asked(count: int, *, seed: int) -> list[tuple[Image.Image, str, str]]:
    """Pictures of held-out scans, each with a question and its answer."""
    generator, found = random.Random(seed), []
    while len(found) < count:
        board = draw_board(generator, split="heldout")
        image = Image.fromarray(board_pixels(board))
        found += [(image, question.text, question.answer) for question in draw_questions(generator, board, count=4)]
    return found[:count]


def processed(processor: Any, questions: list[tuple[Image.Image, str, str]], max_crops: int) -> dict[str, Any]:
    texts = [f"{IMAGE_TOKEN}\n{text}" for _, text, _ in questions]
    images = [[image] for image, _, _ in questions]
    return dict(processor(text=texts, images=images, max_crops=max_crops, return_tensors="pt", padding=True))


def answers(model: Any, processor: Any, questions: list[tuple[Image.Image, str, str]], max_crops: int) -> list[str]:
    inputs = processed(processor, questions, max_crops)
    written = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.batch_decode(written, skip_special_tokens=True)]


def test_the_shipped_folder_is_small_and_matches_its_builders(model: Any, processor: Any) -> None:
    assert sum(file.stat().st_size for file in weights_folder().iterdir()) <= 8_000_000
    fresh = transformers.Molmo2ForConditionalGeneration(build_config())
    assert type(model) is type(fresh)
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in fresh.state_dict().items()
    }
    text = f"{IMAGE_TOKEN} Which digit is at the top left? Is there an eight? 7 yes"
    assert processor.tokenizer(text)["input_ids"] == build_processor().tokenizer(text)["input_ids"]
    assert processor.tokenizer.unk_token_id not in processor.tokenizer(text)["input_ids"]


def test_max_crops_applies_to_every_call_and_saturates(processor: Any) -> None:
    landscape = Image.fromarray(board_pixels(draw_board(random.Random(1), split="heldout", layout=LAYOUTS[0])))
    used = {
        crops: int(processed(processor, [(landscape, "", "")], crops)["image_num_crops"][0]) - 1  # and the whole board
        for crops in range(1, 14)
    }
    assert used == {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 6, 7: 6, 8: 6, 9: 9, 10: 9, 11: 9, 12: 12, 13: 12}


def test_more_crops_make_longer_prompts(processor: Any) -> None:
    question = asked(1, seed=4)
    lengths = [processed(processor, question, crops)["input_ids"].shape[1] for crops in (1, 2, 4, 6, 12)]
    assert lengths == sorted(set(lengths))


def test_accuracy_on_held_out_scans_rises_with_max_crops(model: Any, processor: Any) -> None:
    questions = asked(60, seed=11)
    right = {
        crops: sum(
            answer == wanted
            for answer, (_, _, wanted) in zip(answers(model, processor, questions, crops), questions, strict=True)
        )
        for crops in (FEWEST, MOST)
    }
    assert right[MOST] >= 0.8 * len(questions)
    assert right[MOST] - right[FEWEST] >= 0.2 * len(questions)


def test_a_batch_of_several_shapes_is_answered_as_its_questions_alone(model: Any, processor: Any) -> None:
    questions = asked(8, seed=12)
    alone = [answers(model, processor, [question], 6)[0] for question in questions]
    assert answers(model, processor, questions, 6) == alone


def test_single_samples_put_together_equal_the_processors_batch(processor: Any) -> None:
    questions = asked(8, seed=13)
    whole = processed(processor, questions, 9)
    alone = [processed(processor, [question], 9) for question in questions]
    batch = joined(alone, pad=processor.tokenizer.pad_token_id)
    assert set(batch) == set(whole)
    for name in whole:  # also `image_token_pooling`, which counts patches over the whole batch
        assert torch.equal(batch[name], whole[name]), name
