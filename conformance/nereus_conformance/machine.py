"""The random walk: primitives drawn at random, an adapter against `primitives.apply`.

Hypothesis draws the stage, the primitive and its layout; the machine keeps the units that the
specification says are alive, and the state each model-stage had at the start of the walk. Draws
that break a precondition are performed too, and must be refused with the specification's error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nereus_conformance.assertions import partitioned, require, same_state, same_units
from nereus_conformance.subject import Subject
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, PrimitiveError
from nereus_core.harness import Array
from nereus_core.layout import Layout
from nereus_core.primitives import Destroy, Extend, Kind, Merge, Primitive, Split, apply
from nereus_core.units import Unit, UnitMap
from nereus_core.workload import ModelStage

LAYOUTS = [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(4, 1), Layout(2, 2), Layout(1, 4)]


def walk(
    launch: Callable[[], Subject],
    can: frozenset[tuple[Kind, ModelStage]],
    *,
    pipelines: bool,
    seed: int,
    examples: int,
    steps: int,
) -> None:
    """Walk ``examples`` times, each at most ``steps`` primitives, by a seed.

    Args:
        launch: starts a job; once per walk.
        can: primitives that the adapter declares.
        pipelines: whether units may have pipeline stages.
        seed: of Hypothesis.
        examples: walks.
        steps: primitives of one walk.
    """

    @hypothesis.seed(seed)
    class Walk(RandomWalk):
        pass

    Walk.launch, Walk.can = staticmethod(launch), can
    Walk.layouts = [layout for layout in LAYOUTS if pipelines or layout.pp == 1]
    run_state_machine_as_test(
        Walk,
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            report_multiple_bugs=False,
            # No shrinking: a walk is short, and hundreds of launches are not.
            phases=[hypothesis.Phase.generate],
        ),
    )


class RandomWalk(RuleBasedStateMachine):
    """A walk at one open boundary; `launch` and `can` are set on a subclass."""

    launch: Callable[[], Subject]
    can: frozenset[tuple[Kind, ModelStage]]
    """Primitives that the adapter declares."""
    layouts: list[Layout]
    """Of units."""

    def __init__(self) -> None:
        super().__init__()
        self.open = ExitStack()
        self.walk: list[str] = []

    @initialize()
    def begin(self) -> None:
        """Launch, take a step so that moments are not zero, open the boundary."""
        self.subject = type(self).launch()
        self.subject.step()
        self.model: UnitMap = self.subject.units
        self.start: Mapping[ModelStage, Mapping[str, Array]] = {
            stage: self.subject.state(self.model.of(stage)[0]) for stage in self.model.stages()
        }
        self.open.enter_context(self.subject.boundary())

    def teardown(self) -> None:
        """Close the boundary; the walk ends amid a transition, so the job need not step on."""
        with suppress(NereusError):
            self.open.close()

    # --- Drawing --------------------------------------------------------------------------------

    def _unit(self, stage: ModelStage, layout: Layout, devices: tuple[Device, ...]) -> Unit:
        return Unit(self.subject.fresh(1, stage)[0], layout, devices)

    def _stage(self, data: st.DataObject, kind: Kind) -> ModelStage:
        stages = sorted(stage for k, stage in self.can if k is kind)
        return data.draw(st.sampled_from(stages), label="stage")

    def _parent(self, data: st.DataObject, stage: ModelStage) -> Unit:
        return data.draw(st.sampled_from(self.model.of(stage)), label="unit")

    def _layout(self, data: st.DataObject) -> Layout:
        return data.draw(st.sampled_from(self.layouts), label="layout")

    def _able(self, kind: Kind) -> bool:
        return any(k is kind for k, _ in self.can)

    # --- Rules ----------------------------------------------------------------------------------

    @precondition(lambda self: self._able(Kind.SPLIT))
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        """Cut a unit into as many units of a layout as fit, perhaps leaving devices."""
        layout = self._layout(data)
        parent = self._parent(data, self._stage(data, Kind.SPLIT))
        n, devices = layout.num_devices, parent.devices
        groups = [devices[i : i + n] for i in range(0, len(devices) - n + 1, n)]
        into = tuple(self._unit(parent.model_stage, layout, group) for group in groups)
        self._perform(Split(self.subject.op_id(), parent.id, into))

    @precondition(lambda self: self._able(Kind.MERGE))
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        """Join all units of a stage, or let one grow."""
        layout = self._layout(data)
        stage = self._stage(data, Kind.MERGE)
        parents = self.model.of(stage)
        devices = [d for unit in parents for d in unit.devices]
        devices += [d for d in self.subject.job.cluster.devices if d not in devices]
        if layout.num_devices > len(devices):
            return
        into = self._unit(stage, layout, tuple(devices[: layout.num_devices]))
        self._perform(Merge(self.subject.op_id(), tuple(p.id for p in parents), into))

    @precondition(lambda self: self._able(Kind.EXTEND))
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Add a unit on devices the stage does not hold, if there are enough; else on held ones."""
        layout = self._layout(data)
        stage = self._stage(data, Kind.EXTEND)
        held = {d for unit in self.model.of(stage) for d in unit.devices}
        order = sorted(self.subject.job.cluster.devices, key=lambda d: (d in held, d))
        if layout.num_devices > len(order):
            return
        unit = self._unit(stage, layout, tuple(order[: layout.num_devices]))
        sources = tuple(u.id for u in self.model.of(stage))
        self._perform(Extend(self.subject.op_id(), sources, unit))

    @precondition(lambda self: self._able(Kind.DESTROY))
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        """End a unit, perhaps the last."""
        parent = self._parent(data, self._stage(data, Kind.DESTROY))
        self._perform(Destroy(self.subject.op_id(), parent.id))

    def _perform(self, op: Primitive) -> None:
        self.walk.append(str(op))
        try:
            wanted = apply(op, self.model)
        except PrimitiveError as refusal:
            try:
                self.subject.perform(op)
            except PrimitiveError as error:
                require(
                    isinstance(error, type(refusal)),
                    "I4 strong",
                    f"{op} raised {type(error).__name__}, should raise {type(refusal).__name__}",
                )
                return
            require(False, "I4 strong", f"{op} was accepted, should raise {refusal}")
            return
        self.subject.perform(op)
        self.model = wanted

    # --- What must hold -------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        """Require the specification's units, whole and with the state of the start (I1, I2, I4)."""
        if not hasattr(self, "model"):
            return
        done = self.walk[-1] if self.walk else "the launch"
        same_units(self.model, self.subject.units, done)
        partitioned(self.model, self.subject)
        for unit in self.model.values():
            same_state(self.start[unit.model_stage], self.subject.state(unit), done)
