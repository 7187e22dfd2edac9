"""Every command of the tables "checklist and remedies, item by item" of coming-from/hand-made-scripts.md runs.

On tiny stand-ins: MODEL, DATA, CONFIG, RUN and RUN0 are replaced. A row whose command brim does not have is skipped;
of those that it has none is.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import brim as library
from brim.settings.commands import COMMANDS
from tests.saved_models import save_language_model
from tests.training.training_runs import write_features

PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "hand-made-scripts.md"
HEADING = "### Checklist and remedies, item by item"
CODES = {"check": (0, 1)}  # a line may fail on a run this small; any other command must do its work
OWN_FOLDER = ("eval", "profile", "train")  # commands that leave a run
CONFIG = """\
model: {{type: mlp, params: {{hidden: [8, 8, 8]}}}}
data: {{root: {root}}}
hp: {{epochs: 1, effective_batch: 16, learning_rate: 0.01}}
training: {{device: cpu}}
"""
READER = """
def reader(max_crops: int = 4, max_new_tokens: int = 4):
    return lambda samples: ["yes" for sample in samples]
"""

Brim = Callable[..., Any]


class Row(NamedTuple):
    guide: str
    command: str

    @property
    def words(self) -> list[str]:
        """Without `brim`; of a line for torchrun what each rank runs."""
        words = shlex.split(self.command)
        return words[words.index("brim") + 1 :]


def guide_rows() -> list[Row]:
    rows = []
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        table = section.partition(HEADING)[2]
        commands = re.findall(r"^\| [^|]+ \| `([^`]+)` \| [^|]+ \|$", table, flags=re.MULTILINE)
        rows += [Row(section[:3], command) for command in commands]
    return rows


ROWS = guide_rows()


class Stand(NamedTuple):
    """What takes the places of a guide's words."""

    folder: Path
    model: Path
    reader: str
    data: Path
    config: Path
    evaluations: tuple[Path, Path]
    trainings: tuple[Path, Path]

    def word(self, word: str, row: Row) -> str:
        runs = self.trainings if row.guide == "002" else self.evaluations
        model = self.reader if row.words[0] == "profile" else str(self.model)
        places = {
            "MODEL": model, "DATA": str(self.data), "CONFIG": str(self.config), "RUN": str(runs[0]),
            "RUN0": str(runs[1]),
        }  # fmt: skip
        return places.get(word, word)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    folder = tmp_path_factory.mktemp("guides")
    data = folder / "questions.jsonl"
    lines = [{"id": str(number), "question": f"the cat {number}", "answer": "the dog"} for number in range(8)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "readers.py").write_text(READER, encoding="utf-8")
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(root=write_features(folder / "features.npz")), encoding="utf-8")
    model = save_language_model(folder / "model")
    evaluations = tuple(
        library.evaluate(
            str(model), data, max_tokens=4, device="cpu", num_workers=0, no_cache=True, output=folder / f"eval-{number}"
        ).folder
        for number in range(2)
    )
    trainings = tuple(
        library.train(config, no_cache=True, output=folder / f"train-{number}").folder for number in range(2)
    )
    return Stand(
        folder,
        model,
        f"py:{folder / 'readers.py'}:reader",
        data,
        config,
        evaluations,
        trainings,  # type: ignore[arg-type]
    )


def test_each_guide_has_a_table_and_every_row_one_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(HEADING) == 4
    assert {row.guide for row in ROWS} == {"000", "001", "002", "003"}
    written = sum(
        line.startswith("| ") and not line.startswith("| item of the guide")
        for table in re.findall(rf"{HEADING}.*?(?=^## )", text, flags=re.MULTILINE | re.DOTALL)
        for line in table.splitlines()
    )
    assert len(ROWS) == written > 40
    assert {row.words[0] for row in ROWS} >= {"eval", "profile", "train", "report", "check", "advise", "watch"}


def test_most_rows_have_a_command_that_is_there() -> None:
    assert {"eval", "profile", "train", "report", "find", "forecast"} <= COMMANDS.keys()
    assert sum(row.words[0] in COMMANDS for row in ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.guide} {row.command}")
def test_a_command_of_a_guide_runs(
    row: Row, stand: Stand, brim: Brim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = row.words[0]
    if name not in COMMANDS:
        pytest.skip(f"brim {name} is not there yet")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    words = [stand.word(word, row) for word in row.words]
    if name in OWN_FOLDER and "--compare-batch" not in words:
        words += ["-o", str(tmp_path / "run")]
    if name in ("eval", "profile", "find") and "--device" not in words:
        words += ["--device", "cpu"]
    if name == "eval" and "--max-tokens" not in words:
        words += ["--max-tokens", "4"]
    if name == "find":
        words += ["--max-tokens", "2", "--max-probes", "3"]
    result = brim(*words)
    assert result.code in CODES.get(name, (0,)), f"{result.out}\n{result.err}"
