"""Transitions: how fast their graph is compiled, how near its completion time is to the optimum,
that no interleaving is stuck, growth to 2,048 devices (simulated), and the race against migration
stage by stage.

Bars (T9, T10): a graph at 1,024 devices in 1.22 ms or 10,000 times as fast as SCIP plans the same
transition (its time limit is a lower bound where it does not finish); completion time within 6.9%
of the exact optimum wherever CP-SAT proves it, a lower bound beyond; no stuck state; all trials of
the race succeed, and the stage-by-stage baseline deadlocks in some.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))  # interleavings

from transitions.checked import checked
from transitions.compiling import compiling
from transitions.growing import growing
from transitions.optimality import optimality
from transitions.race import raced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, instances and trials")
    parser.add_argument(
        "--only",
        choices=("compile", "optimality", "growth", "exhaustive", "race"),
        help="one part",
    )
    chosen = parser.parse_args()
    parts = {
        "compile": compiling,
        "optimality": optimality,
        "growth": growing,
        "exhaustive": checked,
        "race": raced,
    }
    found: dict[str, Any] = {
        name: part(quick=chosen.quick)
        for name, part in parts.items()
        if chosen.only in (None, name)
    }
    if chosen.json:
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name, value in found.items():
        rows = value if isinstance(value, list) else [value]
        table = Table(*(str(k) for k in rows[0]), title=name)
        for row in rows:
            table.add_row(*(str(v) for v in row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
