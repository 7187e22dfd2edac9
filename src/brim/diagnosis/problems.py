"""What is wrong with this installation or machine, and what to do, from the document of `brim doctor`.

It reads nothing but the document, so that every case can be tested without the machine that has it. An `error` keeps
brim from doing what it is for here; a `warning` costs something, or is worth knowing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from brim.diagnosis.installed import is_older
from brim.errors import plural
from brim.units import bytes_text

__all__ = ["Complaint", "find_problems"]

LEAST_FREE_BYTES = 64 * 2**20  # of a folder
LEAST_SHARED_BYTES = 128 * 2**20  # a container has 64 MiB unless it is given more
NO_CARD = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that are meant to hide every card

Document = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing that is wrong: a stable name, how bad it is, what was found, what to do."""

    name: str
    severity: str  # "error" or "warning"
    text: str
    remedy: str


def find_problems(document: Document) -> list[Complaint]:
    """Errors first."""
    found = [
        *_of_libraries(document),
        *_of_cards(document),
        *_of_devices(document),
        *_of_folders(document),
        *_of_host(document),
    ]
    return sorted(found, key=lambda one: one.severity != "error")


def _error(name: str, text: str, remedy: str) -> Complaint:
    return Complaint(name=name, severity="error", text=text, remedy=remedy)


def _warning(name: str, text: str, remedy: str) -> Complaint:
    return Complaint(name=name, severity="warning", text=text, remedy=remedy)


def _of_libraries(document: Document) -> Iterator[Complaint]:
    libraries = document["libraries"]
    if libraries is None:
        yield _warning(
            "not_installed", "brim runs without being installed: what it needs is not known", "pip install the package"
        )
        return
    for library in libraries:
        name, needs, version = library["name"], library["needs"], library["version"]
        if version is None:
            yield _error("library_missing", f"{name} is not installed", f"pip install '{name}{needs}'")
        elif is_older(version, needs):
            yield _error(
                "library_too_old", f"{name} {version} is older than brim needs ({needs})",
                f"pip install --upgrade '{name}{needs}'",
            )  # fmt: skip
    for extra, contents in document["extras"].items():
        for library in contents["libraries"]:
            version = library["version"]
            if version is not None and is_older(version, library["needs"]):
                yield _warning(
                    "extra_too_old",
                    f"{library['name']} {version} is older than brim[{extra}] needs ({library['needs']})",
                    f"pip install --upgrade 'brim[{extra}]'",
                )


def _of_cards(document: Document) -> Iterator[Complaint]:
    """Cards that the driver has and torch does not."""
    torch, driver = document["torch"], document["driver"]
    cards = [card for card in driver["cards"] if card["slice_of"] is None]
    for card in cards:
        if card["problem"] is not None:
            yield _warning(
                "card_unreadable", f"NVML cannot read all of card {card['index']}: {card['problem']}",
                "if the card is lost, reset it (nvidia-smi --gpu-reset) or restart the machine",
            )  # fmt: skip
    on_cuda = [device for device in torch["devices"] if device["name"].startswith("cuda")]
    if on_cuda and not cards:
        why = driver["problem"] or "it lists no card"
        yield _warning(
            "nvml_unreadable", f"torch has a card that NVML does not show ({why})",
            "brim works; utilisation, power and the memory of other processes are missing",
        )  # fmt: skip
    if cards and torch["version"] is not None:
        yield from _of_unseen_cards(document, cards, on_cuda)


def _of_unseen_cards(document: Document, cards: list[Any], on_cuda: list[Any]) -> Iterator[Complaint]:
    torch, driver, asked = document["torch"], document["driver"], document["variables"].get("CUDA_VISIBLE_DEVICES")
    listed = f"NVML lists {plural(len(cards), 'card')}"
    if on_cuda:
        sliced = any(card["slice_of"] is not None for card in driver["cards"])  # of which a process sees one
        if asked is None and not sliced and len(on_cuda) < len(cards):
            yield _error(
                "card_not_visible", f"{listed}, torch sees {len(on_cuda)}",
                "check that this user may open /dev/nvidia*; in a container, that it was given all cards",
            )  # fmt: skip
    elif torch["cuda"] is None:
        build = "ROCm" if torch["hip"] else "the CPU"
        yield _error(
            "torch_without_cuda", f"{listed}, and torch {torch['version']} is built for {build}: the card is not used",
            "install a build of torch for CUDA",
        )  # fmt: skip
    elif asked is not None and asked.strip() in NO_CARD:
        yield _warning("cards_hidden", f"CUDA_VISIBLE_DEVICES hides every card ({listed})", "unset it to use a card")
    elif asked is not None:
        yield _error(
            "cards_hidden", f"CUDA_VISIBLE_DEVICES={asked} names no card that torch finds ({listed})",
            "name one by its index or uuid, or unset it",
        )  # fmt: skip
    elif driver["cuda"] is not None and _major(driver["cuda"]) < _major(torch["cuda"]):
        yield _error(
            "driver_too_old",
            f"driver {driver['version']} runs CUDA {driver['cuda']} at most, torch is built for {torch['cuda']}",
            f"update the driver, or install a torch built for CUDA {_major(driver['cuda'])}",
        )
    else:
        why = f": {torch['problem']}" if torch["problem"] else ""
        yield _error(
            "card_not_visible", f"{listed}, torch sees none{why}",
            "check that this user may open /dev/nvidia*, and that driver and kernel module are of one version",
        )  # fmt: skip


def _of_devices(document: Document) -> Iterator[Complaint]:
    torch = document["torch"]
    if torch["problem"] is not None and torch["version"] is not None and not document["driver"]["cards"]:
        yield _error("torch_broken", f"torch: {torch['problem']}", "install torch again, for this Python")
    for device in torch["devices"]:
        if device["problem"] is not None:
            yield _error(
                "device_fails", f"one addition on {device['name']} fails: {device['problem']}",
                "if its memory is full, see brim watch; otherwise install a torch built for this card",
            )  # fmt: skip
    if document["ranks_problem"] is not None:
        yield _error("ranks", document["ranks_problem"], "without torchrun: unset WORLD_SIZE RANK LOCAL_RANK")


def _of_folders(document: Document) -> Iterator[Complaint]:
    remedies = {
        "cache": ("XDG_CACHE_HOME", "every search is made again"),
        "state": ("XDG_STATE_HOME", "brim watch finds no runs"),
        "temporary": ("TMPDIR", "processes cannot be started"),
    }
    for name, folder in document["folders"].items():
        variable, loss = remedies[name]
        kind = _warning if name == "state" else _error
        where = f"the {name} folder {folder['path'] or ''}".rstrip()
        remedy = f"set {variable} to another folder; until then {loss}"
        if not folder["writable"]:
            yield kind("folder_not_writable", f"{where} cannot be written: {folder['problem']}", remedy)
        elif folder["free_bytes"] is not None and folder["free_bytes"] < LEAST_FREE_BYTES:
            yield kind("folder_full", f"{where} has {bytes_text(folder['free_bytes'])} left", remedy)


def _of_host(document: Document) -> Iterator[Complaint]:
    shared = document["host"]["shared_free_bytes"]
    if shared is not None and shared < LEAST_SHARED_BYTES:
        yield _warning(
            "shared_memory", f"/dev/shm has {bytes_text(shared)} left: loading processes pass samples through it",
            "give the container more (docker run --shm-size=8g), or use --num-workers 0",
        )  # fmt: skip


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
