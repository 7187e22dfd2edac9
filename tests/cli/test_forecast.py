"""`brim forecast`: its JSON, its tables, its page, and how each wrong request ends. No GPU is needed or touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.forecasting.table import MODELS, BatchTable, BatchTableEntry

NET = ("py:brim.models.small:convnet", "--knob", "size=16")
Brim = Callable[..., Any]


def document(result: Any) -> dict[str, Any]:
    assert result.code == 0, result.err
    data: dict[str, Any] = json.loads(result.out)
    return data


def test_json_of_one_size_has_the_promised_fields(brim: Brim) -> None:
    one = document(brim("forecast", *NET, "--mode", "train", "--gpu", "a100-80gb", "--batch-size", "32", "--json"))
    assert one["schema"] == "brim.forecast/1"
    assert (one["batch_size"], one["mode"], one["approximate"]) == (32, "train", None)
    assert 0 < one["peak_allocated_bytes"] <= one["peak_reserved_bytes"] < one["device_bytes"]
    assert sum(one["breakdown"].values()) == one["device_bytes"]
    assert {"weights", "gradients", "optimizer_state", "activations", "temporary", "workspaces", "context"} <= set(
        one["breakdown"]
    )
    assert one["batch_size_max"] > 32
    assert one["trace_seconds"] > 0
    assert one["gpu"]["memory_source"]
    assert "sizes" not in one


def test_json_without_a_size_lists_sizes_that_never_fall(brim: Brim) -> None:
    many = document(brim("forecast", *NET, "--mode", "train", "--gpu", "t4", "--json"))
    sizes = many["sizes"]
    assert many["schema"] == "brim.forecast/1"
    assert [size["batch_size"] for size in sizes] == sorted(size["batch_size"] for size in sizes)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"):
        assert [size[name] for size in sizes] == sorted(size[name] for size in sizes)
    assert all(sum(size["breakdown"].values()) == size["device_bytes"] for size in sizes)
    assert any(size["batch_size"] == many["batch_size_max"] and size["fits"] for size in sizes)
    assert "batch_size" not in many


def test_training_and_optimizer_state_add_to_the_peak(brim: Brim) -> None:
    def bytes_of(*flags: str) -> int:
        return document(brim("forecast", *NET, "-b", "64", "--gpu", "t4", "--json", *flags))["peak_allocated_bytes"]

    forward, sgd = bytes_of("--mode", "forward"), bytes_of("--mode", "train", "--optimizer", "sgd")
    adamw = bytes_of("--mode", "train", "--optimizer", "adamw")
    assert forward < sgd < adamw


def test_powers_of_two_multiples_and_bounds_are_kept(brim: Brim) -> None:
    def largest(*flags: str) -> int:
        return document(brim("forecast", *NET, "--gpu", "t4", "--json", *flags))["batch_size_max"]

    assert largest("--max-batch-size", "100") == 100
    assert largest("--max-batch-size", "100", "--power-of-two") == 64
    assert largest("--max-batch-size", "100", "--multiple-of", "24") == 96


def test_a_margin_makes_the_largest_size_smaller(brim: Brim) -> None:
    def largest(margin: str) -> int:
        found = document(brim("forecast", *NET, "--memory", "4GiB", "--margin", margin, "--json"))
        return int(found["batch_size_max"])

    assert largest("0.5") < largest("0.05") < largest("0")


def test_several_cards_stand_side_by_side(brim: Brim) -> None:
    train = ("--mode", "train", "--knob", "size=64")
    net = (NET[0], *train)
    both = document(brim("forecast", *net, "--gpu", "t4", "--gpu", "rtx 4090", "--memory", "6GiB", "--json"))
    assert both["schema"] == "brim.forecast/1"
    assert [one["gpu"]["key"] for one in both["forecasts"]] == ["t4-16gb", "rtx-4090-24gb", "6.0 GiB card"]
    sizes = [one["batch_size_max"] for one in both["forecasts"]]
    assert sizes[2] < sizes[0] < sizes[1]
    text = brim("forecast", *net, "--gpu", "t4", "--gpu", "rtx 4090")
    assert text.code == 0
    assert "t4-16gb" in text.out
    assert all(len(line) <= 80 for line in text.out.splitlines())


def test_the_table_of_one_card_fits_eighty_columns(brim: Brim) -> None:
    result = brim("forecast", *NET, "--mode", "train", "--gpu", "rtx-3060-12gb")
    assert result.code == 0, result.err
    words = " ".join(result.out.split())
    said = ("on NVIDIA GeForce RTX 3060", "allocated reserved nvidia-smi fits", "largest batch size that fits:",
            "optimizer state", "cached by the allocator", "CUDA context", "without a GPU")  # fmt: skip
    assert [expected for expected in said if expected not in words] == []
    assert all(len(line) <= 80 for line in result.out.splitlines())
    assert "\x1b" not in result.out


def test_a_size_stopped_by_a_bound_is_reported_as_such(brim: Brim) -> None:
    result = brim("forecast", *NET, "--gpu", "h200", "--max-batch-size", "50")
    assert "--max-batch-size" in result.out


def test_without_a_card_one_is_chosen_and_noted(brim: Brim) -> None:
    result = brim("forecast", *NET, "--json")
    assert document(result)["gpu"]["key"]
    assert "no --gpu given" in result.err


def test_a_plot_is_one_file_that_needs_no_network(brim: Brim, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    page = tmp_path / "out.html"
    result = brim("forecast", *NET, "--gpu", "t4", "--plot", str(page))
    assert result.code == 0, result.err
    html = page.read_text(encoding="utf-8")
    assert "<script" in html
    assert "NVIDIA T4" in html
    assert 'src="http' not in html
    assert 'href="http' not in html.split("<body")[0]


def test_a_factory_of_the_users_own_is_forecast(brim: Brim, factories: str) -> None:
    one = document(brim("forecast", f"py:{factories}:rows", "--gpu", "t4", "-b", "1024", "--json"))
    # 1,024 rows of 256 floats and their double
    assert one["peak_allocated_bytes"] >= 2 * 1024 * 256 * 4


def test_segmentation_is_forecast_and_detection_extended_from_real_steps(brim: Brim) -> None:
    cards = ("--gpu", "t4", "-b", "4", "--knob", "size=64", "--json")
    segmented = document(brim("forecast", "lraspp_mobilenet_v3_large", "--mode", "train", *cards))
    assert segmented["approximate"] is None
    assert segmented["batch_size_max"] > 4
    detected = document(brim("forecast", "fasterrcnn_mobilenet_v3_large_320_fpn", *cards))
    assert detected["approximate"] == (
        "extended from real steps at batch sizes 1 and 2 on the CPU: how many boxes non-maximum suppression keeps is "
        "known only to a real run"
    )
    assert detected["batch_size_max"] > 4


def test_the_weights_of_a_folder_are_never_read(brim: Brim, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
             "max_position_embeddings": 128, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    tokens = ("--knob", "tokens=32", "--max-tokens", "8")
    one = document(brim("forecast", str(tmp_path), "--gpu", "t4", "-b", "4", *tokens, "--json"))
    assert one["mode"] == "generate"
    assert one["notes"] == []
    assert one["model"] == str(tmp_path)


def test_nothing_fits_ends_with_three_and_remedies(brim: Brim) -> None:
    result = brim("forecast", *NET, "--mode", "train", "--memory", "650MiB")
    assert result.code == 3
    assert "does not fit" in result.err
    for flag in ("--gradient-checkpointing", "--knob (size", "--dtype", "--gpu"):
        assert flag in result.err
    assert "--memory-limit" not in result.err  # brim forecast has no such flag
    assert result.out == ""


def test_a_card_that_is_too_small_beside_one_that_is_not_is_shown(brim: Brim) -> None:
    both = document(brim("forecast", *NET, "--gpu", "t4", "--memory", "650MiB", "--json"))
    assert [one["batch_size_max"] > 0 for one in both["forecasts"]] == [True, False]
    assert "none fits" in brim("forecast", *NET, "--gpu", "t4", "--memory", "650MiB").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "MODEL is missing"),
        (("resnet18", "--gpu", "a10000"), "did you mean"),
        (("resnet18", "--gpu", "t4", "--knob", "sise=3"), "no such knob"),
        (("resnet188", "--gpu", "t4"), "resnet18"),
        (("resnet18", "--memory", "2MiB"), "CUDA context alone"),
        (("resnet18", "--gpu", "t4", "--batch-size", "0"), "--batch-size 0"),
        (("resnet18", "--gpu", "t4", "--margin", "1.5"), "--margin 1.5"),
        (("resnet18", "--gpu", "t4", "--mode", "generate"), "--mode generate"),
        (("resnet18", "--table"), "leave resnet18 out"),
        (("resnet18", "--gpu", "t4", "--limit", "3"), "goes with --data DATA"),
        (("resnet18", "--gpu", "t4", "-d", "/nowhere/at/all"), "there is no such file"),
        (("resnet18", "--gpu", "t4", "--plot", "/nowhere/at/all.html"), "no folder"),
    ],
)
def test_a_wrong_request_ends_with_two_and_says_what_to_do(brim: Brim, arguments: tuple[str, ...], words: str) -> None:
    result = brim("forecast", *arguments)
    assert result.code == 2
    assert words in " ".join(result.err.split())
    assert "Traceback" not in result.err


def test_a_step_that_raises_is_a_wrong_request_with_its_message(brim: Brim, factories: str) -> None:
    result = brim("forecast", f"py:{factories}:faulty_step", "--gpu", "t4")
    assert result.code == 2
    assert "labels" in result.err


def test_an_interrupt_ends_with_130(brim: Brim, factories: str) -> None:
    assert brim("forecast", f"py:{factories}:interrupted", "--gpu", "t4").code == 130


def test_the_catalogue_can_be_listed(brim: Brim) -> None:
    text = brim("forecast", "--gpus")
    assert text.code == 0
    assert "h200-141gb" in text.out
    assert all(len(line) <= 80 for line in text.out.splitlines() if "sources" not in line)
    listed = document(brim("forecast", "--gpus", "--json"))
    assert len(listed["gpus"]) >= 20
    assert all(card["memory_source"] and card["context_source"] for card in listed["gpus"])


def test_the_batch_table_shows_computed_sizes_beside_the_hand_made_ones(
    brim: Brim, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = tuple(
        BatchTableEntry(card_gb=card, model=model.label, mode=mode, batch_size=size, by_hand_for_the_card="1-2",
              by_hand_for_the_model=model.by_hand)
        for mode in ("generate", "train")
        for size, model in enumerate(MODELS)
        for card in (4, 80)
    )  # fmt: skip
    made = BatchTable(entries=entries, models=MODELS, seconds=1.0)
    monkeypatch.setattr("brim.planning.forecast.batch_size_table", lambda *_, **__: made)
    text = brim("forecast", "--table")
    assert text.code == 0
    for words in ("generation", "training", "80 GB", "by hand", "8-16", "Qwen2.5-14B"):
        assert words in text.out
    data = document(brim("forecast", "--table", "--json"))
    assert data["schema"] == "brim.batch_table/1"
    assert len(data["entries"]) == len(entries)
    assert data["by_hand_for_cards"]["4"] == "1-2"
