"""lm-eval on brim: `BrimLM` for `lm_eval.simple_evaluate(model=…)`.

    from brim.integrations.lm_eval import BrimLM

    results = lm_eval.simple_evaluate(model=BrimLM("./my-model"), tasks=["hellaswag"])

Texts become tokens as in lm-eval's own `hf` model, so that answers are the same; how requests are batched, survived and
journalled is brim's (`harness_work.py`). Nothing of lm-eval is changed.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from brim.errors import RequestError, first_line, plural
from brim.evaluation.worker import EvalListener
from brim.integrations.harness_start import (
    ClosesWork,
    by_writing,
    load_harness_model,
    open_work,
    own_folder,
    writing_of,
)
from brim.integrations.harness_tasks import Writing
from brim.integrations.harness_work import HarnessWork
from brim.models.base import LoadedModel
from brim.ranks.agreement import Agreement
from brim.ranks.world import current_world
from brim.settings.caller import given, named, pair, written
from brim.settings.eval_settings import EvalRequest
from brim.settings.setting_checks import pairs, whole
from brim.settings.shared import checked

try:
    from lm_eval import utils as harness_utils
    from lm_eval.api.model import TemplateLM

    from brim.integrations.harness_bar import shown_in_bar
except (ImportError, AttributeError) as error:  # the second: an old release beside a new transformers
    raise RequestError(f"lm-eval's tasks need lm-eval ({error}): pip install 'brim[lm-eval]'") from error

__all__ = ["COMMAND", "BrimLM", "TextSettings", "load_language_model", "think_end"]

COMMAND = "lm-eval"
DEFAULT_LENGTH = 2048  # tokens, where neither configuration nor tokenizer has a limit; as lm-eval's `hf`
DEFAULT_NEW_TOKENS = 256
_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")  # of a configuration, in lm-eval's order


class BrimLM(ClosesWork, TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model for `lm_eval.simple_evaluate(model=…)`: brim's batches, lm-eval's tasks.

    Sizes are found on the requests themselves, in tokens, and an out-of-memory error makes a batch smaller. With
    `output` every answer is in that folder's `samples.jsonl` as soon as it is there, and after a kill the same lines of
    code with `resume=True` compute only what is missing.

    Args:
        model: A transformers folder or hf:ID of a language model, as in `brim eval -m`.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto (the model's own), float32, float16 or bfloat16.
        knob: Settings of the model, such as {'layers': 12}.
        trust_remote_code: Let a transformers folder run its own Python code.
        batch_size: auto, or N requests as a ceiling.
        cost_cap: At most so many tokens in a batch, padding included.
        no_auto_batch_size: With `batch_size`: exactly that; split where it does not fit.
        memory_limit: Use at most this much, such as 24GiB.
        margin: Keep this fraction free.
        no_cache: Neither use a cached plan nor keep this one.
        max_length: Tokens that context and answer may have; by default the model's own limit.
        add_bos_token: Begin every text with the special tokens; by default as the tokenizer does.
        prefix_token_id: What an empty context is replaced by; by default the BOS token, else the EOS token.
        think_end_token: An answer begins after this text or token.
        chat_template_args: Arguments of the chat template, such as {'enable_thinking': False}.
        seed: Of sampled answers.
        output: A run folder; without it nothing is written.
        resume: Continue the run in `output`.

    Example:
        >>> lm = BrimLM("./my-model", output="runs/harness")
        >>> results = lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"], limit=100)
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        knob: Mapping[str, object] | None = None,
        trust_remote_code: bool = False,
        batch_size: int | Literal["auto"] = "auto",
        cost_cap: int | None = None,
        no_auto_batch_size: bool = False,
        memory_limit: int | str | None = None,
        margin: float | None = None,
        no_cache: bool = False,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        output: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> None:
        request = EvalRequest(
            model=os.fspath(model), data=COMMAND, device=device, dtype=dtype, knobs=dict(knob or {}),
            trust_remote_code=trust_remote_code, batch_size=None if batch_size == "auto" else batch_size,
            cost_cap=cost_cap, fixed=no_auto_batch_size, memory_limit=memory_limit, margin=margin,
            use_cache=not no_cache, seed=seed, chat=False, num_workers=0, resume=resume,
        )  # fmt: skip
        if current_world().size > 1:
            raise RequestError(
                "BrimLM runs in one process; for several ranks use torchrun --nproc-per-node=N -m brim lm-eval"
            )
        texts = TextSettings(
            max_length=checked("max_length", max_length, whole(2)), add_bos_token=add_bos_token,
            prefix_token_id=checked("prefix_token_id", prefix_token_id, whole(0)),
            think_end=think_end(think_end_token),
            template=checked("chat_template_args", chat_template_args, pairs("NAME=VALUE")) or {},
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            folder = own_folder(output, stack, command=COMMAND, resume=resume)
            work = open_work(request, load_language_model(request), folder, EvalListener(), Agreement(), stack)
            self._begin(work, texts, closes=stack.pop_all())

    @classmethod
    def over(cls, work: HarnessWork, texts: TextSettings) -> BrimLM:
        """Over work that is open already and stays so."""
        made: BrimLM = cls.__new__(cls)
        made._begin(work, texts, closes=contextlib.ExitStack())
        return made

    def _begin(self, work: HarnessWork, texts: TextSettings, *, closes: contextlib.ExitStack) -> None:
        super().__init__()
        self.work = work
        self.loaded = work.model
        self.tokenizer = work.model.tokenizer
        self.backend = "seq2seq" if work.model.kind == "seq2seq" else "causal"
        self.chat_template_args = texts.template
        self._texts = texts
        self._device = work.model.device
        self._shows_bars = type(work.listener) is EvalListener
        self._close = weakref.finalize(self, closes.close)
        if texts.add_bos_token is not None and hasattr(self.tokenizer, "add_bos_token"):
            self.tokenizer.add_bos_token = texts.add_bos_token
        if self.prefix_token_id is None:
            raise RequestError(
                f"{work.model.name} has neither a BOS nor an EOS token, which lm-eval puts before an empty context; "
                f"give one with {written('prefix_token_id', 'N')}"
            )
        asked, positions = texts.max_length, work.model.positions
        if asked is not None and positions is not None and asked > positions:
            work.note(
                f"{given('max_length', asked)}: the model has {positions:,} positions; on longer texts it may fail, or "
                "answer badly"
            )

    # ------------------------------------------------------------------------------------- what lm-eval asks

    @property
    def config(self) -> Any:
        """The model's configuration; lm-eval's results name the model by it."""
        return self.loaded.module.config

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int | None:
        """What stands for an empty context."""
        bos: int | None = self.tokenizer.bos_token_id
        given_id = self._texts.prefix_token_id
        return given_id if given_id is not None else bos if bos is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        if self._texts.max_length is not None:
            return self._texts.max_length
        config = getattr(self.config, "text_config", None) or self.config
        known = [getattr(config, name, None) for name in _LENGTHS]
        limit = getattr(self.tokenizer, "model_max_length", None)
        known.append(limit if limit is not None and limit < 10**29 else None)  # unlimited is 10³⁰
        return int(next((length for length in known if length is not None), DEFAULT_LENGTH))

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer, where a task does not say."""
        return DEFAULT_NEW_TOKENS

    @property
    def batch_size(self) -> int | str:
        """As it was asked for; what was used is in the record."""
        return self.work.request.batch_size or "auto"

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """For lm-eval's results."""
        return {
            "model_num_parameters": sum(one.numel() for one in self.loaded.module.parameters()),
            "model_dtype": str(self.loaded.dtype),
            "model_revision": "main",
            "model_sha": "",
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A text's tokens; one that begins with the prefix token gets no second one."""
        options = self._special_tokens(add_special_tokens)
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            options = {"add_special_tokens": False}
        ids: list[int] = self.tokenizer.encode(string, **options)
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one text; without its system prompt where the template has no place for one."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}

        def applied(messages: list[dict[str, str]]) -> str:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, **options, **self.chat_template_args
            )
            return text

        try:
            return applied(chat_history)
        except Exception as problem:
            rest = [message for message in chat_history if message["role"] != "system"]
            if getattr(self.tokenizer, "chat_template", None) is None or len(rest) == len(chat_history):
                raise RequestError(
                    f"{named('apply_chat_template')}: the model's chat template refuses ({first_line(problem)}); leave "
                    "it out, and prompts are read as they are"
                ) from problem
            return applied(rest)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Every continuation after its context: its log-likelihood, and whether greedy decoding writes it."""
        for context, continuation in (request.args for request in requests):
            if not context and not self.tok_encode(continuation, add_special_tokens=False):
                raise _nothing_to_score(context, continuation)
        with self._bar("loglikelihood", disable_tqdm):
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of the model's length, each with one token before it."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            found = harness_utils.get_rolling_token_windows(
                token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
                context_len=1,
            )  # fmt: skip
            disjoint = [harness_utils.make_disjoint_window(window) for window in found]
            windows += [(None, context, continuation) for context, continuation in disjoint]
            counts.append(len(disjoint))
        with self._bar("loglikelihood_rolling", disable_tqdm):
            scores = iter(self._loglikelihood_tokens(windows))
        totals = [float(sum(next(scores)[0] for _ in range(count))) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of contexts up to a stop string; requests with the same settings run together."""
        answers: dict[int, str] = {}
        for writing, places in by_writing(self._writing(request.args[1]) for request in requests):
            with self._bar("generate_until", disable_tqdm):
                prompts = self._prompts([requests[place].args[0] for place in places], writing)
                written_texts = self.work.write(prompts, writing)
            for place, text in zip(places, written_texts, strict=True):
                answers[place] = text
                self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return [answers[place] for place in range(len(requests))]

    def check_generation(self, asked: Mapping[str, Any]) -> None:
        """Raise what `generate_until` would raise of a task's generation settings."""
        self._room(self._writing(asked))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Scores of token lists; what is too long loses its beginning."""
        pairs, cut = [], 0
        for texts, context, continuation in requests:
            if not context or not continuation:
                raise _nothing_to_score(*(texts or ("", "")))
            if len(continuation) > self.max_length:
                raise RequestError(
                    f"lm-eval asks for the likelihood of {len(continuation)} tokens at once, and the model reads "
                    f"{self.max_length}; use {written('max_length', 'N')} or a model with more positions"
                )
            read = context if self.backend == "seq2seq" else (context + continuation)[:-1]
            pairs.append((read[-self.max_length :], continuation))
            cut += len(read) > self.max_length
        self._note_cut(cut, len(pairs))
        scores = [(float(value), bool(greedy)) for value, greedy in self.work.score(pairs)]
        for (texts, _context, _continuation), score in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    # ------------------------------------------------------------------------------------------ from text to tokens

    def _special_tokens(self, asked: bool | None) -> dict[str, bool]:
        wanted = asked if asked is not None else self._texts.add_bos_token
        return {} if wanted is None else {"add_special_tokens": wanted}

    def _prompts(self, contexts: Sequence[str], writing: Writing) -> list[list[int]]:
        """The contexts' tokens, of which the last remain where the answer would have no room."""
        room = self._room(writing)
        bos: str = (getattr(self.tokenizer, "bos_token", None) or "") if self.backend == "causal" else ""
        prefix = self.prefix_token_id
        assert prefix is not None, "checked when the model was opened"
        usual = self._special_tokens(None) if self.backend == "causal" else {}
        begun = [bool(bos) and context.startswith(bos) for context in contexts]
        prompts: list[list[int]] = [[] for _ in contexts]
        cut = 0
        for with_bos, options in ((True, {"add_special_tokens": False}), (False, usual)):
            places = [place for place, has in enumerate(begun) if has == with_bos]
            if places:
                encoded = self.tokenizer([contexts[place] for place in places], **options)["input_ids"]
                for place, ids in zip(places, encoded, strict=True):
                    prompts[place] = list(ids[-room:]) or [prefix]
                    cut += len(ids) > room
        self._note_cut(cut, len(prompts))
        return prompts

    def _note_cut(self, cut: int, total: int) -> None:
        if cut:
            self.work.note(
                f"{cut:,} of {plural(total, 'context')} lost their beginning: with their answers they are longer than "
                f"the {self.max_length:,} tokens that the model reads"
            )

    def _room(self, writing: Writing) -> int:
        """Tokens that a context may have beside its answer."""
        room = self.max_length - (writing.max_new_tokens if self.backend == "causal" else 0)
        if room < 1:
            raise RequestError(
                f"{pair('gen_kwargs', 'max_gen_toks', writing.max_new_tokens)}: an answer of {writing.max_new_tokens} "
                f"tokens leaves no room for a context within the model's {self.max_length}; lower it"
            )
        return room

    def _writing(self, asked: Mapping[str, Any]) -> Writing:
        end = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        return writing_of(
            asked, self.loaded, most_tokens=self.max_gen_toks, end_text=end or "", think_end=self._texts.think_end
        )

    def _bar(self, name: str, disabled: bool) -> contextlib.AbstractContextManager[None]:
        """A bar as lm-eval's own models draw, where nobody else follows the run."""
        return shown_in_bar(self.work, name) if self._shows_bars and not disabled else contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How text becomes tokens and back, beside the tokenizer."""

    max_length: int | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    think_end: str | int | None = None
    template: dict[str, Any]


def think_end(value: str | int | None) -> str | int | None:
    """A text of digits is a token's number, as in lm-eval's `hf`."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _nothing_to_score(context: str, continuation: str) -> RequestError:
    return RequestError(
        f"lm-eval asks for the likelihood of a text without tokens: {continuation!r} after {context[-80:]!r}; the "
        "task's doc_to_text and doc_to_choice (or doc_to_target) must leave something to score"
    )


def load_language_model(request: EvalRequest) -> LoadedModel:
    """The model; of a kind that lm-eval's text requests suit."""
    return load_harness_model(request, COMMAND, kinds=("language", "seq2seq"), wanted="language model")
