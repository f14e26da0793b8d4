"""A port for somebody who is to listen a little later, in another process."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _BELOW = 10_000, 32_768
"""Ports below those that the kernel hands out (ip(7); its default begins at 32768): nobody gets one
by chance between this look and the listener's. The first is chosen, not measured."""
_UNPRIVILEGED = 1024
"""First port that any user may bind (ip(7))."""
_TRIES = 100
"""Ports that are looked at before the kernel is asked for one; chosen, not measured."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port at an address of this host that nobody listens on.

    Where there are none below those that the kernel hands out, the kernel is asked for one.

    Raises:
        OSError: the address is not of this host.
    """
    below = int(_RANGE.read_text(encoding="ascii").split()[0]) if _RANGE.exists() else _BELOW
    ports = range(max(_UNPRIVILEGED, min(_FIRST, below - 1000)), below)
    chosen = random.SystemRandom()  # a seeded program must not look for the same ports as its twin
    for port in chosen.sample(ports, min(_TRIES, len(ports))):
        with contextlib.closing(socket.socket()) as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((address, 0))
        found: int = probe.getsockname()[1]
        return found
