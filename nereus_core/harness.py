"""Harness: what a conformance run needs from an adapter's author, to look behind the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from numpy.typing import NDArray

from nereus_core.adapter import Adapter
from nereus_core.cluster import Device
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.units import UnitId
from nereus_core.workload import Algorithm, Job, ModelStage

# A logical tensor may have any element type: bf16 state is peeked as its 16-bit pattern.
Array = NDArray[Any]


class Tier(StrEnum):
    """How real the thing under test is."""

    CONTRACT = "contract"
    """Over the simulated world: no framework, seconds."""
    REAL = "real"
    """The actual framework, on CPU."""
    GPU = "gpu"
    """The actual framework on accelerators."""


class Fault(StrEnum):
    """What can go wrong while a primitive is performed."""

    KILL = "kill"
    """A device is gone, without notice."""
    HANG = "hang"
    """A device answers no more; without a device named, the primitive itself does not return."""
    REFUSE_MEMORY = "refuse memory"
    """An allocation is refused."""
    CORRUPT = "corrupt"
    """State of the primitive that is on its way arrives changed, if any is."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One RL step as the job itself saw it."""

    step: int
    losses: Mapping[str, float]
    """By trained model."""
    sample_ids: tuple[int, ...]
    """Prompts consumed, in the order of the global batch."""
    weight_version: Mapping[UnitId, int]
    """Version of the weights each generating unit served with."""
    grad_norms: Mapping[str, float]
    """Global gradient norm by trained model, before clipping."""


class Harness(Protocol):
    """A small job that can be launched again and again, and looked at from outside the adapter.

    The suite arranges through the harness, acts through the adapter, asserts through the harness.
    """

    tier: Tier

    def job(self, algorithm: Algorithm = "grpo") -> Job:
        """The job it can launch: one node of at least 4 devices; heads, layers and the global
        batch divisible by 4; at least 2 kv heads; layouts up to tp4, pp4 and dp4 are allowed.
        """  # noqa: D205  (one promise, too long for a line)
        ...

    def launch(self, job: Job, plan: Plan) -> Adapter:
        """Start that job under a plan, equal seeds each time, and attach the adapter.

        A launch ends the one before it; seats or processes may be reused.
        """
        ...

    def step(self) -> StepResult:
        """Run one RL step with a real loss."""
        ...

    def running(self, stage: ModelStage) -> AbstractContextManager[None]:
        """Hold one RL step in flight: entered once a step, run on a thread, stands inside `stage`.

        On leaving the step goes on, and the context exits when it has finished. What the step
        raises is raised there.
        """
        ...

    def disturb(self, unit: UnitId, tensor: str) -> None:
        """Add one to ``slot/tensor`` on every rank of one unit, bypassing the adapter."""
        ...

    def peek(self, unit: UnitId) -> Mapping[str, Array]:
        """Logical state of a unit, ``slot/tensor`` -> whole array, bypassing the adapter.

        Replicas inside the unit (norms under tp, tied embeddings under pp) are compared; a
        difference raises AssertionError naming the tensor and ranks.
        """
        ...

    def memory_bytes(self, device: Device) -> int:
        """State bytes resident on a device, from the device, bypassing the adapter."""
        ...

    def fail(self, device: Device) -> None:
        """Kill what runs there, without notice."""
        ...

    def fail_at(self, fault: Fault, op_index: int, phase: Phase, device: Device | None) -> None:
        """Let a fault strike once, as a phase begins; armed before a transition.

        Args:
            fault: What goes wrong.
            op_index: Of the primitive, in the order in which primitives begin from now on.
            phase: As it begins.
            device: Where; one that takes part in the primitive when None, where one is needed.
        """
        ...

    def close(self) -> None:
        """End everything it started."""
        ...
