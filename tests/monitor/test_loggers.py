"""Loggers: what every one must do, and where each writes. TensorBoard is the real one, the others are fakes."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from brim.monitor.loggers import loggers as loggers_file
from brim.monitor.loggers.loggers import check_loggers, open_loggers
from brim.settings.shared import LOGGERS
from tests.monitor.fake_loggers import FakeMlflow, FakeWandb, StoredRun, read_tensorboard

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own protobuf


@dataclasses.dataclass(frozen=True)
class Case:
    """One logger, installed, and a way to read what it has stored."""

    name: str
    runs: Callable[[], Mapping[str, StoredRun]]


def _tensorboard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed (brim[log])")
    del monkeypatch
    return Case("tensorboard", lambda: read_tensorboard(folder))


def _mlflow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    del folder
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
    return Case("mlflow", lambda: fake.runs)


def _wandb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    del folder
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return Case("wandb", lambda: fake.runs)


CASES = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # so that what a logger sets is undone
        monkeypatch.delenv(name)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return CASES[request.param](tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------- what every one must do


def test_every_name_that_the_setting_takes_is_a_logger_under_test() -> None:
    assert tuple(CASES) == LOGGERS == tuple(loggers_file._CLASSES)


def test_a_run_is_stored_with_parameters_curves_summary_and_state(case: Case, tmp_path: Path) -> None:
    with (
        open_loggers([case.name], tmp_path, print) as loggers,
        loggers.open_run("first", {"model": "tiny", "hp": {"epochs": 3, "clip": None}}) as run,
    ):
        run.log({"loss": 1.0}, step=1)
        run.log({"loss": 0.5, "rate": 8}, step=4)
        run.summary = {"metrics": {"top1": {"mean": 0.75}}}
    stored = case.runs()["first"]
    expected = {"model": "tiny", "hp.epochs": "3", "hp.clip": "None"}
    assert {key: stored.parameters[key] for key in expected} == expected
    assert stored.curves["loss"] == [(1, 1.0), (4, 0.5)]
    assert stored.curves["rate"] == [(4, 8.0)]
    assert stored.summary["summary.metrics.top1.mean"] == 0.75
    assert stored.state == "completed"


@pytest.mark.parametrize(("error", "state"), [(ValueError("no [x]"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_a_run_that_an_error_leaves_is_stored_as_such(
    case: Case, tmp_path: Path, error: BaseException, state: str
) -> None:
    def work() -> None:
        with open_loggers([case.name], tmp_path, print) as loggers, loggers.open_run("first", {}) as run:
            run.log({"loss": 1.0}, step=1)
            raise error

    with pytest.raises(type(error)):
        work()
    assert case.runs()["first"].state == state
    assert case.runs()["first"].curves["loss"] == [(1, 1.0)]


def test_runs_that_follow_each_other_are_kept_apart(case: Case, tmp_path: Path) -> None:
    with open_loggers([case.name], tmp_path, print) as loggers:
        for number, name in enumerate(("one", "two")):
            run = loggers.open_run(name, {"number": number})
            run.log({"loss": float(number)}, step=1)
            run.end({"best": number}, state="completed")
    assert {name: run.curves["loss"] for name, run in case.runs().items()} == {"one": [(1, 0.0)], "two": [(1, 1.0)]}


def test_only_finite_numbers_are_logged_and_any_name_is_taken(case: Case, tmp_path: Path) -> None:
    notes: list[str] = []
    with (
        open_loggers([case.name], tmp_path, notes.append) as loggers,
        loggers.open_run("first", {"a.b": 1, "a": {"b": 2}, "list": [1, 2], "": {}}) as run,
    ):
        run.log({"loss": float("nan"), "state": "x", "none": None, "on": True, "recall@5": 0.5, "c": 1}, step=1)
        run.summary = {"notes": ["x"], "inner": {"": 1, "..": 2}}
    assert notes == []
    curves = case.runs()["first"].curves
    assert curves["c"] == [(1, 1.0)]
    assert not {"loss", "state", "none", "on"} & set(curves)


def test_a_long_run_with_many_parameters_is_stored_whole(case: Case, tmp_path: Path) -> None:
    with (
        open_loggers([case.name], tmp_path, print) as loggers,
        loggers.open_run("first", {f"p{number}": "x" * 900 for number in range(250)}) as run,
    ):
        for step in range(1, 301):
            run.log({"loss": 1 / step}, step=step)
    assert [step for step, _ in case.runs()["first"].curves["loss"]] == list(range(1, 301))
    assert sum(key.startswith("p") for key in case.runs()["first"].parameters) == 250


def test_one_that_is_not_installed_is_refused_by_the_name_of_its_extra(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, case.name, None)
    extra = {"tensorboard": "log"}.get(case.name, case.name)
    with pytest.raises(RequestError, match=rf"log='{case.name}'.*pip install 'brim\[{extra}\]'"):
        check_loggers([case.name], tmp_path)
    with pytest.raises(RequestError), open_loggers([case.name], tmp_path, print):
        pass
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------- failing and slow ones


class Failing(FakeWandb):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.failures = 0

    def init(self, **settings: Any) -> Any:
        run = super().init(**settings)

        def fail(*args: Any, **more: Any) -> None:
            self.failures += 1
            raise OSError("no network")

        if self.at == "init":
            fail()
        setattr(run, self.at, fail)
        return run


@pytest.mark.parametrize("at", ["init", "log", "finish"])
def test_one_that_fails_is_noted_once_and_called_no_more_while_others_continue(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, failing = _mlflow(tmp_path, monkeypatch), Failing(at)
    monkeypatch.setitem(sys.modules, "wandb", failing)
    notes: list[str] = []
    with (
        open_loggers(["wandb", "mlflow"], tmp_path, notes.append) as loggers,
        loggers.open_run("first", {}) as run,
    ):
        for step in range(1, 6):
            run.log({"loss": 1.0}, step=step)
    assert failing.failures == 1
    assert notes == ["log='wandb': OSError: no network; nothing more is logged there"]
    assert len(healthy.runs()["first"].curves["loss"]) == 5
    assert healthy.runs()["first"].state == "completed"


def test_one_that_does_not_answer_holds_up_neither_the_run_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, answer = FakeWandb(), threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(fake, "init", lambda **settings: answer.wait())
    monkeypatch.setattr(loggers_file, "END_SECONDS", 0.01)
    notes: list[str] = []
    try:
        with open_loggers(["wandb"], tmp_path, notes.append) as loggers, loggers.open_run("first", {}) as run:
            run.log({"loss": 1.0}, step=1)
    finally:
        answer.set()
    assert [note.partition(": ")[2] for note in notes] == ["no answer for 0 s; nothing more is logged there"]


# --------------------------------------------------------------------------------------------- where each writes


def test_mlflow_writes_into_the_folder_unless_an_address_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address_set, expected in ((False, (tmp_path / "run" / "mlflow").as_uri()), (True, None)):
        fake = FakeMlflow(address_set=address_set)
        monkeypatch.setitem(sys.modules, "mlflow", fake)
        monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
        with open_loggers(["mlflow"], tmp_path / "run", print) as loggers, loggers.open_run("first", {}):
            pass
        assert fake.clients == [expected]
        assert list(fake.experiments) == ["run"]


@pytest.mark.parametrize(
    ("variables", "mode"), [({}, "offline"), ({"WANDB_MODE": "online"}, None), ({"WANDB_API_KEY": "k"}, None)]
)
def test_wandb_is_offline_unless_the_environment_says_otherwise(
    variables: dict[str, str], mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with open_loggers(["wandb"], tmp_path, print) as loggers, loggers.open_run("first", {}):
        pass
    (started,) = fake.started
    assert (started["mode"], started["dir"], started["group"]) == (mode, str(tmp_path), tmp_path.name)
    assert started["settings"]["console"] == "off"  # standard output is left alone


def test_nothing_is_imported_or_started_without_a_name(tmp_path: Path) -> None:
    before = threading.active_count()
    with open_loggers((), tmp_path, print) as loggers, loggers.open_run("first", {}) as run:
        run.log({"loss": 1.0}, step=1)
        assert not loggers
        assert threading.active_count() == before
