"""A replayed run: real controller, imagined job; what it is charged, what policies do with it."""

from dataclasses import replace

import pytest

from nereus_core.adapter import Adapter
from nereus_core.cluster import Cluster
from nereus_core.config import NereusConfig, PolicyConfig
from nereus_core.controller import Controller
from nereus_core.cost.op_classes import OpClass
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.errors import ConfigError, UnitLost
from nereus_core.events import Decided, EventLog, StepObserved, TransitionFinished
from nereus_core.knowledge import Knowledge
from nereus_core.launched import Launched
from nereus_core.layout import Layout
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Placement, Plan
from nereus_core.runner import drive
from nereus_core.sim.models import QWEN2_5_7B
from nereus_core.sim.replay import ReplayAdapter, ReplayJob, Trace, TransitionPace, Truth
from nereus_core.transition import compile_transition
from nereus_core.workload import ACTOR_GENERATE, BFLOAT16_MIXED, Job, grpo

CLUSTER = Cluster.homogeneous(4, 4, H100_SXM, NVLINK4, INFINIBAND_NDR)
JOB = Job(grpo(), {"actor": QWEN2_5_7B, "ref": QWEN2_5_7B}, CLUSTER, 256, 512, 4096, BFLOAT16_MIXED)
TRUTH = Truth({OpClass.GEMM: 0.6, OpClass.GEMM_DECODE: 0.7}, TransitionPace(2.0, 0.2, "for tests"))
SHAPE = (0.2, 0.6, 0.9, 1.2, 2.1)
ALL = frozenset(f"node{i}" for i in range(4))


def trace(*mean, nodes=(), **more):
    return Trace("test", "made up", mean, (128.0,) * len(mean), SHAPE, nodes, **more)


def whole(layout=(4, 1), devices=CLUSTER.devices):
    placed = Placement.packed(Layout(*layout), devices)
    return Plan(dict.fromkeys(JOB.workload.stages, placed))


class Replayed:
    def __init__(self, trace, plan=None, truth=TRUTH, **policy):
        self.job = ReplayJob(JOB, plan or whole(), trace, truth)
        self.adapter, self.events = ReplayAdapter(self.job), []
        log = EventLog(None, self.job.clock_s)
        log.subscribe(lambda event, at_s: self.events.append(event))
        self.controller = Controller(
            self.adapter,
            NereusConfig.of({"policy": policy}),
            log,
            lambda hook, **values: None,
            self.job.clock_s,
        )

    def run(self):
        drive(self.job, self.controller.at_boundary)
        return self

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]


def test_it_is_a_job_and_an_adapter_like_any_other():
    replayed = Replayed(trace(500))
    assert isinstance(replayed.job, Launched)
    assert isinstance(replayed.adapter, Adapter)


def test_the_clock_is_made_of_steps_and_transitions():
    ran = Replayed(trace(*[500] * 12), whole((4, 4))).run()
    steps = sum(e.step_s for e in ran.of(StepObserved))
    assert ran.job.clock_s() == pytest.approx(steps + ran.adapter.transition_s)
    assert ran.adapter.transition_s > 0
    assert ran.adapter.transition_s == pytest.approx(
        sum(e.elapsed_s for e in ran.of(TransitionFinished))
    )


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    once, again = (Replayed(trace(*[500] * 8)).run().job.clock_s() for _ in range(2))
    other = Replayed(trace(*[500] * 8), truth=replace(TRUTH, seed=1)).run().job.clock_s()
    assert once == again != other


def test_the_controller_learns_what_it_was_not_told():
    steps = Replayed(trace(*[500] * 20), truth=replace(TRUTH, drift=0.0)).run().of(StepObserved)
    off = [abs(e.predicted_s / e.step_s - 1) for e in steps]
    assert off[0] > 0.5
    assert max(off[-3:]) < 0.15


def test_primitives_on_disjoint_devices_overlap_and_on_shared_ones_do_not():
    replayed = Replayed(trace(500))
    target = whole((2, 1))
    graph = compile_transition(replayed.adapter.units(), target, JOB, prefix="t")
    stages = JOB.workload.stages
    with replayed.adapter.boundary(stages, timeout_s=1):
        for op in graph.topological():
            replayed.adapter.split(op)
    pace_s = TRUTH.transition.primitive_s
    # Twelve splits: four at once on disjoint devices, three stages one after another; state of
    # the train stage crosses to the host and back, for want of room.
    assert len(graph.ops) == 12
    assert 3 * pace_s <= replayed.adapter.transition_s < 5 * pace_s


def test_devices_leave_with_notice_and_the_next_step_is_not_lost():
    nodes = (ALL, ALL, ALL, ALL - {"node3"}, ALL - {"node3"}, ALL, ALL)
    ran = Replayed(trace(*[500] * 7, nodes=nodes)).run()
    assert ran.job.finished
    assert not ran.job.lost
    assert any(d.trigger == "devices" and d.path == "urgent" for d in ran.of(Decided))
    used = [{d.partition(":")[0] for d in e.healthy} for e in ran.of(StepObserved)]
    assert "node3" not in used[3]


def test_units_on_devices_that_left_are_lost_and_the_step_says_so():
    replayed = Replayed(trace(*[500] * 3, nodes=(ALL, ALL - {"node3"}, ALL)))
    replayed.job.step()
    with pytest.raises(UnitLost, match="their devices left"):
        replayed.job.step()


def test_a_trace_draws_the_shape_it_was_given():
    stats, clipped = trace(1000).responses(0, JOB, seed=3)
    assert stats.mean == pytest.approx(1000, rel=0.02)
    assert (stats.max, clipped) == (2100, 0.0)
    assert trace(3000).responses(0, JOB, seed=3)[1] == pytest.approx(0.2, abs=0.01)


def test_columns_of_a_trace_have_one_length():
    with pytest.raises(ValueError, match="2 steps and columns"):
        Trace("t", "", (1.0, 2.0), (1.0,), SHAPE)


def test_slow_spells_slow_the_stage_they_were_measured_in():
    slow = trace(500, 500, slow={ACTOR_GENERATE: (1.0, 3.0)})
    steps = Replayed(slow, truth=replace(TRUTH, noise=0, drift=0, misfit=0), admission="never")
    first, second = steps.run().of(StepObserved)
    name = str(ACTOR_GENERATE)
    assert second.stage_s[name] / first.stage_s[name] == pytest.approx(3, rel=0.05)


# --- policies ------------------------------------------------------------------------------------


def test_a_fixed_configuration_keeps_its_layouts_and_drops_replicas_only():
    nodes = (ALL, ALL, ALL - {"node3"}, ALL - {"node3"}, ALL, ALL)
    for policy, regrows in (("never", False), ("dp-scaling-only", True)):
        ran = Replayed(trace(*[500] * 6, nodes=nodes), admission=policy).run()
        plan = ran.controller.plan
        assert {p.layout for p in plan.values()} == {Layout(4, 1)}
        assert all(d.policy == policy for d in ran.of(Decided))
        assert ({p.dp for p in plan.values()} == {4}) is regrows


def test_payback_leaves_a_poor_plan_and_keeps_a_good_one():
    poor = Replayed(trace(*[500] * 12), whole((4, 4))).run()
    fixed = Replayed(trace(*[500] * 12), whole((4, 4)), admission="never").run()
    assert poor.job.clock_s() < 0.9 * fixed.job.clock_s()
    good = Replayed(trace(*[500] * 12), poor.controller.plan).run()
    assert good.adapter.transitions == 0


def test_nothing_is_changed_for_a_job_that_is_about_to_end():
    ran = Replayed(trace(500), whole((4, 4))).run()
    assert ran.adapter.transitions == 0
    assert [d.horizon_signal for d in ran.of(Decided)] == ["end"]


def test_nothing_flaps_when_lengths_swing_around_a_level():
    swing = [1000 * (1 + (0.08 if i % 2 else -0.08)) for i in range(40)]
    ran = Replayed(trace(*swing)).run()
    late = [e for e in ran.of(TransitionFinished) if e.step > 8]
    assert not late
    assert [d.trigger for d in ran.of(Decided) if d.step > 8 and d.trigger == "tokens"] == []


def test_a_misspelt_policy_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"policy.admission: got 'paybak'.*mean 'payback'"):
        NereusConfig.of({"policy": {"admission": "paybak"}})


def test_memory_is_planned_for_the_longest_response_of_some_steps():
    known = Knowledge.of_job(JOB, PolicyConfig(), None)
    for step, longest in enumerate((3000, 800, 900)):
        stats = TokenStats(400, 400, 700, longest, 16)
        devices = frozenset(CLUSTER.devices)
        known = known.stepped(whole(), Observation(step, 1.0, {}, stats, stats, {}, devices))
    assert known.lengths.response_max == 3000
    assert known.lengths.response_p95 == 700
