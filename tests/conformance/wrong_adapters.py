"""Adapters that are deliberately wrong, one for each invariant, and some that declare wrongly.

A plugin module: tests install it as entry point ``wrong`` of a distribution made on the spot.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from nereus_adapters.sim.adapter import SimAdapter
from nereus_adapters.sim.harness import SimHarness
from nereus_core.adapter import Boundary, Receipt
from nereus_core.capabilities import (
    Capabilities,
    Feature,
    full,
    not_yet,
    since,
    unsupported,
)
from nereus_core.declaration import AdapterDeclaration, KnownFailure, Seam
from nereus_core.errors import DevicesBusy, Diverged, Unsupported
from nereus_core.hookspecs import hookimpl
from nereus_core.phases import Phase, PhaseHook
from nereus_core.plan import Plan
from nereus_core.primitives import Destroy, Extend, Merge, Primitive, Split, model_stage_of
from nereus_core.state import Slot
from nereus_core.units import UnitMap
from nereus_core.workload import ModelStage, Stage


class LosesAChild(SimAdapter):
    """I1: a device of a split reference unit belongs to nobody afterwards."""

    def split(self, op: Split) -> Receipt:
        receipt = super().split(op)
        if op.parent.model_stage.stage is Stage.INFER and len(op.into) > 1:
            self._running.switch([op.into[-1].id], [])
        return receipt


class ForgetsMoments(SimAdapter):
    """I2: a merged unit starts with Adam's first moment at zero."""

    def merge(self, op: Merge) -> Receipt:
        receipt = super().merge(op)
        for store in self._running.live(op.into.id).stores:
            for (slot, _), array in store.arrays.items():
                if slot is Slot.EXP_AVG:
                    array[...] = 0.0
        return receipt


class MixesLayouts(SimAdapter):
    """I3: units of a stage do not have the layout they were launched with."""

    def units(self) -> UnitMap:
        units = super().units()
        return UnitMap(
            replace(u, layout=replace(u.layout, tp=u.layout.pp, pp=u.layout.tp))
            if u.model_stage.stage is Stage.TRAIN and u.id.serial == 0
            else u
            for u in units.values()
        )


class HalfMerges(SimAdapter):
    """I4: a merge that is refused has already ended a parent."""

    def merge(self, op: Merge) -> Receipt:
        try:
            return super().merge(op)
        except Diverged:
            self._running.switch([op.parents[-1]], [])
            raise


class ForgetsReceipts(SimAdapter):
    """I5: a primitive that is repeated is performed again."""

    def perform(self, op: Primitive) -> Receipt:
        receipt = super().perform(op)
        del self._ledger._receipts[op.op_id]
        return receipt


class OneStageAtATime(SimAdapter):
    """I6: the first stage to change claims the whole boundary."""

    claimed: ModelStage | None = None

    def perform(self, op: Primitive) -> Receipt:
        stage = model_stage_of(op)
        if self.claimed not in (None, stage):
            raise DevicesBusy(str(op), [("the whole job", self.claimed)], op)
        self.claimed = stage
        return super().perform(op)

    def relink(self, plan: Plan) -> None:
        super().relink(plan)
        self.claimed = None


class FreesLate(SimAdapter):
    """I7: the memory of a destroyed unit is freed when the boundary closes."""

    def destroy(self, op: Destroy) -> Receipt:
        live = self._running.live(op.unit) if op.unit in self.units() else None
        receipt = super().destroy(op)
        if live is not None:
            self._running.world.reserve(
                "garbage", {store.device: store.num_bytes for store in live.stores}, "garbage"
            )
        return receipt

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        with super().boundary(stages, timeout_s=timeout_s) as boundary:
            yield boundary
        self._running.world.release("garbage")


class FreesNever(FreesLate):
    """I7: the memory of a destroyed unit is not freed."""

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        with SimAdapter.boundary(self, stages, timeout_s=timeout_s) as boundary:
            yield boundary


class ActsAnyTime(SimAdapter):
    """I8: primitives do not ask for a boundary."""

    def perform(self, op: Primitive) -> Receipt:
        gate = self._running.gate
        if gate.held is not None and model_stage_of(op) in gate.held:
            return super().perform(op)
        held, gate._held = gate.held, frozenset({model_stage_of(op)})
        try:
            return super().perform(op)
        finally:
            gate._held = held


class Synchronises(SimAdapter):
    """I9: reading the units waits for the step in flight."""

    def units(self) -> UnitMap:
        gate = self._running.gate
        end_s = time.monotonic() + 8.0
        with gate._changed:
            gate._changed.wait_for(lambda: not gate._in_flight, end_s - time.monotonic())
        return super().units()


class RepeatsABatch(SimAdapter):
    """I10: the sampler goes back by one batch when the job is relinked."""

    def relink(self, plan: Plan) -> None:
        super().relink(plan)
        if self._running.steps:
            self._running.position -= self.job().global_batch


class ServesOldWeights(SimAdapter):
    """I11: a new generating unit starts with the weights before the last update."""

    def extend(self, op: Extend) -> Receipt:
        receipt = super().extend(op)
        if op.unit.model_stage.stage is Stage.GENERATE:
            counters = self._running.live(op.unit.id).counters
            counters["weight_version"] = max(0, counters["weight_version"] - 1)
        return receipt


class StaysStopped(SimAdapter):
    """I12: after an error inside a boundary the stages stay held."""

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        held = self._running.gate.close_on(stages, timeout_s)
        yield Boundary(held, self._running.steps)
        self._running.gate.open()


class SwitchesEarly(SimAdapter):
    """I13: units have switched when commit is said to begin."""

    def watch(self, on_phase: PhaseHook | None) -> None:
        def late(op: Primitive, phase: Phase) -> None:
            if phase is Phase.RELEASE:
                on_phase(op, Phase.COMMIT)
            if phase is not Phase.COMMIT:
                on_phase(op, phase)

        super().watch(late if on_phase else None)


class SaysNothing(SimAdapter):
    """I13: nobody hears of phases."""

    def watch(self, on_phase: PhaseHook | None) -> None:
        pass


class TrustsTheLink(SimAdapter):
    """I2: what has arrived is not compared with what was sent."""

    def _verify(self, op, fresh, carried) -> None:
        pass


class LosesTheReceipt(SimAdapter):
    """I5: a primitive that was interrupted after its commit has no receipt."""

    def perform(self, op: Primitive) -> Receipt:
        try:
            return super().perform(op)
        except BaseException:
            self._ledger._receipts.pop(op.op_id, None)
            raise


def uses_a_framework() -> object:
    """Use a name of the framework that the seam cases' adapters declare as their backend."""
    from pluggy import Result

    return Result


class CannotSplit(SimAdapter):
    """Refuses to split, and says so."""

    def split(self, op: Split) -> Receipt:
        raise Unsupported("split", "for a test", op)


@dataclass(frozen=True)
class Wrong:
    """An adapter class, what it declares, and how patient its job is."""

    adapter: type[SimAdapter]
    capabilities: Capabilities = field(default_factory=Capabilities.everything)
    known_failures: Mapping[str, str | KnownFailure] = field(default_factory=dict)
    wait_s: float = 20.0
    requirement: str | None = None
    seams: tuple[Seam, ...] = ()


ALL = Capabilities.everything()
NO_STAGE = {stage: unsupported("for a test") for stage in Stage}
NOT_YET = {stage: not_yet("for a test", tracking="#1") for stage in Stage}
MANAGER = Seam("pluggy", "PluginManager.register", ("self", "plugin", "name"))
RESULT = Seam("pluggy", "Result")
ADAPTERS = {
    "i1": Wrong(LosesAChild),
    "i2": Wrong(ForgetsMoments),
    "i3": Wrong(MixesLayouts),
    "i4": Wrong(HalfMerges),
    "i5": Wrong(ForgetsReceipts),
    "i6": Wrong(OneStageAtATime),
    "i7": Wrong(FreesLate),
    "i8": Wrong(ActsAnyTime),
    "i9": Wrong(Synchronises),
    "i10": Wrong(RepeatsABatch),
    "i11": Wrong(ServesOldWeights),
    "i12": Wrong(StaysStopped, wait_s=5.0),
    "i13": Wrong(SwitchesEarly),
    "leaking": Wrong(FreesNever),
    "mute": Wrong(SaysNothing),
    "trusting": Wrong(TrustsTheLink),
    "forgetful": Wrong(LosesTheReceipt),
    "refuses": Wrong(CannotSplit, replace(ALL, split=NO_STAGE)),
    "cannot_yet": Wrong(CannotSplit, replace(ALL, split=NOT_YET)),
    "modest": Wrong(SimAdapter, replace(ALL, split=NOT_YET)),
    "vain": Wrong(CannotSplit),
    "too_early": Wrong(
        CannotSplit,
        replace(ALL, split=dict.fromkeys(Stage, since("999"))),
        requirement="pluggy>=1",
    ),
    "seamed": Wrong(SimAdapter, requirement="pluggy>=1", seams=(MANAGER, RESULT)),
    "seam_undeclared": Wrong(SimAdapter, requirement="pluggy>=1", seams=(MANAGER,)),
    "seam_gone": Wrong(
        SimAdapter, requirement="pluggy>=1", seams=(RESULT, replace(MANAGER, qualname="Gone"))
    ),
    "seam_changed": Wrong(
        SimAdapter,
        requirement="pluggy>=1",
        seams=(RESULT, replace(MANAGER, parameters=("self", "nom"))),
    ),
    "false_refusal": Wrong(SimAdapter, replace(ALL, split=NO_STAGE)),
    "silent": Wrong(
        SimAdapter,
        replace(
            ALL,
            split={Stage.TRAIN: full()},
            features={f: full() for f in Feature if f is not Feature.RNG_STATE},
        ),
    ),
    "excused": Wrong(
        ForgetsReceipts,
        known_failures={"test_replayed_op_returns_its_receipt": "receipts are not kept, #2"},
    ),
    "over_excused": Wrong(
        SimAdapter, known_failures={"test_replayed_op_returns_its_receipt[train]": "not so, #2"}
    ),
    "rightly_excused": Wrong(
        ForgetsReceipts,
        known_failures={
            "test_replayed_op_returns_its_receipt": KnownFailure("not kept, #2", says="^I5 ")
        },
    ),
    "wrongly_excused": Wrong(
        ForgetsReceipts,
        known_failures={
            "test_replayed_op_returns_its_receipt": KnownFailure("not kept, #2", says="^I7 ")
        },
    ),
    "misspelt": Wrong(SimAdapter, known_failures={"test_replayed_op_returns_a_receipt": "#2"}),
    "unexplained": Wrong(SimAdapter, known_failures={"test_elapsed_is_wall_seconds": " "}),
}


class WrongHarness(SimHarness):
    """A simulated job under a wrong adapter."""

    def __init__(self, wrong: Wrong) -> None:
        super().__init__()
        self._wrong, self.wait_s = wrong, wrong.wait_s

    def launch(self, job, plan) -> SimAdapter:
        super().launch(job, plan)
        self._adapter = self._wrong.adapter(self.running_job)
        return self._adapter


@hookimpl
def nereus_declare_adapter() -> list[AdapterDeclaration]:
    return [
        AdapterDeclaration(
            f"wrong_{name}",
            wrong.adapter.__doc__ or "",
            wrong.capabilities,
            requirement=wrong.requirement,
            seams=wrong.seams,
            known_failures=wrong.known_failures,
        )
        for name, wrong in ADAPTERS.items()
    ]


@hookimpl
def nereus_create_adapter(name, handle, config):
    from nereus_adapters.sim import nereus_create_adapter as create

    return create("sim", handle, config) if name.startswith("wrong_") else None


@hookimpl(optionalhook=True)
def nereus_conformance_harness(name: str, tier: str) -> WrongHarness | None:
    known = ADAPTERS.get(name.removeprefix("wrong_"))
    return WrongHarness(known) if known and tier == "contract" else None
