"""The page of a search: the size, why, and every probe."""

from __future__ import annotations

from brim.reporting.base import Fact, Page, Section
from brim.reporting.read import Run
from brim.reporting.sections.search import plan_section
from brim.reporting.sections.settings import settings_sections
from brim.reporting.units import bytes_text, count_text, number, significant, text

__all__ = ["find_page"]


def find_page(run: Run) -> Page:
    """Headline, probes, settings."""
    plan = run.plan
    search = plan_section(plan) or Section(
        title="Batch-size search", paragraphs=("The plan came from the cache: no size was tried.",)
    )
    notes = plan.get("notes")
    lines = tuple(str(note) for note in notes) if isinstance(notes, list) else ()
    sections = (search, *((Section(title="Notes", points=lines),) if lines else ()), *settings_sections(run))
    return Page(
        title=f"Batch size for {text(run.request.get('model'))}",
        subtitle=f"{text(run.request.get('mode') or 'default')} workload on {text(plan.get('device'))}",
        headline=f"Batch size {count_text(plan.get('size'))}: {text(plan.get('reason'))}",
        facts=_facts(run),
        sections=sections,
    )


def _facts(run: Run) -> tuple[Fact, ...]:
    plan = run.plan
    memory = plan.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    probes = plan.get("probes")
    fitting = [
        probe
        for probe in (probes if isinstance(probes, list) else [])
        if isinstance(probe, dict) and probe.get("batch_size") == plan.get("size") and probe.get("verdict") == "fits"
    ]
    facts = []
    if fitting:
        facts.append(Fact(name="throughput", value=f"{significant(fitting[-1].get('samples_per_second'))} samples/s"))
        facts.append(
            Fact(name="reserved memory", value=bytes_text(fitting[-1].get("peak_reserved_bytes")), note="peak")
        )
    estimate = number(plan.get("batch_size_max_estimate"))
    largest = number(plan.get("batch_size_max"))
    note = f"about {count_text(estimate)} expected" if estimate and largest and estimate > largest else ""
    facts.append(Fact(name="largest seen to fit", value=count_text(largest), note=note))
    if number(memory.get("limit_bytes")) is not None:
        left = f"{bytes_text(memory.get('headroom_bytes'))} left" if number(memory.get("headroom_bytes")) else ""
        facts.append(Fact(name="memory limit", value=bytes_text(memory.get("limit_bytes")), note=left))
    return tuple(facts)
