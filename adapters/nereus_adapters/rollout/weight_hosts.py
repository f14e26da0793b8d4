"""WeightHost: a process on a host whose memory has weights, as `delivery` knows it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from nereus_adapters.rollout.memory import HostMemory

DRIVER = "the driver"
"""Party of the driver's own process, where a trainer there publishes."""


class WeightHost(Protocol):
    """A process on a host that has a `HostMemory`."""

    def ask(self, method: str, /, *args: object) -> Future[Any]:
        """Run a method of its `HostMemory`; the future gets HostLost when it ends first."""
        ...


class WeightHosts(Protocol):
    """The hosts of a cluster."""

    def of(self, node: str) -> WeightHost:
        """Return the host of a node, started if it is not there.

        Raises:
            HostLost: there is no such node now.
        """
        ...

    def alive(self) -> Mapping[str, WeightHost]:
        """Return those that are there; another object for one that was started again."""
        ...


class OwnHost:
    """The driver's process as a host.

    Args:
        address: of the driver's host, as others reach it.
    """

    def __init__(self, address: str) -> None:
        self._memory = HostMemory(DRIVER, address)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="nereus weights")

    def ask(self, method: str, /, *args: object) -> Future[Any]:
        """Run a method of its `HostMemory` on a thread."""
        return self._threads.submit(getattr(self._memory, method), *args)

    def close(self) -> None:
        """Leave the group of hosts, and do not wait for it. Safe to call twice."""
        with suppress(RuntimeError):  # closed before
            self._threads.submit(self._memory.leave)
        self._threads.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class Home:
    """Whose memory a segment is."""

    node: str
    host: WeightHost
    """The process itself: one that is started in its place has other memory."""
