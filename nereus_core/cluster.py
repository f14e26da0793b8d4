"""What hardware there is, and what of it is healthy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self


class Device(NamedTuple):
    """A physical accelerator, or a CPU slot that stands for one; written ``node:index``.

    A tuple, because a plan on a thousand devices hashes and compares them by the ten thousand.
    """

    node: str
    """Host the device sits in."""
    index: int  # type: ignore[assignment]  # nobody looks for a value in a device
    """Position inside the host, from 0."""

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read back what ``str(device)`` wrote; raises ValueError on anything else."""
        node, _, index = text.rpartition(":")
        if not node or not index.isdigit():
            raise ValueError(f"not a device: {text!r}; expected 'node:index', e.g. 'node0:3'")
        return cls(node, int(index))


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Peak rates of one kind of device; every number carries its source."""

    name: str
    peak_flops_per_s: float
    """Dense matrix peak in the job's compute precision, without sparsity."""
    memory_bytes: int
    memory_bytes_per_s: float
    """Peak bandwidth of device memory."""
    launch_s: float
    """Fixed cost of starting one kernel (on CPU: one operator)."""
    host_bytes_per_s: float
    """Peak bandwidth between a device and the memory of its host, per direction."""
    source: str
    """Datasheet, measurement, or 'chosen, not measured'."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A kind of link between devices: the alpha-beta model of a message."""

    name: str
    bytes_per_s: float
    """Peak bandwidth per device and direction."""
    latency_s: float
    """Seconds before the first byte arrives."""
    source: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices a job may use: homogeneous, grouped in nodes, some perhaps failed."""

    devices: tuple[Device, ...]
    device_spec: DeviceSpec
    intra_node: LinkSpec
    inter_node: LinkSpec
    failed: frozenset[Device] = field(default_factory=frozenset)

    @classmethod
    def homogeneous(
        cls,
        num_nodes: int,
        devices_per_node: int,
        spec: DeviceSpec,
        intra: LinkSpec,
        inter: LinkSpec,
    ) -> Self:
        """Build ``num_nodes`` equal nodes named ``node0`` ...

        >>> from nereus_core.device_specs import CPU_SEAT, LOOPBACK
        >>> [str(d) for d in Cluster.homogeneous(1, 2, CPU_SEAT, LOOPBACK, LOOPBACK).devices]
        ['node0:0', 'node0:1']
        """
        devices = tuple(
            Device(f"node{n}", i) for n in range(num_nodes) for i in range(devices_per_node)
        )
        return cls(devices, spec, intra, inter)

    @property
    def healthy(self) -> tuple[Device, ...]:
        """Devices that have not failed, in cluster order."""
        if not self.failed:
            return self.devices
        return tuple(d for d in self.devices if d not in self.failed)

    def without(self, lost: Iterable[Device]) -> Self:
        """Mark devices as failed."""
        return replace(self, failed=self.failed | frozenset(lost))

    def with_back(self, returned: Iterable[Device]) -> Self:
        """Mark devices as healthy again."""
        return replace(self, failed=self.failed - frozenset(returned))

    def link(self, devices: Collection[Device]) -> LinkSpec:
        """Return the slowest kind of link that a group of devices has to cross."""
        return self.intra_node if len({d.node for d in devices}) <= 1 else self.inter_node

    def nodes(self) -> dict[str, tuple[Device, ...]]:
        """Healthy devices by node, both in cluster order."""
        grouped: dict[str, list[Device]] = {}
        for device in self.healthy:
            grouped.setdefault(device.node, []).append(device)
        return {node: tuple(members) for node, members in grouped.items()}
