"""Every command, Python block and file of README, CONTRIBUTING and the site's pages, run as a reader would.

One test per page, in one folder per page. What a command prints is compared with the page: numbers may differ, words
may not. `python -m tests.docs.refresh PAGE` writes what is printed now into a page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import RUN, Page, all_pages, pages
from tests.docs.page_run import PageRun, Server


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_does_what_it_says(page: Page, commands: Server, tmp_path: Path) -> None:
    if page.says_the_same_as(page.original):
        return  # in another language; the original is run
    wrong = [
        f"{page.name}:{result.line}: {result.problem}"
        for result in PageRun(page, tmp_path / "page", commands).run()
        if result.problem
    ]
    assert not wrong, "\n\n".join([*wrong, f"If the page is to change: python -m tests.docs.refresh {page.name}"])


def test_no_command_stands_in_a_block_that_is_not_run() -> None:
    command = re.compile(r"\$ \w|(?:brim|torchrun|pip|make) [\w-]+(?: |$)(?!.*[.:]$)")
    found = [
        f"{page.name}:{number}: {line}"
        for page in all_pages()
        for block in page.blocks
        if block.language in ("", "text", "sh", "shell") and not block.follows
        for number, line in enumerate(block.lines, block.line)
        if command.match(line)
    ]
    assert found == [], f"write them in one of {RUN}"
