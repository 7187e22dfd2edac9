"""The settings of `brim encode`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from brim.errors import RequestError
from brim.settings import shared
from brim.settings.caller import given
from brim.settings.declare import Setting, check_fields
from brim.settings.setting_checks import flag, pairs, path_text, whole

__all__ = ["EncodeRequest", "EncodeSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeRequest:
    """A file of molecules, the encoder, and the file of features to write."""

    data: Annotated[
        str,
        Setting(
            help="SMILES: .csv or .tsv with a header, .smi or .txt.", flags=("-d", "--data"), metavar="FILE",
            check=path_text(), python="str | os.PathLike[str]", positional=True,
            missing="give the file of molecules, such as smiles.csv",
        ),
    ]  # fmt: skip
    output: Annotated[
        str,
        Setting(
            help="Where the features go: FILE.safetensors.", flags=("-o", "--output"), metavar="FILE",
            check=path_text(), python="str | os.PathLike[str]", positional=True,
            missing="give the file to write, FILE.safetensors",
        ),
    ]  # fmt: skip
    model: Annotated[str, Setting(help="morgan, minimol or unimol.", flags=("-m", "--model"), metavar="ENCODER")] = (
        "morgan"
    )
    mapping: Annotated[
        Mapping[str, str],
        Setting(
            name="map", help="The column of SMILES, where it is called otherwise.", metavar="smiles=COLUMN", many=True,
            check=pairs("smiles=COLUMN", ("smiles",)), python="Mapping[str, str] | None",
            python_help="The column of SMILES, where it is called otherwise: {'smiles': 'structure'}.",
        ),
    ] = dataclasses.field(default_factory=dict)  # fmt: skip
    limit: Annotated[int | None, Setting(help="Only the first N molecules.", metavar="N", check=whole(1))] = None
    knobs: Annotated[
        Mapping[str, Any],
        Setting(
            name="knob", help="A setting of the encoder, repeatable: --knob bits=1024.", metavar="NAME=VALUE",
            many=True, check=pairs("NAME=VALUE, for example --knob bits=1024"), python="Mapping[str, object] | None",
            python_help="Settings of the encoder: {'bits': 1024}.",
        ),
    ] = dataclasses.field(default_factory=dict)  # fmt: skip
    batch_size: shared.BatchSize = None
    memory_limit: shared.MemoryLimit = None
    use_cache: Annotated[
        bool,
        Setting(name="no_cache", help="Neither use cached features nor keep any.", check=flag(), inverted=True),
    ] = True
    device: shared.Device = "auto"
    resume: Annotated[bool, Setting(help="Continue a stopped run of the same file.", check=flag())] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.output.endswith(".safetensors"):
            raise RequestError(f"{given('output', self.output)}: features are written as FILE.safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """An encoding, and how its figures are shown."""

    request: EncodeRequest
    json_output: shared.JsonOutput = False
