"""A forecast, or a check of one, as Markdown for a comment on a pull request.

One table over all workloads, and for those that changed the modules behind it, folded up. Stays below what a comment
may hold. What comes from outside (names of models, modules, errors) is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence

from brim.errors import plural
from brim.planning.forecast_base import Document, WorkloadDocument, shown_size
from brim.planning.forecast_check import CheckedWorkload, ComparedSize, ForecastCheck
from brim.records import PART_NAMES
from brim.settings.sizes import format_bytes

__all__ = ["MARK", "markdown_text"]

MARK = "<!-- brim forecast -->"  # by which a later run finds its comment
MOST_ROWS = 100  # of a table of workloads
MOST_MODULES = 20  # of one workload
MOST_FOLDED = 20  # workloads whose modules are shown
MOST_CHARACTERS = 60_000  # GitHub takes 65,536 in a comment
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]")
_NO_MENTION = "@\u200b"  # nobody is mentioned
VERDICTS = {
    "ok": "ok", "new": "new", "gone": "gone", "grew": "**grew**", "does_not_fit": "**does not fit**",
    "not_comparable": "**not comparable**", "failed": "**failed**",
}  # fmt: skip


def markdown_text(workloads: Sequence[WorkloadDocument], check: ForecastCheck | None) -> str:
    """The whole comment; it begins with a mark that is not shown."""
    lines = [MARK, *(_forecasts(workloads) if check is None else _check(workloads, check))]
    text = "\n".join(lines) + "\n"
    if len(text) <= MOST_CHARACTERS:
        return text
    cut = text[:MOST_CHARACTERS].rpartition("\n<details>")[0] or text[:MOST_CHARACTERS].rpartition("\n")[0]
    return f"{cut}\n\nThe rest is left out: a comment has no room for it.\n"


def headline(check: ForecastCheck) -> str:
    """The verdict over all workloads, in a sentence."""
    failed = check.failed
    if not failed:
        grown = "no peak has grown beyond what is allowed" if check.against else "every workload fits"
        return f"{plural(len(check.lines), 'workload')}: {grown}"
    words = {
        "grew": "grew beyond what is allowed",
        "does_not_fit": "not within its card",
        "not_comparable": "not comparable",
        "failed": "without a forecast",
    }
    counts = {verdict: sum(line.verdict == verdict for line in failed) for verdict in words}
    found = [f"{count:,} {words[verdict]}" for verdict, count in counts.items() if count]
    return f"{plural(len(check.lines), 'workload')}: {', '.join(found)}"


def _check(workloads: Sequence[WorkloadDocument], check: ForecastCheck) -> Iterator[str]:
    yield f"### brim forecast: {headline(check)}"
    yield ""
    if check.against is None:
        yield from _forecast_table(workloads)
    else:
        yield "| workload | card | batch size | base | now | change | allowed | |"
        yield "|---|---|--:|--:|--:|--:|--:|---|"
        forecasts = {workload.name: workload.forecasts for workload in workloads}
        for line in check.lines[:MOST_ROWS]:
            yield from _check_rows(line, forecasts.get(line.name, ()))
    yield from _left_out(len(check.lines), MOST_ROWS, "workload")
    for line in (line for line in check.lines if line.failed and line.verdict != "grew"):
        yield f"\n- {_code(line.name)}: {_code(line.text)}"
    changed = [line for line in check.lines if line.worst is not None and line.worst.modules]
    changed.sort(key=lambda line: not line.failed)
    for line in changed[:MOST_FOLDED]:
        yield from _modules(line)
    if check.base_versions:
        made_with = ", ".join(f"{name} {version}" for name, version in check.base_versions.items())
        yield f"\nBase: {_plain(str(check.against))} ({_plain(made_with)}). Bytes are peak allocated, by tensors."
    for note in check.notes:
        yield f"\n- {_plain(note)}"


def _check_rows(line: CheckedWorkload, forecasts: Sequence[Document]) -> Iterator[str]:
    """Base and now; of a workload that the base does not have, each card's figures alone."""
    size, verdict = line.worst, VERDICTS[line.verdict]
    if size is not None:
        yield (
            f"| {_code(line.name)} | {_plain(size.gpu)} | {size.batch_size:,} | {format_bytes(size.base_bytes)} | "
            f"{format_bytes(size.bytes)} | {change_text(size)} | {_plain(line.allow)} | {verdict} |"
        )
        return
    for forecast in forecasts:
        shown = shown_size(forecast)
        yield (
            f"| {_code(line.name)} | {_plain(forecast['gpu']['key'])} | {shown['batch_size']:,} | | "
            f"{format_bytes(shown['peak_allocated_bytes'])} | | | {verdict} |"
        )
    if not forecasts:
        yield f"| {_code(line.name)} | | | | | | | {verdict} |"


def change_text(size: ComparedSize) -> str:
    """How much a peak has changed: `+3.5%`; `0` for none, and never that for some."""
    if not size.change_bytes:
        return "0"
    shown = f"{100 * size.change_fraction:+.1f}%"
    return signed_bytes(size.change_bytes) if shown in ("+0.0%", "-0.0%") else shown


def _modules(line: CheckedWorkload) -> Iterator[str]:
    """The modules behind a change, folded up unless they are why the check fails."""
    size = line.worst
    assert size is not None
    opened = " open" if size.grew else ""
    title = f"{_html(line.name)}: modules that changed at batch size {size.batch_size:,}"
    yield f"\n<details{opened}><summary>{title}</summary>\n"
    yield "| module | base | now | change | of it |"
    yield "|---|--:|--:|--:|---|"
    for one in size.modules[:MOST_MODULES]:
        yield (
            f"| {_code(module_name(one.module))} | {format_bytes(one.base_bytes)} | {format_bytes(one.bytes)} | "
            f"{signed_bytes(one.change_bytes)} | {largest_part(one.parts)} |"
        )
    yield from _left_out(len(size.modules), MOST_MODULES, "module")
    yield "\n</details>"


def _forecasts(workloads: Sequence[WorkloadDocument]) -> Iterator[str]:
    yield "### brim forecast"
    yield ""
    yield from _forecast_table(workloads)
    yield from _left_out(len(workloads), MOST_ROWS, "workload")


def _forecast_table(workloads: Sequence[WorkloadDocument]) -> Iterator[str]:
    yield "| workload | card | batch size | allocated | nvidia-smi | of | largest that fits | |"
    yield "|---|---|--:|--:|--:|--:|--:|---|"
    for workload in workloads[:MOST_ROWS]:
        if workload.error is not None:
            yield f"| {_code(workload.name)} | | | | | | | {VERDICTS['failed']} |"
        for forecast in workload.forecasts:
            size = shown_size(forecast)
            fits = "fits" if size["fits"] else VERDICTS["does_not_fit"]
            yield (
                f"| {_code(workload.name)} | {_plain(forecast['gpu']['key'])} | {size['batch_size']:,} | "
                f"{format_bytes(size['peak_allocated_bytes'])} | {format_bytes(size['device_bytes'])} | "
                f"{format_bytes(forecast['limit_bytes'])} | {forecast['batch_size_max']:,} | {fits} |"
            )


def module_name(module: str) -> str:
    """A module as it is shown; the model itself has no name of its own."""
    return module or "(the model itself)"


def signed_bytes(count: int) -> str:
    """`+1.5 GiB`, `-200.0 MiB`."""
    return f"{'+' if count > 0 else '-' if count < 0 else ''}{format_bytes(abs(count))}"


def largest_part(parts: Mapping[str, int]) -> str:
    """What most of a change is: `activations +1.5 GiB`."""
    part = max(parts, key=lambda name: abs(parts[name]))
    return f"{PART_NAMES.get(part, part)} {signed_bytes(parts[part])}"


def _left_out(count: int, most: int, what: str) -> Iterator[str]:
    if count > most:
        yield f"\n… and {plural(count - most, what)} more"


def _plain(text: str) -> str:
    """Text from outside, in which nothing is obeyed."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", _visible(text)).replace("@", _NO_MENTION)


def _html(text: str) -> str:
    """The same inside a tag, where Markdown is not read."""
    return html.escape(_visible(text), quote=False).replace("@", _NO_MENTION)


def _code(text: str) -> str:
    return f"`{_visible(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _visible(text: str) -> str:
    return _UNSAFE.sub(lambda found: " " if found[0] in "\n\t" else ascii(found[0])[1:-1], text)
