"""Runs that are slow for one known reason: does `brim advise` name it first, and does following it bring what it says?

    python -m benchmarks.advice                            # on CUDA, three minutes
    python -m benchmarks.advice --tiny                     # on the CPU, small models
    python -m benchmarks.advice --tiny --cases padding     # some of the cases
    python -m benchmarks.advice --json results.json

A row says which cause was named first, what it promised, and what the same work brought in turns with the run as it
was, with a 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers

from benchmarks.environment import environment
from benchmarks.slow_runs import CARD, CASES, TINY, SlowRuns
from brim.advice.advise import advise_run
from brim.advice.run_requests import eval_request
from brim.advice.trials import try_advice
from brim.evaluation.run import evaluate


def row(bench: SlowRuns, case: str) -> dict[str, Any]:
    """One case: what was named, promised and measured."""
    started = time.perf_counter()
    cause, make = CASES[case]
    run = make(bench)
    pieces = advise_run(run)
    named = pieces[0].name if pieces else "none"
    found: dict[str, Any] = {"case": case, "named_first": named, "right": named == cause}
    piece = next((one for one in pieces if one.name == cause), None)
    if piece is not None and cause == "truncated_answers":
        after = evaluate(eval_request(run, piece.settings), output=bench.folder / "raised").summary["answer_tokens"]
        before = run.summary["answer_tokens"]["truncated_fraction"]
        left = after["truncated_fraction"]
        cut = f"{before:.0%} cut off before, {left:.0%} after"
        found |= {"promised": "fewer cut off", "measured": cut, "half": left <= before / 2}
    elif piece is not None:
        (tried,) = try_advice(run, [piece], samples=10**6, repeats=3, note=_silent)
        gain, promised = tried.gain, piece.expected_gain
        half = gain is not None and promised is not None and gain.value >= 1 + (promised - 1) / 2
        found |= {"promised": piece.gain_text, "measured": tried.text, "half": half}
    return {**found, "seconds": time.perf_counter() - started}


def _silent(line: str) -> None:
    del line


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--cases", default=",".join(CASES), help="which, by name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    asked = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    print("| case | named first | promised | measured (95 % interval) | half | took |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case in asked.cases.split(","):
            place = Path(folder) / case
            place.mkdir()
            rows.append(row(SlowRuns(place, TINY if asked.tiny else CARD), case))
            print(_line(rows[-1]), flush=True)
            if asked.json is not None:
                asked.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    print(f"\n{sum(one['right'] for one in rows)} of {len(rows)} causes named first, "
          f"{sum(bool(one.get('half')) for one in rows)} brought half of the promise or more, "
          f"{sum(one['seconds'] for one in rows):.0f} s")  # fmt: skip


def _line(one: dict[str, Any]) -> str:
    right = "yes" if one["right"] else f"no: {one['named_first']}"
    half = "yes" if one.get("half") else "no"
    return (
        f"| {one['case']} | {right} | {one.get('promised', '—')} | {one.get('measured', '—')} | {half} | "
        f"{one['seconds']:.0f} s |"
    )


if __name__ == "__main__":
    main()
