"""LedgerAdapter: the half of an adapter that is alike for every framework."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nereus_core.adapter import Receipt
from nereus_core.errors import PlanError, UnitLost
from nereus_core.ledger import Done, Fault, Ledger, Standing
from nereus_core.phases import Enter, PhaseHook
from nereus_core.plan import Placement, Plan, check_plan
from nereus_core.primitives import Destroy, Extend, Merge, Primitive, Split
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job


class LedgerAdapter(ABC):
    """Primitives that go through a ledger; a subclass reads its framework and does one of them.

    A subclass implements the rest of `nereus_core.adapter.Adapter`: ``job``, ``units``,
    ``observe``, ``fingerprint``, ``boundary`` and ``relink``.

    Args:
        ledger: the adapter's own.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.fault: Fault | None = None
        """Called as each phase of a primitive begins, after whoever watches: for a harness.

        What it raises counts as what a `PhaseHook` raises.
        """

    @abstractmethod
    def _standing(self) -> Standing:
        """Say how the job stands now."""

    @abstractmethod
    def _do(self, op: Primitive, units: UnitMap, enter: Enter) -> Done:
        """Do a primitive that the ledger admits: as `Ledger.perform` says of ``do``."""

    def split(self, op: Split) -> Receipt:
        """One unit becomes smaller ones on its own devices."""
        return self.perform(op)

    def merge(self, op: Merge) -> Receipt:
        """Identical units become one; raises Diverged when they differ."""
        return self.perform(op)

    def extend(self, op: Extend) -> Receipt:
        """A new unit gets its state from others, or from where its model came from."""
        return self.perform(op)

    def destroy(self, op: Destroy) -> Receipt:
        """A unit ends; parked, its state goes to host memory."""
        return self.perform(op)

    def perform(self, op: Primitive) -> Receipt:
        """Perform any primitive; raises what `Ledger.perform` does."""
        return self._ledger.perform(op, self._standing, self._do, self.fault)

    def watch(self, on_phase: PhaseHook | None) -> None:
        """Tell ``on_phase`` from now on as each phase of a primitive begins."""
        self._ledger.watch(on_phase)

    def close(self) -> None:  # noqa: B027  (most adapters hold nothing)
        """Hold nothing: the job is not the adapter's."""


def alive(unit: UnitId, units: UnitMap) -> Unit:
    """Return a unit; raises UnitLost when it is not among those alive."""
    if unit not in units:
        raise UnitLost([unit], tuple(units), "it is not alive")
    return units[unit]


def require_plan(plan: Plan, job: Job, units: UnitMap) -> None:
    """Raise PlanError unless a plan is valid and the units alive are its own."""
    check_plan(plan, job)
    for stage, placement in plan.items():
        there = units.of(stage)
        wanted = sorted((placement.layout, devices) for devices in placement.units)
        if sorted((u.layout, u.devices) for u in there) != wanted:
            spelled = ", ".join(map(str, there)) or "no unit"
            raise PlanError([f"{stage}: {spelled} alive, the plan says {_spelled(placement)}"])


def _spelled(placement: Placement) -> str:
    return f"{placement} on {[list(map(str, unit)) for unit in placement.units]}"
