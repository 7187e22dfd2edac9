from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brim.errors import RequestError
from brim.molecules.encoders import MorganEncoder, load_encoder, smiles_problem
from brim.settings.molecule_settings import ENCODERS

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

ETHANOL, BENZENE, ASPIRIN = "CCO", "c1ccccc1", "CC(=O)Oc1ccccc1C(=O)O"


def test_morgan_fingerprints_are_rdkits_own() -> None:
    from rdkit import Chem
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=3, fpSize=256)
    rows = MorganEncoder({"bits": "256", "radius": "3"}).encode([ETHANOL, ASPIRIN])
    assert (rows.shape, rows.dtype) == ((2, 256), np.uint8)
    for row, text in zip(rows, (ETHANOL, ASPIRIN), strict=True):
        assert row.tolist() == list(generator.GetFingerprint(Chem.MolFromSmiles(text)))


def test_the_same_molecule_written_otherwise_has_the_same_features() -> None:
    rows = MorganEncoder().encode(["OCC", ETHANOL, BENZENE])
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_counts_are_capped_at_255() -> None:
    bits, counts = (MorganEncoder({"counts": flag}).encode(["C" * 600])[0] for flag in ("false", "true"))
    assert bits.max() == 1
    assert counts.max() == 255


def test_chirality_tells_mirror_images_apart_when_asked() -> None:
    mirrored = ["C[C@H](N)O", "C[C@@H](N)O"]
    assert len(np.unique(MorganEncoder().encode(mirrored), axis=0)) == 1
    assert len(np.unique(MorganEncoder({"chirality": "true"}).encode(mirrored), axis=0)) == 2


def test_the_identity_of_features_changes_with_every_setting() -> None:
    plain = MorganEncoder().identity()
    for knobs in ({"bits": 1024}, {"radius": 3}, {"counts": "true"}, {"chirality": "true"}):
        assert MorganEncoder(knobs).identity() != plain
    assert "rdkit" in plain


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("c1cccc1", "kekulize"),
        ("CC(C)(C)(C)C", "valence"),
        ("xyz", "cannot be read as SMILES"),
        ("C1CC", "cannot be read as SMILES"),
        ("", "there is no SMILES"),
        ("   ", "there is no SMILES"),
        (None, "there is no SMILES"),
    ],
)
def test_rejected_smiles_have_a_reason_and_nothing_is_printed(
    text: str | None, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    problem = smiles_problem(text)
    assert problem is not None
    assert reason in problem
    assert "\n" not in problem
    assert capfd.readouterr() == ("", "")


def test_good_molecules_have_no_problem() -> None:
    assert [smiles_problem(text) for text in (ETHANOL, BENZENE, ASPIRIN)] == [None] * 3


def test_unknown_encoders_and_knobs_list_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"encoder morgen.*did you mean morgan"):
        load_encoder("morgen")
    with pytest.raises(RequestError, match="--knob width: encoder morgan has no such knob"):
        load_encoder("morgan", {"width": "3"})
    with pytest.raises(RequestError, match="--knob bits=4: the smallest is 8"):
        load_encoder("morgan", {"bits": "4"})


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "morgan"])
def test_a_missing_package_names_the_install_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"minimol": "minimol", "unimol": "unimol_tools"}[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RequestError, match=rf"encoder {name}: its package cannot be loaded.*docs/molecules\.md"):
        load_encoder(name, device="cpu")


def test_without_rdkit_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import brim.molecules.encoders as molecules

    monkeypatch.setattr(molecules, "_LOADED", {})
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("rdkit"):
            raise ImportError("No module named 'rdkit'")
        return real(name, *rest, **more)

    monkeypatch.setattr(molecules.importlib, "import_module", refuse)
    with pytest.raises(RequestError, match=r"pip install 'brim\[molecules\]'"):
        smiles_problem(ETHANOL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages that MiniMol stands on
def test_minimol_gives_the_features_of_its_own_package() -> None:
    minimol = pytest.importorskip("minimol")
    texts = [ETHANOL, BENZENE, ASPIRIN, "CN1C=NC2=C1C(=O)N(C(=O)N2C)C"]
    encoder = load_encoder("minimol", device="cpu")
    rows = encoder.encode(texts)
    assert (rows.shape, rows.dtype) == ((4, 512), np.float32)
    own = minimol.Minimol()(texts)
    for row, other in zip(rows, own, strict=True):
        np.testing.assert_allclose(row, other.numpy(), rtol=1e-4, atol=1e-5)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    np.testing.assert_allclose(rows, alone, rtol=1e-4, atol=1e-4)  # a batch changes rounding only
    assert encoder.identity()["minimol"]


@pytest.fixture
def random_unimol(tmp_path: Path) -> Path:
    """A folder as Uni-Mol's weights come in, with a few random tensors; the rest is initialised at random."""
    import torch

    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "C", "N", "O", "S", "H", "Cl", "F", "Br", "I", "Si", "P", "B", "Na"]
    (tmp_path / "mol.dict.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    state = {"encoder.emb_layer_norm.weight": torch.rand(512), "encoder.emb_layer_norm.bias": torch.rand(512)}
    torch.save({"model": state}, tmp_path / "mol_pre_all_h_220816.pt")
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_unimol_loads_a_folder_of_weights_and_encodes(
    random_unimol: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("unimol_tools")
    monkeypatch.setenv("UNIMOL_WEIGHT_DIR", str(random_unimol))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    encoder = load_encoder("unimol", device="cpu")
    loaded = encoder._model.model.encoder.emb_layer_norm.weight  # type: ignore[attr-defined]
    import torch

    stored = torch.load(random_unimol / "mol_pre_all_h_220816.pt", weights_only=True)["model"]
    assert torch.equal(loaded.detach(), stored["encoder.emb_layer_norm.weight"])
    rows = encoder.encode([ETHANOL, BENZENE])
    assert (rows.shape, rows.dtype) == ((2, 512), np.float32)
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(rows[1], encoder.encode([BENZENE])[0], rtol=1e-3, atol=1e-4)
    assert not Path("logs").exists()
    assert len(encoder.identity()["weights"]) == 64


def test_unimol_without_weights_names_their_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from types import ModuleType

    monkeypatch.setitem(sys.modules, "unimol_tools", ModuleType("unimol_tools"))
    monkeypatch.delenv("UNIMOL_WEIGHT_DIR", raising=False)
    with pytest.raises(RequestError, match="set UNIMOL_WEIGHT_DIR to the folder that holds mol_pre_all_h"):
        load_encoder("unimol", device="cpu")
    monkeypatch.setenv("UNIMOL_WEIGHT_DIR", str(tmp_path))
    with pytest.raises(RequestError, match=r"mol_pre_no_h_220816\.pt is missing"):
        load_encoder("unimol", {"hydrogens": "false"}, device="cpu")
