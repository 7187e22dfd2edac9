"""How long `import brim` and `brim --help` take: the median of several fresh processes, beside an empty one.

python -m benchmarks.startup
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import brim": ["-c", "import brim"],
    "brim --help": ["-m", "brim", "--help"],
    "brim find --help": ["-m", "brim", "find", "--help"],
    "brim profile --help": ["-m", "brim", "profile", "--help"],
    "brim train --help": ["-m", "brim", "train", "--help"],
    "import torch": ["-c", "import torch"],
}


def main(repeats: int = 9) -> None:
    print("| command | median seconds | fastest |")
    print("|---|---|---|")
    for name, arguments in COMMANDS.items():
        times = [_seconds([sys.executable, *arguments]) for _ in range(repeats)]
        print(f"| `{name}` | {statistics.median(times):.3f} | {min(times):.3f} |")


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
