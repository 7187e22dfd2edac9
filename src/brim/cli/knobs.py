"""`brim knobs`: the settings of a model that change its cost."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from brim.cli.console import output_console, print_document

if TYPE_CHECKING:
    from brim.settings.find_settings import KnobsSettings
    from brim.workloads.knobs import Knob

__all__ = ["knobs"]

ANY_MODEL = {"dtype": "float32, float16, bfloat16"}  # what a profile can vary of every model


def knobs(settings: KnobsSettings) -> None:
    """Print a model's knobs: nothing is built, no weights are read."""
    from brim.models.build import model_knobs, resolve_model

    name = str(resolve_model(settings.model))
    found = model_knobs(name, trust_remote_code=settings.trust_remote_code)
    if settings.json_output:
        listed = [dataclasses.asdict(knob) for knob in found]
        document = {"schema": "brim.knobs/1", "model": name, "knobs": listed, "any_model": list(ANY_MODEL)}
        print_document(document, default=str)
        return
    console = output_console()
    if not found:
        console.print(f"{name} has no knobs", markup=False, highlight=False)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("knob", "default", "values", "meaning", box=None)
    for knob in found:
        table.add_row(*(Text(cell) for cell in (knob.name, str(knob.default), values_text(knob), knob.help)))
    console.print(table, soft_wrap=False)
    for knob_name, meaning in ANY_MODEL.items():
        console.print(f"`brim profile` also takes {knob_name}: {meaning}", markup=False, highlight=False)


def values_text(knob: Knob) -> str:
    """The values that a knob takes, in a few characters."""
    if isinstance(knob.default, bool):
        return "true, false"
    if not isinstance(knob.default, int):
        return "a number" if isinstance(knob.default, float) else "any"
    low, high = knob.minimum, knob.maximum
    if low is not None and low == high:
        return str(low)
    span = "any" if low is None and high is None else f"{'' if low is None else low}…{'' if high is None else high}"
    return span if knob.multiple_of == 1 else f"{span}, multiples of {knob.multiple_of}"
