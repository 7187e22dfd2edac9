"""Evaluations on several ranks: real processes on loopback, with torchrun and without.

The module is also the program that each rank runs without torchrun: `python test_ranks.py FOLDER SCENARIO…`.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.errors import BrimError, RequestError
from brim.evaluation.compare import compare_batch_sizes
from brim.evaluation.run import evaluate
from brim.evaluation.scoring import RankFigures, merge_plans, plans_to_keep
from brim.monitor.sampler import MonitorSummary
from brim.profiling.run import ProfileListener, profile
from brim.records import MemoryFigures, Plan
from brim.running.results import ExecutionFigures
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import ProfileRequest
from brim.storage.run_lock import locked_folder

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script by its ranks

from tests.evaluation.evaluation_runs import lines_of, record_of, run, shout, without_sizes, write_words
from tests.monitor.sampling import published_ranks

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

SAMPLES = 40
ENOUGH_SECONDS = 90.0  # ten times what it takes; a rank that waits for ever takes longer

# A metric that is asked once for every sample: rank DOOMED is killed, or fails, in the middle of its shard.
DEEDS = """
import os, signal, time
from brim.metrics.base import Metric

class Deeds(Metric):
    name = "deeds"
    count = 0

    def compare(self, prediction, references, sample):
        time.sleep(0.02)
        self.count += 1
        if self.count == 11 and os.environ.get("DOOMED", "no one") == os.environ.get("RANK"):
            if os.environ.get("FATE") == "raise":
                raise ValueError("an odd sample")
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0
"""


def files_in(folder: Path) -> dict[str, Any]:
    """What every run here evaluates, written once: a request's settings."""
    (folder / "deeds.py").write_text(DEEDS, encoding="utf-8")
    return {
        "model": shout(folder),
        "data": str(write_words(folder / "words.jsonl", SAMPLES)),
        "plugins": (str(folder / "deeds.py"),),
        "metrics": ("exact_match", "deeds"),
        "batch_size": 4,
        "device": "cpu",
        "use_cache": False,
    }


# What each rank does, in this order, in one process: starting one takes longer than all of it.


class SeesRanks(ProfileListener):
    """Reads on rank 0 which processes the run publishes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: list[int] = []

    def started(self, total: int, done: int) -> None:
        self.pids = published_ranks(self.folder) if os.environ["RANK"] == "0" else [os.getpid()]


def whole(folder: Path, settings: dict[str, Any]) -> Any:
    seen = SeesRanks(folder / "whole")
    result = evaluate(EvalRequest(**settings), output=folder / "whole", listener=seen)
    return {"samples": len(result.samples), "pids": seen.pids}


def load_fails(folder: Path, settings: dict[str, Any]) -> Any:
    """Rank 1 has another idea of where the model is."""
    if os.environ["RANK"] == "1":
        settings = settings | {"model": f"py:{folder / 'absent.py'}:shout"}
    return evaluate(EvalRequest(**settings), output=folder / "unloaded")


def data_differs(folder: Path, settings: dict[str, Any]) -> Any:
    if os.environ["RANK"] == "1":
        settings = settings | {"data": str(write_words(folder / "others.jsonl", SAMPLES - 1))}
    return evaluate(EvalRequest(**settings), output=folder / "different")


def in_use(folder: Path, settings: dict[str, Any]) -> Any:
    """Another process has the folder; the fixture `pair` is that process."""
    return evaluate(EvalRequest(**settings), output=folder / "in-use")


def sample_fails(folder: Path, settings: dict[str, Any]) -> Any:
    os.environ |= {"DOOMED": "1", "FATE": "raise"}
    try:
        return evaluate(EvalRequest(**settings), output=folder / "odd")
    finally:
        del os.environ["DOOMED"], os.environ["FATE"]


def resumed(folder: Path, settings: dict[str, Any]) -> Any:
    evaluate(EvalRequest(**settings, resume=True), output=folder / f"resumed-by-{os.environ['WORLD_SIZE']}")


def profiled(folder: Path, settings: dict[str, Any]) -> Any:
    """Two values of a knob, one after the other."""
    request = ProfileRequest(base=EvalRequest(**settings), axes={"suffix": ("", "S")}, latency_samples=0)
    seen = SeesRanks(folder / "profiled")
    document = profile(request, output=folder / "profiled", listener=seen).document
    entries = document["summary"] if os.environ["RANK"] == "0" else []
    points = [[entry["ranks"], entry["num_samples"], entry["accuracy"]] for entry in entries]
    return {"points": points, "pids": seen.pids}


def killed(folder: Path, settings: dict[str, Any]) -> Any:
    """Rank 1 dies without a message, and no launcher stops rank 0."""
    os.environ["DOOMED"] = "1"
    return evaluate(EvalRequest(**settings), output=folder / "killed")


SCENARIOS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    scenario.__name__: scenario
    for scenario in (whole, load_fails, data_differs, in_use, sample_fails, resumed, profiled, killed)
}


def main(folder: Path, names: list[str]) -> None:
    gc.freeze()  # batches that do not fit collect garbage: not through all that is loaded
    found: dict[str, Any] = {}
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    settings |= {name: tuple(settings[name]) for name in ("plugins", "metrics")}
    for name in names:
        started = time.monotonic()
        try:
            found[name] = {"value": SCENARIOS[name](folder, settings)}
        except BrimError as error:
            found[name] = {"error": str(error), "exit_code": error.exit_code}
        found[name]["seconds"] = time.monotonic() - started
        (folder / f"found.{os.environ['RANK']}").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # a group whose peer died cannot be taken down in order


def surroundings() -> dict[str, str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | loopback


def start_ranks(count: int, folder: Path, settings: dict[str, Any], *scenarios: str) -> list[dict[str, Any]]:
    """What each rank found, without torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, __file__, str(folder), *scenarios]
    ranks = [
        subprocess.Popen(
            command, env=surroundings() | world | {"RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE
        )
        for r in range(count)
    ]
    try:
        errors = [rank.communicate(timeout=ENOUGH_SECONDS)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    found = [folder / f"found.{r}" for r in range(count)]
    assert all(file.exists() for file in found), errors
    return [json.loads(file.read_text(encoding="utf-8")) for file in found]


def torchrun(*arguments: str, options: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node=2 -m brim eval …`, by its module, as it is found in every environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    return subprocess.run(
        [*command, "-m", "brim", "eval", *arguments],
        env=surroundings() | variables,
        capture_output=True,
        text=True,
        timeout=ENOUGH_SECONDS,
    )


def flags(settings: dict[str, Any]) -> list[str]:
    return [
        "-m", settings["model"], "-d", settings["data"], "--plugin", settings["plugins"][0],
        "--metrics", ",".join(settings["metrics"]), "-b", "4", "--device", "cpu", "--no-cache",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return files_in(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def alone(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that every other must equal."""
    output = tmp_path_factory.mktemp("alone") / "run"
    evaluate(EvalRequest(**settings), output=output)
    return output


@pytest.fixture(scope="module")
def stopped(
    settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run under torchrun of which rank 1 was killed half-way, and how it ended."""
    folder = tmp_path_factory.mktemp("torchrun")
    logged = ("--redirects", "1:2", "--log-dir", str(folder / "logs"))
    ended = torchrun(*flags(settings), "-o", str(folder / "run"), options=logged, DOOMED="1")
    return folder / "run", ended


@pytest.fixture(scope="module")
def pair(
    settings: dict[str, Any],
    stopped: tuple[Path, subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pair")
    shutil.copytree(stopped[0], folder / "resumed-by-2")
    with locked_folder(folder / "in-use", command="eval"):
        return folder, start_ranks(2, folder, settings, *SCENARIOS)


def assert_complete(folder: Path, alone: Path) -> dict[str, Any]:
    """Every sample once, in the data's order, with the answers and metrics of a process alone; gives the summary."""
    assert without_sizes(lines_of(folder)) == without_sizes(lines_of(alone))
    assert not list(folder.glob("*.rank-*.json*")), "the ranks' own files have been merged"
    summary: dict[str, Any] = record_of(folder)["summary"]
    assert summary["metrics"] == record_of(alone)["summary"]["metrics"]
    assert summary["num_samples"] == SAMPLES
    return summary


def test_two_ranks_give_one_record_equal_to_that_of_a_process_alone(
    pair: tuple[Path, list[dict[str, Any]]], alone: Path
) -> None:
    folder, found = pair
    assert [rank["whole"]["value"]["samples"] for rank in found] == [SAMPLES, 0]
    summary = assert_complete(folder / "whole", alone)
    assert summary["ranks"] == 2
    assert summary["num_resumed"] == 0, "as many were evaluated as there are: none by two ranks"
    assert summary["batch_size_used"] == 4
    assert summary["throughput"][-1][1] == SAMPLES
    assert summary["batch_sizes"] == {"smallest": 4, "median": 4, "largest": 4, "per_rank": [4, 4]}
    assert record_of(folder / "whole")["plan"]["batch_sizes_per_rank"] == [4, 4]
    assert {path.name for path in (folder / "whole").glob("monitor*")} == {"monitor.csv", "monitor.rank-1.csv"}


def test_two_ranks_profile_with_the_accuracy_of_one_process(
    pair: tuple[Path, list[dict[str, Any]]], alone: Path
) -> None:
    accuracy = record_of(alone)["summary"]["metrics"]["exact_match"]["mean"]
    assert pair[1][0]["profiled"]["value"]["points"] == [[2, SAMPLES, accuracy], [2, SAMPLES, 0.0]]


@pytest.mark.parametrize("scenario", ["whole", "profiled"])
def test_the_processes_of_all_ranks_are_published(scenario: str, pair: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (rank[scenario]["value"]["pids"] for rank in pair[1])
    assert len(set(first)) == 2
    assert first[1:] == second


def test_a_rank_that_cannot_load_its_model_stops_all_with_its_error(
    pair: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, found = pair
    errors = [rank["load_fails"] for rank in found]
    assert {error["exit_code"] for error in errors} == {RequestError.exit_code}
    assert len({error["error"] for error in errors}) == 1
    assert re.match(r"rank 1: .*absent\.py", errors[0]["error"])
    assert not (folder / "unloaded").exists(), "nothing was written for it"


def test_ranks_that_read_different_data_are_refused(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    errors = {rank["data_differs"]["error"] for rank in pair[1]}
    assert errors == {"rank 1 does not have the same data as rank 0: give all ranks the same files"}


def test_ranks_are_refused_together_in_a_folder_that_is_in_use(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    errors = [rank["in_use"] for rank in pair[1]]
    assert {error["exit_code"] for error in errors} == {RequestError.exit_code}
    assert len({error["error"] for error in errors}) == 1
    assert f"in use by process {os.getpid()} on " in errors[0]["error"]


def test_a_rank_that_fails_half_way_stops_all_and_what_is_finished_is_kept(
    pair: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, found = pair
    errors = [rank["sample_fails"] for rank in found]
    assert len({(error["error"], error["exit_code"]) for error in errors}) == 1
    assert re.fullmatch(r"rank 1: metric deeds: sample w\d+ raised ValueError: an odd sample", errors[0]["error"])
    kept = (folder / "odd" / "samples.rank-1.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(kept) == 8, "the two batches before the one that failed"


def test_a_dead_rank_without_a_launcher_is_named(
    pair: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, found = pair
    assert "killed" not in found[1], "rank 1 is dead"
    error = found[0]["killed"]
    assert re.match(r"rank 1: its process \d+ has ended without a message \(see its own output\)", error["error"])
    assert error["error"].endswith(f"What is finished is kept: continue with resume=True, output='{folder / 'killed'}'")
    assert error["exit_code"] == 4
    assert error["seconds"] < 10
    assert len((folder / "killed" / "samples.rank-1.jsonl").read_text(encoding="utf-8").splitlines()) == 8


def test_torchrun_stops_other_ranks_and_names_the_dead_one(
    stopped: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, ended = stopped
    assert ended.returncode != 0
    told = re.findall(r"^brim: (.*)$", ended.stderr, flags=re.MULTILINE)
    assert len(told) == 1, ended.stderr
    found = re.match(r"rank 1: its process \d+ .*\(its log: ([^)]*)\)", told[0])
    assert found is not None, told
    assert Path(found[1]).name == "stderr.log"
    assert Path(found[1]).exists()
    assert f"--resume -o {folder}" in ended.stderr
    assert re.search(r"rank +: 0 .*\n.*exitcode +: 4 ", ended.stderr), "torchrun's report has rank 0's own exit code"
    assert re.search(r"rank +: 1 .*\n.*exitcode +: -9 ", ended.stderr)
    assert len((folder / "samples.rank-1.jsonl").read_text(encoding="utf-8").splitlines()) == 8
    assert not (folder / "run.json").exists()


def test_the_same_number_of_ranks_finishes_what_is_left(
    pair: tuple[Path, list[dict[str, Any]]],
    stopped: tuple[Path, subprocess.CompletedProcess[str]],
    alone: Path,
) -> None:
    kept = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in stopped[0].glob("samples*.jsonl"))
    summary = assert_complete(pair[0] / "resumed-by-2", alone)
    assert 8 <= kept < SAMPLES
    assert summary["num_resumed"] == kept


def test_one_process_finishes_what_is_left(
    settings: dict[str, Any], stopped: tuple[Path, subprocess.CompletedProcess[str]], alone: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped[0], tmp_path / "run")
    evaluate(EvalRequest(**settings, resume=True), output=tmp_path / "run")
    assert assert_complete(tmp_path / "run", alone)["batch_sizes"]["per_rank"] is None


@pytest.mark.slow  # one process alone finishes it in the test above: another number of ranks than there was
def test_three_ranks_finish_what_is_left(
    settings: dict[str, Any], stopped: tuple[Path, subprocess.CompletedProcess[str]], alone: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped[0], tmp_path / "resumed-by-3")
    start_ranks(3, tmp_path, settings, "resumed")
    summary = assert_complete(tmp_path / "resumed-by-3", alone)
    assert summary["ranks"] == len(summary["batch_sizes"]["per_rank"]) == 3


def test_torchrun_gives_one_record_and_prints_once(settings: dict[str, Any], alone: Path, tmp_path: Path) -> None:
    ended = torchrun(*flags(settings), "-o", str(tmp_path / "run"), "--json", "--logger", "tensorboard")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == record_of(tmp_path / "run")
    writers = {path.name.split(".")[-2] for path in (tmp_path / "run" / "tensorboard" / "run").glob("events.*")}
    assert len(writers) == 1, "rank 0 alone logs; the name of an event file has its process"
    assert assert_complete(tmp_path / "run", alone)["ranks"] == 2


@pytest.mark.slow  # ranks as above, with a model for which each of them loads transformers
def test_torchrun_gives_the_answers_of_a_language_model_in_one_process(
    language_model: Path, questions: Path, tmp_path: Path
) -> None:
    expected = run(language_model, questions, tmp_path / "alone", max_new_tokens=6, batch_size=3)
    arguments = ("-m", str(language_model), "-d", str(questions), "--max-tokens", "6", "--device", "cpu", "--no-cache")
    ended = torchrun(*arguments, "-b", "3", "-o", str(tmp_path / "run"), "--json")
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document == record_of(tmp_path / "run")
    assert document["summary"]["ranks"] == 2
    assert document["summary"]["metrics"] == expected.metrics
    assert without_sizes(lines_of(tmp_path / "run")) == without_sizes(expected.samples)


# Merging what the ranks counted.


def outcome(counts: list[int], *, card: str = "a", size: int = 7) -> RankFigures:
    plan = Plan(
        unit="tokens", size=size, batch_size_max=9, batch_size_max_estimate=None, objective="fastest", reason="found",
        cached=False, device=card, memory=MemoryFigures(limit_bytes=5, headroom_bytes=None), probes=(),
        fingerprint=card,
    )  # fmt: skip
    figures = ExecutionFigures(
        items=sum(counts), batches=len(counts), batch_counts=counts, seconds=0.5, alloc_retries=3
    )
    monitor = MonitorSummary(gpu_utilisation_mean=0.5, throttle_reasons=("hot",), samples=3)
    curve = ((0.5, 4), (1.5, sum(counts)))
    return RankFigures(figures=figures, seconds=1.5, plan=plan, monitor=monitor, throughput=curve, notes=("a note",))


def test_figures_reach_another_rank_unchanged() -> None:
    for before in (outcome([4, 4, 2]), RankFigures(figures=ExecutionFigures(), seconds=0.0)):
        assert RankFigures.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_the_plan_holds_the_size_of_every_rank() -> None:
    ranks = [outcome([4], size=1), outcome([4, 4], size=2), outcome([4, 4], size=3), outcome([2, 2], card="b", size=4)]
    plan = merge_plans(ranks)
    assert plan is not None
    assert (plan.size, plan.batch_sizes_per_rank) == (1, (1, 2, 3, 4))
    assert plans_to_keep(ranks) == [1, 3], "a single batch is no finding, and no file is written by two ranks"
    assert merge_plans(ranks[:1]) == ranks[0].plan


def test_sizes_are_not_compared_on_several_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(brim.RequestError, match="without torchrun"):
        compare_batch_sizes(EvalRequest(model="py:x:y", data="z"), [1, 2])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
