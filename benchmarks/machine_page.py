"""The results of one machine as a Markdown page: ratios within one run first, then every table with its command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import PEERS
from benchmarks.tables import markdown

__all__ = ["describe", "docs_from", "missing_peers", "page", "ratio_text", "versions_of"]

MODE_NOTES = {
    "cpu": "Small forms, made for a CPU and three minutes: they show that everything runs and how the ways compare "
    "here. The claims of the README rest on the tables of docs/measurements.",
    "card": "One command for each table, shortened where a table of docs/measurements has several.",
    "full": "The commands of docs/measurements as they stand.",
}
Entry = Mapping[str, Any]


def page(document: Mapping[str, Any], *, docs: str) -> str:
    """The whole page; `docs` is where docs/measurements lies, seen from it."""
    entries = document["benchmarks"]
    ran = [entry for entry in entries if entry["status"] in ("done", "failed")]
    parts = [
        f"# Benchmarks on {describe(document['machine'])}",
        _versions(document["machine"]),
        f"{MODE_NOTES[document['mode']]} Last call: `{document['command']}`.",
        "## Ratios within one run",
        _ratios(ran, docs),
        *(_section(entry, docs, versions_of(document["machine"])) for entry in ran),
        _not_run(entries),
        _peers(document["peers"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def describe(machine: Mapping[str, Any]) -> str:
    """The card, or the processor where there is none."""
    if machine["gpu"]:
        count = machine["gpus"]
        return str(machine["gpu"]) if count == 1 else f"{count} × {machine['gpu']}"
    return f"{machine['processor']}, {machine['cores']} cores"


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """One value, or the lowest and the highest."""
    low, high = (_figure(ratio[name]) for name in ("low", "high"))
    return low if low == high else f"{low} to {high}"


def missing_peers(peers: Mapping[str, str | None]) -> list[str]:
    """What pip would have to install."""
    return [PEERS[name] for name, version in peers.items() if version is None]


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) >= 10 or abs(value) < 0.1 else f"{value:.3f}"


def _versions(machine: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    card = f", driver {machine['driver']}, CUDA {machine['cuda']}" if machine["gpu"] else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}{card}. "
        f"brim {machine['brim']}, Python {machine['python']}, {packages}."
    )


def _link(entry: Entry, docs: str) -> str:
    return f"[{entry['name']}]({docs}/{entry['table']})"


def _ratios(entries: Sequence[Entry], docs: str) -> str:
    rows = []
    for entry in entries:
        if entry["status"] == "failed":
            rows.append((_link(entry, docs), f"**failed**: {entry['reason']}", "—", ""))
        rows += [
            (_link(entry, docs), ratio["what"], f"**{ratio_text(ratio)}**", ratio["better"])
            for ratio in entry["ratios"]
        ]
        if entry["status"] == "done" and not entry["ratios"]:
            rows.append((_link(entry, docs), "no ratio: see its table", "—", ""))
    return markdown(("benchmark", "what", "in this run", "better"), rows) if rows else "Nothing has run."


def versions_of(machine: Mapping[str, Any]) -> dict[str, str]:
    """Of brim and of the libraries that matter."""
    return {"brim": machine["brim"], **machine["packages"]}


def _section(entry: Entry, docs: str, installed: Mapping[str, str]) -> str:
    claim = f"[{entry['table'].partition('#')[0]}]({docs}/{entry['table']})"
    ran = f"{entry['started']}, {entry['seconds']:.0f} s"
    lines = [
        f"## {entry['name']}",
        f"Answers: {entry['answers']}. The claim and what fell short: {claim}. {ran}:",
        "```bash\n" + "\n".join(entry["commands"]) + "\n```",
    ]
    if entry["status"] == "failed":
        lines.append(f"**Failed**: {entry['reason']} ({', '.join(entry['logs'])}).")
    for table in entry["tables"]:
        columns = [*table["columns"], *(["note"] if any("note" in row for row in table["rows"]) else [])]
        lines.append(markdown(columns, [[row.get(name, "") for name in columns] for row in table["rows"]]))
    if entry["versions"] != installed:  # it was run by an earlier call
        other = [f"{name} {one}" for name, one in entry["versions"].items() if installed.get(name) != one]
        lines.append(f"With {', '.join(other) or 'fewer libraries'}.")
    if entry["missing_peers"]:
        lines.append(f"Without {', '.join(entry['missing_peers'])}, which {_is(entry['missing_peers'])} not installed.")
    return "\n\n".join(lines)


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _not_run(entries: Sequence[Entry]) -> str:
    rows = [(entry["name"], entry["reason"]) for entry in entries if entry["status"] not in ("done", "failed")]
    return "## Not run\n\n" + markdown(("benchmark", "why"), rows) if rows else ""


def _peers(peers: Mapping[str, str | None]) -> str:
    rows = [(PEERS[name], version or "**missing**") for name, version in peers.items()]
    missing = missing_peers(peers)
    ending = f"`pip install {' '.join(missing)}` adds what is missing." if missing else "None is missing."
    return f"## Peers\n\n{markdown(('library', 'version'), rows)}\n\n{ending}"


def docs_from(folder: Path, docs: Path) -> str:
    """docs/measurements as a link from a page in a folder."""
    return Path(os.path.relpath(docs, folder)).as_posix()
