"""What benchmarks/before_after.py asks of a checkout, inside of a process that has this one brim and no other.

Started as a file, with the checkout's src/ and root on the path: `benchmarks` and `brim` are the checkout's own. What
is asked of both checkouts goes through the command line and the class behind `benchmarks.eval --part repeat`; `rates`
and `profile_rates` are asked of the new one alone.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT = "24GiB"
TURNS, TURN_SECONDS, TURN_STEPS = 3, 0.7, (3, 12)
PIXELS, NEW_TOKENS = 1000, 16
FIXED_QUESTIONS = 640  # that sizes beside each other have to draw from
REPEATS = 16  # of 4,096 prompts
TINY_EVAL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1}  # fmt: skip

Row = dict[str, Any]


def serve() -> None:
    """Say which brim this is, then answer requests until the pipe is closed; what brim prints goes to the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    import torchvision  # noqa: F401  # beforehand: no case should pay for it
    import transformers  # noqa: F401

    import brim

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    answers.write(json.dumps({"brim": brim.__file__}) + "\n")
    known: dict[str, Callable[..., Row]] = {
        "find": find, "sweep": sweep, "train": train, "ood": ood, "eval": evaluate, "profile": profile,
        "rates": rates, "profile_rates": profile_rates,
    }  # fmt: skip
    for line in sys.stdin:
        asked = json.loads(line)
        do = asked.pop("do")
        if do != "eval" and generation.cache_info().currsize:
            generation.cache_clear()
            released()
        try:
            answer = known[do](**asked)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        answers.write(json.dumps({**answer, "left_bytes": released()}) + "\n")


def released() -> int:
    """Bytes that stay on the card once the cache is given back."""
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


def command(*words: str) -> float:
    """`brim …` in this process; its seconds."""
    sys.argv = ["brim", *words]
    started = time.perf_counter()
    try:
        runpy.run_module("brim", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (0, None):
            raise RuntimeError(f"brim {words[0]} ended with {end.code}: see the log") from end
    return time.perf_counter() - started


def find(*, flags: list[str], folder: str) -> Row:
    seconds = command("find", *flags, "--no-cache", "-o", folder, "--json")
    plan = json.loads((Path(folder) / "run.json").read_text())["plan"]
    tried = [(probe["batch_size"], probe["verdict"], probe["samples_per_second"]) for probe in plan["probes"]]
    return {
        "size": plan["size"],
        "largest": plan["batch_size_max"],
        "probes": len(tried),
        "ooms": sum(verdict == "oom" for _, verdict, _ in tried),
        "seconds": seconds,
        "tried": tried,
        "notes": plan["notes"],
    }


def sweep(*, source: Row, folder: str) -> Row:
    """In a process of its own, as its experiments are."""
    place = Path(folder)
    file = place.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(source))
    flags = ["--no-cache", "--jobs-per-gpu", "1", "-o", folder, "--json"]
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "brim", "sweep", str(file), *flags], check=False, stdout=sys.stderr)
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 1):  # 1: an experiment failed, which its row says
        raise RuntimeError(f"brim sweep ended with {done.returncode}: see the log")
    models = {}
    for entry in json.loads((place / "sweep.json").read_text())["experiments"]:
        result, forecast = entry["result"], entry["forecast"] or {}
        models[entry["settings"]["model"]["type"]] = {
            "size": result.get("batch_size_used"),
            "rate": result.get("samples_per_second"),
            "ooms": result.get("oom_events"),
            "state": result["state"],
            "failed": result["error"],
            "forecast_size": forecast.get("batch_size"),
            "planning_seconds": planning_seconds(place / result["folder"] / "steps.jsonl"),
        }
    return {"seconds": seconds, "models": models}


def planning_seconds(steps: Path) -> float | None:
    """What finding the size has cost: a run's steps against as many of the steady ones of its second half."""
    lines = [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    if len(seconds) < 2:
        return None
    return float(sum(seconds) - len(seconds) * statistics.median(seconds[len(seconds) // 2 :]))


def train(*, source: Row, flags: list[str], folder: str, rows: int) -> Row:
    """One training, or several seeds of one; `ROWS` and `CLIPS` in the file stand for data that is made here."""
    place = Path(folder).parent.parent
    file = Path(folder).with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    clips = place / "clips.py"
    if not clips.exists():
        from benchmarks.train_video import DATA

        clips.write_text(DATA)
    both = feature_files(place, rows)[2]
    file.write_text(json.dumps(source).replace("ROWS", str(both)).replace("CLIPS", f"py:{clips}:clips"))
    seconds = command("train", str(file), *flags, "--no-cache", "-o", folder, "--json")
    summary = json.loads((Path(folder) / "run.json").read_text())["summary"]
    answer = {"seconds": seconds, "rate": summary["samples_per_second"], "ooms": summary.get("oom_events")}
    steps = Path(folder) / "steps.jsonl"
    if "micro_batch_size" in summary and steps.exists():  # the rate of the second half, once the size is found
        lines = [json.loads(line) for line in steps.read_text().splitlines()]
        steady = [line["effective_batch"] / line["seconds"] for line in lines if "seconds" in line]
        answer["rate"] = statistics.median(steady[len(steady) // 2 :])
        answer["size"] = summary["micro_batch_size"]
    if choice := summary.get("fast_path_choice"):
        answer["size"] = f"{choice['path']} ×{choice['stack']}"
    return answer


def ood(*, flags: list[str], folder: str, rows: int) -> Row:
    """Energy heads: pairs of all seeds per second of training, with warm-up and the capture of graphs."""
    inner, outer, _ = feature_files(Path(folder).parent.parent, rows)
    seconds = command("ood", "--id", str(inner), "--ood", str(outer), *flags, "-o", folder, "--json")
    training = json.loads((Path(folder) / "run.json").read_text())["summary"]["trainings"][0]
    choice = training["fast_path_choice"]
    return {
        "seconds": seconds,
        "rate": training["pairs_per_second"],
        "size": f"{training['fast_path']} ×{choice['stack']}",
    }


def feature_files(place: Path, rows: int) -> tuple[Path, Path, Path]:
    """Random features of two sides, and both with their labels; the first to come makes the files."""
    import torch
    from safetensors.torch import save_file

    files = (place / "in.safetensors", place / "out.safetensors", place / "rows.safetensors")
    if not files[2].exists():
        torch.manual_seed(0)
        sides = [torch.randn(rows, 512) + shift for shift in (0.0, 0.3)]
        for file, side in zip(files[:2], sides, strict=True):
            save_file({"features": side}, file)
        save_file({"features": torch.cat(sides), "labels": torch.arange(2).repeat_interleave(rows)}, files[2])
    return files


@functools.cache
def generation(tiny: bool) -> tuple[Any, Row]:
    """The model and prompts of `benchmarks.eval`, warm; and the row of its first run in this process."""
    from benchmarks import eval as benchmark
    from benchmarks import prompts

    if tiny:
        prompts.QWEN2_SHAPE.update(TINY_EVAL)
        prompts.build_model = functools.partial(prompts.build_model, "cpu")
        prompts.prompts = functools.partial(prompts.prompts, 24)
    rows: list[Row] = []
    bench = benchmark.Generation(rows.append, share=1)
    if tiny:
        bench._settle = lambda: None  # type: ignore[method-assign]
    bench.brim("auto ×2, first run", bench.prompts * 2)
    return bench, rows[0]


def evaluate(*, cap: int | None, tiny: bool) -> Row:
    bench, first = generation(tiny)
    rows: list[Row] = []
    bench.add = rows.append
    bench.brim("run", bench.prompts * (2 if tiny else REPEATS), cost_cap=cap)
    return {"seconds": rows[0]["seconds"], "rate": rows[0]["rate"], "notes": rows[0]["notes"], "first": first}


def profile(*, flags: list[str], folder: str, make: Row, place: str) -> Row:
    """A profile of the model and questions in `place`, which the first to come makes."""
    import torch

    if not (Path(place) / "questions" / "questions.jsonl").exists():
        from benchmarks.vision_language import save_model, write_questions

        weights_on = "cuda" if torch.cuda.is_available() else None
        save_model(Path(place) / "model", tiny=make["tiny"], weights_on=weights_on)
        pixels = 160 if make["tiny"] else PIXELS
        write_questions(Path(place) / "questions", max(make["questions"], FIXED_QUESTIONS), pixels=pixels)
    seconds = command("profile", *flags, "--no-cache", "-o", folder, "--json")
    entries = json.loads((Path(folder) / "profile.json").read_text())["summary"]
    names = {"batch_size_used": "size", "samples_per_second": "rate", "plan_seconds": "planning_seconds",
             "oom_events": "ooms", "state": "state"}  # fmt: skip
    values = {str(one["max_crops"]): {names[key]: one.get(key) for key in names} for one in entries}
    return {"seconds": seconds, "values": values}


def rates(*, jobs: list[Row]) -> Row:
    """Samples per second of each size, in turns, under the limit."""
    import torch

    from benchmarks.workloads import Spec, build
    from brim.settings.sizes import parse_bytes

    found: Row = {}
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(
            parse_bytes(LIMIT) / torch.cuda.get_device_properties(0).total_memory
        )
    try:
        for job in jobs:
            workload = build(Spec(**job["spec"]))
            turns: dict[int, list[Row]] = {size: [] for size in job["sizes"]}
            for _ in range(TURNS if len(turns) > 1 else 1):
                for size, taken in turns.items():
                    taken.append(steady_rate(workload, size))
            found[job["name"]] = {size: median_of(taken) for size, taken in turns.items()}
            del workload
            released()
    finally:
        if cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return {"rates": found}


def steady_rate(workload: Any, size: int) -> Row:
    """The median over some steps, after two that warm up; started as a run starts: empty cache, no optimizer state."""
    import torch

    cuda = torch.cuda.is_available()
    workload.release()
    for optimizer in workload.optimizers():
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)
    released()
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    seconds: list[float] = []
    try:
        batch = workload.make_batch(size)
        for _ in range(2):
            workload.step(batch)
        wait()
        before = torch.cuda.memory_stats()["num_alloc_retries"] if cuda else 0
        while len(seconds) < TURN_STEPS[0] or (len(seconds) < TURN_STEPS[1] and sum(seconds) < TURN_SECONDS):
            started = time.perf_counter()
            workload.step(batch)
            wait()
            seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return {"rate": 0.0, "retries": None, "ooms": 1}
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before if cuda else 0
    return {"rate": size / statistics.median(seconds), "retries": retries, "ooms": 0}


def median_of(turns: Sequence[Row]) -> Row:
    rate = statistics.median(turn["rate"] for turn in turns)
    spread = (max(turn["rate"] for turn in turns) - min(turn["rate"] for turn in turns)) / rate if rate else 0.0
    retries, ooms = (sum(turn[name] or 0 for turn in turns) for name in ("retries", "ooms"))
    return {"rate": rate, "spread": round(spread, 4), "retries": retries, "ooms": ooms}


def profile_rates(*, common: Row, sizes: Mapping[str, list[int]]) -> Row:
    """Samples per second of the device at each size of each value, pictures prepared, in turns."""
    from benchmarks.knob_profile import prepared, rate_at
    from brim.models.load import KeptModel
    from brim.settings.eval_settings import EvalRequest

    load = KeptModel()
    found: Row = {}
    for crops, tried in sizes.items():
        request = EvalRequest(**common, max_new_tokens=NEW_TOKENS, use_cache=False, knobs={"max_crops": crops})
        ready = prepared(request, load)
        turns: dict[int, list[float]] = {size: [] for size in tried}
        for _ in range(2):
            for size, taken in turns.items():
                taken.append(rate_at(request, size, load, ready) or 0.0)
        found[crops] = {size: {"rate": max(taken)} for size, taken in turns.items()}
    return {"rates": found}


if __name__ == "__main__":
    serve()
