"""What `brim lm-eval` and `brim.lm_eval` take: lm-eval's settings of a run, by its names, and brim's of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given, named
from brim.settings.declare import Setting, check_fields
from brim.settings.eval_settings import EvalRequest
from brim.settings.setting_checks import Check, flag, names, number, pairs, texts, whole
from brim.settings.shared import ANSWERS, BATCH, DATA, OUTPUT

__all__ = ["LmEvalRequest", "LmEvalSettings"]


def _read_pairs(value: Any) -> dict[str, Any]:
    """`a=1,b=0.5`, or a mapping; texts that read as numbers or switches become these, as lm-eval reads them."""
    entries = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    found: dict[str, Any] = pairs("NAME=VALUE, such as temperature=0.8")(entries)
    return {name: _plain(one) for name, one in found.items()}


def _plain(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(value.lower(), value)


_PAIRS = Check("names with values", _read_pairs, python="str | Mapping[str, object]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmEvalRequest:
    """A run of lm-eval's tasks on one model; None means lm-eval's own default, or that brim chooses."""

    model: Annotated[
        str,
        Setting(
            help="A transformers folder or hf:ID of a language model.", flags=("-m", "--model"), argument=True,
            metavar="MODEL", missing="give the model to evaluate, such as ./my-model",
        ),
    ]  # fmt: skip
    tasks: Annotated[
        tuple[str, ...],
        Setting(
            help="lm-eval's tasks, groups or tags by commas; also patterns (mmlu_*) and YAML files.",
            flags=("-t", "--tasks"), panel=DATA, metavar="NAMES", check=names(), positional=True,
            missing="name lm-eval's tasks, such as hellaswag,gsm8k",
        ),
    ]  # fmt: skip
    include_path: Annotated[
        tuple[str, ...],
        Setting(
            help="A folder with tasks of your own as YAML files; repeatable.", panel=DATA, metavar="DIR",
            check=texts(), many=True, python="str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None",
        ),
    ] = ()  # fmt: skip
    num_fewshot: Annotated[
        int | None,
        Setting(help="Examples before each question.", panel=DATA, metavar="N", check=whole(0)),
    ] = None
    limit: Annotated[
        float | None,
        Setting(
            help="Only the first N documents of each task; below 1, a fraction.", panel=DATA, metavar="N",
            check=number(above=0),
        ),
    ] = None  # fmt: skip
    apply_chat_template: Annotated[bool, Setting(help="Put prompts into the model's chat template.", panel=ANSWERS)] = (
        False
    )
    fewshot_as_multiturn: Annotated[
        bool | None,
        Setting(
            help="With a chat template: each example as a turn of its own.",
            flags=("--fewshot-as-multiturn/--no-turns",), panel=ANSWERS,
        ),
    ] = None  # fmt: skip
    system_instruction: Annotated[
        str | None, Setting(help="A system prompt before every request.", panel=ANSWERS, metavar="TEXT")
    ] = None
    chat_template_args: Annotated[
        Mapping[str, Any],
        Setting(
            help="Arguments of the chat template, such as enable_thinking=false.", panel=ANSWERS,
            metavar="NAME=VALUE", check=_PAIRS,
        ),
    ] = dataclasses.field(default_factory=dict)  # fmt: skip
    gen_kwargs: Annotated[
        Mapping[str, Any],
        Setting(
            help="How answers are generated, in place of the tasks' own, such as temperature=0.8.",
            panel=ANSWERS, metavar="NAME=VALUE", check=_PAIRS,
        ),
    ] = dataclasses.field(default_factory=dict)  # fmt: skip
    think_end_token: Annotated[
        str | None,
        Setting(help="An answer begins after this text, such as </think>.", panel=ANSWERS, metavar="TEXT"),
    ] = None
    max_length: Annotated[
        int | None,
        Setting(
            help="Tokens that context and answer may have; longer contexts lose their beginning (the model's own).",
            panel=ANSWERS, metavar="N", check=whole(2),
        ),
    ] = None  # fmt: skip
    add_bos_token: Annotated[
        bool | None,
        Setting(
            help="Begin every text with the special tokens; by default as the tokenizer does.",
            flags=("--add-bos-token/--no-bos",), panel=ANSWERS, check=flag(),
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None,
        Setting(
            help="Seed of few-shot examples and sampling (by default lm-eval's).", panel=ANSWERS, metavar="N",
            check=whole(0),
        ),
    ] = None  # fmt: skip
    confirm_run_unsafe_code: Annotated[
        bool, Setting(help="Allow tasks that run the code that a model writes.", panel=DATA)
    ] = False
    bootstrap_iters: Annotated[
        int | None,
        Setting(
            help="Samples of the bootstrap behind standard errors; 0 for none (100,000).", panel=OUTPUT, metavar="N",
            check=whole(0),
        ),
    ] = None  # fmt: skip
    log_samples: Annotated[
        bool,
        Setting(
            help="Keep every document with its answers, in tasks/NAME.jsonl.",
            flags=("--log-samples/--no-log-samples",), panel=OUTPUT,
        ),
    ] = True  # fmt: skip
    knobs: shared.Knobs = dataclasses.field(default_factory=dict)
    trust_remote_code: shared.TrustRemoteCode = False
    batch_size: shared.BatchSize = None
    cost_cap: Annotated[
        int | None,
        Setting(
            help="At most so many tokens (padding included) in a batch, instead of a number of requests.", panel=BATCH,
            metavar="N", check=whole(1),
        ),
    ] = None  # fmt: skip
    fixed: shared.NoAutoBatchSize = False
    fail_on_oom: shared.FailOnOom = False
    memory_limit: shared.MemoryLimit = None
    margin: shared.Margin = None
    use_cache: shared.NoCache = True
    device: shared.Device = "auto"
    dtype: shared.Dtype = "auto"
    resume: shared.Resume = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.tasks:
            raise RequestError(f"{named('tasks')}: name at least one task of lm-eval, such as hellaswag")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise RequestError(f"{named('fewshot_as_multiturn')}: it goes with {named('apply_chat_template')}")
        if self.limit is not None and self.limit >= 1 and self.limit != int(self.limit):
            raise RequestError(f"{given('limit', self.limit)}: it must be a whole number, or a fraction below 1")
        self.as_evaluation()

    def as_evaluation(self) -> EvalRequest:
        """The part that is as in `brim eval`: the model, its device, and how batches are sized."""
        return EvalRequest(
            model=self.model,
            data="lm-eval",
            knobs=self.knobs,
            trust_remote_code=self.trust_remote_code,
            batch_size=self.batch_size,
            cost_cap=self.cost_cap,
            fixed=self.fixed,
            fail_on_oom=self.fail_on_oom,
            memory_limit=self.memory_limit,
            margin=self.margin,
            use_cache=self.use_cache,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed or 0,
            chat=False,  # prompts come with their template
            num_workers=0,  # what is prepared is a list of tokens
            resume=self.resume,
        )

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        plain = dataclasses.asdict(self)
        return {**plain, **{name: dict(plain[name]) for name in ("chat_template_args", "gen_kwargs", "knobs")}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmEvalSettings:
    """A run of lm-eval's tasks, and where its record goes."""

    request: LmEvalRequest
    output: shared.RunFolder = None
    json_output: shared.JsonOutput = False

    def __post_init__(self) -> None:
        check_fields(self)
        shared.check_resume(self.request.resume, self.output)
