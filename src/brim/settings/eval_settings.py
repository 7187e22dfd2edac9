"""What `brim eval` and `brim.evaluate` take, in plain values."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given, named, pair, written
from brim.settings.declare import Setting, check_fields
from brim.settings.setting_checks import Check, choice, names, number, texts, whole
from brim.settings.shared import ANSWERS, BATCH, OUTPUT, WHERE
from brim.settings.sizes import parse_bytes

__all__ = ["EvalRequest", "EvaluateSettings", "failed_fast"]


def _read_place(value: Any) -> str:
    if value != "ray":
        raise ValueError("only ray can be asked for; for ranks on this machine use torchrun")
    return "ray"


def _switched(text: str) -> Setting:
    """What makes an evaluation fast: for those who measure what it brings."""
    return Setting(help=text, only="python", hidden=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """An evaluation; None means that brim chooses."""

    model: Annotated[
        str,
        Setting(
            help="A transformers folder, a torchvision or timm name, or py:FILE:FACTORY.", flags=("-m", "--model"),
            argument=True, metavar="MODEL", missing="give the model to evaluate, such as ./my-model",
        ),
    ]  # fmt: skip
    data: shared.Data
    split: shared.Split = None
    limit: shared.Limit = None
    mapping: shared.Columns = dataclasses.field(default_factory=dict)
    images: shared.Images = None
    skip_bad: Annotated[bool, Setting(help="Leave out records that cannot be read.", panel=shared.DATA)] = False
    task: shared.Task = None
    metrics: Annotated[
        tuple[str, ...],
        Setting(help="Such as bleu,rouge,exact_match; by default the task's own.", metavar="NAMES", check=names()),
    ] = ()
    plugins: Annotated[
        tuple[str, ...],
        Setting(
            name="plugin", help="A Python file with tasks or metrics of your own; repeatable.", metavar="FILE",
            check=texts(), many=True, python="str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None",
        ),
    ] = ()  # fmt: skip
    knobs: shared.Knobs = dataclasses.field(default_factory=dict)
    max_new_tokens: shared.MaxTokens = None
    temperature: Annotated[
        float,
        Setting(help="0 is greedy; above 0, tokens are sampled.", panel=ANSWERS, metavar="T", check=number(least=0)),
    ] = 0.0
    top_p: Annotated[
        float,
        Setting(
            help="Sample from the most likely tokens up to this total probability.",
            panel=ANSWERS,
            metavar="P",
            check=number(above=0, most=1),
        ),
    ] = 1.0
    seed: Annotated[int, Setting(help="Seed of the sampling.", panel=ANSWERS, metavar="N", check=whole())] = 0
    stop: Annotated[
        tuple[str, ...],
        Setting(
            help="An answer ends before this text; repeatable.", panel=ANSWERS, metavar="TEXT", check=texts(), many=True
        ),
    ] = ()
    batch_invariant: Annotated[
        bool,
        Setting(
            help="Answers do not depend on the batch size; slower. For language models on CUDA in half precision.",
            panel=ANSWERS,
        ),
    ] = False
    chat: shared.Chat = None
    system: Annotated[
        str | None, Setting(help="A system prompt before every sample.", panel=ANSWERS, metavar="TEXT")
    ] = None
    weights: Annotated[
        str, Setting(help="For torchvision and timm: auto (published), none (random) or a file.", metavar="WHICH")
    ] = "auto"
    trust_remote_code: shared.TrustRemoteCode = False
    batch_size: shared.BatchSize = None
    cost_cap: Annotated[
        int | None,  # a batch's padded cost at most, in the task's unit; None: found as the run goes
        Setting(
            help="At most so many tokens (padding included) in a batch, instead of a number of samples.", panel=BATCH,
            metavar="N", check=whole(1),
        ),
    ] = None  # fmt: skip
    fixed: shared.NoAutoBatchSize = False
    fail_on_oom: shared.FailOnOom = False
    memory_limit: shared.MemoryLimit = None
    margin: shared.Margin = None
    offload: Annotated[
        str | None,
        Setting(
            help="cpu: if a sample does not fit even alone, weights go to host memory.", panel=BATCH, metavar="cpu",
            check=choice("cpu"), python="str | None",
        ),
    ] = None  # fmt: skip
    use_cache: shared.NoCache = True
    device: shared.Device = "auto"
    dtype: shared.Dtype = "auto"
    num_workers: shared.NumWorkers = None
    pin_memory: shared.PinMemory = True
    prefetch_factor: shared.PrefetchFactor = 4
    graphs: Annotated[bool, _switched("Capture decode steps as CUDA graphs.")] = True
    overlap: Annotated[bool, _switched("Start a batch before the last one's answers are read and scored.")] = True
    non_blocking: Annotated[bool, _switched("Copy to the device without holding up the host.")] = True
    decode_loop: Annotated[bool, _switched("Brim's own where it fits the model; else transformers' generate.")] = True
    pool: Annotated[bool, _switched("An answer that ends makes room for the next prompt; else whole batches.")] = True
    fail_fast: Annotated[bool, Setting(help="Stop at the first sample that raises an error.")] = False
    resume: shared.Resume = False
    retry_failed: Annotated[bool, Setting(help="With --resume: samples that failed are tried again.", panel=OUTPUT)] = (
        False
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cost_cap is not None and self.batch_size is not None:
            raise RequestError(
                f"{given('cost_cap', self.cost_cap)}: it cannot go together with {given('batch_size', self.batch_size)}"
            )
        if self.fixed and self.batch_size is None:
            raise RequestError(f"{named('no_auto_batch_size')} needs a size: add {written('batch_size', 'N')}")
        shared.check_fail_on_oom(self.fail_on_oom, fixed=self.fixed)
        if self.retry_failed and not self.resume:
            raise RequestError(
                f"{named('retry_failed')} goes with {named('resume')} and {written('output', 'DIR')}: it tries the "
                "failed samples of a run again"
            )
        if "dtype" in self.knobs and self.dtype not in ("auto", self.knobs["dtype"]):
            raise RequestError(
                f"{given('dtype', self.dtype)} and {pair('knob', 'dtype', self.knobs['dtype'])} differ; keep one"
            )
        shared.check_new_tokens(self.max_new_tokens, self.knobs)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {**dataclasses.asdict(self), "mapping": dict(self.mapping), "knobs": dict(self.knobs)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """An evaluation, where it runs, and where its record goes."""

    request: EvalRequest
    compare_batch: shared.CompareBatch = ()
    on: Annotated[
        str | None,
        Setting(
            help="ray: run on the workers of a Ray cluster, one GPU each.", panel=WHERE, metavar="ray",
            check=Check("ray", _read_place),
        ),
    ] = None  # fmt: skip
    workers: Annotated[
        int | None,
        Setting(
            help="With --on ray: how many; by default one for each GPU.", panel=WHERE, metavar="N", check=whole(1),
            python_help="With on='ray': how many; by default one for each GPU.",
        ),
    ] = None  # fmt: skip
    gpus_per_worker: Annotated[
        float | None,
        Setting(
            help="With --on ray: the part of a GPU that each has (1).", panel=WHERE, metavar="FRACTION", check=number(),
            python_help="With on='ray': the part of a GPU that each has (1).",
        ),
    ] = None  # fmt: skip
    output: shared.RunFolder = None
    log: shared.Log = ()
    json_output: shared.JsonOutput = False
    save_predictions: Annotated[bool, Setting(help="Always on: samples.jsonl has them.", hidden=True, only="flags")] = (
        False
    )
    verbose: Annotated[bool, Setting(help="Also show the first answers.", panel=OUTPUT, only="flags")] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.compare_batch:
            shared.check_comparison("compare_batch", resume=self.request.resume)
        shared.check_resume(self.request.resume, self.output)
        shared.check_log(self.log, "compare_batch", asked=bool(self.compare_batch))
        for name, value in (("workers", self.workers), ("gpus_per_worker", self.gpus_per_worker)):
            if value is not None and self.on is None:
                raise RequestError(
                    f"{given(name, value)}: it goes with {given('on', 'ray')}; for ranks use torchrun --nproc-per-node"
                )
        if self.compare_batch and self.on is not None:
            raise RequestError(f"{named('compare_batch')}: sizes are compared on one device; leave {named('on')} out")


def failed_fast(error: Exception) -> RequestError:
    """The error of a sample that ends a run, since that was asked for."""
    return RequestError(f"{named('fail_fast')}: a sample failed with {type(error).__name__}: {error}")
