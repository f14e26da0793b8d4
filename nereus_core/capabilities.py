"""What an adapter declares it can do: one table that the planner obeys and the suite tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from packaging.version import Version

from nereus_core.primitives import Kind
from nereus_core.workload import Stage


class Feature(StrEnum):
    """Powers beyond the four primitives."""

    OPTIMIZER_STATE = "optimizer_state"
    """Adam moments and step count survive every primitive."""
    RNG_STATE = "rng_state"
    """Random state survives, so a changed run samples what the fixed run samples."""
    DATALOADER_STATE = "dataloader_state"
    """No sample is repeated or skipped across a transition."""
    FINGERPRINT = "fingerprint"
    """Layout-independent digests of logical state without gathering it."""
    CONCURRENT_PRIMITIVES = "concurrent_primitives"
    """Primitives on disjoint devices may overlap in time."""
    COLOCATED_STAGES = "colocated_stages"
    """Several model-stages may hold one device."""
    ASYNC_BOUNDARY = "async_boundary"
    """A boundary can open at weight synchronisation while generation goes on."""
    PARTIAL_ROLLOUT = "partial_rollout"
    """Requests in flight survive the end of their unit."""
    UNIT_LOSS = "unit_loss"
    """The loss of a device is noticed, named and survived from intact units."""
    MEMORY_PROBE = "memory_probe"
    """Peak bytes per device are measured."""
    EFFICIENCY_PROBE = "efficiency_probe"
    """Achieved efficiency per operation class is measured."""
    PIPELINE_STAGES = "pipeline_stages"
    """A unit may spread its layers over pipeline stages: layouts with pp > 1."""


class Level(StrEnum):
    """How far a capability goes."""

    FULL = "full"
    SINCE = "since"
    NOT_YET = "not_yet"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Support:
    """One entry of the table; built by `full`, `since`, `not_yet` and `unsupported`."""

    level: Level
    reason: str = ""
    version: str = ""
    tracking: str = ""

    def at(self, backend_version: str | None) -> bool:
        """Whether the capability holds with this version of the backend."""
        if self.level is Level.SINCE:
            return backend_version is not None and Version(backend_version) >= Version(self.version)
        return self.level is Level.FULL


def full() -> Support:
    """It works; the suite's case must pass."""
    return Support(Level.FULL)


def since(version: str) -> Support:
    """It works from this backend version on; below, it counts as unsupported."""
    return Support(Level.SINCE, version=version, reason=f"needs backend version {version}")


def not_yet(reason: str, *, tracking: str) -> Support:
    """It could work and does not; the case is a strict xfail, so a pass must be declared."""
    return Support(Level.NOT_YET, reason=reason, tracking=tracking)


def unsupported(reason: str) -> Support:
    """It cannot work; the refusal is tested instead."""
    return Support(Level.UNSUPPORTED, reason=reason)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Primitives by stage kind, and features. Silence is not an answer: every entry is required."""

    split: Mapping[Stage, Support]
    merge: Mapping[Stage, Support]
    extend: Mapping[Stage, Support]
    destroy: Mapping[Stage, Support]
    features: Mapping[Feature, Support] = field(default_factory=dict)

    def of(self, kind: Kind, stage: Stage) -> Support | None:
        """Return the entry for a primitive on a kind of stage, None where it is missing."""
        table: Mapping[Stage, Support] = getattr(self, kind.value)
        return table.get(stage)

    def missing(self) -> Iterator[str]:
        """Name every entry that was left out."""
        for kind in Kind:
            for stage in Stage:
                if self.of(kind, stage) is None:
                    yield f"{kind}/{stage}"
        for feature in Feature:
            if feature not in self.features:
                yield feature.value

    @classmethod
    def everything(cls) -> Capabilities:
        """Return a table in which all is `full`; narrow it with dataclasses.replace."""
        every = {stage: full() for stage in Stage}
        return cls(every, every, every, every, {f: full() for f in Feature})
