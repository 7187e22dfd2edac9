"""Evaluations of vision-language models whose answers come from a pool: the same lines as in batches, nothing lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image

from brim.errors import RequestError
from brim.evaluation.run import EvalResult, evaluate
from brim.evaluation.worker import EvalListener, Lines
from brim.generation.pool import GenerationPool, PoolPrompt
from brim.generation.trial import PaddedTrial
from brim.running.pooled import PooledExecutor
from brim.settings.eval_settings import EvalRequest
from brim.tasks import image_pools
from brim.tasks.multimodal import MultimodalInputs
from tests.evaluation.evaluation_runs import lines_of, predictions, record_of, run, without_sizes, write_lines
from tests.generation.tiny_models import SINCE_VERSION_5
from tests.models.vision_language_folders import FAMILIES
from tests.saved_models import varied

TOKENS = 12
MOLMO2 = pytest.mark.skipif(not hasattr(transformers, "Molmo2Config"), reason="transformers has no Molmo2 before 5.22")


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool is used on the CPU too."""
    monkeypatch.setattr("brim.tasks.text_pools.pool_pays_on", lambda device, dtype: True)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten questions to pictures of several sizes, two of them without one."""
    folder = tmp_path_factory.mktemp("pictures")
    colours, words = numpy.random.default_rng(1), random.Random(0)
    records: list[dict[str, Any]] = []
    for number in range(10):
        pixels = colours.integers(0, 255, (40 + 17 * number, 60 + 9 * (number % 4), 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        question = " ".join(words.choice(("what", "is", "this", "?")) for _ in range(1 + 2 * number))
        picture = None if number in (4, 7) else f"{number}.png"
        records.append({"id": f"p{number}", "image": picture, "question": question, "answer": "1"})
    return write_lines(folder / "data.jsonl", records)


@pytest.fixture(scope="module")
def batched(vision_language_model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalResult:
    """The same work in batches."""
    return run(vision_language_model, pictures, tmp_path_factory.mktemp("batched") / "run", **asked())


def asked(**options: Any) -> dict[str, Any]:
    return {"task": "generate", "max_new_tokens": TOKENS, "num_workers": 0, **options}


def same_lines(one: EvalResult, other: EvalResult) -> bool:
    return without_sizes(lines_of(one.folder)) == without_sizes(lines_of(other.folder))


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("molmo2", marks=MOLMO2),  # image tokens attend to each other
        "llava_next",
        pytest.param("smolvlm", marks=SINCE_VERSION_5),  # pixels have a row for each sample
        pytest.param("qwen2_vl", marks=SINCE_VERSION_5),  # images take fewer positions than tokens
    ],
)
def test_families_answer_from_a_pool_as_one_by_one(
    family: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "smolvlm":  # its processor asks for a package that it needs for videos only
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    folder = FAMILIES[family](tmp_path / family)
    varied(transformers.AutoModelForImageTextToText.from_pretrained(folder), spread=0.3).save_pretrained(folder)
    result = run(folder, pictures, tmp_path / "pool", **asked())
    assert record_of(result.folder)["plan"]["unit"] == "kv_bytes"
    assert result.notes == ()
    monkeypatch.setattr("brim.tasks.text_pools.pool_pays_on", lambda device, dtype: False)
    one_by_one = run(folder, pictures, tmp_path / "alone", batch_size=1, **asked())
    assert same_lines(result, one_by_one)
    assert [line["error"] for line in lines_of(result.folder)] == [None] * 10


@pytest.mark.usefixtures("pooled")
class TestPooledImages:
    @pytest.mark.parametrize("size", [{}, {"batch_size": 3}, {"batch_size": 1}, {"cost_cap": 60}, {"num_workers": 2}])
    def test_lines_are_those_of_batches(
        self, vision_language_model: Path, pictures: Path, tmp_path: Path, batched: EvalResult, size: dict[str, int]
    ) -> None:
        result = run(vision_language_model, pictures, tmp_path / "run", **asked(**size))
        assert same_lines(result, batched)
        assert len(set(predictions(result))) > 5
        assert {line["vision_tokens"] for line in lines_of(result.folder)} == {0, 4}
        assert max(line["batch_size"] for line in lines_of(result.folder)) <= size.get("batch_size", 10)
        assert result.summary["oom_events"] == 0
        assert 0 <= result.summary["padding_fraction"] < 1
        assert record_of(result.folder)["plan"]["unit"] == "kv_bytes"

    def test_a_picture_that_cannot_be_read_is_that_samples_failure(
        self, vision_language_model: Path, pictures: Path, tmp_path: Path, batched: EvalResult
    ) -> None:
        records = [json.loads(line) for line in pictures.read_text().splitlines()]
        for record in records:
            if record["image"]:
                (tmp_path / record["image"]).write_bytes((pictures.parent / record["image"]).read_bytes())
        (tmp_path / "0.png").write_bytes(b"no picture")  # the shortest, which a trial would take first
        result = run(vision_language_model, write_lines(tmp_path / "d.jsonl", records), tmp_path / "run", **asked())
        errors = [line["error"] for line in lines_of(result.folder)]
        assert [error is None for error in errors] == [False] + [True] * 9
        assert predictions(result)[1:] == predictions(batched)[1:]
        assert record_of(result.folder)["plan"]["unit"] == "kv_bytes"

    def test_a_trial_takes_no_prompt_beyond_the_models_positions(
        self, vision_language_model: Path, pictures: Path, tmp_path: Path
    ) -> None:
        records = [json.loads(line) for line in pictures.read_text().splitlines()]
        shown = [{**one, "image": str(pictures.parent / one["image"])} for one in records if one["image"]]
        never = [{**shown[0], "id": f"n{number}", "question": "what " * 400} for number in range(9)]
        result = run(
            vision_language_model, write_lines(tmp_path / "d.jsonl", [*shown, *never]), tmp_path / "r", **asked()
        )
        assert record_of(result.folder)["plan"]["unit"] == "kv_bytes", result.notes
        assert result.summary["num_failed"] == len(never)

    def test_a_killed_run_continues_and_does_every_sample_once(
        self, vision_language_model: Path, pictures: Path, tmp_path: Path, batched: EvalResult
    ) -> None:
        class Killed(EvalListener):
            def scored(self, lines: Lines) -> None:
                raise KeyboardInterrupt

        options = asked(batch_size=3)
        request = EvalRequest(
            model=str(vision_language_model), data=str(pictures), device="cpu", use_cache=False, **options
        )
        with pytest.raises(KeyboardInterrupt):
            evaluate(request, output=tmp_path / "run", listener=Killed())
        written = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
        done = [line["id"] for line in written if "id" in line]
        assert 0 < len(done) < 10
        result = run(vision_language_model, pictures, tmp_path / "run", resume=True, **options)
        assert result.summary["num_resumed"] == len(done)
        assert [line["id"] for line in lines_of(result.folder)] == [f"p{number}" for number in range(10)]
        assert same_lines(result, batched)

    def test_a_wrong_estimate_of_lengths_changes_no_answer(
        self,
        vision_language_model: Path,
        pictures: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """An empty pool makes room for the next prompt, whatever was thought of its length."""
        monkeypatch.setattr(MultimodalInputs, "lengths", lambda inputs: [1] * len(inputs._samples))
        for size in ({}, {"batch_size": 1}):
            result = run(vision_language_model, pictures, tmp_path / str(len(size)), **asked(**size))
            assert same_lines(result, batched)
            assert record_of(result.folder)["plan"]["unit"] == "kv_bytes"

    def test_prompts_longer_than_a_window_that_was_thought_wider_go_to_batches(
        self, vision_language_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "brim.tasks.image_pools.mixing_obstacle",
            lambda model, longest, **_: "its window is narrower" if longest > 1 + TOKENS else None,
        )
        monkeypatch.setattr(MultimodalInputs, "lengths", lambda inputs: [1] * len(inputs._samples))
        result = run(vision_language_model, pictures, tmp_path / "run", **asked())
        assert any("batches take over" in note for note in result.notes)
        assert [line["error"] for line in lines_of(result.folder)] == [None] * 10

    def test_samples_are_taken_a_portion_at_a_time(
        self,
        vision_language_model: Path,
        pictures: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Not those of all rows at once: their pixels would fill the host's memory."""
        monkeypatch.setattr("brim.tasks.text_pools.chunk_tokens_of", lambda *_, **__: 60)
        sizes: list[int] = []
        admit = GenerationPool.admit

        def counted(pool: GenerationPool, prompts: Sequence[PoolPrompt]) -> int:
            sizes.append(len(prompts))
            return admit(pool, prompts)

        monkeypatch.setattr(GenerationPool, "admit", counted)
        assert same_lines(run(vision_language_model, pictures, tmp_path / "run", **asked()), batched)
        assert max(sizes) < 5

    def test_prompts_are_padded_on_the_left_where_the_right_does_not_do(
        self,
        vision_language_model: Path,
        pictures: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        sides: list[str] = []
        usual = image_pools.pool_obstacle

        def only_left(*arguments: Any, padded: PaddedTrial, **named: Any) -> str | None:
            sides.append("left" if "attention_mask" in padded.pad(padded.prompts()[0]).inputs else "right")
            return "it is odd" if sides[-1] == "right" else usual(*arguments, padded=padded, **named)

        monkeypatch.setattr(image_pools, "pool_obstacle", only_left)
        result = run(vision_language_model, pictures, tmp_path / "run", **asked())
        assert sides == ["right", "left"]
        assert record_of(result.folder)["plan"]["unit"] == "kv_bytes"
        assert same_lines(result, batched)

    def test_a_model_that_no_pool_fits_is_noted(
        self, vision_language_model: Path, pictures: Path, tmp_path: Path, batched: EvalResult, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr("brim.tasks.image_pools.pool_obstacle", lambda *_, **__: "it is odd")
        result = run(vision_language_model, pictures, tmp_path / "run", **asked())
        assert any("whole batches" in note and "it is odd" in note for note in result.notes)
        assert same_lines(result, batched)

    @SINCE_VERSION_5
    def test_layers_that_attend_to_images_apart_from_the_text_need_batches(
        self, pictures: Path, tmp_path: Path
    ) -> None:
        folder = FAMILIES["mllama"](tmp_path / "mllama")
        model = varied(transformers.AutoModelForImageTextToText.from_pretrained(folder), spread=0.3)
        for name, weight in model.named_parameters():
            if "gate" in name and weight.dim() == 1:
                torch.nn.init.constant_(weight, 1.0)  # without it images have no effect
        model.save_pretrained(folder)
        records = [json.loads(line) for line in pictures.read_text().splitlines()]
        kept = [{**one, "image": str(pictures.parent / one["image"])} for one in records if one["image"]]
        result = run(folder, write_lines(tmp_path / "d.jsonl", kept), tmp_path / "run", limit=3, **asked())
        assert any("not in a pool" in note for note in result.notes)


@pytest.mark.usefixtures("pooled")
class TestMemoryOfImages:
    """Under a limit of the CPU's memory, which is held by real errors."""

    def test_pools_and_chunks_become_smaller_until_they_fit(
        self,
        vision_language_model: Path,
        pictures: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("brim.tasks.text_pools.chunk_tokens_of", chunks_of(400))
        least = run(vision_language_model, pictures, tmp_path / "a", **asked(batch_size=1, memory_limit="1GiB"))
        most = run(vision_language_model, pictures, tmp_path / "b", **asked(memory_limit="1GiB"))
        peaks = [one.summary["peak_reserved_bytes"] for one in (least, most)]
        failures = 0
        for eighths in (1, 2, 4):
            limit = peaks[0] + (peaks[1] - peaks[0]) * eighths // 8
            result = run(vision_language_model, pictures, tmp_path / f"{eighths}", **asked(memory_limit=f"{limit}B"))
            assert 0 < result.summary["peak_reserved_bytes"] <= limit
            assert record_of(result.folder)["plan"]["unit"] == "kv_bytes", "batches had not to take over"
            assert same_lines(result, batched)
            failures += result.summary["oom_events"]
            assert any("ran out of memory" in note for note in result.notes) == (result.summary["oom_events"] > 0)
        assert failures > 0

    def test_what_was_read_before_a_failure_is_prepared_again(
        self,
        vision_language_model: Path,
        pictures: Path,
        tmp_path: Path,
        batched: EvalResult,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        advance, failed = GenerationPool.advance, []

        def fails_once(pool: GenerationPool) -> Any:
            if not failed and pool.active == 10:
                failed.append(pool)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return advance(pool)

        monkeypatch.setattr(GenerationPool, "advance", fails_once)
        result = run(vision_language_model, pictures, tmp_path / "run", **asked(num_workers=1))
        assert result.summary["oom_events"] == len(failed) == 1
        assert same_lines(result, batched)


def chunks_of(tokens: int) -> Any:
    def chunk_tokens_of(model: Any, settings: Any, *, halvings: int = 0) -> int:
        del model, settings
        return max(tokens >> halvings, 1)

    return chunk_tokens_of


def test_without_flash_attention_batches_run(
    vision_language_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pool was used on the CPU")

    monkeypatch.setattr(PooledExecutor, "run", never)
    assert run(vision_language_model, pictures, tmp_path / "run", **asked()).notes == ()


@pytest.mark.usefixtures("pooled")
def test_answers_about_images_depend_on_the_batch_and_the_opposite_is_refused(
    vision_language_model: Path, pictures: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="batch_invariant"):
        run(vision_language_model, pictures, tmp_path / "run", batch_invariant=True, **asked())
