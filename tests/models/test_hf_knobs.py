"""Every entry of the table against the real classes of transformers, tiny and random: a value must reach the pixels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from brim.errors import RequestError
from brim.models.base import LoadedModel, LoadRequest
from brim.models.build import build_workload, model_knobs
from brim.models.hf_knobs import TABLE
from brim.models.load import load_model
from brim.settings.find_settings import WorkloadRequest
from brim.tasks.multimodal import count_image_tokens
from tests.models.vision_language_folders import FAMILIES, SIDE

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

Folders = Callable[[str], Path]
SQUARE, LONG = (160, 150), (800, 260)  # Gemma3 cuts pictures only where they are long
WORDS: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A family's folder, saved when it is first asked for."""
    root = tmp_path_factory.mktemp("families")

    def saved(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else FAMILIES[family](folder)

    return saved


@pytest.fixture(autouse=True)
def _number_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor asks for a package that it needs for videos only."""
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str, raising=True)


def load(folder: Path, **knobs: Any) -> LoadedModel:
    return load_model(LoadRequest(model=str(folder), device=torch.device("cpu"), knobs=knobs))


def processed(model: LoadedModel, size: tuple[int, int]) -> dict[str, Any]:
    """One picture and a question, as the model's processor makes them under its knobs."""
    got_ocr2 = isinstance(model.processor, transformers.GotOcr2Processor)
    picture = Image.new("RGB", size, (10, 200, 30))
    images = [picture] if got_ocr2 else [[picture]]
    text = [f"{model.processor.image_token} what is this"]
    return dict(model.processor(text=text, images=images, return_tensors="pt", **model.processor_options))


def crops(inputs: dict[str, Any]) -> int:
    return int(inputs["pixel_values"].shape[0])


def nested_crops(inputs: dict[str, Any]) -> int:
    return int(inputs["pixel_values"].shape[1])


def tiles(inputs: dict[str, Any]) -> int:
    assert inputs["cross_attention_mask"].shape[-1] == inputs["pixel_values"].shape[2]
    return int(inputs["pixel_values"].shape[2])


def pixels(inputs: dict[str, Any]) -> int:
    return int(inputs["image_grid_thw"].prod()) * 8 * 8


# family, knob, default, what is counted, what each value gives
CASES: list[tuple[str, str, int, Callable[[dict[str, Any]], int], dict[int, int]]] = [
    ("molmo2", "max_crops", 4, crops, {1: 2, 2: 3, 4: 5, 9: 10}),
    ("internvl", "max_patches", 6, crops, {1: 1, 3: 1, 6: 5}),
    ("got_ocr2", "max_patches", 1, crops, {1: 1, 4: 5, 9: 10}),
    ("llava_next", "max_tiles", 4, nested_crops, {2: 3, 4: 5}),
    ("idefics3", "longest_edge", 4 * SIDE, nested_crops, {SIDE: 1, 2 * SIDE: 5, 4 * SIDE: 17}),
    ("smolvlm", "longest_edge", 4 * SIDE, nested_crops, {SIDE: 1, 2 * SIDE: 5, 4 * SIDE: 17}),
    ("qwen2_vl", "max_pixels", 128 * 128, pixels, {64 * 64: 3072, 128 * 128: 14336}),
    ("qwen2_5_vl", "max_pixels", 128 * 128, pixels, {64 * 64: 3072, 128 * 128: 14336}),
    ("qwen3_vl", "max_pixels", 128 * 128, pixels, {64 * 64: 3072, 128 * 128: 14336}),
    ("gemma3", "pan_and_scan_max_num_crops", 0, crops, {0: 1, 2: 3, 3: 4}),
    ("mllama", "max_image_tiles", 4, tiles, {1: 1, 2: 2, 4: 4}),
]


@pytest.mark.parametrize(("family", "knob", "default", "count", "expected"), CASES, ids=[case[0] for case in CASES])
def test_a_value_reaches_the_pixels_and_the_model_takes_them(
    folders: Folders,
    family: str,
    knob: str,
    default: int,
    count: Callable[[dict[str, Any]], int],
    expected: dict[int, int],
) -> None:
    folder, size = folders(family), LONG if family == "gemma3" else SQUARE
    (listed,) = (one for one in model_knobs(str(folder)) if one.name == knob)
    assert listed.default == default
    seen, lengths = {}, []
    for value in expected:
        model = load(folder, **{knob: str(value)})
        inputs = processed(model, size)
        seen[value] = count(inputs)
        lengths.append(inputs["input_ids"].shape[1])
        assert dict(model.identity)["knobs"] == {knob: value}
        if family != "got_ocr2":
            with torch.inference_mode():
                assert model.module(**inputs).logits.shape[1] == inputs["input_ids"].shape[1]
    assert seen == expected
    assert lengths == sorted(lengths)
    untouched = load(folder)
    assert "knobs" not in untouched.identity
    assert count(processed(untouched, size)) == expected[default]


def test_every_knob_of_images_is_tested() -> None:
    assert {entry.name for entry in TABLE if entry.of} == {case[1] for case in CASES}
    assert all(hasattr(transformers, name) for entry in TABLE for name in entry.of)


@pytest.mark.parametrize("family", ["molmo2", "internvl", "llava_next", "idefics3", "qwen2_vl", "gemma3"])
def test_the_count_of_image_tokens_follows_the_knob(folders: Folders, family: str) -> None:
    """Costs are made of it: what it misses is the same few words for every value."""
    _, knob, _, _, expected = next(case for case in CASES if case[0] == family)
    size = LONG if family == "gemma3" else SQUARE
    for value in expected:
        model = load(folders(family), **{knob: value})
        counted = count_image_tokens(model.processor, [(size[1], size[0])], model.processor_options)
        assert counted is not None
        length = processed(model, size)["input_ids"].shape[1]
        words = 3 if family != "gemma3" or not value else 18 + 2 * (value + 1)  # it talks about its crops
        assert abs(length - words - counted) <= 3


def test_counting_does_not_change_the_defaults_of_the_class(folders: Folders) -> None:
    processor = load(folders("internvl")).processor
    before = copy.deepcopy(processor.valid_processor_kwargs._defaults)
    few, most = (count_image_tokens(processor, [(150, 160)], {"max_patches": number}) for number in (1, 6))
    assert few is not None
    assert most is not None
    assert few < most == count_image_tokens(processor, [(150, 160)], {})
    assert processor.valid_processor_kwargs._defaults == before


def test_grids_too_large_are_removed_from_processor_and_model(folders: Folders) -> None:
    model = load(folders("llava_next"), max_tiles=2)
    grids = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]
    assert model.processor.image_processor.image_grid_pinpoints == grids
    assert model.module.config.image_grid_pinpoints == grids


def test_the_embeddings_of_the_tiles_that_remain_are_kept(folders: Folders) -> None:
    whole, cut = (load(folders("mllama"), max_image_tiles=number).module for number in (4, 2))
    # of the shapes (1, 1), (1, 2), (1, 3), (1, 4), (2, 1), …, those with two tiles have the ids 1, 2 and 5
    before = whole.model.vision_model.pre_tile_positional_embedding.embedding.weight.view(9, 4, -1)
    after = cut.model.vision_model.pre_tile_positional_embedding.embedding.weight.view(4, 2, -1)
    assert torch.equal(after, before[[0, 1, 2, 5], :2])
    assert cut.config.vision_config.max_aspect_ratio_id == 3


@pytest.mark.parametrize(
    ("family", "knobs", "words"),
    [
        ("molmo2", {"max_crop": 3}, r"--knob max_crop: .*\(it has max_crops, max_new_tokens, layers\).*mean max_crops"),
        ("molmo2", {"max_pixels": 3}, r"--knob max_pixels: .* has no such knob \(it has max_crops, "),
        ("molmo2", {"max_crops": 0}, "--knob max_crops=0: the smallest is 1"),
        ("molmo2", {"max_crops": "few"}, "--knob max_crops=few: it must be a whole number"),
        ("molmo2", {"return_tensors": "np"}, "--knob return_tensors: .* has no such knob"),
        ("llava_next", {"max_tiles": 1}, "--knob max_tiles=1: the smallest is 2"),
        ("llava_next", {"max_tiles": 5}, "--knob max_tiles=5: the largest is 4"),
        ("qwen2_vl", {"max_pixels": 100}, "--knob max_pixels=100: the smallest is 256"),
        ("mllama", {"max_image_tiles": 5}, "--knob max_image_tiles=5: the largest is 4"),
        ("molmo2", {"layers": 3}, "--knob layers=3: the largest is 2"),
        ("molmo2", {"experts_per_token": 1}, "--knob experts_per_token: .* has no such knob"),
    ],
)
def test_what_a_model_does_not_accept_is_refused(
    folders: Folders, family: str, knobs: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        load(folders(family), **knobs)


def test_what_the_image_processor_takes_by_name_is_passed_on(folders: Folders) -> None:
    model = load(folders("molmo2"), do_normalize="false", max_crops="2")
    assert model.processor_options == {"do_normalize": False, "max_crops": 2}
    assert processed(model, SQUARE)["pixel_values"].min() >= 0


def test_no_workload_is_built_from_a_vision_language_model_without_data(folders: Folders) -> None:
    assert "max_crops" in [knob.name for knob in model_knobs(str(folders("molmo2")))]
    for mode in (None, "forward"):
        with pytest.raises(RequestError, match="give data with -d"):
            build_workload(WorkloadRequest(model=str(folders("molmo2")), mode=mode, device="cpu"))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ layers and experts

MODELS: dict[str, tuple[type, Any]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**WORDS, **SHAPE)),
    "gpt2": (transformers.GPT2LMHeadModel,
             transformers.GPT2Config(**WORDS, n_embd=16, n_layer=3, n_head=2, n_positions=64)),
    "gemma3_text": (transformers.Gemma3ForCausalLM,
                    transformers.Gemma3TextConfig(**WORDS, **SHAPE, sliding_window=4,
                        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(**WORDS, **SHAPE, num_local_experts=4)),
    "qwen2_moe": (transformers.Qwen2MoeForCausalLM,
                  transformers.Qwen2MoeConfig(**WORDS, **SHAPE, num_experts=4, num_experts_per_tok=3,
                      moe_intermediate_size=8, shared_expert_intermediate_size=8)),
    "deepseek_v3": (transformers.DeepseekV3ForCausalLM,
                    transformers.DeepseekV3Config(**WORDS, **{**SHAPE, "head_dim": 4}, n_routed_experts=4,
                        num_experts_per_tok=3, n_group=1, topk_group=1, moe_intermediate_size=8,
                        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
                        qk_nope_head_dim=4, v_head_dim=8)),
}  # fmt: skip


@pytest.fixture(scope="module")
def language_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A language model's folder, its weights so large that every layer and expert matters."""
    root = tmp_path_factory.mktemp("languages")

    def saved(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            transformers.utils.logging.disable_progress_bar()
            kind, config = MODELS[name]
            model = kind(copy.deepcopy(config))
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        weight.normal_(0, 0.3)
            model.save_pretrained(folder)
        return folder

    return saved


def turned(folder: Path, **knobs: int) -> Any:
    workload, _ = build_workload(
        WorkloadRequest(model=str(folder), mode="forward", device="cpu", knobs={"tokens": 8, **knobs})
    )
    assert dict(workload.identity() or {})["knobs"].items() >= knobs.items()
    return workload.modules()[0]


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(torch.arange(3, 15)[None]).logits  # type: ignore[no-any-return]


def written(model: Any) -> list[int]:
    ids = torch.arange(3, 15)[None]
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    return tokens[0].tolist()  # type: ignore[no-any-return]


def watch_experts(model: Any) -> list[int]:
    """A list to which every layer adds, when it runs, to how many experts it sends a token."""
    sent: list[int] = []
    for name, part in model.named_modules():
        if name.endswith(".experts"):
            part.register_forward_pre_hook(lambda _, inputs: sent.append(inputs[1].shape[-1]))  # [tokens, experts]
    return sent


def rebuilt(folder: Path, name: str, **changes: Any) -> Any:
    """The same weights in a model that was made with the changed configuration."""
    kind, config = MODELS[name]
    config = copy.deepcopy(config)
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    model = kind(config)
    model.load_state_dict(kind.from_pretrained(folder).state_dict(), strict=False)  # type: ignore[attr-defined]
    return model.eval()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mixtral"])
def test_only_the_requested_layers_run(language_folders: Callable[[str], Path], name: str) -> None:
    folder = language_folders(name)
    (knob,) = (one for one in model_knobs(str(folder)) if one.name == "layers")
    assert (knob.default, knob.minimum, knob.maximum) == (3, 1, 3)
    model = turned(folder, layers=2)
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if name == "gemma3_text":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    same = rebuilt(folder, name, **changes)
    assert torch.allclose(logits(model), logits(same), atol=1e-5)
    assert not torch.allclose(logits(model), logits(turned(folder, layers=3)), atol=1e-2)
    assert sum(weight.numel() for weight in model.parameters()) == sum(weight.numel() for weight in same.parameters())
    assert model.config.num_hidden_layers == 2
    assert written(model) == written(same)


@pytest.mark.parametrize("family", ["molmo2", "llava_next", "qwen3_vl", "gemma3", "mllama"])
def test_the_layers_knob_of_a_vision_language_model_is_the_text_decoders(folders: Folders, family: str) -> None:
    whole, cut = load(folders(family)), load(folders(family), layers="1")
    assert [len(one.module.get_decoder().layers) for one in (whole, cut)] == [2, 1]
    vision = [[name for name in one.module.state_dict() if "vision" in name] for one in (whole, cut)]
    assert vision[0] == vision[1]
    inputs = processed(cut, SQUARE)
    tokens = cut.module.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert tokens.shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.parametrize(("name", "default"), [("mixtral", 2), ("qwen2_moe", 3), ("deepseek_v3", 3)])
def test_each_token_is_sent_to_the_requested_number_of_experts(
    language_folders: Callable[[str], Path], name: str, default: int
) -> None:
    folder = language_folders(name)
    (knob,) = (one for one in model_knobs(str(folder)) if one.name == "experts_per_token")
    assert (knob.default, knob.minimum, knob.maximum) == (default, 1, 4)
    usual = logits(turned(folder))
    for number in (1, 4):
        model = turned(folder, experts_per_token=number)
        sent = watch_experts(model)
        changed = logits(model)
        assert set(sent) == {number}
        assert torch.allclose(changed, logits(rebuilt(folder, name, num_experts_per_tok=number)), atol=1e-5)
        assert not torch.allclose(changed, usual, atol=1e-3)


def test_a_dense_model_has_no_experts_and_an_encoder_no_layers(
    language_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    names = [knob.name for knob in model_knobs(str(language_folders("llama")))]
    assert names == ["tokens", "max_new_tokens", "layers"]
    transformers.BertConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    assert [knob.name for knob in model_knobs(str(tmp_path))] == ["tokens"]
