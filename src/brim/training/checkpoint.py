"""Checkpoints: everything a run needs to continue as if it had not stopped, without a pickle.

    checkpoint.json                    which of the folders below is the current one; written last, atomically
    checkpoint-00000120/state.json     step, position, sizes, schedule, epochs so far; figures that are not tensors
    checkpoint-00000120/model.safetensors, optimizer.safetensors, generators.safetensors

A kill at any byte leaves the old checkpoint or the new one. It knows neither the loop nor the ranks: it is given the
states of their random generators.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brim.errors import RequestError
from brim.settings.caller import named
from brim.storage.files import cannot_write, read_json, usual_mode, write_json

__all__ = [
    "CHECKPOINT_SCHEMA",
    "LoadedCheckpoint",
    "find_checkpoint",
    "generator_states",
    "load_checkpoint",
    "restore_generators",
    "save_checkpoint",
    "save_weights",
]

CHECKPOINT_SCHEMA = "brim.checkpoint/1"

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint as it was read; nothing has been put in place."""

    weights: dict[str, torch.Tensor]
    optimizer: State
    generators: State | None  # of this rank, if it was there
    state: State


def save_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Weights and buffers as one safetensors file, whole or not at all; tied weights are there under each name."""
    _save_tensors(path, weights)


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
    generators: Sequence[Mapping[str, Any]],
    state: State,
) -> Path:
    """Write a checkpoint and drop the one before it; `optimizer` is a `state_dict`."""
    name = next(name for name in _names(step) if not (folder / name).exists())
    target, partial = folder / name, folder / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _save_tensors(partial / "model.safetensors", weights)
        tensors, values = _split_optimizer(optimizer)
        _save_tensors(partial / "optimizer.safetensors", tensors)
        drawn = {f"{rank}.{key}": value for rank, one in enumerate(generators) for key, value in _tensors(one).items()}
        _save_tensors(partial / "generators.safetensors", drawn)
        document = {
            "schema": CHECKPOINT_SCHEMA,
            **state,
            "step": step,
            "optimizer": values,
            "generators": [_without_tensors(one) for one in generators],
        }
        write_json(partial / "state.json", document)
        _sync_folder(partial)
        partial.replace(target)
        _sync_folder(folder)
    except (OSError, RequestError) as error:
        raise _not_saved(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what is left of it if something went wrong: a disk may be full
    write_json(folder / "checkpoint.json", {"schema": CHECKPOINT_SCHEMA, "folder": name, "step": step})
    for other in folder.glob("checkpoint-*"):
        if other.name != name and other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
    return target


def find_checkpoint(folder: Path) -> Path | None:
    """The folder of the last whole checkpoint, or None; one that cannot be used is a `RequestError`.

    A run that took it for none would begin again, and remove it.
    """
    path = folder / "checkpoint.json"
    pointer = read_json(path)
    if isinstance(pointer, dict) and pointer.get("schema") == CHECKPOINT_SCHEMA:
        found = folder / str(pointer.get("folder"))
        if (found / "state.json").is_file():
            return found
    if path.exists():
        raise RequestError(
            f"{path}: it names no checkpoint that can be read here: it is damaged, of another version of brim, or its "
            "folder is gone; choose another folder, or remove the file to begin again"
        )
    return None


def load_checkpoint(path: Path, *, shapes: Mapping[str, tuple[int, ...]], rank: int) -> LoadedCheckpoint:
    """Read a checkpoint; one of another model, of other `shapes`, is a `RequestError`."""
    state = read_json(path / "state.json")
    if not isinstance(state, dict) or state.get("schema") != CHECKPOINT_SCHEMA:
        raise RequestError(f"{path} is not a checkpoint of brim, or was cut short; give another folder")
    weights = _load_tensors(path / "model.safetensors")
    _check_same_model(weights, shapes, path)
    optimizer = _joined_optimizer(_load_tensors(path / "optimizer.safetensors"), state.pop("optimizer"))
    stored = state.pop("generators")
    drawn = _load_tensors(path / "generators.safetensors")
    own = {key.partition(".")[2]: value for key, value in drawn.items() if key.partition(".")[0] == str(rank)}
    generators = {**stored[rank], **own} if rank < len(stored) else None
    return LoadedCheckpoint(weights=weights, optimizer=optimizer, generators=generators, state=state)


def generator_states() -> State:
    """The states of every random generator that a step may draw from."""
    numpy_state: Any = np.random.get_state(legacy=False)
    version, numbers, gauss = random.getstate()
    states: State = {
        "torch": torch.get_rng_state(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
        "python": [version, list(numbers), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: Mapping[str, Any]) -> None:
    """Put them back."""
    torch.set_rng_state(torch.as_tensor(states["torch"], dtype=torch.uint8))
    inner = states["numpy"]["state"]
    key = np.array(inner["key"], dtype=np.uint32)
    np.random.set_state({**states["numpy"], "state": {**inner, "key": key}})
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.as_tensor(states["cuda"], dtype=torch.uint8))


def _names(step: int) -> Iterator[str]:
    """Names for a step's checkpoint: a second one (after validation) never touches the first before it is whole."""
    yield f"checkpoint-{step:08d}"
    yield from (f"checkpoint-{step:08d}.{number}" for number in itertools.count(2))


def _check_same_model(weights: Mapping[str, torch.Tensor], own: Mapping[str, tuple[int, ...]], path: Path) -> None:
    other = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if own == other:
        return
    differing = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
    first = differing[0]
    raise RequestError(
        f"{path} is a checkpoint of another model: {len(differing)} of {len(own)} weights differ (first {first}, "
        f"{other.get(first, 'absent')} there and {own.get(first, 'absent')} here); resume with the file that it was "
        "started with"
    )


def _split_optimizer(whole: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], State]:
    """The optimizer's tensors under `place.name`, and its plain values."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, State] = {}
    for place, held in whole["state"].items():
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{place}.{name}"] = value
            else:
                values.setdefault(str(place), {})[name] = value
    groups = [{name: _plain(value) for name, value in group.items()} for group in whole["param_groups"]]
    return tensors, {"state": values, "param_groups": groups}


def _joined_optimizer(tensors: Mapping[str, torch.Tensor], values: State) -> State:
    """A `state_dict` again: places are numbers, or names of weights where the model was sharded."""
    state: dict[Any, State] = {_place(text): dict(held) for text, held in values["state"].items()}
    for key, tensor in tensors.items():
        text, _, name = key.rpartition(".")
        state.setdefault(_place(text), {})[name] = tensor
    return {"state": state, "param_groups": values["param_groups"]}


def _place(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _tensors(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}


def _without_tensors(states: Mapping[str, Any]) -> State:
    return {name: value for name, value in states.items() if not isinstance(value, torch.Tensor)}


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file, under its name only once it is whole and on the disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        shared = plain.untyped_storage().data_ptr() in seen and plain.numel() > 0
        seen.add(plain.untyped_storage().data_ptr())
        whole = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
        apart[name] = plain if whole and not shared else plain.clone()
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(apart, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.chmod(usual_mode())
        partial.replace(path)
    except (OSError, SafetensorError) as error:  # a full disk comes as the latter
        partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def _not_saved(target: Path, error: OSError | RequestError) -> RequestError:
    """Why there is no new checkpoint, and which one is there."""
    reason = str(error) if isinstance(error, RequestError) else f"cannot write {target}: {error.strerror or error}"
    kept = find_checkpoint(target.parent)
    return RequestError(
        reason if kept is None else f"{reason}. {kept.name} is whole: continue from it with {named('resume')}"
    )


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise RequestError(
            f"{path} cannot be read ({error}); the checkpoint is damaged, give another folder"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
