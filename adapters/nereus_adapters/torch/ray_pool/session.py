"""One connection of this process to a Ray cluster, shared by the pools that live on it."""

from __future__ import annotations

import logging
import os
import socket
import threading

import ray

from nereus_core.errors import ConfigError

logger = logging.getLogger(__name__)

_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
_NICE = {"worker_niceness": 0}
"""Of a Ray that is started here: its own 15 lets seats starve beside any other busy process."""
_ANSWER_S = 10.0
"""Longest wait for the head node to take a connection. Chosen, not measured."""


class Session:
    """Counts who uses the connection; the last one to leave ends it if it was made here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users, self._ours = 0, False

    def join(self, address: str | None, num_seats: int) -> None:
        """Connect, unless this process is connected already.

        Args:
            address: as `ray.init` takes it, ``local`` starts a cluster; None joins that of
                RAY_ADDRESS or of this machine, and starts one where this machine has none that
                lets it join.
            num_seats: where a cluster is started, it counts at least as many CPUs.

        Raises:
            ConfigError: no cluster answers there.
        """
        with self._lock:
            if not ray.is_initialized():
                self._connect(address, num_seats)
                self._ours = True
            self._users += 1

    def _connect(self, address: str | None, num_seats: int) -> None:
        address = address or os.environ.get("RAY_ADDRESS")
        if address == "local" or not self._joined(address):
            ray.init(
                address="local",
                num_cpus=max(num_seats, os.cpu_count() or 1),
                include_dashboard=False,
                _system_config=_NICE if "RAY_worker_niceness" not in os.environ else {},
                **_QUIET,
            )

    def _joined(self, address: str | None) -> bool:
        """Join a cluster; say whether there was one, where none was asked for."""
        try:
            if address is not None:
                _require_answer(address)
            ray.init(address=address or "auto", **_QUIET)
        except (OSError, RuntimeError, ValueError) as error:
            # What has begun to join keeps its reader of that cluster's state for the next.
            ray.shutdown()
            if address is not None:
                first = str(error).splitlines()[0]
                raise ConfigError("backend.address", f"{address!r}: {first}") from error
            if not isinstance(error, ConnectionError):
                why = " ".join(str(error).split())
                logger.warning("The Ray cluster of this machine is left alone: %s", why)
            return False
        return True

    def leave(self) -> None:
        """Disconnect, if nobody else is left and the connection is ours."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._ours:
                ray.shutdown()
                self._ours = False


def _require_answer(address: str) -> None:
    """Raise OSError unless something listens at ``host:port``: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()


SESSION = Session()
"""Ray keeps one connection per process, so there is one of these."""
