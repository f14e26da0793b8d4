"""Run every benchmark beside this file and print one table, or one JSON object with --json.

Each benchmark is a script that prints one JSON object when given ``--json``; figures are ratios
taken in one run. A benchmark that fails is shown and makes the exit code 1; the others still run.
Those that take minutes have ``--quick``, which they are given unless ``--full`` is asked for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 1200  # chosen: twice the longest benchmark on 2 cores


def run(script: Path, full: bool) -> dict[str, Any]:
    """Return the script's own JSON with its seconds, or its error."""
    begin_s = time.perf_counter()
    has_quick = '"--quick"' in script.read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [
                sys.executable,
                str(script),
                "--json",
                *(["--quick"] if has_quick and not full else []),
            ],
            capture_output=True,
            text=True,
            timeout=3 * TIMEOUT_S if full else TIMEOUT_S,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        found = {"error": "no result in time"}
    except subprocess.CalledProcessError as error:
        found = {"error": error.stderr.strip().splitlines()[-1:] or f"exit {error.returncode}"}
    except ValueError as error:
        found = {"error": f"printed no JSON object: {error}"}
    return {"seconds": round(time.perf_counter() - begin_s, 1), **found}


def flat(value: object, prefix: str = "") -> list[tuple[str, object]]:
    """List the leaves of nested mappings under dotted names."""
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in flat(v, f"{prefix}{k}.")]
    return [(prefix.rstrip("."), value)]


def main() -> int:
    """Run all, or those whose names are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks without .py; default: all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true", help="without --quick: up to an hour")
    chosen = parser.parse_args()
    scripts = {p.stem: p for p in sorted(Path(__file__).parent.glob("*.py")) if p.stem != "run_all"}
    unknown = sorted(set(chosen.names) - set(scripts))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(scripts)}")
    results = {}
    for name in chosen.names or scripts:
        print(f"{name} ...", file=sys.stderr)
        results[name] = run(scripts[name], chosen.full)
    if chosen.json:
        print(json.dumps(results, indent=2))
    else:
        for name, found in results.items():
            print(name)
            for key, value in flat(found):
                print(f"  {key:<48} {value}")
    return int(any("error" in found for found in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
