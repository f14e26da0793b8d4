"""Standing: which devices and units a verl job has, read from its live trainer.

A unit of a stage that trains or infers is one FSDP shard group: the ranks that hold one whole copy
of the state between them (an HSDP replica; all ranks where verl shards over the whole world). Its
layout is written tp=k for k ranks. A unit of the generating stage is one rollout replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from nereus_adapters.verl.calls import call_all
from nereus_adapters.verl.facts import WorkerFacts, worker_facts
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER, ModelStage

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

    def shard_size(self, role: str) -> int | None:
        """Ranks that share one copy of a role's state; None where there is no such engine."""
        for engine in self.facts[0].engines:
            if engine.role == role:
                return engine.shard_size
        return None


def train_units(ranks: Ranks, serials: Mapping[ModelStage, Sequence[int]]) -> Iterator[Unit]:
    """Yield the shard groups of every engine, in order of rank.

    Args:
        ranks: Of the worker group.
        serials: Of units that a transition made, by stage; 0, 1, ... where absent.
    """
    for role, stage in ROLES.items():
        size = ranks.shard_size(role)
        if size is None:
            continue
        for index in range(len(ranks.devices) // size):
            group = ranks.devices[index * size : (index + 1) * size]
            known = serials.get(stage, ())
            serial = known[index] if index < len(known) else index
            yield Unit(UnitId(stage, serial), Layout(size, 1), group)


def rollout_units(
    replicas: Sequence[Any], of_worker: Mapping[Any, Device], serials: Sequence[int]
) -> Iterator[Unit]:
    """Yield the rollout replicas of a manager.

    Args:
        replicas: verl's RolloutReplicas.
        of_worker: Device by Ray actor id.
        serials: Of the replicas; 0, 1, ... where absent.
    """
    for index, replica in enumerate(replicas):
        devices = tuple(of_worker[worker._actor_id] for worker in replica.workers)
        tp = int(replica.config.tensor_model_parallel_size)
        pp = int(replica.config.pipeline_model_parallel_size)
        serial = serials[index] if index < len(serials) else index
        used = tp * pp
        yield Unit(UnitId(ACTOR_GENERATE, serial), Layout(tp, pp), devices[:used])


def free_devices(held: Sequence[Device], wanted: int) -> tuple[Device, ...]:
    """Name up to ``wanted`` devices that Ray has free, on the job's own nodes first.

    A free device has the next index on its node that the job does not hold: which accelerator Ray
    gives when it is acquired is Ray's choice.
    """
    if wanted <= 0:
        return ()
    found: list[Device] = []
    left = int(ray.available_resources().get("GPU", 0))
    nodes = {d.node: None for d in held}
    alive = {n["NodeManagerAddress"]: n for n in ray.nodes() if n["Alive"]}
    for node in (*nodes, *sorted(set(alive) - set(nodes))):
        total = int(alive.get(node, {}).get("Resources", {}).get("GPU", 0))
        spare = [Device(node, i) for i in range(total) if Device(node, i) not in held]
        found += spare
    return tuple(found[: min(wanted, left)])


def units_of(units: Iterator[Unit], more: Iterator[Unit]) -> UnitMap:
    """Put the units of all stages together."""
    return UnitMap([*units, *more])
