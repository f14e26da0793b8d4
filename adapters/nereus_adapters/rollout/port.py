"""A port for somebody who is to listen a little later, in another process."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _BELOW = 10_000, 32_768
"""Ports below those that the kernel hands out (ip(7); its default begins at 32768): nobody gets one
by chance between this look and the listener's. The first is chosen, not measured."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port at an address of this host that nobody listens on."""
    below = int(_RANGE.read_text(encoding="ascii").split()[0]) if _RANGE.exists() else _BELOW
    first = min(_FIRST, below - 1000)
    chosen = random.SystemRandom()  # a seeded program must not look for the same ports as its twin
    while True:
        port = chosen.randrange(first, below)
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
