"""SeatLine: calls to a pool's seats, whatever the seats are."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from nereus_adapters.torch.channel import Pending
from nereus_core.cluster import Device
from nereus_core.errors import SeatDead

CLOSE_S = 5.0
"""Longest wait for a seat to end by itself. Chosen, not measured."""


class SeatChannel(Protocol):
    """The driver's end of one seat."""

    @property
    def alive(self) -> bool:
        """Whether the seat still answers."""
        ...

    def call(self, method: str, **kwargs: object) -> Pending:
        """Send a call; a dead seat fails it at once."""
        ...

    def kill(self) -> None:
        """End the seat at once."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait until the end has been noticed."""
        ...

    def close(self, timeout_s: float) -> None:
        """Let the calls under way finish, then end the seat."""
        ...


_C = TypeVar("_C", bound=SeatChannel)


class SeatLine(Generic[_C]):
    """A channel per device. Thread-safe: the calls of several seats are put in line at once."""

    def __init__(self) -> None:
        self._channels: dict[Device, _C] = {}
        self._order = threading.RLock()

    @property
    def alive(self) -> frozenset[Device]:
        """Devices whose seat answers."""
        return frozenset(d for d, c in self._channels.items() if c.alive)

    def send(self, calls: Mapping[Device, tuple[str, Mapping[str, Any]]]) -> list[Pending]:
        """Put one call per device in line, in one go, in device order."""
        with self._order:
            return [
                self._channel(device, method).call(method, **kwargs)
                for device, (method, kwargs) in sorted(calls.items())
            ]

    def call(self, device: Device, method: str, **kwargs: Any) -> Pending:
        """Put one call in line."""
        return self.send({device: (method, kwargs)})[0]

    def kill(self, device: Device) -> None:
        """End a seat without notice, and wait until it is gone."""
        channel = self._channel(device, "kill")
        channel.kill()
        channel.join(CLOSE_S)

    def stop(self, device: Device) -> None:
        """Let a seat finish its calls and end."""
        self._channel(device, "stop").close(CLOSE_S)

    def _channel(self, device: Device, doing: str) -> _C:
        if device not in self._channels:
            raise SeatDead(device, None, doing)
        return self._channels[device]
