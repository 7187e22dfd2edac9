"""How long `import brim` and `brim --help` take: the median of several fresh processes, beside an empty one.

python -m benchmarks.startup
python -m benchmarks.startup --repeats 3 --json results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import brim": ["-c", "import brim"],
    "brim --help": ["-m", "brim", "--help"],
    "brim find --help": ["-m", "brim", "find", "--help"],
    "brim profile --help": ["-m", "brim", "profile", "--help"],
    "brim train --help": ["-m", "brim", "train", "--help"],
    "import torch": ["-c", "import torch"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="processes for each command")
    parser.add_argument("--json", help="also write the rows to this file")
    asked = parser.parse_args()
    rows = []
    print("| command | median seconds | fastest |")
    print("|---|---|---|")
    for name, arguments in COMMANDS.items():
        times = [_seconds([sys.executable, *arguments]) for _ in range(asked.repeats)]
        rows.append({"command": name, "seconds": times})
        print(f"| `{name}` | {statistics.median(times):.3f} | {min(times):.3f} |", flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps({"rows": rows}, indent=1))


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
