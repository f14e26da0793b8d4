"""Faults in every phase of transitions, in the tier asked for: TARGETS T13.

The bar: in 2,000 seeded trials of the contract tier, 200 of the real one, no state is lost, nothing
hangs, and every job steps on or stops with a named error. What a trial is: see
`nereus_conformance.trials`, which also writes the fault matrix.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from nereus_conformance.trial import Trials
from nereus_conformance.trials import LIMIT_S, harness_of, report, run_all

ADAPTERS = {"contract": "sim", "real": "torch"}
DEFAULT_TRIALS = {"contract": 2000, "real": 200}


def main() -> int:
    """Print the result; exit code 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=ADAPTERS, default="contract")
    parser.add_argument("--trials", type=int, help="default: 2000 contract, 200 real")
    parser.add_argument("--first", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    num_trials = chosen.trials or DEFAULT_TRIALS[chosen.tier]
    num_trials = max(1, num_trials // 10) if chosen.quick else num_trials
    with (
        closing(harness_of(ADAPTERS[chosen.tier], chosen.tier)) as harness,
        tempfile.TemporaryDirectory() as folder,
    ):
        trials = Trials(harness, Path(folder), limit_s=LIMIT_S[chosen.tier])
        begin_s, seeds = time.monotonic(), range(chosen.first, chosen.first + num_trials)
        found = report(run_all(trials, seeds), time.monotonic() - begin_s)
    found = {"tier": chosen.tier, **found}
    if chosen.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<12} {value}")
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
