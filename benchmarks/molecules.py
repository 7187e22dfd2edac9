"""Does the energy head separate molecules with unseen scaffolds from others? A real scaffold split, with baselines.

    pip download --no-deps molsets -d molsets
    python -m benchmarks.molecules molsets/molsets-*.whl --count 3000 --bits 1024

In-distribution is MOSES' test set, out-of-distribution its test set of scaffolds that occur nowhere else; both are
drawn from the same collection, so they differ in little but the scaffolds. Every method sees the same
features; `dpo` and `logistic` are shown training molecules of both kinds, the other baselines those of one.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import random
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from brim.molecules.run import ood
from brim.settings.molecule_settings import BASELINES, OodCommand, OodRequest

FILES = {"in": "moses/dataset/data/test.csv.gz", "out": "moses/dataset/data/test_scaffolds.csv.gz"}


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as folder:
        for name, inside in FILES.items():
            smiles = _read(Path(arguments.wheel), inside)
            drawn = random.Random(0).sample(smiles, arguments.count)
            Path(f"{folder}/{name}.csv").write_text("smiles\n" + "\n".join(drawn) + "\n", encoding="utf-8")
        request = OodRequest(
            id=f"{folder}/in.csv",
            ood=f"{folder}/out.csv",
            encoders=(arguments.encoder,),
            knobs={"bits": str(arguments.bits), "radius": str(arguments.radius)}
            if arguments.encoder == "morgan"
            else {},
            losses=tuple(arguments.losses.split(",")),
            seeds=tuple(range(arguments.seeds)),
            epochs=arguments.epochs,
            lrs=(arguments.lr,),
            weight_decay=arguments.weight_decay,
            baselines=BASELINES,
            device=arguments.device,
        )
        started = time.perf_counter()
        result = ood(OodCommand(request=request, output=Path(folder) / "run"))
        seconds = time.perf_counter() - started
    print(f"{_facts()}\n{arguments.count:,} molecules of each kind, {seconds:.0f} s in all\n")
    print("| method | AUROC | AUPR | FPR95 | seeds |")
    print("|---|---|---|---|---|")
    for row in sorted(result.summary["table"], key=lambda row: -row["auroc"]["mean"]):
        figures = " | ".join(_figure(row[name]) for name in ("auroc", "aupr", "fpr95"))
        print(f"| {row['method']} | {figures} | {len(row['seeds']) or '—'} |")
    for training in result.summary["trainings"]:
        choice, taken = training["fast_path_choice"], training["train_seconds"]
        print(f"\n{training['method']}: {training['fast_path']} ({choice['reason']}), trained in {taken:.1f} s")


def _read(wheel: Path, inside: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive, archive.open(inside) as packed, gzip.open(packed) as file:
        return [row["SMILES"] for row in csv.DictReader(io.TextIOWrapper(file, encoding="utf-8"))]


def _figure(figure: dict[str, float | None]) -> str:
    spread = figure["deviation"]
    return f"{figure['mean']:.4f}" + (f" ± {spread:.4f}" if spread is not None else "")


def _facts() -> dict[str, Any]:
    from benchmarks.environment import environment

    return environment()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", help="the wheel of molsets, as pip downloads it")
    parser.add_argument("--count", type=int, default=3000, help="molecules of each kind")
    parser.add_argument("--encoder", default="morgan")
    parser.add_argument("--bits", type=int, default=1024)
    parser.add_argument("--radius", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=None)
    parser.add_argument("--losses", default="energy")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
