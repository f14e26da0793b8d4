"""What the replay benchmark starts from: plans of other frameworks, and traces read from data."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from scenarios import starts, traces

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.plan import plan_problems
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, BFLOAT16_MIXED, Job, grpo, ppo

CLUSTER = Cluster.homogeneous(4, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)


def cost(workload):
    models = {
        "actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B, "critic": LLAMA_3_1_8B.as_critic("critic")
    }  # fmt: skip
    return CostModel(Job(workload, models, CLUSTER, 1024, 1024, 8192, BFLOAT16_MIXED))


@pytest.mark.parametrize("workload", [ppo(), grpo()], ids=lambda w: w.algorithm)
@pytest.mark.parametrize("start", [starts.hybrid, starts.split])
def test_a_start_up_configuration_is_a_plan_that_fits_the_limits_of_the_job(start, workload):
    model = cost(workload)
    plan = start(model)
    assert plan_problems(plan, model.job) == ()
    assert model.memory_problem(plan, starts.limits(model.job)) is None


def test_one_style_shares_all_devices_and_the_other_splits_them():
    hybrid, split = starts.hybrid(cost(ppo())), starts.split(cost(ppo()))
    assert all(p.devices == frozenset(CLUSTER.devices) for p in hybrid.values())
    assert not split.sharing(ACTOR_GENERATE, ACTOR_TRAIN)
    assert len(split[ACTOR_GENERATE].devices) == 16


def test_measured_traces_are_read_where_there_are_data():
    try:
        log, cluster = traces.verl("qwen2_7b_fsdp_8gpu"), traces.spot("parcae_hh_55_65")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert log.num_steps == 210
    assert log.response_mean[-1] > 2.5 * min(log.response_mean)
    assert sum(log.shape) / len(log.shape) == pytest.approx(1, rel=0.02)
    assert {len(nodes) for nodes in cluster.nodes} <= set(range(8, 33))
    assert any(a - b for a, b in zip(cluster.nodes, cluster.nodes[1:], strict=False))
