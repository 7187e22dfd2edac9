from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from brim.errors import RequestError
from brim.molecules import cells
from brim.molecules.heads import OodListener
from brim.molecules.run import OodResult, ood
from brim.settings.molecule_settings import OodCommand, OodRequest
from tests.molecules.molecule_files import ALKANES, RINGS, csv_of, drugood, features_of

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Notes(OodListener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def request(**more: Any) -> OodRequest:
    given = {"seeds": (0, 1), "epochs": 3, "hidden": (8,), "device": "cpu", "lrs": (1e-2,), **more}
    return OodRequest(**given)


def train(request: OodRequest, output: Path, listener: OodListener | None = None) -> OodResult:
    return ood(OodCommand(request=request, output=output), listener=listener)


def on_features(tmp_path: Path, **more: Any) -> OodRequest:
    inner = features_of(tmp_path / "in.safetensors", 60, shift=0.0)
    outer = features_of(tmp_path / "out.safetensors", 50, shift=1.5, seed=1)
    return request(id=str(inner), ood=str(outer), **more)


def document(result: OodResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))
    return found


def test_a_run_leaves_table_results_heads_and_a_record(tmp_path: Path) -> None:
    result = train(on_features(tmp_path, baselines=("knn", "msp")), tmp_path / "run")
    run = document(result)
    assert (run["schema"], run["kind"], run["request"]["command"]) == ("brim.run/1", "train", "train dpo")
    summary = run["summary"]
    for name in (
        "samples_per_second", "micro_batch_size", "effective_batch_size", "accumulation_steps", "eval_batch_size",
        "oom_events", "peak_allocated_bytes", "peak_reserved_bytes", "fast_path",
    ):  # fmt: skip
        assert summary[name] is not None, name
    assert summary["fast_path"] in ("resident", "stacked")
    assert summary["seeds"] == [0, 1]
    auroc = summary["metrics"]["auroc"]
    assert len(auroc["values"]) == 2
    assert auroc["mean"] == pytest.approx(sum(auroc["values"]) / 2)
    assert [(row["method"], len(row["seeds"])) for row in summary["table"]] == [("dpo", 2), ("knn", 0), ("msp", 2)]
    assert set(summary["peaks"]) == {"encoding", "training", "evaluation"}
    assert summary["peaks"]["training"]["peak_allocated_bytes"] > 0
    assert summary["peaks"]["evaluation"]["peak_allocated_bytes"] > 0
    results = list(csv.DictReader((result.folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    assert len(results) == 5
    assert json.loads((result.folder / "table.json").read_text(encoding="utf-8"))["rows"] == summary["table"]
    assert len((result.folder / "table.csv").read_text(encoding="utf-8").splitlines()) == 4
    (heads,) = (result.folder / "heads").iterdir()
    weights = load_file(heads)
    assert weights["seed-1/layers.0.weight"].shape == (8, 16)
    assert (result.folder / "monitor.csv").exists()


def test_data_sets_encoders_losses_and_rates_make_one_table(tmp_path: Path) -> None:
    asked = request(
        data=(str(drugood(tmp_path / "a.json")), str(drugood(tmp_path / "b.json"))), losses=("energy", "hinge"),
        lrs=(1e-2, 1e-3), knobs={"bits": "64"}, baselines=("lof",),
    )  # fmt: skip
    result = train(asked, tmp_path / "run")
    rows = result.summary["table"]
    assert [(row["data"], row["method"]) for row in rows] == [
        (data, method)
        for data in ("a", "b")
        for method in ("dpo lr=0.01", "dpo lr=0.001", "dpo-hinge lr=0.01", "dpo-hinge lr=0.001", "lof")
    ]
    assert result.summary["method"] == "dpo lr=0.01"
    assert [training["runs"] for training in result.summary["trainings"]] == [4, 4, 4, 4]
    assert [one["cached"] for one in result.summary["encodings"]] == [False, True]  # the same molecules


def test_every_head_keeps_its_loss_curve(tmp_path: Path) -> None:
    result = train(on_features(tmp_path, epochs=4, patience=None), tmp_path / "run")
    for cell in result.cells:
        assert len(cell.details["losses"]) == cell.details["epochs"] == 4
        assert cell.details["losses"][-1] == cell.details["last_loss"]
        assert cell.details["losses"][-1] < cell.details["losses"][0]


def test_chains_and_rings_are_separated(tmp_path: Path) -> None:
    inner, outer = csv_of(tmp_path / "in.csv", ALKANES), csv_of(tmp_path / "out.csv", RINGS)
    result = train(request(id=str(inner), ood=str(outer), epochs=10), tmp_path / "run")
    assert result.summary["metrics"]["auroc"]["mean"] > 0.99


def test_a_batch_larger_than_the_data_is_noted_and_is_one_step(tmp_path: Path) -> None:
    notes = Notes()
    result = train(on_features(tmp_path, effective_batch=8192), tmp_path / "run", notes)
    assert any("a batch of 8,192 is more than the 42 samples to train on; every epoch is one step of 42" in line
               for line in notes.lines)  # fmt: skip
    assert result.summary["effective_batch_size"] == 42
    assert result.summary["trainings"][0]["steps_per_epoch"] == 1


def test_a_ceiling_on_one_pass_leaves_the_step_as_it_is(tmp_path: Path) -> None:
    whole = train(on_features(tmp_path, effective_batch=32), tmp_path / "one")
    cut = train(on_features(tmp_path, effective_batch=32, batch_size=8), tmp_path / "two")
    assert (cut.summary["micro_batch_size"], cut.summary["accumulation_steps"]) == (8, 4)
    assert (whole.summary["micro_batch_size"], whole.summary["accumulation_steps"]) == (32, 1)
    assert cut.summary["metrics"]["auroc"]["values"] == pytest.approx(
        whole.summary["metrics"]["auroc"]["values"], abs=0.002
    )


def test_molecules_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    inner, outer = csv_of(tmp_path / "in.csv", [*ALKANES, "C1CC", ""]), csv_of(tmp_path / "out.csv", RINGS)
    result = train(request(id=str(inner), ood=str(outer)), tmp_path / "run")
    left_out = result.summary["molecules_left_out"]["in-vs-out"]
    assert list(left_out) == ["in.csv line 62"]
    assert result.failed == []


def stop_after(monkeypatch: pytest.MonkeyPatch, calls: int, error: type[BaseException]) -> list[int]:
    """Let `train_heads` run so many times, then be interrupted; returns the runs of each call."""
    real, counted = cells.train_heads, []

    def counting(features: Any, loss: Any, runs: Any, *rest: Any, **more: Any) -> Any:
        if len(counted) == calls:
            raise error
        counted.append(len(runs))
        return real(features, loss, runs, *rest, **more)

    monkeypatch.setattr(cells, "train_heads", counting)
    return counted


def test_a_resumed_run_makes_only_the_missing_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on_features(tmp_path, losses=("energy", "bce", "mse"), baselines=("knn",))
    notes = Notes()
    with monkeypatch.context() as patch:
        stop_after(patch, 2, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            train(asked, tmp_path / "run", notes)
    assert notes.lines[-1] == f"finished cells are kept: continue with --resume -o {tmp_path / 'run'}"
    assert not (tmp_path / "run" / "run.json").exists()
    counted = stop_after(monkeypatch, 9, KeyboardInterrupt)
    resumed = train(dataclasses.replace(asked, resume=True), tmp_path / "run")
    assert counted == [2]  # mse alone
    fresh = train(asked, tmp_path / "fresh")
    assert [(cell.key, cell.metrics) for cell in resumed.cells] == [(cell.key, cell.metrics) for cell in fresh.cells]


def test_a_finished_run_can_be_resumed_with_more_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(on_features(tmp_path), tmp_path / "run")
    counted = stop_after(monkeypatch, 9, KeyboardInterrupt)
    more = train(on_features(tmp_path, seeds=(0, 1, 2), resume=True), tmp_path / "run")
    assert counted == [1]
    assert more.cells[:2] == first.cells
    assert {name.partition("/")[0] for name in load_file(next((tmp_path / "run" / "heads").iterdir()))} == {
        "seed-0", "seed-1", "seed-2",
    }  # fmt: skip


def test_a_run_is_not_mixed_with_another(tmp_path: Path) -> None:
    asked = on_features(tmp_path)
    train(asked, tmp_path / "run")
    with pytest.raises(RequestError, match="holds the results of a run; continue it with --resume"):
        train(asked, tmp_path / "run")
    with pytest.raises(RequestError, match="other items or settings: settings differ"):
        train(dataclasses.replace(asked, beta=0.5, resume=True), tmp_path / "run")
    with pytest.raises(RequestError, match="settings differ"):
        train(dataclasses.replace(asked, lrs=(1e-3,), resume=True), tmp_path / "run")
    features_of(tmp_path / "in.safetensors", 60, shift=0.1)
    with pytest.raises(RequestError, match="other items or settings: in-vs-out differ"):
        train(dataclasses.replace(asked, resume=True), tmp_path / "run")
    with pytest.raises(RequestError, match=r"--resume: .* holds no cells\.jsonl"):
        train(dataclasses.replace(asked, resume=True), tmp_path / "other")


def test_a_nan_loss_fails_its_cell_which_is_tried_again_on_resume(tmp_path: Path) -> None:
    asked = on_features(tmp_path, lrs=(1e-2, 1e38), seeds=(0,))
    result = train(asked, tmp_path / "run")
    (failed,) = result.failed
    assert failed.method == "dpo lr=1e+38"
    assert failed.error is not None
    assert "the loss became nan in epoch 2, step 2, on rows" in failed.error
    assert ".safetensors row" in failed.error
    assert result.summary["num_failed"] == 1
    assert result.summary["errors"] == [failed.error]
    again = train(dataclasses.replace(asked, resume=True), tmp_path / "run")
    assert len(again.failed) == 1
    assert len((tmp_path / "run" / "cells.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_a_trained_head_can_be_the_reference_and_another_model_cannot(tmp_path: Path) -> None:
    train(on_features(tmp_path), tmp_path / "first")
    (heads,) = (tmp_path / "first" / "heads").iterdir()
    notes = Notes()
    train(on_features(tmp_path, losses=("reference",), reference=str(heads)), tmp_path / "second", notes)
    assert "in-vs-out-features-dpo.safetensors: the reference is seed-0" in notes.lines
    with pytest.raises(RequestError, match="is another model"):
        train(on_features(tmp_path, losses=("reference",), reference=str(heads), hidden=(9,)), tmp_path / "third")


@pytest.mark.parametrize("fast_path", ["off", "resident", "stacked"])
def test_every_path_gives_the_same_table(tmp_path: Path, fast_path: str) -> None:
    plain = train(on_features(tmp_path, fast_path="off"), tmp_path / "plain")
    other = train(on_features(tmp_path, fast_path=fast_path), tmp_path / "other")
    assert other.summary["fast_path"] == fast_path
    assert other.summary["metrics"]["auroc"]["values"] == pytest.approx(
        plain.summary["metrics"]["auroc"]["values"], abs=0.002
    )


def test_half_precision_trains_under_autocast(tmp_path: Path) -> None:
    result = train(on_features(tmp_path, dtype="bfloat16"), tmp_path / "run")
    (heads,) = (tmp_path / "run" / "heads").iterdir()
    assert load_file(heads)["seed-0/layers.0.weight"].dtype == torch.float32
    assert result.summary["metrics"]["auroc"]["mean"] > 0.5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "there is no data"),
        ({"id": "a.csv"}, "--id and --ood go together"),
        ({"data": ("a.csv",)}, "it must be a .json file of splits"),
        ({"data": ("x.json", "y/x.json")}, "cannot read x.json"),
        ({"id": "a", "ood": "b", "encoders": ("morgen",)}, "did you mean morgan"),
        ({"id": "a", "ood": "b", "losses": ("dpo",)}, "--loss dpo"),
        ({"id": "a", "ood": "b", "baselines": ("knn", "knn")}, "one is named twice"),
        ({"id": "a", "ood": "b", "knobs": {"size": "3"}}, "--knob size: the encoders asked for have no such knob"),
        ({"id": "a", "ood": "b", "fast_path": "fast"}, "--fast-path fast"),
        ({"id": "a", "ood": "b", "lrs": (0.0,)}, "--lr 0: it must be above 0"),
        ({"id": "a", "ood": "b", "epochs": 0}, "--epochs 0"),
        ({"id": "a", "ood": "b", "beta": -1.0}, "--beta -1"),
        ({"id": "a", "ood": "b", "reference": "h.safetensors"}, "it goes with --loss reference"),
        ({"id": "a", "ood": "b", "seeds": ()}, "--seeds : give how many"),
        ({"id": "a", "ood": "b"}, "--id a: there is no such file"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_written(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        train(request(**more), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_unknown_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--optimizer adamm: .*did you mean"):
        train(on_features(tmp_path, optimizer="adamm"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RequestError, match="runs in one process"):
        train(on_features(tmp_path), tmp_path / "run")


def test_a_missing_encoder_package_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "minimol", None)
    with pytest.raises(RequestError, match="encoder minimol: its package cannot be loaded"):
        train(request(data=(str(drugood(tmp_path / "a.json")),), encoders=("minimol",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
