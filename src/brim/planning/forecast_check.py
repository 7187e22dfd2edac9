"""A forecast held against one that was kept: which peaks have grown, by how much, and in which modules.

    base = read_base(Path("base.json"))
    check = compare(base, [WorkloadDocument(name="resnet18", forecasts=[…])], Allowance(fraction=0.03))
    check.ok, check.lines

Works on documents, as `brim forecast --json` prints them, so that a base of another version can be read. What is judged
is the allocated peak at every size that both have: bytes of tensors, which modules add up to. Reserved bytes jump from
size to size and are shown only. Does not know how a forecast is made, nor how a check is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from brim.errors import RequestError
from brim.planning.forecast_base import Base, Document, WorkloadDocument, sizes_of, versions
from brim.settings.caller import given, named
from brim.settings.forecast_settings import Allowance

__all__ = [
    "FAILING", "CheckedWorkload", "ComparedSize", "ForecastCheck", "ModuleChange", "Verdict", "compare",
    "fits_its_card", "judge",
]  # fmt: skip

Verdict = Literal["ok", "new", "gone", "grew", "does_not_fit", "not_comparable", "failed"]
FAILING: tuple[Verdict, ...] = ("grew", "does_not_fit", "not_comparable", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleChange:
    """A module whose bytes at the peak are others than before; a module that is new had none."""

    module: str
    base_bytes: int
    bytes: int
    parts: Mapping[str, int]  # by how many bytes each has changed

    @property
    def change_bytes(self) -> int:
        """How much more there is than before."""
        return self.bytes - self.base_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedSize:
    """One batch size on one card, before and now."""

    gpu: str
    batch_size: int
    base_bytes: int  # peak allocated
    bytes: int
    allowed_bytes: int  # by how much it may grow
    base_reserved_bytes: int
    reserved_bytes: int
    fits: bool
    modules: tuple[ModuleChange, ...] = ()  # largest growth first

    @property
    def change_bytes(self) -> int:
        """How much more there is than before."""
        return self.bytes - self.base_bytes

    @property
    def change_fraction(self) -> float:
        """The same, of the peak before."""
        return self.change_bytes / self.base_bytes if self.base_bytes else 0.0

    @property
    def grew(self) -> bool:
        """Whether it has grown by more than is allowed."""
        return self.change_bytes > self.allowed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedWorkload:
    """The verdict on a workload, and every size that it rests on."""

    name: str
    verdict: Verdict
    text: str  # why, in a sentence
    allow: str
    sizes: tuple[ComparedSize, ...] = ()
    batch_size_max: Mapping[str, tuple[int | None, int]] = dataclasses.field(default_factory=dict)  # by card: base, now

    @property
    def failed(self) -> bool:
        """Whether the check fails for it."""
        return self.verdict in FAILING

    @property
    def worst(self) -> ComparedSize | None:
        """The size that has grown most beyond what is allowed; of several alike, the largest size."""
        return max(self.sizes, key=lambda one: (one.change_bytes - one.allowed_bytes, one.batch_size), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastCheck:
    """Every workload's verdict; `against` is the base's file, None where workloads were only held to their cards."""

    lines: tuple[CheckedWorkload, ...]
    allow: str
    against: str | None = None
    base_versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[CheckedWorkload, ...]:
        """The workloads for which it fails."""
        return tuple(line for line in self.lines if line.failed)

    @property
    def ok(self) -> bool:
        """Whether it passes."""
        return not self.failed

    @property
    def document(self) -> dict[str, Any]:
        """As `--json` prints it under `check`."""
        return {
            "ok": self.ok,
            "against": self.against,
            "base_versions": dict(self.base_versions),
            "allow": self.allow,
            "workloads": [_line_document(line) for line in self.lines],
            "notes": list(self.notes),
        }


def compare(base: Base, now: Sequence[WorkloadDocument], allow: Allowance | None = None) -> ForecastCheck:
    """Every workload of both; a `RequestError` where they have nothing in common that could be compared."""
    allow = allow or Allowance()
    pairs = _paired(base, now)
    lines = [_compared(workload, before, workload.allow or allow) for workload, before in pairs]
    used = {id(before) for _, before in pairs if before is not None}
    if all(one.named for one in now):  # a single workload may be checked against a base of many
        lines += [
            CheckedWorkload(name=name, verdict="gone", text="it is in the base only", allow=str(allow))
            for name, before in base.workloads.items()
            if id(before) not in used
        ]
    if not any(line.sizes or line.verdict == "failed" for line in lines):
        raise RequestError(
            f"{given('against', base.file)}: nothing to compare; the base has {_listed(base.workloads.items())}, this "
            f"forecast {_listed((one.name, one.forecasts) for one in now)}"
        )
    notes = [*_version_notes(base), *(note for one, before in pairs for note in _setting_notes(one, before))]
    return ForecastCheck(
        lines=tuple(lines), allow=str(allow), against=base.file, base_versions=base.versions, notes=tuple(notes)
    )


def judge(now: Sequence[WorkloadDocument]) -> ForecastCheck:
    """Workloads held to their cards alone: a size that was asked for must fit."""
    lines = [_failure(one, Allowance()) or _passed(one, Allowance(), "ok", "it fits") for one in now]
    return ForecastCheck(lines=tuple(lines), allow="0")


# ------------------------------------------------------------------------------------------- one workload


def _compared(now: WorkloadDocument, before: Sequence[Document] | None, allow: Allowance) -> CheckedWorkload:
    failure = _failure(now, allow)
    if now.error is not None and failure is not None:
        return failure
    if before is None:
        return failure or _passed(now, allow, "new", "it is not in the base")
    sizes = tuple(_sizes(now.forecasts, before, allow))
    largest = _largest(now.forecasts, before)
    if failure is not None:
        return dataclasses.replace(failure, sizes=sizes, batch_size_max=largest)
    if not sizes:
        had, has = _listed([("", before)]), _listed([("", now.forecasts)])
        text = f"the base is {had}, this forecast {has}; where that is meant, write the base again with {named('save')}"
        return _passed(now, allow, "not_comparable", text)
    made = CheckedWorkload(name=now.name, verdict="ok", text="", allow=str(allow), sizes=sizes, batch_size_max=largest)
    worst = made.worst
    assert worst is not None
    if worst.grew:
        return dataclasses.replace(made, verdict="grew", text="it has grown by more than is allowed")
    return dataclasses.replace(made, text=_course(worst))


def _course(size: ComparedSize) -> str:
    if size.change_bytes > 0:
        return "it has grown within what is allowed"
    return "it has shrunk" if size.change_bytes < 0 else "it is the same"


def _failure(now: WorkloadDocument, allow: Allowance) -> CheckedWorkload | None:
    """What is wrong with a workload whatever the base says."""
    if now.error is not None:
        return _passed(now, allow, "failed", now.error)
    misfits = [one for one in now.forecasts if not fits_its_card(one)]
    if not misfits:
        return None
    one = misfits[0]
    what = "no batch size fits" if "sizes" in one else f"batch size {one['batch_size']:,} does not fit"
    cards = ", ".join(one["gpu"]["name"] for one in misfits)
    return _passed(now, allow, "does_not_fit", f"{what} {cards}")


def fits_its_card(forecast: Document) -> bool:
    """Whether the size that was asked for fits; where none was, whether any does."""
    return bool(forecast["batch_size_max"] if "sizes" in forecast else forecast["fits"])


def _passed(now: WorkloadDocument, allow: Allowance, verdict: Verdict, text: str) -> CheckedWorkload:
    return CheckedWorkload(
        name=now.name, verdict=verdict, text=text, allow=str(allow),
        batch_size_max={one["gpu"]["key"]: (None, one["batch_size_max"]) for one in now.forecasts},
    )  # fmt: skip


def _sizes(now: Sequence[Document], before: Sequence[Document], allow: Allowance) -> Iterator[ComparedSize]:
    cards = {one["gpu"]["key"]: one for one in before}
    for forecast in now:
        base = cards.get(forecast["gpu"]["key"])
        known = {} if base is None else {one["batch_size"]: one for one in sizes_of(base)}
        for size in sizes_of(forecast):
            old = known.get(size["batch_size"])
            if old is not None:
                yield ComparedSize(
                    gpu=forecast["gpu"]["key"],
                    batch_size=size["batch_size"],
                    base_bytes=old["peak_allocated_bytes"],
                    bytes=size["peak_allocated_bytes"],
                    allowed_bytes=allow.of(old["peak_allocated_bytes"]),
                    base_reserved_bytes=old["peak_reserved_bytes"],
                    reserved_bytes=size["peak_reserved_bytes"],
                    fits=bool(size["fits"]),
                    modules=_module_changes(old.get("by_module") or (), size.get("by_module") or ()),
                )


def _module_changes(before: Sequence[Document], now: Sequence[Document]) -> tuple[ModuleChange, ...]:
    """Modules with other bytes than before, to the depth that both have; largest growth first."""
    if not before or not now:
        return ()
    depth = min(max(_depth(row["module"]) for row in rows) for rows in (before, now))
    old, new = _to_depth(before, depth), _to_depth(now, depth)
    found = []
    for module in {**old, **new}:
        was, is_now = old.get(module, {}), new.get(module, {})
        parts = {part: is_now.get(part, 0) - was.get(part, 0) for part in {**was, **is_now}}
        if any(parts.values()):
            found.append(
                ModuleChange(
                    module=module, base_bytes=sum(was.values()), bytes=sum(is_now.values()),
                    parts={part: count for part, count in parts.items() if count},
                )
            )  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.change_bytes, one.module)))


def _depth(module: str) -> int:
    return 0 if not module or module.startswith("(") else module.count(".") + 1


def _to_depth(rows: Sequence[Document], depth: int) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        module = row["module"]
        parts = found.setdefault(module if module.startswith("(") else ".".join(module.split(".")[:depth]), {})
        for part, count in row["parts"].items():
            parts[part] = parts.get(part, 0) + count
    return found


def _largest(now: Sequence[Document], before: Sequence[Document]) -> dict[str, tuple[int | None, int]]:
    base = {one["gpu"]["key"]: one["batch_size_max"] for one in before}
    return {one["gpu"]["key"]: (base.get(one["gpu"]["key"]), one["batch_size_max"]) for one in now}


# ------------------------------------------------------------------------------------- pairs, notes, files


def _paired(base: Base, now: Sequence[WorkloadDocument]) -> list[tuple[WorkloadDocument, Sequence[Document] | None]]:
    return [(one, _before(base, one)) for one in now]


def _before(base: Base, now: WorkloadDocument) -> Sequence[Document] | None:
    """A workload's forecasts in the base: by its name, or if it has none, the one of its model, or the only one."""
    if now.named or now.name in base.workloads or not now.forecasts:
        return base.workloads.get(now.name)
    wanted = (now.forecasts[0].get("model"), now.forecasts[0].get("mode"))
    alike = [kept for kept in base.workloads.values() if kept and (kept[0].get("model"), kept[0].get("mode")) == wanted]
    if len(alike) == 1:
        return alike[0]
    return next(iter(base.workloads.values())) if len(base.workloads) == 1 else None


def _version_notes(base: Base) -> list[str]:
    notes = []
    for name, version in versions().items():
        before = base.versions.get(name)
        if before is not None and before != version:
            notes.append(
                f"the base was made with {name} {before}, this is {name} {version}: figures may differ for that"
            )
    return notes


def _setting_notes(now: WorkloadDocument, before: Sequence[Document] | None) -> list[str]:
    """What is not as in the base: settings, so that a difference is no surprise, and cards that are not compared."""
    if not before or not now.forecasts:
        return []
    first, notes = before[0], []
    if first.get("model") != now.forecasts[0].get("model"):
        notes.append(f"{now.name}: the base is of {first.get('model') or 'a step'}")
    old, new = _flat_settings(first), _flat_settings(now.forecasts[0])
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            notes.append(f"{now.name}: {name} was {_shown(old.get(name))}, it is {_shown(new.get(name))}")
    kinds = [("the base", first.get("approximate")), ("this forecast", now.forecasts[0].get("approximate"))]
    for (what, why), (other, fine) in (kinds, kinds[::-1]):
        if why and not fine:
            notes.append(f"{now.name}: {what} is approximate, {other} is not: {why}")
    had, has = ({one["gpu"]["key"]: None for one in forecasts} for forecasts in (before, now.forecasts))
    if set(had) & set(has):  # else nothing is compared, which is said
        notes += [f"{now.name}: {card} is not in the base" for card in has if card not in had]
        notes += [f"{now.name}: {card} is in the base only" for card in had if card not in has]
    if not any(size.get("by_module") for one in before for size in sizes_of(one)):
        notes.append(f"{now.name}: the base has no bytes by module; a file of {named('save')} has them")
    return notes


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _flat_settings(forecast: Document) -> dict[str, Any]:
    """Mode, knobs and what else the bytes depend on."""
    made = dict(forecast.get("made_for") or {})
    knobs = {**(forecast.get("knobs") or {}), **(made.pop("knobs", None) or {})}
    return {"mode": forecast.get("mode"), **made, **{name: str(value) for name, value in knobs.items()}}


def _listed(workloads: Iterable[tuple[str, Sequence[Document]]]) -> str:
    """`resnet18 at batch size 8 on t4-16gb`; of many sizes, the first and the last."""
    words = []
    for name, forecasts in workloads:
        for one in forecasts:
            sizes = [size["batch_size"] for size in sizes_of(one)]
            span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
            words.append(f"{name} at batch size {span} on {one['gpu']['key']}".strip())
    return ", ".join(words) or "nothing"


def _line_document(line: CheckedWorkload) -> dict[str, Any]:
    return {
        "name": line.name,
        "verdict": line.verdict,
        "text": line.text,
        "allow": line.allow,
        "batch_size_max": {card: {"base": before, "now": now} for card, (before, now) in line.batch_size_max.items()},
        "sizes": [_size_document(size) for size in line.sizes],
    }


def _size_document(size: ComparedSize) -> dict[str, Any]:
    plain = {name: value for name, value in dataclasses.asdict(size).items() if name != "modules"}
    modules = [{**dataclasses.asdict(one), "change_bytes": one.change_bytes} for one in size.modules]
    return {
        **plain, "change_bytes": size.change_bytes, "change_fraction": size.change_fraction, "grew": size.grew,
        "modules": modules,
    }  # fmt: skip
