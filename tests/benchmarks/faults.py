"""Seeded faults in transitions: kill, hang, refused memory, corrupted bucket, in every phase.

Bars (T13): no trial loses state that a copy was left of, none hangs. Each trial is a function of
its seed, see `nereus_conformance.trials`; state is compared by SHA-256, losses within 1e-9 of a run
that nothing happened to. Tier ``contract`` runs the simulated world, ``real`` the torch adapter's
four seats on this machine's CPU, where a seat is killed by SIGKILL and hung by SIGSTOP.

    python tests/benchmarks/faults.py --tier real --trials 200 --json
    python tests/benchmarks/faults.py --tier contract --trials 2000
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from nereus_conformance.trials import Keeper, Trial, TrialFailed, Verdict, run_trial, undisturbed
from nereus_core.errors import NereusError
from nereus_core.harness import Fault, Harness
from nereus_core.phases import Phase

log = logging.getLogger("nereus.trials")
HANG_S = {"contract": 0.5, "real": 60.0}
"""Longest wait for a transition: what a primitive that never returns costs."""
SEAT_S = 3.0
"""Longest wait of a real job for a seat; a seat that hangs costs twice that. Chosen."""


@contextmanager
def subject(tier: str) -> Iterator[tuple[Harness, Keeper | None]]:
    """Open the harness of a tier, and what saves its jobs."""
    if tier == "contract":
        from nereus_adapters.sim.harness import SimHarness

        simulated = SimHarness()
        yield simulated, None
        simulated.close()
        return
    from nereus_adapters.torch.harness import TorchHarness

    with tempfile.TemporaryDirectory(prefix="nereus-trials-") as scratch:
        saved = Path(scratch) / "saved"
        real = TorchHarness(wait_s=SEAT_S)
        try:
            yield real, Keeper(lambda: real.save(saved), lambda: real.resume(saved))
        finally:
            real.close()


def run(tier: str, seeds: range, console: Console) -> tuple[list[Verdict], list[str]]:
    """Run all trials; returns verdicts and what went wrong."""
    verdicts: list[Verdict] = []
    problems: list[str] = []
    with subject(tier) as (harness, keeper):
        expected = undisturbed(harness, harness.job())
        for seed in track(seeds, f"trials ({tier})", console=console):
            trial = Trial.drawn(seed, harness.job())
            try:
                verdict = run_trial(harness, trial, expected, keeper, transition_s=HANG_S[tier])
                verdicts.append(verdict)
                log.info("%s: %s in %.1f s", trial, verdict.outcome, verdict.elapsed_s)
            except TrialFailed as failed:
                problems.append(str(failed))
                log.warning("%s", failed)
            except NereusError as error:
                problems.append(f"{trial}: {type(error).__name__}: {error}")
                log.warning("%s", problems[-1])
    return verdicts, problems


def matrix(verdicts: list[Verdict]) -> dict[str, dict[str, dict[str, int]]]:
    """Count outcomes by fault and phase."""
    return {
        fault: {
            phase: dict(
                Counter(
                    v.outcome for v in verdicts if (v.trial.fault, v.trial.phase) == (fault, phase)
                )
            )
            for phase in Phase
        }
        for fault in Fault
    }


def show(console: Console, verdicts: list[Verdict], problems: list[str]) -> None:
    """Print the fault matrix."""
    table = Table(title="Outcomes by fault and phase")
    for column in ("fault", *Phase):
        table.add_column(str(column))
    for fault, row in matrix(verdicts).items():
        cells = (", ".join(f"{n} {o}" for o, n in sorted(cell.items())) for cell in row.values())
        table.add_row(fault, *cells)
    console.print(table)
    for problem in problems:
        console.print(f"[red]{problem}", soft_wrap=True)


def main() -> int:
    """Run, print; exit code 1 when a trial lost state, hung, or ended otherwise than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=("contract", "real"), default="contract")
    parser.add_argument("--trials", type=int, help="default: 2000 contract, 200 real")
    parser.add_argument("--first", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="a line on stderr per trial")
    chosen = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO if chosen.verbose else logging.WARNING)
    count = chosen.trials or (2000 if chosen.tier == "contract" else 200)
    count = max(1, count // 10) if chosen.quick else count
    console = Console(stderr=chosen.json)
    verdicts, problems = run(chosen.tier, range(chosen.first, chosen.first + count), console)
    seconds = [v.elapsed_s for v in verdicts]
    found = {
        "tier": chosen.tier,
        "trials": count,
        "first_seed": chosen.first,
        "failed": len(problems),
        "outcomes": dict(Counter(v.outcome for v in verdicts)),
        "matrix": matrix(verdicts),
        "median_s": statistics.median(seconds) if seconds else None,
        "longest_s": max(seconds, default=None),
        "problems": problems,
    }
    if chosen.json:
        print(json.dumps(found))
    show(console, verdicts, problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
