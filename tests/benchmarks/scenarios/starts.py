"""Start-up configurations of other frameworks, as plans; and the best one for the first step.

verl-like (``hybrid``): all model-stages colocated on all devices, as verl's hybrid engine places
them; one layout for the training engine's stages and tp2 for rollout
(`actor_rollout_ref.rollout.tensor_model_parallel_size`, 2 in verl's examples). The training layout
is tp2 pp2, that of the measured run in verl_logs (Qwen2-7B, Megatron, 8 GPUs), with tp doubled
until the longest sequences that the job allows fit.

OpenRLHF-like (``split``): actor and reference share a quarter of the devices, the critic has
another, rollout engines of tp2 the other half: the proportions 2 : 2 : 4 on 8 GPUs of the Ray
example in OpenRLHF's documentation (``--actor_num_gpus_per_node 2 --critic_num_gpus_per_node 2
--vllm_num_engines 2 --vllm_tensor_parallel_size 2 --colocate_actor_ref``). Without a critic the
actor has half. OpenRLHF shards training with ZeRO, which is not in the space of plans here: its
stages get the smallest tp x pp that fits instead, tp within a node.

Neither knows how the job will go; both have to fit the limits it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nereus_core.cluster import Device
from nereus_core.cost import CostModel, Lengths
from nereus_core.layout import Layout, layout_problems
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.workload import Job, ModelStage, Stage

_HYBRID = ((2, 2), (4, 2), (8, 2), (8, 4), (8, 8))
_SPLIT = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8))
_ROLLOUT = Layout(2, 1)


def limits(job: Job) -> Lengths:
    """What a start-up configuration has to fit: every response may reach the limit."""
    return Lengths.of_job(job)


def hybrid(cost: CostModel) -> Plan:
    """The first training layout of the ladder with which everything fits."""
    job, devices = cost.job, cost.job.cluster.healthy
    return _first(
        cost,
        (
            {s: _placed(job, s, _ROLLOUT if _rolls_out(s) else Layout(*rung), devices)
             for s in job.workload.stages}
            for rung in _HYBRID
        ),
    )  # fmt: skip


def split(cost: CostModel) -> Plan:
    """The first training layout of the ladder with which everything fits."""
    job, devices = cost.job, cost.job.cluster.healthy
    half = len(devices) // 2
    quarter = half // 2 if "critic" in {s.model for s in job.workload.stages} else half
    parts = {"rollout": devices[:half], "actor": devices[half : half + quarter],
             "critic": devices[half + quarter :]}  # fmt: skip

    def part(stage: ModelStage) -> Sequence[Device]:
        return parts["rollout" if _rolls_out(stage) else "critic" if stage.model == "critic"
                     else "actor"]  # fmt: skip

    return _first(
        cost,
        (
            {s: _placed(job, s, _ROLLOUT if _rolls_out(s) else Layout(*rung), part(s))
             for s in job.workload.stages}
            for rung in _SPLIT
        ),
    )  # fmt: skip


def _rolls_out(stage: ModelStage) -> bool:
    return stage.stage is Stage.GENERATE


def _placed(
    job: Job, stage: ModelStage, layout: Layout, devices: Sequence[Device]
) -> Placement | None:
    """Most units of a layout that the devices hold and the batch divides by; None without any."""
    if layout_problems(job.model(stage), layout):
        return None
    units = len(devices) // layout.num_devices
    units = max((n for n in range(1, units + 1) if job.global_batch % n == 0), default=0)
    if not units:
        return None
    return Placement.packed(layout, tuple(devices[: units * layout.num_devices]))


def _first(cost: CostModel, candidates: Iterable[dict[ModelStage, Placement | None]]) -> Plan:
    for candidate in candidates:
        placed = {s: p for s, p in candidate.items() if p is not None}
        plan = Plan(placed)
        whole = len(placed) == len(candidate) and not plan_problems(plan, cost.job)
        if whole and cost.memory_problem(plan, limits(cost.job)) is None:
            return plan
    raise ValueError(f"no rung fits on {len(cost.job.cluster.healthy)} devices")
