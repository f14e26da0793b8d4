"""Plugins put on the path of one test as real distributions, and a small recorded run."""

from __future__ import annotations

import importlib
import random
import sys
import textwrap
from pathlib import Path

import pytest

from nereus_core.events import (
    Decided,
    DevicesChanged,
    EventLog,
    PrimitiveFinished,
    RunFinished,
    RunStarted,
    StepObserved,
    TransitionFinished,
    TransitionStarted,
)
from nereus_core.registry import Registry

ADAPTER = """
from nereus_core.capabilities import Capabilities
from nereus_core.declaration import AdapterDeclaration
from nereus_core.hookspecs import hookimpl

@hookimpl
def nereus_declare_adapter():
    return AdapterDeclaration("NAME", "for tests", Capabilities.everything(), REQUIREMENT, INSTALL)
"""


class Shelf:
    """A folder on sys.path that distributions are put on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.modules: list[str] = []

    def put(self, distribution: str, version: str = "1.0", **modules: str) -> None:
        """Install a distribution with one entry point per module (name=source)."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        lines = ["[nereus]"]
        for name, source in modules.items():
            module = f"plugin_{distribution.replace('-', '_')}_{name}"
            (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
            lines.append(f"{name} = {module}")
            self.modules.append(module)
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        importlib.invalidate_caches()

    def adapter(
        self,
        name: str,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        requirement: str | None = None,
        install: str = "",
        more: str = "",
    ) -> None:
        """Install a distribution with one adapter of this name."""
        source = ADAPTER.replace("NAME", name).replace("REQUIREMENT", repr(requirement))
        source = source.replace("INSTALL", repr(install)) + textwrap.dedent(more)
        self.put(distribution or f"dist-{name}", version, **{name: source})

    def registry(self, *names: str, strict: bool = False) -> Registry:
        """Load what the environment has, restricted to these entry points."""
        self._monkeypatch.setenv("NEREUS_PLUGINS", ",".join(names))
        self._monkeypatch.setenv("NEREUS_STRICT_PLUGINS", "1" if strict else "0")
        self._monkeypatch.setattr(Registry, "_of_process", {})
        return Registry.load()


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(Registry, "_of_process", {})
    made = Shelf(folder, monkeypatch)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


# --- A recorded run ---------------------------------------------------------------------------


def plan_json(**stages: str) -> dict:
    """``actor_train="tp2pp1:0,1|2,3"`` -> a plan in JSON form on node0."""
    return {
        stage.replace("_", "/"): {
            "layout": text.partition(":")[0],
            "units": [
                [f"node0:{i}" for i in unit.split(",")]
                for unit in text.partition(":")[2].split("|")
            ],
        }
        for stage, text in stages.items()
    }


START = plan_json(
    actor_generate="tp1pp1:0|1|2|3", ref_infer="tp2pp1:0,1", actor_train="tp2pp1:0,1|2,3"
)
GROWN = plan_json(
    actor_generate="tp2pp1:0,1|2,3", ref_infer="tp2pp1:0,1", actor_train="tp2pp2:0,1,2,3"
)
SMALL = plan_json(actor_generate="tp2pp1:0,1", ref_infer="tp2pp1:0,1", actor_train="tp2pp1:0,1")
ALL, HALF = tuple(f"node0:{i}" for i in range(4)), ("node0:0", "node0:1")


def _decided(step, trigger, path, admitted, rule, current, candidate, **figures):
    values = {"current_s": 1.9, "candidate_s": 1.4, "saving_s": 0.5, "transition_s": 0.8}
    values |= {"horizon_steps": 12.0, "decision_s": 0.004} | figures
    return Decided(step, trigger, path, admitted, rule, current, candidate, **values)


def _transition(log, clock, name, step, ops, edges, plan, *, error=None):
    """Emit a transition; ops: op_id, kind, text, stage, devices, start_s, end_s, predicted_s."""
    log.emit(
        TransitionStarted(
            name,
            step,
            tuple(
                {"op_id": o[0], "kind": o[1], "text": o[2], "stage": o[3], "devices": list(o[4]),
                 "predicted_s": o[7]} for o in ops
            ),
            tuple({"before": b, "after": a, "kind": k, "reason": r} for b, a, k, r in edges),
        )
    )  # fmt: skip
    for op_id, kind, text, stage, devices, start_s, end_s, predicted_s in ops:
        log.emit(
            PrimitiveFinished(name, op_id, kind, text, stage, tuple(devices), start_s, end_s,
                              3 << 20, 9 << 20, predicted_s,
                              error if op_id == ops[-1][0] else None)
        )  # fmt: skip
    elapsed_s = max(o[6] for o in ops) + 0.05
    clock[0] += elapsed_s
    log.emit(
        TransitionFinished(name, step, "rolled_back" if error else "done", elapsed_s,
                           elapsed_s * 0.9, len(ops) * 3 << 20, plan, error)
    )  # fmt: skip


def record_run(path: Path, *, adapt: bool = True, steps: int = 30) -> Path:
    """Write the events of a small made-up run: lengths grow, two devices go and come back."""
    clock, rng = [0.0], random.Random(7)
    with EventLog(path, lambda: clock[0]) as log:
        log.emit(RunStarted("sim", "grpo", "adapt" if adapt else "observe", START, ALL, 32))
        plan, healthy = START, ALL
        for step in range(steps):
            tokens = 60 + 6 * step + rng.uniform(-4, 4)
            base_s = 0.5 + tokens / 150 * (1.0 if plan is not GROWN else 0.72)
            base_s *= 1.7 if plan is SMALL else 1.0
            step_s = base_s * rng.uniform(0.96, 1.04)
            clock[0] += step_s
            log.emit(
                StepObserved(
                    step, step_s, None if step == 0 else base_s,
                    {s: step_s * w for s, w in zip(plan, (0.5, 0.1, 0.4), strict=True)},
                    tokens, tokens * 1.5, 48.0,
                    {d: int((0.9 + 0.02 * step + 0.1 * i) * 2**30)
                     for i, d in enumerate(healthy)},
                    healthy,
                    {"reward": step / steps + rng.uniform(-0.05, 0.05),
                     "actor_loss": 0.4 * 0.93**step, "kl": 0.01},
                )
            )  # fmt: skip
            if not adapt:
                continue
            if step == 4:
                rule = "saving 0.1 s x 3 steps = 0.3 s does not repay 0.8 s"
                log.emit(_decided(step, "tokens", "opportunistic", False, rule, START, GROWN,
                                  saving_s=0.1, horizon_steps=3.0))  # fmt: skip
            elif step == 9:
                rule = "saving 0.5 s x 12 steps = 6.0 s repays 0.8 s"
                log.emit(_decided(step, "tokens", "opportunistic", True, rule, plan, GROWN))
                ops = [
                    ("t1.1", "merge", "merge actor/generate#0 + actor/generate#1 -> "
                     "actor/generate#4(tp2pp1 on node0:0,node0:1)", "actor/generate",
                     ("node0:0", "node0:1"), 0.0, 0.41, 0.38),
                    ("t1.2", "merge", "merge actor/generate#2 + actor/generate#3 -> "
                     "actor/generate#5(tp2pp1 on node0:2,node0:3)", "actor/generate",
                     ("node0:2", "node0:3"), 0.0, 0.46, 0.38),
                    ("t1.3", "merge", "merge actor/train#0 + actor/train#1 -> "
                     "actor/train#2(tp2pp2 on node0:0,node0:1,node0:2,node0:3)", "actor/train",
                     ALL, 0.47, 0.93, 0.55),
                ]  # fmt: skip
                edges = [
                    ("t1.1", "t1.3", "order", "actor/generate comes before actor/train on node0:0"),
                    ("t1.2", "t1.3", "order", "actor/generate comes before actor/train on node0:2"),
                ]
                _transition(log, clock, "t1", step, ops, edges, GROWN)
                plan = GROWN
            elif step == 16:
                healthy = HALF
                log.emit(DevicesChanged(step, ALL[2:], (), ("actor/train#2", "actor/generate#5")))
                rule = "current plan is infeasible: node0:2, node0:3 are lost"
                log.emit(_decided(step, "devices", "urgent", True, rule, plan, SMALL,
                                  current_s=None, saving_s=None))  # fmt: skip
                ops = [
                    ("t2.1", "extend", "extend actor/train#3(tp2pp1 on node0:0,node0:1) from "
                     "actor/generate#4", "actor/train", HALF, 0.0, 0.31, 0.4),
                ]  # fmt: skip
                _transition(log, clock, "t2", step, ops, [], SMALL)
                plan = SMALL
            elif step == 22:
                healthy = ALL
                log.emit(DevicesChanged(step, (), ALL[2:]))
                rule = "saving 0.9 s x 12 steps = 10.8 s repays 0.8 s"
                log.emit(_decided(step, "devices", "opportunistic", True, rule, plan, GROWN))
                ops = [
                    ("t3.1", "destroy", "destroy actor/train#3 (parked)", "actor/train", HALF,
                     0.0, 0.12, 0.1),
                    ("t3.2", "extend", "extend actor/generate#6(tp2pp1 on node0:2,node0:3) from "
                     "actor/generate#4", "actor/generate", ALL[2:], 0.0, 0.35, 0.3),
                    ("t3.3", "extend", "extend actor/train#4(tp2pp2 on node0:0,node0:1,node0:2,"
                     "node0:3) from actor/train#3", "actor/train", ALL, 0.36, 0.8, 0.5),
                ]  # fmt: skip
                edges = [
                    ("t3.1", "t3.3", "release", "actor/train#4 needs node0:0, held by "
                     "actor/train#3 <until parked>"),
                    ("t3.2", "t3.3", "order", "stage order on node0:2"),
                ]  # fmt: skip
                _transition(log, clock, "t3", step, ops, edges, plan, error="seat node0:3 <hung>")
            else:
                log.emit(_decided(step, "none", "none", False, "within 5 % of the best possible",
                                  plan, None, candidate_s=None, saving_s=None, transition_s=None,
                                  horizon_steps=None))  # fmt: skip
        spent_s = 0.0 if not adapt else 0.98 + 0.36 + 0.85
        log.emit(RunFinished(steps, "done", clock[0], spent_s))
    return path


@pytest.fixture
def recorded(tmp_path):
    return record_run(tmp_path / "demo" / "events.jsonl")


@pytest.fixture
def recorded_baseline(tmp_path):
    return record_run(tmp_path / "fixed" / "events.jsonl", adapt=False)
