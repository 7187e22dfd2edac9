"""For every test: a cache folder of its own, one thread, no ranks of the shell's, no colours, no odd widths.

And which files start first.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from brim.comparing.rounds import RoundRules
from brim.monitor.live import LiveRun
from brim.settings.caller import called_by_flags

# The same examples in every run, so that a gate is red for a reason; `--hypothesis-profile=roam` looks further.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.register_profile("roam", deadline=None, database=None)
settings.load_profile("steady")

# Hypothesis also draws numbers that stand in the modules loaded so far, and so other examples after other imports.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

# Tiny tensors: more threads only wait for each other, ten times as long on a busy machine. Child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell that starts the tests in the background has Ctrl-C ignored, in all their child processes too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Ten seconds or more each: the last of them must not run while other workers have nothing left to do.
LONGEST_FILES = (
    "tests/evaluation/test_ranks.py", "tests/evaluation/test_on_ray.py", "tests/training/test_ranks.py",
    "tests/training/test_own_loop_ranks.py",
    "tests/sweeps/test_launch_ray.py", "tests/searching/test_ranks_agree.py", "tests/searching/test_isolate.py",
    "tests/forecasting/test_stored_peaks.py", "tests/reporting/test_pages_in_chromium.py", "tests/cli/test_fuzz.py",
    "tests/cli/test_train.py", "tests/cli/test_profile.py", "tests/cli/test_find.py", "tests/test_typed_calls.py",
    "tests/cli/test_guides.py", "tests/docs/test_snippets.py", "tests/docs/test_reference.py",
    "tests/docs/test_site.py", "tests/test_recipes.py", "tests/integrations/test_transformers_ranks.py",
    "tests/integrations/test_lightning_ranks.py", "tests/ranks/test_agreement.py", "tests/running/test_kill.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, where workers share the files; alone, tests run in the order of their names."""
    if hasattr(config, "workerinput"):
        root = Path(__file__).parents[1]
        items.sort(key=lambda item: item.path.relative_to(root).as_posix() not in LONGEST_FILES)


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans go to a folder of this test, never to the user's own cache."""
    folder = tmp_path_factory.mktemp("xdg-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons measure three rounds and no more, however wide their intervals are."""
    monkeypatch.setattr("brim.comparing.rounds.RoundRules", functools.partial(RoundRules, most=3))


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs make themselves known in a folder of this test, never in the user's own."""
    folder = tmp_path_factory.mktemp("xdg-state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the runs of this test publish, update by update, each as the document is after it."""
    documents: list[dict[str, Any]] = []
    update = LiveRun.update

    def recorded(live: LiveRun, **fields: Any) -> None:
        update(live, **fields)
        documents.append(dict(live.document))

    monkeypatch.setattr(LiveRun, "update", recorded)
    return documents


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """Every probe collects garbage: half a second to walk through torch and transformers, unless they are set aside."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # as this process ends, libraries look for what was not freed


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that did not fit alone are tried again at once: nothing here waits for another process."""
    monkeypatch.setattr("brim.running.retries.sleep", lambda seconds: None)


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steady steps in a probe, for tests in which nothing depends on how fast a step is."""
    from brim.searching.probe import ProbeSettings

    short = functools.partial(ProbeSettings, steady_seconds=0.001, max_steps=3)
    monkeypatch.setattr("brim.searching.find.ProbeSettings", short)


@pytest.fixture
def words_of_the_command_line() -> Iterator[None]:
    """Messages name settings as flags, as where `brim` itself runs; without it they name Python's parameters."""
    with called_by_flags():
        yield
