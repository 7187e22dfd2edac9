"""Generation in a pool beside what brim did before and what transformers does, each in a process of its own.

    python -m benchmarks.pool --json results.json                       # needs a GPU
    python -m benchmarks.pool --before ../old-checkout --cases 1.1b     # an earlier brim in the same run
    python -m benchmarks.pool --before ../old-checkout --cases pictures # a vision-language model
    python -m benchmarks.pool --tiny                                    # small models on any machine, to try it out

Prompts of random tokens with log-normal lengths, models with random weights in bfloat16. Answers end at different
lengths: a part of the vocabulary are end tokens. Rates are samples over seconds from a loaded model to the last answer
scored, first run in a fresh process. Pictures are random pixels for a LLaVA-shaped model (CLIP ViT-L/14 at 336 pixels
before the 1.1 B decoder: 576 tokens each); they are taken from memory, so that no file is decoded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "0.27b": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16,
              "num_key_value_heads": 8, "vocab_size": 65536, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32},
}  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14, "projection_dim": 32},
    "large": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
              "image_size": 336, "patch_size": 14, "projection_dim": 768},
}  # fmt: skip
IMAGE_TOKEN = 99  # below all that prompts are made of
PICTURES = 32  # different ones
CONTINUOUS_SECONDS = 45.0  # for transformers' continuous batching once it is ready; what it has answered counts
# Shape, prompts, mean of the logarithm of their lengths, longest, new tokens, part of the vocabulary that ends, prefix;
# of multiple choice, the options of a question.
CASES: dict[str, dict[str, Any]] = {
    "tiny": {"shape": "tiny", "count": 64, "log_mean": 3.0, "longest": 100, "new": 16, "ends": 0.02},
    "tiny, pictures": {"shape": "tiny", "tower": "tiny", "count": 24, "log_mean": 2.0, "longest": 20, "new": 16,
                       "ends": 0.02},
    "1.1b, 128 new tokens": {"shape": "1.1b", "count": 2048, "log_mean": 5.15, "longest": 1800, "new": 128,
                             "ends": 0.0156},
    "0.27b, 16 new tokens": {"shape": "0.27b", "count": 4096, "log_mean": 4.92, "longest": 1500, "new": 16},
    "0.5b, 128 new tokens": {"shape": "0.5b", "count": 2048, "log_mean": 5.15, "longest": 1800, "new": 128,
                             "ends": 0.0156},
    "7b, 128 new tokens": {"shape": "7b", "count": 512, "log_mean": 5.15, "longest": 1800, "new": 128, "ends": 0.0156},
    "1.1b, prefix, 16 new tokens": {"shape": "1.1b", "count": 4096, "log_mean": 4.2, "longest": 700, "new": 16,
                                    "prefix": 1024},
    "0.27b, prefix, 16 new tokens": {"shape": "0.27b", "count": 4096, "log_mean": 4.92, "longest": 1500, "new": 16,
                                     "prefix": 1024},
    "tiny, choice": {"shape": "tiny", "count": 64, "log_mean": 3.0, "longest": 100, "options": 4, "prefix": 200},
    "1.1b, choice": {"shape": "1.1b", "count": 1024, "log_mean": 4.2, "longest": 700, "options": 4},
    "1.1b, prefix, choice": {"shape": "1.1b", "count": 1024, "log_mean": 4.2, "longest": 700, "options": 4,
                             "prefix": 1024},
    "1.1b, prefix, 128 new tokens": {"shape": "1.1b", "count": 1024, "log_mean": 4.2, "longest": 700, "new": 128,
                                     "ends": 0.0156, "prefix": 1024},
    "1.4b, pictures, 64 new tokens": {"shape": "1.1b", "tower": "large", "count": 256, "log_mean": 3.5, "longest": 300,
                                      "new": 64, "ends": 0.0156},
    "1.4b, 1,024 pictures, 128 new tokens": {"shape": "1.1b", "tower": "large", "count": 1024, "log_mean": 3.5,
                                             "longest": 300, "new": 128, "ends": 0.0156},
}  # fmt: skip
# What runs a case: options of the evaluation, "before" for an earlier checkout.
WAYS: dict[str, dict[str, Any]] = {
    "brim before, auto": {"before": True},
    "brim, auto": {},
    "brim, in batches": {"pool": False},
    "brim, -b 256": {"batch_size": 256},
    "brim, -b 1024": {"batch_size": 1024},
    "brim, -b 2048": {"batch_size": 2048},
    "brim, --batch-invariant": {"batch_invariant": True},
    "brim, prefix not shared": {"unshared": True},
    "transformers, continuous batching": {"peer": True},
    "transformers, continuous batching, graphs and asynchronous": {"peer": True, "forced": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier brim, to run beside")
    parser.add_argument("--cases", default="", help="only cases with this in their name")
    parser.add_argument("--ways", default="", help="only ways with one of these in their name, separated by |")
    parser.add_argument("--tiny", action="store_true", help="one small case, on any machine")
    parser.add_argument("--seconds", type=float, default=120.0, help="a process that takes longer is ended")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_measured(**json.loads(arguments.child))), flush=True)
        return
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if case.startswith("tiny") != arguments.tiny or arguments.cases not in case:
            continue
        for way, options in WAYS.items():
            wanted = any(part in way for part in arguments.ways.split("|"))
            if not wanted or not _applies(CASES[case], options):
                continue
            if options.get("before") and arguments.before is None:
                continue
            rows.append({"case": case, "way": way, **_in_a_process(case, options, arguments)})
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps({"rows": rows}, indent=1))
    print(table(rows))


def _applies(spec: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether a way makes sense for a case."""
    if options.get("unshared"):
        return "prefix" in spec or "options" in spec
    if "tower" in spec and options.get("batch_size", 0) > spec["count"]:
        return False
    if "options" in spec and not options.get("pool", True):
        return False
    return not ((options.get("peer") or options.get("batch_invariant")) and ("options" in spec or "tower" in spec))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| case | way | samples/s | seconds | × before | peak GiB | notes |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        base = next(
            (one.get("rate") for one in rows if one["case"] == row["case"] and one["way"].startswith("brim before")),
            None,
        )
        rate = row.get("rate")
        times = f"{rate / base:.2f}" if rate and base else "—"
        shown = [f"{rate:,.0f}", f"{row['seconds']:.2f}"] if rate else ["—", "—"]
        peak = row.get("peak_gib")
        lines.append(
            f"| {row['case']} | {row['way']} | {' | '.join(shown)} | {times} | {'—' if peak is None else peak} | "
            f"{row.get('notes', '')} |"
        )
    return "\n".join(lines)


def _in_a_process(case: str, options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    root = Path(__file__).parents[1]
    tree = arguments.before.resolve() if options.get("before") else root
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{root}"}
    asked = json.dumps({"case": case, "options": {k: v for k, v in options.items() if k != "before"}})
    command = [sys.executable, str(Path(__file__).resolve()), "--child", asked]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=arguments.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"notes": f"ended after {arguments.seconds:g} s"}
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"notes": f"failed: {(errors or done.stderr.strip().splitlines() or ['?'])[-1][:200]}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _measured(case: str, options: dict[str, Any]) -> dict[str, Any]:
    """One evaluation, or one run of transformers' own, in this process."""
    import torch

    spec = CASES[case]
    model, ends = _model(spec)
    prompts = _prompts(spec)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    if options.get("peer"):
        return _continuous(model, prompts, spec, ends, forced="forced" in options)
    return _brim(model, prompts, spec, ends, options)


def _model(spec: dict[str, Any]) -> tuple[Any, tuple[int, ...]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 32000, "max_position_embeddings": 4096, "initializer_range": 0.05, **SHAPES[spec["shape"]]}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        config = LlamaConfig(**shape)
        model = (LlamaForCausalLM(config) if "tower" not in spec else _with_tower(config, spec["tower"])).eval()
        torch.set_default_dtype(torch.float32)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    count = int(spec.get("ends", 0.0) * shape["vocab_size"])
    return model, tuple(sorted(random.Random(1).sample(range(100, shape["vocab_size"]), count)))


def _with_tower(text: Any, tower: str) -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(**TOWERS[tower], initializer_range=0.05)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=_patches(tower)
    )
    return LlavaForConditionalGeneration(config)


def _patches(tower: str) -> int:
    return int((TOWERS[tower]["image_size"] // TOWERS[tower]["patch_size"]) ** 2)


class PictureProcessor:
    """Pictures as random pixels from memory, before prompts of token ids."""

    chat_template = image_token = image_processor = None

    def __init__(self, prompts: list[list[int]], tower: str) -> None:
        import torch

        side = TOWERS[tower]["image_size"]
        generator = torch.Generator().manual_seed(0)
        self._pixels = torch.randn(PICTURES, 3, side, side, generator=generator).to(torch.bfloat16)
        self._prompts, self._image = prompts, [IMAGE_TOKEN] * _patches(tower)

    def __call__(self, *, text: list[str], **options: Any) -> dict[str, Any]:
        import torch

        del options
        rows = [[*self._image, *self._prompts[int(one)]] for one in text]
        fills = [max(map(len, rows)) - len(row) for row in rows]
        return {
            "input_ids": torch.tensor([[0] * fill + row for row, fill in zip(rows, fills, strict=True)]),
            "attention_mask": torch.tensor(
                [[0] * fill + [1] * len(row) for row, fill in zip(rows, fills, strict=True)]
            ),
            "pixel_values": self._pixels[[int(one) % PICTURES for one in text]],
        }

    def _get_num_multimodal_tokens(self, image_sizes: Any, **options: Any) -> dict[str, list[int]]:
        del options
        return {"num_image_tokens": [len(self._image)] * len(image_sizes)}


def _picture_subject(model: Any, prompts: list[list[int]], spec: dict[str, Any]) -> Any:
    """A generation task over prompts with a picture each."""
    import io

    import torch
    from PIL import Image

    from benchmarks.prompt_subject import NumberTokenizer
    from brim.data.base import ImageFile, Sample, SampleSet
    from brim.evaluation.setup import EvaluationSetup
    from brim.metrics.registry import parse_metrics
    from brim.models.base import LoadedModel
    from brim.tasks.base import TaskSettings
    from brim.tasks.generate import GenerateTask

    encoded = io.BytesIO()
    Image.new("RGB", (8, 8)).save(encoded, format="PNG")  # the pixels come from the processor
    picture = ImageFile(data=encoded.getvalue())
    loaded = LoadedModel(
        name="benchmark", kind="vision_language", module=model, device=next(model.parameters()).device,
        dtype=torch.bfloat16, tokenizer=NumberTokenizer(prompts), processor=PictureProcessor(prompts, spec["tower"]),
    )  # fmt: skip
    samples = tuple(Sample(id=str(n), prompt=str(n), images=(picture,), references=("1",)) for n in range(len(prompts)))
    data = SampleSet(name="pictures", format="jsonl", samples=samples, suggested_task="generate")
    task = GenerateTask(loaded, data, TaskSettings(max_new_tokens=spec["new"]))
    task.setup()
    costs = tuple(task.cost(item) for item in range(len(samples)))
    return EvaluationSetup(model=loaded, data=data, task=task, metrics=tuple(parse_metrics("exact_match")), costs=costs)


def _prompts(spec: dict[str, Any]) -> list[list[int]]:
    draw = random.Random(0)
    lengths = [
        min(max(round(draw.lognormvariate(spec["log_mean"], 0.9)), 4), spec["longest"]) for _ in range(spec["count"])
    ]
    lengths[0] = spec["longest"]
    prefix = [draw.randrange(100, 31000) for _ in range(spec.get("prefix", 0))]
    return [[*prefix, *(draw.randrange(100, 31000) for _ in range(length))] for length in lengths]


def _brim(
    model: Any, prompts: list[list[int]], spec: dict[str, Any], ends: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    from benchmarks.prompt_subject import choice_subject, prompt_subject
    from brim.evaluation.run import run_setup
    from brim.evaluation.worker import EvalListener
    from brim.generation.settings import TokenIds
    from brim.settings.eval_settings import EvalRequest

    started = time.perf_counter()
    if options.get("unshared"):
        import brim.generation.likelihoods as likelihoods

        likelihoods.MIN_SHARED_PREFIX = 1 << 30
        likelihoods.MIN_SAVED_FRACTION = 1.0
    if "options" in spec:
        draw = random.Random(2)
        ids = [[draw.randrange(100, 31000) for _ in range(draw.randint(1, 8))] for _ in range(spec["options"] * 64)]
        questions = [(prompt, draw.sample(ids, spec["options"])) for prompt in prompts]
        started = time.perf_counter()  # what a task tries on the model counts
        setup = choice_subject(model, questions)
    else:
        pictures = "tower" in spec
        setup = _picture_subject(model, prompts, spec) if pictures else prompt_subject(model, prompts, spec["new"])
        setup.task._tokens = TokenIds(ends=ends, pad=0)
        if not options.get("pool", True):
            setup.task.generation = dataclasses.replace(setup.task.generation, pool=False)
        if options.get("batch_invariant"):
            setup.task.generation = dataclasses.replace(setup.task.generation, batch_invariant=True)
    notes: list[str] = []

    class Notes(EvalListener):
        def note(self, line: str) -> None:
            notes.append(line)

    request = EvalRequest(
        model="benchmark", data="prompts", use_cache=False,
        **{name: value for name, value in options.items() if name in ("batch_size", "batch_invariant")},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done: Any = run_setup(request, setup, Path(folder), Notes())
        seconds = time.perf_counter() - started
    summary = getattr(done, "summary", done)  # an earlier brim returns the summary itself
    figures = f"{summary['oom_events']} OOM, padding {summary['padding_fraction']:.0%}, size "
    figures += f"{summary['batch_size_used']}"
    if lengths := summary["answer_tokens"]:
        figures += f", answers p50 {lengths['p50']}, {lengths['truncated_fraction']:.0%} cut off"
    wait = summary["gpu_wait_fraction"]
    figures += "" if wait is None else f", idle {wait:.1%}"
    peak = summary["peak_reserved_bytes"]
    return {
        "samples": len(prompts), "seconds": seconds, "rate": len(prompts) / seconds,
        "peak_gib": None if peak is None else round(peak / 2**30, 1), "notes": "; ".join([figures, *notes]),
    }  # fmt: skip


def _continuous(
    model: Any, prompts: list[list[int]], spec: dict[str, Any], ends: tuple[int, ...], *, forced: bool
) -> dict[str, Any]:
    """transformers' continuous batching as it sets itself up; forced: with CUDA graphs and asynchronous batches."""
    import torch
    import transformers
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=spec["new"], do_sample=False, eos_token_id=list(ends) or -1, pad_token_id=0
    )
    some = sorted(prompts, key=len, reverse=True)[:: max(len(prompts) // 256, 1)]
    options: dict[str, Any] = {}
    kind = getattr(transformers, "ContinuousBatchingConfig", None)
    if kind is None:
        from transformers.generation import configuration_utils

        kind = getattr(configuration_utils, "ContinuousBatchingConfig", None)
    if kind is not None and forced:
        names = getattr(kind, "__dataclass_fields__", {})
        wished = {"use_cuda_graph": True, "use_async_batching": True}
        options["continuous_batching_config"] = kind(**{name: on for name, on in wished.items() if name in names})
    started = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=config, timeout=1, workload_hints=_hints(some, spec["new"]), **options
    ) as manager:
        ready = time.perf_counter() - started  # its kernels are tried and its graphs captured
        manager.add_requests(inputs=some, max_new_tokens=spec["new"])
        answered = 0
        while answered < len(some) and time.perf_counter() - started < ready + CONTINUOUS_SECONDS:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                break
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"after {answered} of {len(some)} prompts: {result.error}")
                answered += 1
        seconds = time.perf_counter() - started
    used = f"{model.config._attn_implementation}, {options or 'its own choice'}, ready after {ready:.1f} s"
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else None
    return {
        "samples": answered, "seconds": seconds, "rate": answered / seconds,
        "peak_gib": None if peak is None else round(peak, 1),
        "notes": f"{used}, then {answered / (seconds - ready):,.1f}/s: {answered} of {len(some)} prompts",
    }  # fmt: skip


def _hints(prompts: list[list[int]], new: int) -> Any:
    """What continuous batching gets from `generate_batch`."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    longest = max(len(prompt) for prompt in prompts)
    return WorkloadHints(max_prompt_length=longest, max_generated_length=new, num_requests=len(prompts))


if __name__ == "__main__":
    main()
