from dataclasses import replace

import numpy as np
import pytest

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.coverage import Coverage
from nereus_core.cost.peaks import Peaks
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.layout import Layout
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Placement, Plan
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import ACTOR_TRAIN, BFLOAT16_MIXED, Job, grpo

CLUSTER = Cluster.homogeneous(1, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
MODELS = {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B}
JOB = Job(grpo(), MODELS, CLUSTER, 64, 1024, 8192, BFLOAT16_MIXED, micro_batch=2)
TOKENS = TokenStats.of([8000] * 64)
PLAN = Plan(dict.fromkeys(grpo().stages, Placement.packed(Layout(4, 1), CLUSTER.devices)))


def observation(step, peak_bytes):
    peaks = dict.fromkeys(CLUSTER.devices, peak_bytes)
    seconds = dict.fromkeys(PLAN, 10.0)
    return Observation(step, 30.0, seconds, TOKENS, TOKENS, peaks, frozenset(CLUSTER.devices))


LENGTHS = Lengths.of(observation(0, 0))


def test_a_plan_that_runs_does_not_stay_infeasible_by_an_overestimate():
    cost = CostModel(JOB)
    assert cost.memory_problem(PLAN, LENGTHS) is not None
    for step in range(2):
        cost = cost.refined(PLAN, observation(step, int(0.6 * H100_SXM.memory_bytes)))
    assert cost.memory_problem(PLAN, LENGTHS) is None


def test_a_measured_peak_is_approached_from_above_and_higher_ones_are_caught():
    cost = CostModel(JOB)
    truth = int(0.8 * cost.memory(PLAN, LENGTHS)[CLUSTER.devices[0]])
    for step in range(15):
        cost = cost.refined(PLAN, observation(step, truth))
    predicted = cost.memory(PLAN, LENGTHS)[CLUSTER.devices[0]]
    assert truth <= predicted < 1.12 * truth
    for step in range(15, 40):
        cost = cost.refined(PLAN, observation(step, int(1.3 * truth)))
    assert cost.memory(PLAN, LENGTHS)[CLUSTER.devices[0]] > 1.25 * truth


def test_corrections_are_bounded_and_settle():
    peaks = Peaks()
    for _ in range(50):
        peaks = peaks.seen(ACTOR_TRAIN, 100.0, -5.0)
    assert peaks.factor(ACTOR_TRAIN) > 0.25
    assert peaks.seen(ACTOR_TRAIN, 100.0, -5.0).factors == peaks.factors
    for _ in range(50):
        peaks = peaks.seen(ACTOR_TRAIN, 1.0, 1e9)
    assert peaks.factor(ACTOR_TRAIN) < 4.5


def test_without_measured_peaks_nothing_is_corrected():
    cost = CostModel(JOB).refined(PLAN, replace(observation(0, 0), peak_bytes={}))
    assert cost.peaks == Peaks()


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_intervals_come_to_hold_as_often_as_they_say_whatever_the_stated_deviation(scale):
    random, coverage, held = np.random.default_rng(1), Coverage(), []
    for _ in range(400):
        miss = abs(random.standard_t(4)) * scale
        held.append(miss <= coverage.deviations(0.95))
        coverage = coverage.seen(miss, 0.95)
    assert 0.85 <= np.mean(held[20:]) <= 0.95


def test_wider_confidence_is_never_narrower():
    coverage = Coverage(tuple(np.linspace(0.1, 3.0, 40)))
    widths = [coverage.deviations(c) for c in (0.4, 0.5, 0.8, 0.95, 1.0)]
    assert widths == sorted(widths)
    assert widths[0] == 0.0
