"""What a run writes into its folder: steps.jsonl, epochs.csv, weights and checkpoints. Rank 0 writes.

steps.jsonl                  a line for every optimizer step: loss, samples, learning rate, micro-batches
epochs.csv                   a row for every epoch
weights-last.safetensors     after the last epoch
weights-best.safetensors     after the best one
bad_batch.json               the samples of a step whose loss was not a number
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from brim.memory.environment import environment_facts
from brim.memory.host_copies import HostCopies, HostCopy
from brim.ranks.agreement import Agreement, Vote
from brim.ranks.gradients import load_whole_states, whole_states
from brim.storage.files import cannot_write, csv_text, write_atomic, write_json
from brim.storage.run_folder import write_run
from brim.storage.write_behind import WriteBehind
from brim.training.checkpoint import find_checkpoint, generator_states, save_checkpoint, save_weights
from brim.training.listener import StepRecord
from brim.training.loop import Progress

__all__ = ["CopiedState", "RunFiles", "WholeState", "read_steps", "write_record", "write_steps"]


class RunFiles:
    """The files of one run; only rank 0 writes them, but every rank takes part in gathering their content."""

    def __init__(
        self,
        folder: Path,
        *,
        whole: WholeState,
        writes: bool,
        shared_state: Callable[[], dict[str, Any]],
        own_state: Callable[[], dict[str, Any]],
    ) -> None:
        self.folder = folder
        self._whole = whole
        self._writes = writes
        self._shared_state = shared_state
        self._own_state = own_state
        self._steps: TextIO | None = None
        self._writer = WriteBehind()
        self.checkpoint_seconds = 0.0  # that the loop has spent copying and waiting, without what was written behind it

    def open(self, *, keep_steps: int) -> list[dict[str, Any]]:
        """Begin writing after so many steps; gives the lines of later ones, which a killed run had got to."""
        if not self._writes:
            return []
        path = self.folder / "steps.jsonl"
        lines = read_steps(path)
        kept = [line for line in lines if line["step"] <= keep_steps]
        try:
            if lines:
                write_steps(self.folder, kept)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._steps = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise cannot_write(path, error) from error
        return [line for line in lines if line["step"] > keep_steps]

    def close(self) -> None:
        """No more lines; what is being written is finished, and an error of it dropped, unless `written` was called."""
        self._writer.settle()
        steps, self._steps = self._steps, None
        if steps is not None:
            try:
                steps.close()
            except OSError as error:  # a full disk: lines that could not be written are tried once more
                raise cannot_write(self.folder / "steps.jsonl", error) from error

    def append_step(self, record: StepRecord) -> None:
        """A line for a step."""
        if self._steps is not None:
            try:
                self._steps.write(json.dumps(record.to_json()) + "\n")
            except OSError as error:
                raise cannot_write(self.folder / "steps.jsonl", error) from error

    def write_bad_batch(self, **facts: Any) -> None:
        """Which samples gave a loss that is no number."""
        if self._writes:
            write_json(self.folder / "bad_batch.json", {**facts, "loss": str(facts["loss"])})

    def last_checkpoint(self) -> Path | None:
        """The last whole checkpoint, once what is being written is whole."""
        self._writer.settle()
        return find_checkpoint(self.folder)

    def epoch_done(self, progress: Progress, agreement: Agreement, *, better: bool) -> None:
        """The table of epochs, the weights and a checkpoint; written behind the next steps."""
        self._save(progress, agreement, epoch_is_best=better)

    def checkpoint(self, progress: Progress, agreement: Agreement) -> None:
        """A checkpoint, written behind the next steps."""
        self._save(progress, agreement)

    def written(self) -> None:
        """Wait until all that was saved lies in the folder; raises why something does not."""
        started = time.perf_counter()
        self._writer.wait()
        self.checkpoint_seconds += time.perf_counter() - started

    def failure(self) -> Exception | None:
        """Why something that was saved could not be written, as far as that is known; reported once."""
        return self._writer.failure()

    def _save(self, progress: Progress, agreement: Agreement, *, epoch_is_best: bool | None = None) -> None:
        """Copy the state to host memory and write it behind what follows; at once where the copy does not fit.

        Every rank comes with its random generators and its micro-batch schedule. One state at a time is written: the
        next one waits for it.
        """
        started = time.perf_counter()
        self._writer.wait()
        state = self._gathered(progress, agreement)
        if not self._writes:
            self._whole.take_part()
        else:
            copied = self._whole.copied()
            job = _SavedState(
                folder=self.folder,
                step=progress.step,
                copied=copied,
                state=state,
                epochs=None if epoch_is_best is None else csv_text(progress.rows),
                is_best=bool(epoch_is_best),
            )
            if copied.in_place:
                job.write()
            else:
                self._writer.start(job.write)
        self.checkpoint_seconds += time.perf_counter() - started

    def _gathered(self, progress: Progress, agreement: Agreement) -> dict[str, Any]:
        """What a checkpoint keeps beside weights and optimizer; nothing of it changes with the next steps."""
        generators = generator_states()
        sent = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in generators.items()
        }
        ranks = agreement.gather(Vote(value={"generators": sent, "own": self._own_state()}))
        return {
            "generators": [_with_tensors(rank["generators"]) for rank in ranks],
            "state": copy.deepcopy(
                {
                    **self._shared_state(),
                    "progress": progress.to_json(),
                    "own": [rank["own"] for rank in ranks],
                }
            ),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedState:
    """A run's state at one moment, on its way into the folder."""

    folder: Path
    step: int
    copied: CopiedState
    state: Mapping[str, Any]  # `generators` and `state`, as `save_checkpoint` takes them
    epochs: str | None  # epochs.csv; None: no epoch has ended
    is_best: bool

    def write(self) -> None:
        """Every file whole or not at all, the checkpoint last."""
        self.copied.wait()
        if self.epochs is not None:
            write_atomic(self.folder / "epochs.csv", self.epochs)
            for name in ("last", "best") if self.is_best else ("last",):
                save_weights(self.folder / f"weights-{name}.safetensors", self.copied.weights)
        save_checkpoint(
            self.folder, step=self.step, weights=self.copied.weights, optimizer=self.copied.optimizer, **self.state
        )


def write_steps(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """The whole steps.jsonl at once."""
    write_atomic(folder / "steps.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def write_record(
    folder: Path,
    request: Mapping[str, Any],
    *,
    device: torch.device,
    plan: dict[str, Any] | None,
    summary: dict[str, Any],
    started_at: datetime.datetime,
) -> None:
    """The run.json of a training; `request` as it was asked for, with the task."""
    environment = environment_facts(device) | {"device": str(device)}
    write_run(
        folder, kind="train", request={**request, "command": "train"}, environment=environment, plan=plan,
        summary=summary, started_at=started_at,
    )  # fmt: skip


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a steps.jsonl; what a kill left of the last one is dropped."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    lines = []
    for line in text.split("\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _with_tensors(states: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        name: torch.tensor(states[name], dtype=torch.uint8) for name in ("torch", "cuda") if name in states
    }
    return {**states, **tensors}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopiedState:
    """Weights by name and the optimizer's `state_dict`, on the host once `wait` has returned."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    copy: HostCopy | None  # None: they are the run's own tensors, which the next step changes

    @property
    def in_place(self) -> bool:
        """Whether they must be written before the next step."""
        return self.copy is None

    def wait(self) -> None:
        """Until they are on the host."""
        if self.copy is not None:
            self.copy.wait()


class WholeState:
    """Reads and writes whole states; of a sharded model every rank must call every method."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool = False) -> None:
        self._model = model
        self._optimizer = optimizer
        self._sharded = sharded
        self._copies = HostCopies()

    def take_part(self) -> None:
        """On a rank that does not write: what the others need of a sharded model."""
        if self._sharded:
            self.read()

    def copied(self) -> CopiedState:
        """As `read`, copied to host memory; the tensors themselves where that does not fit.

        The next call overwrites the copy.
        """
        weights, optimizer = self.read()
        groups = [{name: _plain(value) for name, value in group.items()} for group in optimizer["param_groups"]]
        tensors = {f"weights.{name}": tensor for name, tensor in weights.items()}
        for place, held in optimizer["state"].items():
            tensors |= {
                f"state.{place}.{name}": value for name, value in held.items() if isinstance(value, torch.Tensor)
            }
        copied = self._copies.take(tensors)
        if copied is not None:
            weights = {name: copied.tensors[f"weights.{name}"] for name in weights}
        found = {} if copied is None else copied.tensors
        state = {
            place: {name: found.get(f"state.{place}.{name}", value) for name, value in held.items()}
            for place, held in optimizer["state"].items()
        }
        return CopiedState(weights=weights, optimizer={"state": state, "param_groups": groups}, copy=copied)

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Weights and buffers by name, and the optimizer's `state_dict`."""
        if self._sharded:
            return whole_states(self._model, self._optimizer)
        return dict(self._model.state_dict()), self._optimizer.state_dict()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight and buffer."""
        return {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}

    def load(self, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """Put states back that `read` gave, perhaps by way of a file."""
        groups = [
            {name: _like(value, present.get(name)) for name, value in stored.items()}
            for stored, present in zip(optimizer["param_groups"], self._optimizer.param_groups, strict=True)
        ]
        state = {"state": optimizer["state"], "param_groups": groups}
        if self._sharded:
            load_whole_states(self._model, self._optimizer, weights, state)
        else:
            self._model.load_state_dict(dict(weights))
            self._optimizer.load_state_dict(state)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else copy.copy(value)


def _like(value: Any, present: Any) -> Any:
    """JSON has no tuples: Adam's betas come back as a list."""
    return tuple(value) if isinstance(present, tuple) and isinstance(value, list) else value
