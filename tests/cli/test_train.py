"""`brim train`: what people type, what they read, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import saved_models

Brim = Callable[..., Any]

CONFIG = """\
model:
  type: mlp
  params: {{hidden: [8]}}
data:
  root: {root}
hp:
  epochs: 2
  effective_batch: 16
  learning_rate: 1e-2
training:
  device: cpu
"""


@pytest.fixture
def features(tmp_path: Path) -> Path:
    draw = numpy.random.default_rng(0)
    rows = draw.standard_normal((80, 4)).astype("float32")
    numpy.savez(tmp_path / "features.npz", features=rows, labels=(rows[:, 0] > 0).astype(int))
    return tmp_path / "features.npz"


@pytest.fixture
def config(tmp_path: Path, features: Path) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(root=features), encoding="utf-8")
    return str(file)


def test_a_file_is_trained_and_the_figures_shown(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim("train", config, "-o", str(tmp_path / "run"))
    assert result.code == 0
    assert "top1" in result.out
    assert "effective batch" in result.out
    assert f"in {tmp_path / 'run'}" in result.out
    assert "epoch 2: loss" in result.err
    assert "72 samples of features.npz, 8 held out" in result.err
    assert max(map(len, result.out.partition("\nin ")[0].splitlines())) <= 80
    assert json.loads((tmp_path / "run" / "run.json").read_text())["kind"] == "train"


def test_one_is_counted_as_one(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim("train", config, "--effective-batch", "72", "-o", str(tmp_path / "run"))
    assert "1 step an epoch" in result.err
    result = brim("train", config, "data.limit=1", "-o", str(tmp_path / "other"))
    assert "1 row is too few" in result.err


def test_json_is_one_document_on_standard_output(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim("train", config, "--json", "-o", str(tmp_path / "run"))
    record = json.loads(result.out)
    assert record["schema"] == "brim.run/1"
    assert record["summary"]["effective_batch_size"] == 16
    assert record["request"]["command"] == "train"


def test_flags_and_overrides_change_the_file(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim(
        "train", config, "hp.epochs=1", "optimizer.params.weight_decay=0.1", "-b", "4", "--effective-batch", "32",
        "--lr-scale", "sqrt", "--optimizer", "sgd", "--eval_batch_size", "3", "--json", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    assert result.code == 0
    record = json.loads(result.out)
    settings = record["request"]["settings"]
    assert settings["hp"]["epochs"] == 1
    assert settings["hp"]["batch_size"] == 4
    assert settings["optimizer"] == {"name": "sgd", "params": {"weight_decay": 0.1}}
    assert record["summary"]["micro_batch_size"] == 4
    assert record["summary"]["accumulation_steps"] == 8
    assert record["summary"]["eval_batch_size"] == 3
    assert record["summary"]["learning_rate"]["factor"] == pytest.approx(8**0.5)  # 32 over the -b of 4


def test_flags_may_come_before_the_file(brim: Brim, config: str, tmp_path: Path) -> None:
    assert brim("train", "--effective-batch", "8", "-o", str(tmp_path / "run"), config, "hp.epochs=1").code == 0


def test_help_shows_the_flags_of_a_file_and_names_the_other_command(brim: Brim) -> None:
    for arguments in (["train", "--help"], ["train", "-h"], ["train"]):
        result = brim(*arguments)
        assert result.code == 0
        assert "--effective-batch" in result.out
        assert "CONFIG" in result.out
        assert max(map(len, result.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.yaml"], "there is no such file"),
        (["{config}", "hp.epoch=3"], "did you mean hp.epochs"),
        (["{config}", "optimizer.name=adamm"], "did you mean adam"),
        (["{config}", "scheduler.name=cosin"], "did you mean cosine"),
        (["{config}", "optimizer.params.beta=1"], "did you mean betas"),
        (["{config}", "model.type=resnet5000"], "resnet5000"),
        (["{config}", "data.root=absent.npz"], "there is no such file"),
        (["{config}", "training.monitor=top3"], "did you mean top1"),
        (["{config}", "hp.epochs=2", "hp.epochs=3"], "given twice"),
        (["{config}", "hp.batch_size=4", "-b", "8"], "--batch-size sets it too"),
        (["{config}", "-b", "none"], "auto or a whole number"),
        (["{config}", "--no-auto-batch-size"], "needs a size"),
        (["{config}", "--fail-on-oom", "-b", "4"], "goes with --no-auto-batch-size"),
        (["{config}", "--resume"], "name the run"),
        (["{config}", "--plan", "nowhere"], "there is no run.json in it"),
        (["{config}", "--compare-batch", "a,b"], "give whole numbers"),
        (["{config}", "--memory-limit", "lots"], "24GiB"),
        (["{config}", "--device", "cuda:99"], "there is no such device"),
        (["{config}", "hp.seed=18446744073709551616"], "from 0 to 18446744073709551615"),
        (["{config}", "hp.seed=1e20"], "from 0 to 18446744073709551615"),
        (["{config}", "hp.learning_rate=1" + 400 * "0"], "it must be a number above 0"),
        (["{config}", "optimizer.name=lbfgs"], "evaluates the loss several times"),
        (["{config}", "optimizer.name=sparseadam"], "cannot make a step"),
        (["{config}", "optimizer.params.betas=[0.9]"], "adamw does not take"),
        (["{config}", "optimizer.params.differentiable=true"], "cannot make a step"),
        (["{config}", "scheduler.name=onecycle", "scheduler.params.total_steps=1"], "ends after 1 step"),
        (["{config}", "scheduler.warmup_epochs=1e308"], "give fewer epochs"),
        (["{config}", "model.params.hidden=[99999999999999]"], "give a list of widths"),
        (["{config}", "model.params.hidden=[true]"], "give a list of widths"),
        (["{config}", "model.params.standardise=x"], "true or false"),
        (["{config}", "model.num_classes=99999999999999"], "from 1 to 2147483647"),
    ],
)
def test_a_wrong_request_is_exit_2_with_the_reason_and_writes_nothing(
    brim: Brim, config: str, tmp_path: Path, arguments: list[str], words: str
) -> None:
    folder = [] if "--resume" in arguments else ["-o", str(tmp_path / "run")]
    result = brim("train", *(argument.format(config=config) for argument in arguments), *folder)
    assert result.code == 2
    assert words in result.err.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_a_sweeps_file_is_sent_to_brim_sweep(brim: Brim, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("grid_search:\n  grid:\n    model.type: [r3d_18]\n", encoding="utf-8")
    result = brim("train", str(file))
    assert result.code == 2
    assert "brim sweep" in result.err


def test_a_mistake_in_the_file_is_reported_with_its_line(brim: Brim, config: str) -> None:
    file = Path(config)
    file.write_text(file.read_text().replace("epochs: 2", "epochs: 0"), encoding="utf-8")
    result = brim("train", config)
    assert result.code == 2
    assert f"{config}:7" in result.err
    assert "hp.epochs" in result.err


FACTORY = """
from torch import nn

def net(num_classes: int = 2, width: int = 8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, num_classes))

def rows():
    import torch
    return lambda split: [(torch.ones(4), item % 2) for item in range(12)] if split == "train" else None
"""


@pytest.mark.parametrize("model", ["mlp", "py"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_of_a_file_are_where_training_starts(
    brim: Brim, config: str, tmp_path: Path, model: str, suffix: str
) -> None:
    (tmp_path / "nets.py").write_text(FACTORY)
    Path(config).write_text(Path(config).read_text().replace("  params: {hidden: [8]}\n", ""))
    of_factory = [f"model.type=py:{tmp_path}/nets.py:net", f"data.type=py:{tmp_path}/nets.py:rows"]
    changes = ["hp.epochs=1", *(of_factory if model == "py" else [])]
    assert brim("train", config, *changes, "-o", str(tmp_path / "first")).code == 0
    trained = load_file(tmp_path / "first" / "weights-last.safetensors")
    file = tmp_path / f"start{suffix}"
    torch.save(trained, file) if suffix == ".pt" else save_file(trained, file)
    still = [*changes, f"model.weights={file}", "hp.seed=5", "hp.learning_rate=1e-30", "optimizer.name=sgd"]
    assert brim("train", config, *still, "-o", str(tmp_path / "one")).code == 0
    assert brim("train", config, *still, "--seeds", "2", "-o", str(tmp_path / "several")).code == 0
    for folder in (tmp_path / "one", tmp_path / "several" / "seed-5", tmp_path / "several" / "seed-6"):
        reached = load_file(folder / "weights-last.safetensors")
        assert all(torch.equal(reached[name], value) for name, value in trained.items())
        assert reached.keys() == trained.keys()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("absent.safetensors", "there is no such file"),
        ("auto", "no published weights"),
        ("{folder}/other.safetensors", "2 missing: layers.2.weight, layers.2.bias; 1 unexpected: head.weight"),
        ("{folder}/broken.pt", "cannot be read as weights"),
        ("{folder}/list.pt", "holds no tensors by name"),
    ],
)
def test_weights_that_a_model_cannot_have_are_exit_2(
    brim: Brim, config: str, tmp_path: Path, weights: str, words: str
) -> None:
    other = {"mean": 4, "deviation": 4, "layers.0.weight": (8, 4), "layers.0.bias": 8, "head.weight": 2}
    save_file({name: torch.zeros(shape) for name, shape in other.items()}, tmp_path / "other.safetensors")
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    file = Path(config)
    given = weights.format(folder=tmp_path)
    file.write_text(file.read_text().replace("type: mlp", f"type: mlp\n  weights: {given}"), encoding="utf-8")
    result = brim("train", config, "-o", str(tmp_path / "run"))
    assert result.code == 2
    assert words in result.err.replace("\n", " ")
    assert "model.weights" in result.err
    assert (f"{config}:3" in result.err) == (weights in ("absent.safetensors", "auto"))
    assert not (tmp_path / "run").exists()


def test_features_and_labels_of_different_length_are_exit_2(brim: Brim, config: str, features: Path) -> None:
    numpy.savez(features, features=numpy.ones((5, 4)), labels=numpy.zeros(6))
    result = brim("train", config)
    assert result.code == 2
    assert "5 rows of features and 6 labels" in result.err


NEGATIVE = """
import torch
from torch import nn

def net(num_classes: int = 2):
    return nn.Linear(4, 2)

def rows(label: int = -1, validation: bool = False):
    good = [(torch.ones(4), item % 2) for item in range(12)]
    bad = [*good, (torch.ones(4), label)]
    return lambda split: bad if (split == "validation") == validation else good
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.root={folder}/rows.npz"], "the label -1 of sample 1 is no class"),
        (["data.val_root={folder}/rows.npz"], "the label -1 of sample 1 is no class"),
        (["{py}"], "the label -1 of sample 12 is no class"),
        (["{py}", "data.params.label=-100", "model.num_classes=2"], "the label -100 is no class"),
        (["{py}", "data.params.label=2", "data.params.validation=true"], "sample 12: the label 2 is no class"),
        (["{py}", "data.params.validation=true"], "sample 12: the label -1 is no class"),
    ],
)
def test_a_label_that_is_no_class_is_exit_2_with_its_sample(
    brim: Brim, config: str, tmp_path: Path, changes: list[str], words: str
) -> None:
    (tmp_path / "nets.py").write_text(NEGATIVE)
    numpy.savez(tmp_path / "rows.npz", features=numpy.ones((6, 4), "float32"), labels=numpy.array([0, -1, 1, 0, 1, 1]))
    Path(config).write_text(Path(config).read_text().replace("  params: {hidden: [8]}\n", ""))
    given = []
    for change in changes:
        py = [f"model.type=py:{tmp_path}/nets.py:net", f"data.type=py:{tmp_path}/nets.py:rows"]
        given += py if change == "{py}" else [change.format(folder=tmp_path)]
    result = brim("train", config, *given, "-o", str(tmp_path / "run"))
    assert result.code == 2
    assert words in " ".join(result.err.split())


def test_a_negative_label_is_exit_2_and_proposes_only_flags_of_train(brim: Brim, config: str, tmp_path: Path) -> None:
    folder = saved_models.save_text_classifier(tmp_path / "bert", ("no", "yes"))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "w1", "label": label}) + "\n" for label in (0, 1, -1)))
    Path(config).write_text(Path(config).read_text().replace("  params: {hidden: [8]}\n", ""))
    trained = brim("train", config, f"model.type=hf:{folder}", f"data.root={file}", "-o", str(tmp_path / "run"))
    judged = brim("eval", "-m", str(folder), "-d", str(file), "--device", "cpu", "-o", str(tmp_path / "eval"))
    for result in (trained, judged):
        assert result.code == 2
        assert "line 3: the label '-1'" in " ".join(result.err.split())
    assert "--skip-bad" not in trained.err
    assert "--skip-bad" in judged.err


def test_nothing_fits_is_exit_3(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim("train", config, "--memory-limit", "1000", "-o", str(tmp_path / "run"))
    assert result.code == 3
    assert "What may help" in result.err


@pytest.mark.parametrize(
    ("changes", "proposed", "not_proposed"),
    [
        (
            ["--memory-limit", "400"],
            ["training.dtype=bfloat16", "model.params.hidden"],
            ["gradient_checkpointing", "--knob"],
        ),
        ([], ["optimizer.name=sgd"], ["training.dtype", "gradient_checkpointing"]),
        (["model.params.hidden=[8,8,8]"], ["training.gradient_checkpointing=true"], []),
        (["model.params.hidden=[8,8,8]", "--gradient-checkpointing"], [], ["gradient_checkpointing"]),
        (["--dtype", "bfloat16"], [], ["training.dtype"]),
    ],
)
def test_remedies_are_those_that_the_command_and_the_model_take(
    brim: Brim, config: str, tmp_path: Path, changes: list[str], proposed: list[str], not_proposed: list[str]
) -> None:
    result = brim("train", config, "--memory-limit", "1000", *changes, "-o", str(tmp_path / "run"))
    assert result.code == 3
    remedies = result.err.partition("What may help:")[2]
    assert "another device" in remedies
    assert all(words in remedies for words in proposed)
    assert not any(words in remedies for words in not_proposed)


def test_weights_that_the_host_cannot_hold_are_exit_3(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim("train", config, "model.params.hidden=[2000000000,2000000000]", "-o", str(tmp_path / "run"))
    assert result.code == 3
    assert "the weights alone take" in result.err
    assert not (tmp_path / "run").exists()


def test_the_largest_seed_can_be_trained(brim: Brim, config: str, tmp_path: Path) -> None:
    assert brim("train", config, "hp.seed=18446744073709551615", "-o", str(tmp_path / "run")).code == 0


def test_a_loss_that_is_no_number_is_exit_1(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim(
        "train", config, "hp.learning_rate=1e30", "optimizer.name=sgd", "hp.epochs=20", "-o", str(tmp_path / "run")
    )
    assert result.code == 1
    assert "the loss is" in result.err
    assert "the last good checkpoint is" in result.err or "there is no checkpoint yet" in result.err
    assert json.loads((tmp_path / "run" / "bad_batch.json").read_text())["ids"]


@pytest.mark.usefixtures("quick_rounds")
def test_compare_batch_shows_each_size_side_by_side(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim("train", config, "--compare-batch", "8,32,4096", "-o", str(tmp_path / "compared"))
    assert result.code == 0
    header, *rows = result.out.splitlines()
    for word in ("batch", "samples/s", "speed-up", "95 %", "epoch", "in total", "loss"):
        assert word in header
    assert [row.split()[0] for row in rows[:3]] == ["8", "32", "4096"]
    assert "1.00×" in rows[0]
    memory = next(row for row in rows if "forecast" in row)
    assert "measured" in memory
    assert "OOM risk" in memory
    assert "more than the 72 training samples" in result.err.replace("\n", " ")
    assert max(len(line) for line in rows[:8] if not line.startswith("report")) <= 80
    record = json.loads((tmp_path / "compared" / "run.json").read_text())
    assert (record["kind"], record["request"]["compare_batch"]) == ("comparison", [8, 32, 4096])
    assert [row["rounds"] for row in record["summary"]["rows"]] == [3, 3, 3]
    assert (tmp_path / "compared" / "report.html").exists()


@pytest.mark.usefixtures("quick_rounds")
def test_compare_batch_as_json(brim: Brim, config: str, tmp_path: Path) -> None:
    arguments = ("train", config, "--compare-batch", "8,16", "-o", str(tmp_path / "compared"), "--json")
    document = json.loads(brim(*arguments).out)
    assert document["schema"] == "brim.compare/1"
    first, second = document["rows"]
    fields = (
        "forecast_peak_bytes", "peak_reserved_bytes", "headroom_fraction", "gpu_utilisation_mean",
        "samples_per_second", "speed_up", "epoch_seconds", "total_seconds", "final_loss", "risk", "oom_events",
    )  # fmt: skip
    assert set(fields) <= set(first)
    assert first["trial_samples"] == pytest.approx(second["trial_samples"], rel=0.2)  # losses after the same samples
    assert first["peak_reserved_bytes"] > 0
    assert first["risk"] == "low"


def test_resume_continues_from_the_checkpoint(brim: Brim, config: str, tmp_path: Path) -> None:
    assert brim("train", config, "hp.epochs=1", "-o", str(tmp_path / "run")).code == 0
    again = brim("train", config, "-o", str(tmp_path / "run"))
    assert again.code == 2
    assert "continue it with --resume" in again.err
    resumed = brim("train", config, "--resume", "-o", str(tmp_path / "run"))
    assert resumed.code == 0
    assert "resumed after step 5" in resumed.err


def test_ctrl_c_keeps_a_checkpoint_and_says_how_to_resume(config: str, tmp_path: Path) -> None:
    """In a process of its own, as from a shell."""
    command = [sys.executable, "-m", "brim", "train", config, "hp.epochs=100000", "-o", str(tmp_path / "run")]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain_environment())
    steps = tmp_path / "run" / "steps.jsonl"
    deadline = time.monotonic() + 120
    while not (steps.exists() and steps.stat().st_size) and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 130, errors
    assert "stopping after this step" in errors
    assert f"--resume -o {tmp_path / 'run'}" in errors.replace("\n", " ")
    assert json.loads((tmp_path / "run" / "checkpoint.json").read_text())["step"] > 0


def plain_environment() -> dict[str, Any]:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def test_several_seeds_end_with_their_spread_the_path_and_why(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim("train", config, "--seeds", "3", "--fast-path", "stacked", "-o", str(tmp_path / "run"))
    assert result.code == 0
    lines = result.out.splitlines()
    assert any(line.startswith("top1 ") and " ± " in line and line.endswith("over 3 seeds") for line in lines)
    assert "stacked ×3: asked for" in lines
    assert f"in {tmp_path / 'run'}" in lines
    assert max(map(len, lines[: lines.index(f"in {tmp_path / 'run'}")])) <= 80
    assert [line.split(":")[0] for line in result.err.splitlines() if line.startswith("seed-")] == [
        "seed-0", "seed-1", "seed-2",
    ]  # fmt: skip
    assert (tmp_path / "run" / "report.html").is_file()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["fast_path"] == "stacked"


def test_seeds_and_rates_can_be_listed_and_finished_ones_are_kept(brim: Brim, config: str, tmp_path: Path) -> None:
    folder = ["-o", str(tmp_path / "run")]
    rates = ["--seeds", "3,5", "--learning-rates", "1e-2,1e-3"]
    result = brim("train", config, *rates, *folder, "--json")
    assert result.code == 0
    summary = json.loads(result.out)["summary"]
    assert summary["seeds"] == [3, 5]
    assert [one["learning_rate"] for one in summary["learning_rates"]] == [0.01, 0.001]
    assert len(summary["runs"]) == 4
    again = brim("train", config, *rates, *folder, "--resume")
    assert again.code == 0
    assert "resumed: 4 of 4 runs were done already" in again.err
    assert "at learning rate 0.0" in again.out


def test_seeds_that_are_trained_one_by_one_are_reported_as_such(brim: Brim, config: str, tmp_path: Path) -> None:
    result = brim("train", config, "model.params.dropout=0.5", "--seeds", "2", "-o", str(tmp_path / "run"))
    assert result.code == 0
    assert "draws noise" in result.err.replace("\n", " ")
    assert "one after the other: the model draws noise" in result.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "give how many"),
        (["--seeds", "x"], "write numbers"),
        (["--seeds", ","], "give how many"),
        (["--seeds", "3,3"], "give each once"),
        (["--seeds", "2,18446744073709551616"], "from 0 to 18446744073709551615"),
        (["--seeds", "18446744073709551616"], "100,000 at most"),
        (["--seeds", "2", "hp.seed=18446744073709551615"], "from 0 to 18446744073709551615"),
        (["--seeds", "2", "optimizer.name=sparseadam"], "cannot make a step"),
        (["--learning-rates", "1e-3,fast"], "write numbers"),
        (["--learning-rates", "-1"], "above 0"),
        (["--fast-path", "stacked"], "goes with --seeds"),
        (["--seeds", "2", "--fast-path", "quick"], "it must be one of auto"),
        (["--seeds", "2", "--compare-batch", "8,16"], "for one seed"),
        (["--seeds", "2", "training.monitor=top3"], "did you mean top1"),
        (["--seeds", "2", "data.root=absent.npz"], "there is no such file"),
    ],
)
def test_wrong_seeds_are_exit_2_and_write_nothing(
    brim: Brim, config: str, tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = brim("train", config, *arguments, "-o", str(tmp_path / "run"))
    assert result.code == 2
    assert words in result.err.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_the_help_describes_train_and_dpo(brim: Brim) -> None:
    listed = next(line for line in brim("--help").out.splitlines() if line.startswith("│ train "))
    assert "Train the model that a YAML file describes" in listed
    own = brim("train", "--help").out
    assert "─ Seeds " in own
    assert "--fast-path" in own
    preference = brim("train", "dpo", "--help").out
    assert "--ood" in preference
    assert "Train detectors" in preference
    assert "CONFIG" not in preference


def test_ctrl_c_in_a_stack_says_how_to_resume_and_resuming_works(brim: Brim, config: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "brim", "train", config, "hp.epochs=100000", "--seeds", "3", "--fast-path", "stacked",
        "-o", str(tmp_path / "run"),
    ]  # fmt: skip
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "monitor.csv").exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "0 of 3 runs are done and kept" in err
    assert "--resume -o" in err
    again = brim("train", config, "--seeds", "3", "--fast-path", "stacked", "--resume", "-o", str(tmp_path / "run"))
    assert again.code == 0
    assert "over 3 seeds" in again.out
