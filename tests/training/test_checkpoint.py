from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from brim.errors import RequestError
from brim.training.checkpoint import (
    find_checkpoint,
    generator_states,
    load_checkpoint,
    restore_generators,
    save_checkpoint,
    save_weights,
)
from brim.training.run_files import WholeState


def trained(width: int = 5, optimizer: str = "AdamW", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, **options)
    for _ in range(3):
        made.zero_grad()
        net(torch.randn(6, 4)).square().sum().backward()
        made.step()
    return net, made


def save(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, *, step: int = 7, **state: Any) -> Path:
    weights, whole = WholeState(net, optimizer).read()
    return save_checkpoint(
        folder, step=step, weights=weights, optimizer=whole, generators=[generator_states()], state=state
    )


def load(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    whole = WholeState(net, optimizer)
    loaded = load_checkpoint(path, shapes=whole.shapes(), rank=0)
    whole.load(loaded.weights, loaded.optimizer)
    assert loaded.generators is not None
    restore_generators(loaded.generators)
    return loaded.state


@pytest.mark.parametrize(
    ("optimizer", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("SGD", {}), ("Adafactor", {})]
)
def test_the_next_step_after_loading_is_the_same_bit_for_bit(
    tmp_path: Path, optimizer: str, options: dict[str, Any]
) -> None:
    net, made = trained(optimizer=optimizer, **options)
    path = save(tmp_path, net, made, note="hello")
    expected = torch.rand(2)
    other, again = trained(optimizer=optimizer, **options)
    for parameter in other.parameters():
        parameter.data.zero_()
    state = load(path, other, again)
    assert state["note"] == "hello"
    assert state["step"] == 7
    assert torch.equal(torch.rand(2), expected)
    for model, opt in ((net, made), (other, again)):
        torch.manual_seed(3)
        opt.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))


def test_every_random_generator_is_put_back() -> None:
    states = generator_states()
    drawn = (torch.rand(1), numpy.random.rand(), random.random(), numpy.random.standard_normal())
    plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in states.items()}
    restore_generators(json.loads(json.dumps(plain)))
    assert (torch.rand(1), numpy.random.rand(), random.random(), numpy.random.standard_normal()) == drawn


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, *trained())
    other, again = trained(width=9)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(RequestError, match="checkpoint of another model"):
        load(path, other, again)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("brim.training.checkpoint._sync_folder", OSError(28, "No space left on device")),
        ("safetensors.torch.save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    ],
)
def test_a_write_that_is_cut_short_leaves_the_checkpoint_before_it(
    where: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = trained()
    first = save(tmp_path, net, optimizer, step=1)

    def no_space(*_: Any) -> None:
        raise error

    monkeypatch.setattr(where, no_space)
    with pytest.raises(RequestError, match=rf"No space left.*{first.name} is whole.*resume="):
        save(tmp_path, net, optimizer, step=2)
    assert find_checkpoint(tmp_path) == first
    assert [path.name for path in tmp_path.glob(".*partial")] == []


def test_a_checkpoint_is_replaced_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    net, optimizer = trained()
    first = save(tmp_path, net, optimizer, step=4, mark="one")
    second = save(tmp_path, net, optimizer, step=4, mark="two")
    assert first != second
    assert find_checkpoint(tmp_path) == second
    assert not first.exists()  # the older one is dropped, once the newer is named
    assert json.loads((second / "state.json").read_text())["mark"] == "two"


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    path = save(tmp_path, *trained())
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    net, optimizer = trained()
    path = save(tmp_path, net, optimizer)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RequestError, match="damaged"):
        load(path, net, optimizer)


def test_tied_weights_are_saved_under_each_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight  # type: ignore[union-attr]
    save_weights(tmp_path / "weights.safetensors", net.state_dict())
    found = load_file(tmp_path / "weights.safetensors")
    assert set(found) == {"0.weight", "1.weight"}
    assert torch.equal(found["0.weight"], found["1.weight"])


def test_weights_can_be_read_by_whoever_may_read_the_folder(tmp_path: Path) -> None:
    net, _ = trained()
    save_weights(tmp_path / "weights.safetensors", net.state_dict())
    (tmp_path / "usual").touch()
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode
