"""What every harness's model begins with: the model loaded, its work opened, a task's generation settings read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.errors import RequestError, nearest_names, plural
from brim.evaluation.journals import Journals, check_contents
from brim.evaluation.worker import EvalListener
from brim.integrations.harness_tasks import Writing
from brim.integrations.harness_work import HarnessWork, model_fingerprint
from brim.models.base import LoadedModel, LoadRequest
from brim.models.build import resolve_model
from brim.models.load import load_model
from brim.models.placement import resolve_device, resolve_precision
from brim.ranks.agreement import Agreement
from brim.settings.caller import given, named, pair, written
from brim.settings.eval_settings import EvalRequest
from brim.storage.run_lock import locked_folder

__all__ = ["ClosesWork", "by_writing", "load_harness_model", "open_work", "own_folder", "writing_of"]

_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given
_ONE_ONLY = ("num_beams", "num_return_sequences", "num_beam_groups")  # options of a configuration that stay at 1
# Options that would have no effect here, with what does the same.
_NOT_DONE = {"max_length": "max_gen_toks", "min_length": "min_new_tokens", "stop_strings": "until", "max_time": "",
             "penalty_alpha": "", "dola_layers": ""}  # fmt: skip
_USUAL_TOP_K = 50  # of transformers' `generate` where nobody says; its configurations no longer show it


class ClosesWork:
    """A harness's model as a context manager: leaving it closes what it has opened."""

    work: HarnessWork
    _close: Callable[[], Any]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal and let go of the run folder; the process's end does the same."""
        self.work.close()
        self._close()


def own_folder(
    output: str | os.PathLike[str] | None, stack: contextlib.ExitStack, *, command: str, resume: bool
) -> Path | None:
    """The run folder that was named, locked for as long as the stack is open; None where none was."""
    if output is None:
        if resume:
            raise RequestError(f"{named('resume')}: name the run with {written('output', 'DIR')}")
        return None
    folder = stack.enter_context(locked_folder(Path(output), command=command))
    check_contents(folder, resume=resume, command=command)
    return folder


def load_harness_model(request: EvalRequest, harness: str, *, kinds: Collection[str], wanted: str) -> LoadedModel:
    """The model, if it is of one of these kinds; otherwise an error that says what is `wanted`."""
    name = resolve_model(request.model)
    kind = f"model of {name.source}"
    if name.source == "hf":
        loaded = load_model(
            LoadRequest(
                model=request.model,
                device=resolve_device(request.device),
                dtype=resolve_precision(request.dtype, "forward").weights,
                knobs=request.knobs,
                trust_remote_code=request.trust_remote_code,
            )
        )
        if loaded.kind in kinds:
            return loaded
        kind = f"{loaded.kind.replace('_', '-')} model"
    raise RequestError(
        f"{given('model', request.model)}: it is a {kind}; {harness}'s tasks need a {wanted} of transformers"
    )


def open_work(
    request: EvalRequest,
    model: LoadedModel,
    folder: Path | None,
    listener: EvalListener,
    agreement: Agreement,
    stack: contextlib.ExitStack,
) -> HarnessWork:
    """The work of one run, with the answers of earlier starts of it."""
    fingerprint = model_fingerprint(model, request)
    if folder is None:
        return HarnessWork(request, model, listener=listener)
    rank = agreement.world.rank
    journals = Journals(folder, fingerprint=fingerprint, rank=rank, ranks=agreement.world.size)
    with agreement.step(list) as step:
        step.value = []
        if rank == 0:
            step.value = journals.gather_earlier(resume=request.resume, drop_failed=True)
    stack.enter_context(journals)
    earlier = step.values[0]
    for note in journals.notes:
        listener.note(note)
    if earlier:
        listener.note(f"{plural(len(earlier), 'answer')} of earlier starts of this run are not computed again")
    monitor = folder / ("monitor.csv" if rank == 0 else f"monitor.rank-{rank}.csv")
    return HarnessWork(
        request, model, listener=listener, journals=journals, earlier=earlier, agreement=agreement,
        monitor=monitor,
    )  # fmt: skip


def writing_of(
    asked: Mapping[str, Any],
    model: LoadedModel,
    *,
    most_tokens: int,
    end_text: str = "",
    think_end: str | int | None = None,
) -> Writing:
    """A task's generation settings; one that brim does not have is an error, never ignored.

    `most_tokens` is for a task that does not say.
    """
    kwargs = dict(asked)
    usual = model.module.generation_config
    until = _texts_in(kwargs.pop("until", None))
    lengths = [(name, kwargs.pop(name, None)) for name in _MOST_TOKENS]
    name, length = next((given for given in lengths if given[1] is not None), (_MOST_TOKENS[0], most_tokens))
    most = int(_number(name, length))
    if most < 1:
        raise RequestError(f"{pair('gen_kwargs', name, most)}: an answer has at least 1 token")
    temperature = _number("temperature", kwargs.pop("temperature", None) or 0.0)
    draws = kwargs.pop("do_sample", None)
    if temperature < 0:
        raise RequestError(f"{pair('gen_kwargs', 'temperature', temperature)}: it must be 0 (greedy) or more")
    if draws and temperature == 0:
        raise RequestError(
            f"{pair('gen_kwargs', 'do_sample', True)}: sampling needs a temperature above 0; give one as well"
        )
    _refuse_others(kwargs, usual)
    if draws is False:
        temperature = 0.0
    if temperature > 0 and kwargs.get("top_k") is None and usual.top_k is None:
        kwargs["top_k"] = _USUAL_TOP_K
    share = kwargs.pop("top_p", None)
    top_p = 1.0 if share is None or temperature == 0 else _number("top_p", share)
    if not 0 < top_p <= 1:
        raise RequestError(f"{pair('gen_kwargs', 'top_p', top_p)}: it must be above 0 and at most 1")
    return Writing(
        max_new_tokens=most,
        until=tuple(dict.fromkeys(until)),
        end_text=end_text,
        temperature=temperature,
        top_p=top_p,
        options=tuple(sorted(kwargs.items())),
        think_end=think_end,
    )


def by_writing(writings: Iterable[Writing]) -> list[tuple[Writing, list[int]]]:
    """The numbers of requests that are answered in the same way, as groups in the order of their first."""
    groups: dict[str, tuple[Writing, list[int]]] = {}
    for number, writing in enumerate(writings):
        groups.setdefault(repr(writing), (writing, []))[1].append(number)
    return list(groups.values())


def _texts_in(until: Any) -> list[str]:
    """Stop strings: one, or several in a list."""
    texts = [until] if isinstance(until, str) else until or []
    if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
        return list(texts)
    raise RequestError(f"{pair('gen_kwargs', 'until', until)}: it must be a text, or a list of texts")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RequestError(f"{pair('gen_kwargs', name, value)}: it must be a number") from None


def _refuse_others(kwargs: Mapping[str, Any], usual: Any) -> None:
    """An error for a setting that a generation configuration does not have, or that brim does not keep."""
    for name, value in kwargs.items():
        asked = pair("gen_kwargs", name, value)
        if name in _ONE_ONLY and value not in (None, 1):
            raise RequestError(f"{asked}: brim generates one answer; leave it out")
        if name in _NOT_DONE and value:
            instead = _NOT_DONE[name]
            remedy = f"use {pair('gen_kwargs', instead, '…')}" if instead else "leave it out"
            raise RequestError(f"{asked}: brim's generation does not have this setting; {remedy}")
        if name not in vars(usual):
            raise RequestError(
                f"{asked}: transformers' generation has no such setting{nearest_names(name, vars(usual))}"
            )
