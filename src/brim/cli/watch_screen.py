"""The screen of `brim watch`: what a frame holds at any width, and the loop that draws it and reads the keyboard.

A frame is lines that are never longer than the screen: a head for each card and
each run, and its figures below it or, on a wide screen, beside it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from brim.cli.console import visible_text
from brim.monitor.openmetrics import write_metrics
from brim.monitor.snapshot import Observer
from brim.settings.sizes import format_bytes
from brim.settings.watch_settings import WatchSettings
from brim.units import duration_text

__all__ = ["draw_frame", "show_screen", "write_forever"]

WIDE = 140  # from this width on the figures stand beside the head
KEY_SECONDS = 0.1  # between two looks at the keyboard and at the size of the screen
INDENT = 8  # of what stands below the head of a card or a run
FULL, EMPTY, SPARKS = "━", "─", "▁▂▃▄▅▆▇█"
Part = tuple[str, str]  # text and its style


def write_forever(observer: Observer, settings: WatchSettings) -> None:
    """Write the metrics at every interval until Ctrl-C."""
    assert settings.metrics is not None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            write_metrics(settings.metrics, observer.read())
            time.sleep(settings.interval)


def show_screen(console: Console, observer: Observer, settings: WatchSettings) -> None:
    """Draw on the alternate screen until q or Ctrl-C; the terminal is left as it was."""
    document: Mapping[str, Any] = observer.read()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _terminated_as_exit(),
        _keys_at_once(),
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        while True:
            size = console.size
            live.update(draw_frame(document, width=size.width, height=size.height, keys=True), refresh=True)
            if settings.metrics is not None:
                write_metrics(settings.metrics, document)
            until = time.monotonic() + settings.interval
            while time.monotonic() < until and console.size == size:
                if "q" in _keys(min(KEY_SECONDS, settings.interval)):
                    return
            if console.size == size:
                document = observer.read()


@contextlib.contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """SIGTERM ends the program as an exception does, so that the screen is restored."""

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys reach the program without Enter and are not shown; without a keyboard nothing is changed."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _keys(seconds: float) -> str:
    """What is typed within so many seconds, in small letters; empty without anything."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 64).decode(errors="replace").lower() if ready else ""


# ------------------------------------------------------------------------------------------------ a frame


def draw_frame(document: Mapping[str, Any], *, width: int, height: int | None = None, keys: bool = False) -> Text:
    """Everything of a snapshot in lines of at most `width`; with a height, what does not fit is counted."""
    lines = list(_lines(document, width, keys=keys))
    if height is not None and len(lines) > height:
        more = len(lines) - height + 1
        lines = [*lines[: height - 1], _line([(f"… {more} more lines: a higher screen shows them", "dim")], width)]
    return Text("\n").join(lines)


def _lines(document: Mapping[str, Any], width: int, *, keys: bool) -> Iterator[Text]:
    host, runs = document["host"], document["runs"]
    driver = f" · driver {document['driver']}" if document["driver"] else ""
    at = time.strftime("%H:%M:%S", time.localtime(document["time"]))
    yield _line([("brim watch", "bold"), (f" · {host['name']} · {at}{driver}", ""), *_hint(keys)], width)
    yield _line(_host_parts(host), width)
    if document["gpu_problem"]:
        yield _line([(f"no GPU figures: {document['gpu_problem']}", "dim")], width)
    for gpu in document["gpus"]:
        yield from _fitted(_gpu_head(gpu), list(_gpu_figures(gpu)), width)
    yield Text("")
    if not runs:
        yield _line([("no run of brim is under way", "dim")], width)
    for run in runs:
        head = _run_head(run, _indent(width) - 1 if width >= WIDE else width)
        yield from _fitted(head, [text for text in (_label(run), *_figures(run)) if text], width)


def _hint(keys: bool) -> list[Part]:
    return [("   q quits", "dim")] if keys else []


def _fitted(head: Sequence[Part], figures: Sequence[str], width: int) -> Iterator[Text]:
    """The head, and the figures below it or, on a wide screen, beside it; as many lines as the figures need."""
    indent = _indent(width)
    lines = list(_packed(figures, width - indent))
    first = _line(head, indent - 1 if width >= WIDE else width)
    if width >= WIDE and lines:
        first.pad_right(indent - first.cell_len)
        first += _line([(lines.pop(0), "")], width - indent)
    yield first
    for line in lines:
        yield _line([(" " * indent + line, "")], width)


def _indent(width: int) -> int:
    return width // 2 if width >= WIDE else INDENT


def _packed(figures: Sequence[str], width: int) -> Iterator[str]:
    """The figures in lines of at most this width, none of them divided."""
    line = ""
    for figure in figures:
        longer = f"{line} · {figure}" if line else figure
        if line and len(longer) > width:
            yield line
            longer = figure
        line = longer
    if line:
        yield line


def _line(parts: Iterable[Part], width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for text, style in parts:
        line.append(visible_text(text).replace("\n", " "), style or None)
    line.truncate(width, overflow="ellipsis")
    return line


def _host_parts(host: Mapping[str, Any]) -> list[Part]:
    total, available = host["memory_total_bytes"], host["memory_available_bytes"]
    return [
        ("CPU     ", "bold"), (_sparks(host["cpu_history"]), "cyan"), (f" {_percent(host['cpu']):>4}", ""),
        (f" of {host['cores']} cores · memory {format_bytes(available)} free of {format_bytes(total)}", ""),
    ]  # fmt: skip


def _gpu_head(gpu: Mapping[str, Any]) -> list[Part]:
    name = f"GPU {gpu['index']}" + (" MIG" if gpu["slice_of"] is not None else "")
    title: Part = (f"{name:<{INDENT}}", "bold")
    if _unreadable(gpu):
        return [title, (f"{gpu['name'] or ''} {gpu['problem']}".strip(), "red")]
    heat = "—" if gpu["temperature_c"] is None else gpu["temperature_c"]
    busy = f" {_percent(gpu['utilisation']):>4} · {_watts(gpu)} · {heat} °C"
    slowed = [reason for reason in gpu["throttle_reasons"] or () if reason != "gpu_idle"]
    return [
        title, (_sparks(gpu["utilisation_history"]), "cyan"), (busy, ""),
        (f" · slowed: {', '.join(slowed)}" if slowed else "", "yellow"),
    ]  # fmt: skip


def _gpu_figures(gpu: Mapping[str, Any]) -> Iterator[str]:
    if _unreadable(gpu):
        return
    total, used, ours = gpu["memory_total_bytes"], gpu["memory_used_bytes"], gpu["memory_runs_bytes"]
    if used is None or not total:
        yield "memory not known"
    else:
        yield f"memory {_percent(used / total)} of {format_bytes(total)}"
        yield f"used {format_bytes(used)}" if ours is None else f"runs {format_bytes(ours)}"
        if gpu["memory_others_bytes"] is not None:
            yield f"others {format_bytes(gpu['memory_others_bytes'])}"
    yield str(gpu["name"] or "unknown card")
    if gpu["problem"]:
        yield str(gpu["problem"])


def _unreadable(gpu: Mapping[str, Any]) -> bool:
    return bool(gpu["problem"]) and gpu["memory_used_bytes"] is None and gpu["utilisation"] is None


def _run_head(run: Mapping[str, Any], width: int) -> list[Part]:
    """What it is, and how far."""
    state = str(run["state"])
    colour = {"killed": "red", "running": "green"}.get(state, "yellow")
    done, total = run.get("done"), run.get("total")
    head: list[Part] = [(f"{run.get('kind') or 'run':<{INDENT}}", "bold"), (f"{state} ", colour)]
    if isinstance(done, int | float) and isinstance(total, int | float) and total:
        head += [*_gauge(done / total, 12), (f" {done:,}/{total:,} {run.get('unit') or ''}", "")]
    left = width - sum(len(text) for text, _ in head) - 3
    return [*head, (f" · {_end_of(visible_text(str(run['folder'])), max(left, 12))}", "dim")]


def _label(run: Mapping[str, Any]) -> str:
    part = run.get("part")
    inner = f"{part['done']}/{part['total']} {part['unit']}" if isinstance(part, Mapping) else ""
    return " ".join(text for text in (run.get("label") or "", inner) if text)


def _figures(run: Mapping[str, Any]) -> Iterator[str]:
    """What is known of a run."""
    rate, left, metric = run.get("samples_per_second"), run.get("seconds_left"), run.get("metric")
    if run["state"] == "killed":
        yield f"process {run['pid']} is gone"
    if run.get("batch_size") is not None:
        found = f" ({run['batch_size_found']})" if run.get("batch_size_found") else ""
        yield f"batch {run['batch_size']}{found}"
    if rate is not None:
        yield f"{rate:,.1f}/s"
    if left is not None and run["state"] != "killed":
        yield f"{duration_text(left)} left"
    if run.get("oom_events") is not None:
        yield f"{run['oom_events']} OOM"
    if run.get("loss") is not None:
        yield f"loss {run['loss']:.4g}"
    if isinstance(metric, Mapping) and metric.get("value") is not None:
        yield f"{metric.get('name') or 'score'} {metric['value']:.4g}"
    if run.get("waiting_fraction") is not None:
        yield f"waiting {run['waiting_fraction']:.0%}"
    if run.get("gpu_wait_fraction") is not None:
        yield f"device idle {run['gpu_wait_fraction']:.0%}"
    if run.get("device"):
        yield str(run["device"])


def _gauge(fraction: float, width: int) -> list[Part]:
    full = round(min(max(fraction, 0.0), 1.0) * width)
    return [(FULL * full, "green"), (EMPTY * (width - full), "bright_black")]


def _sparks(history: Sequence[float | None], width: int = 16) -> str:
    recent = list(history)[-width:]
    drawn = "".join(" " if one is None else SPARKS[min(int(one * len(SPARKS)), len(SPARKS) - 1)] for one in recent)
    return drawn.rjust(width)


def _percent(fraction: float | None) -> str:
    return "—" if fraction is None else f"{fraction:.0%}"


def _watts(gpu: Mapping[str, Any]) -> str:
    drawn, most = gpu["power_watts"], gpu["power_limit_watts"]
    return f"{'—' if drawn is None else f'{drawn:.0f}'}{'' if most is None else f'/{most:.0f}'} W"


def _end_of(folder: str, most: int) -> str:
    """The end of a path, which says more than its beginning."""
    return folder if len(folder) <= most else f"…{folder[1 - most :]}"
