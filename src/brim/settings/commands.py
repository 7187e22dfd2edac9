"""The commands: what each is called, what it does in a sentence, and where its settings are declared.

A declaration is imported only when its command runs, or when the files made of it are written.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

__all__ = ["COMMANDS", "Command", "PythonCall"]

_OF_EVALUATIONS = {
    "fixed": "no_auto_batch_size", "use_cache": "!no_cache", "mapping": "map", "knobs": "knob", "plugins": "plugin",
    "max_new_tokens": "max_tokens", "graphs": "graphs", "overlap": "overlap", "non_blocking": "non_blocking",
    "decode_loop": "decode_loop", "pool": "pool",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonCall:
    """The function of the package that does what a command does."""

    name: str
    returns: str  # module and class
    holds: str  # what the returned object holds
    example: str  # lines of a Python session, with what they print; `brim` and `torch` are imported
    raises: tuple[str, ...] = ("RequestError", "DoesNotFitError", "LostError")
    old_names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # parameters of before; `!` turns a switch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the command line, and the function of the package that does the same."""

    name: str  # as it is typed
    summary: str
    settings: str  # module and class of the declaration
    example: str  # the last lines of the help
    more: str = ""  # of the help, after the summary
    alone_is_help: bool = False  # without anything after it, its help is shown
    schema: str = ""  # the JSON Schema of the file that it takes
    python: PythonCall | None = None  # None: there is no such function

    def declaration(self) -> type[Any]:
        """The dataclass of its settings."""
        module, _, name = self.settings.partition(":")
        found: type[Any] = getattr(importlib.import_module(f"brim.settings.{module}"), name)
        return found


COMMANDS = {
    command.name: command
    for command in (
        Command(
            name="find",
            summary="Find the fastest batch size that fits, in a handful of probes.",
            more="With -d the search runs on the data's own worst case: its costliest sample, in batches of every "
            "size.",
            settings="find_settings:FindSettings",
            example="brim find swin3d_t --mode train --knob frames=16 --knob size=224 --dtype bfloat16",
            python=PythonCall(
                name="find",
                returns="brim.records:Plan",
                holds="The plan: `batch_size`, `batch_size_max`, `reason`, and the probes that it rests on.",
                example='>>> brim.find("resnet18", mode="train", knob={"size": 32}, max_batch_size=32).batch_size\n'
                "32\n"
                ">>> model = torch.nn.Linear(512, 512)\n"
                ">>> plan = brim.find(\n"
                '...     step=model, make_batch=lambda n: torch.randn(n, 512), model=model, memory_limit="64MiB"\n'
                "... )\n"
                ">>> plan.batch_size, plan.oom_events\n"
                "(7177, 0)",
            ),
        ),
        Command(
            name="eval",
            summary="Evaluate a model on a data set: every sample once, at the fastest batch size that fits.",
            settings="eval_settings:EvaluateSettings",
            example="brim eval -m ./my-model -d questions.jsonl --metrics exact_match,rouge -o runs/first",
            python=PythonCall(
                name="evaluate",
                returns="brim.evaluation.run:EvalResult",
                holds="`metrics`, `samples` with one line each, `summary`, `plan` and the run's `folder`. A sample "
                "that fails has its error in its line and counts as wrong; it does not raise.",
                example='>>> result = brim.evaluate("./my-model", "questions.jsonl", metrics="exact_match,token_f1")\n'
                '>>> sorted(result.metrics), len(result.samples), result.summary["num_failed"]\n'
                "(['exact_match', 'token_f1'], 32, 0)",
                old_names=_OF_EVALUATIONS,
            ),
        ),
        Command(
            name="lm-eval",
            summary="Run lm-eval's tasks on a language model, at the fastest batch size that fits.",
            more="The tasks, prompts and metrics are lm-eval's, and so are the answers: those of its hf model.",
            settings="lm_eval_settings:LmEvalSettings",
            example="brim lm-eval -m ./my-model --tasks hellaswag,gsm8k --num-fewshot 5 -o runs/harness",
            python=PythonCall(
                name="lm_eval",
                returns="brim.integrations.harness_work:LmEvalResult",
                holds="`results` as lm-eval returns them, `metrics` by `task/metric`, `samples` by task, `summary` and "
                "the run's `folder`.",
                example='>>> result = brim.lm_eval("./my-model", "sums", include_path="tasks")\n'
                ">>> sorted(result.metrics), len(result.samples['sums'])\n"
                "(['sums/exact_match'], 32)",
            ),
        ),
        Command(
            name="profile",
            summary="Evaluate a model at every value of a knob: accuracy, speed, memory and latency, and which value "
            "to take.",
            settings="profile_settings:ProfileSettings",
            example="brim profile -m ./my-vlm -d vqa/ --knob max_crops --values 2-13 -b 64 -o runs/crops",
            python=PythonCall(
                name="profile",
                returns="brim.profiling.run:ProfileResult",
                holds="`entries` with one evaluation for each point, `document` with the recommendation, the `folder`.",
                example='>>> result = brim.profile("./my-model", "questions.jsonl", {"max_new_tokens": [2, 4]})\n'
                '>>> [(entry["max_new_tokens"], entry["state"]) for entry in result.entries]\n'
                "[(2, 'done'), (4, 'done')]",
                old_names=_OF_EVALUATIONS,
            ),
        ),
        Command(
            name="sweep",
            summary="Train every experiment of a grid, each in its own process: models paired with batch sizes, or "
            "with auto.",
            settings="sweep_request:SweepCommand",
            schema="sweep.schema.json",
            example="brim sweep examples/ucf101_video_grid.yaml hp.learning_rate=0.01 --max-experiments 3 --dry-run",
            python=PythonCall(
                name="sweep",
                returns="brim.sweeps.run:SweepResult",
                holds="`results` in the file's order, `best` first by figure, `failed`, `document`, the `folder`.",
                example='>>> result = brim.sweep("grid.yaml", max_experiments=2, output="runs/grid")\n'
                ">>> len(result.results), len(result.failed)\n"
                "(2, 0)",
                raises=("RequestError",),
            ),
        ),
        Command(
            name="train",
            summary="Train the model that a YAML file describes: your effective batch, in micro-batches that fit.",
            settings="train_request:TrainCommand",
            schema="train.schema.json",
            alone_is_help=True,
            example="brim train config.yaml hp.epochs=3 --effective-batch 1024 --lr-scale sqrt -o runs/first",
            python=PythonCall(
                name="train",
                returns="brim.training.run:TrainResult",
                holds="`metrics`, `summary` and the run's `folder`; with several seeds, means and deviations.",
                example='>>> result = brim.train("config.yaml", {"hp.epochs": 3}, output="runs/trained")\n'
                '>>> round(result.metrics["top1"]["mean"], 2)\n'
                "0.67",
                old_names={"fixed": "no_auto_batch_size", "use_cache": "!no_cache", "validate": "validate"},
            ),
        ),
        Command(
            name="ood",
            summary="Train detectors of out-of-distribution molecules: energy heads, all seeds at once, one table.",
            settings="molecule_settings:OodCommand",
            example="brim ood --id in.csv --ood out.csv --encoder morgan --seeds 10 --baselines knn,mahalanobis",
            python=PythonCall(
                name="ood",
                returns="brim.molecules.run:OodResult",
                holds="`summary` with the table over seeds, `cells` with one result for each seed, the run's `folder`.",
                example='>>> result = brim.ood(id="in.csv", ood="out.csv", seeds=2, baselines=["knn"])\n'
                '>>> result.summary["metrics"]["auroc"]["mean"]\n'
                "1.0",
            ),
        ),
        Command(
            name="forecast",
            summary="Forecast peak memory and the largest batch size for a card, without a GPU.",
            settings="forecast_settings:ForecastSettings",
            schema="forecast.schema.json",
            example="brim forecast swin3d_t --mode train --knob frames=16 --dtype bfloat16 --gpu a100-80gb",
            python=PythonCall(
                name="forecast",
                returns="brim.planning.forecast:ForecastResult",
                holds="`batch_size_max`, `forecasts` with the bytes of each size, and `cards` where several were asked "
                "for.",
                example='>>> brim.forecast("resnet18", mode="train", gpu="rtx 4090").batch_size_max\n569',
                raises=("RequestError", "DoesNotFitError"),
            ),
        ),
        Command(
            name="encode",
            summary="Encode a file of SMILES: one row of features for every molecule that can be read.",
            settings="molecule_settings:EncodeSettings",
            example="brim encode -m morgan -d smiles.csv -o features.safetensors --knob bits=1024",
            python=PythonCall(
                name="encode",
                returns="brim.molecules.encoding:EncodedFile",
                holds="The `path` that was written, the `width` of a row, `failures` by file and line, and `figures`.",
                example='>>> brim.encode("in.csv", "features.safetensors", knob={"bits": 1024}).failures\n{}',
            ),
        ),
        Command(
            name="knobs",
            summary="List a model's knobs: what --knob NAME=VALUE can set, with default and range.",
            more="Nothing is built, no weights are read.",
            settings="find_settings:KnobsSettings",
            example="brim knobs torchvision:swin3d_t",
        ),
        Command(
            name="check",
            summary="Judge a finished run: GPU utilisation, memory, errors, waiting, time, speed against another run.",
            more="Each line passes, fails or could not be judged, with its number. Exit code 1 if any fails.",
            settings="check_settings:CheckSettings",
            example="brim check runs/second --memory-range 25GiB-40GiB --against runs/first",
            python=PythonCall(
                name="check",
                returns="brim.advice.checks:CheckResult",
                holds="`lines` with verdict, value and limit, `failed` with those that failed, and the `document`.",
                example='>>> result = brim.check("runs/second", against="runs/first")\n'
                ">>> result.lines[0].name, result.lines[0].verdict\n"
                "('failed', 'pass')",
                raises=("RequestError",),
            ),
        ),
        Command(
            name="report",
            summary="Write a run's report again, or compare runs of one kind.",
            more="The page is one HTML file: it opens offline, on a phone, in dark mode and in print.",
            settings="report_settings:ReportSettings",
            example="brim report runs/eval-20260131-093000",
            python=PythonCall(
                name="report",
                returns="brim.reporting.write:ReportResult",
                holds="The `path` of the page, and the `document` of a comparison.",
                example='>>> brim.report("runs/first").path.name\n'
                "'report.html'\n"
                '>>> brim.report(["runs/first", "runs/second"], output="compared.html").document["schema"]\n'
                "'brim.comparison/1'",
                raises=("RequestError",),
            ),
        ),
        Command(
            name="advise",
            summary="Say what would make a run faster: cause, evidence, expected gain and the exact command.",
            more="A gain that no measurement is behind says so; --try measures. Before a run, -m and -d.",
            settings="advise_settings:AdviseSettings",
            alone_is_help=True,
            example="brim advise runs/eval-20260131-093000 --try --apply faster.yaml",
            python=PythonCall(
                name="advise",
                returns="brim.advice.advise:AdviceResult",
                holds="`advice`, largest expected gain first, what was `tried`, the `rounds`, and the `document`.",
                example='>>> result = brim.advise("runs/first")\n'
                '>>> "max_new_tokens" in [piece.name for piece in result.advice]\n'
                "True",
            ),
        ),
        Command(
            name="watch",
            summary="Show the GPUs and the runs of this machine while they work.",
            more="q quits. Without a GPU the host and the runs are shown; nothing listens on a port.",
            settings="watch_settings:WatchSettings",
            example="brim watch runs/first",
            python=PythonCall(
                name="watch",
                returns="brim.monitor.snapshot:Snapshot",
                holds="`gpus` and `runs` of this moment, and the whole `document`.",
                example='>>> [run["done"] for run in brim.watch().runs]\n[]',
                raises=("RequestError",),
            ),
        ),
        Command(
            name="doctor",
            summary="Examine this installation and machine: versions, cards, folders, and what is wrong with them.",
            more="One screen, to be pasted into a bug report. Exit code 1 if something is broken.",
            settings="doctor_settings:DoctorSettings",
            example="brim doctor --json",
            python=PythonCall(
                name="doctor",
                returns="brim.diagnosis.examine:DoctorResult",
                holds="`problems` with what to do about each, `errors` among them, and the whole `document`.",
                example=">>> [problem.text for problem in brim.doctor().errors]\n[]",
                raises=("RequestError",),
            ),
        ),
        Command(
            name="demo",
            summary="Profile the shipped vision-language model over max_crops, on this machine's CPU, under a small "
            "memory limit.",
            more="The model reads boards of handwritten digits: small ones only if it is given enough crops. Nothing "
            "is downloaded.",
            settings="profile_settings:DemoSettings",
            example="brim demo -o runs/demo",
        ),
        Command(
            name="cache list",
            summary="List the cached plans, newest first.",
            settings="find_settings:ListSettings",
            example="brim cache list --json",
        ),
        Command(
            name="cache clear",
            summary="Remove every cached plan.",
            settings="find_settings:ClearSettings",
            example="brim cache clear",
        ),
    )
}
