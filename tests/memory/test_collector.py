"""What is loaded is set aside from garbage collection, whatever Python itself has set aside at its start."""

from __future__ import annotations

import subprocess
import sys

FEW_ARE_SET_ASIDE = """
import gc
gc.freeze()  # as Python 3.12 has some of its own at its start
from brim.memory.collector import heap_set_aside
loaded = [[] for _ in range(100_000)]
with heap_set_aside():
    print(gc.get_freeze_count() >= len(loaded))
print(gc.get_freeze_count())
"""

STILL_TRACKED = """
import gc
from brim.memory.collector import heap_set_aside, tracked_objects
mine = [[]]
with heap_set_aside():
    later = [[]]
    aside = gc.get_freeze_count()
    print(all(any(one is object for object in tracked_objects()) for one in (mine, later)))
    print(gc.get_freeze_count() >= aside > 0)
print(gc.get_freeze_count())
"""


def test_a_python_that_starts_with_objects_set_aside_sets_the_rest_aside_too() -> None:
    done = subprocess.run([sys.executable, "-c", FEW_ARE_SET_ASIDE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]


def test_what_a_block_has_set_aside_can_still_be_found() -> None:
    done = subprocess.run([sys.executable, "-c", STILL_TRACKED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "0"]
