"""OpenRLHF: one real `train_ppo_ray` job without Nereus, watched by it, and changed by it, in turn.

Sampling is all but greedy, so that the jobs see the same responses as long as bfloat16 breaks no
tie another way, and gradient norms can be compared: the watched job is a second fixed one. It runs
on this machine's CPU with a tiny model: what counts are ratios within one run. The first step of a
job, in which engines warm up, is left out. A transition's seconds are those for which the job was
held; the changed job goes engines 2xTP1 -> 1xTP2 -> 2xTP1 and actor 2 -> 1 -> 2 ranks.

Needs the environment of `tox -e real-openrlhf`:
    tox exec -e real-openrlhf -- python tests/benchmarks/openrlhf_job.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))  # openrlhf_job

JOB = {
    "vllm__num_engines": 2,
    "actor__num_gpus_per_node": 2,
    "algo__advantage__estimator": "reinforce",
    "algo__kl__init_coef": 0,
    "algo__kl__use_loss": False,
    "rollout__top_p": 1e-6,
}
FORCE = {
    "2": {"actor/train": [[0]]},
    "3": {"actor/train": [[0], [1]]},
    "4": {"actor/generate": [[0, 1]]},
    "5": {"actor/generate": [[0], [1]]},
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=8, help="of each job")
    chosen = parser.parse_args()
    found = measured(chosen.steps) if find_spec("openrlhf") else {"skipped": "no openrlhf here"}
    if chosen.json:
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", title="one OpenRLHF job, three times")
    for key, value in found.items():
        table.add_row(key, str(value))
    Console().print(table)


def measured(steps: int) -> dict[str, Any]:
    """Run the three jobs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        from openrlhf_job import make_assets

        assets = make_assets(folder / "assets", prompts=8 * steps)
        plain = _run(assets, folder / "fixed", steps, None)
        seen = _run(assets, folder / "watched", steps, "observe")
        fixed, watched = _step_s(plain), _step_s(seen)
        changed = _run(assets, folder / "changed", steps, "adapt")
        held = _events(folder / "changed", "TransitionFinished")
        finished = _events(folder / "changed", "RunFinished")[0]
    changing_s = sum(event["elapsed_s"] for event in held)
    return {
        "steps": steps,
        "fixed_step_s": fixed,
        "watched_step_s": watched,
        "watched_over_fixed": watched / fixed,
        "changed_step_s": _step_s(changed),
        "transitions": len(held),
        "transitions_done": sum(event["outcome"] == "done" for event in held),
        "group_transition_s": statistics.mean(event["elapsed_s"] for event in held[:2]),
        "engine_transition_s": statistics.mean(event["elapsed_s"] for event in held[2:]),
        "group_transition_steps": statistics.mean(e["elapsed_s"] for e in held[:2]) / fixed,
        "part_of_run_in_transitions": changing_s / finished["elapsed_s"],
        "grad_norm_gap_of_two_fixed_jobs": _gap(plain, seen),
        "grad_norm_gap_of_the_changed_job": _gap(plain, changed),
        "moved_bytes": sum(event["moved_bytes"] for event in held),
    }


def _run(assets: Path, folder: Path, steps: int, mode: str | None) -> Any:
    import openrlhf_job

    words = openrlhf_job.flags(assets, folder, data__max_samples=8 * steps, **JOB)
    more = {}
    if mode is not None:
        words += ["--nereus.enable", f"--nereus.mode={mode}", f"--nereus.run_dir={folder / 'run'}"]
        words += ["--nereus.policy.admission=never"]
    if mode == "adapt":
        more = {
            "OPENRLHF_TEST_FORCE": json.dumps(FORCE),
            "OPENRLHF_TEST_SEEN": str(folder / "seen"),
        }
    ran = openrlhf_job.run(words, folder, more=more, timeout_s=900)
    if ran.code:
        raise RuntimeError(f"the job ended with {ran.code}: {ran.output[-3000:]}")
    return ran


def _step_s(ran: Any) -> float:
    """Median seconds of a step, the first left out."""
    return statistics.median(step["timing/step_total"] for step in ran.steps()[1:])


def _gap(one: Any, other: Any) -> float:
    """Largest relative difference of the actor's gradient norm in any step."""
    pairs = zip(one.steps(), other.steps(), strict=True)
    norms = [(a["actor_grad_norm"], b["actor_grad_norm"]) for a, b in pairs]
    return max(abs(a - b) / a for a, b in norms)


def _events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


if __name__ == "__main__":
    main()
