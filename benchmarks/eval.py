"""brim and what people use today on the same prompts: samples per second, side by side in one run.

    python -m benchmarks.eval --json results.json          # generation, needs a GPU
    python -m benchmarks.eval --part repeat                 # the prompts 16 times: auto against the best fixed cap
    python -m benchmarks.eval --part ties                   # half precision: where batches and single prompts differ
    python -m benchmarks.eval --part overhead               # the executor against a bare loop, on any machine

4,096 prompts (mean about 204 tokens, longest 1,500), 16 new tokens each, a 0.27 B model with random weights in
bfloat16. The slow contenders run on every n-th of their batches (`--share`), over the whole range of lengths; the
column says on how many samples.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

CAPS = (64, 128, 192, 256, 384, 512, 1024)  # Ki tokens a batch
LIKELY_CAPS = (128, 192, 256, 384, 512)  # those near the best of a single pass
REPEATS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="all", choices=("all", "single", "repeat", "ties", "overhead"))
    parser.add_argument("--share", type=int, default=4, help="slow contenders run on every n-th batch")
    parser.add_argument("--tiny", action="store_true", help="overhead: one round of few batches")
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps({"environment": _facts(), "rows": rows}, indent=1))

    if arguments.part in ("all", "overhead"):
        _overhead(add, batches=50 if arguments.tiny else 200, rounds=1 if arguments.tiny else 3)
    if arguments.part != "overhead":
        bench = Generation(add, share=arguments.share)
        if arguments.part in ("all", "single"):
            bench.single_pass()
        if arguments.part in ("all", "repeat"):
            bench.repeated()
        if arguments.part in ("all", "ties"):
            bench.ties()
    print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown; the last column is over the sorted fixed batch of 64."""
    base = next((row["rate"] for row in rows if row.get("base")), None)
    lines = ["| way | samples | seconds | samples/s | × sorted 64 | notes |", "|---|---|---|---|---|---|"]
    for row in rows:
        times = f"{row['rate'] / base:.1f}" if base and row.get("rate") else "—"
        rate = f"{row['rate']:,.0f}" if row.get("rate") else "—"
        seconds = f"{row['seconds']:.2f}" if row.get("seconds") else "—"
        lines.append(f"| {row['way']} | {row['samples']:,} | {seconds} | {rate} | {times} | {row.get('notes', '')} |")
    return "\n".join(lines)


class Generation:
    """The model, the prompts, and every way of answering them."""

    def __init__(self, add: Callable[[dict[str, Any]], None], *, share: int) -> None:
        from benchmarks.prompts import NEW_TOKENS, build_model, prompts

        self.add = add
        self.share = share
        self.new_tokens = NEW_TOKENS
        self.model = build_model()
        self.prompts = prompts()
        self.sorted = sorted(self.prompts, key=len, reverse=True)

    def single_pass(self) -> None:
        """4,096 prompts once."""
        self._plain("transformers generate, sorted, 64", _chunks(self.sorted, 64), share=self.share, base=True)
        for cap in (256, 512):
            self._plain(f"transformers generate, sorted, {cap} Ki tokens", _capped(self.sorted, cap * 1024))
        self._try("transformers continuous batching", self._continuous)
        self._try("transformers pipeline, sorted, 64", self._pipeline)
        self._try("transformers generate, static cache, compiled", self._static)
        self.brim("brim, auto, first run in the process", self.prompts)
        self.brim("brim, auto, again", self.prompts)
        for cap in CAPS:
            self.brim(f"brim, {cap} Ki tokens", self.prompts, cost_cap=cap * 1024)

    def repeated(self) -> None:
        """The prompts 16 times: what finding the size costs against knowing it."""
        many = self.prompts * REPEATS
        few = self.prompts * 2
        self.brim("brim, auto, ×2, warming up", few)
        rates = {cap: self.brim(f"brim, {cap} Ki tokens, ×2", few, cost_cap=cap * 1024) for cap in LIKELY_CAPS}
        first, second = sorted(rates, key=rates.__getitem__)[:-3:-1]
        self.brim(f"brim, {first} Ki tokens, ×{REPEATS}", many, cost_cap=first * 1024)
        self.brim(f"brim, auto, ×{REPEATS}", many)
        self.brim(f"brim, {second} Ki tokens, ×{REPEATS}", many, cost_cap=second * 1024)

    def ties(self, count: int = 64) -> None:
        """Greedy answers in bfloat16 against transformers' `generate` one by one, and against another batch size.

        Where an answer first differs, the model's own logits say how close the two tokens were: the gap between the
        best and the one taken, in standard deviations of the logits.
        """
        import torch

        some = self.sorted[:: len(self.sorted) // count][:count]
        alone = [self._generate([prompt])[0] for prompt in some]
        ways = {"one batch": (self._batched, {}), "pool": (self._pooled, {}),
                "pool, --batch-invariant": (self._pooled, {"batch_invariant": True})}  # fmt: skip
        for way, (answer, options) in ways.items():
            started = time.perf_counter()
            found = answer(some, **options)
            seconds = time.perf_counter() - started
            gaps: list[float] = []
            for prompt, ours, theirs in zip(some, found, alone, strict=True):
                place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
                if place is not None:
                    with torch.inference_mode():
                        logits = (
                            self.model(torch.tensor([[*prompt, *ours[:place]]], device="cuda")).logits[0, -1].float()
                        )
                    gaps.append(((logits.max() - logits[ours[place]]) / logits.std()).item())
            parts = [one for start in range(0, count, 7) for one in answer(some[start : start + 7], **options)]
            other = sum(one != two for one, two in zip(found, parts, strict=True))
            note = f"{len(gaps)} of {len(some)} answers differ from generate at batch size 1, largest gap "
            note += f"{max(gaps, default=0.0):.3f} standard deviations; {other} differ from the same in sevens"
            self._row(f"brim, {way}, bfloat16", len(some), seconds, notes=note)

    def _batched(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        import torch

        from brim.generation.select import make_decoder
        from brim.generation.settings import GenerationSettings, TokenIds
        from brim.generation.trial import padded_batch

        settings = GenerationSettings(max_new_tokens=self.new_tokens)
        decoder = make_decoder(self.model, settings, TokenIds(ends=(), pad=0))
        tensors = [torch.tensor(prompt, device="cuda") for prompt in prompts]
        found: list[list[int]] = decoder.generate(padded_batch(tensors, decoder.padding, pad=0)).token_lists()
        decoder.release()
        return found

    def _pooled(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        from brim.generation.pool import INVARIANT_ROWS, GenerationPool, PoolPrompt, chunk_tokens_of
        from brim.generation.settings import GenerationSettings, TokenIds

        settings = GenerationSettings(max_new_tokens=self.new_tokens, **options)
        longest = max(map(len, prompts))
        pool = GenerationPool(
            self.model, settings, TokenIds(ends=(), pad=0), rows=INVARIANT_ROWS if options else len(prompts),
            slots=len(prompts) * (longest + self.new_tokens + 16) + 16, longest=longest,
            chunk_tokens=chunk_tokens_of(self.model, settings),
        )  # fmt: skip
        pool.admit([PoolPrompt(ids=prompt, key=key) for key, prompt in enumerate(prompts)])
        found: dict[int, list[int]] = {}
        while pool.active:
            found |= {one.key: one.tokens for one in pool.advance()}
        pool.release()
        return [found[key] for key in range(len(prompts))]

    def brim(self, way: str, prompts: Sequence[list[int]], cost_cap: int | None = None) -> float:
        """Through the evaluation itself: loader, executor, journal, scoring."""
        from benchmarks.prompt_subject import prompt_subject
        from brim.evaluation.run import run_setup
        from brim.evaluation.worker import EvalListener
        from brim.settings.eval_settings import EvalRequest

        setup = prompt_subject(self.model, prompts, self.new_tokens)
        request = EvalRequest(model="benchmark", data="prompts", cost_cap=cost_cap, use_cache=False)
        notes: list[str] = []

        class Notes(EvalListener):
            def note(self, line: str) -> None:
                notes.append(line)

        with tempfile.TemporaryDirectory() as folder:
            self._settle()
            started = time.perf_counter()
            summary = run_setup(request, setup, Path(folder), Notes()).summary
            seconds = time.perf_counter() - started
        figures = f"batch {summary['batch_size_used']}, {summary['oom_events']} OOM"
        figures += f", padding {summary['padding_fraction']:.0%}"
        wait = summary["gpu_wait_fraction"]
        figures += f", idle between batches {wait:.1%}" if wait is not None else ""
        figures += f", {summary['peak_reserved_bytes'] / 2**30:.0f} GiB" if summary["peak_reserved_bytes"] else ""
        self._row(way, len(prompts), seconds, notes="; ".join([figures, *notes]))
        return len(prompts) / seconds

    def _plain(self, way: str, batches: Sequence[list[list[int]]], share: int = 1, base: bool = False) -> None:
        chosen = batches[::share]
        self._generate(chosen[-1][:2])  # warm up
        self._settle()
        started = time.perf_counter()
        for batch in chosen:
            self._generate(batch)
        self._row(way, sum(map(len, chosen)), time.perf_counter() - started, base=base)

    def _generate(self, batch: Sequence[list[int]], **more: Any) -> list[list[int]]:
        import torch

        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch]).cuda()
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]).cuda()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=self.new_tokens, do_sample=False, **more
            )
        answers: list[list[int]] = out[:, longest:].tolist()
        return answers

    def _continuous(self, way: str) -> None:
        from transformers import GenerationConfig

        some = self.sorted[::8]
        config = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        started = time.perf_counter()
        self.model.generate_batch(inputs=some, generation_config=config, progress_bar=False)
        self._row(way, len(some), time.perf_counter() - started)

    def _pipeline(self, way: str) -> None:
        from transformers import pipeline

        from benchmarks.prompt_subject import number_tokenizer

        chosen = [prompt for batch in _chunks(self.sorted, 64)[:: 2 * self.share] for prompt in batch]
        generator = pipeline("text-generation", model=self.model, tokenizer=number_tokenizer(), batch_size=64)
        texts = [" ".join(map(str, prompt)) for prompt in chosen]
        generator(texts[-2:], max_new_tokens=2, do_sample=False)
        started = time.perf_counter()
        generator(texts, max_new_tokens=self.new_tokens, do_sample=False, return_full_text=False)
        self._row(way, len(chosen), time.perf_counter() - started)

    def _static(self, way: str) -> None:
        batches = _chunks(self.sorted, 64)[32:36]
        started = time.perf_counter()
        for batch in batches:
            self._generate(batch, cache_implementation="static")
        self._row(way, 64 * len(batches), time.perf_counter() - started, notes="start-up (compilation) counted")

    def _try(self, way: str, run: Callable[[str], None]) -> None:
        """A contender that fails is a row with its error."""
        self._settle()
        try:
            run(way)
        except Exception as error:
            first = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            self.add({"way": way, "samples": 0, "seconds": None, "rate": None, "notes": f"failed: {first}"})

    def _row(self, way: str, samples: int, seconds: float, *, notes: str = "", base: bool = False) -> None:
        row: dict[str, Any] = {"way": way, "samples": samples, "seconds": seconds, "rate": samples / seconds}
        self.add({**row, "notes": notes, **({"base": True} if base else {})})

    def _settle(self) -> None:
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()


def _overhead(add: Callable[[dict[str, Any]], None], *, batches: int, rounds: int) -> None:
    """The executor against a bare loop: batches of 20 ms each, both reading their results.

    Wall time, and the processor time that each takes beside the work (which sleeps): on a busy machine wall time says
    more about the neighbours.
    """
    import brim

    items = list(range(batches * 8))

    def work(batch: list[int]) -> list[int]:
        time.sleep(0.02)
        return [item * 2 for item in batch]

    def bare() -> list[int]:
        results: list[int] = []
        for start in range(0, len(items), 8):
            results += work(items[start : start + 8])
        return results

    def nothing(batch: list[int]) -> list[int]:
        return [item * 2 for item in batch]

    many = items * 10
    _, idle, _ = _timed(lambda: [one for start in range(0, len(many), 8) for one in nothing(many[start : start + 8])])
    _, busy, _ = _timed(lambda: list(brim.map(nothing, many, batch_size=8)))
    own = (busy - idle) / (10 * batches)
    note = f"{own * 1e6:.0f} µs of its own a batch of 8: {own / 0.02:.2%} of 20 ms"
    add(
        {
            "way": "brim.map over batches without work",
            "samples": len(many),
            "seconds": busy,
            "rate": None,
            "notes": note,
        }
    )
    for _ in range(rounds):
        plain, plain_busy, expected = _timed(bare)
        ours, ours_busy, found = _timed(lambda: list(brim.map(work, items, batch_size=8)))
        assert found == expected
        add({"way": "bare loop, 20 ms a batch", "samples": len(items), "seconds": plain, "rate": len(items) / plain})
        busy = (ours_busy - plain_busy) / (batches * 0.02)
        note = f"{ours / plain - 1:+.2%} wall over the bare loop; processor time beside the work {busy:+.2%} of it"
        add({"way": "brim.map", "samples": len(items), "seconds": ours, "rate": len(items) / ours, "notes": note})


def _timed(run: Callable[[], list[int]]) -> tuple[float, float, list[int]]:
    """Wall and processor seconds, and the results."""
    wall, busy = time.perf_counter(), time.thread_time()
    results = run()
    return time.perf_counter() - wall, time.thread_time() - busy, results


def _chunks(prompts: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    return [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]


def _capped(prompts: Sequence[list[int]], cap: int) -> list[list[list[int]]]:
    def cut() -> Iterator[list[list[int]]]:
        start = 0
        while start < len(prompts):
            count = max(cap // len(prompts[start]), 1)
            yield list(prompts[start : start + count])
            start += count

    return list(cut())


def _facts() -> dict[str, Any]:
    from benchmarks.environment import environment

    return environment()


if __name__ == "__main__":
    main()
