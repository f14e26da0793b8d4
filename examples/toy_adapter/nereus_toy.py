"""An adapter for the toy framework: everything a third party writes, in one file.

Read it from the bottom: the hooks say what there is, the class translates four primitives.
"""

# ruff: noqa: D102  (the protocols that these classes implement document their methods)
from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from toy_framework import Replica, ToyTrainer

from nereus_core.adapter import Boundary, Fingerprint, Receipt
from nereus_core.capabilities import Capabilities, Feature, full, unsupported
from nereus_core.declaration import AdapterDeclaration
from nereus_core.errors import (
    BoundaryTimeout,
    Diverged,
    Infeasible,
    LayoutError,
    NotAtBoundary,
    OutOfDeviceMemory,
    Unsupported,
    WrongHandle,
)
from nereus_core.hookspecs import hookimpl
from nereus_core.layout import check_layout
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Plan
from nereus_core.primitives import (
    Destroy,
    Extend,
    Merge,
    OpId,
    Primitive,
    Split,
    acquired,
    check,
    created,
    ended,
    kind_of,
    model_stage_of,
    released,
    sources,
)
from nereus_core.state import needed_elements, placed
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
        ),
        full(),
    ),
)


class ToyAdapter:
    """Implements `nereus_core.adapter.Adapter` for a `ToyTrainer`."""

    name = "toy"

    def __init__(self, trainer: ToyTrainer) -> None:
        if trainer.job.workload.asynchronous:
            raise Unsupported("an asynchronous job", NOTHING.reason)
        self._trainer, self._held = trainer, frozenset[ModelStage]()
        self._receipts: dict[OpId, Receipt] = {}
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
        if self._held:
            raise NotAtBoundary("a second boundary")
        if not self._trainer.idle.acquire(timeout=timeout_s):
            raise BoundaryTimeout(self._trainer.stage, timeout_s)
        self._held = frozenset(stages)
        try:
            yield Boundary(self._held, self._trainer.steps)
        finally:
            self._held = frozenset()
            self._trainer.idle.release()

    def split(self, op: Split) -> Receipt:
        return self._perform(op)

    def merge(self, op: Merge) -> Receipt:
        return self._perform(op)

    def extend(self, op: Extend) -> Receipt:
        return self._perform(op)

    def destroy(self, op: Destroy) -> Receipt:
        return self._perform(op)

    def relink(self, plan: Plan) -> None:
        self._parked.clear()  # a toy trainer shares its batch among whatever replicas there are

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        replica = self._trainer.replicas[unit]
        digests = {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in replica.tensors.items()}
        return Fingerprint(unit, digests, dict(replica.counters))

    def close(self) -> None:
        pass

    def _perform(self, op: Primitive) -> Receipt:
        start_s = time.perf_counter()
        if op.op_id in self._receipts:
            return self._receipts[op.op_id]
        stage, replicas = model_stage_of(op), self._trainer.replicas
        support = CAPABILITIES.of(kind_of(op), stage.stage)
        if support is None or not support.at(None):
            raise Unsupported(str(op), support.reason if support else "undeclared", op)
        if stage not in self._held:
            raise NotAtBoundary(str(op), op)
        units = self.units()
        check(op, units, self._parked)
        self._check_room(op)
        origin = [replicas.get(u) or self._parked[u] for u in sources(op)]
        if isinstance(op, Merge):
            self._check_identical(op)
        moved, kept = self._price(op, origin)
        new = [origin[0].copy(unit) for unit in created(op)]
        for unit in ended(op):
            replica = replicas.pop(unit)
            if isinstance(op, Destroy) and op.park:
                self._parked[unit] = replica
        replicas.update({replica.unit.id: replica for replica in new})
        receipt = Receipt(
            *(op.op_id, created(op), ended(op), acquired(op, units), released(op, units)),
            *(moved, kept, time.perf_counter() - start_s, {}),
        )
        self._receipts[op.op_id] = receipt
        return receipt

    def _check_room(self, op: Primitive) -> None:
        toy, capacity = self._trainer, self.job().cluster.device_spec.memory_bytes
        for unit in created(op):
            try:
                check_layout(self.job().model(unit.model_stage), unit.layout)
            except LayoutError as error:
                raise Infeasible(f"{op}: {error}", op) from error
            for device, need in toy.shard_bytes(unit).items():
                if need > capacity - toy.memory_bytes(device):
                    raise OutOfDeviceMemory(
                        str(op), device, need, capacity - toy.memory_bytes(device)
                    )

    def _check_identical(self, op: Merge) -> None:
        first, *others = (self.fingerprint(unit) for unit in op.parents)
        for other in others:
            for tensor, digest in first.tensors.items():
                if other.tensors[tensor] != digest:
                    raise Diverged(op.parents, tensor, op)

    def _price(self, op: Primitive, origin: list[Replica]) -> tuple[int, int]:
        """Return the bytes that cross between devices, and those that stay."""
        job, stage = self.job(), model_stage_of(op)
        precision = job.precision
        train = stage.stage is Stage.TRAIN
        each = precision.train_bytes if train else precision.param_bytes
        model = job.model(stage)
        before = [p for r in origin for p in placed(model, r.unit.layout, r.unit.devices)]
        after = [p for u in created(op) for p in placed(model, u.layout, u.devices)]
        total = sum(box.num_elements for _, shard in after for box in shard.values())
        needed = needed_elements(before, after)
        return each * needed, each * (total - needed)


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
