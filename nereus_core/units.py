"""The Elastic Model Unit: one replica of a model-stage, its layout and state sealed inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self

from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.workload import ModelStage


class UnitId(NamedTuple):
    """Names a unit, written ``actor/train#0``; never reused within a job."""

    model_stage: ModelStage
    serial: int

    def __str__(self) -> str:
        return f"{self.model_stage}#{self.serial}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read back what ``str`` wrote; raises ValueError on anything else."""
        stage, separator, serial = text.rpartition("#")
        if not separator or not serial.isdigit():
            raise ValueError(f"not a unit: {text!r}; expected e.g. 'actor/train#0'")
        return cls(ModelStage.parse(stage), int(serial))


@dataclass(frozen=True, slots=True)
class Unit:
    """One replica of a model-stage; ``devices`` are in order of local rank."""

    id: UnitId
    layout: Layout
    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.layout.num_devices:
            raise ValueError(
                f"{self.id}: {self.layout} takes {self.layout.num_devices} devices, "
                f"got {len(self.devices)}"
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"{self.id}: a device is listed twice: {list(map(str, self.devices))}")

    def __str__(self) -> str:
        return f"{self.id}({self.layout} on {','.join(map(str, self.devices))})"

    @property
    def model_stage(self) -> ModelStage:
        """The model-stage this is a replica of."""
        return self.id.model_stage


class UnitMap(Mapping[UnitId, Unit]):
    """The units alive at one moment: immutable, ordered by id. DP of a stage is its unit count."""

    __slots__ = ("_stages", "_units")

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        ordered = sorted(units, key=lambda u: u.id)
        self._units = {u.id: u for u in ordered}
        self._stages: dict[ModelStage, tuple[Unit, ...]] | None = None
        """Units by model-stage, once somebody has asked."""
        if len(self._units) != len(ordered):
            raise ValueError("two units have one id")

    def __getitem__(self, unit: UnitId) -> Unit:
        return self._units[unit]

    def __iter__(self) -> Iterator[UnitId]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def __hash__(self) -> int:
        return hash(tuple(self._units.values()))

    def __repr__(self) -> str:
        return f"UnitMap({', '.join(map(str, self._units.values()))})"

    def of(self, model_stage: ModelStage) -> tuple[Unit, ...]:
        """Units of a model-stage, by id: also the order in which they take slices of a batch."""
        return self._by_stage().get(model_stage, ())

    def stages(self) -> tuple[ModelStage, ...]:
        """Model-stages that have a unit, sorted."""
        return tuple(self._by_stage())

    def on(self, device: Device) -> tuple[Unit, ...]:
        """Units that hold a device."""
        return tuple(u for u in self._units.values() if device in u.devices)

    def intact(self, lost: Iterable[Device]) -> UnitMap:
        """Units none of whose devices is among ``lost``."""
        gone = set(lost)
        return UnitMap(u for u in self._units.values() if gone.isdisjoint(u.devices))

    def replace(self, ended: Iterable[UnitId], created: Iterable[Unit]) -> UnitMap:
        """Return the map without ``ended`` and with ``created``."""
        gone = set(ended)
        kept = (u for u in self._units.values() if u.id not in gone)
        return UnitMap([*kept, *created])

    def next_serial(self, model_stage: ModelStage) -> int:
        """Return a serial that no unit alive has."""
        own = self.of(model_stage)
        return own[-1].id.serial + 1 if own else 0

    def _by_stage(self) -> dict[ModelStage, tuple[Unit, ...]]:
        if self._stages is None:
            grouped = groupby(self._units.values(), key=lambda u: u.id.model_stage)
            self._stages = {stage: tuple(units) for stage, units in grouped}
        return self._stages
