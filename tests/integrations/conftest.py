"""Models and tasks that several tests share; each is made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import saved_models


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save_language_model(tmp_path_factory.mktemp("saved") / "lm")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = saved_models.CHAT_TEMPLATE
    return saved_models.save_language_model(tmp_path_factory.mktemp("saved") / "chat", chat_template=template)


@pytest.fixture(scope="session")
def seq2seq_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save_seq2seq(tmp_path_factory.mktemp("saved") / "seq2seq")


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lm-eval's account of the machine, for which it starts programs: three seconds in each run."""
    evaluator = pytest.importorskip("lm_eval.evaluator")
    monkeypatch.setattr(evaluator, "add_env_info", lambda storage: None)


@pytest.fixture(scope="session", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Data sets are cached in a folder of the tests, and no hub is asked."""
    values = {"HF_DATASETS_CACHE": str(tmp_path_factory.mktemp("cached")), "HF_HUB_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
