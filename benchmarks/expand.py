"""How long it takes to read, check and expand sweep files of 10,000 experiments. No torch, no GPU.

    python -m benchmarks.expand                       # the table of docs/measurements/sweep.md
    python -m benchmarks.expand --count 1000 --json results.json

Each form is expanded in this process, several times; the least time counts. Seconds are of this process's own CPU
time, and of the clock: the second one is what a user waits for, and moves with whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from brim.settings.config_files import expand_grid
from brim.settings.yaml_file import read_yaml

SHARED = """task: {tag: video_classification}
data: {type: ucf101, root: data/ucf101, num_workers: 16, params: {clip_len: 16}}
hp: {epochs: 10}
scheduler: {name: cosineannealinglr, params: {T_max: 10, eta_min: 1e-5}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="experiments of each file, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make in FORMS.items():
            path = Path(folder) / "sweep.yaml"
            path.write_text(make(arguments.count), encoding="utf-8")
            rows.append({"form": name, **measure(path, rounds=arguments.rounds)})
    assert "torch" not in sys.modules
    print(table(rows))
    print(f"\n{facts()}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"environment": facts(), "rows": rows}, indent=1))


def measure(path: Path, *, rounds: int) -> dict[str, Any]:
    """Least seconds of reading the YAML alone, and of everything."""
    read = [_timed(lambda: read_yaml(path)) for _ in range(rounds)]
    whole = [_timed(lambda: expand_grid(path)) for _ in range(rounds)]
    experiments = len(expand_grid(path))
    return {
        "experiments": experiments,
        "file_bytes": path.stat().st_size,
        "read_cpu_seconds": min(cpu for cpu, _ in read),
        "cpu_seconds": min(cpu for cpu, _ in whole),
        "clock_seconds": min(clock for _, clock in whole),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| file | experiments | bytes | reading alone, s CPU | all, s CPU | all, s clock | µs CPU an experiment |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = row["cpu_seconds"] / row["experiments"] * 1e6
        lines.append(
            f"| {row['form']} | {row['experiments']:,} | {row['file_bytes']:,} | {row['read_cpu_seconds']:.3f} "
            f"| {row['cpu_seconds']:.2f} | {row['clock_seconds']:.2f} | {each:.0f} |"
        )
    return "\n".join(lines)


def facts() -> str:
    versions = f"Python {platform.python_version()}, PyYAML {metadata.version('pyyaml')}"
    return f"{platform.processor() or platform.machine()}, {versions}"


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - clock


def _listed(values: list[Any]) -> str:
    return f"[{', '.join(map(str, values))}]"


def crossed(count: int) -> str:
    """Four lists, every combination."""
    side = max(1, round(count**0.25))
    lists: dict[str, list[Any]] = {
        "model.type": [f"model_{n}" for n in range(side)],
        "hp.batch_size": ["auto"],
        "hp.learning_rate": [f"{n + 1}e-4" for n in range(side)],
        "optimizer.params.weight_decay": [f"{n}e-3" for n in range(side)],
        "hp.frames": [n + 1 for n in range(side)],
    }
    inside = "".join(f"    {key}: {_listed(values)}\n" for key, values in lists.items())
    return f"{SHARED}grid_search:\n  grid:\n{inside}"


def paired(count: int) -> str:
    """Models paired with batch sizes, with ten seeds."""
    models = max(2, count // 10)
    names, sizes = [f"model_{n}" for n in range(models)], [n % 512 + 1 for n in range(models)]
    lists = f"    model.type: {_listed(names)}\n    hp.batch_size: {_listed(sizes)}\n"
    return f"{SHARED}grid_search:\n  repeat: 10\n  grid:\n{lists}"


def filtered(count: int) -> str:
    """Twice as many, half of them excluded by ten entries."""
    half = [f"model_{n}" for n in range(10)]
    entries = "".join(f"    - {{model.type: {name}, hp.frames: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}}\n" for name in half)
    models = [f"model_{n}" for n in range(20)]
    rates = [f"{n + 1}e-5" for n in range(max(1, count // 100))]
    return (
        f"{SHARED}grid_search:\n  grid:\n    model.type: {_listed(models)}\n    hp.learning_rate: {_listed(rates)}\n"
        f"    hp.frames: {_listed(list(range(1, 11)))}\n  exclude:\n{entries}"
    )


def written_out(count: int) -> str:
    """Every experiment as an entry of `include`."""
    entries = "".join(
        f"    - {{model.type: model_{n % 50}, hp.batch_size: {n + 1}, hp.learning_rate: 1e-3}}\n" for n in range(count)
    )
    return f"{SHARED}grid_search:\n  include:\n{entries}"


FORMS: dict[str, Callable[[int], str]] = {
    "four lists crossed": crossed,
    "models paired with sizes, ten seeds": paired,
    "crossed, half of them excluded": filtered,
    "each experiment written out (`include`)": written_out,
}

if __name__ == "__main__":
    main()
