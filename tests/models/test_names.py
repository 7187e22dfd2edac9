from __future__ import annotations

import re
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.models.build import model_knobs, resolve_model
from brim.models.names import ALIASES, ModelName, choose_name, split_prefix

TORCHVISION = ("r3d_18", "swin3d_t", "swin3d_s", "vit_b_16", "vit_l_16", "resnet50", "resnet18")
TIMM = ("resnet50", "resnet10t", "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "levit_128s")


def choose(text: str) -> str:
    return str(choose_name(text, torchvision=lambda: TORCHVISION, timm=lambda: TIMM))


@pytest.mark.parametrize(
    ("text", "source", "name"),
    [
        ("torchvision:resnet50", "torchvision", "resnet50"),
        ("timm:resnet50", "timm", "resnet50"),
        ("hf:org/model", "hf", "org/model"),
        ("py:nets.py:net", "py", "nets.py:net"),
        ("py:package.nets:net", "py", "package.nets:net"),
    ],
)
def test_a_prefix_decides(text: str, source: str, name: str) -> None:
    found = split_prefix(text)
    assert found is not None
    assert (found.source, found.name, str(found)) == (source, name, text)


def test_an_existing_folder_is_hf(tmp_path: Path) -> None:
    assert split_prefix(str(tmp_path)) == ModelName("hf", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("resnet50", "torchvision:resnet50"),  # both have it
        ("resnet10t", "timm:resnet10t"),
        ("ResNet-50", "torchvision:resnet50"),
        ("vit_base", "torchvision:vit_b_16"),
        ("ViT-Large", "torchvision:vit_l_16"),
        ("r3d", "torchvision:r3d_18"),
        ("levit", "timm:levit_128s"),
    ],
)
def test_names_are_looked_up_in_torchvision_then_timm(text: str, found: str) -> None:
    assert choose(text) == found


def test_timm_is_not_imported_when_torchvision_has_the_name() -> None:
    def fail() -> tuple[str, ...]:
        raise AssertionError

    assert choose_name("resnet18", torchvision=lambda: TORCHVISION, timm=fail).source == "torchvision"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vit", "'vit' could be vit_b_16, vit_l_16; give one"),
        ("swin3d", "could be swin3d_t, swin3d_s"),
        ("resnet5", "did you mean .*resnet50"),  # half a number is a typo, not a beginning
        ("rsnet18", "did you mean .*resnet18"),
        ("levitt", "did you mean .*levit"),  # a near miss of a beginning
        ("vit_bse", "did you mean vit_base"),  # and of an alias
        ("quite_different", "no torchvision or timm model of that name$"),
    ],
)
def test_two_candidates_or_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        choose(text)


@pytest.mark.parametrize(
    ("torchvision", "timm", "message"),
    [
        ((), (), r"of that name \(not installed here: torchvision, timm; pip install 'brim\[vision\]'\)$"),
        (("resnet101",), (), r"\(not installed here: timm; pip .*\); did you mean .*resnet101"),
    ],
)
def test_a_name_is_not_just_unknown_where_its_library_is_missing(
    torchvision: tuple[str, ...], timm: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        choose_name("resnet18", torchvision=lambda: torchvision, timm=lambda: timm)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "MODEL is empty"),
        ("hf:", "nothing after the prefix hf:"),
        ("tv:resnet50", "unknown prefix tv:; the prefixes are torchvision:, timm:, hf:, py:"),
        ("torchvison:resnet50", "did you mean torchvision:"),
        ("nets.py:net", "write py:nets.py:net"),
        ("org/model", "write hf:org/model"),
    ],
)
def test_an_invalid_name_is_refused_with_how_to_write_it(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        split_prefix(text)


@pytest.mark.parametrize(("text", "near"), [("llamma", "llama"), ("./llamma", "./llama"), ("hf:llamma", "llama")])
def test_a_folder_of_a_model_nearby_is_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, near: str
) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    (tmp_path / "llamas").mkdir()  # holds no model
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RequestError, match=rf"did you mean {re.escape(near)}[,?]"):
        model_knobs(text)


@pytest.mark.parametrize(("alias", "target"), ALIASES.items())
def test_every_alias_names_a_model_that_exists(alias: str, target: str) -> None:
    assert str(resolve_model(alias)) == target
    assert resolve_model(target.partition(":")[2]).name == target.partition(":")[2]


@pytest.mark.parametrize("text", ["llamma", "LLaMA", "qwen-2"])
def test_a_transformers_family_name_is_refused_with_the_right_form(text: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(
        RequestError, match=r"For a (llama|qwen2) model of transformers give its folder, or hf:ORG/NAME"
    ):
        resolve_model(text)
