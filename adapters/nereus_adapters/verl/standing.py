"""Standing: which devices and units a verl job has, read from its live trainer.

A unit of a stage that trains or infers is one FSDP shard group: the ranks that hold one whole copy
of the state between them (an HSDP replica; all ranks where verl shards over the whole world). Its
layout is written tp=k for k ranks. A unit of the generating stage is one rollout replica.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus_adapters.ray_bundles import free_by_node
from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl.bundles import Bundles, bundles_of
from nereus_adapters.verl.facts import WorkerFacts, worker_facts
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER, ModelStage

POOL = "global_pool"
"""verl's name of the pool in which all trainers are (PPOTrainer._init_resource_pool_mgr)."""
ROLES: Mapping[str, ModelStage] = {
    "actor": ACTOR_TRAIN,
    "ref": REF_INFER,
    "critic": CRITIC_TRAIN,
}
"""Model-stage of each engine of a worker process."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One verl worker group, by rank: the device of each process, and what it says of itself."""

    devices: tuple[Device, ...]
    workers: tuple[Any, ...]
    facts: tuple[WorkerFacts, ...]

    @classmethod
    def of(cls, workers: Sequence[Any], timeout_s: float) -> Ranks:
        """Ask the worker processes, at once; raises WaitTimeout and SeatDead as `call_all` does."""
        numbered = {Device("rank", rank): worker for rank, worker in enumerate(workers)}
        answers = call_all(
            numbered, worker_facts, awaited="a description of verl's workers", timeout_s=timeout_s
        )
        facts = tuple(answers[key] for key in numbered)
        return cls(tuple(Device(f.node, f.accelerator) for f in facts), tuple(workers), facts)

    def layout(self, role: str) -> Layout | None:
        """How ranks share one copy of a role's state; None where there is no such engine."""
        engine = self.facts[0].engine(role)
        return None if engine is None else engine.layout


def train_units(ranks: Ranks) -> Iterator[Unit]:
    """Yield the units of every engine, in order of rank.

    Ranks of a unit of Nereus's own engine are consecutive; source of Megatron's order:
    megatron.core.parallel_state, "tp-cp-ep-dp-pp".
    """
    for role, stage in ROLES.items():
        layout = ranks.layout(role)
        if layout is None:
            continue
        num_units = len(ranks.devices) // layout.num_devices
        # Ranks run over tp first, then over stages, or over units.
        engine = ranks.facts[0].engine(role)
        own = engine is not None and engine.tensor_parallel
        next_unit, next_stage = (
            (layout.num_devices, layout.tp) if own else (layout.tp, layout.tp * num_units)
        )
        for index in range(num_units):
            group = tuple(
                ranks.devices[stage_of * next_stage + index * next_unit + tp_rank]
                for stage_of in range(layout.pp)
                for tp_rank in range(layout.tp)
            )
            yield Unit(UnitId(stage, index), layout, group)


def rollout_units(replicas: Sequence[Any], of_worker: Mapping[Any, Device]) -> Iterator[Unit]:
    """Yield the rollout replicas of a manager.

    Args:
        replicas: verl's RolloutReplicas.
        of_worker: Device by Ray actor id.
    """
    for index, replica in enumerate(replicas):
        devices = tuple(of_worker[worker._actor_id] for worker in replica.workers)
        tp = int(replica.config.tensor_model_parallel_size)
        pp = int(replica.config.pipeline_model_parallel_size)
        yield Unit(UnitId(ACTOR_GENERATE, index), Layout(tp, pp), devices[: tp * pp])


def free_devices(held: Sequence[Device], wanted: int) -> tuple[Device, ...]:
    """Name up to ``wanted`` devices that Ray has free, on the job's own nodes first.

    A free device has the next index on its node that the job does not hold: which accelerator Ray
    gives when it is acquired is Ray's choice.
    """
    if wanted <= 0:
        return ()
    found: list[Device] = []
    free, nodes = free_by_node(), dict.fromkeys(d.node for d in held)
    for node in (*nodes, *sorted(set(free) - set(nodes))):
        count = free[node].count if node in free else 0
        names = (Device(node, i) for i in itertools.count())
        found += itertools.islice((d for d in names if d not in held), count)
    return tuple(found[:wanted])


def rank_order(own: Sequence[Device], spare: Sequence[Device]) -> tuple[Device, ...]:
    """Order devices as ranks on them are numbered, whichever of them hold ranks.

    Units lie on runs of it. Those that the job has keep their order. Where that is the order of
    devices, all are in it, as in the plans that are made: a job on GPU 1 may come to have GPU 0.
    """
    both = (*own, *spare)
    return tuple(sorted(both)) if list(own) == sorted(own) else both


def replicas_of(trainer: Any) -> list[Any]:
    """Return all rollout replicas of a trainer."""
    both = ("llm_server_manager", "standalone_server_manager")
    managers = (getattr(trainer, name, None) for name in both)
    return [r for manager in managers if manager is not None for r in manager.get_replicas()]


def is_hybrid(trainer: Any) -> bool:
    """Whether trainers and rollouts share processes."""
    return getattr(trainer, "standalone_server_manager", None) is None


def bundles(trainer: Any, ranks: Ranks, of_worker: Mapping[Any, Device]) -> Bundles:
    """Say which of Ray's bundles stands for each device that trainers and replicas may exchange.

    In a hybrid job none may: its own processes stay where they are.

    Args:
        trainer: verl's trainer, as verl has built it.
        ranks: Of its trainers.
        of_worker: Device by Ray actor id.
    """
    if is_hybrid(trainer):
        return Bundles({}, {})
    pool = trainer.resource_pool_manager.resource_pool_dict[POOL]
    replicas = {
        UnitId(ACTOR_GENERATE, index): {
            of_worker[worker._actor_id]: bundle
            for worker, bundle in zip(r.workers, bundles_of(r.resource_pool), strict=True)
        }
        for index, r in enumerate(replicas_of(trainer))
    }
    return Bundles(dict(zip(ranks.devices, bundles_of(pool), strict=True)), replicas)


def devices_of(ranks: Ranks, replicas: Sequence[Any], timeout_s: float) -> dict[Any, Device]:
    """Return the device of every worker, by Ray actor id: the trainers' and the replicas' own."""
    known = {w._actor_id: d for w, d in zip(ranks.workers, ranks.devices, strict=True)}
    others = [w for r in replicas for w in r.workers if w._actor_id not in known]
    if others:
        more = Ranks.of(others, timeout_s)
        known |= {w._actor_id: d for w, d in zip(others, more.devices, strict=True)}
    return known
