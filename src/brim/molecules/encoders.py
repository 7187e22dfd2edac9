"""Molecules as features: encoders that turn SMILES into rows of numbers.

Morgan fingerprints are computed by RDKit. MiniMol and Uni-Mol are frozen networks from packages of their own, imported
when such an encoder is made. Knows nothing of files, batches or training; the only file that imports RDKit.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import importlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from brim.errors import RequestError, nearest_names
from brim.settings.caller import written
from brim.settings.molecule_settings import ENCODERS
from brim.workloads.knobs import Knob, check_knobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.float32] | npt.NDArray[np.uint8]

__all__ = ["MoleculeEncoder", "MorganEncoder", "encoder_knobs", "knobs_for", "load_encoder", "smiles_problem"]

UNIMOL_FOLDER = "UNIMOL_WEIGHT_DIR"
_UNIMOL_WEIGHTS = {True: "mol_pre_all_h_220816.pt", False: "mol_pre_no_h_220816.pt"}  # with hydrogens, without
_UNIMOL_DICTIONARY = "mol.dict.txt"
# Molecules from which graphs or conformers are made by several processes, each of which loads the package again.
MINIMOL_PROCESSES_FROM, UNIMOL_PROCESSES_FROM = 256, 64


class MoleculeEncoder(abc.ABC):
    """Turns SMILES that RDKit accepts into features, one row each."""

    name: ClassVar[str]
    knobs: ClassVar[Sequence[Knob]] = ()
    on_device: ClassVar[bool] = True  # whether it runs on a torch device, whose memory batches must fit

    def __init__(self, knobs: Mapping[str, Any] | None = None, *, device: str = "auto") -> None:
        del device  # for networks
        self.settings = check_knobs(knobs or {}, self.knobs, owner=f"encoder {self.name}")

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
        Knob(name="chirality", default=False, help="distinguish mirror images"),
    )

    def __init__(self, knobs: Mapping[str, Any] | None = None, *, device: str = "auto") -> None:
        super().__init__(knobs, device=device)
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


class MinimolEncoder(MoleculeEncoder):
    """512 features: the largest value over a molecule's atoms of each channel of the last layer.

    As `minimol.Minimol`, whose weights ship in its package (docs/molecules.md has the recipe), but on any device, in
    batches of any size, and silent.
    """

    name = "minimol"

    def __init__(self, knobs: Mapping[str, Any] | None = None, *, device: str = "auto") -> None:
        super().__init__(knobs)
        try:
            with _silence():
                package = importlib.import_module("minimol")
                self._graphs = importlib.import_module("torch_geometric.data").Batch
                self._pool = importlib.import_module("torch_geometric.nn").global_max_pool
                hydra = importlib.import_module("hydra.core.global_hydra").GlobalHydra
        except ImportError as error:
            raise RequestError(
                f"encoder minimol: its package cannot be loaded ({error}); docs/molecules.md has the install recipe, "
                f"and {written('encoder', 'morgan')} needs RDKit only"
            ) from error
        from brim.models.placement import resolve_device

        self.device = resolve_device(device)
        with _silence():
            hydra.instance().clear()  # MiniMol reads its settings through Hydra, which allows one reader in a process
            self._model = package.Minimol()
            hydra.instance().clear()
            self._model.predictor.network.to(self.device)

    def encode(self, smiles: Sequence[str]) -> npt.NDArray[np.float32]:
        import torch

        with _silence(), torch.inference_mode():
            self._model.datamodule.featurization_n_jobs = 1 if len(smiles) < MINIMOL_PROCESSES_FROM else -1
            graphs, _ = self._model.datamodule._featurize_molecules(list(smiles))
            graphs = self._model.to_fp32(graphs)
            errors = [graph for graph in graphs if isinstance(graph, str)]  # MiniMol puts one in the graph's place
            if errors:
                raise ValueError(f"MiniMol cannot read a molecule: {errors[0].strip().splitlines()[-1]}")
            batch = self._graphs.from_data_list(graphs).to(self.device)
            atoms = self._model.predictor.get_fingerprints_for_batch({"features": batch, "batch_indices": batch.batch})
            rows: npt.NDArray[np.float32] = self._pool(atoms, batch.batch.to(atoms.device)).float().cpu().numpy()
            return rows

    def identity(self) -> dict[str, Any]:
        return {"encoder": "minimol", "minimol": metadata.version("minimol")}


class UnimolEncoder(MoleculeEncoder):
    """512 features: the whole-molecule token of Uni-Mol v1, of a conformer that RDKit makes.

    As `unimol_tools.UniMolRepr`, but it never downloads: weights that are missing are an error that names their folder.
    """

    name = "unimol"
    knobs = (Knob(name="hydrogens", default=True, help="keep hydrogen atoms (other weights than without)"),)

    def __init__(self, knobs: Mapping[str, Any] | None = None, *, device: str = "auto") -> None:
        super().__init__(knobs)
        try:
            package = _unimol_tools()
        except ImportError as error:
            raise RequestError(
                f"encoder unimol: its package cannot be loaded ({error}); pip install unimol-tools, see "
                f"docs/molecules.md; {written('encoder', 'morgan')} needs RDKit only"
            ) from error
        from brim.models.placement import resolve_device

        self.device = resolve_device(device)
        self._hydrogens = bool(self.settings["hydrogens"])
        self._weights, dictionary = _unimol_weight_files(self._hydrogens)
        with _silence():
            self._model = package.UniMolRepr(
                data_type="molecule",
                remove_hs=not self._hydrogens,
                use_cuda=self.device.type == "cuda",
                pretrained_model_path=str(self._weights),
                pretrained_dict_path=str(dictionary),
            )

    def encode(self, smiles: Sequence[str]) -> npt.NDArray[np.float32]:
        import numpy as np

        with _silence():
            self._model.params["batch_size"] = len(smiles)
            self._model.params["multi_process"] = len(smiles) >= UNIMOL_PROCESSES_FROM
            found = self._model.get_repr(list(smiles))
        rows = np.asarray(found["cls_repr"] if isinstance(found, dict) else found, dtype=np.float32)
        if rows.shape[0] != len(smiles):
            raise ValueError(f"Uni-Mol gave {rows.shape[0]} rows for {len(smiles)} molecules")
        return rows

    def identity(self) -> dict[str, Any]:
        return {
            "encoder": "unimol",
            "unimol-tools": metadata.version("unimol_tools"),
            "hydrogens": self._hydrogens,
            "weights": hashlib.sha256(self._weights.read_bytes()).hexdigest(),
        }


_ENCODERS: dict[str, type[MoleculeEncoder]] = {
    kind.name: kind for kind in (MorganEncoder, MinimolEncoder, UnimolEncoder)
}


def load_encoder(name: str, knobs: Mapping[str, Any] | None = None, *, device: str = "auto") -> MoleculeEncoder:
    """The encoder by its name; one whose package is missing is a `RequestError` that names how to get it."""
    if name not in _ENCODERS:
        raise RequestError(f"encoder {name}: it must be one of {', '.join(ENCODERS)}{nearest_names(name, ENCODERS)}")
    return _ENCODERS[name](knobs, device=device)


def encoder_knobs(name: str) -> Sequence[Knob]:
    """The knobs of an encoder, without loading it."""
    return _ENCODERS[name].knobs


def knobs_for(name: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Of knobs given for several encoders at once, those that this one has."""
    known = {knob.name for knob in encoder_knobs(name)}
    return {knob: value for knob, value in knobs.items() if knob in known}


def smiles_problem(text: str | None) -> str | None:
    """Why RDKit rejects this SMILES, in one line; None where it accepts it."""
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


_LOADED: dict[str, Any] = {}


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


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """For packages that log and draw progress bars on both streams, and warn of their old dependencies."""
    discarded = io.StringIO()
    with contextlib.redirect_stdout(discarded), contextlib.redirect_stderr(discarded), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _unimol_tools() -> Any:
    """The package; on import it makes a folder `logs` in the current folder, so that is a temporary one meanwhile."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _silence():
        return importlib.import_module("unimol_tools")


def _unimol_weight_files(hydrogens: bool) -> tuple[Path, Path]:
    folder = os.environ.get(UNIMOL_FOLDER)
    name = _UNIMOL_WEIGHTS[hydrogens]
    if not folder:
        raise RequestError(
            f"encoder unimol: set {UNIMOL_FOLDER} to the folder that holds {name} and {_UNIMOL_DICTIONARY}; brim "
            "downloads nothing"
        )
    paths = Path(folder) / name, Path(folder) / _UNIMOL_DICTIONARY
    for path in paths:
        if not path.is_file():
            raise RequestError(
                f"encoder unimol: {path} is missing; {UNIMOL_FOLDER} must hold {name} and {_UNIMOL_DICTIONARY}"
            )
    return paths
