"""A real verl job with and without Nereus, on lengths that grow: seconds, transitions, memory.

*Growing*: one GRPO job on CPU, three times in one go: verl alone, watched (mode advise), and
changed while it runs, from 2 ranks to 4 (HSDP 2x2, 4 rollout replicas) when responses have grown,
and back. On two cores four ranks are no faster than two: what is measured is what Nereus costs, not
what it saves. *Outgrown*: responses whose activations do not fit beside the shards of two ranks;
verl alone dies of it, under Nereus the batch that would not fit gets four ranks, by Nereus's own
decision. The limit is kept by the kernel (``tests/support/verl_cpu/budget.py``).

Needs the environment of `tox -e real-verl`:
    tox exec -e real-verl -- python tests/benchmarks/verl_job.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

sys.path.append(str(Path(__file__).parents[1] / "support"))  # verl_cpu

from verl_cpu import outgrown
from verl_cpu.assets import make_assets
from verl_cpu.command import Ran, environment, overrides, run_job
from verl_cpu.stem import warm

from nereus_core.events import (
    Decided,
    Event,
    PrimitiveFinished,
    RunFinished,
    TransitionFinished,
    read_events,
)

LENGTHS = "8,8,16,32,32,32,32,32"
PLANS = {
    4: {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp1", 4]},
    6: {"actor/generate": ["tp1pp1", 2], "actor/train": ["tp2pp1", 2]},
}
UNLIMITED_BYTES = 1 << 40
"""A budget that nothing reaches: peaks are measured, no more."""
JOB_S = 900
"""For a job that hangs; chosen, not measured."""
OUT_OF_MEMORY = "can't allocate memory"
"""In the words of torch's DefaultCPUAllocator."""
TAIL = 3000
"""Characters shown of a job that ended otherwise than expected; chosen, not measured."""
ENABLE = ("+nereus.enable=true",)
ROOM = ("+nereus.backend.max_devices=4", "+nereus.policy.admission=never")


@dataclass(frozen=True)
class Variant:
    """One way to run a job."""

    name: str
    switch: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    dies: bool = False
    """Whether it is expected to die of memory."""


def growing(steps: int) -> tuple[Variant, ...]:
    """Return the three jobs that are compared."""
    shape = {"devices": 2, "ray_devices": 4, "steps": steps}
    env = {"VERL_CPU_LENGTHS": LENGTHS, "VERL_CPU_MEMORY": str(UNLIMITED_BYTES)}
    forced = {**env, "VERL_CPU_FORCED": json.dumps(PLANS)}
    return (
        Variant("verl alone", (), env, shape),
        Variant("watched", (*ENABLE, "+nereus.mode=advise"), env, shape),
        Variant("changed", (*ENABLE, *ROOM), forced, shape),
    )


def outgrowing() -> tuple[Variant, ...]:
    """Return the job that dies alone, and the same under Nereus."""
    fixed, env = outgrown.OVERRIDES, outgrown.environment()
    return (
        Variant("alone, outgrown", fixed, env, outgrown.SHAPE, dies=True),
        Variant("adapted, outgrown", (*fixed, *ENABLE, *outgrown.SWITCH), env, outgrown.SHAPE),
    )


def run(variant: Variant, assets: Path, work: Path, stem: str) -> dict[str, Any]:
    """Run one job to its end; returns its figures.

    Raises:
        SystemExit: it ended otherwise than expected; with the end of what it said.
    """
    modules, env = ["verl_cpu.platform", "verl_cpu.rollout"], dict(variant.env)
    if "VERL_CPU_FORCED" in env:
        modules.append("verl_cpu.forced")
        env["VERL_CPU_FORCED_LOG"] = str(work / "forced.jsonl")
    env["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
    arguments = [
        *overrides(assets, work, **variant.shape),
        *variant.switch,
        f"+ray_kwargs.ray_init.runtime_env.py_executable='{stem}'",
    ]
    if ENABLE[0] in variant.switch:
        arguments.append(f"+nereus.run_dir={work}/run")
    ran = run_job(work, arguments, timeout_s=JOB_S, env=env)
    died = bool(ran.returncode)
    if died != variant.dies or (died and OUT_OF_MEMORY not in ran.output):
        expected = f"a death with {OUT_OF_MEMORY!r}" if variant.dies else "0"
        said = f"{variant.name} ended with {ran.returncode}, expected {expected}"
        raise SystemExit(f"{said}: {ran.output[-TAIL:]}")
    row = {"job": variant.name, "exit_code": ran.returncode, **_steps(ran)}
    return row | _transitions(work / "run" / "events.jsonl")


def _steps(ran: Ran) -> dict[str, Any]:
    """Summarize what verl itself logged; the first step, in which all warm up, is left out."""
    seconds = [step["timing_s/step"] for step in ran.metrics]
    peaks = [step["actor/perf/max_memory_allocated_gb"] for step in ran.metrics]
    died = [line for line in ran.output.splitlines() if OUT_OF_MEMORY in line]
    found: dict[str, Any] = {"steps": len(seconds)}
    if ran.returncode:
        found["died of"] = died[-1].split("] ", 1)[-1][:200] if died else ran.output[-300:]
    if len(seconds) > 1:
        found |= {
            "step_s_median": round(statistics.median(seconds[1:]), 3),
            "all_steps_s": round(sum(seconds), 1),
            "peak_rank_mb": round(max(peaks) * 2**30 / 1e6, 1),
            "loss_last": ran.metrics[-1]["actor/pg_loss"],
            "boundary_s_median": round(
                statistics.median(step.get("nereus/boundary_s", 0.0) for step in ran.metrics), 4
            ),
        }
    return found


def _transitions(path: Path) -> dict[str, Any]:
    """Summarize what Nereus recorded."""
    if not path.exists():  # verl alone
        return {}
    events = [event for event, _ in read_events(path)]
    done = [event for event in events if isinstance(event, TransitionFinished)]
    finished = next((event for event in events if isinstance(event, RunFinished)), None)
    if finished is None:
        raise SystemExit(f"{path} has no RunFinished: the job ended without Nereus's own end.")
    admitted = [event for event in events if isinstance(event, Decided) and event.admitted]
    return {
        "transition_s": [round(event.elapsed_s, 2) for event in done],
        "outcomes": [event.outcome for event in done],
        "because": [event.signal for event in admitted],
        "phases_s": _phases(events, done),
        "moved_bytes": sum(event.moved_bytes for event in done),
        "part_in_transitions": round(finished.transition_s / finished.elapsed_s, 4),
    }


def _phases(events: Sequence[Event], done: Sequence[TransitionFinished]) -> dict[str, float]:
    """Add up the seconds of each phase over all primitives, which overlap; and what is left."""
    phases: dict[str, float] = defaultdict(float)
    for event in events:
        if isinstance(event, PrimitiveFinished):
            starts = [*event.phases_s.items(), ("end", event.end_s)]
            for (phase, start), (_, end) in pairwise(starts):
                phases[phase] += end - start
    # What is left when the last primitive has ended: fingerprints, and the epoch switch.
    last_s = [max((e.end_s for e in events if _of(e, t)), default=0.0) for t in done]
    if done:
        phases["verify and relink"] = sum(t.elapsed_s for t in done) - sum(last_s)
    return {phase: round(s, 2) for phase, s in phases.items()}


def _of(event: object, transition: TransitionFinished) -> TypeGuard[PrimitiveFinished]:
    return isinstance(event, PrimitiveFinished) and event.transition == transition.transition


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compare the jobs of one run."""
    seconds = {row["job"]: row.get("step_s_median") for row in rows}
    alone = seconds.get("verl alone")
    return {
        f"{name} / verl alone": round(seconds[name] / alone, 3)
        for name in ("watched", "changed")
        if alone and seconds.get(name)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="verl alone and changed, 6 steps")
    parser.add_argument("--only", choices=["growing", "outgrown"])
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="nereus-verl-job-") as name:
        folder = Path(name)
        usual = make_assets(folder / "assets")
        wide = make_assets(folder / "wide", **outgrown.MODEL)
        small = growing(6 if chosen.quick else 8)
        if chosen.quick:
            small = (small[0], small[2])
        todo = [(v, usual) for v in small if chosen.only != "outgrown"]
        if chosen.only == "outgrown" or not (chosen.quick or chosen.only):
            todo += [(v, wide) for v in outgrowing()]
        with warm(folder, environment(folder)) as stem:
            for variant, assets in todo:
                work = folder / variant.name.replace(", ", "-").replace(" ", "-")
                rows.append(run(variant, assets, work, stem))
                print(rows[-1], file=sys.stderr)  # a long run tells what it has so far
    found = {"jobs": rows, **ratios(rows)}
    if chosen.json:
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*names)
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in names))
    Console().print(table, {k: v for k, v in found.items() if k != "jobs"})


if __name__ == "__main__":
    main()
