"""Models and questions that several tests share; each is made once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import transformers
from PIL import Image

from tests import saved_models

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder for a model or data set that is made once."""
    return lambda name: tmp_path_factory.mktemp("saved") / name


@pytest.fixture(scope="session")
def language_model(saved: Folder) -> Path:
    """Some of its answers end by themselves within a dozen tokens."""
    return saved_models.save_language_model(saved("lm"))


@pytest.fixture(scope="session")
def endless_model(saved: Folder) -> Path:
    """Its answers never end by themselves."""
    return saved_models.save_language_model(saved("endless"), ends=False)


@pytest.fixture(scope="session")
def chat_model(saved: Folder) -> Path:
    return saved_models.save_language_model(saved("chat"), chat_template=saved_models.CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def seq2seq_model(saved: Folder) -> Path:
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("before version 5 transformers loads BART's untied head with random weights")
    return saved_models.save_seq2seq(saved("seq2seq"))


@pytest.fixture(scope="session")
def vision_language_model(saved: Folder) -> Path:
    return saved_models.save_vision_language_model(saved("vlm"))


@pytest.fixture(scope="session")
def endless_vision_language_model(saved: Folder) -> Path:
    """Its answers never end by themselves."""
    return saved_models.save_vision_language_model(saved("endless-vlm"), ends=False)


@pytest.fixture(scope="session")
def text_classifier(saved: Folder) -> Path:
    return saved_models.save_text_classifier(saved("text"))


@pytest.fixture(scope="session")
def image_classifier(saved: Folder) -> Path:
    return saved_models.save_image_classifier(saved("image"))


@pytest.fixture(scope="session")
def questions(saved: Folder) -> Path:
    """Fourteen questions of one to thirty words."""
    words = random.Random(0)
    path = saved("questions.jsonl")
    lines = [
        {"id": f"q{number}", "question": _phrase(words, words.randint(1, 30)), "answer": str(number)}
        for number in range(14)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def picture_questions(saved: Folder) -> Path:
    """Six questions to one picture each, of different sizes, with several accepted answers."""
    words, colours = random.Random(1), numpy.random.default_rng(1)
    path = saved("pictures.jsonl")
    lines = []
    for number in range(6):
        name = f"{number}.png"
        Image.fromarray(colours.integers(0, 255, (10 + number, 20, 3), dtype=numpy.uint8)).save(path.parent / name)
        question = _phrase(words, words.randint(1, 9))
        lines.append({"id": f"p{number}", "image": name, "question": question, "answers": ["w1", "w2", "w1"]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _phrase(words: random.Random, length: int) -> str:
    return " ".join(words.choice(saved_models.WORDS[:24]) for _ in range(length))
