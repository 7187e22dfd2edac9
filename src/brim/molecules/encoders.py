"""Molecules as features: encoders that turn SMILES into rows of numbers.

Morgan fingerprints are computed here, by RDKit; MiniMol and Uni-Mol are frozen networks of packages of their own, each
in its own file. Knows nothing of files, batches or training; the only file that imports RDKit.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from brim.errors import RequestError, nearest_names
from brim.settings.ood_settings import ENCODERS
from brim.workloads.knobs import Knob, check_knobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.float32] | npt.NDArray[np.uint8]

__all__ = [
    "MoleculeEncoder", "MorganEncoder", "encoder_knobs", "knobs_for", "load_encoder", "silence",
    "smiles_problem",
]  # fmt: skip


class MoleculeEncoder(abc.ABC):
    """Turns SMILES that RDKit accepts into features, one row each."""

    name: ClassVar[str]
    knobs: ClassVar[Sequence[Knob]] = ()
    on_device: ClassVar[bool] = True  # whether it runs on a torch device, whose memory batches must fit
    notes: tuple[str, ...] = ()

    @abc.abstractmethod
    def encode(self, smiles: Sequence[str]) -> Rows:
        """The features, `[molecules, width]`."""

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the features depend on beside the molecule: settings, versions, weights."""

    def cost(self, smiles: str) -> int:
        """What a molecule weighs in a batch: about its atoms."""
        return len(smiles)


class MorganEncoder(MoleculeEncoder):
    """Morgan (circular) fingerprints: which neighbourhoods a molecule has, hashed to bits."""

    name = "morgan"
    on_device = False
    knobs = (
        Knob(name="bits", default=2048, help="length of the fingerprint", minimum=8, maximum=2**20),
        Knob(name="radius", default=2, help="bonds that a neighbourhood reaches (2 is ECFP4)", minimum=0, maximum=16),
        Knob(name="counts", default=False, help="how often each neighbourhood occurs, instead of whether"),
        Knob(name="chirality", default=False, help="tell mirror images apart"),
    )

    def __init__(self, knobs: Mapping[str, Any] | None = None) -> None:
        self.settings = check_knobs(knobs or {}, self.knobs, owner="encoder morgan")
        rdkit = _rdkit()
        self._generator = rdkit["generators"].GetMorganGenerator(
            radius=self.settings["radius"],
            fpSize=self.settings["bits"],
            includeChirality=self.settings["chirality"],
        )

    def encode(self, smiles: Sequence[str]) -> Rows:
        import numpy as np

        rows = np.zeros((len(smiles), self.settings["bits"]), dtype=np.uint8)
        for place, text in enumerate(smiles):
            molecule = _rdkit()["chem"].MolFromSmiles(text)
            if self.settings["counts"]:
                rows[place] = np.minimum(self._generator.GetCountFingerprintAsNumPy(molecule), 255)
            else:
                rows[place] = self._generator.GetFingerprintAsNumPy(molecule)
        return rows

    def identity(self) -> dict[str, Any]:
        return {"encoder": "morgan", **self.settings, "rdkit": _rdkit()["version"]}

    def cost(self, smiles: str) -> int:
        del smiles
        return 1


def smiles_problem(text: str | None) -> str | None:
    """Why RDKit does not take this SMILES, in one line; None where it does."""
    if text is None or not text.strip():
        return "there is no SMILES"
    rdkit = _rdkit()
    chem = rdkit["chem"]
    with rdkit["quiet"]():
        if chem.MolFromSmiles(text) is not None:
            return None
        loose = chem.MolFromSmiles(text, sanitize=False)
        problems = [] if loose is None else chem.DetectChemistryProblems(loose)
    reason = " ".join(problems[0].Message().split()) if problems else "it cannot be read as SMILES"
    return f"{text!r}: {reason}"


def load_encoder(name: str, knobs: Mapping[str, Any] | None = None, *, device: str = "auto") -> MoleculeEncoder:
    """The encoder by its name; one whose package is missing is a `RequestError` that says how to get it."""
    if name == "morgan":
        return MorganEncoder(knobs)
    if name == "minimol":
        from brim.molecules.minimol import MinimolEncoder

        return MinimolEncoder(knobs, device=device)
    if name == "unimol":
        from brim.molecules.unimol import UnimolEncoder

        return UnimolEncoder(knobs, device=device)
    raise RequestError(f"encoder {name}: it must be one of {', '.join(ENCODERS)}{nearest_names(name, ENCODERS)}")


def encoder_knobs(name: str) -> Sequence[Knob]:
    """The knobs of an encoder, without loading it."""
    if name == "morgan":
        return MorganEncoder.knobs
    if name == "unimol":
        from brim.molecules.unimol import UnimolEncoder

        return UnimolEncoder.knobs
    return ()


def knobs_for(name: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Of knobs given for several encoders at once, those that this one has."""
    known = {knob.name for knob in encoder_knobs(name)}
    return {knob: value for knob, value in knobs.items() if knob in known}


def _rdkit() -> dict[str, Any]:
    if not _LOADED:
        try:
            chem = importlib.import_module("rdkit.Chem")
            base = importlib.import_module("rdkit.rdBase")
            generators = importlib.import_module("rdkit.Chem.rdFingerprintGenerator")
        except ImportError as error:
            raise RequestError(f"molecules need RDKit ({error}): pip install 'brim[molecules]'") from error
        _LOADED.update(chem=chem, generators=generators, quiet=base.BlockLogs, version=base.rdkitVersion)
    return _LOADED


_LOADED: dict[str, Any] = {}


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """For packages that log and draw bars to both streams, and warn of the age of what they stand on."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
