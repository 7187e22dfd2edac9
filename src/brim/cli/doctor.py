"""`brim doctor`: this installation and machine on one screen, to read or to paste into a bug report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from brim.cli.console import output_console, print_document
from brim.errors import plural
from brim.units import bytes_text

if TYPE_CHECKING:
    from brim.diagnosis.examine import DoctorResult
    from brim.settings.doctor_settings import DoctorSettings

__all__ = ["doctor"]

WIDTH = 80
STYLES = {"error": "bold red", "warning": "yellow"}
FOR_DEVELOPERS = ("all", "dev")  # extras that only repeat others, or are of no use to a user


def doctor(settings: DoctorSettings) -> bool:
    """Print the screen, or the document; returns whether something is broken."""
    from brim.diagnosis.examine import examine_as

    result = examine_as(settings)
    if settings.json_output:
        print_document(result.document)
    else:
        _print_screen(output_console(), result)
    return bool(result.errors)


def _print_screen(console: Console, result: DoctorResult) -> None:
    document = result.document
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(document):
        table.add_row(label, text)
    for problem in result.problems:
        table.add_row(problem.severity, f"{problem.text}\n→ {problem.remedy}", style=STYLES[problem.severity])
    console.print(table, soft_wrap=False, width=min(console.width, WIDTH))
    errors, others = len(result.errors), len(result.problems) - len(result.errors)
    counts = [plural(count, name) for count, name in ((errors, "error"), (others, "warning")) if count]
    console.print(", ".join(counts) or "no problems found", highlight=False)


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    python, torch, driver = document["python"], document["torch"], document["driver"]
    yield "brim", f"{document['brim']}, Python {python['version']}, {python['platform']}"
    yield "torch", _torch_text(torch)
    yield "driver", _driver_text(driver)
    for card in driver["cards"]:
        yield "card", _card_text(card, torch["devices"])
    for device in torch["devices"]:
        if device["uuid"] is None or not any(_same_card(device, card) for card in driver["cards"]):
            size = device["memory_total_bytes"]
            yield "device", _joined(device["name"], device["model"], None if size is None else bytes_text(size))
    yield "host", _host_text(document["host"])
    for name, folder in document["folders"].items():
        yield name, _folder_text(folder)
    yield from _extra_rows(document["extras"])
    for position, (name, value) in enumerate(document["variables"].items()):
        yield "" if position else "set", f"{name}={value}"


def _joined(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _torch_text(torch: Mapping[str, Any]) -> str:
    if torch["version"] is None:
        return "not installed"
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "the CPU alone"
    seen = ", ".join(device["name"] for device in torch["devices"])
    return f"{torch['version']}, built for {built}; sees {seen or 'the CPU alone'}"


def _driver_text(driver: Mapping[str, Any]) -> str:
    if driver["version"] is None:
        return f"none ({driver['problem'] or 'NVML does not say'})"
    newest = f", runs CUDA {driver['cuda']} or older" if driver["cuda"] else ""
    return f"{driver['version']}{newest}"


def _card_text(card: Mapping[str, Any], devices: list[Mapping[str, Any]]) -> str:
    device = next((device for device in devices if _same_card(device, card)), None)
    name = f"{'slice of ' if card['slice_of'] is not None else ''}{card['index']}: {card['name'] or 'unknown'}"
    used, total = card["memory_used_bytes"], card["memory_total_bytes"]
    heat, power = card["temperature_c"], card["power_watts"]
    return _joined(
        f"{name} ({device['name'] if device else 'not visible to torch'})",
        None if total is None or used is None else f"{bytes_text(used)} of {bytes_text(total)} used",
        device["capability"] and f"compute {device['capability']}" if device else None,
        None if heat is None else f"{heat} °C",
        None if power is None else f"{power:.0f} W",
        card["problem"],
    )


def _same_card(device: Mapping[str, Any], card: Mapping[str, Any]) -> bool:
    """By uuid, which torch writes without its kind in front."""
    return None not in (device["uuid"], card["uuid"]) and str(card["uuid"]).endswith(str(device["uuid"]))


def _host_text(host: Mapping[str, Any]) -> str:
    cores, memory = host["cores_of_group"], host["memory_of_group_bytes"]
    return _joined(
        f"{host['cores_for_brim']} of {host['cores']} cores" + ("" if cores is None else f" (group: {cores:g})"),
        f"{bytes_text(host['memory_available_bytes'])} of {bytes_text(host['memory_total_bytes'])} memory available"
        + ("" if memory is None else f" (group: {bytes_text(memory)})"),
    )


def _folder_text(folder: Mapping[str, Any]) -> str:
    state = "writable" if folder["writable"] else "not writable"
    free = folder["free_bytes"]
    return _joined(f"{_short(folder['path'])}: {state}", None if free is None else f"{bytes_text(free)} free")


def _short(path: str | None) -> str:
    """A path in the home folder from `~` on, as it may be pasted."""
    if path is None:
        return "unknown"
    try:
        return f"~/{Path(path).relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return path


def _extra_rows(extras: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A row for each extra that is installed, every library once, and one row for those that are not."""
    listed = {name: extra["libraries"] for name, extra in extras.items() if name not in FOR_DEVELOPERS}
    whole = [name for name in listed if extras[name]["installed"]]
    shown: set[str] = set()
    for position, name in enumerate(whole):
        more = [library for library in listed[name] if library["name"] not in shown]
        versions = ", ".join(f"{library['name']} {library['version']}" for library in more)
        yield "" if position else "extras", f"{name}: {versions or 'see above'}"
        shown |= {library["name"] for library in more}
    lacking = [
        f"{name} ({', '.join(library['name'] for library in libraries if library['version'] is None)})"
        for name, libraries in listed.items()
        if name not in whole
    ]
    if lacking:
        yield ("" if whole else "extras"), f"without {', '.join(lacking)}"
