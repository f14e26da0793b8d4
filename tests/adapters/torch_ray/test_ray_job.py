"""The quick example on a Ray cluster of two nodes: one is killed, another comes, losses stay."""

import time
import tomllib
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from nereus_core.attach import attached
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.events import DevicesChanged, EventLog, StepObserved, read_events
from nereus_core.registry import Registry
from nereus_core.runner import drive

pytestmark = pytest.mark.real

EXAMPLE = Path(__file__).parents[3] / "examples" / "adaptive_grpo" / "quick.toml"
OTHER = {Device("node1", 0), Device("node1", 1)}
STEPS = 8


def config(run_dir, **backend):
    values = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    values["run_dir"] = str(run_dir)
    values["job"]["steps"] = STEPS
    values["backend"] = {"seats": 4, "nodes": 2, **backend}
    return NereusConfig.of(values)


def run(chosen, between=lambda job: None):
    """Run the job as `nereus run` does; `between` is called with it after every boundary."""
    registry, events = Registry.load(), chosen.run_dir / "events.jsonl"
    with ExitStack() as opened:
        launched = opened.enter_context(closing(registry.launch("torch", chosen)))
        log = opened.enter_context(closing(EventLog(events, time.monotonic)))
        controller = opened.enter_context(
            attached(registry, launched.handle, chosen, log, time.monotonic)
        )

        def at_boundary():
            controller.at_boundary()
            between(launched.handle)

        drive(launched, at_boundary)
        controller.finished("done")
    return [event for event, _ in read_events(events)]


def losses(events):
    return [e.metrics["actor/loss"] for e in events if isinstance(e, StepObserved)]


def test_a_job_outlives_a_node_and_takes_in_another(nodes, until, tmp_path):
    nodes.add()
    nodes.add()
    seen = []

    def between(job):
        pool, done = job.fleet.pool, job.steps_done
        if done == 3 and not seen:
            assert {u.model_stage for u in job.units.values()} == set(job.job.workload.stages)
            seen.append(pool.node_id(min(OTHER)))
            nodes.kill(nodes.of(seen[0]))
            until(lambda: not OTHER & pool.alive, "the loss of a node")
        elif done == 5 and len(seen) == 1:
            assert {d for u in job.units.values() for d in u.devices}.isdisjoint(OTHER)
            seen.append("back")
            nodes.add()
            until(lambda: pool.returned == OTHER, "seats on the new node")

    with_loss = run(config(tmp_path / "ray", pool="ray", address=nodes.address), between)
    local = run(config(tmp_path / "local"))

    changes = [e for e in with_loss if isinstance(e, DevicesChanged)]
    assert [(set(e.lost), set(e.returned)) for e in changes] == [
        (set(map(str, OTHER)), set()),
        (set(), set(map(str, OTHER))),
    ]
    assert len(losses(with_loss)) == STEPS
    assert losses(with_loss) == pytest.approx(losses(local), abs=1e-9)


def test_a_node_that_is_about_to_leave_is_left_first(nodes, until, tmp_path):
    nodes.add()
    nodes.add()
    drained = []

    def between(job):
        pool = job.fleet.pool
        if job.steps_done == 3 and not drained:
            drained.append(pool.node_id(min(OTHER)))
            nodes.drain(drained[0], 600)
            until(lambda: pool.draining == OTHER, "the drain notice")
        elif job.steps_done == 5:
            assert {d for u in job.units.values() for d in u.devices}.isdisjoint(OTHER)
            assert pool.alive.isdisjoint(OTHER)

    events = run(config(tmp_path / "ray", pool="ray", address=nodes.address), between)
    assert len(losses(events)) == STEPS
    assert drained
