"""What people copy into their CI: the workflow, the hook and the file of workloads, as far as that is checked offline.

The commands in them are run as a shell would run them, in a folder laid out as GitHub's runner lays it out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.docs.blocks import ROOT
from tests.docs.page_run import Server, plain_environment

EXAMPLES = ROOT / "examples" / "ci"
PAGE = (ROOT / "docs" / "integrations" / "ci.md").read_text(encoding="utf-8")
SMALL = """
defaults: {gpu: t4, batch_size: 512}
workloads:
  net: {model: "py:nets.py:net"}
"""
NETS = """
import torch

def net(device):
    model = torch.nn.Linear(512, WIDTH).to(device)
    return {"step": model, "make_batch": lambda n: torch.ones(n, 512, device=device), "model": model}
"""


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def titled(name: str) -> str:
    """The block of the page that is this file."""
    found = re.search(rf'^```yaml title="{re.escape(name)}"\n(.*?)^```$', PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("title", "file"),
    [
        ("forecasts.yaml", "forecasts.yaml"),
        (".github/workflows/forecast.yml", "forecast.yml"),
        (".pre-commit-config.yaml", "pre-commit-config.yaml"),
    ],
)
def test_the_page_shows_the_files_that_ship(title: str, file: str) -> None:
    assert titled(title) == (EXAMPLES / file).read_text(encoding="utf-8")


def test_the_file_of_workloads_is_valid_by_its_schema_and_mistakes_are_not() -> None:
    schema = json.loads((ROOT / "src/brim/settings/schemas/forecast.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    document = loaded(EXAMPLES / "forecasts.yaml")
    assert list(validator.iter_errors(document)) == []
    for wrong in (
        {},
        {"workloads": {}},
        {"workloads": {"a": 3}},
        {"workloads": {"a": {"model": 3}}},
        {"workloads": {"a": {"model": "resnet18", "batch_size": 0}}},
        {"workloads": {"a": {"model": "resnet18", "mode": "fast"}}},
        {"workloads": {"a": {"model": "resnet18", "allow": 3}}},
        {"workloads": {"a": {"model": "resnet18", "save": "x.json"}}},
        {"workloads": {"a": {"model": "resnet18"}}, "worklods": {}},
    ):
        assert list(validator.iter_errors(wrong)), wrong
    both = {
        "workloads": {"a": {"model": "resnet18", "batch-size": 8, "knob": {"size": 64}, "allow": "3%", "gpu": ["t4"]}}
    }
    assert list(validator.iter_errors(both)) == []


def jobs() -> dict[str, dict[str, Any]]:
    workflow = loaded(EXAMPLES / "forecast.yml")
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}  # YAML reads `on` as true
    assert workflow[True] == "pull_request"
    assert workflow["permissions"] == {"contents": "read"}
    found: dict[str, dict[str, Any]] = workflow["jobs"]
    return found


def steps() -> list[dict[str, Any]]:
    return [step for job in jobs().values() for step in job["steps"]]


def test_the_workflow_has_the_shape_of_one() -> None:
    known = {"name", "if", "uses", "with", "run", "env", "working-directory", "continue-on-error"}
    for step in steps():
        assert set(step) <= known
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
    text = (EXAMPLES / "forecast.yml").read_text(encoding="utf-8")
    # Nothing that others write (a title, a branch) is put into a shell.
    for script in (step["run"] for step in steps() if "run" in step):
        assert "${{" not in script
    assert "pull_request_target" not in text


def test_the_job_that_runs_the_code_of_a_pull_request_can_write_nothing() -> None:
    forecast, comment = jobs()["forecast"], jobs()["comment"]
    assert "permissions" not in forecast  # those of the workflow: it reads
    (checkout,) = (step for step in forecast["steps"] if step.get("uses", "").startswith("actions/checkout@"))
    assert checkout["with"]["persist-credentials"] is False
    assert not any("token" in str(step).lower() for step in forecast["steps"])
    assert comment["permissions"] == {"pull-requests": "write"}
    assert [step["uses"] for step in comment["steps"] if "uses" in step] == ["actions/download-artifact@v4"]
    assert not any(word in step.get("run", "") for step in comment["steps"] for word in ("--file", "pip ", "python"))


@pytest.mark.parametrize(
    ("there", "call"),
    [("", "POST repos/o/r/issues/7/comments"), ("11\n12\n", "PATCH repos/o/r/issues/comments/11")],
)
def test_a_comment_is_written_once_and_then_replaced(tmp_path: Path, there: str, call: str) -> None:
    """With a stand-in for GitHub's `gh` that prints the ids it is to find, and keeps what else it is asked for."""
    gh = tmp_path / "gh"
    gh.write_text('#!/bin/sh\nif [ "$2" = --paginate ]; then printf "$THERE"; else echo "$3 $4 $6" >> calls.txt; fi\n')
    gh.chmod(0o755)
    (step,) = (step for step in jobs()["comment"]["steps"] if "run" in step)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "THERE": there, "GH_TOKEN": "", "REPOSITORY": "o/r", "NUMBER": "7"
    }  # fmt: skip
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "calls.txt").read_text() == f"{call} body=@comment.md\n"
    assert 'select(.user.login == "github-actions[bot]"' in step["run"]  # nobody else's comment is written over


class Runner:
    """A folder as a runner has it: the base, the change, and a place for temporary files."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        for name in ("temp", "base", "change"):
            (folder / name).mkdir()
        self.environment = plain_environment(folder, server.programs) | {
            "BRIM_TEST_SERVER": server.socket, "RUNNER_TEMP": str(folder / "temp"),
        }  # fmt: skip

    def put(self, where: str, width: int) -> None:
        file = self.folder / where / "nets.py"
        file.write_text(NETS.replace("WIDTH", str(width)))
        os.utime(file, (width, width))  # Python takes compiled code for current by size and whole seconds
        (self.folder / where / "forecasts.yaml").write_text(SMALL)

    def run(self, script: str, where: str) -> tuple[int, str]:
        """The exit code, and what was printed."""
        with (self.folder / "printed.txt").open("w+", encoding="utf-8") as file:
            code = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", script], cwd=self.folder / where, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False,
            ).returncode  # fmt: skip
            file.seek(0)
            return code, file.read()


@pytest.fixture
def runner(tmp_path: Path, commands: Server) -> Runner:
    return Runner(tmp_path, commands)


def forecasts() -> list[dict[str, Any]]:
    return [step for step in steps() if "brim forecast --file" in step.get("run", "")]


def test_the_workflow_fails_a_change_that_needs_more_memory_and_leaves_a_comment(runner: Runner) -> None:
    base, change = forecasts()
    runner.put("base", 1024)
    runner.put("change", 4096)
    code, printed = runner.run(base["run"], base["working-directory"])
    assert code == 0, printed
    code, printed = runner.run(change["run"], change["working-directory"])
    assert code == 1, printed
    comment = (runner.folder / "temp" / "comment.md").read_text(encoding="utf-8")
    assert comment.startswith("<!-- brim forecast -->")
    assert "**grew**" in comment
    assert len(comment) < 65_536
    write = next(step["run"] for step in steps() if "gh api" in step.get("run", ""))
    assert comment.partition("\n")[0] in write  # by which the comment is found again


def test_the_workflow_checks_the_first_change_that_brings_the_file(runner: Runner) -> None:
    _, change = forecasts()
    runner.put("change", 1024)
    code, printed = runner.run(change["run"], change["working-directory"])
    assert code == 0, printed
    assert "every workload fits" in printed


def test_the_hooks_run_the_check_against_a_committed_base(runner: Runner) -> None:
    (shipped,) = loaded(ROOT / ".pre-commit-hooks.yaml")
    (local,) = loaded(EXAMPLES / "pre-commit-config.yaml")["repos"][0]["hooks"]
    for hook in (shipped, local):
        assert {"id", "name", "entry", "language", "files"} <= set(hook)
        assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("brim-forecast", "system", False)
        pattern = re.compile(hook["files"])
        assert all(pattern.search(name) for name in ("src/model.py", "forecasts.yaml", "forecasts.base.json"))
        assert not pattern.search("README.md")
    runner.put("change", 1024)
    code, printed = runner.run("brim forecast --file forecasts.yaml --save forecasts.base.json", "change")
    assert code == 0, printed
    command = shlex.join([*shlex.split(shipped["entry"]), *shipped["args"]])
    assert runner.run(command, "change")[0] == 0
    runner.put("change", 4096)
    assert runner.run(command, "change")[0] == 1
    assert runner.run(local["entry"], "change")[0] == 1
