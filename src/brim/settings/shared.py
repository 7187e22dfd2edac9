"""The settings that several commands have, each declared once; a command's own are where its dataclass is.

A row is a type for a field: `device: Device = "auto"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from brim.errors import RequestError
from brim.settings.caller import given, named, written
from brim.settings.declare import Setting
from brim.settings.setting_checks import (
    Check,
    byte_count,
    byte_size,
    choice,
    entries_of,
    fraction,
    numbers,
    pairs,
    path,
    path_text,
    size_list,
    size_or_none,
    texts,
    whole,
)

__all__ = [
    "ANSWERS", "BATCH", "DATA", "FAST_PATHS", "FIELDS", "LARGEST_SIZE", "LOADING", "LOGGERS", "MOST_RUNS", "OUTPUT",
    "WHERE",
    "BatchSize", "ByteLimit", "Chat", "Columns", "CompareBatch", "Data", "Device", "Dtype", "FailOnOom", "FastPath",
    "GradientCheckpointing", "Images", "JsonOutput", "Knobs", "Limit", "Log", "Margin", "MaxBatchSize", "MaxTokens",
    "MemoryLimit", "MultipleOf", "NoAutoBatchSize", "NoCache", "NumWorkers", "PerRank", "PinMemory", "PowerOfTwo",
    "PrefetchFactor", "Resume", "RunFolder", "Split", "Task", "TrustRemoteCode", "check_comparison",
    "check_fail_on_oom", "check_functions", "check_log", "check_new_tokens", "check_one_card", "check_resume",
    "checked", "checked_batch_size", "read_changes", "read_seeds", "seeds_from", "setting_of",
]  # fmt: skip

FIELDS = ("prompt", "input", "context", "reference", "image", "video", "choices", "id", "label", "group")
LOGGERS = ("tensorboard", "mlflow", "wandb")
LARGEST_SIZE = 2**31 - 1  # kernels count samples with 32 bits

DATA, ANSWERS, BATCH, WHERE, LOADING, OUTPUT = (
    "Data", "Answers", "Batch size", "Device and precision", "Loading", "Output",
)  # fmt: skip


def setting_of(row: Any, **changes: Any) -> Setting:
    """The setting of a row, for a command that describes it otherwise or a field of another type."""
    found: Setting = row.__metadata__[0]
    return dataclasses.replace(found, **changes)


def check_resume(resume: bool, output: Path | None, *, what: str = "run") -> None:
    """A run to continue must be named."""
    if resume and output is None:
        raise RequestError(f"{named('resume')}: name the {what} with {written('output', 'DIR')}")


def check_comparison(flag: str, *, resume: bool) -> None:
    """A comparison measures all its rows in turns: half of one cannot be continued."""
    if resume:
        raise RequestError(
            f"{named('resume')}: a comparison ({named(flag)}) is not resumed, since its measurements take turns; leave "
            "it out and start again in another folder"
        )


def check_fail_on_oom(fail_on_oom: bool, *, fixed: bool) -> None:
    """Only a size that is fixed can fail."""
    if fail_on_oom and not fixed:
        raise RequestError(
            f"{named('fail_on_oom')} goes with {named('no_auto_batch_size')} and {written('batch_size', 'N')}"
        )


def check_log(log: Sequence[str], instead: str, *, asked: bool) -> None:
    """What is asked for instead of a run is not logged."""
    if log and asked:
        raise RequestError(f"{given('log', log[0])}: it logs a run, which {named(instead)} is not; leave one out")


def check_new_tokens(max_new_tokens: int | None, knobs: Mapping[str, Any]) -> None:
    """`--max-tokens` is short for a knob."""
    if max_new_tokens is not None and "max_new_tokens" in knobs:
        raise RequestError(f"{named('max_tokens')} and the knob max_new_tokens set the same limit; keep one")


def read_changes(value: Any) -> dict[str, Any]:
    """Keys with values as a mapping, or as KEY=VALUE texts of YAML."""
    from brim.settings.yaml_file import parse_overrides  # which is not needed to show flags

    return parse_overrides(value if isinstance(value, Mapping) else map(str, entries_of(value)))


def _read_loggers(value: Any) -> tuple[str, ...]:
    one_of = choice(*LOGGERS)
    return tuple(one_of(name) for name in texts()(value))


def check_one_card(gpu: str | None, memory: str | int | None) -> None:
    """A card is given by name or by memory."""
    if gpu is not None and memory is not None:
        raise RequestError(f"{given('gpu', gpu)} and {given('memory', memory)} both name a card; give one")


# ------------------------------------------------------------------------------------------------ model

MODEL_HELP = "A torchvision or timm name, a transformers folder, or py:FILE_OR_MODULE:FACTORY"

Knobs = Annotated[
    Mapping[str, Any],
    Setting(
        name="knob", help="A setting of the model, repeatable: --knob size=224 --knob frames=16.", metavar="NAME=VALUE",
        check=pairs("NAME=VALUE, for example --knob size=224"), many=True,
        python_help="Settings of the model: {'size': 224, 'frames': 16}.",
    ),
]  # fmt: skip
MaxTokens = Annotated[
    int | None,
    Setting(
        name="max_tokens", help="Short for --knob max_new_tokens=N.", metavar="N", check=whole(1),
        python_help="Short for the knob max_new_tokens.",
    ),
]  # fmt: skip
TrustRemoteCode = Annotated[bool, Setting(help="Let a transformers folder run its own Python code.")]
GradientCheckpointing = Annotated[bool, Setting(help="Recompute activations in the backward pass.", panel=WHERE)]

# ------------------------------------------------------------------------------------------------- data

Data = Annotated[
    str,
    Setting(
        help="A file (JSONL, CSV, Parquet, …) or a folder (a saved data set, class folders, VQAv2, …).",
        flags=("-d", "--data"),
        panel=DATA, metavar="PATH", check=path_text(), positional=True,
        missing="give the data to evaluate on, such as questions.jsonl",
    ),
]  # fmt: skip
Split = Annotated[str | None, Setting(help="Which split of the data.", panel=DATA, metavar="NAME")]
Limit = Annotated[
    int | None, Setting(help="Only N samples, classes in proportion.", panel=DATA, metavar="N", check=whole(1))
]
Columns = Annotated[
    Mapping[str, str],
    Setting(
        name="map", help="The column of a field: --map prompt=query; repeatable.", panel=DATA, metavar="FIELD=COLUMN",
        check=pairs("FIELD=COLUMN, such as prompt=question", FIELDS), many=True,
        python_help="Which column is what: {'prompt': 'query'}.",
    ),
]  # fmt: skip
Images = Annotated[
    str | None,
    Setting(help="The folder that relative image names refer to.", panel=DATA, metavar="DIR", check=path_text()),
]
Task = Annotated[
    str | None, Setting(help="generate, vqa, choice or classify; by default what the data is for.", metavar="TASK")
]

# ------------------------------------------------------------------------------------------- batch size

BatchSize = Annotated[
    int | None,
    Setting(
        help="auto, or N as a ceiling: lowered only where N does not fit.", flags=("-b", "--batch-size"), panel=BATCH,
        metavar="auto|N", check=size_or_none(LARGEST_SIZE), default="auto",
    ),
]  # fmt: skip


def checked(name: str, value: Any, check: Check) -> Any:
    """A parameter of a function that is no command, read as a command reads it; None where it was left out."""
    try:
        return None if value is None else check(value)
    except ValueError as error:
        raise RequestError(f"{given(name, value)}: {error}") from None


def checked_batch_size(value: Any) -> int | None:
    """`batch_size=` of such a function: a number, or None where it is auto or was left out."""
    size: int | None = checked("batch_size", value, size_or_none(LARGEST_SIZE))
    return size


def check_functions(**optional: Any) -> None:
    """Parameters that take a function."""
    for name, value in optional.items():
        if value is not None and not callable(value):
            raise RequestError(f"{name}={value!r:.60}: give a function, or leave it out")


NoAutoBatchSize = Annotated[
    bool, Setting(name="no_auto_batch_size", help="With -b N: exactly N; split where it does not fit.", panel=BATCH)
]
FailOnOom = Annotated[bool, Setting(help="With --no-auto-batch-size: an error instead of a split.", panel=BATCH)]
_MEMORY_LIMIT = "Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only."
MemoryLimit = Annotated[int | str | None, Setting(help=_MEMORY_LIMIT, panel=BATCH, metavar="SIZE", check=byte_size())]
ByteLimit = Annotated[
    int | None,
    Setting(
        name="memory_limit", help=_MEMORY_LIMIT, panel=BATCH, metavar="SIZE", check=byte_count(),
        python="int | str | None",
    ),
]  # fmt: skip
Margin = Annotated[
    float | None,
    Setting(
        help="Keep this fraction free (0.05; 0 with --memory-limit).", panel=BATCH, metavar="FRACTION", check=fraction()
    ),
]
MultipleOf = Annotated[int, Setting(help="Only multiples of N.", panel=BATCH, metavar="N", check=whole(1))]
PowerOfTwo = Annotated[bool, Setting(help="Only powers of two.", panel=BATCH)]
MaxBatchSize = Annotated[
    int,
    Setting(
        name="max_batch_size", help="The largest size to try.", panel=BATCH, metavar="N", check=whole(1, LARGEST_SIZE),
        default=None,
    ),
]  # fmt: skip
NoCache = Annotated[
    bool, Setting(name="no_cache", help="Neither use a cached plan nor keep this one.", panel=BATCH, inverted=True)
]
PerRank = Annotated[bool, Setting(help="Under torchrun, let each rank keep its own training size.", panel=BATCH)]
CompareBatch = Annotated[
    tuple[int, ...],
    Setting(
        help="Time these sizes on a part of the data instead: 1,2,4,8,16.", panel=BATCH, metavar="SIZES",
        check=size_list(), only="flags",
    ),
]  # fmt: skip

# -------------------------------------------------------------------------------------- device, loading

Device = Annotated[
    str,
    Setting(
        help="auto, cpu, cuda, cuda:N or mps.", panel=WHERE, metavar="DEVICE", offers=("auto", "cpu", "cuda", "mps")
    ),
]  # fmt: skip
Dtype = Annotated[
    str,
    Setting(
        help="auto, float32, float16 or bfloat16; in training, autocast.", flags=("--dtype", "--torch-dtype"),
        panel=WHERE, metavar="DTYPE", offers=("auto", "float32", "float16", "bfloat16"),
    ),
]  # fmt: skip
NumWorkers = Annotated[
    int | None,
    Setting(
        help="Loading processes; by default chosen by a short trial.", panel=LOADING, metavar="N",
        check=whole(0),
    ),
]  # fmt: skip
PinMemory = Annotated[
    bool, Setting(help="Load into pinned memory.", flags=("--pin-memory/--no-pin-memory",), panel=LOADING)
]
PrefetchFactor = Annotated[
    int, Setting(help="Samples each process prepares ahead.", panel=LOADING, metavar="N", check=whole(1))
]
Chat = Annotated[
    bool | None,
    Setting(
        help="Use the model's chat template; by default if it has one.", flags=("--chat/--no-chat",), panel=ANSWERS
    ),
]

# ----------------------------------------------------------------------------------------------- output

Resume = Annotated[bool, Setting(help="Continue the run in -o: finished samples are kept.", panel=OUTPUT)]
RunFolder = Annotated[
    Path | None,
    Setting(
        help="The run's folder (default runs/<command>-<time>).", flags=("-o", "--output"), panel=OUTPUT, metavar="DIR",
        check=path(),
    ),
]  # fmt: skip
Log = Annotated[
    tuple[str, ...],
    Setting(
        help="Also log the figures to tensorboard, mlflow or wandb; repeatable.", panel=OUTPUT, metavar="NAME",
        flags=("--log", "--logger"),  # the second for torchrun, which on Python 3.11 takes --log for its own
        many=True, check=Check("names", _read_loggers), python="str | Sequence[str] | None",
        offers=LOGGERS,
    ),
]  # fmt: skip
JsonOutput = Annotated[
    bool,
    Setting(
        name="json", help="One JSON document on standard output, the rest on standard error.", panel=OUTPUT,
        only="flags",
    ),
]  # fmt: skip


FastPath = Literal["off", "resident", "stacked"]
FAST_PATHS: tuple[FastPath, ...] = get_args(FastPath)
MOST_RUNS = 100_000  # of one training: as many as a sweep may repeat an experiment


def read_seeds(value: Any) -> int | tuple[int, ...]:
    """How many seeds (`10`), or which (`3,5,8`; `7,` is one)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        found: tuple[int, ...] = numbers(int)(value)
    except ValueError:
        raise ValueError("write numbers, separated by commas") from None
    if not found:
        raise ValueError("give how many, from 1, or which, by commas")
    return found[0] if isinstance(value, str) and "," not in value else found


def seeds_from(asked: int | Sequence[int], *, first: int) -> tuple[int, ...]:
    """So many seeds from the first on, or those that are named."""
    if not isinstance(asked, int):
        return tuple(asked)
    if asked < 1:
        raise RequestError(f"{given('seeds', asked)}: give how many, from 1, or which, by commas")
    if asked > MOST_RUNS:
        raise RequestError(
            f"{given('seeds', asked)}: {MOST_RUNS:,} at most; one seed alone is written {written('seeds', f'{asked},')}"
        )
    return tuple(range(first, first + asked))
