"""The flags of docs/interface.md, declared once for every command that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from brim.errors import RequestError

__all__ = [
    "BatchSize", "CardMemory", "Chat", "CompareBatch", "CompareTrainingBatch", "CostCap", "Data", "Device", "Dtype",
    "EarlierPlan", "EffectiveBatch", "EvalBatchSize", "FailFast", "FailOnOom", "Fields", "GpuNames", "GpusPerWorker",
    "GradientCheckpointing", "Images", "Isolate", "JsonOutput", "Knobs", "Launcher", "Limit", "LrScale", "Margin",
    "MaxBatchSize", "MaxProbes", "MaxTokens", "MemoryLimit", "Metrics", "MicroBatchSize", "Mode", "ModelArgument",
    "ModelFlag", "ModelName", "MultipleOf", "NoAutoBatchSize", "NoCache", "NumWorkers", "Objective", "Offload",
    "Optimizer", "Output", "PerRank", "PinMemory", "PlotFile", "Plugins", "PowerOfTwo", "PrefetchFactor",
    "ProbeTimeout", "Resume", "ResumeTraining", "RunFolder", "SavePredictions", "ScaleBetas", "Seed", "SkipBad",
    "Split", "StopStrings", "SystemPrompt", "Task", "Temperature", "Tolerance", "TopP", "TrainingDevice",
    "TrainingDtype", "TrainingOptimizer", "TrustRemoteCode", "Verbose", "Weights", "Workers", "collect_knobs",
    "parse_batch_size",
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

_DATA, _ANSWER, _LOAD = "Data", "Answers", "Loading"

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="The model, where -m is not given.", show_default=False)
]
ModelFlag = Annotated[
    str | None,
    _flag("-m", "--model", text="A transformers folder, a torchvision or timm name, or py:FILE:FACTORY.",
          metavar="MODEL"),
]  # fmt: skip
Data = Annotated[
    str | None,
    _flag("-d", "--data", text="JSONL, CSV, Parquet, a data set folder, VQAv2, class folders, UCF101.", panel=_DATA,
          metavar="PATH"),
]  # fmt: skip
Split = Annotated[str | None, _flag("--split", text="Which split of the data.", panel=_DATA, metavar="NAME")]
Limit = Annotated[int | None, _flag("--limit", text="Only N samples, classes in proportion.", panel=_DATA, metavar="N")]
Fields = Annotated[
    list[str] | None,
    _flag("--map", text="Which column is what: --map prompt=query; repeatable.", panel=_DATA, metavar="FIELD=COLUMN"),
]
Images = Annotated[
    str | None, _flag("--images", text="The folder that image names start from.", panel=_DATA, metavar="DIR")
]
SkipBad = Annotated[bool, _flag("--skip-bad", text="Leave out records that cannot be read.", panel=_DATA)]
Task = Annotated[
    str | None,
    _flag("--task", text="generate, vqa, choice or classify; by default what the data is for.", metavar="TASK"),
]
Metrics = Annotated[
    str | None,
    _flag("--metrics", text="Such as bleu,rouge,exact_match; by default the task's own.", metavar="NAMES"),
]
Plugins = Annotated[
    list[str] | None,
    _flag("--plugin", text="A Python file with tasks or metrics of your own; repeatable.", metavar="FILE"),
]
Weights = Annotated[
    str,
    _flag("--weights", text="For torchvision and timm: auto (published), none (random) or a file.", metavar="WHICH"),
]

Temperature = Annotated[
    float, _flag("--temperature", text="0 is greedy; above, tokens are drawn.", panel=_ANSWER, metavar="T")
]
TopP = Annotated[float, _flag("--top-p", text="Draw from the likeliest tokens up to this.", panel=_ANSWER, metavar="P")]
Seed = Annotated[int, _flag("--seed", text="For drawn tokens.", panel=_ANSWER, metavar="N")]
StopStrings = Annotated[
    list[str] | None,
    _flag("--stop", text="An answer ends before this text; repeatable.", panel=_ANSWER, metavar="TEXT"),
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Use the model's chat template; by default if it has one.",
                 rich_help_panel=_ANSWER, show_default=False),
]  # fmt: skip
SystemPrompt = Annotated[
    str | None, _flag("--system", text="A system prompt before every sample.", panel=_ANSWER, metavar="TEXT")
]

NumWorkers = Annotated[
    int | None,
    _flag("--num-workers", text="Loading processes; by default as many as a short trial asks for.", panel=_LOAD,
          metavar="N"),
]  # fmt: skip
PinMemory = Annotated[
    bool, typer.Option("--pin-memory/--no-pin-memory", help="Load into pinned memory.", rich_help_panel=_LOAD)
]
PrefetchFactor = Annotated[
    int, _flag("--prefetch-factor", text="Samples each process prepares ahead.", panel=_LOAD, metavar="N")
]

Offload = Annotated[
    str | None,
    _flag("--offload", text="cpu: if a sample does not fit even alone, weights go to host memory.", panel=_BATCH,
          metavar="cpu"),
]  # fmt: skip
CostCap = Annotated[
    int | None,
    _flag("--cost-cap", text="At most so many tokens (padding included) in a batch, instead of a number of samples.",
          panel=_BATCH, metavar="N"),
]  # fmt: skip
CompareBatch = Annotated[
    str | None,
    _flag("--compare-batch", text="Time these sizes on a part of the data instead: 1,2,4,8,16.", panel=_BATCH,
          metavar="SIZES"),
]  # fmt: skip
FailFast = Annotated[bool, _flag("--fail-fast", text="Stop at the first sample that fails by an error of its own.")]
Resume = Annotated[
    bool, _flag("--resume", text="Go on with the run in -o: samples that are done are not done again.", panel=_OUT)
]
RetryFailed = Annotated[
    bool, _flag("--retry-failed", text="With --resume: samples that failed are tried again.", panel=_OUT)
]
Launcher = Annotated[
    str | None, _flag("--on", text="ray: by the workers of a Ray cluster, one GPU each.", panel=_WHERE, metavar="ray")
]
Workers = Annotated[
    int | None,
    _flag("--workers", text="With --on ray: how many; by default one for each GPU.", panel=_WHERE, metavar="N", min=1),
]
GpusPerWorker = Annotated[
    float | None,
    _flag("--gpus-per-worker", text="With --on ray: the part of a GPU that each has (1).", panel=_WHERE,
          metavar="FRACTION"),
]  # fmt: skip
RunFolder = Annotated[
    Path | None,
    _flag("-o", "--output", text="The run's folder (default runs/<command>-<time>).", panel=_OUT, metavar="DIR"),
]
SavePredictions = Annotated[
    bool, typer.Option("--save-predictions", help="Always on: samples.jsonl has them.", hidden=True)
]
Verbose = Annotated[bool, _flag("--verbose", text="Also show the first answers.", panel=_OUT)]

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
GpuNames = Annotated[
    list[str] | None,
    _flag("--gpu", text="A card by name, such as a100-80gb or 'rtx 4090'; repeatable. --gpus lists them.", panel=_WHERE,
          metavar="NAME"),
]  # fmt: skip
CardMemory = Annotated[
    str | None,
    _flag("--memory", text="Any other card by its memory, as the driver reports it: 24GiB.", panel=_WHERE,
          metavar="SIZE"),
]  # fmt: skip
PlotFile = Annotated[
    Path | None,
    _flag("--plot", text="Also draw it, as one HTML file that needs no network.", panel=_OUT, metavar="FILE"),
]
JsonOutput = Annotated[
    bool, _flag("--json", text="One JSON document on standard output, the rest on standard error.", panel=_OUT)
]

MicroBatchSize = Annotated[
    str | None,
    _flag("-b", "--batch-size", text="Samples of a micro-batch on each rank: auto (default), or N as a ceiling.",
          panel=_BATCH, metavar="auto|N"),
]  # fmt: skip
EffectiveBatch = Annotated[
    str | None,
    _flag("--effective-batch", text="Samples of an optimizer step over all ranks: N, or auto to let it grow.",
          panel=_BATCH, metavar="auto|N"),
]  # fmt: skip
EvalBatchSize = Annotated[
    str | None,
    _flag("--eval-batch-size", text="Samples of a validation batch: auto (default), or N as a ceiling.", panel=_BATCH,
          metavar="auto|N"),
]  # fmt: skip
LrScale = Annotated[
    str | None,
    _flag("--lr-scale", text="How the learning rate follows the batch: none, sqrt, linear or auto.", panel=_BATCH,
          metavar="RULE"),
]  # fmt: skip
ScaleBetas = Annotated[bool, _flag("--scale-betas", text="With --lr-scale, Adam's betas and eps too.", panel=_BATCH)]
EarlierPlan = Annotated[
    str | None, _flag("--plan", text="Go back to the sizes of an earlier run.", panel=_BATCH, metavar="DIR")
]
CompareTrainingBatch = Annotated[
    str | None,
    _flag("--compare-batch", text="Short trials of these effective batches instead: 512,2048,8192.", panel=_BATCH,
          metavar="SIZES"),
]  # fmt: skip
TrainingDevice = Annotated[
    str | None, _flag("--device", text="auto, cpu, cuda, cuda:N or mps.", panel=_WHERE, metavar="DEVICE")
]
TrainingDtype = Annotated[
    str | None,
    _flag("--dtype", "--torch-dtype", text="auto, float32, float16 or bfloat16 (autocast).", panel=_WHERE,
          metavar="DTYPE"),
]  # fmt: skip
TrainingOptimizer = Annotated[
    str | None, _flag("--optimizer", text="Any of torch.optim, by name.", panel=_WHERE, metavar="NAME")
]
ResumeTraining = Annotated[bool, _flag("--resume", text="Go on from the last checkpoint in -o.", panel=_OUT)]


def parse_batch_size(text: str, *, flag: str = "--batch-size") -> int | None:
    """`auto` is None; anything else must be a whole number from 1."""
    from brim.settings.search_settings import LARGEST_SIZE

    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > len(str(LARGEST_SIZE)) or not 1 <= int(text) <= LARGEST_SIZE:
        raise RequestError(f"{flag} {text}: give auto or a whole number from 1 to {LARGEST_SIZE}")
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
