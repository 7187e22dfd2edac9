"""`brim sweep`: previews, checks, old flags, and one real sweep with its results, its report and its exit codes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from rich.console import Console

from brim.cli.sweep import SweepProgress
from brim.errors import RequestError
from brim.sweeps.forecast_process import ForecastProcess
from brim.sweeps.job import AttemptOutcome, Job, Recorder
from tests.sweeps.sweep_runs import ForecastsHere, LauncherHere

Brim = Callable[..., Any]

SEED = """grid_search:
  grid:
    model.type: [
      "r3d_18", "mc3_18", "r2plus1d_18", "s3d",
      "mvit_v1_b", "mvit_v2_s",
      "swin3d_b", "swin3d_s", "swin3d_t"
    ]
    hp.batch_size: [128, 64, 128, 32, 16, 16, 16, 16, 16]
    hp.learning_rate: [0.001]
    optimizer.name: ["adam"]
"""


class FakeForecasts(ForecastProcess):
    """Knows every model but `r3d_19`, no device, and forecasts one GiB a sample on a card of 100."""

    def devices(self) -> list[dict[str, Any]]:
        return []

    def check_model(self, model: str) -> None:
        if model == "r3d_19":
            raise RequestError(f"MODEL {model!r}: no such model; did you mean r3d_18?")

    def forecast(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> dict[str, Any]:
        def answer(size: int | str) -> dict[str, Any]:
            count = 60 if size == "auto" else int(size)
            figures = {"batch_size": count, "device_bytes": count << 30, "limit_bytes": 100 << 30, "device": "a card"}
            return {**figures, "fits": count <= 100, "batch_size_max": 100}

        return {str(size): answer(size) for size in sizes}


@pytest.fixture
def forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.sweeps.forecast_process.ForecastProcess", FakeForecasts)


@pytest.fixture
def seed(tmp_path: Path) -> str:
    path = tmp_path / "ucf101_video_grid.yaml"
    path.write_text(SEED)
    return str(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model.type: [r3d_18, s3d]\nhp.batch_size: [128, 32]\n", 1),
        ("model:\n  type: r3d_18\nhp:\n  batch_size: [128, 32]\n", 4),
        ("model.type: r3d_18\noptimizer: [{name: adam}, {name: sgd}]\n", 2),
        ("grid_search:\n  model:\n    type: [r3d_18]\n", 2),
    ],
)
def test_lists_outside_of_the_grid_are_answered_with_where_they_belong(
    brim: Brim, forecasts: None, tmp_path: Path, text: str, line: int
) -> None:
    file = tmp_path / "fragment.yaml"
    file.write_text(text)
    for command in ("sweep", "train"):
        result = brim(command, str(file))
        assert result.code == 2
        assert f"{file}:{line if command == 'sweep' or 'grid_search' not in text else 1}" in result.err
        assert ("grid_search.grid" if command == "sweep" else "brim sweep") in " ".join(result.err.split())


def test_weights_that_a_model_cannot_have_are_reported_by_line(brim: Brim, forecasts: None, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        "grid_search:\n  grid:\n    model.type: [r3d_18, mlp]\n    model.weights:\n      - none\n      - auto\n"
        "      - absent.pt\n"
    )
    result = brim("sweep", str(file), "--check")
    assert result.code == 2
    assert f"{file}:7" in result.out
    file.write_text(file.read_text().replace("      - absent.pt\n", ""))
    result = brim("sweep", str(file), "grid_search.pairing=product", "--check")
    assert result.code == 2
    assert f"{file}:6: error: model.weights: auto" in result.out.replace("\n", " ")


@pytest.mark.usefixtures("forecasts")
def test_the_seeds_file_is_nine_pairs_in_order(brim: Brim, seed: str) -> None:
    result = brim("sweep", seed, "--dry-run", "--json")
    document = json.loads(result.out)
    assert result.code == 0
    assert document["schema"] == "brim.sweep/1"
    assert document["pairing"]["mode"] == "zip"
    assert "counts are equal" in document["pairing"]["reason"]
    pairs = [(one["settings"]["model"]["type"], one["settings"]["hp"]["batch_size"]) for one in document["experiments"]]
    assert pairs[:4] == [("r3d_18", 128), ("mc3_18", 64), ("r2plus1d_18", 128), ("s3d", 32)]
    assert len(pairs) == 9
    assert document["experiments"][0]["forecast"]["fits"] is False
    told = [warning["message"] for warning in document["warnings"]]
    assert len(told) == 2
    assert "r3d_18 at 128 samples is forecast to take 128.0 GiB" in told[0]


@pytest.mark.usefixtures("forecasts")
def test_the_old_command_line_works(brim: Brim, seed: str) -> None:
    result = brim("sweep", "--config", seed, "--max_experiments", "3", "--multi_gpu", "--dry-run", "--json")
    models = [one["settings"]["model"]["type"] for one in json.loads(result.out)["experiments"]]
    assert models == ["r3d_18", "mc3_18", "r2plus1d_18"]


@pytest.mark.usefixtures("forecasts")
def test_the_preview_fits_the_terminal_with_its_warnings(brim: Brim, seed: str) -> None:
    warned = brim("sweep", seed, "--dry-run")
    assert "100 would fit" in " ".join(warned.out.split())
    result = brim("sweep", seed, "hp.batch_size=auto", "--dry-run")
    assert result.code == 0
    assert max(len(line) for line in (warned.out + result.out).splitlines()) <= 80
    assert "a batch size is planned for each of the 9" in " ".join(result.out.split())
    assert "built-in moving shapes" in result.out


PICTURES = """
import torch

class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, place):
        return torch.full((3, 64, 64), 0.5) + torch.rand(3, 64, 64), place  # prepared on the host, as real ones are

def pictures():
    return lambda split: Pictures()
"""


def test_a_sweep_and_brim_forecast_give_the_same_bytes(
    brim: Brim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brim.sweeps.forecast_process.ForecastProcess", ForecastsHere)
    (tmp_path / "data.py").write_text(PICTURES)
    file = tmp_path / "grid.yaml"
    file.write_text(
        f"data: {{type: 'py:{tmp_path}/data.py:pictures'}}\n"
        "model: {type: resnet18, num_classes: 1000, knobs: {size: 64}}\noptimizer: {name: adam}\n"
        "grid_search: {grid: {hp.batch_size: [48, 12]}}\n"
    )
    swept = brim("sweep", str(file), "--dry-run", "--json", "--no-cache", "--memory", "1060MiB")
    found = {one["forecast"]["batch_size"]: one["forecast"] for one in json.loads(swept.out)["experiments"]}
    same = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "limit_bytes", "batch_size_max", "fits")
    for size, forecast in found.items():
        asked = ("--mode", "train", "--optimizer", "adam", "--knob", "size=64", "--memory", "1060MiB", "-b", str(size))
        alone = json.loads(brim("forecast", "resnet18", *asked, "--max-batch-size", "96", "--json").out)
        assert {name: forecast[name] for name in same} == {name: alone[name] for name in same}
        assert {**forecast["made_for"], "data": None} == {**alone["made_for"], "data": None}
        assert forecast["approximate"] is None
        assert 48 < forecast["batch_size_max"] < 96, "memory is what ends it, not the data"
        assert forecast["made_for"]["classes"] == 1000
    assert sorted(found) == [12, 48]


@pytest.mark.usefixtures("forecasts")
def test_overrides_and_the_part_of_the_data_are_in_the_settings(brim: Brim, seed: str) -> None:
    result = brim("sweep", seed, "hp.learning_rate=[0.1,0.01]", "--data_percentage", "10", "--dry-run", "--json")
    document = json.loads(result.out)
    assert len(document["experiments"]) == 18
    assert document["experiments"][0]["settings"]["data"] == {"percentage": 10.0}


@pytest.mark.usefixtures("forecasts")
def test_check_names_every_mistake_with_its_line(brim: Brim, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "grid_search:\n  grid:\n    model.type: [r3d_19]\n    hp.batch_size: [0]\n    hp.lerning_rate: [1]\n"
    )
    result = brim("sweep", "--check", str(path))
    assert result.code == 2
    assert f"{path}:3: error" in result.out
    assert "did you mean r3d_18?" in result.out
    assert f"{path}:4: error: hp.batch_size" in result.out
    assert f"{path}:5: error" in result.out


@pytest.mark.usefixtures("forecasts")
def test_strict_turns_a_pair_that_does_not_fit_into_an_error(brim: Brim, seed: str) -> None:
    assert brim("sweep", "--check", seed).code == 0
    result = brim("sweep", "--check", seed, "--strict")
    assert result.code == 2
    assert "ucf101_video_grid.yaml:8: error: hp.batch_size: r3d_18 at 128" in result.out
    assert "100 would fit" in result.out
    assert brim("sweep", seed, "--strict", "--dry-run").code == 2


@pytest.mark.usefixtures("forecasts")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "FILE is missing"),
        (("hp.epochs=3",), "that is a setting; name the file first"),
        (("nowhere.yaml",), "nowhere.yaml"),
        (("{seed}", "--resume"), "name the sweep with --output DIR"),
        (("{seed}", "--on", "moon"), "--on moon"),
        (("{seed}", "--gpu", "h100", "--memory", "24GiB"), "both name a card"),
        (("{seed}", "--config", "{seed}"), "both name a file"),
        (("{seed}", "--log", "wndb"), "did you mean wandb"),
        (("{seed}", "--slurm", "partition=gpu"), "goes with --on slurm"),
        (("{seed}", "--on", "slurm", "--slurm", "partition"), "--slurm partition: write it as partition=gpu"),
    ],
)
def test_a_wrong_request_ends_with_2_and_says_what_to_do(
    brim: Brim, seed: str, arguments: tuple[str, ...], words: str
) -> None:
    result = brim("sweep", *(argument.format(seed=seed) for argument in arguments), "--dry-run")
    assert result.code == 2
    assert words in " ".join(result.err.split())


class Played:
    """Ends every experiment with the same score, after 7.98 s of which 2.33 s were training."""

    def run(self, jobs: Sequence[Job], recorder: Recorder) -> None:
        for job in jobs:
            recorder.started(job, "cpu")
            figures = {"best": {"top1": 0.5}, "batch_size_used": 8, "seconds": 2.33}
            outcome = AttemptOutcome(id=job.id, attempt=1, state="completed", seconds=7.98, figures=figures)
            recorder.ended(job, outcome)


@pytest.mark.usefixtures("forecasts")
def test_console_table_and_report_show_the_same_figures(
    brim: Brim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brim.sweeps.prepare.choose_launcher", lambda *_: Played())
    file = tmp_path / "grid.yaml"
    file.write_text("grid_search: {grid: {model.type: [r3d_18, mc3_18, s3d], hp.batch_size: [8, 8, 8]}}\n")
    out = tmp_path / "out"
    result = brim("sweep", str(file), "--max-experiments", "2", "--no-forecast", "-o", str(out))
    assert result.code == 0, result.err
    with (out / "results.csv").open(newline="") as table:
        assert [float(row["seconds"]) for row in csv.DictReader(table)] == [7.98, 7.98]
    document = json.loads((out / "sweep.json").read_text())
    assert [one["result"]["seconds"] for one in document["experiments"]] == [7.98, 7.98]
    page = (out / "report.html").read_text()
    assert "7.98 s" in page
    assert "2.33" not in page
    shown = " ".join(result.out.split())
    assert "the grid has 3 experiments instead of 9" in shown
    assert "2 of them ran" in shown
    assert "3 of 9" not in page
    assert "2 of 2 experiments completed; the grid has 3." in page
    assert "2 experiments share the best top1, 0.500" in page, "a tie is not ranked"


WIDE = """
import torch

class Wide(torch.nn.Module):  # few weights, and a quarter of a MiB of activations for each sample
    def __init__(self):
        super().__init__()
        self.scale, self.head = torch.nn.Parameter(torch.ones(1)), torch.nn.Linear(16, 2)

    def forward(self, rows):
        long = torch.relu(rows.repeat(1, 4000) * self.scale)
        return self.head(long.view(len(rows), 4000, 16).mean(dim=1))

def wide():
    return Wide()

def rows():
    return lambda split: [(torch.ones(16) * place, place % 2) for place in range(54)]
"""


def test_a_batch_forecast_not_to_fit_starts_in_balanced_parts(
    brim: Brim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """27 where 21 fit: 14 and 13 from the first step on, and no step runs out of memory."""
    monkeypatch.setattr("brim.sweeps.forecast_process.ForecastProcess", ForecastsHere)
    monkeypatch.setattr("brim.sweeps.prepare.choose_launcher", lambda *_: LauncherHere())
    (tmp_path / "nets.py").write_text(WIDE)
    settings = {
        "model": {"type": f"py:{tmp_path}/nets.py:wide"},
        "data": {"type": f"py:{tmp_path}/nets.py:rows", "num_workers": 0, "val_split": "none"},
        "hp": {"epochs": 2, "batch_size": 27},
        "training": {"device": "cpu"},
    }
    needed = ForecastsHere().forecast(settings, [21, 22])
    limit = (needed["21"]["device_bytes"] + needed["22"]["device_bytes"]) // 2
    file = tmp_path / "one.yaml"
    file.write_text(json.dumps(settings))
    out = tmp_path / "out"
    result = brim("sweep", str(file), f"training.memory_limit={limit}B", "--no-cache", "-o", str(out), "--json")
    assert result.code == 0, result.err
    (experiment,) = json.loads(result.out)["experiments"]
    assert (experiment["forecast"]["fits"], experiment["forecast"]["batch_size_max"]) == (False, 21)
    ran = experiment["result"]
    assert ran["oom_events"] == 0
    assert (ran["batch_sizes"]["smallest"], ran["batch_sizes"]["largest"]) == (13, 14)
    assert (ran["steps"], ran["effective_batch_size"]) == (4, 27), "an optimizer step has as many samples as asked for"
    assert ran["batch_size_reason"].startswith("27 is forecast not to fit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sweep")
    draw = numpy.random.default_rng(0)
    rows = draw.standard_normal((64, 6)).astype("float32")
    numpy.savez(folder / "rows.npz", features=rows, labels=rows[:, :3].argmax(axis=1))
    (folder / "nets.py").write_text("def broken():\n    raise ValueError('no [layer] here')\n")
    (folder / "grid.yaml").write_text(
        f"""
data: {{root: {folder}/rows.npz, num_workers: 0}}
hp: {{epochs: 2, learning_rate: 0.01}}
training: {{device: cpu}}
grid_search:
  grid:
    model.type: [mlp, "py:{folder}/nets.py:broken"]
    hp.batch_size: [16, 8]
"""
    )
    return folder


@pytest.mark.usefixtures("forecasts")
def test_a_real_sweep_leaves_its_results_and_resumes(brim: Brim, folder: Path) -> None:
    """Three processes with torch: two experiments, and the failed one again."""
    out = folder / "out"
    arguments = ("sweep", str(folder / "grid.yaml"), "--no-forecast", "--no-cache", "-o", str(out))
    result = brim(*arguments, "--jobs-per-gpu", "2", "--results_file", str(folder / "mine.csv"))
    assert result.code == 1, result.err
    assert "1 of 2 experiments failed" in result.out
    assert "no [layer] here" in " ".join(result.out.split())
    assert "2 experiments instead of 4" in result.out
    assert max(len(line) for line in result.out.splitlines() if "/" not in line) <= 80
    with (folder / "mine.csv").open(newline="") as file:
        good, bad = csv.DictReader(file)
    assert (good["state"], bad["state"]) == ("completed", "failed")
    assert 0 <= float(good["best_top1"]) <= 1
    assert (good["batch_size_used"], good["batch_size_reason"], good["epochs_trained"]) == ("16", "as asked", "2")
    assert bad["failure"] in ("error", "request")
    assert (out / "report.html").stat().st_size > 1000
    again = brim(*arguments, "--resume", "--json")
    assert again.code == 1
    document = json.loads(again.out)
    assert document["counts"] == {"completed": 1, "failed": 1, "interrupted": 0, "waiting": 0}
    assert [one["result"]["attempts"] for one in document["experiments"]] == [1, 2], "what is done is not done again"


@pytest.mark.parametrize("checkpoint", [True, False])
def test_an_interrupted_experiment_reports_its_checkpoint_if_it_has_one(tmp_path: Path, checkpoint: bool) -> None:
    if checkpoint:
        (tmp_path / "checkpoint.json").write_text("{}")
    shown = io.StringIO()
    with SweepProgress(Console(file=shown, width=200)) as progress:
        job = Job(id="x", settings={}, folder=str(tmp_path))
        progress.planned(1, 0)
        progress.started(job, "cpu")
        progress.ended(job, AttemptOutcome(id="x", attempt=1, state="interrupted"), None)
    assert ("with a checkpoint" in shown.getvalue()) is checkpoint
    assert "stopped" in shown.getvalue()
