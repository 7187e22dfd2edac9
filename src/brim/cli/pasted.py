"""Command lines as people paste them: underscores, flags of older scripts, lists separated by spaces.

    rewritten(["profile", "--max_crops_list", "12", "13"])  # ["profile", "--knob", "max_crops", "--values", "12,13"]

`OLD_FLAGS` has every flag of the guides in docs/coming-from/hand-made-scripts.md that brim spells otherwise, `LISTS`
every option whose values may be separated by spaces, `OPTIONAL` those that may have none. Does not know what a flag
does, and loads no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from brim.errors import RequestError

__all__ = [
    "LISTS",
    "OLD_FLAGS",
    "OPTIONAL",
    "ListFlag",
    "OldFlag",
    "SuggestingCommand",
    "SuggestingGroup",
    "dashed",
    "rewritten",
]

VALUE = "VALUE"  # in a row: the value that follows the old flag; of a list, its values joined by commas
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
NUMBERS = re.compile(rf"({NUMBER},?)+", re.IGNORECASE)
KNOB_VALUES = re.compile(r"[\d.,:-]*\d,?|(true|false|float32|float16|bfloat16),?", re.IGNORECASE)
PAIR = re.compile(r"\w+=.+", re.DOTALL)
NAMES = re.compile(r"[^-].*", re.DOTALL)  # only where nothing else may follow


@dataclasses.dataclass(frozen=True, kw_only=True)
class OldFlag:
    """A flag of an older script: either what brim calls it, or an answer that says what to do instead."""

    name: str  # with dashes, however it was written
    commands: tuple[str, ...]  # the commands that replace the script
    becomes: tuple[str, ...] = ()  # brim's own words; none: what it asks for is the default
    answer: str = ""
    takes: re.Pattern[str] | None = None  # a list: the words after it that match


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListFlag:
    """An option whose values may be separated by spaces, and which words are such values."""

    names: tuple[str, ...]
    commands: tuple[str, ...]
    item: re.Pattern[str] | None  # None: the name of a metric
    repeated: bool = False  # the option once for each value, instead of one value with commas


_SIZED = ("profile", "eval", "find", "train")
_OWN_ELSEWHERE = ("--config", "--gradient-checkpointing")  # old on one command, brim's own on others
_ANY = ("find", "eval", "profile", "sweep", "forecast", "encode", "knobs", "report", "demo", "train", "ood")

OLD_FLAGS: tuple[OldFlag, ...] = (
    # 000 and 001: exp1_accuracy.py
    OldFlag(
        name="--start-from-max-crops", commands=("profile",), becomes=("--knob", "max_crops", "--start-from", VALUE)
    ),
    OldFlag(
        name="--max-crops-list", commands=("profile",), becomes=("--knob", "max_crops", "--values", VALUE),
        takes=KNOB_VALUES,
    ),
    OldFlag(name="--auto-adjust-batch-size", commands=_SIZED),
    OldFlag(name="--no-auto-adjust-batch-size", commands=_SIZED, becomes=("--no-auto-batch-size",)),
    OldFlag(name="--max-new-tokens", commands=("profile", "eval", "find", "forecast"), becomes=("--max-tokens", VALUE)),
    OldFlag(name="--output-dir", commands=("profile", "eval", "train", "ood", "sweep"), becomes=("-o", VALUE)),
    OldFlag(name="--dataset-name", commands=("profile", "eval"), answer="name the file or folder: -d PATH"),
    OldFlag(
        name="--max-attempts", commands=("profile", "eval"),
        answer="leave it out: a batch that does not fit is split within the run, with no attempts to count",
    ),
    OldFlag(
        name="--nproc-per-node", commands=_ANY,
        answer="it is torchrun's own flag: torchrun --nproc-per-node=8 -m brim COMMAND …",
    ),
    # 002: run_experiments.sh
    # 004: grid_search.py; brim sweep has --config itself
    OldFlag(name="--config", commands=("train",), becomes=(VALUE,)),
)  # fmt: skip

LISTS: tuple[ListFlag, ...] = (
    ListFlag(names=("--values",), commands=("profile",), item=KNOB_VALUES),
    ListFlag(names=("--metrics",), commands=("eval", "profile"), item=None),
    ListFlag(names=("--compare-batch",), commands=("eval", "train", "ood"), item=NUMBERS),
    ListFlag(names=("--seeds", "--learning-rates"), commands=("train",), item=NUMBERS),
    ListFlag(
        names=("--seeds", "--lr", "--hidden", "--encoder", "--loss", "--baselines"), commands=("ood",), item=NAMES
    ),
    ListFlag(names=("-d", "--data"), commands=("ood",), item=NAMES, repeated=True),
    ListFlag(
        names=("--knob", "--map"), commands=("find", "eval", "profile", "forecast", "encode", "ood"), item=PAIR,
        repeated=True,
    ),
)  # fmt: skip

# Options whose value may be left out: what a value looks like, since a word that is none belongs to the command.
OPTIONAL = {("forecast", "--by-module"): re.compile(r"[+-]?\d+|true|false", re.IGNORECASE)}


def rewritten(arguments: Sequence[str]) -> list[str]:
    """The line in brim's own flags; an old flag that none replaces is a `RequestError` that says what to do."""
    words = _renamed(dashed(arguments))
    end = words.index("--") if "--" in words else len(words)
    command = _command(words[:end])
    return [*_with_values(_joined_lists(_modern_flags(words[:end], command), command), command), *words[end:]]


def dashed(arguments: Sequence[str]) -> list[str]:
    """`--batch_size 8` as `--batch-size 8`. Values, and all after `--`, stay as they are."""
    result: list[str] = []
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[position:]]
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        result.append(argument)
    return result


def _renamed(words: list[str]) -> list[str]:
    """`train dpo` is what `ood` was called."""
    place = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
    return [*words[:place], "ood", *words[place + 2 :]] if words[place : place + 2] == ["train", "dpo"] else words


def _command(words: Sequence[str]) -> str:
    """The word that names the command."""
    return next((word for word in words if not word.startswith("-")), "")


def _modern_flags(words: Sequence[str], command: str) -> list[str]:
    """Each flag of `OLD_FLAGS` replaced."""
    result: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        row = _old_flag(name, command)
        if row is None:
            result.append(word)
            continue
        becomes = row.becomes
        if VALUE in becomes:
            values = [value] if equals else _taken(rest, row.takes)
            if not values:
                raise RequestError(f"{name}: a value is missing; brim calls it {' '.join(becomes)}")
            becomes = tuple(_comma_list(values) if part == VALUE else part for part in becomes)
        if becomes[:1] == ("--knob",) and _has_knob([*result, *rest], becomes[1]):
            becomes = becomes[2:]  # two old flags of one knob, or an old flag beside --knob
        result += becomes
    return result


def _old_flag(name: str, command: str) -> OldFlag | None:
    """The row of an old flag; one that is answered, or replaced on other commands only, raises."""
    rows = [row for row in OLD_FLAGS if row.name == name]
    row = next((row for row in rows if command in row.commands), None)
    if row is None and rows and command in _ANY and name not in _OWN_ELSEWHERE:
        row = rows[0]
        if not row.answer:
            commands = " and ".join(f"brim {command}" for command in row.commands)
            does = f"there it is {' '.join(row.becomes)}" if row.becomes else "there it is the default"
            raise RequestError(f"{name}: it goes with {commands} ({does}); leave it out of brim {command}")
    if row is not None and row.answer:
        raise RequestError(f"{name}: {row.answer}")
    return row


def _joined_lists(words: Sequence[str], command: str) -> list[str]:
    """Each list of `LISTS` that is separated by spaces, as its option takes it."""
    result: list[str] = []
    rest = list(words)
    rows = {name: row for row in LISTS if command in row.commands for name in row.names}
    while rest:
        word = rest.pop(0)
        row = rows.get(word)
        if row is None or not rest:
            result.append(word)
            continue
        item = row.item
        if item is None:
            item = NAMES if _has_model_flag(words) else _metric_names()
        values = _taken(rest, item)
        if row.repeated:
            result += [part for value in values for part in (word, value)]
        else:
            result += [word, values[0] if len(values) == 1 else _comma_list(values)]
    return result


def _with_values(words: Sequence[str], command: str) -> list[str]:
    """An option of `OPTIONAL` that is given without a value gets the word that stands for its default."""
    result: list[str] = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        row = OPTIONAL.get((command, word))
        result.append(word if row is None or row.fullmatch(following) else f"{word}=true")
    return result


def _taken(rest: list[str], item: re.Pattern[str] | None) -> list[str]:
    """The next word, and those after it that are items of the same list; they are removed from the rest."""
    values = [rest.pop(0)] if rest else []
    while rest and item is not None and item.fullmatch(rest[0]):
        values.append(rest.pop(0))
    return values


def _comma_list(values: Sequence[str]) -> str:
    return ",".join(value.strip(",") if len(values) > 1 else value for value in values)


def _has_knob(words: Sequence[str], knob: str) -> bool:
    return any(flag == "--knob" and value.partition("=")[0] == knob for flag, value in itertools.pairwise(words))


def _has_model_flag(words: Sequence[str]) -> bool:
    """Whether -m names the model, so that no word without a flag can be it."""
    return any(word in ("-m", "--model") or word.startswith("--model=") for word in words)


def _metric_names() -> re.Pattern[str]:
    from brim.metrics.registry import ALIASES, metric_names

    known = "|".join(map(re.escape, {*metric_names(), *ALIASES}))
    return re.compile(rf"(({known}),?)+", re.IGNORECASE)


class SuggestingCommand(TyperCommand):
    """A command that answers an option it does not have with the nearest one, and with the commands that have it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, with more to say about what it refuses."""
        if not args and self.no_args_is_help:
            args = ["--help"]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer's own, or click's: which one depends on typer's version
            own = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
            unknown = _unknown_option(error)
            if unknown is not None:
                _suggest(error, unknown, [name for name in own if name.startswith("--")], ctx)
            elif "unexpected extra argument" in getattr(error, "message", "") and "--data" in own:
                error.message += "; data is given with -d PATH, and a value with spaces in quotes"  # type: ignore[attr-defined]
            raise


class SuggestingGroup(TyperGroup):
    """A group whose options come after the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, with more to say about what it refuses."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            unknown = _unknown_option(error)
            if unknown is not None:
                error.possibilities = None  # type: ignore[attr-defined]
                error.message += f"; options come after the command: {ctx.command_path} COMMAND {unknown}"  # type: ignore[attr-defined]
            raise


def _unknown_option(error: Exception) -> str | None:
    return error.option_name if hasattr(error, "possibilities") and hasattr(error, "option_name") else None


def _suggest(error: Any, unknown: str, own: Sequence[str], ctx: Any) -> None:
    """Name a setting of the file, the commands that have the option, and at last the nearest option."""
    root = ctx.find_root().command
    if hasattr(root, "build_all"):
        root.build_all()
    others = _commands_with(root, unknown)
    settings = _settings_named(unknown) if any(param.name == "overrides" for param in ctx.command.params) else []
    if settings:
        error.message += f"; it is a setting of the file: {settings[0]}=VALUE."
    elif others:
        error.message += f"; brim {others[0]}{' and others have' if len(others) > 1 else ' has'} it."
    if not error.possibilities:
        error.possibilities = difflib.get_close_matches(unknown, own, n=1, cutoff=0.0)


def _settings_named(option: str) -> list[str]:
    """The keys of a training file that end in an option's name: `hp.epochs` for `--epochs`."""
    from brim.settings.train_settings import SETTING_KEYS

    name = option.lstrip("-").replace("-", "_")
    return [key for key in SETTING_KEYS if key.rpartition(".")[2] == name]


def _commands_with(command: Any, option: str, words: str = "") -> list[str]:
    """The commands that have an option of this name."""
    if not hasattr(command, "commands"):
        return [words] if any(option in param.opts for param in command.params) else []
    found = [_commands_with(inner, option, f"{words} {name}".strip()) for name, inner in command.commands.items()]
    return [name for names in found for name in names]
