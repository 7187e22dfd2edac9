"""`python -m benchmarks`: what a failure, a time-out and Ctrl-C leave behind, and what the two files say."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from benchmarks import __main__ as entry
from benchmarks import machine_page, pool
from benchmarks.suite import Benchmark
from benchmarks.suite_run import Run, run_benchmark, timed_out
from benchmarks.tables import Ratio, measured_ratios, read_tables

MACHINE = {
    "gpu": None, "gpus": 0, "driver": None, "cuda": None, "processor": "Test CPU", "cores": 2, "memory_gib": 8.0,
    "system": "Linux x86_64", "python": "3.11.7", "packages": {"torch": "2.15.0"}, "brim": "0.1.0",
}  # fmt: skip
FAKES = {
    "fake_fine": """
print("| way | rate | seconds |\\n|---|---|---|\\n| ours | 1,200 | 2.0 |\\n| theirs | 400 | 4.0 |")
""",
    "fake_broken": """
print("| way | rate |\\n|---|---|\\n| ours | 7 |")
raise ValueError("no such thing")
""",
    "fake_slow": """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("| way | rate |\\n|---|---|\\n| ours | 7 |", flush=True)
time.sleep(60)
""",
}
TIMES = Ratio(what="ours over theirs", column="rate", of={"way": "ours"}, over={"way": "theirs"}, better="more")


def benchmark(module: str, **given: Any) -> Benchmark:
    return Benchmark(
        name=module.removeprefix("fake_").split()[0], table="find.md", answers="what is asked", cpu=module,
        cpu_seconds=0.1, full=(module,), **given
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Modules of the tests are found beside those of the repository: `benchmarks` has no `__init__.py`."""
    folder = tmp_path / "modules" / "benchmarks"
    folder.mkdir(parents=True)
    for name, source in FAKES.items():
        (folder / f"{name}.py").write_text(source)
    return Run(mode="cpu", out=tmp_path / "out", places={}, environment={"PYTHONPATH": str(folder.parent)})


@pytest.fixture
def suite(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Benchmark, ...]:
    """A suite of three, on a machine that is not asked."""
    three = (
        benchmark("fake_fine", ratios=(TIMES,), peers=("trl",)),
        benchmark("fake_broken"),
        Benchmark(name="card", table="eval.md", answers="what a card does", card="fake_fine", full=("fake_fine",)),
    )
    monkeypatch.setattr(entry, "SUITE", three)
    monkeypatch.setattr(entry, "_machine", lambda: dict(MACHINE))
    monkeypatch.setattr(entry, "installed", lambda: dict.fromkeys(entry.PEERS, "1.0") | {"trl": None})
    monkeypatch.setattr(entry, "ONE_THREAD", run.environment)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return three


def ends(pid: int) -> bool:
    """Whether a process ends within seconds: what was killed may take a moment, or wait for its parent as a zombie."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "test-cpu-2-cores.json").read_text())
    return found


def test_tables_are_read_with_notes_and_columns_that_come_again() -> None:
    lines = ["words", "| a | error | error |", "|---|---|---|", "| x | 1 | 2 |", "| y | 3 | 4 | it failed", "",
             "| b |", "|---|", "| `p\\|q` |"]  # fmt: skip
    first, second = read_tables("\n".join(lines))
    assert first.columns == ("a", "error", "error 2")
    assert first.rows[1] == {"a": "y", "error": "3", "error 2": "4", "note": "it failed"}
    assert second.rows == ({"b": "`p\\|q`"},)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Ratio(what="", column="rate", of={"way": "ours"}, over={"way": "theirs"}, by="case"), (0.5, 3.0)),
        (Ratio(what="", column="rate", of={"way": "ours"}, over_column="seconds"), (50, 300)),
        (Ratio(what="", column="of best", of={"way": "ours"}), (0.98, 1.02)),
        (Ratio(what="", column="of best", of={"way": "theirs"}), (0.9, 0.9)),
    ],
)
def test_ratios_pair_rows_of_the_same_case(ratio: Ratio, expected: tuple[float, float]) -> None:
    table = (
        "| case | way | rate | seconds | of best |\n|---|---|---|---|---|\n"
        "| a | ours | **1,200** | 4 s | 0.99 to 1.02 |\n| a | theirs | 400 | 4 | 0.8 → 0.9 (0.1 to 2) |\n"
        "| b | ours | 100 | 2 | 0.98 |\n| b | theirs | 200 | 2 | — |\n| c | ours | 5 | — | — |\n"
    )
    (found,) = measured_ratios([ratio], read_tables(table))
    assert (found["low"], found["high"]) == pytest.approx(expected)


def test_a_ratio_without_rows_is_left_out() -> None:
    assert measured_ratios([TIMES], read_tables("| way | rate |\n|---|---|\n| ours | 3 |")) == []


def test_a_failure_keeps_what_was_printed_and_says_why(run: Run) -> None:
    found = run_benchmark(benchmark("fake_broken"), run, limit_seconds=30)
    assert found["status"] == "failed"
    assert found["reason"] == "exit 1: ValueError: no such thing"
    assert found["rows"] == [{"way": "ours", "rate": "7"}]
    assert found["logs"] == ["logs/broken.err"]


def test_a_benchmark_that_takes_too_long_is_ended_with_what_it_started(run: Run, tmp_path: Path) -> None:
    found = run_benchmark(benchmark(f"fake_slow {tmp_path / 'pid'}"), run, limit_seconds=2)
    assert (found["status"], found["reason"]) == ("failed", "ended after 2 s")
    assert found["rows"] == [{"way": "ours", "rate": "7"}]
    assert ends(int((tmp_path / "pid").read_text()))


def test_ctrl_c_ends_the_process_at_work(run: Run, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def interrupt(number: int, frame: FrameType | None) -> None:
        if pid.exists() and pid.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_benchmark(benchmark(f"fake_slow {pid}"), run, limit_seconds=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ends(int(pid.read_text()))


def test_a_failed_benchmark_is_a_row_and_the_exit_code(
    suite: tuple[Benchmark, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(["--out", str(tmp_path)]) == 1
    document = results(tmp_path)
    assert [(one["name"], one["status"]) for one in document["benchmarks"]] == [
        ("fine", "done"), ("broken", "failed"), ("card", "skipped"),
    ]  # fmt: skip
    assert document["benchmarks"][0]["ratios"][0]["low"] == 3.0
    assert document["missing"] == ["trl"]
    assert document["machine"] == MACHINE
    page = (tmp_path / "test-cpu-2-cores.md").read_text()
    ratios, _, rest = page.partition("## fine")
    assert "| ours over theirs | **3.000** | more |" in ratios
    assert "**failed**: exit 1: ValueError: no such thing" in ratios
    assert "python -m benchmarks.fake_fine" in rest
    assert "| ours | 1,200 | 2.0 |" in rest
    assert "| card | needs a CUDA device |" in rest
    assert "`pip install trl`" in rest
    assert "1 done, 1 failed, 1 not run" in capsys.readouterr().out


def test_another_call_keeps_the_results_of_what_it_leaves_out(suite: tuple[Benchmark, ...], tmp_path: Path) -> None:
    assert entry.main(["--out", str(tmp_path), "--only", "fine"]) == 0
    assert entry.main(["--out", str(tmp_path), "--only", "broken", "card"]) == 1
    kept = {one["name"]: one["status"] for one in results(tmp_path)["benchmarks"]}
    assert kept == {"fine": "done", "broken": "failed", "card": "skipped"}


def test_results_of_other_versions_say_so_and_the_command_is_that_of_the_last_call(
    suite: tuple[Benchmark, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entry.main(["--out", str(tmp_path), "--only", "fine"]) == 0
    newer = MACHINE | {"packages": {"torch": "2.16.0"}}
    monkeypatch.setattr(entry, "_machine", lambda: newer)
    assert entry.main(["--out", str(tmp_path), "--only", "broken"]) == 1
    page = (tmp_path / "test-cpu-2-cores.md").read_text()
    _, fine, rest = page.partition("## fine")
    section, _, after = rest.partition("## broken")
    assert fine
    assert "With torch 2.15.0." in section
    assert "With torch" not in after
    assert "Last call: `python -m benchmarks --out" in page


def test_results_that_cannot_be_continued_are_set_aside(suite: tuple[Benchmark, ...], tmp_path: Path) -> None:
    (tmp_path / "test-cpu-2-cores.json").write_text("{torn")
    assert entry.main(["--out", str(tmp_path), "--only", "fine"]) == 0
    assert (tmp_path / "test-cpu-2-cores.before.json").read_text() == "{torn"
    assert [one["name"] for one in results(tmp_path)["benchmarks"]] == ["fine"]


def test_ctrl_c_keeps_what_is_done(
    suite: tuple[Benchmark, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(one: Benchmark, run: Run, *, limit_seconds: float) -> dict[str, Any]:
        if one.name == "broken":
            os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C, which pytest would take for itself
            time.sleep(5)
        return run_benchmark(one, run, limit_seconds=limit_seconds)

    monkeypatch.setattr(entry, "run_benchmark", stopped)
    assert entry.main(["--out", str(tmp_path)]) == 130
    kept = {one["name"]: one["status"] for one in results(tmp_path)["benchmarks"]}
    assert kept == {"fine": "done", "broken": "stopped"}


def test_what_the_time_for_all_does_not_reach_is_not_a_failure(suite: tuple[Benchmark, ...], tmp_path: Path) -> None:
    assert entry.main(["--out", str(tmp_path), "--within", "0.01"]) == 0
    reasons = [one["reason"] for one in results(tmp_path)["benchmarks"]]
    assert reasons[0] == "the 0 s are spent: --only fine"


def test_one_that_the_time_for_all_ends_says_so_as_it_goes(
    suite: tuple[Benchmark, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(one: Benchmark, run: Run, *, limit_seconds: float) -> dict[str, Any]:
        return {"status": "failed", "reason": timed_out(limit_seconds), "seconds": limit_seconds, "ratios": []}

    monkeypatch.setattr(entry, "run_benchmark", ended)
    assert entry.main(["--out", str(tmp_path), "--only", "fine", "--within", "30"]) == 0
    assert "[1/1] fine: ended, the 30 s were spent while it ran\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seconds", "-3"), "argument --seconds: -3: give seconds above 0"),
        (("--within", "nan"), "argument --within: nan: give seconds above 0"),
        (("--out", __file__), "it is a file; give a folder"),
    ],
)
def test_a_limit_or_a_folder_that_is_none_is_refused(
    flags: tuple[str, ...], words: str, suite: tuple[Benchmark, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        entry.main([*flags, "--only", "fine"])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_peak_that_a_cpu_has_not_is_a_dash() -> None:
    row = {"case": "tiny", "way": "brim, auto", "rate": 108.0, "seconds": 0.59, "peak_gib": None}
    assert read_tables(pool.table([row]))[0].rows[0]["peak GiB"] == "—"


def test_a_library_that_is_needed_or_a_place_that_is_not_given_is_named(
    suite: tuple[Benchmark, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = benchmark("fake_slow", needs=("peft>=1.0", "transformers>=5.22"))
    three = (benchmark("fake_fine", needs=("trl",)), old, benchmark("fake_broken --before CHECKOUT"))
    monkeypatch.setattr(entry, "SUITE", three)
    assert entry.main(["--out", str(tmp_path)]) == 0
    assert [one["reason"] for one in results(tmp_path)["benchmarks"]] == [
        "needs trl: pip install trl", "needs transformers>=5.22: pip install 'transformers>=5.22'",
        "needs an older source tree of brim: --before PATH",
    ]  # fmt: skip


def test_an_unknown_name_is_refused_with_those_there_are(
    suite: tuple[Benchmark, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        entry.main(["--only", "fnd"])
    assert stopped.value.code == 2
    assert "--only fnd: choose from fine, broken, card" in capsys.readouterr().err


@pytest.mark.parametrize("there", [(), ("src/brim",), ("benchmarks",)])
def test_an_older_tree_without_what_is_run_of_it_is_refused(
    there: tuple[str, ...], suite: tuple[Benchmark, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in there:
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(SystemExit) as stopped:
        entry.main(["--before", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"git archive COMMIT src benchmarks | tar -x -C {tmp_path}" in capsys.readouterr().err


def test_the_list_names_tables_peers_and_what_is_missing(
    suite: tuple[Benchmark, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "table  docs/measurements/find.md" in listed
    assert "peers  trl" in listed
    assert "3 benchmarks; missing: pip install trl" in listed


def test_a_card_names_its_files() -> None:
    assert entry.slug(machine_page.describe(MACHINE | {"gpu": "NVIDIA H200", "gpus": 1})) == "nvidia-h200"
    assert entry.slug(machine_page.describe(MACHINE | {"gpu": "NVIDIA H200", "gpus": 8})) == "8-nvidia-h200"
