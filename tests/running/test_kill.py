"""kill −9 at random moments: nothing lost, nothing twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ITEMS = 60_000
KILLS = 50

WORKER = """
import json, sys, time
from pathlib import Path
import brim

journal = Path(sys.argv[1])
lines = journal.read_bytes().split(b"\\n")[:-1] if journal.exists() else []
before = {json.loads(line)["item"] for line in lines[1:]}

def function(batch):
    assert not before.intersection(batch), "computed again"
    time.sleep(0.0001 * len(batch))
    return [f"answer {item}" for item in batch]

brim.map(function, range(int(sys.argv[2])), batch_size=16, journal=journal, resume=True)
"""


def test_fifty_kills_lose_no_item_and_record_none_twice(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    moments = random.Random(0)
    kills = 0
    while kills < KILLS:
        before = _size(journal)
        worker = subprocess.Popen([sys.executable, "-c", WORKER, str(journal), str(ITEMS)], stderr=subprocess.PIPE)
        if moments.random() < 0.7:  # once it has begun to write, at any moment of that; else at any moment at all
            while _size(journal) == before and worker.poll() is None:
                time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.06))
        worker.kill()
        _, errors = worker.communicate()
        assert worker.returncode == -9, errors.decode()
        kills += 1
    assert _size(journal) > 0
    subprocess.run([sys.executable, "-c", WORKER, str(journal), str(ITEMS)], check=True)
    header, *entries = (json.loads(line) for line in journal.read_text().splitlines())
    assert header["schema"] == "brim.journal/1"
    assert Counter(entry["item"] for entry in entries) == Counter(range(ITEMS))
    assert all(entry["result"] == f"answer {entry['item']}" for entry in entries)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
