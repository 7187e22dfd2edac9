"""`brim encode`: a file of SMILES to a file of features."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from brim.errors import RequestError
from brim.molecules.encoders import load_encoder
from brim.molecules.encoding import EncodingFigures, encode_molecules
from brim.molecules.feature_files import write_arrays
from brim.molecules.smiles_files import read_smiles
from brim.settings.caller import named
from brim.settings.encode_settings import EncodeRequest
from brim.storage.run_lock import locked_file

__all__ = ["EncodedFile", "encode_file"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedFile:
    """What was written, and which lines have no features."""

    path: Path
    width: int
    failures: dict[str, str]  # `in.csv line 7` → why
    figures: EncodingFigures


def encode_file(
    request: EncodeRequest,
    *,
    on_start: Callable[[int], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> EncodedFile:
    """Encode every molecule of the file once and write its features, with the lines they come from.

    Lines that RDKit rejects are left out and named. A killed run leaves `FILE.partial.jsonl`, which `resume` reads.
    """
    path = Path(request.output)
    partial = path.with_name(f"{path.name}.partial.jsonl")
    with locked_file(path, note=on_note):
        _check_output(path, partial, resume=request.resume)
        return _encode(request, path, partial, on_start, on_batch, on_note)


def _check_output(path: Path, partial: Path, *, resume: bool) -> None:
    """Refuse a folder, a part of an earlier run without `resume`, or nothing to resume. Loads no encoder."""
    if path.is_dir():
        raise RequestError(f"-o {path}: it is a folder; give a file")
    if resume and not partial.exists() and not path.exists():
        raise RequestError(
            f"{named('resume')}: {partial} is not there, so there is nothing to go on from; leave {named('resume')} out"
        )
    if not resume and partial.is_file() and partial.read_bytes().count(b"\n") > 1:  # more than its first line
        raise RequestError(
            f"-o {path}: {partial.name} holds a part of it; continue with {named('resume')}, or choose another file"
        )


def _encode(
    request: EncodeRequest,
    path: Path,
    partial: Path,
    on_start: Callable[[int], None] | None,
    on_batch: Callable[[int], None] | None,
    on_note: Callable[[str], None] | None,
) -> EncodedFile:
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
    partial.unlink(missing_ok=True)
    return EncodedFile(path=path, width=encoded.features.shape[1], failures=failures, figures=encoded.figures)
