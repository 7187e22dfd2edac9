"""The runner of snippets finds what is wrong with a page; numbers, widths and what a page leaves out are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import read_page
from tests.docs.checked_commands import check_command
from tests.docs.compared import difference
from tests.docs.page_run import PageRun, Server, server
from tests.docs.refresh import refresh

PAGE = """\
```python title="shapes.py"
SIDE = 3
```

```console
$ cat shapes.py
SIDE = 8
$ export SIDE=4; mkdir inner; cd inner
$ echo "side $SIDE in $(basename $PWD)"
side 7 in inner
$ brim --version
brim 9.9.9, …
```

<!-- exit: 2 -->
```console
$ brim find --no-such-flag
…
…No such option…
…
```

```python
import shapes
print("the side is", shapes.SIDE)
```

```text
the side is 12
```
"""


@pytest.fixture(scope="module")
def commands() -> Iterator[Server]:
    with server() as running:
        yield running


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("peak 49.3 MiB in 8 ms", "peak 1,024 GiB in 1.2 s"),
        ("took 50 s", "took 1 min 20 s"),
        ("a   64  0.552 ± 0.068", "a 8 0.9 ± 0.1"),
        ("runs/eval-20250101-120000 ea2bdd5575a1ec7e", "runs/eval-20260302-010203 0123456789abcdef"),
        ("┃ ━━━━━━ 12", "┃ ━━━ 3"),
        ("torch 2.15.0…, built for …; CPU", "torch 2.15.0+cu132, built for CUDA 13.2; CPU"),
        ("the … of it", "the best rate of it"),
    ],
)
def test_numbers_and_widths_may_differ(expected: str, printed: str) -> None:
    assert difference([expected], [printed]) == ""


@pytest.mark.parametrize(
    ("expected", "printed"),
    [("64 fits", "64 oom"), ("peak 3", "peak"), ("resnet18", "resnext18"), ("the … of it", "the best rate of all")],
)
def test_words_may_not_differ(expected: str, printed: str) -> None:
    assert f"-{expected}\n+{printed}" in difference([expected], [printed])


def test_a_line_of_dots_stands_for_any_number_of_lines() -> None:
    assert difference(["first", "…", "last"], ["first", "last"]) == ""
    assert difference(["first", "…", "last"], ["first", "x", "", "y", "last"]) == ""
    assert difference(["first", "…", "last"], ["first", "x"]) != ""
    assert difference(["a", "…", "b 1", "c"], ["a", "x", "b 2", "d"]).splitlines()[2:] == [
        " a",
        " …",
        " b 1",
        "-c",
        "+d",
    ]
    swapped = difference(["one chosen", "two 1", "check: …", "…"], ["another chosen", "two 2", "check: done"])
    assert swapped.splitlines()[2:] == ["-one chosen", "+another chosen", " two 1", " check: …", " …"]


def test_files_folders_variables_and_names_last_from_block_to_block(commands: Server, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    results = list(PageRun(read_page(page), tmp_path / "page", commands).run())
    assert [result.problem for result in results] == [""] * 6


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("SIDE = 8", "WIDTH = 8", 6, "+SIDE = 3"),
        ("<!-- exit: 2 -->", "", 17, "exit status 2, not 0"),
        ("shapes.SIDE", "shapes.WIDTH", 24, "AttributeError"),
        ("the side is 12", "a side of 12", 24, "+the side is 3"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    commands: Server, tmp_path: Path, old: str, new: str, line: int, problem: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(old, new))
    wrong = [one for one in PageRun(read_page(page), tmp_path / "page", commands).run() if one.problem]
    assert [one.line for one in wrong] == [line]
    assert problem in wrong[0].problem


def test_refresh_writes_what_is_asked_for_and_what_differs(commands: Server, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("SIDE = 8", "?").replace("the side is 12", "WIDTH\nand more"))
    assert refresh(page, commands, everything=False, write=True) == 0
    assert page.read_text() == PAGE.replace("SIDE = 8", "SIDE = 3").replace("side is 12", "side is 3")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("brim find resnet50 --mode train -b 8  # a comment", ""),
        ("brim train a_file_of_yours.yaml hp.epochs=3 --seeds 10", ""),
        ("torchrun --nproc-per-node=8 -m brim eval -m MODEL -d DATA | tee log.txt", ""),
        ("CUDA_VISIBLE_DEVICES=1 brim profile … --resume", ""),
        ("python -m benchmarks.find --no-such", "benchmarks/find.py has no option --no-such"),
        ("python -m benchmarks.nothing", "there is no benchmarks/nothing.py"),
        ("python -m benchmarks.eval --part whole", "--part whole: choose from all"),
        ("python -m benchmarks --only find --full", ""),
        ("python -m benchmarks --no-such", "benchmarks/__main__.py has no option --no-such"),
        ("make everything", "make has no target everything"),
        ("pip install 'brim[vision,colours]'", "brim has no extra colours"),
        ("brim fnd resnet50", "brim has no command fnd"),
        ("brim find resnet50 -b 0", "--batch-size 0"),
        ("brim train a_file_of_yours.yaml --no-such", "No such option"),
        ("true && brim eval -m MODEL -d DATA --no-such", "No such option"),
    ],
)
def test_commands_that_are_not_run_are_checked(line: str, problem: str) -> None:
    found = check_command(line)
    assert problem in found
    assert bool(problem) == bool(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```console\nno command\n```", "line 2: output without a command"),
        ("<!-- parse -->\n```bash\nbrim\n```", "line 1: say why"),
        ("<!-- exit: 2 -->\n\nwords", "line 3: a comment for a block"),
        ("```bash\nbrim", "line 1: a fence that is never closed"),
    ],
)
def test_a_page_that_cannot_be_read_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        [block.commands() for block in read_page(tmp_path / "page.md").blocks]
