"""MiniMol: a small graph network for molecules, whose weights ship in its package; docs/molecules.md has the recipe.

As `minimol.Minimol`, but on any device, in whatever batches it is given, and silent.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from brim.errors import RequestError
from brim.molecules.encoders import MoleculeEncoder, silence
from brim.settings.caller import written
from brim.workloads.knobs import check_knobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["MinimolEncoder"]

MANY = 256  # molecules from which graphs are made by several processes


class MinimolEncoder(MoleculeEncoder):
    """512 features: the largest value over a molecule's atoms of each channel of the last layer."""

    name = "minimol"

    def __init__(self, knobs: Mapping[str, Any] | None = None, *, device: str = "auto") -> None:
        check_knobs(knobs or {}, self.knobs, owner="encoder minimol")
        try:
            with silence():
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
        with silence():
            hydra.instance().clear()  # MiniMol reads its settings through Hydra, which allows one reader in a process
            self._model = package.Minimol()
            hydra.instance().clear()
            self._model.predictor.network.to(self.device)

    def encode(self, smiles: Sequence[str]) -> npt.NDArray[np.float32]:
        import torch

        with silence(), torch.inference_mode():
            # Worker processes load everything anew: for few molecules that takes longer than the work.
            self._model.datamodule.featurization_n_jobs = 1 if len(smiles) < MANY else -1
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
