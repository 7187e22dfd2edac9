"""Random edits of valid training and sweep files: values, keys, lines and bytes, from the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import yaml

from brim.settings.train_settings import SETTING_KEYS
from tests.fuzzed_lines import SWEEP_FILE, TRAIN_FILE

FILES = {"train": ("config.yaml", TRAIN_FILE), "sweep": ("grid.yaml", SWEEP_FILE)}
VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, "", " ", "auto", "none", "x", "x" * 300, "é😀", "\x1b[31mred", "a\nb", "[red]x[/red]",
    -1, 0, 1, 2, 1.5, 0.1, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 2**31, 2**63, 10**30, 10**400, "1e-3",
    "10_000", "٣", "0x10", "1GiB", [1], [1, "a"], [[1, 2], [3]], {"a": 1}, {"a": {"b": [1, {"c": None}]}}, "cpu", "mlp",
    "sgd", "lbfgs", "sparseadam", "adafactor", "steplr", "cyclic", "py:nets.py:classifier", "py:nets.py:broken",
    "missing.npz", ".", "/dev/null", "questions.jsonl", "config.yaml", "2020-01-01", [0.9, 0.9], [0.9, 1.0],
    [0.5, float("nan")],
)  # fmt: skip
# Values that would be valid and long, or start processes, are not drawn for these.
SMALL_ONLY = {"data.num_workers": (0, -1, "x", None, 1.5, [], 10**30), "samples": (4, 0, -1, "x")}
OPEN_KEYS = {
    "optimizer.params.*": ("lr", "betas", "momentum", "eps", "fused", "foreach", "maximize", "capturable", "nonsense"),
    "scheduler.params.*": ("T_max", "eta_min", "step_size", "gamma", "milestones", "total_steps", "lr_lambda"),
    "model.params.*": ("hidden", "dropout", "standardise", "width", "nonsense"),
    "model.knobs.*": ("size", "frames", "width"),
    "data.params.*": ("samples", "label", "labels", "classes", "val_samples"),
    "data.map.*": ("label", "text", "image"),
}
GRID_KEYS = (
    "grid_search.grid.hp.batch_size", "grid_search.grid.model.type", "grid_search.grid.optimizer.name",
    "grid_search.pairing", "grid_search.zip", "grid_search.exclude", "grid_search.include", "grid_search.repeat",
    "grid_search.seeds", "grid_search.groups", "grid_search.fixed", "grid_search.grid", "grid_search",
    "models_to_train", "max_experiments", "gpu.device_ids", "results_file", "name",
)  # fmt: skip
SPLICES = (
    "\t", "\x00", "\x1b", "\x7f", "\u2028", "\ufeff", "*missing", "&a [*a]", "&a {b: *a}", "!!python/name:os.system x",
    "!!binary aGk=", "!custom 1", "<<: 5", "<<: [1]", "? [1]\n: 2", "---\n", "...\n", "%YAML 9.9\n", "'", '"', "|", ">",
    ": ", "- ", "{", "}", "[", "]", "#", "@", "`", "key: value: more", "\r\n", "? ", "~: ~\n", "1: 2\n", "[" * 200,
    "{a: " * 200, "a: " + "x" * 100_000 + "\n", "[" + "1," * 20_000 + "]",
)  # fmt: skip


def drawn_file(seed: str) -> tuple[str, str, bytes]:
    """The command that reads the file, the file's name, and its content after one to three edits."""
    draw = random.Random(seed)
    command = draw.choice(sorted(FILES))
    name, text = FILES[command]
    for _ in range(draw.choice((1, 1, 2, 3))):
        text = _edited_values(text, command, draw) if draw.random() < 0.7 else _edited_text(text, draw)
    content = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.05:
        place = draw.randrange(len(content) + 1)
        content = content[:place] + draw.choice((b"\xff", b"\x80\x80", b"\xed\xa0\x80", b"")) + content[place + 1 :]
    return command, name, content


def _edited_values(text: str, command: str, draw: random.Random) -> str:
    """A value changed, a key added, dropped, renamed or moved; a text that is no mapping any more stays as it is."""
    try:
        data = yaml.safe_load(text)
        places = list(_places(data, ())) if isinstance(data, dict) else []
    except (yaml.YAMLError, ValueError, RecursionError):  # no YAML any more, or a list that holds itself
        return text
    if not places:
        return text
    kind = draw.choices(("replace", "add", "drop", "rename", "swap"), weights=(6, 6, 2, 1, 1))[0]
    holder, key, dotted = draw.choice(places)
    if kind == "add":
        dotted = draw.choice((*SETTING_KEYS, *(GRID_KEYS if command == "sweep" else ())))
        dotted = dotted.replace("*", draw.choice(OPEN_KEYS.get(dotted, ("x",))))
        if draw.random() < 0.5:
            data[dotted] = _value(dotted, draw)
        else:
            _put(data, dotted.split("."), _value(dotted, draw))
    elif kind == "replace":
        holder[key] = _value(dotted, draw)
    elif kind == "drop":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw.choice((str(key)[:-1], f"{key}x", f"{key}.x", str(key).upper(), "", 5, None))] = holder.pop(key)
    else:
        other, place, _ = draw.choice(places)
        holder[key], other[place] = other[place], holder[key]
    try:
        return yaml.safe_dump(data, allow_unicode=draw.random() < 0.5, sort_keys=False)
    except (yaml.YAMLError, RecursionError, ValueError):  # a value put into itself
        return text


def _places(data: Any, keys: tuple[str, ...]) -> Iterator[tuple[Any, Any, str]]:
    """Every key and list position, with what holds it and its dotted name."""
    pairs = list(data.items()) if isinstance(data, dict) else list(enumerate(data))
    for key, value in pairs:
        yield data, key, ".".join((*keys, str(key)))
        if isinstance(value, (dict, list)):
            yield from _places(value, (*keys, str(key)))


def _value(dotted: str, draw: random.Random) -> Any:
    small = next((values for key, values in SMALL_ONLY.items() if dotted.endswith(key)), None)
    value = draw.choice(small or VALUES)
    return [draw.choice(VALUES), value] if ".grid." in dotted and draw.random() < 0.7 else value


def _put(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = data.get(key)
        data[key] = data = inner if isinstance(inner, dict) else {}
    data[keys[-1]] = value


def _edited_text(text: str, draw: random.Random) -> str:
    """A line dropped, doubled, indented or moved; something put in between; the rest cut off."""
    lines = text.splitlines(keepends=True) or [""]
    place = draw.randrange(len(lines))
    kind = draw.choice(("drop", "double", "indent", "move", "splice", "splice", "splice", "cut", "empty"))
    if kind == "drop":
        del lines[place]
    elif kind == "double":
        lines.insert(draw.randrange(len(lines) + 1), lines[place])
    elif kind == "indent":
        lines[place] = draw.choice(("  ", " ", "\t")) + lines[place]
    elif kind == "move":
        lines.insert(draw.randrange(len(lines)), lines.pop(place))
    elif kind == "splice":
        column = draw.randrange(len(lines[place]) + 1)
        lines[place] = lines[place][:column] + draw.choice(SPLICES) + lines[place][column:]
    elif kind == "cut":
        lines = lines[:place]
    elif draw.random() < 0.2:
        lines = [draw.choice(("", " \n", "#\n", "null\n", "[]\n", "5\n", "text\n", "{}\n", "---\n---\n"))]
    return "".join(lines)
