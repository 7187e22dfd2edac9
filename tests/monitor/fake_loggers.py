"""MLflow and Weights & Biases as far as brim calls them, in memory; and what any logger has stored, in one form."""

from __future__ import annotations

import dataclasses
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

Curves = dict[str, list[tuple[int, float]]]


@dataclasses.dataclass
class StoredRun:
    """One run, read back."""

    parameters: dict[str, str] = dataclasses.field(default_factory=dict)
    curves: Curves = dataclasses.field(default_factory=lambda: defaultdict(list))
    summary: dict[str, float] = dataclasses.field(default_factory=dict)
    state: str = ""  # running: never ended


def _namespace(*names: str) -> Any:
    return lambda *values: types.SimpleNamespace(**dict(zip(names, values, strict=True)))


class FakeMlflow(types.ModuleType):
    """The module `mlflow`; `clients` has the tracking address of each client."""

    def __init__(self, *, address_set: bool = False) -> None:
        super().__init__("mlflow")
        self.entities = types.ModuleType("mlflow.entities")
        self.entities.Metric = _namespace("key", "value", "timestamp", "step")  # type: ignore[attr-defined]
        self.entities.Param = _namespace("key", "value")  # type: ignore[attr-defined]
        self.entities.RunTag = _namespace("key", "value")  # type: ignore[attr-defined]
        self.is_tracking_uri_set = lambda: address_set
        self.clients: list[str | None] = []
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, StoredRun] = {}

    def MlflowClient(self, tracking_uri: str | None) -> FakeMlflow:  # noqa: N802
        self.clients.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        assert experiment_id in self.experiments.values()
        self.runs[run_name] = StoredRun(state="running")
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_name))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        assert len(params) <= 100
        run = self.runs[run_id]
        for one in metrics:
            assert set(one.key) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./ "), one.key
            run.curves[one.key].append((one.step, one.value))
        run.parameters |= {one.key: one.value for one in params}
        run.summary |= {one.key: one.value for one in metrics}  # the latest of each
        del tags

    def set_terminated(self, run_id: str, status: str) -> None:
        states = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "interrupted"}
        self.runs[run_id].state = states[status]


class FakeWandb(types.ModuleType):
    """The module `wandb`; `started` has what `init` was called with."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.runs: dict[str, StoredRun] = {}

    def init(self, **settings: Any) -> Any:
        self.started.append(settings)
        run = StoredRun(parameters={key: str(value) for key, value in settings["config"].items()}, state="running")
        self.runs[settings["name"]] = run
        return FakeWandbRun(run)


class FakeWandbRun:
    def __init__(self, stored: StoredRun) -> None:
        self.stored = stored
        self.summary: dict[str, Any] = {}
        self.last_step = 0

    def log(self, row: dict[str, float], step: int) -> None:
        assert step >= self.last_step, "wandb drops rows of earlier steps"
        self.last_step = step
        for name, value in row.items():
            self.stored.curves[name].append((step, value))

    def finish(self, exit_code: int) -> None:
        self.stored.summary = self.summary
        self.stored.state = self.summary["state"]
        assert (exit_code == 0) == (self.stored.state == "completed")


def read_tensorboard(folder: Path) -> dict[str, StoredRun]:
    """Every run in the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    runs = {}
    for place in sorted((folder / "tensorboard").iterdir()):
        events = EventAccumulator(str(place))
        events.Reload()
        run = runs[place.name] = StoredRun(state="running")
        for name in events.Tags()["scalars"]:
            run.curves[name] = [(one.step, one.value) for one in events.Scalars(name)]
            run.summary[name] = run.curves[name][-1][1]
        metadata = events.summary_metadata.get("_hparams_/session_start_info")
        if metadata is None:
            continue
        values = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
        for key, value in values.items():
            number = value.number_value
            text = value.string_value or (str(int(number)) if number == int(number) else str(number))
            run.parameters[key] = text
        run.state = run.parameters["state"]
    return runs
