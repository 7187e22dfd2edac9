"""`brim forecast` as a check: bytes by module, files of workloads, a base that was kept, and how each ends."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import brim as library
from brim.errors import RequestError
from brim.planning.forecast_check import ComparedSize
from brim.planning.forecast_markdown import change_text

Brim = Callable[..., Any]

NETS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(256, {width}), nn.ReLU(), nn.Linear({width}, 256))
            self.head = nn.Linear(256, 10)

        def forward(self, batch):
            return self.head(self.body(batch))

    def net(width: int = 1, *, device, mode="train"):
        model = Net(width).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        def step(batch):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {{"step": step, "make_batch": lambda n: torch.ones(n, 256, device=device), "model": model,
                "optimizer": optimizer}}

    def flat(device):
        return (lambda batch: batch * 2), (lambda n: torch.ones(n, 256, device=device))

    def vast(device):
        return (lambda batch: batch * 2), (lambda n: torch.ones(n, 5 * 2**30, device=device))

    def broken():
        raise ValueError("no checkpoint at step 7")
"""


def write_nets(folder: Path, width: int = 1100) -> Path:
    file = folder / "nets.py"
    file.write_text(textwrap.dedent(NETS.format(width=width)))
    os.utime(file, (width, width))  # Python takes compiled code for current by size and whole seconds
    return file


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_nets(tmp_path)


def write_file(folder: Path, **workloads: Any) -> Path:
    file = folder / "forecasts.yaml"
    content = {"defaults": {"gpu": "t4", "batch_size": 512}, "workloads": workloads}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


ONE = ("forecast", "py:nets.py:net", "--gpu", "t4", "-b", "512")


# ------------------------------------------------------------------------------------------------ by module


def test_rows_of_modules_add_up_in_json_at_every_size(brim: Brim, nets: Path) -> None:
    listed = json.loads(brim(*ONE[:4], "--by-module", "--json").out)
    assert len(listed["sizes"]) > 3
    for size in listed["sizes"]:
        assert sum(row["bytes"] for row in size["by_module"]) == size["peak_allocated_bytes"]
    one = json.loads(brim(*ONE, "--by-module", "1", "--json").out)
    assert {"body", "head", "(batch)"} <= {row["module"] for row in one["by_module"]}
    assert json.loads(brim(*ONE, "--json").out)["by_module"] == []


@pytest.mark.parametrize(
    ("flags", "deepest"),
    [(("--by-module",), 2), (("--by-module", "1"), 1), (("--by-module=1",), 1), (("--by_module", "0"), 0)],
)
def test_the_depth_may_be_left_out(brim: Brim, nets: Path, flags: tuple[str, ...], deepest: int) -> None:
    for words in ((*ONE, *flags, "--json"), ("forecast", *flags, *ONE[1:], "--json")):
        rows = json.loads(brim(*words).out)["by_module"]
        names = [row["module"] for row in rows if not row["module"].startswith("(") and row["module"]]
        assert max((name.count(".") + 1 for name in names), default=0) == deepest


def test_the_table_by_module_fits_eighty_columns(brim: Brim, nets: Path) -> None:
    result = brim(*ONE, "--by-module")
    assert result.code == 0
    assert "body.0" in result.out
    _, title, table = result.out.partition("by module at the peak of batch size 512")
    assert title
    assert all(len(line) <= 80 for line in table.splitlines())
    several = brim("forecast", "py:nets.py:net", "--gpu", "t4", "--gpu", "a100-80gb", "--by-module")
    assert several.out.count("body.0") == 2


def test_a_wrong_depth_is_refused(brim: Brim, nets: Path) -> None:
    result = brim(*ONE, "--by-module=deep")
    assert result.code == 2
    assert "--by-module deep: it must be a whole number from 0" in result.err


def test_a_page_and_a_report_show_the_modules(brim: Brim, nets: Path, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    brim(*ONE, "--save", "base.json")
    result = brim(*ONE, "--by-module", "--against", "base.json", "--plot", "page.html", "-o", "run")
    assert result.code == 0, result.err
    assert "Bytes at the peak by module" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert brim("report", "run").code == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "body.0" in page
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert titles.index("Check") < titles.index("NVIDIA T4: memory by module")  # the verdict first
    again = brim("find", "py:nets.py:flat", "--max-batch-size", "2", "--device", "cpu", "-o", "run")
    assert again.code in (0, 2)  # as every command does with a folder that holds another's run


# ------------------------------------------------------------------------------------ one workload, one base


def test_an_unchanged_forecast_passes_and_saving_again_gives_the_same_bytes(brim: Brim, nets: Path) -> None:
    assert brim(*ONE, "--save", "base.json").code == 0
    first = Path("base.json").read_bytes()
    assert brim(*ONE, "--save", "again.json").code == 0
    assert Path("again.json").read_bytes() == first
    result = brim(*ONE, "--against", "base.json", "--allow", "0")
    assert result.code == 0, result.out
    assert "ok: 1 workload: no peak has grown" in result.out


def test_growth_beyond_what_is_allowed_ends_with_one_and_names_the_modules(brim: Brim, nets: Path) -> None:
    brim(*ONE, "--save", "base.json")
    write_nets(nets.parent, width=2048)
    result = brim(*ONE, "--against", "base.json", "--allow", "3%", "--markdown", "comment.md")
    assert result.code == 1
    assert "GREW" in result.out
    _, _, tables = result.out.partition("peak allocated bytes on t4-16gb against base.json")
    assert all(len(line) <= 80 for line in tables.splitlines() if not line.startswith("note:"))
    grown = [line.split() for line in result.out.splitlines() if line.startswith(("body.", "head"))]
    assert grown[0][0] in ("body.0", "body.1", "body.2")
    assert not any(row[0] == "head" and row[5].startswith("+") for row in grown)
    comment = Path("comment.md").read_text(encoding="utf-8")
    assert comment.startswith("<!-- brim forecast -->")
    assert "**grew**" in comment
    assert "`body.0`" in comment
    check = json.loads(brim(*ONE, "--against", "base.json", "--allow", "3%", "--json").out)["check"]
    assert check["ok"] is False
    (line,) = check["workloads"]
    (size,) = line["sizes"]
    assert (line["verdict"], size["batch_size"], size["grew"]) == ("grew", 512, True)
    assert size["change_bytes"] == size["bytes"] - size["base_bytes"] > size["allowed_bytes"]
    assert sum(one["change_bytes"] for one in size["modules"]) == size["change_bytes"]
    assert size["modules"][0]["module"].startswith("body.")


def test_growth_that_is_allowed_and_shrinkage_pass_and_are_shown(brim: Brim, nets: Path) -> None:
    brim(*ONE, "--save", "base.json")
    write_nets(nets.parent, width=1104)
    allowed = brim(*ONE, "--against", "base.json", "--allow", "3%")
    assert allowed.code == 0
    assert re.search(r"\+0\.\d%|\+\d[\d,]* B", allowed.out)
    assert brim(*ONE, "--against", "base.json").code == 1  # nothing is allowed unless it is asked for
    assert brim(*ONE, "--against", "base.json", "--allow", "200MiB").code == 0
    assert brim(*ONE, "--against", "base.json", "--allow", "1KiB").code == 1
    write_nets(nets.parent, width=512)
    shrunk = brim(*ONE, "--against", "base.json", "--allow", "0", "--json")
    assert shrunk.code == 0
    (line,) = json.loads(shrunk.out)["check"]["workloads"]
    assert line["verdict"] == "ok"
    assert line["sizes"][0]["change_bytes"] < 0


@pytest.mark.parametrize(
    ("now", "shown"), [(100, "0"), (103, "+3.0%"), (100 + 2**-10, "+1.0 MiB"), (100 - 2**-30, "-1 B")]
)
def test_a_small_change_of_a_large_peak_is_shown_in_bytes(now: float, shown: str) -> None:
    size = ComparedSize(
        gpu="t4-16gb", batch_size=1, base_bytes=100 * 2**30, bytes=int(now * 2**30), allowed_bytes=0,
        base_reserved_bytes=0, reserved_bytes=0, fits=True,
    )  # fmt: skip
    assert change_text(size) == shown


def test_without_a_size_every_common_size_is_judged_and_the_largest_that_fits_is_shown(brim: Brim, nets: Path) -> None:
    words = ("forecast", "py:nets.py:net", "--memory", "1GiB")
    brim(*words, "--save", "base.json")
    write_nets(nets.parent, width=1400)
    result = brim(*words, "--against", "base.json", "--allow", "50%", "--json")
    assert result.code == 0
    (line,) = json.loads(result.out)["check"]["workloads"]
    assert [size["batch_size"] for size in line["sizes"]][:4] == [1, 2, 4, 8]
    (largest,) = line["batch_size_max"].values()
    assert largest["now"] < largest["base"]
    assert "was" in brim(*words, "--against", "base.json", "--allow", "50%").out
    assert brim(*words, "--against", "base.json", "--allow", "1%").code == 1


def test_a_size_that_was_asked_for_and_does_not_fit_fails_whatever_is_allowed(brim: Brim, nets: Path) -> None:
    roomy = ("forecast", "py:nets.py:net", "-b", "8192", "--memory", "4GiB")
    assert brim(*roomy, "--save", "base.json").code == 0
    limited = (*roomy, "--memory-limit", "64MiB", "--against", "base.json", "--allow", "100%")
    result = brim(*limited)
    assert result.code == 1
    assert "DOES NOT FIT" in " ".join(result.out.split())
    assert brim(*limited[:-4]).code == 0  # without a check it is an answer


def test_the_modules_that_grew_are_named_also_where_the_size_no_longer_fits(brim: Brim, nets: Path) -> None:
    words = ("forecast", "py:nets.py:net", "-b", "512", "--memory", "4GiB", "--memory-limit", "72MiB")
    assert brim(*words, "--save", "base.json").code == 0
    write_nets(nets.parent, width=4096)
    result = brim(*words, "--against", "base.json", "--markdown", "comment.md")
    assert result.code == 1
    assert "does not fit a card of 4.0 GiB" in " ".join(result.out.split())
    assert re.search(r"^body\.\d .*\+", result.out, flags=re.MULTILINE)
    assert "<details open>" in Path("comment.md").read_text(encoding="utf-8")


def test_nothing_that_fits_under_a_memory_limit_is_answered_with_that_limit(brim: Brim, nets: Path) -> None:
    result = brim("forecast", "py:nets.py:vast", "--memory", "4GiB", "--memory-limit", "1GiB")
    assert result.code == 3
    assert "(--memory-limit 1.0 GiB, and a CUDA context of 640.0 MiB)" in result.err
    assert "(margin 5%)" in brim("forecast", "py:nets.py:vast", "--memory", "4GiB").err


def test_a_base_of_other_versions_and_settings_is_compared_and_that_is_noted(brim: Brim, nets: Path) -> None:
    brim(*ONE, "--save", "base.json")
    base = json.loads(Path("base.json").read_text(encoding="utf-8"))
    base["torch"] = "2.6.0"
    Path("base.json").write_text(json.dumps(base))
    result = brim(*ONE, "--against", "base.json")
    assert result.code == 0
    assert "the base was made with torch 2.6.0" in result.out
    other = brim(*ONE, "--knob", "width=7", "--against", "base.json", "--allow", "900%")
    assert "width was" in other.out
    named = brim("forecast", "py:nets.py:flat", *ONE[2:], "--against", "base.json", "--allow", "900%")
    assert "the base is of py:nets.py:net" in named.out


def test_the_output_of_json_is_a_base_too(brim: Brim, nets: Path) -> None:
    Path("plain.json").write_text(brim(*ONE, "--json").out)
    result = brim(*ONE, "--against", "plain.json")
    assert result.code == 0
    assert "the base has no bytes by module" in result.out
    cards = (*ONE, "--gpu", "a100-80gb", "--by-module")
    Path("cards.json").write_text(brim(*cards, "--json").out)
    check = json.loads(brim(*cards, "--against", "cards.json", "--json").out)["check"]
    assert {size["gpu"] for size in check["workloads"][0]["sizes"]} == {"t4-16gb", "a100-80gb"}


def test_a_base_of_deeper_rows_is_compared_to_the_depth_of_both(brim: Brim, nets: Path) -> None:
    brim(*ONE, "--by-module", "2", "--save", "base.json")
    write_nets(nets.parent, width=2048)
    check = json.loads(brim(*ONE, "--by-module", "1", "--against", "base.json", "--json").out)["check"]
    size = check["workloads"][0]["sizes"][0]
    assert "body" in {one["module"] for one in size["modules"]}
    assert sum(one["change_bytes"] for one in size["modules"]) == size["change_bytes"]


ALONE = (
    '{"schema": "brim.forecast/1", "gpu": {"key": %s}, "batch_size": 512, "batch_size_max": 512, '
    '"peak_allocated_bytes": 1, "peak_reserved_bytes": 1, %s}'
)

TWICE = '{"name": "net", "forecasts": []}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        ("not: json", "it is no JSON file"),
        ("<<<<<<< HEAD\n{}", "write it again with --save"),
        ("[]", "it is no forecast"),
        ('{"schema": "brim.plan/1"}', "it is no forecast (schema 'brim.plan/1')"),
        ('{"schema": "brim.forecasts/1"}', "is damaged"),
        ('{"schema": "brim.forecasts/1", "workloads": [{"name": "a", "forecasts": [{"gpu": 1}]}]}', "is damaged"),
        ('{"schema": "brim.forecasts/1", "workloads": []}', "nothing to compare"),
        ('{"schema": "brim.forecast/1", "forecasts": []}', "is damaged"),
        (ALONE % ('"t4-16gb"', '"knobs": 3'), "is damaged"),
        (ALONE % ('"t4-16gb"', '"made_for": ["dtype"]'), "is damaged"),
        (ALONE % ('["t4-16gb"]', '"knobs": {}'), "is damaged"),
        (ALONE.replace('max": 512', 'max": "512"') % ('"t4-16gb"', '"knobs": {}'), "batch_size_max is '512'"),
        (ALONE.replace('bytes": 1', 'bytes": -1') % ('"t4-16gb"', '"knobs": {}'), "peak_allocated_bytes is -1"),
        (ALONE % ('"t4-16gb"', '"by_module": [{"module": "a", "parts": {"inputs": NaN}}]'), "inputs is nan"),
        (ALONE % ('"t4-16gb"', '"by_module": [{"module": "a", "parts": []}]'), "is damaged"),
        (f'{{"schema": "brim.forecasts/1", "workloads": [{TWICE}, {TWICE}]}}', "it has net twice"),
    ],
)
def test_a_base_that_is_none_is_a_wrong_request(brim: Brim, nets: Path, content: str | None, words: str) -> None:
    if content is not None:
        Path("base.json").write_text(content)
    result = brim(*ONE, "--against", "base.json")
    assert result.code == 2
    assert words in " ".join(result.err.split())
    assert "Traceback" not in result.err


def test_a_folder_in_place_of_a_base_is_a_wrong_request(brim: Brim, nets: Path) -> None:
    result = brim(*ONE, "--against", ".")
    assert (result.code, result.err) == (2, "brim: --against .: it is a folder; give a file of --save\n")


def test_sizes_or_cards_that_the_base_lacks_are_a_wrong_request(brim: Brim, nets: Path) -> None:
    brim(*ONE, "--save", "base.json")
    other_size = brim(*ONE[:-1], "64", "--against", "base.json")
    assert other_size.code == 2
    assert "at batch size 512 on t4-16gb" in other_size.err
    assert brim("forecast", "py:nets.py:net", "--gpu", "a100-80gb", "-b", "512", "--against", "base.json").code == 2


def test_a_base_with_the_line_endings_and_the_mark_of_windows_is_read(brim: Brim, nets: Path) -> None:
    brim(*ONE, "--save", "base.json")
    text = Path("base.json").read_text(encoding="utf-8")
    Path("base.json").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert brim(*ONE, "--against", "base.json").code == 0


def test_a_card_of_one_side_alone_is_noted(brim: Brim, nets: Path) -> None:
    both = (*ONE, "--gpu", "a100-80gb")
    brim(*ONE, "--save", "one.json")
    brim(*both, "--save", "both.json")
    more, fewer = brim(*both, "--against", "one.json"), brim(*ONE, "--against", "both.json")
    assert (more.code, fewer.code) == (0, 0)
    assert "note: py:nets.py:net: a100-80gb is not in the base" in more.out
    assert "note: py:nets.py:net: a100-80gb is in the base only" in fewer.out


def test_a_forecast_that_has_become_approximate_is_noted(brim: Brim, nets: Path) -> None:
    brim(*ONE, "--save", "traced.json")
    nets.write_text(nets.read_text().replace("self.body(batch)", "self.body(torch.from_numpy(batch.numpy() * 1))"))
    os.utime(nets, (7, 7))
    now = json.loads(brim(*ONE, "--against", "traced.json", "--save", "guessed.json", "--json").out)["check"]
    assert [note for note in now["notes"] if "this forecast is approximate, the base is not: extended from" in note]
    write_nets(nets.parent)
    assert "note: py:nets.py:net: the base is approximate, this forecast is not" in brim(
        *ONE, "--against", "guessed.json"
    ).out.replace("\n", " ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--allow", "3%"), "it goes with --against"),
        (("--against", "base.json", "--allow", "3"), "write a percentage such as 3%"),
        (("--against", "base.json", "--allow", "-1%"), "write a percentage such as 3%"),
        (("--against", "base.json", "--allow", "some"), "write a percentage such as 3%"),
        (("--against", "base.json", "--save", "./base.json"), "names the same file"),
        (("--save", "nowhere/base.json"), "there is no folder"),
        (("--save", "."), "it is a folder"),
        (("--markdown", "nowhere/comment.md"), "there is no folder"),
        (("--file", "forecasts.yaml"), "MODEL"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(brim: Brim, nets: Path, flags: tuple[str, ...], words: str) -> None:
    brim(*ONE, "--save", "base.json")
    result = brim(*ONE, *flags)
    assert result.code == 2
    said = " ".join(result.err.split())
    assert words in said or "--file" in said


# -------------------------------------------------------------------------------------- files of workloads


def test_a_file_is_forecast_saved_and_checked_in_one_go(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(tmp_path, wide={"model": "py:nets.py:net"}, flat={"model": "py:nets.py:flat", "allow": "10%"})
    saved = brim("forecast", "--file", "forecasts.yaml", "--save", "base.json", "--markdown", "first.md")
    assert saved.code == 0, saved.out
    assert all(len(line) <= 80 for line in saved.out.splitlines())
    assert "| `wide` | t4-16gb | 512 |" in Path("first.md").read_text(encoding="utf-8")
    assert brim("forecast", "--file", "forecasts.yaml", "--against", "base.json").code == 0
    write_nets(tmp_path, width=2048)
    result = brim("forecast", "--file", "forecasts.yaml", "--against", "base.json", "--allow", "3%", "--json")
    assert result.code == 1
    document = json.loads(result.out)
    assert document["schema"] == "brim.forecasts/1"
    assert [one["name"] for one in document["workloads"]] == ["wide", "flat"]
    verdicts = {line["name"]: (line["verdict"], line["allow"]) for line in document["check"]["workloads"]}
    assert verdicts == {"wide": ("grew", "3%"), "flat": ("ok", "10%")}


def test_workloads_that_are_new_or_gone_are_shown_and_pass(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(tmp_path, old={"model": "py:nets.py:net"}, kept={"model": "py:nets.py:flat"})
    brim("forecast", "--file", "forecasts.yaml", "--save", "base.json")
    write_file(tmp_path, fresh={"model": "py:nets.py:net"}, kept={"model": "py:nets.py:flat"})
    result = brim("forecast", "--file", "forecasts.yaml", "--against", "base.json", "--json")
    assert result.code == 0
    lines = json.loads(result.out)["check"]["workloads"]
    assert {line["name"]: line["verdict"] for line in lines} == {"fresh": "new", "kept": "ok", "old": "gone"}
    shown = brim("forecast", "--file", "forecasts.yaml", "--against", "base.json", "--markdown", "comment.md").out
    assert "gone" in shown
    (fresh,) = (line for line in shown.splitlines() if line.startswith("fresh"))
    assert re.fullmatch(r"fresh +512 +[\d.]+ MiB +new *", fresh)  # what it needs, though there is nothing to compare
    comment = Path("comment.md").read_text(encoding="utf-8")
    assert re.search(r"^\| `fresh` \| t4-16gb \| 512 \| \| [\d.]+ MiB \| \| \| new \|$", comment, flags=re.MULTILINE)
    assert "| `old` | | | | | | | gone |" in comment
    write_file(tmp_path, other={"model": "py:nets.py:net"})
    assert brim("forecast", "--file", "forecasts.yaml", "--against", "base.json").code == 2  # nothing was checked


def test_a_workload_that_cannot_be_compared_is_not_a_pass(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(tmp_path, one={"model": "py:nets.py:net"}, two={"model": "py:nets.py:flat"})
    brim("forecast", "--file", "forecasts.yaml", "--save", "base.json")
    write_file(tmp_path, one={"model": "py:nets.py:net", "batch_size": 64}, two={"model": "py:nets.py:flat"})
    result = brim("forecast", "--file", "forecasts.yaml", "--against", "base.json")
    assert result.code == 1
    shown = " ".join(result.out.split())
    assert "NOT COMPARABLE" in shown
    assert (
        "one: the base is at batch size 512 on t4-16gb, this forecast at batch size 64 on t4-16gb; "
        "where that is meant, write the base again with --save"
    ) in shown


def test_one_workload_that_fails_stops_no_other_and_no_base_is_written(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(
        tmp_path,
        broken={"model": "py:nets.py:broken"},
        large={"model": "py:nets.py:net", "batch_size": 10**8},
        fine={"model": "py:nets.py:flat"},
    )
    result = brim("forecast", "--file", "forecasts.yaml", "--save", "base.json", "--markdown", "comment.md")
    assert result.code == 1
    assert "no checkpoint at step 7" in " ".join(result.out.split())
    assert "base.json is not written" in " ".join(result.err.split())
    assert not Path("base.json").exists()
    assert "**failed**" in Path("comment.md").read_text(encoding="utf-8")
    lines = json.loads(brim("forecast", "--file", "forecasts.yaml", "--json").out)["check"]["workloads"]
    assert {line["name"]: line["verdict"] for line in lines} == {
        "broken": "failed", "large": "does_not_fit", "fine": "ok",
    }  # fmt: skip


def test_a_workload_that_fits_in_no_size_is_one_that_failed(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(
        tmp_path, none={"model": "py:nets.py:net", "memory_limit": "1KiB", "batch_size": "auto"},
        fine={"model": "py:nets.py:flat"},
    )  # fmt: skip
    result = brim("forecast", "--file", "forecasts.yaml")
    assert result.code == 1
    assert "does not fit" in result.out


def test_a_card_that_no_size_fits_fails_beside_one_that_has_room(brim: Brim, nets: Path, tmp_path: Path) -> None:
    cards = ["t4", "a100-80gb"]
    write_file(tmp_path, vast={"model": "py:nets.py:vast", "gpu": cards, "batch_size": "auto"})
    result = brim("forecast", "--file", "forecasts.yaml", "--save", "base.json", "--json")
    assert result.code == 1
    (line,) = json.loads(result.out)["check"]["workloads"]
    assert (line["verdict"], line["text"]) == ("does_not_fit", "no batch size fits NVIDIA T4")
    assert brim("forecast", "--file", "forecasts.yaml", "--against", "base.json").code == 1


def test_a_size_that_fits_one_card_of_two_is_judged_card_by_card(brim: Brim, nets: Path, tmp_path: Path) -> None:
    cards = ["t4", "a100-80gb"]
    write_file(tmp_path, vast={"model": "py:nets.py:vast", "gpu": cards, "batch_size": 1})
    result = brim("forecast", "--file", "forecasts.yaml", "--markdown", "comment.md")
    assert result.code == 1
    rows = [line.split(maxsplit=2) for line in result.out.splitlines() if line.startswith("vast ")]
    assert [(card, "DOES NOT FIT" in row) for _, card, row in rows] == [("t4-16gb", True), ("a100-80gb", False)]
    assert "vast: batch size 1 does not fit NVIDIA T4\n" in result.out
    comment = Path("comment.md").read_text(encoding="utf-8").splitlines()
    assert ["does not fit" in line for line in comment if line.startswith("| `vast`")] == [True, False]


def test_a_narrow_terminal_loses_no_name_and_no_verdict(
    brim: Brim, nets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    both = {"a": {"model": "py:nets.py:net"}, "b": {"model": "py:nets.py:net", "gpu": "a100-80gb"}}
    write_file(tmp_path, **both)
    saved = brim("forecast", "--file", "forecasts.yaml", "--save", "base.json")
    write_nets(tmp_path, width=2048)
    checked = brim("forecast", "--file", "forecasts.yaml", "--against", "base.json")
    rows = [line.split() for line in (saved.out + checked.out).splitlines() if line.startswith(("a ", "b "))]
    assert [(row[:2], row[-1]) for row in rows if "at" not in row] == [
        (["a", "t4-16gb"], "ok"), (["b", "a100-80gb"], "ok"), (["a", "t4-16gb"], "GREW"), (["b", "a100-80gb"], "GREW"),
    ]  # fmt: skip
    assert "\N{HORIZONTAL ELLIPSIS}" not in saved.out + checked.out


def test_one_workload_is_checked_against_a_base_of_many(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(tmp_path, wide={"model": "py:nets.py:net"}, flat={"model": "py:nets.py:flat"})
    brim("forecast", "--file", "forecasts.yaml", "--save", "base.json")
    result = brim(*ONE, "--against", "base.json", "--json")
    assert result.code == 0
    assert len(json.loads(result.out)["check"]["workloads"]) == 1


def test_a_run_folder_of_a_file_has_a_report(brim: Brim, nets: Path, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    write_file(tmp_path, wide={"model": "py:nets.py:net"}, broken={"model": "py:nets.py:broken"})
    assert brim("forecast", "--file", "forecasts.yaml", "--by-module", "-o", "run").code == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["kind"] == "forecast"
    assert brim("report", "run").code == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for words in ("Forecast of 2 workloads", "wide, NVIDIA T4", "body.0", "no checkpoint at step 7"):
        assert words in page
    assert "before and now" not in page  # nothing was compared


MISTAKES = """\
defaults:
  gppu: t4
  mode: fast
workloads:
  a:
    model: resnet18
    batch_size: 0
  b: {}
  c:
    model: resnet18
    allow: 3
  d:
    model: resnet18
    split: test
  e:
    model: resnet18
    save: base.json
"""


def test_every_mistake_in_a_file_is_named_with_its_line(brim: Brim, nets: Path) -> None:
    Path("forecasts.yaml").write_text(MISTAKES)
    result = brim("forecast", "--file", "forecasts.yaml")
    assert result.code == 2
    lines = dict(re.findall(r"forecasts\.yaml:(\d+): error: (.*)", result.err))
    assert set(lines) == {"2", "3", "7", "8", "11", "12", "17"}
    assert "defaults.gppu: there is no such setting; did you mean gpu?" in lines["2"]
    assert "workloads.a.batch_size: 0: it must be auto" in lines["7"]
    assert "MODEL is missing" in lines["8"]
    assert "workloads.c.allow: 3: write a percentage" in lines["11"]
    assert "split: it goes with data" in lines["12"]
    assert "workloads.e.save: there is no such setting" in lines["17"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workloads: []\n", "there is no workload"),
        ("workloads: 3\n", "it must be workloads by name"),
        ("defaults: {gpu: t4}\n", "there is no workload"),
        ("workloads: {a: 3}\n", "it must be the settings of a workload"),
        ("workloads: {a: {model: x}}\ndefaults: 3\n", "it must be settings"),
        ("worklods: {}\n", "did you mean workloads?"),
        ("workloads:\n\ta: {}\n", "forecasts.yaml:2"),
    ],
)
def test_a_file_of_another_shape_is_refused(brim: Brim, nets: Path, text: str, words: str) -> None:
    Path("forecasts.yaml").write_text(text)
    result = brim("forecast", "--file", "forecasts.yaml")
    assert result.code == 2
    assert words in result.err


def test_a_file_given_as_the_model_is_answered_with_its_flag(brim: Brim, nets: Path) -> None:
    result = brim("forecast", "forecasts.yaml")
    assert result.code == 2
    assert "MODEL forecasts.yaml: give a file of workloads with --file" in result.err


def test_an_unknown_card_in_a_file_is_named_with_its_line_before_anything_runs(brim: Brim, nets: Path) -> None:
    Path("forecasts.yaml").write_text("workloads:\n  a:\n    model: py:nets.py:broken\n    gpu: rtx 9090\n")
    result = brim("forecast", "--file", "forecasts.yaml")
    assert result.code == 2
    assert "forecasts.yaml: workloads.a.gpu (line 4): rtx 9090" in result.err


def test_settings_of_a_workload_belong_into_the_file(brim: Brim, nets: Path) -> None:
    result = brim("forecast", "--file", "forecasts.yaml", "--gpu", "t4")
    assert result.code == 2
    assert "--gpu: with --file it belongs into the file" in result.err
    assert brim("forecast", "resnet18", "--file", "forecasts.yaml").code == 2


def test_a_card_of_its_own_replaces_that_of_the_defaults(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(tmp_path, one={"model": "py:nets.py:net", "memory": "6GiB"})
    document = json.loads(brim("forecast", "--file", "forecasts.yaml", "--json").out)
    assert [one["gpu"]["key"] for one in document["workloads"][0]["forecasts"]] == ["6.0 GiB card"]


def test_the_schema_is_printed_for_editors(brim: Brim) -> None:
    schema = json.loads(brim("forecast", "--schema").out)
    assert schema["title"] == "A file of brim forecast --file"


def test_names_from_outside_are_escaped_in_markdown(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(tmp_path, **{"a|b <img src=x> @all `x`": {"model": "py:nets.py:broken"}})
    brim("forecast", "--file", "forecasts.yaml", "--markdown", "comment.md")
    rows = [line for line in Path("comment.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `a")]
    assert rows == ["| `a\\|b <img src=x> @all 'x'` | | | | | | | **failed** |"]


def test_the_title_of_folded_modules_is_html(brim: Brim, nets: Path, tmp_path: Path) -> None:
    write_file(tmp_path, **{"net_train <b> @all": {"model": "py:nets.py:net"}})
    brim("forecast", "--file", "forecasts.yaml", "--save", "base.json")
    write_nets(tmp_path, width=2048)
    brim("forecast", "--file", "forecasts.yaml", "--against", "base.json", "--markdown", "comment.md")
    comment = Path("comment.md").read_text(encoding="utf-8")
    assert "<summary>net_train &lt;b&gt; @\u200ball: modules that changed at batch size 512</summary>" in comment


# ----------------------------------------------------------------------------------------------- in Python


def test_the_same_calls_work_in_python(nets: Path, tmp_path: Path) -> None:
    first = library.forecast("py:nets.py:net", gpu="t4", batch_size=512, by_module=True, save="base.json")
    assert {row.module for row in first.forecasts[0].by_module} >= {"body.0", "head", "(batch)"}
    assert first.check is None
    write_nets(tmp_path, width=2048)
    second = library.forecast("py:nets.py:net", gpu="t4", batch_size=512, against="base.json", allow="3%")
    assert second.check is not None
    assert not second.check.ok
    assert second.check.failed[0].worst is not None
    assert second.check.failed[0].worst.modules[0].change_bytes > 0
    assert second.compare("base.json", allow="900%").ok
    assert not second.compare(first).ok
    assert first.compare(second).ok
    assert not second.compare(first.document, allow=4096).ok
    with pytest.raises(RequestError, match=r"allow=0\.03: write a percentage"):
        second.compare(first, allow=0.03)  # type: ignore[arg-type]
    write_file(tmp_path, wide={"model": "py:nets.py:net"}, broken={"model": "py:nets.py:broken"})
    listed = library.forecast(file="forecasts.yaml", allow=None)
    assert [(one.name, one.error is None) for one in listed.workloads] == [("wide", True), ("broken", False)]
    assert listed.check is not None
    assert [line.verdict for line in listed.check.lines] == ["ok", "failed"]
    with pytest.raises(RequestError, match="gpu=: with file= it belongs into the file"):
        library.forecast(file="forecasts.yaml", gpu="t4")
