"""Stages that share devices."""

from __future__ import annotations

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import require, same_state
from nereus_core.capabilities import Feature
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Kind
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Stage

ONE = Layout(1, 1)


@pytest.mark.needs(Feature.COLOCATED_STAGES, Kind.EXTEND, Kind.DESTROY)
@pytest.mark.needs(Kind.DESTROY, stage=Stage.GENERATE)
def test_colocated_stages_hand_over_devices(arrange: Arranger) -> None:
    """A device that one stage releases another acquires, at one boundary, whole and at once.

    If this fails, check that release is complete before the next stage allocates.
    """
    job = arrange.job()
    d = job.cluster.healthy
    plan = {
        ACTOR_TRAIN: Placement(ONE, ((d[0],),)),
        ACTOR_GENERATE: Placement(ONE, ((d[0],), (d[1],))),
        REF_INFER: Placement(ONE, ((d[0],),)),
    }
    subject = arrange.launch(job, Plan(plan), ACTOR_TRAIN)
    subject.step()
    before = subject.state(subject.own()[0])
    destroy = subject.destroy(subject.units.of(ACTOR_GENERATE)[1])
    extend = subject.extend([d[1]])
    with subject.boundary():
        subject.perform(destroy)
        empty = subject.harness.memory_bytes(d[1])
        require(empty == 0, "I7 released", f"{empty} bytes lie on {d[1]} after {destroy}")
        subject.perform(extend)
        same_state(before, subject.state(extend.unit), str(extend))
        subject.adapter.relink(Plan.of_units(subject.units))
    subject.step()


@pytest.mark.needs(Feature.COLOCATED_STAGES)
def test_sleeping_rollout_holds_no_kv_cache(arrange: Arranger) -> None:
    """Between steps a generating unit holds its weights and nothing of its last rollout.

    If this fails, check that the cache is freed, or its engine put to sleep, when the stage ends.
    """
    subject = arrange(Stage.GENERATE)
    device = subject.own()[0].devices[0]
    subject.step()  # a stage that trains may lie here too: from now on it has its moments
    before = subject.harness.memory_bytes(device)
    subject.step()
    after = subject.harness.memory_bytes(device)
    assert after == before, f"{after} bytes lie on {device} after a step, {before} before it"
