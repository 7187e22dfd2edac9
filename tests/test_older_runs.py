"""Run folders that the release of commit c7a9703 left are resumed, reported and read by today's code.

tests/fixtures/make_c7a9703.py says how they were made. Each test works on a copy, in the folder that all paths in the
records and settings are relative to. Beside every unfinished run there is the same one, finished by that release.
"""

from __future__ import annotations

import csv
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from brim.cli.main import run
from tests.sweeps.sweep_runs import ForecastsHere, LauncherHere

FIXTURES = Path(__file__).parent / "fixtures" / "c7a9703"
SHOUT = shlex.split("eval -m py:older_functions.py:shout -d words.jsonl --device cpu --num-workers 0")
ANSWER = shlex.split("eval -m lm -d questions.jsonl --max-tokens 6 --device cpu --num-workers 0 --no-cache")
PROFILE = shlex.split(
    "profile -m py:older_functions.py:shout -d words.jsonl --limit 20 --knob reach=2,3,4 --device cpu"
)
TRAIN = shlex.split("train train.yaml --no-cache")
SEEDS = [*TRAIN, "hp.epochs=2", "--seeds", "3"]
AUTO = ["model.params.dropout=0", "hp.batch_size=auto"]
DPO = shlex.split(
    "train dpo --id in.safetensors --ood out.safetensors --hidden 4 --epochs 3 --seeds 2 --device cpu "
    "--loss energy,hinge --baselines knn --fast-path resident"
)
FIND = shlex.split("find py:older_functions:rows --memory-limit 64KiB --device cpu")

# Dropout draws its masks from another generator where torch has no MKL: there the stored losses are not to be had.
same_dropout = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="dropout's masks are those of MKL")


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Brim = Callable[..., Result]


@pytest.fixture
def brim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_probes: None
) -> Brim:
    """Run a command in this process, in a copy of the older folders."""
    folder = tmp_path / "older"
    shutil.copytree(FIXTURES, folder)
    monkeypatch.chdir(folder)

    def call(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as stop:
            run(list(arguments))
        captured = capsys.readouterr()
        assert isinstance(stop.value.code, int | None)
        return Result(stop.value.code or 0, captured.out, captured.err)

    return call


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def losses(folder: str) -> list[float]:
    """Of every step; none is missing and none is there twice."""
    lines = lines_of(f"{folder}/steps.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def same_losses(folder: str, other: str) -> bool:
    return losses(folder) == pytest.approx(losses(other), rel=1e-9)


def epochs_without_times(folder: str) -> list[dict[str, float]]:
    with Path(folder, "epochs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value or "nan") for name, value in row.items() if "second" not in name} for row in rows]


def contents(folder: str) -> dict[str, bytes]:
    """Every file but the lock and the page, which is written anew."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path.name not in (".lock", "report.html"))
    return {str(path): path.read_bytes() for path in files}


def record_of(folder: str) -> Any:
    return json.loads(Path(folder, "run.json").read_text(encoding="utf-8"))


def name_this_copy_of_the_model(journal: Path) -> None:
    """A transformers model is known by where it lies and by its files' times: as that release would name this copy."""
    folder, weights = Path("lm").resolve(), Path("lm/model.safetensors").stat()
    files = {
        "folder": str(folder),
        "config": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "weights": [["model.safetensors", weights.st_size, weights.st_mtime_ns]],
    }
    facts = {"model": "hf:lm", "files": files, "dtype": "torch.float32"}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    document = json.loads(journal.read_text(encoding="utf-8"))
    _, data, settings = document["fingerprint"].split()
    document["fingerprint"] = f"model:{hashlib.sha256(text.encode()).hexdigest()[:16]} {data} {settings}"
    journal.write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize(
    ("folder", "finished", "arguments"),
    [
        ("eval-killed", "eval-finished", [*SHOUT, "-b", "3"]),
        ("eval-finished", "eval-finished", SHOUT),
        ("lm-killed", "lm-finished", [*ANSWER, "-b", "3"]),
    ],
    ids=["function", "finished", "language-model"],
)
def test_an_evaluation_answers_the_samples_that_are_left(
    brim: Brim, folder: str, finished: str, arguments: list[str]
) -> None:
    if folder == "lm-killed":
        pytest.importorskip("transformers")
        name_this_copy_of_the_model(Path(folder, "journal.json"))
    expected = {line["id"]: line["prediction"] for line in lines_of(f"{finished}/samples.jsonl")}
    before = {line["id"]: line for line in lines_of(f"{folder}/samples.jsonl")}
    result = brim(*arguments, "--no-cache", "-o", folder, "--resume", "--json")
    assert result.code == 0, result.err
    assert result.document["summary"]["num_resumed"] == len(before)
    lines = lines_of(f"{folder}/samples.jsonl")
    assert sorted(line["id"] for line in lines) == sorted(expected), "every sample once"
    assert {line["id"]: line for line in lines if line["id"] in before} == before, "their batch sizes included"
    assert {line["id"]: line["prediction"] for line in lines} == expected


def test_samples_that_failed_are_kept_as_failed_until_they_are_tried_again(brim: Brim) -> None:
    """Failures of that release do not say how often a sample was tried."""
    moody = [part.replace("older_functions.py:shout", "moody.py:answer") for part in SHOUT]
    before = lines_of("failures-killed/samples.jsonl")
    assert before
    assert all(line["error"] is not None and "attempts" not in line["error"] for line in before)
    arguments = (*moody, "--no-cache", "-o", "failures-killed", "--resume", "--json")
    result = brim(*arguments)
    assert result.code == 1
    assert result.document["summary"]["num_resumed"] == len(before)
    assert result.document["summary"]["num_failed"] == 10
    assert brim("report", "failures-killed").code == 0
    again = brim(*arguments, "--retry-failed")
    assert again.code == 1
    assert again.document["summary"]["num_resumed"] == 30
    ids = [line["id"] for line in lines_of("failures-killed/samples.jsonl")]
    assert len(ids) == len(set(ids)) == 40


def test_a_profile_keeps_its_finished_point_and_the_answers_of_the_next(brim: Brim) -> None:
    expected = json.loads(Path("profile-finished/profile.json").read_text(encoding="utf-8"))["summary"]
    done = contents("profile-killed/values/reach=2")
    answered = len(lines_of("profile-killed/values/reach=3/samples.jsonl"))
    result = brim(*PROFILE, "--num-workers", "0", "--no-cache", "-o", "profile-killed", "--resume", "--json")
    assert result.code == 0, result.err
    assert contents("profile-killed/values/reach=2") == done
    assert record_of("profile-killed/values/reach=3")["summary"]["num_resumed"] == answered > 0
    entries = result.document["summary"]
    assert [entry["state"] for entry in entries] == ["done"] * 3
    assert [entry["accuracy"] for entry in entries] == [entry["accuracy"] for entry in expected]


@pytest.mark.parametrize(
    ("name", "changes"), [pytest.param("train", [], marks=same_dropout), ("auto", AUTO)], ids=["dropout", "auto"]
)
def test_a_training_run_ends_as_the_one_that_was_not_interrupted(brim: Brim, name: str, changes: list[str]) -> None:
    folder, finished = f"{name}-interrupted", f"{name}-finished"
    before = Path(folder, "steps.jsonl").read_bytes()
    result = brim(*TRAIN, *changes, "-o", folder, "--resume")
    assert result.code == 0, result.err
    assert Path(folder, "steps.jsonl").read_bytes().startswith(before), "no step is made again"
    assert len(losses(folder)) > before.count(b"\n")
    assert same_losses(folder, finished)
    for row, other in zip(epochs_without_times(folder), epochs_without_times(finished), strict=True):
        assert row == pytest.approx(other, rel=1e-9, nan_ok=True)
    summary, expected = record_of(folder)["summary"], record_of(finished)["summary"]
    for field in ("steps", "samples", "epochs", "best_epoch", "stopped_early", "effective_batch_size"):
        assert summary[field] == expected[field], field


@same_dropout
def test_steps_after_the_checkpoint_of_a_killed_run_are_cut_as_they_were(brim: Brim) -> None:
    """With -b auto sizes depend on the clock, and dropout's masks on the sizes."""
    before = lines_of("auto-killed/steps.jsonl")
    (checkpoint,) = Path("auto-killed").glob("checkpoint-*/state.json")
    assert json.loads(checkpoint.read_text(encoding="utf-8"))["step"] < len(before)
    changes = ["hp.batch_size=auto", "training.checkpoint_every=7"]
    result = brim(*TRAIN, *changes, "-o", "auto-killed", "--resume")
    assert result.code == 0, result.err
    assert losses("auto-killed")[: len(before)] == pytest.approx([line["loss"] for line in before], rel=1e-9)
    again = lines_of("auto-killed/steps.jsonl")[: len(before)]
    assert [line["micro_batches"] for line in again] == [line["micro_batches"] for line in before]


@same_dropout
def test_an_interrupt_keeps_finished_seeds_and_changes_no_other(brim: Brim) -> None:
    done = contents("seeds-interrupted/seed-0")
    before = Path("seeds-interrupted/seed-1/steps.jsonl").read_bytes()
    result = brim(*SEEDS, "--fast-path", "off", "-o", "seeds-interrupted", "--resume")
    assert result.code == 0, result.err
    assert contents("seeds-interrupted/seed-0") == done
    assert Path("seeds-interrupted/seed-1/steps.jsonl").read_bytes().startswith(before)
    for seed in ("seed-0", "seed-1", "seed-2"):
        assert same_losses(f"seeds-interrupted/{seed}", f"seeds-finished/{seed}")
    summary, expected = record_of("seeds-interrupted")["summary"], record_of("seeds-finished")["summary"]
    assert summary["metrics"]["top1"]["mean"] == pytest.approx(expected["metrics"]["top1"]["mean"])


def test_seeds_that_were_stacked_are_kept_when_one_is_added(brim: Brim) -> None:
    done = [contents(f"stacked-finished/seed-{seed}") for seed in range(2)]
    result = brim(*SEEDS, "hp.batch_size=16", "-o", "stacked-finished", "--resume")
    assert result.code == 0, result.err
    assert [contents(f"stacked-finished/seed-{seed}") for seed in range(2)] == done
    assert len(losses("stacked-finished/seed-2")) == len(losses("stacked-finished/seed-0"))


class NoForecast(ForecastsHere):
    """Finds no device, and is never asked for a forecast."""

    def forecast(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> dict[str, Any]:
        raise AssertionError("--no-forecast")


def test_a_sweep_runs_what_is_not_completed(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.sweeps.forecast_process.ForecastProcess", NoForecast)
    monkeypatch.setattr("brim.sweeps.prepare.choose_launcher", lambda *_: LauncherHere())
    root = Path("sweep-interrupted/experiments")
    (done,) = (path.parent for path in root.glob("*/run.json"))
    (begun,) = (path for path in root.iterdir() if path != done)
    kept, before = contents(str(done)), (begun / "steps.jsonl").read_bytes()
    arguments = ("sweep", "sweep.yaml", "--no-forecast", "--no-cache", "-o", "sweep-interrupted", "--resume")
    result = brim(*arguments, "--json")
    assert result.code == 0, result.err
    assert result.document["counts"] == {"completed": 3, "failed": 0, "interrupted": 0, "waiting": 0}
    assert [one["result"]["attempts"] for one in result.document["experiments"]] == [1, 2, 1]
    assert contents(str(done)) == kept
    assert (begun / "steps.jsonl").read_bytes().startswith(before)
    for folder in root.iterdir():
        assert same_losses(str(folder), f"sweep-finished/experiments/{folder.name}")


def test_preference_training_keeps_its_finished_cells(brim: Brim) -> None:
    def figures(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, int | None], float]:
        return {(line["method"], line["seed"]): line["metrics"]["auroc"] for line in lines}

    before, expected = Path("dpo-interrupted/cells.jsonl").read_bytes(), lines_of("dpo-finished/cells.jsonl")
    result = brim(*DPO, "-o", "dpo-interrupted", "--resume")
    assert result.code == 0, result.err
    assert Path("dpo-interrupted/cells.jsonl").read_bytes().startswith(before)
    lines = lines_of("dpo-interrupted/cells.jsonl")
    assert len(lines) == len(expected) > before.count(b"\n") > 0
    assert figures(lines) == pytest.approx(figures(expected))


def test_plans_of_the_earlier_release_are_listed_and_stand_in_no_ones_way(
    brim: Brim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one is used depends on the versions of the packages here; none ends a command."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    listed = brim("cache", "list", "--json")
    assert listed.code == 0
    assert sorted(plan["command"] for plan in listed.document["plans"]) == ["eval", "find", "train"]
    for arguments in (FIND, [*SHOUT, "-o", "eval-new"], ["train", "train.yaml", *AUTO, "-o", "train-new"]):
        result = brim(*arguments)
        assert result.code == 0, result.err
        assert "is ignored" not in result.err


@pytest.mark.parametrize("folder", sorted(path.name for path in FIXTURES.glob("*-finished")))
def test_a_finished_run_is_reported(brim: Brim, folder: str) -> None:
    result = brim("report", folder)
    assert result.code == 0, result.err
    assert Path(folder, "report.html").stat().st_size > 1000
