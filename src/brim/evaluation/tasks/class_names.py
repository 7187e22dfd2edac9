"""Which of a model's outputs is which of the data's classes. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from brim.errors import RequestError, plural

__all__ = ["align_classes"]


def align_classes(data: Sequence[str], model: Sequence[str], count: int) -> tuple[tuple[str, ...], str]:
    """The label of each of the model's `count` outputs in the data's words, and what to tell the user.

    Names decide where the model knows them; otherwise places do, and that is said. Data that numbers its classes is
    answered in numbers: a model may give two classes one name. More classes in the data than outputs of the model is a
    `RequestError`.
    """
    if not data:
        return tuple(str(place) for place in range(count)), ""
    known = {_plain(name): place for place, name in enumerate(model)}
    places = [known.get(_plain(name)) for name in data]
    if model and all(place is not None for place in places) and len(set(places)) == len(places):
        labels = [*model]
        for name, place in zip(data, places, strict=True):
            assert place is not None
            labels[place] = name
        return tuple(labels), ""
    if len(data) > count:
        raise RequestError(
            f"the data has {plural(len(data), 'class', 'classes')} and the model {plural(count, 'output')}: it was "
            f"made for other classes"
        )
    labels = [*data, *(_unused(place, model) for place in range(len(data), count))]
    generic = not model or all(re.fullmatch(r"LABEL_\d+", name) for name in model)
    if generic and len(data) == count:
        return tuple(labels), ""
    return tuple(labels), (
        f"the model's classes ({_some(model) or count}) and the data's ({_some(data)}) have different names: they are "
        "matched by their order"
    )


def _unused(place: int, model: Sequence[str]) -> str:
    return model[place] if place < len(model) else str(place)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())
