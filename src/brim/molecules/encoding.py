"""Encodes molecules, each once: batches that fit, a journal to resume from, a cache by content; `brim encode`.

`brim.map` finds the batch size and keeps the journal; here is what an item is (a SMILES), how a row of features is
written in the journal (as text), and under which name the features of a list of molecules are cached.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import RequestError
from brim.molecules.encoders import MoleculeEncoder, load_encoder, smiles_problem
from brim.molecules.files import Molecules, read_arrays, read_metadata, read_smiles, write_arrays
from brim.records import BatchSizes
from brim.running.mapping import MapResult
from brim.running.mapping import map as map_items
from brim.settings.caller import given, named
from brim.settings.molecule_settings import EncodeRequest, EncodeSettings
from brim.storage.files import cache_folder
from brim.storage.fingerprint import fingerprint
from brim.storage.run_lock import locked_file

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "EncodedFile", "EncodedMolecules", "EncodingFigures", "encode", "encode_molecules", "feature_cache",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingFigures:
    """What encoding cost; a list found in the cache cost nothing."""

    molecules: int
    failed: int
    cached: bool
    resumed: int = 0
    seconds: float = 0.0
    batch_sizes: BatchSizes | None = None
    oom_events: int = 0
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        data = dataclasses.asdict(self)
        data["batch_size_used"] = None if self.batch_sizes is None else self.batch_sizes.median
        rate = (self.molecules - self.resumed) / self.seconds if self.seconds > 0 else None
        return {**data, "samples_per_second": rate}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedMolecules:
    """Features of the molecules that could be encoded, and why the others could not."""

    features: npt.NDArray[Any]  # [kept, width]
    kept: tuple[int, ...]  # places in the list that was given
    failures: dict[int, str]  # place → reason
    figures: EncodingFigures
    notes: tuple[str, ...] = ()  # on the journal


def feature_cache() -> Path:
    """Where features are kept by content."""
    return cache_folder() / "features"


def encode_molecules(
    smiles: Sequence[str],
    encoder: MoleculeEncoder,
    *,
    batch_size: int | Literal["auto"] = "auto",
    memory_limit: int | str | None = None,
    journal: Path | None = None,
    resume: bool = False,
    use_cache: bool = True,
    on_batch: Callable[[int], None] | None = None,
) -> EncodedMolecules:
    """Features of every molecule that RDKit and the encoder accept, in the order given.

    Each molecule is encoded once, also over runs that were killed, if `journal` is given and resumed. The same list
    under the same encoder is read from the cache the next time.
    """
    key = fingerprint({"encoder": encoder.identity(), "smiles": list(smiles)})
    stored = feature_cache() / f"{key}.safetensors"
    if use_cache and (found := _from_cache(stored, len(smiles))) is not None:
        return found

    def encode_batch(batch: list[str]) -> list[str | dict[str, str]]:
        problems = [smiles_problem(text) for text in batch]
        good = [text for text, problem in zip(batch, problems, strict=True) if problem is None]
        rows = iter(encoder.encode(good) if good else ())
        return [_as_text(next(rows)) if problem is None else {"problem": problem} for problem in problems]

    def count(figures: Any) -> None:
        if on_batch is not None:
            on_batch(figures.items)

    device = getattr(encoder, "device", None) if encoder.on_device else None
    mapped = map_items(
        encode_batch,
        smiles,
        batch_size=batch_size,
        cost=encoder.cost,
        device=device,
        memory_limit=memory_limit if device is not None else None,
        journal=journal,
        resume=resume,
        key=key,
        on_batch=count,
    )
    encoded = _collected(mapped)
    if use_cache and encoded.kept:
        _keep(stored, encoded)
    return encoded


def _collected(mapped: MapResult) -> EncodedMolecules:
    import numpy as np

    kept, rows, failures = [], [], {}
    for place, result in enumerate(mapped):
        if place in mapped.failures:
            failures[place] = mapped.failures[place].message.splitlines()[0]
        elif isinstance(result, dict):
            failures[place] = result["problem"]
        else:
            kept.append(place)
            rows.append(_from_text(result))
    figures = EncodingFigures(
        molecules=len(mapped),
        failed=len(failures),
        cached=False,
        resumed=mapped.resumed,
        seconds=mapped.seconds,
        batch_sizes=mapped.batch_sizes,
        oom_events=mapped.oom_events,
        peak_allocated_bytes=mapped.peak_allocated_bytes or None,  # 0: it was not measured
        peak_reserved_bytes=mapped.peak_reserved_bytes or None,
    )
    features = np.stack(rows) if rows else np.zeros((0, 0), dtype=np.float32)
    return EncodedMolecules(features=features, kept=tuple(kept), failures=failures, figures=figures, notes=mapped.notes)


def _as_text(row: npt.NDArray[Any]) -> str:
    """A row as `dtype:base64`: a fifth of what its numbers take as JSON, and the same bits."""
    return f"{row.dtype.str}:{base64.b64encode(row.tobytes()).decode()}"


def _from_text(text: str) -> npt.NDArray[Any]:
    import numpy as np

    dtype, _, data = text.partition(":")
    return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype))


def _from_cache(path: Path, molecules: int) -> EncodedMolecules | None:
    """The features kept under this name; a file that cannot be read is no entry."""
    if not path.is_file():
        return None
    try:
        arrays = read_arrays(path)
        failures = {int(place): why for place, why in json.loads(read_metadata(path)["failures"]).items()}
        kept = tuple(int(place) for place in arrays["kept"])
    except (RequestError, KeyError, ValueError):
        return None
    if len(kept) + len(failures) != molecules:
        return None
    figures = EncodingFigures(molecules=molecules, failed=len(failures), cached=True)
    return EncodedMolecules(features=arrays["features"], kept=kept, failures=failures, figures=figures)


def _keep(path: Path, encoded: EncodedMolecules) -> None:
    import numpy as np

    arrays = {"features": encoded.features, "kept": np.array(encoded.kept, dtype=np.int64)}
    with contextlib.suppress(RequestError):  # a cache that cannot be written costs the entry, not the run
        write_arrays(path, arrays, {"failures": encoded.failures})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedFile:
    """What was written, and which lines have no features."""

    path: Path
    width: int
    failures: dict[str, str]  # `in.csv line 7` → reason
    figures: EncodingFigures


def encode(
    settings: EncodeSettings,
    *,
    on_start: Callable[[int], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> EncodedFile:
    """Encode every molecule of the file once and write its features, with the lines they come from.

    As `brim encode`. Lines that RDKit rejects are left out and named. A killed run leaves
    `FILE.partial.jsonl`, which `resume` reads.
    """
    request = settings.request
    path = Path(request.output)
    partial = path.with_name(f"{path.name}.partial.jsonl")
    with locked_file(path, note=on_note):
        _check_output(path, partial, resume=request.resume)
        molecules = read_smiles(Path(request.data), request.mapping)
        if request.limit is not None:
            molecules = molecules.chosen(range(min(request.limit, len(molecules))))
        encoder = load_encoder(request.model, request.knobs, device=request.device)
        if on_start is not None:
            on_start(len(molecules))
        encoded = encode_molecules(
            molecules.smiles,
            encoder,
            batch_size=request.batch_size or "auto",
            memory_limit=request.memory_limit,
            journal=partial,
            resume=request.resume,
            use_cache=request.use_cache,
            on_batch=on_batch,
        )
        if on_note is not None:
            for note in encoded.notes:
                on_note(note)
        result = _write_features(path, request, molecules, encoder, encoded)
        partial.unlink(missing_ok=True)
        return result


def _check_output(path: Path, partial: Path, *, resume: bool) -> None:
    """Refuse a folder, a part of an earlier run without `resume`, or nothing to resume. Loads no encoder."""
    if path.is_dir():
        raise RequestError(f"{given('output', path)}: it is a folder; give a file")
    if resume and not partial.exists() and not path.exists():
        raise RequestError(
            f"{named('resume')}: there is no {partial}, so there is nothing to resume; leave {named('resume')} out"
        )
    if not resume and partial.is_file() and partial.read_bytes().count(b"\n") > 1:  # more than its first line
        raise RequestError(
            f"{given('output', path)}: {partial.name} holds a part of it; continue with {named('resume')}, or choose "
            "another file"
        )


def _write_features(
    path: Path, request: EncodeRequest, molecules: Molecules, encoder: MoleculeEncoder, encoded: EncodedMolecules
) -> EncodedFile:
    failures = {record.place: record.reason for record in molecules.bad}
    failures |= {molecules.places[place]: why for place, why in sorted(encoded.failures.items())}
    if not encoded.kept:
        first = next(iter(failures.items()))
        raise RequestError(
            f"{request.data}: none of {len(molecules):,} molecules can be encoded; {first[0]}: {first[1]}"
        )
    metadata = {
        "schema": "brim.features/1",
        "source": Path(request.data).name,
        "ids": [molecules.places[place] for place in encoded.kept],
        "lines": [molecules.lines[place] for place in encoded.kept],
        "smiles": [molecules.smiles[place] for place in encoded.kept],
        "encoder": encoder.identity(),
    }
    write_arrays(path, {"features": encoded.features}, metadata)
    return EncodedFile(path=path, width=encoded.features.shape[1], failures=failures, figures=encoded.figures)
