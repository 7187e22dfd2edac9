"""Uni-Mol: a transformer over atoms in space, through `unimol-tools`, with weights from a folder of the user's.

As `unimol_tools.UniMolRepr`, but it never downloads: weights that are not there are an error that says where they go.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import RequestError
from brim.molecules.encoders import MoleculeEncoder, silence
from brim.settings.caller import written
from brim.workloads.knobs import Knob, check_knobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["UnimolEncoder"]

FOLDER = "UNIMOL_WEIGHT_DIR"
_WEIGHTS = {True: "mol_pre_all_h_220816.pt", False: "mol_pre_no_h_220816.pt"}  # with hydrogens, without
_DICTIONARY = "mol.dict.txt"
MANY = 64  # molecules from which conformers are made by several processes


class UnimolEncoder(MoleculeEncoder):
    """512 features: the whole-molecule token of Uni-Mol v1, of a conformer that RDKit makes."""

    name = "unimol"
    knobs = (Knob(name="hydrogens", default=True, help="keep hydrogen atoms (other weights than without)"),)

    def __init__(self, knobs: Mapping[str, Any] | None = None, *, device: str = "auto") -> None:
        settings = check_knobs(knobs or {}, self.knobs, owner="encoder unimol")
        try:
            package = _package()
        except ImportError as error:
            raise RequestError(
                f"encoder unimol: its package cannot be loaded ({error}); pip install unimol-tools, see "
                f"docs/molecules.md; {written('encoder', 'morgan')} needs RDKit only"
            ) from error
        from brim.models.placement import resolve_device

        self.device = resolve_device(device)
        self._hydrogens = bool(settings["hydrogens"])
        self._weights, dictionary = _weight_files(self._hydrogens)
        with silence():
            self._model = package.UniMolRepr(
                data_type="molecule",
                remove_hs=not self._hydrogens,
                use_cuda=self.device.type == "cuda",
                pretrained_model_path=str(self._weights),
                pretrained_dict_path=str(dictionary),
            )

    def encode(self, smiles: Sequence[str]) -> npt.NDArray[np.float32]:
        import numpy as np

        with silence():
            self._model.params["batch_size"] = len(smiles)
            self._model.params["multi_process"] = len(smiles) >= MANY
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


def _package() -> Any:
    """The package; on import it makes a folder `logs` where it stands, so it is imported somewhere else."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), silence():
        return importlib.import_module("unimol_tools")


def _weight_files(hydrogens: bool) -> tuple[Path, Path]:
    folder = os.environ.get(FOLDER)
    name = _WEIGHTS[hydrogens]
    if not folder:
        raise RequestError(
            f"encoder unimol: set {FOLDER} to the folder that holds {name} and {_DICTIONARY}; brim downloads nothing"
        )
    paths = Path(folder) / name, Path(folder) / _DICTIONARY
    for path in paths:
        if not path.is_file():
            raise RequestError(f"encoder unimol: {path} is missing; {FOLDER} must hold {name} and {_DICTIONARY}")
    return paths
