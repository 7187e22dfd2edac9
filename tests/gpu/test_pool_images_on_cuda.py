"""Vision-language models in the pool where flash attention and captured steps are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import saved_models
from tests.evaluation.evaluation_runs import lines_of, predictions, record_of, run, write_lines

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
PIL = pytest.importorskip("PIL.Image")

COUNT = 60


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of several sizes, every tenth question without one."""
    import numpy

    folder = tmp_path_factory.mktemp("pictures")
    colours = numpy.random.default_rng(1)
    records: list[dict[str, Any]] = []
    for number in range(COUNT):
        pixels = colours.integers(0, 255, (40 + 3 * number, 60 + 9 * (number % 4), 3), dtype=numpy.uint8)
        PIL.fromarray(pixels).save(folder / f"{number}.png")
        question = " ".join(("what", "is", "this", "?")[(number + place) % 4] for place in range(1 + number % 20))
        picture = None if number % 10 == 9 else f"{number}.png"
        records.append({"id": f"p{number}", "image": picture, "question": question, "answer": "1"})
    return write_lines(folder / "data.jsonl", records)


def model_folder(family: str, folder: Path) -> Path:
    from tests.models.vision_language_folders import FAMILIES

    if family == "llava":
        return saved_models.save_vision_language_model(folder)
    FAMILIES[family](folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    saved_models.varied(model, spread=0.3).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llava", "molmo2", "qwen2_vl", "gemma3"])
def test_answers_about_images_come_from_the_pool(
    family: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "molmo2" and not hasattr(transformers, "Molmo2Config"):
        pytest.skip("transformers has no Molmo2 before 5.22")
    folder = model_folder(family, tmp_path / family)
    options: dict[str, Any] = {"task": "generate", "max_new_tokens": 24, "device": "cuda", "dtype": "bfloat16"}
    pooled = run(folder, pictures, tmp_path / "pool", **options)
    assert record_of(pooled.folder)["plan"]["unit"] == "kv_bytes", pooled.notes
    assert not any("pool" in note or "graph" in note for note in pooled.notes)
    assert [line["id"] for line in lines_of(pooled.folder)] == [f"p{number}" for number in range(COUNT)]
    assert pooled.summary["num_failed"] == pooled.summary["oom_events"] == 0
    monkeypatch.setattr("brim.tasks.text_pools.pool_pays_on", lambda device, dtype: False)
    batched = run(folder, pictures, tmp_path / "batches", **options)
    firsts = [[(text.split() or [""])[0] for text in predictions(one)] for one in (pooled, batched)]
    same = [one == other for one, other in zip(*firsts, strict=True)]
    assert sum(same) >= 0.8 * COUNT, "in half precision near-ties may turn, but not most first words"
    assert torch.cuda.memory_allocated() < 2**30
