"""OpenRLHF: one real `train_ppo_ray` job with and without Nereus, on responses that grow.

Three parts, on this machine's CPU with tiny models: what counts are ratios within one run.

- ``growing``: a GRPO job whose responses grow sixfold, run three times: by OpenRLHF alone,
  watched by Nereus, and changed by it (engines 2xTP1 -> 1xTP2 -> 2xTP1, actor 2 -> 1 -> 2 ranks).
  The first step of a job, in which engines warm up, is left out of the median. A transition's
  seconds are those for which the job was held; ``peak_bytes`` is the most that all processes of
  the job hold in memory that is theirs (PSS), sampled twice a second.
- ``memory``: each rank of the actor may have so many bytes beyond those it began with, and the
  kernel enforces it (RLIMIT_DATA). Responses grow until the activations of a step no longer fit
  on ranks of [2, tp1]. OpenRLHF alone dies there; with Nereus the job goes on as [1, tp2], by its
  own decision.
- ``starts``: the same change of layout, engines 2xTP1 -> 1xTP2, in two ways: live, by Nereus, and
  by ending the job and starting it with the other flags. A restart costs what a job of one step
  takes beyond that step; saving a checkpoint and loading it, which a real one needs, comes on top.

Processes of the first two parts are forked from one that has imported everything
(tests/support/openrlhf_cpu/stem.py), those of ``starts`` are not: a job that is started has to
import. Each part takes two to six minutes.

Needs the environment of `tox -e real-openrlhf`:
    tox exec -e real-openrlhf -- python tests/benchmarks/openrlhf_job.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # before this file: openrlhf_job

PARTS = ("growing", "memory", "starts")
PROMPTS, SAMPLES = 8, 2
_LIMIT = "OPENRLHF_TEST_RANK_BYTES"
_JOB_S = 600.0
"""Longest that one job may take, from processes that import everything on a busy machine."""
_NO_MEMORY = "can't allocate memory"
"""What torch's allocator for the CPU says."""
GROWING = {
    "vllm__num_engines": 2,
    "actor__num_gpus_per_node": 2,
    "algo__advantage__estimator": "reinforce",
    "algo__kl__init_coef": 0,
    "algo__kl__use_loss": False,
    "rollout__max_new_tokens": 96,
    "data__max_len": 128,
}
FORCE = {
    "2": {"actor/train": [[0]]},
    "3": {"actor/train": [[0], [1]]},
    "4": {"actor/generate": [[0, 1]]},
    "5": {"actor/generate": [[0], [1]]},
}
MEMORY = {
    "vllm__num_engines": 1,
    "actor__num_gpus_per_node": 2,
    "algo__advantage__estimator": "reinforce",
    "algo__kl__init_coef": 0,
    "algo__kl__use_loss": False,
    "rollout__max_new_tokens": 304,
    "data__max_len": 336,
    "train__micro_batch_size": 8,
    "ds__attn_implementation": "sdpa",
}
MEMORY_MODEL = {"hidden": 64, "intermediate": 256, "layers": 24, "heads": 2}
MEMORY_LENGTHS = (32, 96, 160, 190, 300, 300)
FITS, TOO_LONG = 190, 300
PLANNED_BYTES = 150 * 2**20
"""What Nereus is told that a device has. Its model counts tensors, and finds [2, tp1] to need more
than nine tenths of this from 181 tokens on, [1, tp2] from 337."""


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=8, help="of each job of the part growing")
    parser.add_argument(
        "--keep", type=Path, help="folder for what the jobs write; removed if not given"
    )
    chosen = parser.parse_args()
    if chosen.steps <= (last := max(map(int, FORCE))):
        parser.error(f"--steps {chosen.steps}: expected more than {last}, the last that is changed")
    found: dict[str, Any] = {"skipped": "no openrlhf here"}
    if find_spec("openrlhf"):
        with _folder(chosen.keep) as folder, redirect_stdout(sys.stderr):  # frameworks print
            found = measured(folder, chosen.parts, chosen.steps)
    if chosen.json:
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    for part, figures in found.items():
        table = Table("figure", "value", title=f"one OpenRLHF job, {part}")
        for key, value in figures.items() if isinstance(figures, dict) else [("", figures)]:
            table.add_row(key, str(value))
        Console().print(table)


def measured(folder: Path, parts: Sequence[str], steps: int) -> dict[str, Any]:
    """Measure these parts."""
    import openrlhf_job

    found: dict[str, Any] = {}
    if {"growing", "memory"} & set(parts):
        folder.mkdir(parents=True, exist_ok=True)
        with openrlhf_job.stem(folder):
            if "growing" in parts:
                found["growing"] = growing(folder / "growing", steps)
            if "memory" in parts:
                found["memory"] = memory(folder / "memory")
    if "starts" in parts:
        found["starts"] = starts(folder / "starts")
    return found


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# --- Responses that grow --------------------------------------------------------------------------


def growing(folder: Path, steps: int) -> dict[str, Any]:
    """Run the job three times: without Nereus, watched by it, and changed by it."""
    from openrlhf_job import make_agent, make_assets

    assets = make_assets(folder / "assets", prompts=PROMPTS * steps)
    lengths = [16 * (1 + step * 5 // max(1, steps - 1)) for step in range(steps)]
    jobs, peaks = {}, {}
    for name, mode in (("fixed", None), ("watched", "observe"), ("changed", "adapt")):
        agent = make_agent(folder / name, assets, lengths, PROMPTS * SAMPLES)
        words = dict(GROWING, train__agent_func_path=agent, data__max_samples=PROMPTS * steps)
        with _peak() as peak:
            jobs[name] = _run(assets, folder / name, words, mode, force=FORCE)
        peaks[name] = peak[0]
    plain, seen, changed = (_steps(jobs[name]) for name in jobs)
    held = _events(folder / "changed", "TransitionFinished")
    ends = _events(folder / "changed", "RunFinished")[0]
    fixed_s = statistics.median(step["timing/step_total"] for step in plain[1:])
    return {
        "steps": steps,
        "response_tokens": lengths,
        "fixed_step_s": fixed_s,
        "watched_step_s": statistics.median(step["timing/step_total"] for step in seen[1:]),
        "changed_step_s": statistics.median(step["timing/step_total"] for step in changed[1:]),
        "wall_s": {name: ran.wall_s for name, ran in jobs.items()},
        "transitions": [_transition(event, folder / "changed") for event in held],
        "group_transition_s": statistics.mean(event["elapsed_s"] for event in held[:2]),
        "engine_transition_s": statistics.mean(event["elapsed_s"] for event in held[2:]),
        "part_of_run_in_transitions": sum(e["elapsed_s"] for e in held) / ends["elapsed_s"],
        "peak_bytes": peaks,
    }


def _transition(event: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Say what a transition cost, and in which of its phases."""
    lines = (folder / "seen").read_text(encoding="utf-8").splitlines()
    phases = {r["step"]: r["phases"] for r in map(json.loads, lines)}[event["step"] + 1]
    units = {stage: len(p["units"]) for stage, p in event["plan"].items()}
    return {
        "outcome": event["outcome"],
        "held_s": event["elapsed_s"],
        "phases_s": phases,
        "moved_bytes": event["moved_bytes"],
        "units_after": units,
    }


# --- Memory that does not suffice -----------------------------------------------------------------


def memory(folder: Path) -> dict[str, Any]:
    """Run a job under a limit of memory twice: by OpenRLHF alone, and with Nereus.

    The kernel counts allocators and buffers too, so that its limit is measured first: it lies in
    the middle between what a rank of [2, tp1] takes until the longest responses that shall fit, and
    until those that shall not, by the same steps: what allocators keep of them counts too.
    """
    from openrlhf_job import make_assets

    assets = make_assets(folder / "assets", prompts=PROMPTS * len(MEMORY_LENGTHS), **MEMORY_MODEL)
    until = {n: MEMORY_LENGTHS[: MEMORY_LENGTHS.index(n) + 1] for n in (FITS, TOO_LONG)}
    fits, more = (_taken(assets, folder / str(n), steps) for n, steps in until.items())
    found: dict[str, Any] = {
        "response_tokens": MEMORY_LENGTHS,
        "bytes_taken": {FITS: fits, TOO_LONG: more},
        "limit_bytes": (limit := (fits + more) // 2),
        "planned_bytes": PLANNED_BYTES,
    }
    for name, mode in (("fixed", None), ("nereus", "adapt")):
        ran = _grown(assets, folder / name, MEMORY_LENGTHS, mode, {_LIMIT: str(limit)})
        found[name] = {
            "exit_code": ran.code,
            "steps_done": len(_steps(ran)),
            "died_of": next((s for s in ran.output.splitlines() if _NO_MEMORY in s), None),
        }
    found["nereus"]["transitions"] = [
        {key: event[key] for key in ("step", "outcome", "elapsed_s", "plan")}
        for event in _events(folder / "nereus", "TransitionFinished")
    ]
    return found


def _taken(assets: Path, folder: Path, lengths: Sequence[int]) -> int:
    """Return the most bytes that a rank of the actor takes, without a limit."""
    _grown(assets, folder, lengths, None, {"OPENRLHF_TEST_PEAKS": str(folder)})
    return max(int(path.read_text(encoding="utf-8")) for path in folder.glob("peak-*"))


def _grown(
    assets: Path, folder: Path, lengths: Sequence[int], mode: str | None, more: dict[str, str]
) -> Any:
    """Run the job of this part on responses of these lengths, one step each."""
    from openrlhf_job import make_agent

    agent = make_agent(folder, assets, lengths, PROMPTS * SAMPLES)
    words = dict(MEMORY, train__agent_func_path=agent, data__max_samples=PROMPTS * len(lengths))
    flags = [f"--nereus.backend.memory_bytes={PLANNED_BYTES}"] if mode else []
    flags += ['--nereus.constraints.pin={"actor/generate"="tp1pp1"}'] if mode else []
    return _run(assets, folder, words, mode, more=more, flags=flags)


# --- Engines that start ---------------------------------------------------------------------------


def starts(folder: Path) -> dict[str, Any]:
    """Change engines live, and by a restart of the job with the other layout."""
    from openrlhf_job import make_assets

    assets = make_assets(folder / "assets", prompts=PROMPTS * 4)
    words = {k: v for k, v in GROWING.items() if not k.startswith("rollout")}
    words |= {"actor__num_gpus_per_node": 1, "data__max_len": 64}
    force = {"3": {"actor/generate": [[0, 1]]}}  # by then, the seats that wait have imported
    _run(assets, folder / "live", words | {"data__max_samples": PROMPTS * 4}, "adapt", force=force)
    (event,) = _events(folder / "live", "TransitionFinished")
    live = _transition(event, folder / "live")
    other = {"vllm__num_engines": 1, "vllm__tensor_parallel_size": 2}
    ran = _run(assets, folder / "other", words | other | {"data__max_samples": PROMPTS}, None)
    (step,) = _steps(ran)
    restart = {"wall_s": ran.wall_s, "step_s": step["timing/step_total"]}
    restart["restart_s"] = restart["wall_s"] - restart["step_s"]
    return {"live": live, "restart": restart, "ratio": restart["restart_s"] / live["held_s"]}


# --- Jobs -----------------------------------------------------------------------------------------


def _run(
    assets: Path,
    folder: Path,
    words: dict[str, Any],
    mode: str | None,
    *,
    force: dict[str, Any] | None = None,
    more: dict[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Any:
    """Run a job by OpenRLHF alone, or in a mode of Nereus; ``force`` is for `forced.py`."""
    import openrlhf_job

    line = openrlhf_job.flags(assets, folder, **words)
    module = "openrlhf.cli.train_ppo_ray" if mode is None else "nereus_plugins.openrlhf"
    if mode is not None:
        line += ["--nereus.enable", f"--nereus.mode={mode}", f"--nereus.run_dir={folder / 'run'}"]
    if mode == "adapt" and force is not None:
        line.append("--nereus.policy.admission=never")
        seen = str(folder / "seen")
        more = (more or {}) | {"OPENRLHF_TEST_FORCE": json.dumps(force), "OPENRLHF_TEST_SEEN": seen}
    ran = openrlhf_job.run([*line, *flags], folder, more=more, timeout_s=_JOB_S, module=module)
    if ran.code and _LIMIT not in (more or {}):
        how = f"was killed after {_JOB_S:.0f} s" if ran.code == -9 else f"ended with {ran.code}"
        raise RuntimeError(f"the job {how}: {ran.output[-3000:]}")
    return ran


def _steps(ran: Any) -> list[dict[str, float]]:
    found: list[dict[str, float]] = ran.steps()
    return found


def _events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Sample what all processes below this one hold; the most lies in what is yielded."""
    import psutil

    most, over = [0], threading.Event()

    def sample() -> None:
        own = psutil.Process()
        while not over.wait(0.5):
            held = 0
            for process in own.children(recursive=True):
                try:
                    held += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            most[0] = max(most[0], held)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield most
    finally:
        over.set()
        sampler.join()


if __name__ == "__main__":
    main()
