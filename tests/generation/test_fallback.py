"""What the way through `generate` adds to it; its answers are held against the loop's and the model's elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from brim.generation.fallback import GenerateFallback
from brim.generation.settings import TokenIds
from tests.generation.tiny_models import (
    NO_ENDS,
    PAD,
    SINCE_VERSION_5,
    answers_of,
    bart,
    batch_of,
    llama,
    make_prompts,
    own_answers,
    settings,
)


@pytest.mark.parametrize("make", [llama, pytest.param(bart, marks=SINCE_VERSION_5)])
def test_answers_that_end_and_answers_that_do_not_are_told_apart(make: Any) -> None:
    model, prompts = make(), make_prompts()
    unended = own_answers(model, prompts, 12)
    tokens = TokenIds(ends=(unended[0][5], unended[1][7]), pad=PAD)
    expected = own_answers(model, prompts, 12, tokens.ends)
    assert len({len(answer) for answer in expected}) > 1
    fallback = GenerateFallback(model, settings(12), tokens, why="a test")
    answers = fallback.generate(batch_of(fallback, prompts))
    assert answers.token_lists() == expected
    assert answers.ended() == [len(answer) < 12 for answer in expected]


def test_the_models_own_configuration_is_put_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    model.generation_config.repetition_penalty = 1.5
    usual, before = model.generation_config, model.generation_config.to_dict()
    fallback = GenerateFallback(model, settings(4, temperature=1.0), NO_ENDS, why="a test")
    answers_of(fallback, make_prompts())

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(ValueError, match="no"):
        answers_of(fallback, make_prompts())
    assert model.generation_config is usual
    assert usual.to_dict() == before


def test_nothing_is_said_about_flags(capfd: pytest.CaptureFixture[str]) -> None:
    model = llama()
    for name, value in {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "do_sample": True, "max_length": 3}.items():
        setattr(model.generation_config, name, value)
    for options in ({}, {"temperature": 1.3}):
        answers_of(GenerateFallback(model, settings(4, **options), NO_ENDS, why="a test"), make_prompts())
    assert capfd.readouterr().err == ""
