"""What makes no sense is an error with a name, or is left out and counted; never a silent plan."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_job import MemoryJob
from plans import tiny_job

from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.errors import JobError, ObservationError
from nereus_core.events import EventLog, InputIgnored, StepObserved
from nereus_core.layout import Layout
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Placement, Plan
from nereus_core.report.explain import explain_ignored
from nereus_core.report.record import RunRecord
from nereus_core.report.sections import tiles
from nereus_core.sane import check_job, sane
from nereus_core.workload import ACTOR_TRAIN, ModelStage

JOB = tiny_job(4)
STATS = TokenStats(20, 20, 30, 32, 16)
GOOD = Observation(
    3, 1.0, {ACTOR_TRAIN: 0.5}, STATS, STATS, {JOB.cluster.devices[0]: 100},
    frozenset(JOB.cluster.devices),
)  # fmt: skip
STRANGER = Device("elsewhere", 7)


def test_a_sound_observation_passes_as_it_is():
    assert sane(GOOD, JOB, 2) == (GOOD, ())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0])
def test_timings_that_are_none_are_left_out(wrong):
    seen, ignored = sane(replace(GOOD, step_s=wrong, stage_s={ACTOR_TRAIN: wrong}), JOB, 2)
    assert (seen.step_s, dict(seen.stage_s)) == (0.0, {})
    assert [i.field for i in ignored] == ["step_s", "stage_s[actor/train]"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"response_tokens": replace(STATS, mean=-5.0)}, "response_tokens"),
        ({"prompt_tokens": replace(STATS, p95=math.nan)}, "prompt_tokens"),
        ({"response_tokens": replace(STATS, mean=99.0)}, "response_tokens"),  # above its maximum
        ({"response_tokens": replace(STATS, quantiles=(1.0, 2.0))}, "response_tokens.quantiles"),
        (
            {"response_tokens": replace(STATS, quantiles=(5.0,) * 9 + (4.0,))},
            "response_tokens.quantiles",
        ),
        ({"prompt_tokens": replace(STATS, quantiles=(math.nan,) * 10)}, "prompt_tokens.quantiles"),
        ({"peak_bytes": {STRANGER: 5}}, "peak_bytes[elsewhere:7]"),
        ({"peak_bytes": {JOB.cluster.devices[0]: -5}}, "peak_bytes[node0:0]"),
        ({"healthy": frozenset({*JOB.cluster.devices, STRANGER})}, "healthy"),
        ({"draining": frozenset({STRANGER})}, "draining"),
        ({"stage_s": {ModelStage.parse("reward/infer"): 1.0}}, "stage_s[reward/infer]"),
        ({"efficiency": {"gemm": 1.5}}, "efficiency[gemm]"),
        ({"efficiency": {"gemm": math.nan}}, "efficiency[gemm]"),
        ({"clip_ratio": 1.5}, "clip_ratio"),
        ({"step": 1}, "step"),
    ],
)
def test_each_part_that_makes_no_sense_is_named(changes, field):
    seen, ignored = sane(replace(GOOD, **changes), JOB, 2)
    assert [i.field for i in ignored] == [field]
    assert sane(replace(seen, step=3), JOB, 2)[1] == ()


def test_an_empty_set_of_devices_is_an_error():
    with pytest.raises(ObservationError, match="none of the job's 4 devices is reported healthy"):
        sane(replace(GOOD, healthy=frozenset()), JOB, 2)


def _on(**changes):
    return replace(JOB, cluster=replace(JOB.cluster, **changes))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (_on(intra_node=replace(JOB.cluster.intra_node, bytes_per_s=0)), "bytes_per_s is 0"),
        (_on(device_spec=replace(JOB.cluster.device_spec, peak_flops_per_s=math.nan)), "is nan"),
        (_on(devices=()), "the cluster has no device"),
        (_on(devices=JOB.cluster.devices[:1] * 2), "node0:0 is listed twice"),
        (replace(JOB, max_response_tokens=-1), "max_response_tokens is -1"),
        (replace(JOB, global_batch=0), "global_batch is 0"),
        (replace(JOB, models={}), "no model for actor, ref"),
    ],
)
def test_a_job_that_cannot_be_planned_is_named(job, message):
    with pytest.raises(JobError, match=message):
        check_job(job)


# --- through the controller ---------------------------------------------------------------------


class Sick:
    """A memory job whose observations are changed on their way to the controller."""

    def __init__(self):
        self.events = []
        plan = Plan(
            dict.fromkeys(JOB.workload.stages, Placement.packed(Layout(1, 1), JOB.cluster.devices))
        )
        self.job = MemoryJob(JOB, plan)
        self.log = EventLog(None, lambda: 0.0)
        self.log.subscribe(lambda event, at_s: self.events.append((event, at_s)))
        self.controller = Controller(
            self.job.adapter, NereusConfig(), self.log, lambda hook, **values: None, lambda: 0.0
        )

    def step(self, mean=20.0, **changes):
        self.job.step(mean)
        honest = self.job.adapter.observed
        self.job.adapter.observed = lambda adapter: replace(honest(adapter), **changes)
        try:
            return self.controller.at_boundary()
        finally:
            self.job.adapter.observed = honest


def test_a_run_goes_on_with_bad_sensors_and_says_how_many_measurements_it_ignored():
    sick = Sick()
    for _ in range(4):
        sick.step()
    plan, predicted_s = sick.controller.plan, sick.controller.predicted_s
    sick.step(step_s=math.nan, stage_s={ACTOR_TRAIN: -1.0}, healthy=frozenset({
        *JOB.cluster.devices, STRANGER}))  # fmt: skip
    assert sick.controller.plan == plan
    assert sick.controller.predicted_s == pytest.approx(predicted_s, rel=0.05)
    run = RunRecord.of(sick.events)
    assert [i.count for i in run.ignored] == [1, 2, 3]
    assert "3 measurements ignored" in explain_ignored(run)
    assert "Measurements ignored" in tiles(run)


def test_a_clock_that_goes_backwards_teaches_nothing():
    sick = Sick()
    for _ in range(4):
        sick.step()
    known = sum(isinstance(e, StepObserved) for e, _ in sick.events)
    predicted_s = sick.controller.predicted_s
    assert sick.step(step=1) is None
    assert sum(isinstance(e, StepObserved) for e, _ in sick.events) == known
    assert sick.controller.predicted_s == predicted_s
    assert [e.field for e, _ in sick.events if isinstance(e, InputIgnored)] == ["step"]


def test_lengths_that_make_no_sense_leave_lengths_as_they_were():
    sick = Sick()
    for _ in range(4):
        sick.step()
    predicted_s = sick.controller.predicted_s
    sick.step(response_tokens=TokenStats(math.nan, 0, 0, 0, 16))
    assert sick.controller.predicted_s == pytest.approx(predicted_s, rel=0.05)


anything = st.floats(allow_nan=True, allow_infinity=True)


@given(anything, anything, anything, anything, st.integers(-5, 10))
def test_whatever_is_reported_what_passes_is_finite(step_s, stage_s, mean, efficiency, step):
    seen, _ = sane(
        replace(
            GOOD,
            step=step,
            step_s=step_s,
            stage_s={ACTOR_TRAIN: stage_s},
            response_tokens=replace(STATS, mean=mean),
            efficiency={"gemm": efficiency},
        ),
        JOB,
        2,
    )
    figures = [seen.step_s, *seen.stage_s.values(), *seen.efficiency.values()]
    assert all(math.isfinite(v) and v >= 0 for v in [*figures, seen.response_tokens.mean])
