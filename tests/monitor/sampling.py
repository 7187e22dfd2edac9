"""Short runs under a sampler, and waiting for its thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from brim.monitor.live import LIVE_FILE
from brim.monitor.sampler import Sampler
from brim.storage.files import read_json

HEADER = (
    "time_seconds,gpu_utilisation,gpu_memory_used_bytes,gpu_memory_process_bytes,gpu_memory_others_bytes,"
    "gpu_power_watts,gpu_sm_clock_mhz,gpu_memory_clock_mhz,gpu_temperature_c,throttle_reasons,host_cpu,"
    "host_memory_available_bytes,process_rss_bytes"
)
ONCE = 3600.0  # an interval that no test lives through: only the first sample and the last are taken


def sample_once(path: Path | None, **card: str | int) -> Sampler:
    with Sampler(path, interval_seconds=ONCE, **card) as sampler:  # type: ignore[arg-type]
        pass
    return sampler


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def published_ranks(folder: Path) -> list[int]:
    """The processes of the ranks of the run in a folder, as soon as it publishes them."""
    found: list[int] = []

    def are_there() -> bool:
        found[:] = (read_json(folder / LIVE_FILE) or {}).get("rank_pids", [])
        return bool(found)

    wait_until(are_there)
    return found


def wait_for_more(sampler: Sampler, count: int = 2) -> None:
    """Until samples are there that began after this call."""
    enough = sampler.summary().samples + count + 1
    wait_until(lambda: sampler.summary().samples >= enough)
