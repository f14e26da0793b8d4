"""A real verl job with and without Nereus, on lengths that grow: seconds, transitions, memory.

Three runs of one GRPO job on CPU, in one go: verl alone; watched (mode advise); and changed while
it runs, from 2 ranks to 4 (HSDP 2x2, 4 rollout replicas) when lengths have grown, and back. Run it
in the environment of ``tox -e real-verl``. On two cores four ranks are no faster than two: what is
measured is what Nereus costs, not what it saves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

sys.path.append(str(Path(__file__).parents[1] / "support"))  # verl_cpu

from verl_cpu.assets import make_assets
from verl_cpu.command import Ran, overrides, run_job

from nereus_core.events import PrimitiveFinished, RunFinished, TransitionFinished, read_events

LENGTHS = "8,8,16,32,32,32,32,32"
PLANS = {
    4: {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp1", 4]},
    6: {"actor/generate": ["tp1pp1", 2], "actor/train": ["tp2pp1", 2]},
}
JOB_S = 400


def run(name: str, assets: Path, work: Path, steps: int) -> dict[str, Any]:
    """Run one of the three jobs; returns its figures."""
    modules = ["verl_cpu.platform", "verl_cpu.rollout"]
    extra, env = [], {"VERL_CPU_LENGTHS": LENGTHS}
    if name != "verl alone":
        extra = ["+nereus.enable=true", f"+nereus.run_dir={work}/run"]
        extra.append(f"+nereus.mode={'advise' if name == 'watched' else 'adapt'}")
    if name == "changed":
        modules.append("verl_cpu.forced")
        extra += ["+nereus.backend.max_devices=4", "+nereus.policy.admission=never"]
        env["VERL_CPU_FORCED"] = json.dumps(PLANS)
        env["VERL_CPU_FORCED_LOG"] = str(work / "forced.jsonl")
    env["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
    shape: dict[str, Any] = {"devices": 2, "ray_devices": 4, "steps": steps}
    ran = run_job(work, [*overrides(assets, work, **shape), *extra], timeout_s=JOB_S, env=env)
    if ran.returncode:
        raise SystemExit(f"{name}: exit code {ran.returncode}\n{ran.output[-3000:]}")
    return {"job": name, **_steps(ran), **_transitions(work / "run" / "events.jsonl")}


def _steps(ran: Ran) -> dict[str, Any]:
    seconds = [step["timing_s/step"] for step in ran.metrics]
    peaks = [step["actor/perf/max_memory_allocated_gb"] for step in ran.metrics]
    return {
        "steps": len(seconds),
        "step_s_median": round(statistics.median(seconds[1:]), 3),
        "peak_rank_gib": round(max(peaks), 3),
        "loss_last": ran.metrics[-1]["actor/pg_loss"],
        "boundary_s_median": round(
            statistics.median(step.get("nereus/boundary_s", 0.0) for step in ran.metrics), 4
        ),
    }


def _transitions(path: Path) -> dict[str, Any]:
    if not path.exists():  # verl alone
        return {"transition_s": [], "phases_s": {}, "part_in_transitions": 0.0}
    events = [event for event, _ in read_events(path)]
    phases: dict[str, float] = defaultdict(float)
    for event in events:
        if isinstance(event, PrimitiveFinished):
            starts = [*event.phases_s.items(), ("end", event.end_s)]
            for (phase, start), (_, end) in pairwise(starts):
                phases[phase] += end - start
    done = [event for event in events if isinstance(event, TransitionFinished)]
    elapsed_s = [event.elapsed_s for event in done]
    # What is left when the last primitive has ended: fingerprints, and the epoch switch.
    last_s = [max((e.end_s for e in events if _of(e, t)), default=0.0) for t in done]
    if done:
        phases["verify and relink"] = sum(elapsed_s) - sum(last_s)
    finished = next(event for event in events if isinstance(event, RunFinished))
    return {
        "transition_s": [round(s, 2) for s in elapsed_s],
        "phases_s": {phase: round(s, 2) for phase, s in phases.items()},
        "moved_bytes": sum(event.moved_bytes for event in done),
        "part_in_transitions": round(finished.transition_s / finished.elapsed_s, 4),
    }


def _of(event: object, transition: TransitionFinished) -> TypeGuard[PrimitiveFinished]:
    return isinstance(event, PrimitiveFinished) and event.transition == transition.transition


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="the job that is changed only")
    parser.add_argument("--steps", type=int, default=8)
    chosen = parser.parse_args()
    names = ["changed"] if chosen.quick else ["verl alone", "watched", "changed"]
    with tempfile.TemporaryDirectory(prefix="nereus-verl-job-") as folder:
        assets = make_assets(Path(folder) / "assets")
        rows = [
            run(name, assets, Path(folder) / name.replace(" ", "-"), chosen.steps) for name in names
        ]
    found: dict[str, Any] = {"jobs": rows}
    if len(rows) == 3:
        alone, watched, changed = (row["step_s_median"] for row in rows)
        found["watched / alone"] = round(watched / alone, 3)
        found["changed / alone"] = round(changed / alone, 3)
    if chosen.json:
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*(str(key) for key in rows[0]))
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in rows[0]))
    Console().print(table, {k: v for k, v in found.items() if k != "jobs"})


if __name__ == "__main__":
    main()
