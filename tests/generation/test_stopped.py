"""Answers that need no further token: no more steps are spent on them, and what was said before stays the same."""

from __future__ import annotations

from typing import Any

import pytest

from brim.generation import loop, select
from brim.generation.loop import DecodeLoop
from brim.generation.select import GenerateFallback
from tests.generation.tiny_models import NO_ENDS, batch_of, llama, make_prompts, own_answers, settings


def decoder_of(kind: str, model: Any, new_tokens: int) -> Any:
    if kind == "loop":
        return DecodeLoop(model, settings(new_tokens), NO_ENDS)
    return GenerateFallback(model, settings(new_tokens), NO_ENDS, why="a test")


@pytest.fixture(params=["loop", "fallback"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(loop, "CHECK_STEPS", 3)
    monkeypatch.setattr(select, "CHECK_STEPS", 3)
    monkeypatch.setattr(loop, "FIRST_SEGMENT", 5)  # the question is also asked across segments
    return str(request.param)


def test_a_stopped_answer_gets_no_further_token_and_the_others_continue(kind: str) -> None:
    model, prompts = llama(), make_prompts()
    whole = own_answers(model, prompts, 16)
    decoder = decoder_of(kind, model, 16)
    seen: list[int] = []

    def stopped(answers: list[list[int]]) -> list[bool]:
        seen.append(len(answers[0]))
        return [answer[:3] == whole[1][:3] or answer[:7] == whole[4][:7] for answer in answers]

    decoder.stopped = stopped
    answers = decoder.generate(batch_of(decoder, prompts)).token_lists()
    for row, answer in enumerate(answers):
        said = {1: 3, 4: 8 if kind == "loop" else 9}.get(row, 16)  # asked after every third token, of a segment there
        assert answer[:said] == whole[row][:said]
        if row in (1, 4) and kind == "loop":
            assert set(answer[said:]) <= {NO_ENDS.pad}
    assert seen


def test_when_all_have_stopped_the_batch_ends(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = llama(), make_prompts()
    decoder = decoder_of(kind, model, 60)
    decoder.stopped = lambda answers: [len(answer) >= 6 for answer in answers]
    forward, calls = model.forward, []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(*arguments, **options)

    monkeypatch.setattr(model, "forward", counted)
    answers = decoder.generate(batch_of(decoder, prompts)).token_lists()
    assert len(calls) < 12
    assert all(6 <= len(answer) < 12 for answer in answers)
