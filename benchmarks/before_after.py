"""Two checkouts of brim on the same card, in turns: no worse beyond noise?

    python -m benchmarks.before_after --before runs/before --seconds 560   # again and again: what is done is skipped
    python -m benchmarks.before_after --table                              # Markdown of what is there so far
    python -m benchmarks.before_after --before ../old --tiny               # to try it out, on a CPU

`--before PATH` is the old commit unpacked, with its own src/ and benchmarks/, for instance below runs/, which git
ignores: `mkdir -p runs/before; git archive c7a9703 src benchmarks | tar -x -C runs/before`. Both checkouts are called
brim, so each has a process of its own that is kept and asked in turns (old, new, new, old), through what both have: the
command line, run inside of that process, and the class behind `benchmarks.eval --part repeat`. A third process of the
new checkout times the sizes that both have chosen, in turns, which is the rate that counts: a search is not judged by
its own stopwatch.

Parts: `find` (twelve workloads at 24 GiB, searched twice), `video` (three video models in a sweep at `auto`, 24 GiB),
`eval` (65,536 prompts, `auto` and a fixed cap), `profile` (four values of max_crops at 24 GiB), `train` (ten seeds of
small heads, many short epochs, three video models on clips that lie on the card). All of it takes about half an hour of
an H200. Every answer is a line of results.jsonl in `--folder`, written as it comes; no case is begun that would not end
within `--seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.before_after_child import LIMIT, NEW_TOKENS, REPEATS

ROOT = Path(__file__).resolve().parent.parent
CHILD = ROOT / "benchmarks" / "before_after_child.py"
SIDES = ("before", "after")
STARTUP_SECONDS = 40  # of three processes at once
STARTUP_PATIENCE = 180
MOST_LEFT_BYTES = 256 * 2**20  # on the card after a case; with more the process is restarted
VIDEO = {"r2plus1d_18": 112, "mvit_v2_s": 224, "swin3d_s": 224}
TRAIN_VIDEO = {"r3d_18": 112, "swin3d_t": 224, "mvit_v2_s": 224}
VIDEO_STEPS = {"r2plus1d_18": 30, "mvit_v2_s": 10, "swin3d_s": 10}
CROPS = (2, 6, 9, 12)
QUESTIONS = 400
CAP = 256 * 1024  # tokens
Row = dict[str, Any]


def main() -> None:
    arguments = parse()
    session = Session(arguments)
    if arguments.table:
        print(table(session.rows))
        return
    if not arguments.before or not (Path(arguments.before) / "src" / "brim").is_dir():
        raise SystemExit(f"--before {arguments.before}: name a checkout of the old commit, with src/brim in it")
    with session:
        for case in cases(arguments):
            session.run(case)
    print(table(session.rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="the old checkout")
    parser.add_argument("--after", default=str(ROOT), help="the new one; by default that of this file")
    parser.add_argument("--folder", default="runs/before-after", help="results.jsonl, logs, and what cases need")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=2, help="searches of each workload by each checkout")
    parser.add_argument("--seconds", type=float, default=None, help="begin no case that would end later than this")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU; figures mean nothing")
    parser.add_argument("--retry-failed", action="store_true", help="cases that ended with an error are run again")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    return parser.parse_args()


# --- what is run: each case says what a side is asked, and what the third process is asked about both answers --------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison; `ask` gets a folder for its run, `judge` the answers of each side."""

    part: str
    name: str
    seconds: float  # of a round of both sides, on an H200
    ask: Callable[[Path], Row]
    judge: Callable[[Sequence[Row], Sequence[Row]], Row] | None = None
    judge_seconds: float = 0.0
    rounds: int = 1


def limit(arguments: argparse.Namespace) -> str:
    return "1GiB" if arguments.tiny else LIMIT


def find_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    from benchmarks.workloads import WORKLOADS, find_flags, tiny

    for name, spec in WORKLOADS.items():
        chosen = tiny(spec) if arguments.tiny else spec
        config = Path(arguments.folder).resolve() / "configs" / name.split()[0]
        flags = [*find_flags(chosen, config), "--memory-limit", limit(arguments)]
        flags += ["--max-batch-size", "8"] if arguments.tiny else []

        def ask(folder: Path, flags: list[str] = flags) -> Row:
            return {"do": "find", "flags": flags, "folder": str(folder)}

        def judge(before: Sequence[Row], after: Sequence[Row], name: str = name, spec: Any = chosen) -> Row:
            sizes = sorted({row["size"] for row in (*before, *after)})
            return {"do": "rates", "jobs": [{"name": name, "spec": dataclasses.asdict(spec), "sizes": sizes}]}

        yield Case(part="find", name=name, seconds=20, ask=ask, judge=judge, judge_seconds=20, rounds=arguments.rounds)


def video_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    from benchmarks.workloads import tiny, video

    models = {"r3d_18": 16} if arguments.tiny else VIDEO

    def ask(folder: Path) -> Row:
        training: Row = {"dtype": "float32" if arguments.tiny else "bfloat16", "memory_limit": limit(arguments)}
        grid = {
            "model.type": [*models],
            "hp.size": [*models.values()],
            "hp.max_steps": [2 if arguments.tiny else VIDEO_STEPS[model] for model in models],
        }
        samples = {"samples": 16 if arguments.tiny else 1024}
        source = {
            "data": {"type": "moving_shapes", "val_split": "none", "params": samples},
            "hp": {"epochs": 100, "frames": 2 if arguments.tiny else 16, "batch_size": "auto"},
            "optimizer": {"name": "adamw"},
            "training": training,
            "grid_search": {"grid": grid, "zip": [[*grid]]},
        }
        return {"do": "sweep", "source": source, "folder": str(folder)}

    def judge(before: Sequence[Row], after: Sequence[Row]) -> Row:
        jobs = []
        for model, size in models.items():
            sizes = sorted({row["models"][model]["size"] for row in (*before, *after) if row["models"][model]["size"]})
            spec = tiny(video(model, size)) if arguments.tiny else video(model, size)
            jobs.append({"name": model, "spec": dataclasses.asdict(spec), "sizes": sizes})
        return {"do": "rates", "jobs": jobs}

    yield Case(part="video", name="three models", seconds=180, ask=ask, judge=judge, judge_seconds=50)


def eval_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for name, cap, rounds in ((f"auto ×{REPEATS}", None, 2), (f"{CAP // 1024} Ki tokens ×{REPEATS}", CAP, 1)):
        asked = {"do": "eval", "cap": cap, "tiny": arguments.tiny}
        yield Case(part="eval", name=name, seconds=90, ask=lambda _, asked=asked: asked, rounds=rounds)  # type: ignore[misc]


def profile_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    crops, questions = ((1, 2), 12) if arguments.tiny else (CROPS, QUESTIONS)
    place = Path(arguments.folder).resolve()
    common = {
        "model": str(place / "model"),
        "data": str(place / "questions" / "questions.jsonl"),
        "dtype": "float32" if arguments.tiny else "bfloat16",
        "memory_limit": limit(arguments),
    }

    def ask(folder: Path) -> Row:
        flags = ["-m", common["model"], "-d", common["data"], "--knob", f"max_crops={','.join(map(str, crops))}"]
        flags += ["--limit", str(questions), "--dtype", common["dtype"], "--memory-limit", common["memory_limit"]]
        flags += ["--max-tokens", str(NEW_TOKENS), "--latency-samples", "0"]
        make = {"tiny": arguments.tiny, "questions": questions}
        return {"do": "profile", "flags": flags, "folder": str(folder), "make": make, "place": str(place)}

    def judge(before: Sequence[Row], after: Sequence[Row]) -> Row:
        sizes = {crop: sorted({row["values"][str(crop)]["size"] for row in (*before, *after)}) for crop in crops}
        return {"do": "profile_rates", "common": common, "sizes": {crop: n for crop, n in sizes.items() if len(n) > 1}}

    yield Case(part="profile", name="max_crops", seconds=130, ask=ask, judge=judge, judge_seconds=60)


def train_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    rows, epochs = (128, 2) if arguments.tiny else (65_536, 40)
    device = "cpu" if arguments.tiny else "cuda"
    hidden = [16] if arguments.tiny else [512, 512]
    mlp = {"type": "mlp", "params": {"hidden": hidden}}

    def features(batch: int, epochs: int) -> Row:
        return {"model": mlp, "data": {"root": "ROWS"}, "hp": {"epochs": epochs, "effective_batch": batch},
                "training": {"device": device, "eval_every": epochs}}  # fmt: skip

    def trained(name: str, source: Row, flags: Sequence[str], seconds: float, rounds: int = 2) -> Case:
        def ask(folder: Path) -> Row:
            return {"do": "train", "source": source, "flags": [*flags], "folder": str(folder), "rows": rows}

        return Case(part="train", name=name, seconds=seconds, ask=ask, rounds=rounds)

    for batch in (64,) if arguments.tiny else (512, 8192):
        flags = ["--hidden", ",".join(map(str, hidden)), "--seeds", "10", "--epochs", str(epochs), "--pairs", "matched"]
        flags += ["--eval-every", str(epochs), "--effective-batch", str(batch)]
        flags += ["--device", device, "--fast-path", "auto"]
        asked = {"do": "ood", "flags": flags, "rows": rows}
        yield Case(
            part="train", name=f"ood, ten seeds, batch {batch}", seconds=30, rounds=2,
            ask=lambda folder, asked=asked: {**asked, "folder": str(folder)},  # type: ignore[misc]
        )  # fmt: skip
        for path in ("resident", "stacked"):
            flags = ["--seeds", "10", "--fast-path", path]
            yield trained(f"mlp, ten seeds, {path}, batch {batch}", features(batch, epochs // 2), flags, 30)
    yield trained("mlp, epochs of two steps", features(rows, 4 if arguments.tiny else 60), [], 25)
    for model, size in {"r3d_18": 16}.items() if arguments.tiny else {**TRAIN_VIDEO}.items():
        frames = 2 if arguments.tiny else 16
        clips = {"frames": frames, "size": size, "distinct": 4 if arguments.tiny else 64, "where": device}
        hp = {"effective_batch": 8 if arguments.tiny else 96, "max_steps": 2 if arguments.tiny else 14, "epochs": 1000,
              "frames": frames, "size": size}  # fmt: skip
        training = {"device": device, "dtype": "float32" if arguments.tiny else "bfloat16",
                    "memory_limit": limit(arguments)}  # fmt: skip
        data = {"type": "CLIPS", "num_workers": 0, "params": clips}
        source = {"model": {"type": model, "num_classes": 8}, "data": data, "hp": hp, "training": training}
        yield trained(model, source, [], 60)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Case]]] = {
    "find": find_cases, "video": video_cases, "eval": eval_cases, "profile": profile_cases, "train": train_cases,
}  # fmt: skip


def cases(arguments: argparse.Namespace) -> list[Case]:
    found = [case for part in arguments.parts.split(",") for case in PARTS[part](arguments)]
    return [case for case in found if arguments.cases in case.name]


# --- the processes that are asked, and the file that keeps their answers ---------------------------------------------


class Session:
    """What has been answered, and the three processes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder = Path(arguments.folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "results.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        dropped = "error" if arguments.retry_failed else "lost"  # what is done again
        self.rows: list[Row] = [row for row in map(json.loads, lines) if dropped not in row]
        self._arguments = arguments
        self._ends = None if arguments.seconds is None else time.monotonic() + arguments.seconds
        self._children: dict[str, Child] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.end()

    def run(self, case: Case) -> None:
        """Every round in turns, then the third process; nothing is started that would end too late."""
        turns = [(side, number) for number in range(case.rounds) for side in SIDES[:: -1 if number % 2 else 1]]
        wanted = [turn for turn in turns if self._found(case, *turn) is None]
        judged = case.judge is None or self._found(case, "judge", 0) is not None
        estimate = len(wanted) * case.seconds / 2 + (0 if judged else case.judge_seconds)
        if judged and not wanted:
            return
        if not self._has(estimate + (0 if self._children else STARTUP_SECONDS)):
            print(f"{case.part} {case.name}: not started, it takes about {estimate:.0f} s", flush=True)
            return
        for side, number in wanted:
            folder = (
                self.folder / "runs" / f"{case.part}-{case.name}-{side}-{number}-{time.time_ns()}".replace(" ", "_")
            )
            self._answer(case, side, number, case.ask(folder), patience=max(4 * case.seconds, 240))
        both = [[row for row in self._rows_of(case) if row["side"] == side and "error" not in row] for side in SIDES]
        if case.judge is not None and all(both) and not judged:
            self._answer(case, "judge", 0, case.judge(*both), patience=max(4 * case.judge_seconds, 240))

    def _answer(self, case: Case, side: str, number: int, asked: Row, *, patience: float) -> None:
        answer = self._child(side).ask(asked, patience)
        left = answer.pop("left_bytes", 0)
        row = {"part": case.part, "case": case.name, "side": side, "round": number, **answer}
        if answer.get("lost") or (left > MOST_LEFT_BYTES and asked["do"] != "eval"):  # whose model is kept
            self._children.pop(side).end()
        self.rows.append(row)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: value for key, value in row.items() if key != "tried"}), flush=True)

    def _child(self, side: str) -> Child:
        if not self._children:  # all of them at once: they import at the same time
            for name in (*SIDES, "judge"):
                self._children[name] = self._start(name)
        if side not in self._children:
            self._children[side] = self._start(side)
        return self._children[side]

    def _start(self, side: str) -> Child:
        root = Path(self._arguments.before if side == "before" else self._arguments.after).resolve()
        return Child(root, self.folder / f"{side}.log", self.folder / f"cache-{side}", cpu=self._arguments.tiny)

    def _has(self, seconds: float) -> bool:
        return self._ends is None or time.monotonic() + seconds <= self._ends

    def _rows_of(self, case: Case) -> list[Row]:
        return [row for row in self.rows if (row["part"], row["case"]) == (case.part, case.name)]

    def _found(self, case: Case, side: str, number: int) -> Row | None:
        own = [row for row in self._rows_of(case) if (row["side"], row["round"]) == (side, number)]
        return own[0] if own else None


class Child:
    """A process of one checkout, asked in JSON lines."""

    def __init__(self, root: Path, log: Path, cache: Path, *, cpu: bool) -> None:
        path = os.pathsep.join([str(root / "src"), str(root)])
        environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
        if cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", CHILD], env=environment, cwd=root, text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self._root = root
        self._known = False  # that it has the brim of its checkout

    def ask(self, asked: Row, patience: float) -> Row:
        """Its answer; `lost` where there is none, and the process is of no more use."""
        if not self._known:
            first = self._line(STARTUP_PATIENCE)
            if first.get("lost"):
                return first
            assert Path(first["brim"]).is_relative_to(self._root / "src"), f"{first} is not that of {self._root}"
            self._known = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
        except BrokenPipeError:
            return {"lost": True, "error": "the process has ended: see its log"}
        return self._line(patience)

    def _line(self, patience: float) -> Row:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], patience)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            why = "the process ended: see its log" if ready else f"no answer within {patience:.0f} s"
            return {"lost": True, "error": why}
        answer: Row = json.loads(line)
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


# --- the answers as tables -------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Markdown, old → new; a ratio is the rate at the new size over that at the old one, timed in turns."""
    parts = {"find": find_table, "video": nested_table, "eval": eval_table, "profile": nested_table,
             "train": train_table}  # fmt: skip
    lines: list[str] = []
    for part, make in parts.items():
        own = [row for row in rows if row["part"] == part]
        if own:
            lines += [f"### {part}", "", *make(own), ""]
        lines += [f"- {row['case']}, {row['side']}: {row['error']}" for row in own if "error" in row]
    return "\n".join(lines)


def sides_of(rows: Sequence[Row], case: str) -> tuple[list[Row], list[Row], Row | None]:
    """The answers of each side, and those of the third process."""
    own = [row for row in rows if row["case"] == case and "error" not in row]
    before, after = ([row for row in own if row["side"] == side] for side in SIDES)
    return before, after, next((row["rates"] for row in own if row["side"] == "judge"), None)


def find_table(rows: Sequence[Row]) -> list[str]:
    lines = ["| workload | size | rate: new over old | spread | later: OOM, retries | probes | OOM | seconds |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for case in dict.fromkeys(row["case"] for row in rows):
        before, after, judged = sides_of(rows, case)
        if not before or not after:
            continue
        known = (judged or {}).get(case, {})
        ratio, spread = ratio_of(known, [row["size"] for row in before], [row["size"] for row in after])
        later = [known.get(str(size), {}) for size in dict.fromkeys(row["size"] for row in after)]
        trouble = f"{sum(one.get('ooms', 0) for one in later)}, {sum(one.get('retries', 0) for one in later)}"
        cells = [case, arrow(before, after, "size"), ratio, spread, trouble if known else "—"]
        cells += [arrow(before, after, name) for name in ("probes", "ooms", "seconds")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def nested_table(rows: Sequence[Row]) -> list[str]:
    """A row for each model of the sweep, or each value of the profile."""
    lines = ["| case | size | rate: new over old | spread | samples/s of the run | planning s | OOM |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for case in dict.fromkeys(row["case"] for row in rows):
        before, after, judged = sides_of(rows, case)
        inner = "models" if before and "models" in before[0] else "values"
        for name in before[0][inner] if before and after else ():
            old, new = ([row[inner][name] for row in side] for side in (before, after))
            ratio, spread = ratio_of(
                (judged or {}).get(name, {}), [one["size"] for one in old], [one["size"] for one in new]
            )
            cells = [name, arrow(old, new, "size"), ratio, spread]
            cells += [arrow(old, new, column) for column in ("rate", "planning_seconds", "ooms")]
            lines.append(f"| {' | '.join(cells)} |")
        if before and after:
            lines.append(f"| all, seconds | {arrow(before, after, 'seconds')} | | | | | |")
    return lines


def eval_table(rows: Sequence[Row]) -> list[str]:
    lines = ["| way | seconds | samples/s: new over old | first run of the process, seconds | notes of the new |",
             "|---|---|---|---|---|"]  # fmt: skip
    for case in dict.fromkeys(row["case"] for row in rows):
        before, after, _ = sides_of(rows, case)
        if before and after:
            ratio = statistics.median(row["rate"] for row in after) / statistics.median(row["rate"] for row in before)
            first = arrow([before[0]["first"]], [after[0]["first"]], "seconds")
            cells = [case, arrow(before, after, "seconds"), f"{ratio:.3f}", first, after[-1]["notes"]]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def train_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| case | size or path | samples/s | new over old | OOM | seconds of the command |",
        "|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        before, after, _ = sides_of(rows, case)
        if before and after:
            ratio = statistics.median(row["rate"] for row in after) / statistics.median(row["rate"] for row in before)
            cells = [case, arrow(before, after, "size"), arrow(before, after, "rate"), f"{ratio:.3f}"]
            cells += [arrow(before, after, "ooms"), arrow(before, after, "seconds")]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def ratio_of(known: Mapping[str, Row], before: Sequence[int], after: Sequence[int]) -> tuple[str, str]:
    """New over old, and how far the turns of one size lay apart at most."""
    spread = f"{max((one.get('spread', 0.0) for one in known.values()), default=0.0):.1%}"
    if set(before) == set(after):
        return "same size", spread
    if not all(str(size) in known for size in (*before, *after)):
        return "—", spread
    old, new = (statistics.mean(known[str(size)]["rate"] for size in sizes) for sizes in (before, after))
    return f"{new / old:.3f}" if old else "—", spread


def arrow(before: Sequence[Row], after: Sequence[Row], name: str) -> str:
    """The values of all rounds, old → new."""
    return " → ".join(", ".join(number(row.get(name)) for row in side) for side in (before, after))


def number(value: Any) -> str:
    return "—" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
