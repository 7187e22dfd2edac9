"""`brim watch`: its frames at any size, its documents, and the program itself in a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from brim.cli.evaluate import EvalProgress
from brim.cli.sweep import SweepProgress
from brim.cli.train import TrainProgress
from brim.cli.watch_screen import draw_frame
from brim.monitor import sampler
from brim.monitor.live import LiveRun, read_runs
from brim.monitor.trace_file import COLUMNS, MonitorSample
from brim.running.results import ExecutionFigures
from brim.sweeps.job import Job
from brim.training.listener import StepRecord
from tests.cli.conftest import Brim

GIB = 2**30
GPU = {
    "index": 0, "uuid": "GPU-1", "name": "NVIDIA H200", "slice_of": None, "utilisation": 0.97, "problem": None,
    "memory_total_bytes": 140 * GIB, "memory_used_bytes": 37 * GIB, "memory_runs_bytes": 17 * GIB,
    "memory_others_bytes": 20 * GIB, "power_watts": 412.5, "power_limit_watts": 700.0, "temperature_c": 61,
    "throttle_reasons": ["gpu_idle", "sw_power_cap"], "utilisation_history": [0.0, 0.5, 1.0],
}  # fmt: skip
LOST = {**GPU, "index": 1, "problem": "GPU is lost", "memory_used_bytes": None, "utilisation": None}
UNKNOWN = {**dict.fromkeys(GPU), "index": 2, "utilisation_history": [None]}
RUN = {
    "pid": 77, "folder": "/a/long/path/of/runs/eval-20260131-093000", "kind": "eval", "state": "running",
    "done": 1234, "total": 10_000, "unit": "samples", "batch_size": 64, "batch_size_found": "found on this run",
    "samples_per_second": 123.4, "seconds_left": 71.0, "oom_events": 2, "loss": 0.5, "waiting_fraction": 0.03,
    "metric": {"name": "exact_match", "value": 0.712}, "device": "cuda:0", "label": None, "part": None,
}  # fmt: skip
STARTING = {"pid": 1, "folder": "/x", "kind": "train", "state": "starting"}


def document(**more: Any) -> dict[str, Any]:
    host = {
        "name": "machine", "cores": 16, "cpu": 0.3, "memory_total_bytes": 128 * GIB,
        "memory_available_bytes": 64 * GIB, "cpu_history": [0.1, 0.3],
    }  # fmt: skip
    found = {"time": 0.0, "host": host, "driver": "580.1", "gpu_problem": None, "gpus": [GPU], "runs": [RUN]}
    return {**found, **more}


@pytest.mark.parametrize("width", [20, 40, 80, 139, 140, 160, 300])
def test_no_line_is_longer_than_the_screen(width: int) -> None:
    killed = {**RUN, "state": "killed", "folder": "/very/" * 40, "label": "max_crops=4"}
    shown = draw_frame(document(gpus=[GPU, LOST, UNKNOWN], runs=[RUN, STARTING, killed]), width=width)
    assert max(line.cell_len for line in shown.split()) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_a_frame_shows_every_figure_of_cards_and_runs(width: int) -> None:
    shown = draw_frame(document(), width=width).plain
    for words in (
        "machine", "driver 580.1", "30% of 16 cores", "64.0 GiB free of 128.0 GiB",
        "GPU 0", "97%", "412/700 W", "61 °C", "slowed: sw_power_cap", "memory 26% of 140.0 GiB", "runs 17.0 GiB",
        "others 20.0 GiB", "NVIDIA H200", "▁▅█",
        "eval", "running", "1,234/10,000 samples", "eval-20260131-093000", "batch 64 (found on this run)", "123.4/s",
        "1 min 11 s left", "2 OOM", "loss 0.5", "exact_match 0.712", "waiting 3%",
    ):  # fmt: skip
        assert words in shown, words
    assert "gpu_idle" not in shown


def test_what_is_not_known_is_left_out_and_a_lost_card_says_why() -> None:
    shown = draw_frame(document(gpus=[LOST, UNKNOWN], runs=[STARTING]), width=80).plain
    assert "GPU 1   NVIDIA H200 GPU is lost" in shown
    assert "memory not known" in shown
    assert "None" not in shown
    assert "starting" in shown


def test_a_killed_run_is_named_as_such_and_has_no_time_left() -> None:
    shown = draw_frame(document(runs=[{**RUN, "state": "killed"}]), width=80).plain
    assert "killed" in shown
    assert "process 77 is gone" in shown
    assert " left" not in shown


def test_a_profile_shows_its_point_and_how_far_it_is() -> None:
    part = {"done": 3, "total": 9, "unit": "samples"}
    shown = draw_frame(document(runs=[{**RUN, "label": "max_crops=4", "part": part}]), width=80).plain
    assert "max_crops=4 3/9 samples" in shown


def test_a_low_screen_counts_what_it_cannot_show() -> None:
    shown = draw_frame(document(runs=[RUN] * 20), width=80, height=10).plain.splitlines()
    assert len(shown) == 10
    assert "more lines" in shown[-1]


def test_names_from_outside_cannot_steer_the_terminal() -> None:
    shown = draw_frame(document(runs=[{**RUN, "folder": "/a\x1b[2J\nb", "label": "x\r\x07"}]), width=160).plain
    assert not set(shown) & {"\x1b", "\r", "\x07"}


# ------------------------------------------------------------------------------------------------ documents


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    folder = tmp_path / "first"
    folder.mkdir()
    with LiveRun(folder, "eval", interval_seconds=0.01) as run:
        run.update(state="running", done=3, total=10, unit="samples", batch_size=8)
        _wait(lambda: [one["done"] for one in read_runs()] == [3])
        yield run


def test_one_frame_and_one_document_are_printed(brim: Brim, live: LiveRun, tmp_path: Path) -> None:
    shown = brim("watch", "--once")
    assert shown.code == 0
    assert "3/10 samples" in shown.out
    assert "\x1b" not in shown.out
    printed = json.loads(brim("watch", "--json").out)
    assert printed["schema"] == "brim.watch/1"
    assert [run["folder"] for run in printed["runs"]] == [str(tmp_path / "first")]
    assert "3/10 samples" in brim("watch").out  # no terminal: once


def test_metrics_are_written_once(brim: Brim, live: LiveRun, tmp_path: Path) -> None:
    file = tmp_path / "brim.prom"
    assert brim("watch", "--once", "--metrics", str(file)).code == 0
    assert "brim_run_done" in file.read_text()


@pytest.mark.parametrize(
    "arguments", [("absent",), (".", "--once"), ("--interval", "0"), ("--interval", "soon"), ("--metrics", ".")]
)
def test_a_wrong_request_ends_with_two(
    brim: Brim, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert brim("watch", "--once", *arguments).code == 2


# ------------------------------------------------------------------------------------------------ on a terminal


class Screen:
    """What a terminal shows: moves of the cursor, lines and the alternate screen; colours are ignored."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}
        self.row = self.column = 0
        self.alternate, self.cursor, self.was_alternate = False, True, False
        self._rest = ""

    def feed(self, data: bytes) -> None:
        text = self._rest + data.decode(errors="replace")
        self._rest = ""
        place = 0
        while place < len(text):
            if text[place] == "\x1b":
                found = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])").match(text, place)
                if found is None:
                    self._rest = text[place:]
                    return
                self._control(found[1], found[2])
                place = found.end()
                continue
            self._show(text[place])
            place += 1

    def _control(self, numbers: str, kind: str) -> None:
        if numbers in ("?1049", "?25") and kind in "hl":
            if numbers == "?25":
                self.cursor = kind == "h"
            else:
                self.alternate = kind == "h"
                self.was_alternate |= self.alternate
            self.rows = {} if numbers == "?1049" else self.rows
        elif kind == "H":
            line, _, column = numbers.partition(";")
            self.row, self.column = int(line or 1) - 1, int(column or 1) - 1
        elif kind == "J":
            self.rows = {}

    def _show(self, letter: str) -> None:
        if letter == "\n":
            self.row, self.column = self.row + 1, 0
        elif letter == "\r":
            self.column = 0
        else:
            before = self.rows.get(self.row, "").ljust(self.column)
            self.rows[self.row] = before[: self.column] + letter + before[self.column + 1 :]
            self.column += 1

    def cut(self, rows: int, columns: int) -> None:
        """The terminal has become smaller: what is outside is lost."""
        self.rows = {row: text[:columns] for row, text in self.rows.items() if row < rows}

    @property
    def text(self) -> str:
        return "\n".join(self.rows.get(row, "").rstrip() for row in range(max(self.rows, default=-1) + 1))


START = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from brim.cli.main import run
run(sys.argv[1:])
"""


class Terminal:
    """`brim` in a pseudo-terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.screen = Screen()
        self._master, self._slave = pty.openpty()
        self.resize(24, 80)
        self.settings = termios.tcgetattr(self._slave)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments], stdin=self._slave, stdout=self._slave, stderr=self._slave,
            start_new_session=True, env={**environment, "TERM": "xterm-256color"},
        )  # fmt: skip

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.cut(rows, columns)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, condition: Any) -> None:
        def met() -> bool:
            while select.select([self._master], [], [], 0.01)[0]:
                self.screen.feed(os.read(self._master, 1 << 16))
            return bool(condition(self.screen))

        _wait(met, lambda: self.screen.text)

    def ended(self) -> int:
        self.wait_for(lambda screen: self.process.poll() is not None)
        assert self.process.returncode is not None
        return self.process.returncode

    def restored(self) -> bool:
        same = termios.tcgetattr(self._slave) == self.settings
        return same and not self.screen.alternate and self.screen.cursor and self.screen.was_alternate

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


def _wait(condition: Any, state: Any = lambda: "") -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {state()}"
        time.sleep(0.005)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


OTHER_RUN = """
import sys, time, pathlib
from brim.monitor.live import LiveRun
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
with LiveRun(folder, "train") as run:
    run.update(state="running", done=5, total=50, unit="samples")
    time.sleep(60)
"""


def test_it_draws_two_runs_of_which_one_is_killed_resizes_and_quits_on_q(live: LiveRun, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", OTHER_RUN, str(tmp_path / "second")])
    try:
        with terminal("watch", "--interval", "0.1") as shown:
            shown.wait_for(lambda screen: "3/10 samples" in screen.text and "5/50 samples" in screen.text)
            assert shown.screen.alternate
            assert not shown.screen.cursor
            assert "killed" not in shown.screen.text
            live.update(done=4)
            shown.wait_for(lambda screen: "4/10 samples" in screen.text)
            other.send_signal(signal.SIGKILL)
            shown.wait_for(lambda screen: "killed" in screen.text)
            assert f"process {other.pid} is gone" in shown.screen.text
            narrow = [len(line) for line in shown.screen.text.splitlines()]
            assert max(narrow) <= 80
            shown.resize(40, 160)
            shown.wait_for(lambda screen: any(len(line) > 85 for line in screen.text.splitlines()))
            shown.resize(5, 60)
            shown.wait_for(lambda screen: "more lines" in screen.text and len(screen.text.splitlines()) <= 5)
            shown.type("q")
            assert shown.ended() == 0
            assert shown.restored()
    finally:
        other.kill()
        other.wait()


def test_ctrl_c_quits_and_restores_the_screen() -> None:
    with terminal("watch") as shown:
        shown.wait_for(lambda screen: "no run of brim is under way" in screen.text)
        shown.type("\x03")
        assert shown.ended() == 0
        assert shown.restored()
        assert "Traceback" not in shown.screen.text


# ------------------------------------------------------------------------------------------------ bars


@pytest.fixture
def busy_card(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {**dict.fromkeys(COLUMNS), "time_seconds": 1.0, "gpu_utilisation": 1.0}
    sample = MonitorSample(**{**figures, "gpu_memory_process_bytes": 139 * GIB})  # type: ignore[arg-type]
    monkeypatch.setattr(sampler, "_last", [sample])


def lines_of(draw: Any) -> list[str]:
    """What a bar draws on a terminal of 80 columns."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    draw(console)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


def draw_evaluation(console: Console) -> None:
    with EvalProgress(console) as progress:
        progress.started(100_000, 0)
        figures = ExecutionFigures(items=50_000, seconds=4.0, batch_counts=[1024], oom_events=2)
        progress.batch(figures, cap=64, reserved_bytes=3 * GIB)
        progress._progress.refresh()


def draw_training(console: Console) -> None:
    with TrainProgress(console) as progress:
        progress._epochs = 100
        progress.started(100_000, 0)
        record = StepRecord(
            step=7, epoch=11, samples=50_000, loss=0.1234, learning_rate=0.1, effective_batch=1024,
            micro_batches=(1024,), seconds=0.1, oom_events=2,
        )  # fmt: skip
        progress.step(record)
        progress._progress.refresh()


def draw_sweep(console: Console) -> None:
    with SweepProgress(console) as progress:
        progress.planned(12, 3)
        job = Job(id="r3d_18_bs128_lr0.001_with_a_long_name", settings={}, folder="/x")
        progress.started(job, "cuda:0")
        event = {"event": "rate", "samples_per_second": 1234.5, "loss": 0.123, "samples": 5, "total": 10}
        progress.event(job, {**event, "machine": "GPU 100% 139.0 GiB"})
        progress._progress.refresh()


@pytest.mark.parametrize("draw", [draw_evaluation, draw_training, draw_sweep])
@pytest.mark.usefixtures("busy_card")
def test_bars_show_utilisation_and_memory_in_one_line_of_eighty_columns(draw: Any) -> None:
    lines = lines_of(draw)
    assert max(len(line) for line in lines) <= 80
    assert any("/s" in line and "GPU 100% 139.0 GiB" in line for line in lines), lines


def test_without_a_card_bars_show_the_host() -> None:
    figures = {**dict.fromkeys(COLUMNS), "time_seconds": 1.0, "host_cpu": 0.45, "process_rss_bytes": GIB}
    assert MonitorSample(**figures).short_text() == "CPU 45% 1.0 GiB"  # type: ignore[arg-type]
