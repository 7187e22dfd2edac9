"""Settings from the command line: `hp.learning_rate=0.01 model.type=[r3d_18,s3d]`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from brim.errors import RequestError
from brim.settings.yaml_file import parse_value

__all__ = ["parse_overrides"]


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE texts as dotted keys and values; a value is read as it would be in a file.

    In a sweep a list is a list of values to try; `[[10, 20]]` is one value that is a list.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise RequestError(f"{text!r}: a setting is written KEY=VALUE, such as hp.learning_rate=0.01")
        if key.startswith("-"):
            raise RequestError(f"{text!r}: there is no such option, and a setting is written without dashes")
        if key in found:
            raise RequestError(f"{key}: it is given twice; keep one")
        found[key] = parse_value(value, argument=text)
    return found
