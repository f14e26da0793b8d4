"""Many trials, or the fault matrix, by one command.

What a trial is says `trial`; where the matrix goes, `fault_matrix`.

python -m nereus_conformance.trials --adapter sim --trials 2000 --json
python -m nereus_conformance.trials --adapter sim --matrix conformance/README.md
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.progress import track

from nereus_conformance import hookspecs
from nereus_conformance.fault_matrix import matrix, replaced, table
from nereus_conformance.points import FAULTS
from nereus_conformance.trial import Result, Trials
from nereus_core.errors import NereusError
from nereus_core.harness import Harness
from nereus_core.registry import Registry

LIMIT_S = {"contract": 60.0, "real": 180.0, "gpu": 180.0}
"""By tier: a trial that takes longer counts as a hang. Every wait in it is far shorter, but a real
one starts processes, on a machine that may be busy. Chosen, not measured."""


def report(results: Sequence[Result], elapsed_s: float) -> dict[str, object]:
    """Sum trials up."""
    wrong = [r for r in results if r.problem]
    return {
        "trials": len(results),
        "wrong": [f"{r.trial}: {r.problem}" for r in wrong],
        "outcomes": dict(Counter(r.outcome for r in results).most_common()),
        "by_fault": {
            fault: dict(Counter(r.outcome for r in results if r.trial.fault == fault))
            for fault in FAULTS
        },
        "slowest_s": round(max((r.elapsed_s for r in results), default=0.0), 3),
        "elapsed_s": round(elapsed_s, 1),
    }


def harness_of(
    adapter: str, tier: str, options: Mapping[str, str] = MappingProxyType({})
) -> Harness:
    """Ask an installed adapter for its harness; raises NereusError where it has none.

    Options are those of `nereus_conformance.hookspecs`.
    """
    registry = Registry.load()
    registry.add_hookspecs(hookspecs)
    found: Harness | None = registry.ask(
        adapter, "nereus_conformance_harness", tier=tier, options=options
    )
    if found is None:
        raise NereusError(f"adapter {adapter!r} has no harness for tier {tier!r}.")
    return found


def run_all(trials: Trials, seeds: Sequence[int]) -> list[Result]:
    """Run a trial per seed; on a terminal, a bar on stderr says how far it is."""
    console = Console(stderr=True)
    bar = track(seeds, "trials", console=console, disable=not console.is_terminal)
    return [trials.run(trials.draw(seed)) for seed in bar]


def main() -> int:
    """Run trials, or the matrix; says by its exit code whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", default="sim")
    parser.add_argument("--tier", choices=LIMIT_S, default="contract")
    parser.add_argument("--harness", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--matrix", metavar="README", help="write the fault matrix into this file")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    options = dict(text.partition("=")[::2] for text in chosen.harness)
    harness = harness_of(chosen.adapter, chosen.tier, options)
    with closing(harness), tempfile.TemporaryDirectory() as folder:
        trials = Trials(harness, Path(folder), limit_s=LIMIT_S[chosen.tier])
        if chosen.matrix:
            rows = table(matrix(trials, harness.job()))
            path = Path(chosen.matrix)
            text = replaced(path.read_text("utf-8"), chosen.adapter, chosen.tier, rows)
            path.write_text(text, "utf-8")
            print(rows)
            return "WRONG" in rows
        begin_s = time.monotonic()
        seeds = range(chosen.seed, chosen.seed + chosen.trials)
        found = report(run_all(trials, seeds), time.monotonic() - begin_s)
    print(json.dumps(found, indent=None if chosen.json else 2))
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
