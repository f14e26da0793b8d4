"""The Adapter protocol: how the core speaks to one framework, and the values that pass between."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nereus_core.capabilities import Capabilities
from nereus_core.cluster import Device
from nereus_core.observation import Observation
from nereus_core.phases import PhaseHook
from nereus_core.plan import Plan
from nereus_core.primitives import Destroy, Extend, Merge, OpId, Split
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a primitive did. The same op_id gives the same receipt and does nothing again (I5)."""

    op_id: OpId
    created: tuple[Unit, ...]
    ended: tuple[UnitId, ...]
    acquired: frozenset[Device]
    released: frozenset[Device]
    moved_bytes: int
    """Tensor bytes that crossed between devices; equals the routes' lower bound."""
    kept_bytes: int
    """Tensor bytes that stayed on their device."""
    elapsed_s: float
    """Wall seconds on the driver."""
    peak_bytes: Mapping[Device, int]
    """Most state bytes resident at once per device that took part; empty where not measured."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Layout-independent digests of a unit's logical state: ``slot/tensor`` -> hex digest."""

    unit: UnitId
    tensors: Mapping[str, str]
    steps: Mapping[str, int]
    """Counters that are state too: optimizer step, scheduler step, weight version ..."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A safe boundary that is open: the stages it holds are idle until it closes."""

    stages: frozenset[ModelStage]
    step: int
    """RL steps completed when it opened."""


@runtime_checkable
class Capable(Protocol):
    """An adapter that can do other things with this job than it declares of all jobs."""

    capabilities: Capabilities


@runtime_checkable
class Adapter(Protocol):
    """Translates the four primitives into one framework's calls.

    All methods are called on the driver process; fanning out to ranks is the adapter's business.
    A transition is always this sequence:

    1. observe        after every step
    2. boundary       entered once; the named stages are idle from here until it exits
    3. split, merge,  from worker threads, in graph order; two calls run at once only when the
       extend,        devices they touch (`primitives.touched`) are disjoint
       destroy
    4. relink         once, after the graph has drained
    5. boundary exit  the job resumes, also after an error

    Invariants:
        I1  devices    Every device of a stage belongs to exactly one unit.
        I2  state      Parameters, moments, RNG and step count are bit-identical across primitives.
        I3  uniform    When the graph has drained, all units of a model-stage have one layout.
        I4  strong     A primitive completes, or raises and leaves units() as it was, or raises
                       UnitLost naming what is gone.
        I5  once       The same op_id again returns the same Receipt and does nothing.
        I6  disjoint   Primitives on disjoint devices commute and may overlap.
        I7  released   destroy returns after the memory is free, measured on the device.
        I8  boundary   A primitive outside a boundary raises NotAtBoundary and does nothing.
        I9  quiet      job, units and observe never synchronise a device.
        I10 semantics  Global batch, sample order and loss are those of the fixed layout.
        I11 version    A generating unit never serves older weights than its source.
        I12 resume     Leaving a boundary, by success or error, leaves a job that can step.
        I13 phases     A primitive prepares, transfers, verifies, commits and releases, in that
                       order, and says so; what is raised as one of the first four begins leaves
                       everything as it was.
    """

    name: str

    def job(self) -> Job:
        """Static facts; its cluster marks failed devices, and may come to list more of them.

        Touches no device.
        """
        ...

    def units(self) -> UnitMap:
        """Units alive now, read from the framework and not from a cache."""
        ...

    def observe(self) -> Observation:
        """Drain what was seen since the last call. Never blocks a running step."""
        ...

    def boundary(
        self, stages: Collection[ModelStage], *, timeout_s: float
    ) -> AbstractContextManager[Boundary]:
        """Wait for the safe boundary, then hold the named stages and no other.

        Raises:
            BoundaryTimeout: a stage was still running; names it.
            NotAtBoundary: a boundary is already open (they do not nest).
        """
        ...

    def split(self, op: Split) -> Receipt:
        """One unit -> units of smaller layout on the parent's own devices."""
        ...

    def merge(self, op: Merge) -> Receipt:
        """Identical units -> one of larger layout; raises Diverged when they differ."""
        ...

    def extend(self, op: Extend) -> Receipt:
        """A new unit on newly acquired devices, state copied; the sources stay undisturbed."""
        ...

    def destroy(self, op: Destroy) -> Receipt:
        """End a unit; return only when its memory is free. Raises LastUnit."""
        ...

    def watch(self, on_phase: PhaseHook | None) -> None:
        """Tell ``on_phase`` from now on as each phase of a primitive begins; None ends that.

        `Ledger.watch` does it, where the code that performs a primitive says `enter`.
        """
        ...

    def relink(self, plan: Plan) -> None:
        """Rebuild data-parallel groups, batch partition and rollout routing for the new units.

        This is the transition's epoch switch: what the job steps on changes here, all at once. A
        second call with the same plan changes nothing. An adapter whose switch can fail half-way,
        and that can take it back, raises TransitionFailed with ``rolled_back``: units() is then
        what it was before the transition, and the job steps on it.
        """
        ...

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        """Digest logical state, independent of layout, without gathering it."""
        ...

    def close(self) -> None:
        """Release what the adapter itself holds; the job goes on."""
        ...
