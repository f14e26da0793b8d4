"""The cost model against measurements of others: training plans and serving, out of sample.

Bars: multi-node training 5% MAPE, single-node 4%, serving no worse than the package
`aiconfigurator` on the same rows; stated 90% intervals hold 85 to 95% of the rows. Rows of the
test folder never influence a fit. Without --test the rows of --train are split as registered in
`fits/vtrain.py`, before any model was fitted to that split.

    python tests/benchmarks/cost_model.py [--train DIR] [--test DIR] [--json] [--quick]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

PARTS = ("vtrain", "serving")
"""Modules of `fits`, each with ``predict(train_dir, test_dir) -> dict[str, Score]``; a part that
has more to say (splits, residuals) has ``details()`` after it."""
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def report(train: Path, test: Path | None, *, quick: bool = False) -> dict[str, object]:
    """One entry per bar, one ``details`` entry, or under ``skipped`` why there is none.

    Quick: the same scores, without the details: nothing left out, no rival.
    """
    found: dict[str, object] = {}
    details: dict[str, object] = {}
    skipped: dict[str, str] = {}
    for name in PARTS:
        try:
            part = importlib.import_module(f"fits.{name}")
        except ModuleNotFoundError as error:
            skipped[name] = f"cannot import it: {error}"
            continue
        try:
            found |= {key: score.as_dict() for key, score in part.predict(train, test).items()}
        except FileNotFoundError as error:
            skipped[name] = str(error)
            continue
        if not quick:
            details |= getattr(part, "details", dict)()
    return found | {"details": details, "skipped": skipped}


def main() -> None:
    """Fit, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--train", type=Path, default=Path(os.environ.get("NEREUS_DATA", DATA)))
    parser.add_argument("--test", type=Path, help="a folder with the same file names")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="scores alone, without details")
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    found = report(asked.train, asked.test, quick=asked.quick)
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
