"""Regret of choosing by the cost model: vTrain's measured plans, grouped by what was to be trained.

A group is all measured plans of one model on one number of GPUs with one global batch: the choice a
planner has. The cost model is fitted to all other groups, predicts every plan of the group, and its
fastest is taken; regret is that plan's measured time over the group's best, less one. Bar (TARGETS
T2): reported as median and worst; 18 of 18 within 5% is what the paper claims of its own settings.

    python tests/benchmarks/regret.py [--json]

Data: NEREUS_DATA/vtrain/ground_truth_multi.csv; without it the report says that it was skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from fits.vtrain import Fit
from fits.vtrain_rows import Rows

DATA = Path(os.environ.get("NEREUS_DATA", Path(__file__).parents[2] / "../shared/data"))
WITHIN = 0.05
KEYS = ("hidden", "layers", "devices", "batch")


def regrets(rows: Rows, measured_s: np.ndarray) -> list[dict[str, Any]]:
    """Choose in every group of two plans or more, fitted to the other groups."""
    keys = np.stack([rows.columns[k] for k in KEYS], axis=1)
    groups, which, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    which = which.ravel()
    found = []
    for g in (int(i) for i in np.flatnonzero(sizes >= 2)):
        inside = np.flatnonzero(which == g)
        fit = Fit.to(rows.at(np.flatnonzero(which != g)))
        guess, _, alone = fit.predict(rows.at(inside))
        seconds = measured_s[inside]
        best_s = seconds.min()
        chosen, by_white_box = (inside[int(p.argmin())] for p in (guess, alone))
        found.append(
            {
                **{k: int(v) for k, v in zip(KEYS, groups[g], strict=True)},
                "plans": len(inside),
                "regret": float(measured_s[chosen] / best_s - 1),
                "white_box_regret": float(measured_s[by_white_box] / best_s - 1),
                "random_regret": float(np.mean(seconds / best_s - 1)),
                "chosen": rows.plan(int(chosen)),
                "best": rows.plan(int(inside[int(seconds.argmin())])),
            }
        )
    return found


def summary(values: list[float]) -> dict[str, float]:
    """Of regrets."""
    v = np.array(values)
    return {
        "median": float(np.median(v)),
        "mean": float(v.mean()),
        "worst": float(v.max()),
        "exact": float((v == 0).mean()),
        "within_5_percent": float((v <= WITHIN).mean()),
    }


def report() -> dict[str, Any]:
    """Measure, or say why not."""
    try:
        rows = Rows.read(DATA / "vtrain" / "ground_truth_multi.csv")
    except FileNotFoundError as error:
        return {"skipped": str(error)}
    # A plan that was run several times counts once, with its median: luck is no plan.
    plans: dict[str, list[int]] = {}
    for i in range(len(rows)):
        plans.setdefault(rows.plan(i), []).append(i)
    seconds = rows.seconds
    firsts = np.array([members[0] for members in plans.values()])
    measured_s = np.array([np.median(seconds[members]) for members in plans.values()])
    found = regrets(rows.at(firsts), measured_s)
    return {
        "rows": len(rows),
        "plans": len(plans),
        "groups": len(found),
        "fitted": summary([g["regret"] for g in found]),
        "white_box": summary([g["white_box_regret"] for g in found]),
        "random_choice": summary([g["random_regret"] for g in found]),
        "by_group": found,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    found = report()
    if asked.json or "skipped" in found:
        json.dump(found, sys.stdout, indent=2)
        print()
        return
    print(f"{found['groups']} groups of {found['plans']} plans ({found['rows']} rows)")
    for name in ("fitted", "white_box", "random_choice"):
        s = found[name]
        print(
            f"{name:<14} median {s['median']:.1%}  mean {s['mean']:.1%}  worst {s['worst']:.1%}  "
            f"exact {s['exact']:.0%}  within 5% {s['within_5_percent']:.0%}"
        )
    for g in sorted(found["by_group"], key=lambda g: -g["regret"])[:5]:
        print(f"  {g['regret']:.1%} of {g['plans']}: {g['chosen']} instead of {g['best']}")


if __name__ == "__main__":
    main()
