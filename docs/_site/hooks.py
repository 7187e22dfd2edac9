"""The site beyond what mkdocs does: files of the root as pages, links to source as names, folders in the navigation.

In the repository a page may link to any file. On the site a link to a page becomes a link to that page, also where the
page is a file of the root; a link to any other file of the repository becomes its text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {  # files of the root by their names on the site; the README's part is played by index.md
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
_BLOCK = re.compile(r"(^ *```.*?^ *```)", flags=re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """`folder/*` in the navigation stands for the folder's pages; a page of the root that is missing is left out."""
    config.nav = _expanded(config.nav or [], Path(config.docs_dir))
    return config


def _expanded(entries: list[Any], docs: Path) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            if isinstance(inner, list):
                found.append({title: _expanded(inner, docs)})
            elif inner not in ROOT_PAGES.values() or inner in _present().values():
                found.append(entry)
        elif isinstance(entry, str) and entry.endswith("/*"):
            pages = sorted(path.name for path in (docs / entry[:-1]).glob("*.md"))
            found += [entry[:-1] + page for page in pages if page != "README.md"]
        else:
            found.append(entry)
    return found


def _present() -> dict[str, str]:
    return {name: page for name, page in ROOT_PAGES.items() if (ROOT / name).exists()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the root among the others."""
    for name, page in _present().items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Links as the site needs them; code stays as it is."""
    names = {site: name for name, site in ROOT_PAGES.items()}
    uri = page.file.src_uri
    here = names.get(uri, f"docs/{uri}")
    blocks = _BLOCK.split(markdown)  # every second one is code
    blocks[::2] = [_LINK.sub(lambda link: _link(link, here, uri, files), text) for text in blocks[::2]]
    return "".join(blocks)


def _link(link: re.Match[str], here: str, uri: str, files: Files) -> str:
    target, hash_mark, anchor = link["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    candidates = [path, f"{path}/README.md", f"{path}/index.md"]
    for one in candidates:
        site = "index.md" if one == "README.md" else ROOT_PAGES.get(one, one.removeprefix("docs/"))
        in_docs = one.startswith("docs/") or one in ROOT_PAGES or one == "README.md"
        if in_docs and files.get_file_from_path(site) is not None:
            there = os.path.relpath(site, posixpath.dirname(uri) or ".").replace(os.sep, "/")
            return f"{link['mark']}[{link['text']}]({there}{hash_mark}{anchor})"
    if (ROOT / path).exists() and not link["mark"]:
        return link["text"]
    return link[0]  # mkdocs reports it
