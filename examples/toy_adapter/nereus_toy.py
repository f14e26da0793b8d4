"""An adapter for the toy framework: everything a third party writes, in one file.

Read it from the bottom: the hooks say what there is, the class translates four primitives.
"""

# ruff: noqa: D102  (the protocols that these classes implement document their methods)
from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from toy_framework import Replica, ToyTrainer

from nereus_core.adapter import Boundary, Fingerprint
from nereus_core.capabilities import Capabilities, Feature, full, unsupported
from nereus_core.declaration import AdapterDeclaration
from nereus_core.errors import OutOfDeviceMemory, Unsupported, WrongHandle
from nereus_core.hookspecs import hookimpl
from nereus_core.ledger import Done, Ledger, Standing, require_identical
from nereus_core.ledger_adapter import LedgerAdapter
from nereus_core.observation import Observation, TokenStats
from nereus_core.phases import Enter, Phase
from nereus_core.plan import Plan
from nereus_core.primitives import (
    Destroy,
    Merge,
    Primitive,
    Split,
    created,
    ended,
    sources,
)
from nereus_core.traffic import primitive_bytes
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import Job, ModelStage, Stage

CAN = dict.fromkeys(Stage, full())
ENGINE = CAN | {Stage.GENERATE: unsupported("a toy engine's layout is fixed when it starts")}
NOTHING = unsupported("the toy framework has no such thing")
CAPABILITIES = Capabilities(
    split=ENGINE,
    merge=ENGINE,
    extend=CAN,
    destroy=CAN,
    features=dict.fromkeys(Feature, NOTHING)
    | dict.fromkeys(
        (
            Feature.OPTIMIZER_STATE,
            Feature.RNG_STATE,
            Feature.DATALOADER_STATE,
            Feature.FINGERPRINT,
            Feature.COLOCATED_STAGES,
            Feature.PIPELINE_STAGES,
        ),
        full(),
    ),
)


class ToyAdapter(LedgerAdapter):
    """Implements `nereus_core.adapter.Adapter` for a `ToyTrainer`."""

    name = "toy"

    def __init__(self, trainer: ToyTrainer) -> None:
        if trainer.job.workload.asynchronous:
            raise Unsupported("an asynchronous job", NOTHING.reason)
        super().__init__(Ledger(CAPABILITIES))
        self._trainer = trainer
        self._parked: dict[UnitId, Replica] = {}

    def job(self) -> Job:
        return self._trainer.job

    def units(self) -> UnitMap:
        return UnitMap(replica.unit for replica in self._trainer.replicas.values())

    def observe(self) -> Observation:
        toy, job = self._trainer, self._trainer.job
        fresh, toy.fresh = toy.fresh, False
        one = [1] * job.global_batch if fresh else []
        return Observation(
            step=toy.steps - 1,
            step_s=1e-3 if fresh else 0.0,
            stage_s=dict.fromkeys(job.workload.stages, 1e-4) if fresh else {},
            prompt_tokens=TokenStats.of(one),
            response_tokens=TokenStats.of(one),
            peak_bytes={},
            healthy=frozenset(job.cluster.healthy),
        )

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        held = self._trainer.gate.close_on(stages, timeout_s)
        try:
            yield Boundary(held, self._trainer.steps)
        finally:
            self._trainer.gate.open()

    def relink(self, plan: Plan) -> None:
        self._parked.clear()  # a toy trainer shares its batch among whatever replicas there are

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        replica = self._trainer.replicas[unit]
        digests = {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in replica.tensors.items()}
        return Fingerprint(unit, digests, dict(replica.counters))

    def _standing(self) -> Standing:
        gate, parked = self._trainer.gate, UnitMap(r.unit for r in self._parked.values())
        return Standing(self.job(), self.units(), gate.held, gate.inside, parked)

    def _do(self, op: Primitive, units: UnitMap, enter: Enter) -> Done:
        replicas = self._trainer.replicas
        enter(Phase.PREPARE)
        self._check_room(op)
        if isinstance(op, Merge):
            require_identical(op, self.fingerprint)
        origin = [replicas.get(u) or self._parked[u] for u in sources(op)]
        enter(Phase.TRANSFER)
        load = self._trainer.loaded  # what never changes can be loaded again
        new = [origin[0].copy(unit) if origin else load(unit) for unit in created(op)]
        enter(Phase.VERIFY)  # a copy in one process is what was copied
        enter(Phase.COMMIT)
        gone = [replicas.pop(unit) for unit in ended(op)]
        replicas.update({replica.unit.id: replica for replica in new})
        enter(Phase.RELEASE)
        if isinstance(op, Destroy) and op.park:
            self._parked[op.unit] = gone[0]
        return Done(*primitive_bytes(op, units, self.job()))

    def _check_room(self, op: Primitive) -> None:
        toy, capacity = self._trainer, self.job().cluster.device_spec.memory_bytes
        staging = op.staging_bytes if isinstance(op, Split | Merge) else None
        for unit in created(op):
            for device, need in toy.shard_bytes(unit).items():
                left = capacity - toy.memory_bytes(device)
                need = need if staging is None else min(need, staging)
                if need > left:
                    raise OutOfDeviceMemory(str(op), device, need, left)


@hookimpl
def nereus_declare_adapter() -> AdapterDeclaration:
    return AdapterDeclaration("toy", "an imaginary framework, as an example", CAPABILITIES)


@hookimpl
def nereus_create_adapter(name: str, handle: object) -> ToyAdapter | None:
    if name != "toy":
        return None
    if not isinstance(handle, ToyTrainer):
        raise WrongHandle("toy", handle, "a toy_framework.ToyTrainer")
    return ToyAdapter(handle)


@hookimpl(optionalhook=True)
def nereus_conformance_harness(name: str, tier: str) -> object:
    from toy_harness import ToyHarness

    return ToyHarness() if name == "toy" and tier == "contract" else None
