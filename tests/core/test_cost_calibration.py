import math
from dataclasses import replace

import numpy as np
import pytest

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel, EfficiencyTable, Lengths, OpClass
from nereus_core.cost.step import makespan, regions
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Placement, Plan
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Job, ppo

CLUSTER = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
# Large enough that products and all-reduces both matter at tp2.
SMALL = ModelSpec("small", "llama", 8, 512, 1408, 8, 4, 64, 8000)
MODELS = {"actor": SMALL, "ref": SMALL, "critic": SMALL.as_critic("critic")}
JOB = Job(ppo(), MODELS, CLUSTER, 32, 64, 256)
TOKENS = [20, 60, 80, 100, 120, 180, 200, 240] * 4
PROMPTS = TokenStats.of([32, 48])


def plan_of(layout: Layout, devices=CLUSTER.devices) -> Plan:
    return Plan(dict.fromkeys(JOB.workload.stages, Placement.packed(layout, devices)))


NOW = plan_of(Layout(1, 1))
UNSEEN = [plan_of(Layout(2, 1)), plan_of(Layout(4, 1)), plan_of(Layout(2, 2))]


class World:
    """A job whose true efficiencies are a third of the prior, each stage off by its own factor."""

    def __init__(self, seed: int, factor: float = 3.0) -> None:
        prior = EfficiencyTable.prior(CLUSTER)
        self._noise = np.random.default_rng(seed)
        spread = self._noise.uniform(0.85, 1.15, len(OpClass))
        table = replace(prior, log_inverse=prior.log_inverse + np.log(factor * spread))
        residual = {s: float(self._noise.normal(0, 0.1)) for s in JOB.workload.stages}
        size = len(OpClass) + len(residual)
        self.cost = CostModel(
            JOB, replace(table, log_residual=residual, covariance=np.zeros((size, size)))
        )

    def seconds(self, plan: Plan, lengths: Lengths) -> float:
        return self.cost.step(plan, lengths).step.mean_s

    def observe(self, plan: Plan, step: int, slow: float = 1.0) -> Observation:
        lengths = Lengths.of(self._observation(step, 0.0, {}))
        stage_s = {
            s: t * float(self._noise.lognormal(0, 0.02)) * slow
            for s, t in self.cost.step(plan, lengths).stage_s.items()
        }
        step_s, _ = makespan(JOB.workload, stage_s, regions(plan))
        return self._observation(step, step_s + 0.1, stage_s)

    def _observation(self, step, step_s, stage_s) -> Observation:
        return Observation(
            step, step_s, stage_s, PROMPTS, TokenStats.of(TOKENS), {}, frozenset(CLUSTER.devices)
        )


def learned(world: World, steps: int, plan: Plan = NOW) -> CostModel:
    cost = CostModel(JOB)
    for step in range(steps):
        cost = cost.refined(plan, world.observe(plan, step))
    return cost


def error(cost: CostModel, world: World, plan: Plan, lengths: Lengths, overhead_s=0.1) -> float:
    sync_s = sum(world.cost.step(plan, lengths).sync_s.values())
    truth = world.seconds(plan, lengths) - sync_s + overhead_s
    return abs(cost.step(plan, lengths).step.mean_s / truth - 1)


LENGTHS = Lengths.of(World(0)._observation(0, 0.0, {}))


@pytest.mark.parametrize("seed", range(5))
def test_the_current_plan_is_predicted_within_five_percent_after_a_few_steps(seed):
    world = World(seed)
    assert error(CostModel(JOB), world, NOW, LENGTHS) > 0.5
    assert error(learned(world, 5), world, NOW, LENGTHS) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_predictions_of_plans_never_run_improve(seed):
    world, before = World(seed), CostModel(JOB)
    alone, after = learned(world, 8), learned(world, 8, UNSEEN[0])
    for plan in [NOW, *UNSEEN[1:]]:  # whose classes tp2 uses too
        assert error(after, world, plan, LENGTHS) < 0.6 * error(before, world, plan, LENGTHS)
    for plan in UNSEEN:  # tp1 never saw their all-reduces, so these stay at the prior
        assert error(alone, world, plan, LENGTHS) < error(before, world, plan, LENGTHS)


def test_a_factor_of_ten_is_learned_too():
    world = World(1, factor=10.0)
    assert error(learned(world, 12), world, NOW, LENGTHS) < 0.05


def test_classes_that_were_never_used_stay_at_their_prior():
    table = learned(World(0), 10).efficiencies
    prior = EfficiencyTable.prior(CLUSTER)
    assert table.of(OpClass.ALL_REDUCE_INTER) == pytest.approx(prior.of(OpClass.ALL_REDUCE_INTER))
    assert table.uncertainty(OpClass.ALL_REDUCE_INTER) == pytest.approx(
        prior.uncertainty(OpClass.ALL_REDUCE_INTER)
    )
    assert table.uncertainty(OpClass.GEMM_DECODE) < prior.uncertainty(OpClass.GEMM_DECODE)


def test_one_slow_step_moves_the_prediction_little_and_a_lasting_change_is_followed():
    world = World(2)
    cost = learned(world, 10)
    settled = cost.step(NOW, LENGTHS).step.mean_s
    hiccup = cost.refined(NOW, world.observe(NOW, 10, slow=5.0))
    assert hiccup.step(NOW, LENGTHS).step.mean_s < 1.2 * settled
    for step in range(10, 18):
        cost = cost.refined(NOW, world.observe(NOW, step, slow=2.0))
    stages = sum(cost.step(NOW, LENGTHS).stage_s.values())
    truth = 2 * sum(world.cost.step(NOW, LENGTHS).stage_s.values())
    assert stages == pytest.approx(truth, rel=0.05)


def test_efficiencies_stay_in_zero_one_whatever_is_measured():
    world = World(3, factor=0.25)
    table = learned(world, 20).efficiencies
    assert all(0 < table.of(c) <= 1 for c in OpClass)
    assert error(learned(world, 20), world, NOW, LENGTHS) < 0.05


@pytest.mark.parametrize("factor", [3.0, 0.25])  # 0.25: faster than the peaks, at the bound
def test_the_covariance_stays_symmetric_and_positive(factor):
    cost = CostModel(JOB)
    world = World(4, factor)
    for step in range(40):
        plan = [NOW, *UNSEEN][step // 5 % 4]
        cost = cost.refined(plan, world.observe(plan, step, slow=3.0 if step % 7 == 0 else 1.0))
        covariance = cost.efficiencies.covariance
        assert np.allclose(covariance, covariance.T)
        assert np.linalg.eigvalsh(covariance).min() > -1e-12


def test_intervals_narrow_as_steps_are_seen():
    world = World(5)
    first, later = (
        CostModel(JOB).step(NOW, LENGTHS).step,
        learned(world, 10).step(NOW, LENGTHS).step,
    )
    assert later.high_s / later.low_s < first.high_s / first.low_s
    assert first.high_s / first.low_s > 1.3


def test_uncertainty_shared_by_two_plans_cancels_in_their_difference():
    cost = CostModel(JOB)
    two = CLUSTER.devices[:2]
    other = Plan({**NOW, ACTOR_TRAIN: Placement.packed(Layout(1, 1), two)})
    saving = cost.saving(other, NOW, LENGTHS)
    one, another = cost.step(other, LENGTHS).step, cost.step(NOW, LENGTHS).step
    assert saving.mean_s == pytest.approx(one.mean_s - another.mean_s)
    assert saving.mean_s > 0
    independent = math.hypot(one.mean_s - one.low_s, another.high_s - another.mean_s)
    assert saving.mean_s - saving.low_s < 0.5 * independent
    same = cost.saving(NOW, NOW, LENGTHS)
    assert same.mean_s == 0.0
    assert same.high_s - same.low_s < 1e-12


def test_measured_efficiencies_are_taken_over_and_unknown_names_ignored():
    world = World(0)
    seen = replace(world.observe(NOW, 3), stage_s={}, efficiency={"gemm": 0.9, "teleport": 0.5})
    cost = CostModel(JOB)
    for _ in range(5):
        cost = cost.refined(NOW, seen)
    assert cost.efficiencies.of(OpClass.GEMM) == pytest.approx(0.9, rel=0.02)


def test_a_step_without_responses_teaches_nothing():
    empty = replace(World(0).observe(NOW, 1), response_tokens=TokenStats.of([]))
    cost = CostModel(JOB)
    assert cost.refined(NOW, empty) is cost


def test_a_prior_measured_elsewhere_must_lie_in_zero_one():
    with pytest.raises(ValueError, match=r"gemm is 1\.5"):
        EfficiencyTable.prior(CLUSTER, {OpClass.GEMM: 1.5})


def test_stages_measured_alone_leave_others_uncalibrated():
    world = World(0)
    seen = world.observe(NOW, 1)
    only = replace(seen, stage_s={ACTOR_GENERATE: seen.stage_s[ACTOR_GENERATE]})
    cost = CostModel(JOB).refined(NOW, only)
    layout = NOW[ACTOR_GENERATE].layout
    assert set(cost.efficiencies.log_residual) == {ACTOR_GENERATE, (ACTOR_GENERATE, layout)}
    assert cost.between.seconds == 0.0


def test_what_was_seen_of_a_layout_stays_when_the_job_has_gone_elsewhere():
    world, cost, other = World(0), CostModel(JOB), plan_of(Layout(2, 1))

    def ratio(cost: CostModel) -> float:
        return cost.step(other, LENGTHS).step.mean_s / cost.step(NOW, LENGTHS).step.mean_s

    for step in range(6):
        cost = cost.refined(NOW, world.observe(NOW, step))
    expected = ratio(cost)
    for step in range(6, 12):
        cost = cost.refined(other, world.observe(other, step, slow=1.2))
    # All stages slower at once may be the machine; part of it is laid to the layout all the same.
    assert 1.04 * expected < ratio(cost) < 1.25 * expected
    layout = other[ACTOR_TRAIN].layout
    assert cost.efficiencies.log_residual[ACTOR_TRAIN, layout] > 0.01
    seen, fresh = (cost.saving(other, plan, LENGTHS) for plan in (NOW, UNSEEN[1]))
    assert seen.high_s - seen.low_s < fresh.high_s - fresh.low_s
