"""lmms-eval on brim: `--model brim` on its command line, `BrimLMMS` for `lmms_eval.evaluator.simple_evaluate(model=…)`.

    python -m lmms_eval --model brim --model_args pretrained=./my-vlm,output=runs/mme --tasks mme

Messages become prompts by the model's own chat template and processor; how requests are batched, survived and
journalled is brim's (`harness_work.py`). Nothing of lmms-eval is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from brim.data.base import ImageFile
from brim.errors import RequestError, first_line
from brim.evaluation.worker import EvalListener
from brim.integrations.harness_start import (
    ClosesWork,
    by_writing,
    load_harness_model,
    open_work,
    own_folder,
    writing_of,
)
from brim.integrations.harness_tasks import PicturePrompt, Writing
from brim.integrations.harness_work import HarnessWork
from brim.memory.devices import memory_of
from brim.ranks.agreement import Agreement
from brim.ranks.world import current_world
from brim.settings.caller import named_as, written
from brim.settings.eval_settings import EvalRequest

try:
    from lmms_eval.api.instance import GenerationResult, TokenCounts
    from lmms_eval.api.model import lmms
    from lmms_eval.protocol import ChatMessages
    from tqdm import tqdm

    from brim.integrations.harness_bar import shown_in_bar
except (ImportError, AttributeError) as error:  # the second: a release that does not suit its libraries
    raise RequestError(f"lmms-eval's tasks need lmms-eval ({error}): pip install 'lmms-eval>=0.7.3'") from error

__all__ = ["COMMAND", "BrimLMMS"]

COMMAND = "lmms-eval"
DEFAULT_NEW_TOKENS = 1024
_OF_OTHERS = ("image_aspect_ratio",)  # generation settings of tasks that are meant for one other model's image code


class BrimLMMS(ClosesWork, lmms):  # type: ignore[misc]  # lmms-eval has no types
    """A vision-language model for lmms-eval: brim's batches, lmms-eval's tasks.

    Sizes are found on the requests themselves, in tokens, and an out-of-memory error makes a batch smaller. With
    `output` every answer is in that folder's `samples.jsonl` as soon as it is there, and after a kill the same command
    with `resume=True` computes only what is missing. One object is for one evaluation: at its end lmms-eval has the
    model's memory freed.

    Args:
        pretrained: A transformers folder or hf:ID of a vision-language model, as in `brim eval -m`.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: auto (the model's own), float32, float16 or bfloat16.
        knob: Settings of the model, such as {'layers': 12}.
        trust_remote_code: Let a transformers folder run its own Python code.
        batch_size: N requests as a ceiling; auto, and 1, which lmms-eval's command line says by itself, leave it open.
        max_batch_size: N requests as a ceiling, also 1.
        cost_cap: At most so many tokens in a batch, padding included.
        no_auto_batch_size: With `batch_size`: exactly that; split where it does not fit.
        memory_limit: Use at most this much, such as 24GiB.
        margin: Keep this fraction free.
        no_cache: Neither use a cached plan nor keep this one.
        num_workers: Processes that read and process images; by default chosen by a short trial.
        max_new_tokens: Tokens of an answer where a task does not say.
        use_until: Cut answers at a task's `until`, which lmms-eval's own chat models do not.
        system_prompt: A text, or a file with it, that begins every conversation.
        seed: Of sampled answers.
        output: A run folder; without it nothing is written.
        resume: Continue the run in `output`.

    Example:
        >>> lm = BrimLMMS("./my-vlm", output="runs/mme")
        >>> results = lmms_eval.evaluator.simple_evaluate(model=lm, tasks=["mme"], limit=100)
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        knob: Mapping[str, object] | None = None,
        trust_remote_code: bool = False,
        batch_size: int | str | Literal["auto"] = "auto",
        max_batch_size: int | None = None,
        cost_cap: int | None = None,
        no_auto_batch_size: bool = False,
        memory_limit: int | str | None = None,
        margin: float | None = None,
        no_cache: bool = False,
        num_workers: int | None = None,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        use_until: bool = False,
        system_prompt: str | None = None,
        seed: int = 0,
        output: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__()
        request = EvalRequest(
            model=os.fspath(pretrained), data=COMMAND, device=device, dtype=dtype, knobs=dict(knob or {}),
            trust_remote_code=trust_remote_code, batch_size=_ceiling(batch_size, max_batch_size, no_auto_batch_size),
            cost_cap=cost_cap, fixed=no_auto_batch_size, memory_limit=memory_limit, margin=margin,
            use_cache=not no_cache, seed=seed, chat=False, num_workers=num_workers, resume=resume,
        )  # fmt: skip
        if current_world().size > 1:
            raise RequestError(
                "BrimLMMS runs in one process; start it without accelerate launch or torchrun, for several GPUs once "
                "for each with tasks of its own"
            )
        self._max_new_tokens = max_new_tokens
        self._use_until = use_until
        self._system_prompt = self._resolve_system_prompt(system_prompt) if system_prompt else ""
        self._cleaned = False
        with contextlib.ExitStack() as stack, named_as(model="pretrained"):
            folder = own_folder(output, stack, command=COMMAND, resume=resume)
            model = load_harness_model(request, COMMAND, kinds=("vision_language",), wanted="vision-language model")
            self.work: HarnessWork = open_work(request, model, folder, EvalListener(), Agreement(), stack)
            self.config = model.module.config
            self.tokenizer, self.processor = model.tokenizer, model.processor
            self._device = model.device
            self._templated = getattr(self.processor, "chat_template", None) is not None
            self._close = weakref.finalize(self, stack.pop_all().close)

    # ----------------------------------------------------------------------------------- what lmms-eval asks

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self._device

    @property
    def batch_size(self) -> int | str:
        """As it was asked for."""
        return self.work.request.batch_size or "auto"

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """Answers to conversations with images; requests with the same settings run together."""
        if self._cleaned:
            raise RequestError("lmms-eval has freed this BrimLMMS at the end of an evaluation; make another one")
        groups = by_writing(self._writing(request.args[2]) for request in requests)
        reading = tqdm(requests, desc="Reading generate_until requests", disable=len(requests) < 2)
        prompts = [self._prompt(request.args) for request in reading]
        answers: dict[int, Any] = {}
        for writing, places in groups:
            with shown_in_bar(self.work, "generate_until"):
                lines = self.work.write_of_pictures(
                    [prompts[place] for place in places], writing, templated=self._templated
                )
            for place, line in zip(places, lines, strict=True):
                counts = TokenCounts(output_tokens=line.get("tokens"))
                answers[place] = GenerationResult(text=line["prediction"], token_counts=counts)
                self.cache_hook.add_partial("generate_until", requests[place].args, line["prediction"])
        return [answers[place] for place in range(len(requests))]

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        """Not done."""
        del requests
        raise RequestError(
            "brim writes answers to lmms-eval's tasks and scores none: leave out tasks of the output type "
            "loglikelihood or multiple_choice (for text alone there is brim lm-eval)"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> NoReturn:
        """Not done."""
        del requests
        raise RequestError(
            "brim answers lmms-eval's tasks in one round: leave out tasks of the output type generate_until_multi_round"
        )

    def clean(self) -> None:
        """Free the model's memory, for a judge that is started next; the journal stays open until `close`."""
        self._cleaned = True
        self.work.model.module.to("meta")
        memory_of(self._device).release()

    # ---------------------------------------------------------------------------------- from messages to prompts

    def _writing(self, asked: Mapping[str, Any]) -> Writing:
        """A task's settings, read as lmms-eval's own chat models do: without a temperature nothing is drawn."""
        left_out = {*_OF_OTHERS, *(() if self._use_until else ("until",))}
        kwargs = {name: value for name, value in asked.items() if name not in left_out}
        if not kwargs.get("temperature"):
            kwargs = {name: value for name, value in kwargs.items() if name not in ("do_sample", "top_p", "top_k")}
        return writing_of(kwargs, self.work.model, most_tokens=self._max_new_tokens)

    def _prompt(self, arguments: tuple[Any, ...]) -> PicturePrompt:
        """One request's conversation; its images are read now, for their size and content, and again when needed."""
        _context, doc_to_messages, _kwargs, doc_id, task, split = arguments

        def messages() -> Any:
            made = doc_to_messages(self.task_dict[task][split][doc_id])
            return ChatMessages(messages=self._apply_system_prompt(made, self._system_prompt))

        conversation = messages()
        shown, videos, sounds = conversation.extract_media()
        if videos or sounds:
            what = "videos" if videos else "sound"
            raise RequestError(
                f"task {task}: document {doc_id} has {what}, and brim reads images and text; leave it out"
            )
        text = self._text(conversation.to_hf_messages())
        digest = hashlib.sha256(f"{len(shown)} {text}".encode())
        images, again = [], _Pictures(messages, len(shown))
        for number, image in enumerate(shown):
            if isinstance(image, str):
                path = Path(image.removeprefix("file://"))
                if not path.is_file():
                    raise RequestError(f"task {task}: document {doc_id} has the image {image}, which is no file here")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
                images.append(ImageFile(path=path))
            else:
                digest.update(hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).digest())
                images.append(ImageFile(decoded=partial(again.take, number), size=image.size))
        return PicturePrompt(digest.hexdigest(), text, tuple(images))

    def _text(self, messages: list[dict[str, Any]]) -> str:
        """A conversation as the processor reads it."""
        if self._templated:
            try:
                text: str = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except Exception as problem:  # templates are programs
                raise RequestError(
                    f"the model's chat template refuses a conversation of the task ({first_line(problem)}); leave the "
                    "task out, or give the model another chat template"
                ) from problem
            return text
        place = getattr(self.processor, "image_token", None) or getattr(self.tokenizer, "image_token", None) or ""
        parts = [part for message in messages for part in message["content"]]
        return "\n".join(place if part["type"] == "image" else part["text"] for part in parts)


class _Pictures:
    """The images of one conversation, made again from its document; kept until the last of them is taken."""

    def __init__(self, messages: Callable[[], Any], count: int) -> None:
        self._messages, self._count = messages, count
        self._images: list[Any] = []

    def take(self, number: int) -> Any:
        """One of them, as the task made it."""
        if not self._images:
            self._images = self._messages().extract_media()[0]
        image = self._images[number]
        if number == self._count - 1:
            self._images = []
        return image


def _ceiling(batch_size: int | str, most: int | None, exact: bool) -> int | None:
    """The ceiling that was asked for; lmms-eval's command line passes 1 where nobody said anything."""
    if most is not None:
        return int(most)
    if isinstance(batch_size, str) and not batch_size.isdecimal():
        if batch_size.startswith("auto"):
            return None
        raise RequestError(f"{written('batch_size', batch_size)}: it must be auto or a whole number from 1")
    size = int(batch_size)
    return None if size == 1 and not exact else size
