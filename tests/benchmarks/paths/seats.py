"""Seats: a running job whose training stage is moved from plan to plan as the controller does."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paths.crew import GIVEN_BACK_S

from nereus_adapters.torch.adapter import TorchAdapter
from nereus_adapters.torch.job import TorchJob
from nereus_adapters.torch.setup import planned, start
from nereus_core.config import NereusConfig
from nereus_core.events import EventLog
from nereus_core.plan import Plan
from nereus_core.traffic import primitive_bytes
from nereus_core.transition import compile_transition, execute
from nereus_core.workload import ACTOR_TRAIN

REPEATS = 3
"""Of everything warm. The quickest is reported: what disturbs a measurement on a shared machine
only ever adds to it. All figures are listed beside it."""


def config(run_dir: Path, model: dict[str, Any], seats: int, plan: str) -> NereusConfig:
    """Describe a job; generation and reference stay on the first seat."""
    job = {
        "model": model,
        "prompts_per_step": 8,
        "responses_per_prompt": 1,
        "max_prompt_tokens": 8,
        "max_response_tokens": 2,
        "plan": {"actor/train": plan},
        "task_args": {"response_tokens": 2},
    }
    return NereusConfig.of({"run_dir": run_dir, "job": job, "backend": {"seats": seats}})


@contextlib.contextmanager
def job(model: dict[str, Any], seats: int, plan: str) -> Iterator[TorchJob]:
    """Run a job whose moments are not zero any more."""
    with tempfile.TemporaryDirectory(prefix="nereus-bench-") as folder:
        running = start(config(Path(folder), model, seats, plan))
        try:
            running.step()
            yield running
        finally:
            running.close()


class Bench:
    """Moves one job from plan to plan."""

    def __init__(self, running: TorchJob) -> None:
        self.running, self.adapter = running, TorchAdapter(running)
        self._number = 0

    def target(self, train: str) -> Plan:
        """Keep every stage but training where it is."""
        plan = planned(self.running.job, {"actor/train": train})
        others = dict(Plan.of_units(self.running.units).items())
        return Plan({**others, ACTOR_TRAIN: plan[ACTOR_TRAIN]})

    def change(self, train: str) -> dict[str, Any]:
        """Move to a plan as the controller does; return what it cost."""
        running, target = self.running, self.target(train)
        before = running.units
        self._number += 1
        pids = [running.fleet.pool.pid(d) for d in sorted(running.fleet.pool.alive)]
        held = {pid: _memory(pid, "VmRSS") for pid in pids}
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
        begin_s, begin_cpu_s = time.perf_counter(), _cpu_s(pids) + time.process_time()
        graph = compile_transition(before, target, running.job, prefix=f"b{self._number}")
        with (
            self.adapter.boundary(graph.stages, timeout_s=60),
            EventLog(None, time.monotonic) as log,
        ):
            outcome = execute(graph, self.adapter, log=log, timeout_s=120)
        seconds = time.perf_counter() - begin_s
        cpu_s = _cpu_s(pids) + time.process_time() - begin_cpu_s
        say(f"to {train}: {seconds:.3f} s")
        units, bound, kept = before, 0, 0
        for op in graph.topological():
            receipt = outcome.receipts[op.op_id]
            found = primitive_bytes(op, units, running.job)
            bound, kept = bound + found[0], kept + found[1]
            units = units.replace(receipt.ended, receipt.created)
        return {
            "seconds": seconds,
            "cpu_s": round(cpu_s, 3),
            "moved_bytes": outcome.moved_bytes,
            "lower_bound_bytes": bound,
            "kept_bytes": kept,
            "peak_bytes": sum(_memory(pid, "VmHWM") - held[pid] for pid in pids),
            "primitives": len(graph.ops),
        }

    def repeated(self, there: str, back: str, times: int = REPEATS) -> dict[str, Any]:
        """Do a transition once and then several times; return the quickest of the later ones.

        The first is cold where a seat that has never held so much gets state.
        """
        time.sleep(GIVEN_BACK_S)
        first = self.change(there)
        found = []
        for _ in range(times):
            self.change(back)
            found.append(self.change(there))
        return min(found, key=_seconds) | {
            "first_seconds": round(first["seconds"], 4),
            "first_peak_bytes": first["peak_bytes"],
            "all_seconds": [round(f["seconds"], 4) for f in found],
        }


def say(what: str) -> None:
    """Tell on stderr what runs."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _seconds(found: dict[str, Any]) -> float:
    return float(found["seconds"])


def _cpu_s(pids: list[int]) -> float:
    """Processor seconds of some processes so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text(encoding="ascii") for pid in pids]
    ticks = sum(int(t) for stat in stats for t in stat.rsplit(")", 1)[1].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory(pid: int, what: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(what + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"process {pid} has no {what}")
