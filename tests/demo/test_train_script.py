"""The training script: questions packed behind one picture are as they would be alone, and a run can be broken off."""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from brim.demo.digitboard import LAYOUTS, board_pixels, draw_board, draw_questions
from brim.demo.model import IMAGE_TOKEN, build_config, build_processor

transformers = pytest.importorskip("transformers", minversion="5.22")
pytest.importorskip("sklearn")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digitboard" / "train.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("digitboard_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def trainer(script: ModuleType, checkpoints: Path, *, steps: int) -> Any:
    torch.manual_seed(0)
    arguments = argparse.Namespace(
        steps=steps, seeing_steps=1, easy_steps=1, boards=2, learning_rate=1e-3, seed=0, checkpoints=checkpoints
    )
    return script.Trainer(script.fresh_model(), build_processor(), arguments)


def test_a_packed_question_gets_the_logits_that_it_gets_alone(script: ModuleType) -> None:
    torch.manual_seed(0)
    model, processor = transformers.Molmo2ForConditionalGeneration(build_config()).eval(), build_processor()
    generator = random.Random(3)
    drawn = [draw_board(generator, split="train", layout=LAYOUTS[1]) for _ in range(2)]
    questions = [draw_questions(generator, board, count=5) for board in drawn]
    inputs, answers = script.packed(processor, script.as_seen(processor, drawn, 4), questions)
    with torch.inference_mode():
        packed = model(**inputs, use_cache=False).logits[1]
        places = [
            place
            for place, answer in enumerate(answers[1].tolist())
            if answer not in (script.IGNORED, processor.tokenizer.eos_token_id)
        ]
        image = torch.from_numpy(board_pixels(drawn[1])).permute(2, 0, 1)
        for place, question in zip(places, questions[1], strict=True):
            text = f"{IMAGE_TOKEN}\n{question.text}"
            alone = processor(text=[text], images=[[image]], max_crops=4, return_tensors="pt")
            torch.testing.assert_close(packed[place], model(**alone).logits[0, -1], atol=1e-4, rtol=1e-4)
            assert processor.tokenizer.decode(answers[1, place]) == question.answer


def test_an_interrupted_run_resumes_with_the_same_result(script: ModuleType, tmp_path: Path) -> None:
    whole = trainer(script, tmp_path / "whole", steps=3)
    for _ in range(3):
        whole.one_step()
    broken = trainer(script, tmp_path / "broken", steps=3)
    broken.one_step()
    broken.one_step()
    broken.keep()
    resumed = trainer(script, tmp_path / "broken", steps=3)
    resumed.resume()
    resumed.train()
    assert resumed.step == whole.step == 3
    for name, value in whole.mean.items():
        torch.testing.assert_close(resumed.mean[name], value, msg=name)


def test_tokens_are_labelled_with_the_digit_whose_middle_they_hold(script: ModuleType) -> None:
    board = draw_board(random.Random(5), split="train", layout=LAYOUTS[0])
    facts = script.in_view(board, 10, 13)  # at 12 crops: one token for 16 pixels each way
    for digit in board.digits:
        row, column = (digit.top + digit.side / 2) // 16, (digit.left + digit.side / 2) // 16
        assert facts[int(row * 13 + column)][:3] == (digit.value, digit.row, digit.column)
    assert [fact[0] for fact in facts].count(script.NO_DIGIT) == 130 - len(board.digits)
    assert [fact[3] for fact in facts].count(1) == 1
