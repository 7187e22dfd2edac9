"""Evaluations that start from a forecast: when one is made, what is traced, and that a wrong one does no harm."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from brim.evaluation import start as module
from brim.evaluation.run import EvalResult, evaluate_together
from brim.evaluation.setup import EvaluationSetup, open_setup
from brim.evaluation.start import (
    FirstForecast,
    MakeForecast,
    Start,
    StartingPoint,
    forecast_first_batch,
    is_worth_a_trace,
)
from brim.evaluation.worker import EvalListener, Worker
from brim.evaluation.workload import DataWorkload
from brim.forecasting.forecast import Forecaster, TracedWorkload
from brim.forecasting.gpus import find_gpu
from brim.ranks.agreement import Agreement
from brim.records import Probe
from brim.settings.eval_settings import EvalRequest
from brim.sizing.live import LiveSizer
from brim.sizing.priors import ForecastBytes, Prior
from tests.evaluation.evaluation_runs import predictions, run, shout, write_lines, write_words
from tests.trials import ran

TOKENS = 6
MIB = 2**20
pretended = functools.partial(forecast_first_batch, gpu=find_gpu("a100-80gb"))


class Fake:
    """A forecast in a line over the number of samples, and how often it was asked for."""

    def __init__(self, each: float, *, constant: int = 0, seconds: float = 0.0) -> None:
        self.each, self.constant, self.seconds = each, constant, seconds
        self.asked: list[list[int]] = []

    def __call__(self, setup: EvaluationSetup, items: Sequence[int], limit_bytes: int) -> FirstForecast:
        del limit_bytes
        self.asked.append(list(items))
        points = tuple((size, round(self.constant + self.each * size)) for size in (2, 8, 64))
        costliest = max(setup.costs[item] for item in items)
        return FirstForecast(bytes=ForecastBytes(item_cost=costliest, points=points), seconds=self.seconds)


def untraceable(*_: Any) -> FirstForecast:
    return FirstForecast(bytes=None, seconds=1.5, note="started without a forecast, since it is a test")


def nothing(*_: Any) -> None:
    """No forecast is made."""


def starting_of(request: EvalRequest, forecast: MakeForecast, prior: Prior | None = None) -> StartingPoint:
    return Worker(request, open_setup(request), EvalListener(), forecast=forecast, prior=prior).starting


def evaluate_from(forecast: MakeForecast, request: EvalRequest, folder: Path) -> EvalResult:
    def opener(request: EvalRequest, listener: EvalListener, monitor: Path) -> Worker:
        return Worker(request, open_setup(request), listener, monitor=monitor, forecast=forecast)

    with Agreement(patient=True) as agreement:
        return evaluate_together(agreement, request, folder, EvalListener(), opener)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety-six questions of 31 to 40 words: a quarter of them is twenty-four."""
    rows = [{"id": str(n), "question": "w1 " * (31 + n % 10), "answer": "1"} for n in range(96)]
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.fixture
def asking(endless_model: Path, prompts: Path) -> Callable[..., EvalRequest]:
    def make(**settings: Any) -> EvalRequest:
        usual = {"device": "cpu", "use_cache": False, "max_new_tokens": TOKENS, "memory_limit": "1GiB"}
        return EvalRequest(model=str(endless_model), data=str(prompts), **{**usual, **settings})

    return make


@pytest.fixture(scope="module")
def plain(endless_model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalResult:
    folder = tmp_path_factory.mktemp("plain") / "run"
    return run(endless_model, prompts, folder, max_new_tokens=TOKENS, memory_limit="1GiB")


def batch_sizes(result: EvalResult) -> list[int]:
    assert result.plan is not None
    return [probe.batch_size for probe in result.plan.probes]


def bytes_a_sample(result: EvalResult) -> float:
    """What the largest batch of a run took, by sample; the weights are a few kilobytes."""
    assert result.plan is not None
    largest = max((probe for probe in result.plan.probes if probe.fits), key=lambda probe: probe.batch_size)
    return (largest.peak_allocated_bytes or 0) / largest.batch_size


class TestWhereTheRunStarts:
    def test_the_first_batch_takes_a_sixteenth_of_the_free_memory(
        self, asking: Callable[..., EvalRequest], tmp_path: Path, plain: EvalResult
    ) -> None:
        result = evaluate_from(Fake(each=8 * MIB), asking(), tmp_path / "run")
        assert batch_sizes(result)[0] == 8  # 64 MiB, 8 MiB each
        assert batch_sizes(plain)[0] == 2
        assert predictions(result) == predictions(plain)
        assert result.plan is not None
        assert result.plan.reason.endswith("from a size that a forecast gave")
        assert "forecast" not in (plain.plan.reason if plain.plan else "forecast")

    def test_the_first_batch_is_a_quarter_of_the_work_at_most(
        self, asking: Callable[..., EvalRequest], tmp_path: Path
    ) -> None:
        result = evaluate_from(Fake(each=1), asking(), tmp_path / "run")
        assert batch_sizes(result)[0] <= 24

    def test_a_single_sample_where_two_would_not_fit(self, asking: Callable[..., EvalRequest], tmp_path: Path) -> None:
        result = evaluate_from(Fake(each=600 * MIB), asking(limit=16), tmp_path / "run")
        assert batch_sizes(result)[0] == 1

    def test_what_the_forecast_took_is_part_of_planning_and_of_the_run(
        self, asking: Callable[..., EvalRequest], tmp_path: Path
    ) -> None:
        result = evaluate_from(Fake(each=MIB, seconds=100.0), asking(limit=16), tmp_path / "run")
        assert 100.0 <= result.summary["plan_seconds"] <= result.summary["seconds"]

    @pytest.mark.parametrize("settings", [{"batch_size": 4}, {"cost_cap": 200}, {"batch_size": 4, "fixed": True}])
    def test_nothing_is_forecast_for_a_size_that_was_asked_for(
        self, asking: Callable[..., EvalRequest], tmp_path: Path, settings: dict[str, Any]
    ) -> None:
        fake = Fake(each=MIB)
        evaluate_from(fake, asking(limit=8, **settings), tmp_path / "run")
        assert not fake.asked

    def test_nothing_is_forecast_where_an_earlier_run_has_left_a_plan(
        self, asking: Callable[..., EvalRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "cache"))
        fake = Fake(each=40 * MIB)
        starting = starting_of(asking(use_cache=True), fake)
        settled = Start(sizer=LiveSizer(first=300, ceiling=10_000, known=True))
        starting.remember(starting.plan(settled, 300, None), settled.sizer)
        start = starting.start(list(range(96)))
        assert not fake.asked
        assert start.cached is not None
        assert start.sizer.size == 300

    @pytest.mark.parametrize("forecast", [True, False])
    def test_the_second_batch_is_bounded_by_forecast_and_first_batch(
        self, asking: Callable[..., EvalRequest], forecast: bool
    ) -> None:
        each = 300 * MIB  # three of a gibibyte
        starting = starting_of(asking(), Fake(each=each) if forecast else nothing)
        sizer = starting.start(list(range(96))).sizer
        costliest = max(starting.setup.costs)
        assert sizer.size == 2 * costliest
        ran(sizer, 2 * costliest, 0.1, 2 * each, costliest)
        assert sizer.size // costliest == 3

    def test_a_similar_run_is_preferred_to_a_forecast(self, asking: Callable[..., EvalRequest]) -> None:
        costliest = 40 + TOKENS
        for cost, asked in ((costliest, 0), (2 * costliest, 0), (costliest // 2, 1)):
            fake = Fake(each=100 * MIB)
            trials = (Probe(batch_size=8, cost=8 * cost, verdict="fits", peak_allocated_bytes=80 * MIB),)
            prior = Prior(likely_size=100 * costliest, trials=trials)
            start = starting_of(asking(), fake, prior).start(list(range(96)))
            assert len(fake.asked) == asked
            assert start.by_forecast is bool(asked)
            assert start.sizer.phase == "comparing"
            if asked:
                assert start.sizer.size // costliest == 7  # three quarters of a gibibyte

    def test_on_the_cpu_nothing_changes(self, asking: Callable[..., EvalRequest], tmp_path: Path) -> None:
        setup = open_setup(asking(max_new_tokens=256))
        setup = dataclasses.replace(setup, costs=(300,) * 200)
        items = range(200)
        assert is_worth_a_trace(setup, items)
        assert forecast_first_batch(setup, items, 2**30) is None


class TestAWrongForecast:
    def test_one_that_is_far_too_high_is_outgrown(
        self, asking: Callable[..., EvalRequest], tmp_path: Path, plain: EvalResult
    ) -> None:
        result = evaluate_from(Fake(each=900 * MIB), asking(), tmp_path / "run")
        assert batch_sizes(result)[0] == 1
        assert max(batch_sizes(result)) > 2
        assert result.summary["oom_events"] == 0
        assert predictions(result) == predictions(plain)

    def test_one_that_is_far_too_low_costs_a_split_and_nothing_else(
        self, asking: Callable[..., EvalRequest], tmp_path: Path, plain: EvalResult
    ) -> None:
        limit = round(4 * bytes_a_sample(plain))
        result = evaluate_from(Fake(each=1), asking(memory_limit=limit, limit=32), tmp_path / "run")
        assert result.summary["oom_events"] > 0
        assert result.summary["num_failed"] == 0
        assert result.summary["peak_reserved_bytes"] <= limit
        assert predictions(result) == predictions(plain)[:32]

    def test_one_that_cannot_be_made_costs_a_line(
        self, asking: Callable[..., EvalRequest], tmp_path: Path, plain: EvalResult
    ) -> None:
        result = evaluate_from(untraceable, asking(), tmp_path / "run")
        assert result.notes == ("started without a forecast, since it is a test",)
        assert result.summary["plan_seconds"] >= 1.5
        assert batch_sizes(result)[0] == 2
        assert result.plan is not None
        assert "forecast" not in result.plan.reason
        assert predictions(result) == predictions(plain)


def open_on(model: Path | str, data: Path, **settings: Any) -> EvaluationSetup:
    return open_setup(EvalRequest(model=str(model), data=str(data), device="cpu", **settings))


def choices(folder: Path) -> Path:
    rows = [{"question": "what is w1", "choices": ["w2 w3", "w4", "w5"], "answer": 0} for _ in range(12)]
    return write_lines(folder / "choices.jsonl", rows)


def texts(folder: Path) -> Path:
    return write_lines(folder / "texts.jsonl", [{"text": "w1 " * (n + 1), "label": n % 2} for n in range(12)])


def pictures(folder: Path) -> Path:
    for number in range(10):
        place = folder / "pictures" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numpy.full((40, 40, 3), number, dtype=numpy.uint8)).save(place / f"{number}.png")
    return folder / "pictures"


class TestTracing:
    """The real tracer, for a card that is not here."""

    @pytest.mark.parametrize(
        "kind",
        [
            "language_model",
            "seq2seq_model",
            "vision_language_model",
            "choice",
            "seq2seq choice",
            "text_classifier",
            "image_classifier",
        ],
    )
    def test_every_task_is_traced_and_left_as_it_was(
        self, kind: str, request: pytest.FixtureRequest, tmp_path: Path, questions: Path, picture_questions: Path
    ) -> None:
        data = {
            "vision_language_model": lambda: picture_questions,
            "choice": lambda: choices(tmp_path),
            "seq2seq choice": lambda: choices(tmp_path),
            "text_classifier": lambda: texts(tmp_path),
            "image_classifier": lambda: pictures(tmp_path),
        }.get(kind, lambda: questions)()
        model = {"choice": "language_model", "seq2seq choice": "seq2seq_model"}.get(kind, kind)
        settings = {} if kind.endswith(("choice", "classifier")) else {"max_new_tokens": 12}
        setup = open_on(request.getfixturevalue(model), data, **settings)
        before = vars(setup.task).copy(), list(setup.task.notes), torch.get_rng_state()
        items = range(len(setup.costs))
        start = pretended(setup, items, 40 * 2**30)
        assert start is not None
        assert start.note is None
        assert start.bytes is not None
        assert start.bytes.item_cost == max(setup.costs)
        sizes, reserved = zip(*start.bytes.points, strict=True)
        assert sizes[:2] == (2, 8)
        assert sum(parameter.nbytes for parameter in setup.model.module.parameters()) < reserved[0] <= reserved[-1]
        assert (vars(setup.task), setup.task.notes) == before[:2]
        assert torch.equal(torch.get_rng_state(), before[2])
        assert not torch.nn.modules.module._global_forward_pre_hooks
        prepared = [setup.task.prepare(item) for item in items]
        assert len(setup.task.launch(items, prepared).result()) == len(items)  # and it runs for real as before

    def test_longer_prompts_and_more_samples_take_more(self, endless_model: Path, tmp_path: Path) -> None:
        rows = [{"question": "w1 " * length, "answer": "1"} for length in (10, 280)]
        setup = open_on(endless_model, write_lines(tmp_path / "data.jsonl", rows), max_new_tokens=30)
        wide = dataclasses.replace(setup, costs=(setup.costs[0], setup.costs[1]))
        short, long = (pretended(wide, [item] * 2**14, 2**40) for item in (0, 1))
        assert short is not None
        assert long is not None
        assert short.bytes is not None
        assert long.bytes is not None
        assert short.bytes.points[-1][1] > 1.5 * short.bytes.points[0][1]
        assert long.bytes.points[-1][1] > 5 * short.bytes.points[-1][1]

    def test_an_evaluation_starts_from_its_own_trace(
        self, asking: Callable[..., EvalRequest], tmp_path: Path, plain: EvalResult
    ) -> None:
        result = evaluate_from(pretended, asking(), tmp_path / "run")
        assert result.notes == ()
        assert batch_sizes(result)[0] > 2
        assert result.plan is not None
        assert "forecast" in result.plan.reason
        assert predictions(result) == predictions(plain)

    def test_the_costliest_sample_that_cannot_be_used_is_passed_over(self, endless_model: Path, tmp_path: Path) -> None:
        rows = [{"question": "w1 " * length, "answer": "1"} for length in (400, 20, 10)]  # 320 positions
        setup = open_on(endless_model, write_lines(tmp_path / "data.jsonl", rows), max_new_tokens=12)
        start = pretended(setup, range(3), 2**30)
        assert start is not None
        assert start.bytes is not None
        assert start.bytes.item_cost == 32
        assert pretended(setup, [0], 2**30) is None

    def test_a_trace_that_takes_too_long_is_given_up(
        self, asking: Callable[..., EvalRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LONGEST_TRACE_SECONDS", 0.0)
        result = evaluate_from(pretended, asking(limit=8), tmp_path / "run")
        line = "started without a forecast, since the step cannot be traced: it takes more than 0 seconds"
        assert result.notes == (line,)
        assert result.summary["num_failed"] == 0

    def test_a_model_that_cannot_be_traced_is_reported_in_one_line(self, asking: Callable[..., EvalRequest]) -> None:
        setup = open_setup(asking())

        def through_numpy(*_: Any) -> None:
            raise TypeError("not with these tensors\nat all")

        setup.model.module.model.layers[0].register_forward_pre_hook(through_numpy)
        start = pretended(setup, range(8), 2**30)
        assert start is not None
        assert start.bytes is None
        assert start.note is not None
        assert start.note.endswith("cannot be traced: TypeError: not with these tensors")

    def test_a_function_has_nothing_to_trace(self, tmp_path: Path) -> None:
        setup = open_on(shout(tmp_path), write_words(tmp_path / "words.jsonl"))
        assert pretended(setup, range(20), 2**30) is None
        assert not is_worth_a_trace(setup, range(20))


class TestWhetherItPays:
    @pytest.mark.parametrize(
        ("samples", "new_tokens", "pays"),
        [
            (96, 256, False),  # a batch or two of a climb
            (200, 256, True),
            (200, 64, False),  # short answers: a small batch is soon over
            (100_000, 64, False),
            (100_000, 128, True),
            (1, 256, False),
        ],
    )
    def test_generation_pays_for_every_small_batch_with_all_its_tokens(
        self, endless_model: Path, questions: Path, samples: int, new_tokens: int, pays: bool
    ) -> None:
        setup = open_on(endless_model, questions, max_new_tokens=new_tokens)
        setup = dataclasses.replace(setup, costs=(300,) * samples)
        assert is_worth_a_trace(setup, range(samples)) is pays

    def test_a_forward_only_where_the_run_is_sure_to_be_long(self, language_model: Path, tmp_path: Path) -> None:
        setup = open_on(language_model, choices(tmp_path))
        with torch.device("meta"):
            large = torch.nn.Linear(80_000, 100_000)  # 8 B
        many = dataclasses.replace(setup, costs=(500,) * 10_000)
        heavy = dataclasses.replace(many, model=dataclasses.replace(setup.model, module=large))
        assert not is_worth_a_trace(many, range(10_000))
        assert is_worth_a_trace(heavy, range(10_000))
        assert not is_worth_a_trace(heavy, range(100))
        assert not is_worth_a_trace(heavy, [])


def test_a_forecast_on_data_knows_the_keys_and_values_of_a_generation(endless_model: Path, prompts: Path) -> None:
    """`brim forecast -d` and `brim find -d` trace the model as it will generate, not the task around it."""
    request = EvalRequest(
        model=str(endless_model), data=str(prompts), device="cpu", dtype="float32", max_new_tokens=TOKENS
    )
    workload = DataWorkload(open_setup(request))
    forecaster = Forecaster(TracedWorkload(workload), find_gpu("a100-80gb"))
    forecast = forecaster.at(8)
    assert forecast.breakdown["kv_cache"] > 0
    assert not forecast.approximate
    assert forecaster.largest_allowed == workload.largest_size() == 96
