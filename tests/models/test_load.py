"""Models ready to evaluate: their kind, what reads for them, their weights and knobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file

from brim.errors import RequestError
from brim.models.base import LoadedModel, LoadRequest
from brim.models.load import load_model
from tests import saved_models

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def load(model: Path | str, **options: Any) -> LoadedModel:
    return load_model(LoadRequest(model=str(model), **{"device": torch.device("cpu"), **options}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "language": saved_models.save_language_model(root / "language"),
        "seq2seq": saved_models.save_seq2seq(root / "seq2seq"),
        "vision_language": saved_models.save_vision_language_model(root / "vision_language"),
        "text_classifier": saved_models.save_text_classifier(root / "text_classifier"),
        "image_classifier": saved_models.save_image_classifier(root / "image_classifier"),
    }


@pytest.mark.parametrize(
    ("kind", "reads", "positions", "classes"),
    [
        ("language", {"tokenizer"}, 320, ()),
        ("seq2seq", {"tokenizer"}, 64, ()),
        ("vision_language", {"tokenizer", "processor"}, 320, ()),
        ("text_classifier", {"tokenizer"}, 64, ("calm", "angry", "sad")),
        ("image_classifier", {"processor", "transform"}, None, ("cat", "dog")),
    ],
)
def test_a_folder_is_loaded_with_its_tokenizer_or_processor(
    folders: dict[str, Path], kind: str, reads: set[str], positions: int | None, classes: tuple[str, ...]
) -> None:
    model = load(folders[kind])
    assert model.kind == kind
    assert {name for name in ("tokenizer", "processor", "transform") if getattr(model, name) is not None} == reads
    assert model.positions == positions
    assert model.class_names == classes
    assert not model.module.training
    assert model.dtype == torch.float32
    assert model.notes == ()


def test_the_requested_dtype_is_that_of_the_weights(folders: dict[str, Path]) -> None:
    model = load(folders["language"], dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert {weight.dtype for weight in model.module.parameters()} == {torch.bfloat16}


def test_a_folder_with_only_a_config_has_reproducible_random_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["language"] / name).read_bytes())
    first = load(tmp_path)
    torch.manual_seed(9)
    second = load(tmp_path)
    assert "random weights" in first.notes[0]
    assert torch.equal(first.module.lm_head.weight, second.module.lm_head.weight)


def test_loading_does_not_use_the_callers_random_numbers(folders: dict[str, Path]) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    load(folders["language"])
    assert torch.equal(torch.rand(1), expected)


def test_other_weights_are_another_identity(folders: dict[str, Path], tmp_path: Path) -> None:
    one = load(folders["language"])
    other = load(saved_models.save_language_model(tmp_path / "other", seed=8))
    assert one.identity == load(folders["language"]).identity
    assert one.identity != other.identity


def test_a_tokenizer_without_padding_pads_with_its_end(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = saved_models.save_language_model(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load(folder).tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("ends", [True, False])
def test_padding_that_has_no_embedding_gives_way_to_a_token_that_has(tmp_path: Path, ends: bool) -> None:
    """Added to the tokenizer alone, as some fine-tuned models have it: on a GPU, looking it up ends the process."""
    folder = saved_models.save_language_model(tmp_path / "model")
    tokenizer = load(folder).tokenizer
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    if not ends:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "pad_token_id": tokenizer.pad_token_id}))
    model = load(folder)
    assert model.tokenizer.pad_token_id == (model.tokenizer.eos_token_id if ends else 0)
    assert model.module.generation_config.pad_token_id == model.tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("kind", "knobs", "words"),
    [
        ("language", {"tokens": 5}, r"--knob tokens: .* has no such knob \(it has max_new_tokens, layers\)"),
        ("image_classifier", {"size": 8}, r"--knob size: .* has no such knob \(it has none\)"),
        ("language", {"weights": "weights.pt"}, "--weights weights.pt: .* brings its own"),
    ],
)
def test_unsuitable_settings_for_a_folder_are_refused(
    folders: dict[str, Path], kind: str, knobs: dict[str, Any], words: str
) -> None:
    options = {"weights": knobs["weights"]} if "weights" in knobs else {"knobs": knobs}
    with pytest.raises(RequestError, match=words):
        load(folders[kind], **options)


def test_a_model_that_no_task_evaluates_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="of the kind 'masked', which no task evaluates"):
        load(tmp_path)


# ------------------------------------------------------------------------------- torchvision and timm


def picture() -> Image.Image:
    return Image.new("RGB", (80, 60), (90, 120, 30))


@pytest.mark.parametrize("name", ["torchvision:squeezenet1_1", "timm:resnet10t"])
def test_the_requested_size_is_the_input_size(name: str) -> None:
    model = load(name, weights="none", knobs={"size": "64"})
    assert model.kind == "image_classifier"
    assert model.transform is not None
    pixels = model.transform(picture())
    assert pixels.shape == (3, 64, 64)
    assert model.module(pixels.unsqueeze(0)).shape == (1, 1000)
    assert "random weights" in model.notes[0]
    assert model.identity != load(name, weights="none").identity


def test_a_model_made_for_one_size_is_built_for_another() -> None:
    model = load("timm:vit_tiny_patch16_224", weights="none", knobs={"size": "32"})
    assert model.transform is not None
    assert model.module(model.transform(picture()).unsqueeze(0)).shape == (1, 1000)


def test_a_video_model_has_its_number_of_frames() -> None:
    model = load("torchvision:mc3_18", weights="none", knobs={"frames": "4", "size": "32"})
    assert (model.kind, model.frames) == ("video_classifier", 4)
    assert model.transform is not None
    clip = torch.randint(0, 255, (4, 3, 48, 64), dtype=torch.uint8)  # [frames, channels, height, width]
    assert model.transform(clip).shape == (3, 4, 32, 32)
    assert load("torchvision:mc3_18", weights="none").frames == 16


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_weights_come_from_a_file(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(5)
    source = torchvision.models.squeezenet1_1()
    file = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(source.state_dict(), file)
    else:
        torch.save({"state_dict": source.state_dict()} if suffix == ".pth" else source.state_dict(), file)
    model = load("torchvision:squeezenet1_1", weights=str(file))
    assert all(torch.equal(a, b) for a, b in zip(model.module.parameters(), source.parameters(), strict=True))
    assert model.notes == ()
    assert len(model.identity["weights"]) == 64


@pytest.mark.parametrize("name", ["torchvision:squeezenet1_1", "timm:mobilenetv3_small_050"])
def test_the_number_of_classes_comes_from_the_file(name: str, tmp_path: Path) -> None:
    plain = load(name, weights="none")
    head = max((n for n, p in plain.module.named_parameters() if p.dim() > 1 and p.shape[0] == 1000), key=str)
    state = plain.module.state_dict()
    for part in (head, head.replace("weight", "bias")):
        state[part] = torch.full((7, *state[part].shape[1:]), 0.5)
    file = tmp_path / "tuned.pt"
    torch.save(state, file)
    tuned = load(name, weights=str(file))
    assert tuned.module.state_dict()[head].shape[0] == 7
    assert bool((tuned.module.state_dict()[head] == 0.5).all())


def test_weights_of_another_model_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"fc.weight": torch.zeros(2)}, file)
    with pytest.raises(RequestError, match=r"does not fit this model \(52 missing: .* 1 unexpected: fc.weight"):
        load("torchvision:squeezenet1_1", weights=str(file))
    file.write_bytes(b"no weights")
    with pytest.raises(RequestError, match=r"--weights .*weights.pt: it cannot be read as weights"):
        load("torchvision:squeezenet1_1", weights=str(file))
    with pytest.raises(RequestError, match=r"--weights .*absent.pt: there is no such file"):
        load("torchvision:squeezenet1_1", weights=str(tmp_path / "absent.pt"))


class Code:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_a_file_of_weights_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"fc.weight": Code()}, tmp_path / "weights.pt")
    with pytest.raises(RequestError, match="it cannot be read as weights"):
        load("torchvision:squeezenet1_1", weights=str(tmp_path / "weights.pt"))
    assert capsys.readouterr().out == ""


def test_unloadable_published_weights_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*arguments: Any, **options: Any) -> None:
        raise OSError("the network is unreachable")

    monkeypatch.setattr(torchvision.models, "get_model", offline)
    monkeypatch.setattr(timm, "create_model", offline)
    for name in ("torchvision:squeezenet1_1", "timm:resnet10t"):
        with pytest.raises(RequestError, match=r"cannot be loaded \(the network is unreachable\).*--weights FILE"):
            load(name)


def test_published_weights_use_their_own_size_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = torchvision.models.get_model
    monkeypatch.setattr(torchvision.models, "get_model", lambda name, weights, **more: make(name, weights=None, **more))
    usual = load("torchvision:efficientnet_b1")
    assert usual.transform is not None
    assert usual.transform(picture()).shape == (3, 240, 240)
    assert len(usual.class_names) == 1000
    small = load("torchvision:efficientnet_b1", knobs={"size": 32})
    assert small.transform is not None
    assert small.transform(picture()).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("torchvision:squeezenet1_1", {"frames": 4}, r"--knob frames: torchvision:squeezenet1_1 has no such knob"),
        ("torchvision:squeezenet1_1", {"size": "wide"}, "--knob size=wide: it must be a whole number"),
        ("timm:resnet10t", {"sizes": 4}, "--knob sizes: .*did you mean size"),
    ],
)
def test_a_wrong_knob_is_refused(name: str, knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        load(name, weights="none", knobs=knobs)


# ------------------------------------------------------------------------------- functions


def test_a_factory_makes_the_function_that_answers(tmp_path: Path) -> None:
    file = tmp_path / "nets.py"
    body = "return lambda batch: [one * times + device.type for one in batch]"
    file.write_text(f"def make(times=2, *, device):\n    {body}\n")
    model = load(f"py:{file}:make", knobs={"times": "3"})
    assert model.kind == "function"
    assert model.module(["a"]) == ["aaacpu"]
    assert model.identity != load(f"py:{file}:make").identity
    before = load(f"py:{file}:make").identity
    file.write_text(file.read_text() + "\n# edited\n")
    assert load(f"py:{file}:make").identity != before


@pytest.mark.parametrize(
    ("body", "words"),
    [("return 5", "returned int; for an evaluation it must return a function"), ("1 / 0", "raised ZeroDivisionError")],
)
def test_a_factory_that_returns_no_function_is_refused(tmp_path: Path, body: str, words: str) -> None:
    file = tmp_path / "nets.py"
    file.write_text(f"def make():\n    {body}\n")
    with pytest.raises(RequestError, match=words):
        load(f"py:{file}:make")
