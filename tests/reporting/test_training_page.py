"""The pages of trainings: what they say, what is folded for the screen, and that a browser draws them whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from brim.advice.run_reader import open_run
from brim.reporting.base import Page, Section
from brim.reporting.drawing import draw
from brim.reporting.kinds.training import batch_gain_rows, main_metric
from brim.reporting.kinds.training_files import (
    MOST_EVENTS,
    MOST_SPANS,
    MOST_STRETCHES,
    digest_steps,
    samples_to_reach,
    schedule_rows,
    smoothed,
)
from brim.reporting.write import comparison_of, page_of
from tests.reported_runs import write_evaluation
from tests.reporting.chromium import Chromium
from tests.reporting.test_pages_in_chromium import MARKS
from tests.reporting.trained_pages import TRAINED_PAGES
from tests.reporting.trained_runs import (
    GROWS_AT,
    epoch_lines,
    preference_cells,
    step_lines,
    training_summary,
    write_preference,
    write_seeds,
    write_training,
)

Pages = dict[str, Path]


def page(folder: Path) -> Page:
    return page_of(open_run(folder))


def section(of: Page, title: str) -> Section:
    return next(one for one in of.sections if one.title == title)


def cells(of: Section) -> list[list[str]]:
    assert of.table is not None
    return [[cell.text for cell in row] for row in of.table.cells()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a whole training, made once."""
    return page(write_training(tmp_path_factory.mktemp("trained")))


@pytest.fixture(scope="module")
def preferred(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a whole preference training, made once."""
    return page(write_preference(tmp_path_factory.mktemp("preferred")))


def compare(*folders: Path) -> tuple[dict[str, Any], Page]:
    runs = [open_run(folder) for folder in folders]
    return comparison_of(runs)


# --- rows


def steps(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"step": n, "epoch": 0, "samples": 8 * n, "loss": 1.0, "effective_batch": 8, "micro_batches": [4, 4], **more}
        for n in range(1, count + 1)
    ]


def test_a_million_steps_become_a_few_hundred_spans_without_loss() -> None:
    lines = [{**line, "loss": float(line["step"]), "seconds": 0.5} for line in steps(10_000)]
    digest = digest_steps(lines)
    assert MOST_SPANS <= len(digest.spans) <= 2 * MOST_SPANS
    assert sum(span.steps for span in digest.spans) == digest.num_steps == 10_000
    assert digest.spans[-1].samples == 80_000
    assert sum(span.seconds for span in digest.spans) == pytest.approx(5_000)
    assert sum(span.loss_sum for span in digest.spans) / sum(span.weight for span in digest.spans) == 5_000.5
    starts = [span.start_samples for span in digest.spans]
    assert starts[1:] == [span.samples for span in digest.spans[:-1]]


def test_a_short_last_window_keeps_the_size_and_weighs_by_samples() -> None:
    lines = [*steps(3), {"step": 4, "samples": 26, "loss": 9.0, "effective_batch": 2, "micro_batches": [2]}]
    lines += [{**line, "step": line["step"] + 4, "samples": line["samples"] + 26} for line in steps(3)]
    digest = digest_steps(lines)
    rows = schedule_rows(digest.spans)
    assert [[row[field] for field in ("span", "effective", "micro", "accumulation")] for row in rows] == [
        ["1 to 7", "8", "4", "2"]
    ]
    whole = sum(span.loss_sum for span in digest.spans) / sum(span.weight for span in digest.spans)
    assert whole == pytest.approx((48 * 1.0 + 2 * 9.0) / 50)


def test_oom_events_are_found_where_the_count_rises() -> None:
    lines = steps(6)
    for line, count in zip(lines, (0, 2, 2, 3, 0, 1), strict=True):
        line["oom_events"] = count
    digest = digest_steps(lines)
    assert [(one["step"], one["times"], one["micro"]) for one in digest.events] == [(2, 2, 4), (4, 1, 4), (6, 1, 4)]
    assert digest.num_events == 4
    many = digest_steps({**line, "oom_events": line["step"]} for line in steps(1_000))
    assert (len(many.events), many.num_events) == (MOST_EVENTS, 1_000)


def test_sizes_that_change_with_every_step_still_make_a_short_table() -> None:
    lines = [{**line, "micro_batches": [1 + line["step"] % 7, 1]} for line in steps(300)]
    rows = schedule_rows(digest_steps(lines).spans)
    assert len(rows) <= MOST_STRETCHES
    assert rows[0]["micro"] == "1 to 7"
    assert (rows[0]["span"].split()[0], rows[-1]["span"].split()[-1]) == ("1", "300")


@pytest.mark.parametrize("junk", [None, "x", [], {}, True, -1, float("nan")], ids=repr)
def test_a_line_of_nonsense_among_the_steps_is_left_out(junk: Any) -> None:
    bad = dict.fromkeys(steps(1)[0], junk)
    digest = digest_steps([*steps(2), bad, *[{**line, "samples": line["samples"] + 16} for line in steps(2)]])
    assert digest.num_steps == 4
    assert all(mean == 1.0 for _, mean in smoothed(digest.spans))


def test_a_running_mean_is_unbiased_at_both_ends() -> None:
    lines = [{**line, "loss": 0.0 if line["step"] > 1 else 100.0} for line in steps(200)]
    lines[-1]["loss"] = 10.0
    means = [mean for _, mean in smoothed(digest_steps(lines).spans)]
    assert means[0] == 100.0
    assert 0 < means[-1] < 2.5
    assert samples_to_reach(digest_steps(lines).spans, 0.0) is not None
    assert samples_to_reach(digest_steps(lines).spans, -1.0) is None


def test_a_batch_of_the_noise_scale_brings_half_and_twice_of_it_two_thirds() -> None:
    rows = {row["batch"]: row for row in batch_gain_rows(64.0, 64.0)}
    assert rows[64]["used"]
    assert rows[64]["progress"] == 0.5
    assert rows[128]["progress"] == pytest.approx(2 / 3)
    assert rows[128]["samples"] == 1.5
    assert [row["batch"] for row in batch_gain_rows(64.0, 1.0)] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("monitor", "name"),
    [("auto", "top1"), (None, "top1"), ("loss", "val_loss"), ("top5", "top5"), ("val_top5", "top5")],
)
def test_the_headline_shows_the_figure_that_decides_the_run(monitor: str | None, name: str) -> None:
    rows = [{"name": one} for one in ("train_loss", "val_loss", "top1", "top5")]
    chosen = main_metric(rows, monitor)
    assert chosen is not None
    assert chosen["name"] == name
    assert main_metric(rows[:1], monitor) == rows[0]
    assert main_metric([], monitor) is None


# --- the page of a training


def test_a_training_page_shows_its_figure_and_micro_batches(trained: Page) -> None:
    made = trained
    assert made.title == "Training of r3d_18"
    assert made.subtitle == "on UCF101, classify; 108,000 samples in 1 h 42 min"
    assert made.headline == "top1: 0.783 after epoch 12 of 12"
    facts = {fact.name: (fact.value, fact.note) for fact in made.facts}
    assert facts["effective batch"] == ("512", "16 × 32 samples")
    assert facts["samples stop helping at"] == ("batch 688", "")
    assert facts["reserved memory"] == ("18.0 GiB", "peak")
    assert "ran out 2 times" in made.remarks[0]
    assert made.warnings == ()
    assert section(made, "How to repeat it").command == "brim train ucf101.yaml --effective-batch auto"


def test_every_figure_of_a_training_is_shown_and_described(trained: Page) -> None:
    made = trained
    said = {chart.title: chart.caption for one in made.sections for chart in one.charts}
    assert list(said) == [
        "Loss against samples", "top1 and top5 on the validation data", "Learning rate against samples",
        "Effective batch and micro-batch (samples)", "Micro-batches in a step (accumulation)",
        "Throughput by epoch (samples/s)", "Peak reserved memory by epoch (GiB)", "Reserved memory (GiB)",
        "Throughput (samples/s)", "GPU use", "GPU memory in use (GiB)", "GPU power (W)",
    ]  # fmt: skip
    assert "validation from 1.83 at 9,000 to 0.621 at 108,000" in said["Loss against samples"]
    assert "top1 from 0.271 at 1 to 0.783 at 12" in said["top1 and top5 on the validation data"]
    assert "Memory ran out at 22,608 and 22,864 samples." in said["Effective batch and micro-batch (samples)"]


def test_a_constant_learning_rate_has_no_chart(tmp_path: Path) -> None:
    lines = [{**line, "learning_rate": 1e-3} for line in step_lines()[:40]]
    rate = section(page(write_training(tmp_path, steps=lines, epochs=epoch_lines(lines))), "Learning rate")
    assert rate.charts == ()
    assert "0.00100" in rate.paragraphs[-1]
    assert cells(rate)


def test_the_sizes_of_a_training_are_tabled_stretch_by_stretch(trained: Page) -> None:
    made = section(trained, "Batch and micro-batches")
    assert [row[2:] for row in cells(made)] == [
        ["256", "32", "8", "0"], ["256", "16", "16", "1"], ["256", "8", "32", "1"], ["256", "32", "8", "0"],
        ["512", "32", "16", "0"],
    ]  # fmt: skip
    assert f"From sample {GROWS_AT:,} on the effective batch is 512" in " ".join(made.paragraphs)
    assert "nothing was skipped and nothing counted twice" in " ".join(made.paragraphs)


def test_the_noise_scale_is_described_and_unknown_parts_are_noted(tmp_path: Path, trained: Page) -> None:
    lines = step_lines()[:40]
    rows = epoch_lines(lines)
    known = section(trained, "Gradient noise scale")
    assert "stop helping beyond a batch of about 688 (61 measurements)" in known.paragraphs[0]
    assert "At this run's 512 a step brings 42.7 %" in known.paragraphs[0]
    assert [row[0] for row in cells(known)] == ["128", "256", "512", "1,024", "2,048", "4,096"]
    few = training_summary(lines, rows, noise_scale={"noise_scale": None, "useful_batch": None, "measurements": 3})
    unknown = section(page(write_training(tmp_path / "b", steps=lines, summary=few)), "Gradient noise scale")
    assert unknown.paragraphs == ("Not known: 3 measurements, too few or too noisy for a figure.",)
    none = page(write_training(tmp_path / "c", steps=lines, summary=training_summary(lines, rows, noise_scale=None)))
    assert "Gradient noise scale" not in [one.title for one in none.sections]


def test_seeds_are_shown_each_where_there_are_several(tmp_path: Path, trained: Page) -> None:
    lines = step_lines()[:40]
    rows = epoch_lines(lines)
    several = {"top1": {"mean": 0.8, "deviation": 0.1, "values": [0.7, 0.9]}}
    summary = training_summary(lines, rows, metrics=several, seeds=[3, 8])
    made = page(write_training(tmp_path, steps=lines, epochs=rows, summary=summary))
    assert made.headline.startswith("top1: 0.800 ± 0.100")
    seeds = section(made, "Seeds")
    assert seeds.table is not None
    assert [column.title for column in seeds.table.columns] == ["metric", "mean", "deviation", "seed 3", "seed 8"]
    assert cells(seeds) == [["top1", "0.800", "0.100", "0.700", "0.900"]]
    assert "Seeds" not in [one.title for one in trained.sections]


def test_every_seed_has_a_curve_and_a_failed_seed_is_reported(tmp_path: Path) -> None:
    made = page(write_seeds(tmp_path))
    assert made.headline == "top1: 0.720 ± 0.0200 over 3 seeds"
    assert made.warnings[0].startswith("1 run failed, and the figures are without: seed-2-lr-0.0003: the loss became")
    runs = section(made, "Runs")
    assert [chart.title for chart in runs.charts] == [
        "Training loss of each run", "Validation loss of each run", "Top1 of each run", "Top5 of each run",
    ]  # fmt: skip
    assert [key.label for key in runs.charts[0].keys] == ["learning rate 0.00100", "learning rate 0.000300"]
    assert "learning rate 0.00100 from " in runs.charts[0].caption
    assert "Means of 3 runs" in runs.charts[0].caption
    drawn = json.dumps(draw(runs.charts[0]))
    assert "learning rate 0.00100: seed-2-lr-0.001" in drawn
    assert "seed-2-lr-0.0003" not in drawn
    assert [row[0] for row in cells(runs)] == [
        f"seed-{seed}-lr-{rate}" for rate in ("0.001", "0.0003") for seed in range(3)
    ]
    assert "Runs" not in [one.title for one in page(write_training(tmp_path / "one")).sections]


@pytest.mark.parametrize("junk", [None, "x", 3, {}, [None, 3, "x"], [{}], [{"name": 1, "folder": "../../x"}]], ids=repr)
def test_nonsense_among_the_runs_still_makes_a_page(tmp_path: Path, junk: Any) -> None:
    lines = step_lines()[:5]
    summary = training_summary(lines, epoch_lines(lines), runs=junk, errors=junk)
    assert len(page(write_training(tmp_path, steps=lines, summary=summary)).sections) >= 6


def test_problems_are_reported_first(tmp_path: Path) -> None:
    lines = step_lines()
    rows = epoch_lines(lines)
    write_training(tmp_path, summary=training_summary(lines, rows, skipped_steps=3, stopped_early=True, oom_events=5))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 999, "sam')
    made = page(tmp_path)
    assert made.warnings == (
        "3 steps had gradients that are not finite and left the weights as they were.",
        "1 line of steps.jsonl could not be read.",
    )
    assert made.remarks[0].startswith("Stopped early, after 12 epochs")
    assert "It ran out 3 times in validation." in section(made, "Batch and micro-batches").paragraphs


def test_a_size_that_was_not_measured_is_not_drawn_but_tabled(tmp_path: Path) -> None:
    search = section(page(TRAINED_PAGES["short_training"](tmp_path).parent), "Micro-batch search")
    assert search.charts == ()
    assert search.table_open
    assert [row[0] for row in cells(search)] == ["2", "4"]


def test_a_training_started_from_python_shows_how_to_repeat_it(tmp_path: Path) -> None:
    write_training(tmp_path)
    document = json.loads((tmp_path / "run.json").read_text())
    del document["request"]["argv"]
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert section(page(tmp_path), "How to repeat it").command == "brim train ucf101.yaml"
    document["request"]["file"] = None
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert section(page(tmp_path), "How to repeat it").command == "brim.train(settings)"


@pytest.mark.parametrize("junk", [None, "x", [], {}, -1, 1e308, True, [None, "x", {}]], ids=repr)
def test_a_training_with_nonsense_in_its_summary_still_has_a_page(tmp_path: Path, junk: Any) -> None:
    lines = step_lines()[:5]
    summary = dict.fromkeys(training_summary(lines, epoch_lines(lines)), junk)
    write_training(tmp_path / "a", steps=lines, summary=summary, plan=dict.fromkeys(("memory", "probes", "size"), junk))
    assert len(page(tmp_path / "a").sections) >= 6
    table = preference_cells()
    names = ("metrics", "seeds", "trainings", "peaks", "molecules_left_out", "notes", "errors", "num_failed")
    write_preference(tmp_path / "b", table, **dict.fromkeys(names, junk))
    assert len(page(tmp_path / "b").sections) >= 5


def test_a_damaged_table_of_epochs_is_read_up_to_the_damage(tmp_path: Path) -> None:
    write_training(tmp_path)
    kept = (tmp_path / "epochs.csv").read_text().splitlines()
    (tmp_path / "epochs.csv").write_text("\n".join([*kept[:3], "x,y,z", "2,,nan,inf", "\0\0"]))
    assert [row[0] for row in cells(section(page(tmp_path), "Loss"))][:3] == ["1", "2", "3"]


# --- the page of a preference training


def test_a_preference_training_shows_its_auroc_and_a_better_baseline(preferred: Page) -> None:
    made = preferred
    assert made.headline == "dpo: AUROC 0.810 ± 0.008 over 10 seeds, mean of 2 data sets"
    assert made.remarks == (
        "On lbap-assay: dpo has the highest AUROC, 0.810 ± 0.008; next is mahalanobis with 0.740.",
        "On lbap-scaffold: mahalanobis has the highest AUROC, 0.780; dpo has 0.721 ± 0.009.",
    )
    assert [chart.title for chart in section(made, "Methods").charts] == ["AUROC", "AUPR", "FPR95, lower is better"]


def test_methods_whose_auroc_is_shown_as_equal_are_not_ranked(tmp_path: Path) -> None:
    cells = [
        {**cell, "metrics": {**cell["metrics"], "auroc": 1.0 if cell["method"] != "dpo" else 1.0 - 1e-9}}
        for cell in preference_cells(("easy",))
    ]
    made = page(write_preference(tmp_path, cells))
    assert made.remarks == ("On easy: dpo, mahalanobis and mc_dropout have the same AUROC, 1.000, and none is higher.",)


def test_the_table_has_methods_data_sets_deviations_and_seeds(preferred: Page) -> None:
    made = preferred
    assert cells(section(made, "Methods"))[:2] == [
        ["dpo", "lbap-assay", "morgan", "0.810 ± 0.008", "0.760 ± 0.008", "0.490 ± 0.008", "10", "0"],
        ["mahalanobis", "lbap-assay", "morgan", "0.740", "0.690", "0.560", "—", "0"],
    ]
    seeds = cells(section(made, "Seeds"))
    assert len(seeds) == 24
    assert seeds[1][:5] == ["dpo", "lbap-assay", "morgan", "1", f"{0.81 + 0.012 * math.sin(7):.3f}"]
    assert cells(section(made, "Memory")) == [["training", "2.0 GiB", "3.0 GiB"], ["evaluation", "2.0 GiB", "1.0 GiB"]]
    assert "a stack of 10 has 8.9 times the rate" in cells(section(made, "Sizes and speed"))[0]


def test_the_loss_of_every_head_is_drawn_and_its_mean(preferred: Page) -> None:
    made = section(preferred, "Loss")
    assert [chart.title for chart in made.charts] == [
        "Training loss on lbap-assay, morgan", "Training loss on lbap-scaffold, morgan",
    ]  # fmt: skip
    assert "from 0.755 at epoch 1 to " in made.charts[0].caption
    assert "dpo: seed 9" in json.dumps(draw(made.charts[0]))
    assert cells(made)[0] == ["dpo", "lbap-assay", "morgan", "0", "0.710", "0.420", "0.420"]


def test_failed_cells_and_excluded_molecules_are_reported(tmp_path: Path) -> None:
    made_cells = preference_cells(("a",), seeds=2)
    made_cells[1] |= {"metrics": None, "error": "the loss is nan at step 3"}
    left_out = {"a": {f"in.csv:{line}": "no molecule" for line in range(30)}}
    made = page(write_preference(tmp_path, made_cells, molecules_left_out=left_out))
    assert made.warnings == (
        "1 cell of 4 failed: the loss is nan at step 3",
        "30 molecules could not be read and were left out.",
    )
    assert cells(section(made, "Methods"))[0][-2:] == ["1", "1"]
    assert cells(section(made, "Seeds"))[1][-1] == "the loss is nan at step 3"
    assert len(cells(section(made, "Molecules left out"))) == 20


def test_a_cell_that_was_made_again_is_shown_once(tmp_path: Path) -> None:
    made_cells = preference_cells(("a",), seeds=2)
    first = {**made_cells[0], "metrics": None, "error": "killed"}
    write_preference(tmp_path, made_cells)
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in [first, *made_cells]) + '{"met')
    assert [row[3] for row in cells(section(page(tmp_path), "Seeds"))] == ["0", "1", "—", "—"]


# --- old and new settings


def test_two_trainings_are_laid_over_each_other_by_samples_and_by_time(tmp_path: Path) -> None:
    slow = step_lines(batch=128, grows=False, ooms=(), pace=0.5, rate=100.0)
    old = write_training(tmp_path / "old", steps=slow, epochs=epoch_lines(slow, pace=0.5))
    document, made = compare(old, write_training(tmp_path / "new"))
    first, second = document["runs"]
    assert second["samples_to_first_s_loss"] < first["samples_to_first_s_loss"] <= first["samples"]
    assert second["curve"][-1]["seconds"] < first["curve"][-1]["seconds"] / 3
    assert [chart.title for chart in section(made, "Loss of old and new settings").charts] == [
        "Training loss against samples",
        "Training loss against time",
    ]
    assert [chart.title for chart in section(made, "Validation").charts] == [
        "Validation loss against samples", "Validation top1 against samples", "Validation top5 against samples",
    ]  # fmt: skip
    facts = {fact.name: fact for fact in made.facts}
    assert (facts["effective batch"].value, facts["effective batch"].note) == ("512", "against 128")
    assert facts["samples to the same loss"].value.startswith("0.")
    assert facts["throughput"].value.startswith("4.")
    assert made.headline == "new against old"
    assert made.warnings == ()


def test_a_loss_that_the_new_settings_never_reach_is_called_that(tmp_path: Path) -> None:
    new = [{**line, "loss": line["loss"] + 1} for line in step_lines()]
    _, made = compare(write_training(tmp_path / "old"), write_training(tmp_path / "new", steps=new))
    assert cells(section(made, "Loss of old and new settings"))[1][2] == "not reached"


def test_preference_trainings_are_compared_method_by_method(tmp_path: Path) -> None:
    first = write_preference(tmp_path / "first", preference_cells(("a",)))
    second = write_preference(tmp_path / "second", preference_cells(("a", "b")))
    _, made = compare(first, second)
    rows = cells(section(made, "Methods"))
    assert rows[0][:4] == ["dpo", "a", "morgan", "AUROC"]
    assert [row[4] for row in rows if row[1] == "b"] == ["not run"] * 9
    assert "Loss of old and new settings" not in [one.title for one in made.sections]


def test_incomparable_trainings_are_shown_with_a_warning(tmp_path: Path) -> None:
    training = write_training(tmp_path / "a")
    _, made = compare(training, write_preference(tmp_path / "b"))
    assert made.warnings[1].startswith("some are preference trainings")
    other = write_training(tmp_path / "c")
    document = json.loads((other / "run.json").read_text())
    document["request"]["settings"]["model"]["type"] = "resnet18"
    (other / "run.json").write_text(json.dumps(document))
    (other / "steps.jsonl").unlink()
    _, made = compare(training, other)
    assert "a: r3d_18, c: resnet18" in made.warnings[0]
    assert made.warnings[1] == "c has no steps.jsonl, so it has no curve"
    with pytest.raises(Exception, match="of the kind eval"):
        compare(training, write_evaluation(tmp_path / "d"))


def test_trainings_on_different_data_are_warned_about_and_not_subtracted(tmp_path: Path) -> None:
    first, second = (write_training(tmp_path / name) for name in ("a", "b"))
    record = json.loads((second / "run.json").read_text())
    record["request"]["settings"]["data"]["root"] = "Kinetics"
    (second / "run.json").write_text(json.dumps(record))
    document, made = compare(first, second)
    assert document["data_differs"] is True
    assert made.warnings[0] == document["warnings"][0]
    assert "a: UCF101, b: Kinetics" in made.warnings[0]
    named = [fact.name for fact in made.facts]
    assert "throughput" in named
    assert not {"top1", "samples to the same loss"} & set(named)


# --- in a browser (that charts are drawn without a message is tested with all pages)


def test_a_training_s_charts_hold_a_mark_for_every_epoch_and_every_oom(browser: Chromium, pages: Pages) -> None:
    browser.open(pages["training"])
    marks = {chart["title"]: chart["marks"] for chart in browser.ask(MARKS)}
    assert marks["top1 and top5 on the validation data"] == 2 * 12 + 2  # points, lines
    crosses = "return document.querySelectorAll('.chart path[stroke=\"var(--bad)\"]').length"
    assert browser.ask(crosses) == 2 + 1  # OOM in training, and the size of the search that did not fit


def test_hovering_over_the_dense_curve_shows_the_step_under_the_mouse(browser: Chromium, pages: Pages) -> None:
    browser.open(pages["training"])
    place: Any = browser.ask("""
        document.querySelector('.chart').scrollIntoView();
        const points = [...document.querySelectorAll('.chart')[0].querySelectorAll('.mark-symbol.role-mark path')];
        const box = points[150].getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2];
    """)
    browser.hover(*place)
    shown = browser.ask("const box = document.getElementById('vg-tooltip-element'); return box && box.textContent")
    assert "training" in shown
    assert "samples seen" in shown
