"""The commands as Python functions: the same settings, by the same names.

Written by `python -m brim.settings.generated` from the declarations in `brim.settings`; do not edit it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from brim.calls import call, command_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from brim.advice.advise import AdviceResult
    from brim.advice.checks import CheckResult
    from brim.diagnosis.examine import DoctorResult
    from brim.evaluation.run import EvalResult
    from brim.integrations.harness_work import LmEvalResult
    from brim.molecules.encoding import EncodedFile
    from brim.molecules.run import OodResult
    from brim.monitor.snapshot import Snapshot
    from brim.planning.forecast import ForecastResult
    from brim.profiling.run import ProfileResult
    from brim.records import Plan
    from brim.reporting.write import ReportResult
    from brim.sweeps.run import SweepResult
    from brim.training.run import TrainResult

__all__ = [
    "advise", "check", "doctor", "encode", "evaluate", "find", "forecast", "lm_eval", "ood", "profile", "report",
    "sweep", "train", "watch",
]  # fmt: skip


@command_of("advise")
def advise(
    run: str | os.PathLike[str] | None = None,
    *,
    model: str | None = None,
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    task: str | None = None,
    max_tokens: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    gpu: str | None = None,
    trust_remote_code: bool = False,
    take: str | Sequence[str] | None = None,
    try_out: bool = False,
    try_samples: int = 256,
    repeats: int = 3,
    apply: str | os.PathLike[str] | None = None,
    history: bool = False,
    rollback: str | os.PathLike[str] | None = None,
    against: str | os.PathLike[str] | None = None,
) -> AdviceResult:
    """Say what would make a run faster: cause, evidence, expected gain and the exact command.

    As `brim advise` on the command line.

    Args:
        run: The folder of a run of eval or train.
        model: Without RUN: the model that is to be evaluated.
        data: Without RUN: its data.
        split: Which split of the data.
        task: generate, vqa, choice or classify; by default what the data is for.
        max_tokens: Short for the knob max_new_tokens.
        batch_size: auto, or N as a ceiling: lowered only where N does not fit.
        gpu: Forecast for this card, such as h100.
        trust_remote_code: Let a transformers folder run its own Python code.
        take: Which pieces of advice apply and try take, by name (the first; the first three).
        try_out: Measure the first three on a part of the work, in turns with the run as it was.
        try_samples: With try: samples of the part.
        repeats: With try: how often each is measured.
        apply: Write the settings to a file (for eval settings, for train as its file), and keep the round.
        history: Show the rounds of RUN and what each brought.
        rollback: Write the settings of the round before the last one.
        against: The run that the last round led to.

    Returns:
        `advice`, largest expected gain first, what was `tried`, the `rounds`, and the `document`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device, a child process or a rank was lost; what was finished is kept.

    Examples:
        >>> result = brim.advise("runs/first")
        >>> "max_new_tokens" in [piece.name for piece in result.advice]
        True
    """
    result: AdviceResult = call("advise", locals())
    return result


@command_of("check")
def check(
    run: str | os.PathLike[str],
    *,
    min_utilisation: float = 0.3,
    memory_range: str | None = None,
    max_epoch_seconds: float | None = None,
    max_total_seconds: float | None = None,
    min_speed_up: float | None = None,
    against: str | os.PathLike[str] | None = None,
) -> CheckResult:
    """Judge a finished run: GPU utilisation, memory, errors, waiting, time, speed against another run.

    As `brim check` on the command line.

    Args:
        run: The folder of a run.
        min_utilisation: The least mean GPU utilisation, as a fraction.
        memory_range: Between which sizes the peak of reserved memory should lie, such as 25GiB-40GiB.
        max_epoch_seconds: The longest that the steps of an epoch may take.
        max_total_seconds: The longest that the run may take.
        min_speed_up: With against: how many times as fast as that run it must be (1: not slower).
        against: An earlier run of the same kind, to give the speed-up over it.

    Returns:
        `lines` with verdict, value and limit, `failed` with those that failed, and the `document`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.

    Examples:
        >>> result = brim.check("runs/second", against="runs/first")
        >>> result.lines[0].name, result.lines[0].verdict
        ('failed', 'pass')
    """
    result: CheckResult = call("check", locals())
    return result


@command_of("doctor")
def doctor() -> DoctorResult:
    """Examine this installation and machine: versions, cards, folders, and what is wrong with them.

    As `brim doctor` on the command line.

    Returns:
        `problems` with what to do about each, `errors` among them, and the whole `document`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.

    Examples:
        >>> [problem.text for problem in brim.doctor().errors]
        []
    """
    result: DoctorResult = call("doctor", locals())
    return result


@command_of("encode")
def encode(
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: str = "morgan",
    map: Mapping[str, str] | None = None,
    limit: int | None = None,
    knob: Mapping[str, object] | None = None,
    batch_size: int | Literal["auto"] = "auto",
    memory_limit: int | str | None = None,
    no_cache: bool = False,
    device: str = "auto",
    resume: bool = False,
) -> EncodedFile:
    """Encode a file of SMILES: one row of features for every molecule that can be read.

    As `brim encode` on the command line.

    Args:
        data: SMILES: .csv or .tsv with a header, .smi or .txt.
        output: Where the features go: FILE.safetensors.
        model: morgan, minimol or unimol.
        map: The column of SMILES, where it is called otherwise: {'smiles': 'structure'}.
        limit: Only the first N molecules.
        knob: Settings of the encoder: {'bits': 1024}.
        batch_size: auto, or N as a ceiling: lowered only where N does not fit.
        memory_limit: Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only.
        no_cache: Neither use cached features nor keep any.
        device: auto, cpu, cuda, cuda:N or mps.
        resume: Continue a stopped run of the same file.

    Returns:
        The `path` that was written, the `width` of a row, `failures` by file and line, and `figures`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device, a child process or a rank was lost; what was finished is kept.

    Examples:
        >>> brim.encode("in.csv", "features.safetensors", knob={"bits": 1024}).failures
        {}
    """
    result: EncodedFile = call("encode", locals())
    return result


@command_of("eval")
def evaluate(
    model: str,
    data: str | os.PathLike[str],
    *,
    split: str | None = None,
    limit: int | None = None,
    map: Mapping[str, str] | None = None,
    images: str | os.PathLike[str] | None = None,
    skip_bad: bool = False,
    task: str | None = None,
    metrics: str | Sequence[str] | None = None,
    plugin: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    knob: Mapping[str, object] | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    batch_invariant: bool = False,
    chat: bool | None = None,
    system: str | None = None,
    weights: str = "auto",
    trust_remote_code: bool = False,
    batch_size: int | Literal["auto"] = "auto",
    cost_cap: int | None = None,
    no_auto_batch_size: bool = False,
    fail_on_oom: bool = False,
    memory_limit: int | str | None = None,
    margin: float | None = None,
    offload: str | None = None,
    no_cache: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    num_workers: int | None = None,
    pin_memory: bool = True,
    prefetch_factor: int = 4,
    fail_fast: bool = False,
    resume: bool = False,
    retry_failed: bool = False,
    on: str | None = None,
    workers: int | None = None,
    gpus_per_worker: float | None = None,
    output: str | os.PathLike[str] | None = None,
    log: str | Sequence[str] | None = None,
) -> EvalResult:
    """Evaluate a model on a data set: every sample once, at the fastest batch size that fits.

    As `brim eval` on the command line.

    Args:
        model: A transformers folder, a torchvision or timm name, or py:FILE:FACTORY.
        data: A file (JSONL, CSV, Parquet, …) or a folder (a saved data set, class folders, VQAv2, …).
        split: Which split of the data.
        limit: Only N samples, classes in proportion.
        map: Which column is what: {'prompt': 'query'}.
        images: The folder that relative image names refer to.
        skip_bad: Leave out records that cannot be read.
        task: generate, vqa, choice or classify; by default what the data is for.
        metrics: Such as bleu,rouge,exact_match; by default the task's own.
        plugin: A Python file with tasks or metrics of your own; repeatable.
        knob: Settings of the model: {'size': 224, 'frames': 16}.
        max_tokens: Short for the knob max_new_tokens.
        temperature: 0 is greedy; above 0, tokens are sampled.
        top_p: Sample from the most likely tokens up to this total probability.
        seed: Seed of the sampling.
        stop: An answer ends before this text; repeatable.
        batch_invariant: Answers do not depend on the batch size; slower. For language models on CUDA in half
            precision.
        chat: Use the model's chat template; by default if it has one.
        system: A system prompt before every sample.
        weights: For torchvision and timm: auto (published), none (random) or a file.
        trust_remote_code: Let a transformers folder run its own Python code.
        batch_size: auto, or N as a ceiling: lowered only where N does not fit.
        cost_cap: At most so many tokens (padding included) in a batch, instead of a number of samples.
        no_auto_batch_size: With batch_size=N: exactly N; split where it does not fit.
        fail_on_oom: With no_auto_batch_size: an error instead of a split.
        memory_limit: Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only.
        margin: Keep this fraction free (0.05; 0 with memory_limit).
        offload: cpu: if a sample does not fit even alone, weights go to host memory.
        no_cache: Neither use a cached plan nor keep this one.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto, float32, float16 or bfloat16; in training, autocast.
        num_workers: Loading processes; by default chosen by a short trial.
        pin_memory: Load into pinned memory.
        prefetch_factor: Samples each process prepares ahead.
        fail_fast: Stop at the first sample that raises an error.
        resume: Continue the run in output: finished samples are kept.
        retry_failed: With resume: samples that failed are tried again.
        on: ray: run on the workers of a Ray cluster, one GPU each.
        workers: With on='ray': how many; by default one for each GPU.
        gpus_per_worker: With on='ray': the part of a GPU that each has (1).
        output: The run's folder (default runs/<command>-<time>).
        log: Also log the figures to tensorboard, mlflow or wandb; repeatable.

    Returns:
        `metrics`, `samples` with one line each, `summary`, `plan` and the run's `folder`. A sample that fails
        has its error in its line and counts as wrong; it does not raise.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device, a child process or a rank was lost; what was finished is kept.

    Examples:
        >>> result = brim.evaluate("./my-model", "questions.jsonl", metrics="exact_match,token_f1")
        >>> sorted(result.metrics), len(result.samples), result.summary["num_failed"]
        (['exact_match', 'token_f1'], 32, 0)
    """
    result: EvalResult = call("eval", locals())
    return result


@command_of("find")
def find(
    model: str | nn.Module | Sequence[nn.Module] | None = None,
    *,
    mode: Literal["forward", "generate", "train"] | None = None,
    knob: Mapping[str, object] | None = None,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    optimizer: str | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = "adamw",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    step: Callable[[Any], object] | None = None,
    make_batch: Callable[[int], Any] | None = None,
    scaler: object = None,
    scheduler: object = None,
    batch_length: Callable[[Any], int] | None = None,
    unit: Literal["samples", "tokens"] = "samples",
    key: str | None = None,
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    limit: int | None = None,
    map: Mapping[str, str] | None = None,
    images: str | os.PathLike[str] | None = None,
    task: str | None = None,
    max_tokens: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    no_auto_batch_size: bool = False,
    fail_on_oom: bool = False,
    objective: Literal["fastest", "largest"] = "fastest",
    memory_limit: int | str | None = None,
    margin: float | None = None,
    tolerance: float = 0.02,
    max_probes: int | None = None,
    probe_timeout: float | None = None,
    multiple_of: int = 1,
    power_of_two: bool = False,
    max_batch_size: int | None = None,
    no_cache: bool = False,
    per_rank: bool = False,
    isolate: bool = False,
    output: str | os.PathLike[str] | None = None,
) -> Plan:
    """Find the fastest batch size that fits, in a handful of probes.

    As `brim find` on the command line.

    Args:
        model: A torchvision or timm name, a transformers folder, or py:FILE_OR_MODULE:FACTORY; a prefix
            (torchvision:, timm:, hf:, py:) selects the source. With step: what it changes.
        mode: forward, generate or train; by default what the model is for.
        knob: Settings of the model: {'size': 224, 'frames': 16}.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto, float32, float16 or bfloat16; in training, autocast.
        optimizer: Any of torch.optim, by name. With step: the optimizers that it uses.
        gradient_checkpointing: Recompute activations in the backward pass.
        trust_remote_code: Let a transformers folder run its own Python code.
        step: A function that runs once on a batch, instead of a model by name.
        make_batch: With step: returns the worst-case batch of n items on the device.
        scaler: With step: the gradient scaler that it uses.
        scheduler: With step: the scheduler that it uses.
        batch_length: With step: how many items a batch has.
        unit: With step: what the size counts.
        key: With step: a name under which the plan is cached.
        data: A file (JSONL, CSV, Parquet, …) or a folder (a saved data set, class folders, VQAv2, …).
        split: Which split of the data.
        limit: Only N samples, classes in proportion.
        map: Which column is what: {'prompt': 'query'}.
        images: The folder that relative image names refer to.
        task: generate, vqa, choice or classify; by default what the data is for.
        max_tokens: Short for the knob max_new_tokens.
        batch_size: auto, or N as a ceiling: lowered only where N does not fit.
        no_auto_batch_size: With batch_size=N: exactly N; split where it does not fit.
        fail_on_oom: With no_auto_batch_size: an error instead of a split.
        objective: fastest or largest.
        memory_limit: Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only.
        margin: Keep this fraction free (0.05; 0 with memory_limit).
        tolerance: How close to the best rate is fast enough.
        max_probes: Stop after N probes with the best size seen.
        probe_timeout: Seconds; a probe that takes longer does not fit, and a hang needs isolate.
        multiple_of: Only multiples of N.
        power_of_two: Only powers of two.
        max_batch_size: The largest size to try.
        no_cache: Neither use a cached plan nor keep this one.
        per_rank: Under torchrun, let each rank keep its own training size.
        isolate: Probe in a child process: a crash, a kill or a hang becomes a verdict.
        output: Also write run.json into this folder.

    Returns:
        The plan: `batch_size`, `batch_size_max`, `reason`, and the probes that it rests on.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device, a child process or a rank was lost; what was finished is kept.

    Examples:
        >>> brim.find("resnet18", mode="train", knob={"size": 32}, max_batch_size=32).batch_size
        32
        >>> model = torch.nn.Linear(512, 512)
        >>> plan = brim.find(
        ...     step=model, make_batch=lambda n: torch.randn(n, 512), model=model, memory_limit="64MiB"
        ... )
        >>> plan.batch_size, plan.oom_events
        (7177, 0)
    """
    result: Plan = call("find", locals())
    return result


@command_of("forecast")
def forecast(
    model: str | nn.Module | Sequence[nn.Module] | None = None,
    *,
    mode: Literal["forward", "generate", "train"] | None = None,
    knob: Mapping[str, object] | None = None,
    dtype: str = "auto",
    optimizer: str | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = "adamw",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    step: Callable[[Any], object] | None = None,
    make_batch: Callable[[int], Any] | None = None,
    scaler: object = None,
    scheduler: object = None,
    batch_length: Callable[[Any], int] | None = None,
    unit: Literal["samples", "tokens"] = "samples",
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    limit: int | None = None,
    map: Mapping[str, str] | None = None,
    images: str | os.PathLike[str] | None = None,
    task: str | None = None,
    max_tokens: int | None = None,
    gpu: str | Sequence[str] | None = None,
    memory: int | str | None = None,
    batch_size: int | Literal["auto"] = "auto",
    memory_limit: int | str | None = None,
    margin: float | None = None,
    multiple_of: int = 1,
    power_of_two: bool = False,
    max_batch_size: int | None = None,
    file: str | os.PathLike[str] | None = None,
    save: str | os.PathLike[str] | None = None,
    against: str | os.PathLike[str] | None = None,
    allow: int | str | None = None,
    by_module: int | bool | None = None,
    markdown: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    plot: str | os.PathLike[str] | None = None,
) -> ForecastResult:
    """Forecast peak memory and the largest batch size for a card, without a GPU.

    As `brim forecast` on the command line.

    Args:
        model: A torchvision or timm name, a transformers folder, or py:FILE_OR_MODULE:FACTORY; a prefix
            (torchvision:, timm:, hf:, py:) selects the source. With step: what it changes.
        mode: forward, generate or train; by default what the model is for.
        knob: Settings of the model: {'size': 224, 'frames': 16}.
        dtype: auto, float32, float16 or bfloat16; in training, autocast.
        optimizer: Any of torch.optim, by name. With step: the optimizers that it uses.
        gradient_checkpointing: Recompute activations in the backward pass.
        trust_remote_code: Let a transformers folder run its own Python code.
        step: A function that runs once on a batch, instead of a model by name.
        make_batch: With step: returns the worst-case batch of n items on the device.
        scaler: With step: the gradient scaler that it uses.
        scheduler: With step: the scheduler that it uses.
        batch_length: With step: how many items a batch has.
        unit: With step: what the size counts.
        data: A file (JSONL, CSV, Parquet, …) or a folder (a saved data set, class folders, VQAv2, …).
        split: Which split of the data.
        limit: Only N samples, classes in proportion.
        map: Which column is what: {'prompt': 'query'}.
        images: The folder that relative image names refer to.
        task: generate, vqa, choice or classify; by default what the data is for.
        max_tokens: Short for the knob max_new_tokens.
        gpu: A card by name, such as a100-80gb or 'rtx 4090', or several.
        memory: Any other card by its memory, as the driver reports it: 24GiB.
        batch_size: auto: sizes up to the largest that fits; or one size N.
        memory_limit: Use at most this much of the card, e.g. 20GiB.
        margin: Keep this fraction of the card free (0.05).
        multiple_of: Only multiples of N.
        power_of_two: Only powers of two.
        max_batch_size: The largest size to try.
        file: A YAML file of several workloads, checked in one go.
        save: Keep the forecast in this file, for against.
        against: Compare with a file of save; the result's check says whether a peak has grown.
        allow: With against: how much a peak may grow, 3% or 200MiB (0).
        by_module: Also the bytes by module at the peak, so many names deep; True: 2.
        markdown: Also write it as Markdown, for a comment on a pull request.
        output: Also write run.json into this folder, for brim report.
        plot: Also draw it, as one HTML file that needs no network.

    Returns:
        `batch_size_max`, `forecasts` with the bytes of each size, and `cards` where several were asked for.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.

    Examples:
        >>> brim.forecast("resnet18", mode="train", gpu="rtx 4090").batch_size_max
        569
    """
    result: ForecastResult = call("forecast", locals())
    return result


@command_of("lm-eval")
def lm_eval(
    model: str,
    tasks: str | Sequence[str],
    *,
    include_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    apply_chat_template: bool = False,
    fewshot_as_multiturn: bool | None = None,
    system_instruction: str | None = None,
    chat_template_args: str | Mapping[str, object] | None = None,
    gen_kwargs: str | Mapping[str, object] | None = None,
    think_end_token: str | None = None,
    max_length: int | None = None,
    add_bos_token: bool | None = None,
    seed: int | None = None,
    confirm_run_unsafe_code: bool = False,
    bootstrap_iters: int | None = None,
    log_samples: bool = True,
    knob: Mapping[str, object] | None = None,
    trust_remote_code: bool = False,
    batch_size: int | Literal["auto"] = "auto",
    cost_cap: int | None = None,
    no_auto_batch_size: bool = False,
    fail_on_oom: bool = False,
    memory_limit: int | str | None = None,
    margin: float | None = None,
    no_cache: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    resume: bool = False,
    output: str | os.PathLike[str] | None = None,
) -> LmEvalResult:
    """Run lm-eval's tasks on a language model, at the fastest batch size that fits.

    As `brim lm-eval` on the command line.

    Args:
        model: A transformers folder or hf:ID of a language model.
        tasks: lm-eval's tasks, groups or tags by commas; also patterns (mmlu_*) and YAML files.
        include_path: A folder with tasks of your own as YAML files; repeatable.
        num_fewshot: Examples before each question.
        limit: Only the first N documents of each task; below 1, a fraction.
        apply_chat_template: Put prompts into the model's chat template.
        fewshot_as_multiturn: With a chat template: each example as a turn of its own.
        system_instruction: A system prompt before every request.
        chat_template_args: Arguments of the chat template, such as enable_thinking=false.
        gen_kwargs: How answers are generated, in place of the tasks' own, such as temperature=0.8.
        think_end_token: An answer begins after this text, such as </think>.
        max_length: Tokens that context and answer may have; longer contexts lose their beginning (the model's
            own).
        add_bos_token: Begin every text with the special tokens; by default as the tokenizer does.
        seed: Seed of few-shot examples and sampling (by default lm-eval's).
        confirm_run_unsafe_code: Allow tasks that run the code that a model writes.
        bootstrap_iters: Samples of the bootstrap behind standard errors; 0 for none (100,000).
        log_samples: Keep every document with its answers, in tasks/NAME.jsonl.
        knob: Settings of the model: {'size': 224, 'frames': 16}.
        trust_remote_code: Let a transformers folder run its own Python code.
        batch_size: auto, or N as a ceiling: lowered only where N does not fit.
        cost_cap: At most so many tokens (padding included) in a batch, instead of a number of requests.
        no_auto_batch_size: With batch_size=N: exactly N; split where it does not fit.
        fail_on_oom: With no_auto_batch_size: an error instead of a split.
        memory_limit: Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only.
        margin: Keep this fraction free (0.05; 0 with memory_limit).
        no_cache: Neither use a cached plan nor keep this one.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto, float32, float16 or bfloat16; in training, autocast.
        resume: Continue the run in output: finished samples are kept.
        output: The run's folder (default runs/<command>-<time>).

    Returns:
        `results` as lm-eval returns them, `metrics` by `task/metric`, `samples` by task, `summary` and the
        run's `folder`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device, a child process or a rank was lost; what was finished is kept.

    Examples:
        >>> result = brim.lm_eval("./my-model", "sums", include_path="tasks")
        >>> sorted(result.metrics), len(result.samples['sums'])
        (['sums/exact_match'], 32)
    """
    result: LmEvalResult = call("lm-eval", locals())
    return result


@command_of("ood")
def ood(
    *,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    id: str | os.PathLike[str] | None = None,
    ood: str | os.PathLike[str] | None = None,
    map: Mapping[str, str] | None = None,
    limit: int | None = None,
    split_seed: int = 0,
    encoder: str | Sequence[str] | None = None,
    knob: Mapping[str, object] | None = None,
    loss: str | Sequence[str] = "energy",
    pairs: Literal["all", "matched"] | None = None,
    beta: float = 0.1,
    regulariser: float | None = None,
    hinge_margin: float = 1.0,
    reference: str | os.PathLike[str] | None = None,
    hidden: str | int | Sequence[int] = (256, 128),
    dropout: float = 0.0,
    seeds: int | str | Sequence[int] = 10,
    lr: float | str | Sequence[float] = 0.001,
    epochs: int = 50,
    patience: int | None = 10,
    eval_every: int = 1,
    optimizer: str = "adamw",
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    baselines: str | Sequence[str] | None = None,
    fast_path: Literal["auto", "off", "resident", "stacked"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
    effective_batch: int | Literal["auto"] = "auto",
    eval_batch_size: int | Literal["auto"] = "auto",
    plan: str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    margin: float | None = None,
    no_cache: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    gradient_checkpointing: bool = False,
    resume: bool = False,
    objective: Literal["dpo"] = "dpo",
    output: str | os.PathLike[str] | None = None,
) -> OodResult:
    """Train detectors of out-of-distribution molecules: energy heads, all seeds at once, one table.

    As `brim ood` on the command line.

    Args:
        data: A file of splits (DrugOOD's JSON), or several.
        id: In-distribution: SMILES (.csv, .smi) or features (.safetensors).
        ood: Out-of-distribution, likewise.
        map: The columns, where they are called otherwise: {'smiles': 'structure', 'label': 'y'}.
        limit: At most N of each split.
        split_seed: How files without splits are divided.
        encoder: morgan (default), minimol, unimol, or several.
        knob: Settings of the encoder: {'bits': 1024}.
        loss: energy, reference, hinge, bce, mse, or several.
        pairs: all or matched; by default all, and matched for the reference loss.
        beta: Steepness of the preference.
        regulariser: Weight of squared energies (0.01; reference: 0).
        hinge_margin: Of the hinge loss.
        reference: The frozen head; by default each run's own first weights.
        hidden: Units of the hidden layers.
        dropout: In the head, while training.
        seeds: How many, or which: 10, or [3, 5, 8].
        lr: The learning rate, or several.
        epochs: At most so many.
        patience: Validations without a better AUROC before a seed stops; 0: never.
        eval_every: Epochs between validations.
        optimizer: Any of torch.optim, by name.
        weight_decay: By default the optimizer's own.
        clip_norm: Largest gradient norm of a seed.
        baselines: Names, or 'all': msp, energy, odin, mahalanobis, knn, lof, mc_dropout, logistic.
        fast_path: auto, off, resident (data on the device) or stacked (all seeds in one model).
        batch_size: Samples of each side in one pass: auto, or N as a ceiling.
        effective_batch: Samples of each side in a step: N; auto is batch_size, or 512.
        eval_batch_size: Rows in one pass of a validation.
        plan: Use the sizes of an earlier run, or what a comparison recommends.
        memory_limit: Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only.
        margin: Keep this fraction free (0.05; 0 with memory_limit).
        no_cache: Neither use cached features nor keep any.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto, float32, float16 or bfloat16; in training, autocast.
        gradient_checkpointing: Recompute the head's activations in the backward pass; not stacked.
        resume: Continue the run in output: finished cells are kept.
        objective: How the detectors learn: dpo, by preferring one molecule of a pair.
        output: The run's folder (default runs/<command>-<time>).

    Returns:
        `summary` with the table over seeds, `cells` with one result for each seed, the run's `folder`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device, a child process or a rank was lost; what was finished is kept.

    Examples:
        >>> result = brim.ood(id="in.csv", ood="out.csv", seeds=2, baselines=["knn"])
        >>> result.summary["metrics"]["auroc"]["mean"]
        1.0
    """
    result: OodResult = call("ood", locals())
    return result


@command_of("profile")
def profile(
    model: str,
    data: str | os.PathLike[str],
    knob: str | Mapping[str, Sequence[object] | range | str | None],
    *,
    split: str | None = None,
    limit: int | None = None,
    map: Mapping[str, str] | None = None,
    images: str | os.PathLike[str] | None = None,
    skip_bad: bool = False,
    task: str | None = None,
    metrics: str | Sequence[str] | None = None,
    plugin: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    batch_invariant: bool = False,
    chat: bool | None = None,
    system: str | None = None,
    weights: str = "auto",
    trust_remote_code: bool = False,
    batch_size: int | Literal["auto"] = "auto",
    cost_cap: int | None = None,
    no_auto_batch_size: bool = False,
    fail_on_oom: bool = False,
    memory_limit: int | str | None = None,
    margin: float | None = None,
    no_cache: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    num_workers: int | None = None,
    pin_memory: bool = True,
    prefetch_factor: int = 4,
    pairing: Literal["cross", "zip"] = "cross",
    sample: Literal["stratified", "lhs", "boundary"] | None = None,
    num_points: int | None = None,
    start_from: str | float | None = None,
    order: Literal["given", "ascending", "descending"] = "given",
    initial_scale: str | Sequence[tuple[float, float]] | None = None,
    batch_size_for: str | Sequence[str] | Mapping[object, int] | None = None,
    latency_samples: int = 20,
    within: float = 0.01,
    target_latency_ms: float | None = None,
    target_memory: int | str | None = None,
    resume: bool = False,
    values: str | Sequence[object] | None = None,
    output: str | os.PathLike[str] | None = None,
    log: str | Sequence[str] | None = None,
) -> ProfileResult:
    """Evaluate a model at every value of a knob: accuracy, speed, memory and latency, and which value to take.

    As `brim profile` on the command line.

    Args:
        model: A transformers folder, a torchvision or timm name, or py:FILE:FACTORY.
        data: A file (JSONL, CSV, Parquet, …) or a folder (a saved data set, class folders, VQAv2, …).
        knob: The knob to profile over its whole range, or knobs with their values: {'max_crops': range(2, 14)}.
        split: Which split of the data.
        limit: Only N samples, classes in proportion.
        map: Which column is what: {'prompt': 'query'}.
        images: The folder that relative image names refer to.
        skip_bad: Leave out records that cannot be read.
        task: generate, vqa, choice or classify; by default what the data is for.
        metrics: Such as bleu,rouge,exact_match; by default the task's own.
        plugin: A Python file with tasks or metrics of your own; repeatable.
        max_tokens: Short for the knob max_new_tokens.
        temperature: 0 is greedy; above 0, tokens are sampled.
        top_p: Sample from the most likely tokens up to this total probability.
        seed: Seed of the sampling.
        stop: An answer ends before this text; repeatable.
        batch_invariant: Answers do not depend on the batch size; slower. For language models on CUDA in half
            precision.
        chat: Use the model's chat template; by default if it has one.
        system: A system prompt before every sample.
        weights: For torchvision and timm: auto (published), none (random) or a file.
        trust_remote_code: Let a transformers folder run its own Python code.
        batch_size: auto, or N as a ceiling: lowered only where N does not fit.
        cost_cap: At most so many tokens (padding included) in a batch, instead of a number of samples.
        no_auto_batch_size: With batch_size=N: exactly N; split where it does not fit.
        fail_on_oom: With no_auto_batch_size: an error instead of a split.
        memory_limit: Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only.
        margin: Keep this fraction free (0.05; 0 with memory_limit).
        no_cache: Neither use a cached plan nor keep this one.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto, float32, float16 or bfloat16; in training, autocast.
        num_workers: Loading processes; by default chosen by a short trial.
        pin_memory: Load into pinned memory.
        prefetch_factor: Samples each process prepares ahead.
        pairing: Several knobs: cross (all combinations) or zip (one to one).
        sample: Only some combinations: stratified, lhs or boundary.
        num_points: With sample: how many.
        start_from: Drop smaller values.
        order: given, ascending or descending (the costliest first).
        initial_scale: With batch_size=N: the part of N that the first value starts with
            ('4=1,8=0.75,12=0.5,0.4').
        batch_size_for: One point's size by hand: {13: 24}, or {'max_crops=13,max_new_tokens=8': 24}.
        latency_samples: Samples timed alone at each point; 0 for none, 100 for a P99.
        within: Recommend the cheapest point within this fraction of the best accuracy.
        target_latency_ms: Also the cheapest that answers one sample in this time.
        target_memory: Also the cheapest that stays below this peak.
        resume: Continue the run in output: finished samples are kept.
        values: With one knob: '2-13', '2-13:3' or [2, 4, 8].
        output: The run's folder (default runs/<command>-<time>).
        log: Also log the figures to tensorboard, mlflow or wandb; repeatable.

    Returns:
        `entries` with one evaluation for each point, `document` with the recommendation, the `folder`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device, a child process or a rank was lost; what was finished is kept.

    Examples:
        >>> result = brim.profile("./my-model", "questions.jsonl", {"max_new_tokens": [2, 4]})
        >>> [(entry["max_new_tokens"], entry["state"]) for entry in result.entries]
        [(2, 'done'), (4, 'done')]
    """
    result: ProfileResult = call("profile", locals())
    return result


@command_of("report")
def report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    output: str | os.PathLike[str] | None = None,
) -> ReportResult:
    """Write a run's report again, or compare runs of one kind.

    As `brim report` on the command line.

    Args:
        runs: The folder of a run; with several, they are compared.
        output: Where the page goes (RUN/report.html; of a comparison ./report-compare.html).

    Returns:
        The `path` of the page, and the `document` of a comparison.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.

    Examples:
        >>> brim.report("runs/first").path.name
        'report.html'
        >>> brim.report(["runs/first", "runs/second"], output="compared.html").document["schema"]
        'brim.comparison/1'
    """
    result: ReportResult = call("report", locals())
    return result


@command_of("sweep")
def sweep(
    file: str | os.PathLike[str],
    overrides: Mapping[str, object] | Sequence[str] | None = None,
    *,
    on: Literal["local", "ray", "slurm"] = "local",
    jobs_per_gpu: int | None = None,
    timeout: float | None = None,
    no_retry: bool = False,
    resume: bool = False,
    no_cache: bool = False,
    top_n: int = 10,
    results_file: str | os.PathLike[str] | None = None,
    max_experiments: int | None = None,
    data_percentage: float | None = None,
    log: str | Sequence[str] | None = None,
    slurm: Mapping[str, object] | None = None,
    strict: bool = False,
    no_forecast: bool = False,
    gpu: str | None = None,
    memory: int | str | None = None,
    output: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Train every experiment of a grid, each in its own process: models paired with batch sizes, or with auto.

    As `brim sweep` on the command line.

    Args:
        file: A YAML file with a grid; `brim sweep --schema` prints its keys.
        overrides: Overrides of settings in the file: {'hp.learning_rate': [0.1, 0.01]}.
        on: local, ray or slurm.
        jobs_per_gpu: Experiments that may share a GPU (default: as many as fit), or the CPU (default 1).
        timeout: Seconds; an experiment that takes longer is ended.
        no_retry: A batch size that does not fit fails its experiment.
        resume: Continue the sweep in output; failed experiments are tried again.
        no_cache: Neither use cached plans and forecasts nor keep any.
        top_n: How many of the best to show.
        results_file: Also write results.csv here.
        max_experiments: Only the first N.
        data_percentage: Train on a part of the data.
        log: tensorboard, mlflow or wandb; repeatable.
        slurm: With on='slurm': {'partition': 'gpu', …}.
        strict: Warnings are errors.
        no_forecast: Do not forecast memory; experiments do not share a GPU then.
        gpu: Forecast for this card instead of the one here.
        memory: Forecast for a card of this memory.
        output: The run's folder (default runs/<command>-<time>).

    Returns:
        `results` in the file's order, `best` first by figure, `failed`, `document`, the `folder`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.

    Examples:
        >>> result = brim.sweep("grid.yaml", max_experiments=2, output="runs/grid")
        >>> len(result.results), len(result.failed)
        (2, 0)
    """
    result: SweepResult = call("sweep", locals())
    return result


@command_of("train")
def train(
    config: str | os.PathLike[str] | Mapping[str, object],
    overrides: Mapping[str, object] | Sequence[str] | None = None,
    *,
    num_workers: int | None = None,
    batch_size: int | Literal["auto"] | None = None,
    effective_batch: int | Literal["auto"] | None = None,
    optimizer: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    gradient_checkpointing: bool = False,
    eval_batch_size: int | Literal["auto"] | None = None,
    lr_scale: Literal["none", "sqrt", "linear", "auto"] | None = None,
    scale_betas: bool = False,
    memory_limit: str | None = None,
    margin: float | None = None,
    no_auto_batch_size: bool = False,
    fail_on_oom: bool = False,
    per_rank: bool = False,
    plan: str | os.PathLike[str] | None = None,
    no_cache: bool = False,
    resume: bool = False,
    seeds: int | str | Sequence[int] | None = None,
    learning_rates: str | Sequence[float] | None = None,
    fast_path: Literal["auto", "off", "resident", "stacked"] = "auto",
    output: str | os.PathLike[str] | None = None,
    log: str | Sequence[str] | None = None,
) -> TrainResult:
    """Train the model that a YAML file describes: your effective batch, in micro-batches that fit.

    As `brim train` on the command line.

    Args:
        config: A YAML file, or a mapping of the same keys, which `brim train --schema` prints.
        overrides: Overrides of settings in the file: {'hp.epochs': 3}.
        num_workers: Loading processes; by default chosen by a short trial.
        batch_size: Samples of a micro-batch on each rank: auto (default), or N as a ceiling.
        effective_batch: Samples of an optimizer step over all ranks: N, or auto to let it grow.
        optimizer: Any of torch.optim, by name.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto, float32, float16 or bfloat16 (autocast).
        gradient_checkpointing: Recompute activations in the backward pass.
        eval_batch_size: Samples of a validation batch: auto (default), or N as a ceiling.
        lr_scale: How the learning rate follows the batch: none, sqrt, linear or auto.
        scale_betas: With lr_scale, Adam's betas and eps too.
        memory_limit: Use at most this much, e.g. 24GiB. On the CPU this bounds eager operations only.
        margin: Keep this fraction free (0.05; 0 with memory_limit).
        no_auto_batch_size: With batch_size=N: exactly N; split where it does not fit.
        fail_on_oom: With no_auto_batch_size: an error instead of a split.
        per_rank: Under torchrun, let each rank keep its own training size.
        plan: Use the sizes of an earlier run.
        no_cache: Neither use a cached plan nor keep this one.
        resume: Continue from the last checkpoint in output.
        seeds: Train several seeds: how many from hp.seed on, or a list (3,5,8).
        learning_rates: Every seed at each of these: 1e-3,3e-4.
        fast_path: auto, off (one by one), resident (data on the device) or stacked (all seeds in one model).
        output: The run's folder (default runs/<command>-<time>).
        log: Also log the figures to tensorboard, mlflow or wandb; repeatable.

    Returns:
        `metrics`, `summary` and the run's `folder`; with several seeds, means and deviations.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device, a child process or a rank was lost; what was finished is kept.

    Examples:
        >>> result = brim.train("config.yaml", {"hp.epochs": 3}, output="runs/trained")
        >>> round(result.metrics["top1"]["mean"], 2)
        0.67
    """
    result: TrainResult = call("train", locals())
    return result


@command_of("watch")
def watch(
    run: str | os.PathLike[str] | None = None,
    *,
    metrics: str | os.PathLike[str] | None = None,
) -> Snapshot:
    """Show the GPUs and the runs of this machine while they work.

    As `brim watch` on the command line.

    Args:
        run: The folder of a run: only it is shown, with the runs in its subfolders; by default all runs.
        metrics: Write OpenMetrics text to this file at every reading, for a node exporter's textfile collector.

    Returns:
        `gpus` and `runs` of this moment, and the whole `document`.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.

    Examples:
        >>> [run["done"] for run in brim.watch().runs]
        []
    """
    result: Snapshot = call("watch", locals())
    return result
