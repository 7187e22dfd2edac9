"""`brim ood` from end to end: data sets × encoders × methods × seeds, each cell once, one table.

A finished cell is written to the journal at once, so a resumed run makes only the cells that are missing. Knows neither
terminals nor flags.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.comparing.record import Comparison, kept_comparison
from brim.comparing.rounds import RoundRules
from brim.comparing.sizes import ComparedSizes, measure_sizes
from brim.errors import RequestError
from brim.memory.devices import device_uuid
from brim.memory.environment import environment_facts
from brim.models.placement import resolve_device, resolve_precision
from brim.molecules.cells import CellMaker
from brim.molecules.compare import HeadTrials
from brim.molecules.data_sets import FEATURES, FeatureSet, Source, open_pair, open_splits
from brim.molecules.earlier_sizes import with_earlier_sizes
from brim.molecules.encoders import MoleculeEncoder, encoder_knobs, knobs_for, load_encoder
from brim.molecules.encoding import EncodedMolecules, encode_molecules
from brim.molecules.heads import OodListener
from brim.molecules.losses import loss_of
from brim.molecules.table import CellKey, ResultCell, cells_csv, summarise, table_csv, table_rows
from brim.monitor.live import LiveRun, both
from brim.monitor.sampler import Sampler
from brim.ranks.world import current_world
from brim.settings.caller import given, named, resume_with
from brim.settings.molecule_settings import OodCommand, OodRequest
from brim.storage.files import write_atomic, write_json
from brim.storage.fingerprint import combined_fingerprint
from brim.storage.journal import Journal
from brim.storage.run_folder import check_no_other_run, write_run
from brim.storage.run_lock import locked_folder
from brim.workloads.optimizers import optimizer_class

__all__ = ["OodResult", "compare_ood", "ood"]

JOURNAL, LABEL = "cells.jsonl", "journal.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OodResult:
    """A finished run: its summary and folder, and every cell of the table."""

    summary: dict[str, Any]
    folder: Path
    cells: tuple[ResultCell, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> list[ResultCell]:
        """Cells without metrics."""
        return [cell for cell in self.cells if cell.error is not None]


def ood(settings: OodCommand, *, listener: OodListener | None = None) -> OodResult:
    """Train energy heads and compare them with baselines; leave the run's folder behind. As `brim ood`.

    A run whose loss is not a number has its error in its cell; the others continue.
    """
    watcher = listener or OodListener()
    request = _checked(settings.request)
    with (
        locked_folder(settings.output, command="train", note=watcher.note) as folder,
        LiveRun(folder, "ood") as live,
    ):
        _check_contents(folder, resume=request.resume)
        run = _OodRun(request, _open_sources(request), folder, both(OodListener, _LiveCells(live), watcher))
        live.update(device=str(run.device), device_uuid=device_uuid(run.device))
        try:
            return run.run()
        except KeyboardInterrupt:
            if (folder / JOURNAL).exists():
                watcher.note(f"finished cells are kept: continue with {resume_with(folder)}")
            raise


def compare_ood(
    settings: OodCommand, *, listener: OodListener | None = None, rules: RoundRules | None = None
) -> Comparison:
    """Compare effective batches on the first data set, encoder and loss; leave the comparison's folder behind."""
    watcher = listener or OodListener()
    request = _checked(settings.request)
    asked = {**request.to_json(), "compare_batch": list(settings.compare_batch)}
    with kept_comparison(settings.output, command="ood --compare-batch", request=asked, note=watcher.note) as draft:
        sources = _open_sources(request)
        run = _OodRun(request, sources, draft.folder, watcher)
        encoder = sources[0].encoders(request.encoders)[0]
        features = run.features(sources[0], encoder)
        if len(sources) * len(sources[0].encoders(request.encoders)) * len(request.losses) > 1:
            run.note(f"sizes are compared on {sources[0].name}, {encoder}, {request.losses[0]} alone")
        draft.environment = run.environment()
        trials = HeadTrials(features, request, device=run.device, note=run.note)
        table = ComparedSizes(settings.compare_batch, rules=rules, derive=trials.times, more_samples="more epochs")
        draft.table, draft.notes = table, run.notes
        measure_sizes(table, trials.measure, watcher.note)
    return draft.comparison()


def _checked(request: OodRequest) -> OodRequest:
    """The request with the sizes of its plan, once it is known to be possible here."""
    if current_world().size > 1:
        raise RequestError("brim ood runs in one process, with its seeds stacked; start it without torchrun")
    _check_names(request)
    return with_earlier_sizes(request)


def _check_names(request: OodRequest) -> None:
    """Checks that settings/ cannot make: the knobs of the encoders, dtypes and optimizers of torch."""
    known = {knob.name for name in request.encoders for knob in encoder_knobs(name)}
    for knob in request.knobs:
        if knob not in known:
            has = f"they have {', '.join(sorted(known))}" if known else "they have none"
            raise RequestError(f"{named('knob')} {knob}: the encoders asked for have no such knob ({has})")
    optimizer_class(request.optimizer)
    resolve_precision(request.dtype, "train")
    for name in request.losses:
        loss_of(request, name)  # checks beta, margin and the rest


def _check_contents(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that holds another run, or cells without `resume`, or nothing to resume. Loads no encoder."""
    check_no_other_run(folder, "train dpo")
    path = folder / JOURNAL
    if resume and not path.exists():
        raise RequestError(f"{named('resume')}: {folder} holds no {JOURNAL} to resume; leave {named('resume')} out")
    if not resume and path.exists() and path.stat().st_size > 0:
        raise RequestError(
            f"{given('output', folder)}: it holds the results of a run; continue it with {named('resume')}, or choose "
            "another folder"
        )


def _journal_problem(entry: Mapping[str, Any]) -> str | None:
    """Why a line of the journal is not a cell; None: it is."""
    try:
        cell = ResultCell.from_json(entry)
    except TypeError:
        return "not a cell of the table"
    known = (
        all(isinstance(name, str) for name in (cell.data, cell.encoder, cell.method))
        and isinstance(cell.seed, int | None)
        and isinstance(cell.metrics, dict | None)
        and isinstance(cell.details, dict)
    )
    return None if known else "not a cell of the table"


def _open_sources(request: OodRequest) -> list[Source]:
    """Every data set, read and checked before anything is encoded."""
    sources: list[Source] = []
    for text in request.data:
        path = Path(text)
        if path.name.lower().removesuffix(".gz").endswith(".json"):
            sources.append(open_splits(path, seed=request.split_seed, limit=request.limit))
        else:
            raise RequestError(
                f"{given('data', text)}: it must be a .json file of splits; single files go to {named('id')} and "
                f"{named('ood')}"
            )
    if request.id is not None and request.ood is not None:
        sources.append(
            open_pair(
                Path(request.id), Path(request.ood), seed=request.split_seed, limit=request.limit,
                mapping=request.mapping,
            )
        )  # fmt: skip
    names = [source.name for source in sources]
    for source in sources:
        if names.count(source.name) > 1:
            raise RequestError(f"two data sets are called {source.name}; rename one of the files")
    return sources


class _LiveCells(OodListener):
    """Publishes the cells of the table; what is encoded or trained just now is the `part`."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._cells = 0

    def planned(self, total: int, done: int) -> None:
        """How much there is to do."""
        self._cells = done
        self._live.update(state="running", done=done, total=total, unit="cells")

    def encoding(self, *, data: str, encoder: str, done: int, total: int) -> None:
        """How far the encoder is."""
        self._live.update(label=f"{encoder} on {data}", part={"done": done, "total": total, "unit": "molecules"})

    def training(self, *, data: str, encoder: str, method: str, runs: int) -> None:
        """What is trained."""
        del encoder, runs
        self._live.update(label=f"{method} on {data}", part=None)

    def epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        """How far the training is."""
        del runs, stopped
        self._live.update(part={"done": epoch, "total": epochs, "unit": "epochs"})

    def cells(self, cells: list[ResultCell]) -> None:
        """More of them."""
        self._cells += len(cells)
        self._live.update(done=self._cells, part=None)

    def note(self, line: str) -> None:
        """The last one is shown."""
        self._live.update(note=line)


class _OodRun:
    def __init__(self, request: OodRequest, sources: Sequence[Source], folder: Path, listener: OodListener) -> None:
        self.request = request
        self.sources = sources
        self.folder = folder
        self.listener = listener
        self.notes: list[str] = []
        self.encodings: list[dict[str, Any]] = []
        self.device = resolve_device(request.device)
        self.maker = CellMaker(request, self.device, folder, listener, self.note)
        self._encoders: dict[str, MoleculeEncoder] = {}
        self._done: dict[CellKey, ResultCell] = {}

    def run(self) -> OodResult:
        started_at, started = datetime.datetime.now(datetime.UTC), time.perf_counter()
        if not self.request.resume:  # a missing package is an error before anything is written
            for name in dict.fromkeys(name for one in self.sources for name in one.encoders(self.request.encoders)):
                if name != FEATURES:
                    self._encoder(name)
        fingerprint = self._fingerprint()
        monitor = Sampler(self.folder / "monitor.csv", device_uuid=device_uuid(self.device))
        journal = Journal(
            self.folder / JOURNAL,
            fingerprint=fingerprint,
            resume=self.request.resume,
            label=self.folder / LABEL,
            check=_journal_problem,
        )
        with journal, monitor:
            keys = self._make_cells(journal)
        cells = tuple(self._done[key] for key in keys)
        summary = summarise(
            self.request, cells, encodings=self.encodings, trainings=self.maker.trainings, notes=self.notes,
            failures={source.name: source.failures for source in self.sources if source.failures},
            monitor=monitor.summary(), seconds=time.perf_counter() - started,
        )  # fmt: skip
        self._write(cells, summary, fingerprint, started_at)
        return OodResult(summary=summary, folder=self.folder, cells=cells, notes=tuple(self.notes))

    def _make_cells(self, journal: Journal) -> list[CellKey]:
        """Read the cells that are done, make the others; returns all of them in the order of the table."""
        for note in journal.notes:
            self.note(note)
        cells = {cell.key: cell for cell in map(ResultCell.from_json, journal.entries)}  # the last of each counts
        self._done = {key: cell for key, cell in cells.items() if cell.error is None}
        wanted = [
            (source, encoder, self.maker.wanted(source.name, encoder))
            for source in self.sources
            for encoder in source.encoders(self.request.encoders)
        ]
        everything = [key for _, _, keys in wanted for key in keys]
        self.listener.planned(len(everything), sum(key in self._done for key in everything))
        for source, encoder, keys in wanted:
            missing = [key for key in keys if key not in self._done]
            if not missing:
                continue
            for made in self.maker.make(self.features(source, encoder), missing):
                journal.append(cell.to_json() for cell in made)
                self._done.update((cell.key, cell) for cell in made)
                self.listener.cells(made)
        return everything

    def features(self, source: Source, encoder: str) -> FeatureSet:
        """The features of one data set under one encoder, and notes on molecules without any."""
        features = source.features(encoder, lambda name, smiles: self._encode(source.name, name, smiles))
        for note in source.notes:
            self.note(note)
        if source.failures:
            place, why = next(iter(source.failures.items()))
            more = f" and {len(source.failures) - 1:,} more" if len(source.failures) > 1 else ""
            self.note(f"left out: {place}: {why}{more}")
        self.listener.opened(data=source.name, encoder=encoder, counts=features.counts(), width=features.width)
        return features

    def _encode(self, data: str, name: str, smiles: Sequence[str]) -> EncodedMolecules:
        journal = self.folder / f"encoding-{data}-{name}.jsonl"
        encoded = encode_molecules(
            smiles,
            self._encoder(name),
            memory_limit=self.request.memory_limit,
            journal=journal,
            resume=self.request.resume and journal.exists(),
            use_cache=self.request.use_cache,
            on_batch=lambda done: self.listener.encoding(data=data, encoder=name, done=done, total=len(smiles)),
        )
        for note in encoded.notes:
            self.note(note)
        journal.unlink(missing_ok=True)
        self.encodings.append({"data": data, "encoder": name, **encoded.figures.to_json()})
        return encoded

    def _encoder(self, name: str) -> MoleculeEncoder:
        if name not in self._encoders:
            knobs = knobs_for(name, self.request.knobs)
            self._encoders[name] = load_encoder(name, knobs, device=self.request.device)
        return self._encoders[name]

    def environment(self) -> dict[str, Any]:
        """Versions and switches of this machine, as plain JSON values."""
        found: dict[str, Any] = json.loads(json.dumps(environment_facts(self.device), default=str))
        return found

    def _fingerprint(self) -> str:
        parts: dict[str, dict[str, Any]] = {"settings": self.request.settings_that_matter()}
        for source in self.sources:
            parts[source.name.replace(" ", "-").replace(":", "-")] = source.identity()
        return combined_fingerprint(parts)

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)
            self.listener.note(line)

    def _write(
        self, cells: Sequence[ResultCell], summary: dict[str, Any], fingerprint: str, started_at: datetime.datetime
    ) -> None:
        rows = table_rows(cells)
        write_atomic(self.folder / "results.csv", cells_csv(cells))
        write_atomic(self.folder / "table.csv", table_csv(rows))
        write_json(self.folder / "table.json", {"schema": "brim.table/1", "rows": rows})
        write_run(
            self.folder,
            kind="train",
            request={**self.request.to_json(), "command": "train dpo"},
            environment=self.environment(),
            plan=None,
            summary={**summary, "fingerprint": fingerprint},
            started_at=started_at,
        )
