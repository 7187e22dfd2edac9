"""The flags of docs/interface.md, declared once for every command that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from brim.errors import RequestError

__all__ = [
    "BatchSize", "Device", "Dtype", "FailOnOom", "GradientCheckpointing", "Isolate", "JsonOutput", "Knobs", "Margin",
    "MaxBatchSize", "MaxProbes", "MaxTokens", "MemoryLimit", "Mode", "ModelName", "MultipleOf", "NoAutoBatchSize",
    "NoCache", "Objective", "Optimizer", "Output", "PerRank", "PowerOfTwo", "ProbeTimeout", "Tolerance",
    "TrustRemoteCode", "collect_knobs", "parse_batch_size",
]  # fmt: skip

_BATCH, _WHERE, _OUT = "Batch size", "Device and precision", "Output"


def _flag(*names: str, text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision or timm name, a transformers folder, or py:FILE_OR_MODULE:FACTORY; "
        "prefixes torchvision:, timm:, hf:, py: decide.",
        show_default=False,
    ),
]
Mode = Annotated[
    str | None,
    _flag("--mode", text="forward, generate or train; by default what the model is for.", metavar="MODE"),
]
Knobs = Annotated[
    list[str] | None,
    _flag("--knob", text="A setting of the model, repeatable: --knob size=224 --knob frames=16.", metavar="NAME=VALUE"),
]
MaxTokens = Annotated[int | None, _flag("--max-tokens", text="Short for --knob max_new_tokens=N.", metavar="N", min=1)]
TrustRemoteCode = Annotated[
    bool, _flag("--trust-remote-code", text="Let a transformers folder run its own Python code.")
]

BatchSize = Annotated[
    str,
    _flag("-b", "--batch-size", text="auto, or N as a ceiling: lowered only where N does not fit.", panel=_BATCH,
          metavar="auto|N"),
]  # fmt: skip
NoAutoBatchSize = Annotated[
    bool, _flag("--no-auto-batch-size", text="With -b N: exactly N; split where it does not fit.", panel=_BATCH)
]
FailOnOom = Annotated[
    bool, _flag("--fail-on-oom", text="With --no-auto-batch-size: an error instead of a split.", panel=_BATCH)
]
Objective = Annotated[str, _flag("--objective", text="fastest or largest.", panel=_BATCH, metavar="fastest|largest")]
MemoryLimit = Annotated[
    str | None,
    _flag("--memory-limit", text="Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only.",
          panel=_BATCH, metavar="SIZE"),
]  # fmt: skip
Margin = Annotated[
    float | None,
    _flag("--margin", text="Keep this fraction free (0.05; 0 with --memory-limit).", panel=_BATCH, metavar="FRACTION"),
]
Tolerance = Annotated[
    float, _flag("--tolerance", text="How close to the best rate is fast enough.", panel=_BATCH, metavar="FRACTION")
]
MaxProbes = Annotated[
    int | None, _flag("--max-probes", text="Stop after N probes with the best size seen.", panel=_BATCH, metavar="N")
]
ProbeTimeout = Annotated[
    float | None,
    _flag("--probe-timeout", text="A probe that takes longer does not fit; a hang needs --isolate.", panel=_BATCH,
          metavar="SECONDS"),
]  # fmt: skip
MultipleOf = Annotated[int, _flag("--multiple-of", text="Only multiples of N.", panel=_BATCH, metavar="N")]
PowerOfTwo = Annotated[bool, _flag("--power-of-two", text="Only powers of two.", panel=_BATCH)]
MaxBatchSize = Annotated[
    int | None, _flag("--max-batch-size", text="Look no further than N.", panel=_BATCH, metavar="N")
]
NoCache = Annotated[bool, _flag("--no-cache", text="Neither use a cached plan nor keep this one.", panel=_BATCH)]
PerRank = Annotated[
    bool, _flag("--per-rank", text="Under torchrun, let each rank keep its own training size.", panel=_BATCH)
]
Isolate = Annotated[
    bool,
    _flag("--isolate", text="Probe in a child process: a crash, a kill or a hang becomes a verdict.", panel=_BATCH),
]

Device = Annotated[str, _flag("--device", text="auto, cpu, cuda, cuda:N or mps.", panel=_WHERE, metavar="DEVICE")]
Dtype = Annotated[
    str,
    _flag("--dtype", "--torch-dtype", text="auto, float32, float16 or bfloat16; in training, autocast.", panel=_WHERE,
          metavar="DTYPE"),
]  # fmt: skip
Optimizer = Annotated[str, _flag("--optimizer", text="Any of torch.optim, by name.", panel=_WHERE, metavar="NAME")]
GradientCheckpointing = Annotated[
    bool, _flag("--gradient-checkpointing", text="Recompute activations in the backward pass.", panel=_WHERE)
]

Output = Annotated[
    Path | None, _flag("-o", "--output", text="Also write run.json into this folder.", panel=_OUT, metavar="DIR")
]
JsonOutput = Annotated[
    bool, _flag("--json", text="One JSON document on standard output, the rest on standard error.", panel=_OUT)
]


def parse_batch_size(text: str) -> int | None:
    """`auto` is None; anything else must be a whole number from 1."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise RequestError(f"--batch-size {text}: give auto or a whole number from 1")
    return int(text)


def collect_knobs(flags: list[str] | None, max_tokens: int | None) -> dict[str, str]:
    """`--knob` and its short forms as one dictionary."""
    from brim.workloads.knobs import parse_knob_flags

    knobs = parse_knob_flags(flags or [])
    if max_tokens is not None:
        if "max_new_tokens" in knobs:
            raise RequestError("--max-tokens and --knob max_new_tokens say the same thing; keep one")
        knobs["max_new_tokens"] = str(max_tokens)
    return knobs
