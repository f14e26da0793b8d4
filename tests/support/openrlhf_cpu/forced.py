"""Forces transitions on a job under test, and looks behind the adapter before and after each.

`OPENRLHF_TEST_FORCE` holds JSON: RL step -> model-stage -> list of units, each a list of indices in
the devices that the stage began on; a unit of several devices is tensor-parallel. What was seen
goes to `OPENRLHF_TEST_SEEN`, one JSON object a line. `OPENRLHF_TEST_FAULT` holds JSON: RL step ->
names of faults (see FAULTS) that strike the transition of that step; "dead engine", "dead
rank", "dead generator" and "hung broadcast" (also "... and dead generator") strike after it.
`OPENRLHF_TEST_LEAVE` holds JSON: RL step -> model-stage -> indices of devices that are asked back
from then on, none where it is empty; what Nereus does about it is its own decision.
`OPENRLHF_TEST_NODE` holds JSON: RL step -> "drained", "gone" or "killed", which is what becomes of
the Ray node at 127.0.0.2 before the boundary of that step; "killed amid generation", "...
experience" or "... broadcast" strikes in the step that follows, and Nereus is told nothing; "came"
lets it come in the first place. Devices of that node are called "away:0", those of the other
"home:0", and those that the job may have from Ray "free:0" in what `OPENRLHF_TEST_FORCE` holds.
"""

import json
import os
import time
from pathlib import Path

import forced_nodes
from forced_faults import (
    FAULTS,
    kill_a_rank_amid_training,
    kill_an_engine,
    kill_the_generator,
    stop_before_broadcast,
)
from forced_look import look, same_tokens, timed_phases, trains_on, waits_on
from post_import import on_import

_began_on = {}
"""Devices of each stage before the first transition."""

_free = {}
"""Devices that were free when the first of them was asked for."""


def _plan(session, wanted):
    from nereus_core.layout import Layout
    from nereus_core.plan import Placement, Plan
    from nereus_core.workload import ModelStage

    now = dict(session.controller.plan)
    for stage, placement in now.items():
        _began_on.setdefault(str(stage), sorted(placement.devices))
    for stage, units in wanted.items():
        placed = tuple(tuple(_device(session, stage, i) for i in unit) for unit in units)
        now[ModelStage.parse(stage)] = Placement(Layout(len(units[0])), placed)
    return Plan(now)


def _device(session, stage, name):
    """Find a device by its index among those that a stage began on, or by node and index.

    What is free keeps its name in later steps, when it is the job's.
    """
    if isinstance(name, int):
        return _began_on[stage][name]
    where, index = name.split(":")
    if where == "free":
        if name not in _free:
            offered = sorted(session.controller._adapter._running.offered)
            _free.update({f"free:{number}": device for number, device in enumerate(offered)})
        return _free[name]
    devices = session.controller._adapter.job().cluster.devices
    return [d for d in devices if (d.node == forced_nodes.NODE) == (where == "away")][int(index)]


def _ask_back(session, wanted):
    """Write the devices that are to leave into the file that the adapter reads."""
    _plan(session, {})  # notes where stages began
    names = [str(_began_on[stage][i]) for stage, found in wanted.items() for i in found]
    (session.config.run_dir / "leaving").write_text("\n".join(names))
    with (session.config.run_dir / "asked").open("a") as asked:
        asked.writelines(f"{name}\n" for name in names)


def _session(module):
    wanted = json.loads(os.environ.get("OPENRLHF_TEST_FORCE", "{}"))
    leave = json.loads(os.environ.get("OPENRLHF_TEST_LEAVE", "{}"))
    node = json.loads(os.environ.get("OPENRLHF_TEST_NODE", "{}"))
    faults = json.loads(os.environ.get("OPENRLHF_TEST_FAULT", "{}"))
    decide, decide_amid = module.Session.at_boundary, module.Session.amid_step

    def amid_step(self):
        _amid(self, decide_amid, self.controller._adapter._running.signals.step + 1)

    def at_boundary(self):
        running = self.controller._adapter._running
        step = running.signals.step + 1
        becomes = node.get(str(step), "")
        if becomes.startswith(forced_nodes.AMID):
            figures = decide(self)
            forced_nodes.arm(self, step, becomes.removeprefix(forced_nodes.AMID))
            return figures
        if str(step) in {**leave, **node}:
            before = look(self)
            if becomes:
                forced_nodes.strike(self, becomes)
            else:
                _ask_back(self, leave[str(step)])
            figures = decide(self)
            _write({"step": step, "before": before, **_after(self), "ranks on": waits_on(self)})
            return figures
        figures = decide(self)
        if str(step) in wanted:
            _force(self, step, wanted[str(step)], faults.get(str(step), ()))
        elif "dead engine" in faults.get(str(step), ()):
            kill_an_engine(running)
        elif "dead generator" in faults.get(str(step), ()):
            kill_the_generator(running.trainer)
        elif "dead rank" in faults.get(str(step), ()):
            kill_a_rank_amid_training(running)
        elif found := [f for f in faults.get(str(step), ()) if f.startswith("hung broadcast")]:
            stop_before_broadcast(running, also_generator="generator" in found[0])
        return figures

    module.Session.at_boundary, module.Session.amid_step = at_boundary, amid_step


def _amid(session, decide, step):
    """Let Nereus decide in the middle of a step in which a node was killed."""
    killed = {"step": step, "killed": forced_nodes.killed_s[step]}
    try:
        before = None if session.lost & trains_on(session) else look(session)
        decide(session)
    except Exception as raised:
        _write(killed | _said(raised) | {"time": time.time()})
        raise
    _write(killed | {"before": before, **_after(session), "ranks on": waits_on(session)})


def _force(session, step, wanted, faults):
    """Carry out a transition, and time what it does."""
    before = look(session)
    for fault in faults:
        FAULTS[fault]()
    phases = timed_phases(session.controller._adapter)
    start_s = time.monotonic()
    try:
        session.controller.go_to(_plan(session, wanted), "asked for by a test")
    except Exception as raised:
        _write({"step": step} | _said(raised))
        raise
    timed = {"held_s": time.monotonic() - start_s, "phases": phases}
    _write({"step": step, "before": before} | timed | _after(session))


def _after(session):
    return {"after": look(session), "tokens": same_tokens(session)}


def _said(raised):
    return {"error": f"{type(raised).__name__}: {raised}"}


def _write(record):
    with Path(os.environ["OPENRLHF_TEST_SEEN"]).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def install():
    on_import("nereus_plugins.session", _session)
