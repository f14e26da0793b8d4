"""One connection of this process to a Ray cluster, shared by the pools that live on it."""

from __future__ import annotations

import logging
import os
import socket
import threading

import ray

from nereus_core.errors import ConfigError

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
            address: as `ray.init` takes it; None joins the cluster of RAY_ADDRESS or of this
                machine, and starts one where there is none.
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
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address is not None:
                _require_answer(address)
            ray.init(address=address or "auto", **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            if address is not None:
                first = str(error).splitlines()[0]
                raise ConfigError("backend.address", f"{address!r}: {first}") from error
            num_cpus = max(num_seats, os.cpu_count() or 1)
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                _system_config=_NICE if "RAY_worker_niceness" not in os.environ else {},
                **quiet,
            )

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
