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

from nereus_conformance.trials import Trials, harness_of, report

ADAPTERS = {"contract": "sim", "real": "torch"}


def main() -> int:
    """Print the result; exit code 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=ADAPTERS, default="contract")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="200 trials")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    num_trials = 200 if chosen.quick else chosen.trials
    with (
        closing(harness_of(ADAPTERS[chosen.tier], chosen.tier)) as harness,
        tempfile.TemporaryDirectory() as folder,
    ):
        trials, begin_s = Trials(harness, Path(folder)), time.monotonic()
        results = [trials.run(trials.draw(seed)) for seed in range(num_trials)]
        found = report(results, time.monotonic() - begin_s)
    found = {"tier": chosen.tier, **found}
    if chosen.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<12} {value}")
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
